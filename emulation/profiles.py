"""Profiles name memory devices and their latency and bandwidth, read from YAML and checked."""

from __future__ import annotations

import os
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cxlkv.errors import BadArgumentError
from cxlkv.machine.state import state_folder, write_whole
from cxlkv.numbers import is_real

OURS = Path(__file__).with_name("profiles.yaml")
FILE_BYTES_MAX = 1 << 20
MIXED_SHARE = 1 / 3
"""Share of writes in mixed_gb_per_s: what Intel MLC and `cxlkv bench memory` call 2:1."""
WAIT_SHARE = 0.1
"""Share of the idle latency that one unit of u / (1 - u) adds without a curve. The two
published curves rise by about so much up to a utilization u of 0.88."""
UTILIZATION_MAX = 0.98
"""At more than this a queue has no steady length: latency is taken as it is here."""

_Amount = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
_Point = Annotated[tuple[_Amount, _Amount], Field(strict=False)]  # YAML has lists only


class Profile(BaseModel):
    """A device behind its link. Bandwidth in GB/s (10**9), as the whole link gives it.

    mixed: of two bytes read for one written; read, write: of one of them alone. loaded: (GB/s, ns),
    the latency of a line while others move so much. per_device: what one device gives, where
    several are striped; per_switch: what all devices behind one switch give together.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    what: str
    source: str
    standing: Literal["measured", "secondhand", "assumed"]
    latency_ns: _Amount
    read_gb_per_s: _Amount
    write_gb_per_s: _Amount | None = None
    mixed_gb_per_s: _Amount | None = None
    loaded: Annotated[tuple[_Point, ...], Field(strict=False)] = ()
    per_device_gb_per_s: _Amount | None = None
    per_switch_gb_per_s: _Amount | None = None

    @model_validator(mode="after")
    def _check_curve(self) -> Profile:
        points = [(0.0, self.latency_ns), *self.loaded]
        for (load, latency), (more, later) in pairwise(points):
            if more <= load:
                raise ValueError(f"loaded: {more:g} GB/s comes after {load:g}: rising loads")
            if later < latency:
                raise ValueError(
                    f"loaded: {later:g} ns at {more:g} GB/s is less than {latency:g} ns at "
                    f"{load:g} GB/s: latency does not fall under load"
                )
        peak = max(self.read_gb_per_s, self.write, self.mixed)
        if points[-1][0] > 1.001 * peak:
            raise ValueError(
                f"loaded: {points[-1][0]:g} GB/s is more than the link gives ({peak:g})"
            )
        return self

    @property
    def write(self) -> float:
        """GB/s of writes alone; as of reads where the profile does not say."""
        return self.write_gb_per_s or self.read_gb_per_s

    @property
    def mixed(self) -> float:
        """GB/s of two reads for a write; where the profile does not say, taking turns."""
        return self.mixed_gb_per_s or 3 / (2 / self.read_gb_per_s + 1 / self.write)

    def gb_per_s(self, write_share: float, devices: int = 1) -> float:
        """What the link gives, all streams together, when so much of the bytes are writes.

        Time for each byte runs straight from reads alone to MIXED_SHARE, and on to writes alone.
        """
        read, mixed, write = 1 / self.read_gb_per_s, 1 / self.mixed, 1 / self.write
        if write_share <= MIXED_SHARE:
            cost = read + (mixed - read) * write_share / MIXED_SHARE
        else:
            cost = mixed + (write - mixed) * (write_share - MIXED_SHARE) / (1 - MIXED_SHARE)
        limits = [1 / cost]
        if self.per_device_gb_per_s is not None:
            limits.append(devices * self.per_device_gb_per_s)
        if self.per_switch_gb_per_s is not None:
            limits.append(self.per_switch_gb_per_s)
        return min(limits)

    def latency_ns_at(self, load_gb_per_s: float) -> float:
        """Latency of a line while others move so much.

        Straight lines between the points of the curve, from idle at 0. Beyond the last point, or
        without any, a queue as of M/M/1, whose wait is in proportion to u / (1 - u), through the
        last point; u is the load's share of what reads get, at most UTILIZATION_MAX.
        """
        points = [(0.0, self.latency_ns), *self.loaded]
        for (load, latency), (more, later) in pairwise(points):
            if load_gb_per_s <= more:
                part = (max(load_gb_per_s, 0.0) - load) / (more - load)
                return latency + (later - latency) * part
        last, latency = points[-1]
        u = _queue(load_gb_per_s / self.read_gb_per_s)
        if not self.loaded:
            return self.latency_ns * (1 + WAIT_SHARE * u)
        known = _queue(last / self.read_gb_per_s)
        return self.latency_ns + (latency - self.latency_ns) * max(1.0, u / known)

    def slowed(self, factor: float) -> Profile:
        """The same device, everything `factor` times as slow."""
        wrong = f"slow={factor!r:.40}: how many times as slow, more than 0, to a device that can be"
        if not is_real(factor) or factor == 0:
            raise BadArgumentError(wrong)
        if factor == 1:
            return self
        numbers: dict[str, object] = self.model_dump(exclude_none=True)
        for name, value in numbers.items():
            if name.endswith("gb_per_s") and isinstance(value, float):
                numbers[name] = value / factor
        numbers["latency_ns"] = self.latency_ns * factor
        numbers["loaded"] = [(load / factor, ns * factor) for load, ns in self.loaded]
        try:
            return Profile.model_validate(numbers)
        except ValidationError:  # of numbers that no device has
            raise BadArgumentError(wrong) from None


def _queue(utilization: float) -> float:
    u = min(max(utilization, 0.0), UTILIZATION_MAX)
    return u / (1 - u)


def own_path() -> Path:
    """Where `cxlkv tune --profile` writes what it measured."""
    return state_folder() / "profiles.yaml"


def named(text: str) -> tuple[str, Profile]:
    """(name, profile) of "NAME", of the project's profiles or the user's own, or of "FILE.yaml" or
    "FILE.yaml:NAME", of that file. Raises BadArgumentError, which names the profiles there are."""
    path, separator, name = text.rpartition(":")
    if not separator and text.endswith((".yaml", ".yml")):
        path, name = text, ""
    if path:
        found = read(Path(path).expanduser())
        if not name and len(found) == 1:
            name = next(iter(found))
        where = path
    else:
        name, found, where = text, read(OURS), "the project's"
        if own_path().exists():
            found = {**read(own_path()), **found}
            where = f"the project's and {own_path()}"
    if name not in found:
        near = get_close_matches(name, found, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        what = f"no profile {name!r}{meant}" if name else "which profile? Write FILE.yaml:NAME"
        raise BadArgumentError(f"{what}; there are, in {where}: {', '.join(found)}")
    return name, found[name]


def read(path: str | os.PathLike[str]) -> dict[str, Profile]:
    """All profiles of a file. Raises BadArgumentError, which names file, profile and key."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise BadArgumentError(f"{path}: larger than {FILE_BYTES_MAX} bytes: no profiles")
        text = data.decode("utf-8-sig")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise BadArgumentError(f"{path}: aliases (*) are not read: write the value twice")
        found = yaml.safe_load(text)
    except OSError as error:
        raise BadArgumentError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadArgumentError(f"{path}: not text in UTF-8, so no YAML") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, BadArgumentError):
            raise
        reason = " ".join(str(error).split())
        raise BadArgumentError(f"{path}: no YAML: {reason[:200]}") from None
    profiles = found.get("profiles") if isinstance(found, dict) else None
    if not isinstance(profiles, dict) or not profiles or set(found) != {"profiles"}:
        raise BadArgumentError(f"{path}: one key, profiles, with a profile for each name")
    return {_name(path, name): _profile(path, name, one) for name, one in profiles.items()}


