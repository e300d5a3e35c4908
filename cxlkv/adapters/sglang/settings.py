"""What a user may write as "cxlkv" in SGLang's --hicache-storage-backend-extra-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from cxlkv.config import parse_bytes
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.regions import ALL

WHERE = "/dev/shm/"
PLACE = "--hicache-storage-backend-extra-config: cxlkv"
TESTED = "0.5.23"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """where: a folder, in which each model gets a file of its own, or the path of one pool, as
    CXLPool.create takes it; all ranks and engines on a machine share it. capacity: of the pool, if
    it is to be made; None: a share of the memory that this container may use. salt: keeps tenants
    apart.
    """

    where: str = WHERE
    capacity: str | int | None = None
    salt: str = ""


def read_settings(extra_config: Mapping[str, object] | None) -> Settings:
    """Of SGLang's mapping the part that is ours. Raises BadArgumentError, which names the key."""
    given = (extra_config or {}).get("cxlkv", {})
    if not isinstance(given, Mapping):
        raise BadArgumentError(f"{PLACE} is {given!r}: keys and values are wanted")
    known = [one.name for one in fields(Settings)]
    for name in given:
        if name not in known:
            close = get_close_matches(str(name), known, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise BadArgumentError(f"{PLACE}: {name!r} is not one of {', '.join(known)}{meant}")
    for name in ("where", "salt"):
        if not isinstance(given.get(name, ""), str):
            raise BadArgumentError(f"{PLACE}: {name} is {given[name]!r}: text is wanted")
    capacity = given.get("capacity")
    if isinstance(capacity, bool) or not isinstance(capacity, (int, str, type(None))):
        raise BadArgumentError(f"{PLACE}: capacity is {capacity!r}: text like 8GiB is wanted")
    if capacity is not None and capacity != ALL:
        parse_bytes(capacity)
    return Settings(**given)


def check_version(version: str) -> None:
    """Raises UnsupportedError outside of what was tested; its interface changes with each minor."""
    if version.split(".")[:2] != TESTED.split(".")[:2]:
        raise UnsupportedError(
            f"sglang {version}: this adapter was tested with {TESTED} and serves 0.5.x only. "
            f"Install sglang=={TESTED}, or a newer cxlkv"
        )
