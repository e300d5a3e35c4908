"""Engines' settings are read by one parser, with one error text.

Every setting has a rule: a function of what an error begins with, and the value; it returns what
the settings hold, or raises BadArgumentError, which names the key and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TypeVar

from cxlkv.errors import BadArgumentError
from cxlkv.layout import parse_bytes
from cxlkv.machine.regions import ALL

Rule = Callable[[str, object], object]


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """where: a folder, in which each model (and, where each has its own pool, each rank) gets a
    file, or the path of one pool, as CXLPool.create takes it. capacity: of what an engine's ranks
    store together, if it is to be made; None: a share of the memory that this container may use.
    salt: keeps tenants apart.
    """

    where: str = "/dev/shm/"
    capacity: str | int | None = None
    salt: str = ""


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
    known = [prefix + one.name for one in fields(kind)]
    every = {"where": location, "capacity": capacity, "salt": text, **(rules or {})}
    found: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            close = get_close_matches(str(name).lower(), known, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise BadArgumentError(f"{place}: {name!r} is not one of {', '.join(known)}{meant}")
        own = name.removeprefix(prefix)
        found[own] = every[own](f"{place}: {name} is {value!r}", value)
    return kind(**found)  # type: ignore[arg-type]


def text(said: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadArgumentError(f"{said}: text is wanted")
    return value


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


def one_of(*words: str) -> Rule:
    def rule(said: str, value: object) -> object:
        if value not in words:
            raise BadArgumentError(f"{said}: one of {', '.join(words)}")
        return value

    return rule


def number(least: float, most: float) -> Rule:
    def rule(said: str, value: object) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # type: ignore[operator]
            raise BadArgumentError(f"{said}: a number from {least:g} to {most:g}")
        return float(value)  # type: ignore[arg-type]

    return rule
