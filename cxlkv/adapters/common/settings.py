"""Engines' settings are read by one parser, with one error text.

Every setting has a rule: a function of what an error begins with, and the value; it returns what
the settings hold, or raises BadArgumentError, which names the key and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TypeVar

from cxlkv.config import read_yaml
from cxlkv.errors import BadArgumentError
from cxlkv.layout import parse_bytes
from cxlkv.machine.coherence import (
    AUTO,
    HOSTS_MAX,
    LEASE_MAX_S,
    LEASE_S,
    SHARING,
    named_host,
)
from cxlkv.machine.huge_pages import HUGE
from cxlkv.machine.regions import ALL
from cxlkv.tiers.cold_mooncake import is_mooncake
from cxlkv.tiers.compress import COMPRESS
from cxlkv.tiers.policy import DEFAULT, POLICIES
from cxlkv.tiers.remote import parse_remote

COST = "cost"
"""A policy that needs figures of this machine, which settings do not carry."""

Rule = Callable[[str, object], object]


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """where: a folder, in which each model (and, where each has its own pool, each rank) gets a
    file, or the path of one pool, as CXLPool.create takes it. capacity: of what an engine's ranks
    store together, if it is to be made; None: a share of the memory that this container may use.
    salt: keeps tenants apart. sharing, hosts, host, lease_s: as in CXLPool.create, where engines on
    several hosts use the pool; all processes of an engine on one machine are one host.

    cold: where pages go that make room: a folder on a disk of this machine, in which each pool gets
    a file, the path of one file, or "mooncake://HOST:PORT". cold_capacity: of all ranks' files
    together, or what each process lends the store. compress, policy: as in Tiers.

    remote: pools that other machines serve, where prefixes are looked for that the pool and the
    cold tier lack: tcp://HOST:PORT of one, or of each of an engine's ranks. remote_secret: a file.

    huge: huge pages, as in CXLPool.create.

    config: the path of a YAML file with any of these, for what is not written beside it.
    """

    where: str = "/dev/shm/"
    capacity: str | int | None = None
    salt: str = ""
    sharing: str = "host"
    hosts: int | None = None
    host: int | str | None = None
    lease_s: float = LEASE_S
    cold: str | None = None
    cold_capacity: str | int | None = None
    compress: str | None = None
    policy: str = DEFAULT
    remote: tuple[str, ...] = ()
    remote_secret: str | None = None
    huge: str = "try"
    config: str | None = None

    @property
    def as_host(self) -> int | str | None:
        """The number to open the pool with; "auto" for a shared pool if no number was given."""
        named = named_host(self.host)
        return AUTO if named is None and self.sharing != "host" else named


UNSHARED = PoolSettings()
"""Of pools that one host uses."""

Settings = TypeVar("Settings", bound=PoolSettings)


def read(
    kind: type[Settings],
    given: Mapping[str, object],
    place: str,
    rules: Mapping[str, Rule] | None = None,
    prefix: str = "",
) -> Settings:
    """place: where the engine's user writes them, each with the prefix before its name. rules: of
    what `kind` has beyond PoolSettings."""
    known = [one.name for one in fields(kind)]
    every = {**POOL_RULES, **(rules or {})}
    found = _parsed(given, place, known, every, prefix)
    if path := found.get("config"):
        inside = [name for name in known if name != "config"]
        found = {**_parsed(read_yaml(str(path)), str(path), inside, every), **found}
    made = kind(**found)  # type: ignore[arg-type]
    _check_cold(made, place, prefix)
    if bool(made.remote) != (made.remote_secret is not None):
        lacks, has = ("remote_secret", "remote") if made.remote else ("remote", "remote_secret")
        raise BadArgumentError(
            f"{place}: {prefix}{has} needs {prefix}{lacks}: the address of a `cxlkv serve`, and "
            "the file with its secret, of mode 0600"
        )
    if made.sharing == "host" and (made.hosts or made.host is not None):
        other = "hosts" if made.hosts else "host"
        raise BadArgumentError(
            f'{place}: {prefix}{other} is for a pool that hosts share: add "{prefix}sharing": '
            '"software", or "hw_coherent" where the hardware keeps their caches coherent'
        )
    return made


def refuse_remote(made: PoolSettings, place: str, prefix: str = "") -> None:
    """Of engines that keep whole blocks as objects, which no server hands out."""
    if made.remote:
        raise BadArgumentError(
            f"{place}: {prefix}remote is for vLLM: this engine keeps its blocks as objects, and a "
            f"pool of objects is not served to other machines. Leave it out, or share the pool "
            f'("{prefix}sharing") or a store ("{prefix}cold": "mooncake://HOST:PORT")'
        )


def _parsed(
    given: Mapping[str, object],
    place: str,
    known: Sequence[str],
    rules: Mapping[str, Rule],
    prefix: str = "",
) -> dict[str, object]:
    """What was given, by name, as the rules make it."""
    words = [prefix + name for name in known]
    found: dict[str, object] = {}
    for name, value in given.items():
        if name not in words:
            close = get_close_matches(str(name).lower(), words, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise BadArgumentError(f"{place}: {name!r} is not one of {', '.join(words)}{meant}")
        own = name.removeprefix(prefix)
        found[own] = rules[own](f"{place}: {name} is {value!r}", value)
    return found


def _check_cold(made: PoolSettings, place: str, prefix: str) -> None:
    remote = is_mooncake(made.cold)
    if made.cold is None:
        for name in ("cold_capacity", "compress"):
            if getattr(made, name) is not None:
                raise BadArgumentError(f"{place}: {prefix}{name} goes with {prefix}cold: add it")
    elif made.cold_capacity is None and not remote:
        raise BadArgumentError(
            f"{place}: {prefix}cold needs {prefix}cold_capacity, of its files together, like "
            "200GiB: they are reserved on the disk at the start"
        )
    elif made.compress is not None and remote:
        raise BadArgumentError(f"{place}: {prefix}compress goes with files, not with {made.cold}")


def text(said: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadArgumentError(f"{said}: text is wanted")
    return value


def addresses(said: str, value: object) -> tuple[str, ...]:
    """One, or a list of them."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found) or not found:
        raise BadArgumentError(f"{said}: text like tcp://HOST:PORT is wanted, or a list of such")
    for one in found:
        try:
            parse_remote(one)
        except BadArgumentError as error:
            raise BadArgumentError(f"{said}: {error}") from error
    return tuple(found)