def _name(path: str | os.PathLike[str], name: object) -> str:
    """A name must come through "NAME, MODE" and FILE:NAME as it is."""
    if not isinstance(name, str) or not name or set(name) & set(":,/ \n"):
        raise BadArgumentError(
            f"{path}: {str(name)[:60]!r} is no profile's name: a word without : , or /"
        )
    return name


def _profile(path: str | os.PathLike[str], name: str, found: object) -> Profile:
    try:
        return Profile.model_validate(found)
    except ValidationError as error:
        lines = []
        for one in error.errors(include_url=False):
            key = ".".join(map(str, ("profiles", name, *one["loc"])))
            what = one["msg"].removeprefix("Value error, ")
            if one["type"] == "extra_forbidden":
                what = f"unknown key; known are {', '.join(Profile.model_fields)}"
            elif one["type"] != "missing" and not isinstance(one["input"], dict):
                what += f", not {str(one['input'])[:60]}"
            lines.append(f"{path}: {key}: {what}")
        raise BadArgumentError("\n".join(lines)) from None


def check_new(path: Path, name: str) -> dict[str, Profile]:
    """The profiles that the file has so far. Raises BadArgumentError for a file that cannot be
    read, and for a name that is none, or one of the project's."""
    _name(path, name)
    if name in read(OURS):
        raise BadArgumentError(f"{name} is one of the project's profiles: take another name")
    return read(path) if path.exists() else {}


def write(path: Path, name: str, profile: Profile) -> None:
    """Put one profile into a file beside those that are there. Raises as check_new(), OSError."""
    all_of_them = {**check_new(path, name), name: profile}
    plain = {
        key: one.model_dump(mode="json", exclude_none=True) for key, one in all_of_them.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, yaml.safe_dump({"profiles": plain}, sort_keys=False))