def location(said: str, value: object) -> str:
    if value == "anonymous:":
        raise BadArgumentError(
            f"{said}, but the engine has several processes that must find the pool: give a folder, "
            "or leave it out"
        )
    return text(said, value)


def capacity(said: str, value: object) -> str | int | None:
    """As CXLPool.create takes it; None: nothing was said."""
    if isinstance(value, bool) or not isinstance(value, (int, str, type(None))):
        raise BadArgumentError(f"{said}: text like 8GiB is wanted")
    if value is not None and value != ALL:
        parse_bytes(value)
    return value


def size(said: str, value: object) -> str | int:
    found = capacity(said, value)
    if found is None or found == ALL:
        raise BadArgumentError(f"{said}: text like 8GiB is wanted")
    return found


def one_of(*words: str | bool) -> Rule:
    def rule(said: str, value: object) -> object:
        if not any(value is word or (value == word and isinstance(word, str)) for word in words):
            shown = [str(word).lower() if isinstance(word, bool) else word for word in words]
            raise BadArgumentError(f"{said}: one of {', '.join(shown)}")
        return value

    return rule


def whole_number(least: int, most: int) -> Rule:
    def rule(said: str, value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise BadArgumentError(f"{said}: a whole number from {least} to {most}")
        return value

    return rule


def host_number(said: str, value: object) -> object:
    if value == AUTO:
        return value
    try:
        return whole_number(0, HOSTS_MAX - 1)(said, value)
    except BadArgumentError as error:
        raise BadArgumentError(f'{error}, or "{AUTO}": one that no other machine has') from None


def number(least: float, most: float) -> Rule:
    def rule(said: str, value: object) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # type: ignore[operator]
            raise BadArgumentError(f"{said}: a number from {least:g} to {most:g}")
        return float(value)  # type: ignore[arg-type]

    return rule


POOL_RULES: Mapping[str, Rule] = {
    "where": location,
    "capacity": capacity,
    "salt": text,
    "sharing": one_of(*SHARING),
    "hosts": whole_number(1, HOSTS_MAX),
    "host": host_number,
    "lease_s": number(0.01, LEASE_MAX_S),
    "cold": text,
    "cold_capacity": size,
    "compress": one_of(*COMPRESS),
    "config": text,
    "huge": one_of(*HUGE),
    "policy": one_of(*(name for name in POLICIES if name != COST)),
    "remote": addresses,
    "remote_secret": text,
}
