"""Adapters read an engine's settings by the same rules.

where: the name of the settings, before each message. All raise BadArgumentError, which names the
key and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from cxlkv.config import parse_bytes
from cxlkv.errors import BadArgumentError
from cxlkv.machine.regions import ALL


def check_names(given: Iterable[object], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            close = get_close_matches(str(name), known, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise BadArgumentError(f"{where}: {name!r} is not one of {', '.join(known)}{meant}")


def read_text(given: Mapping[str, object], name: str, default: str, where: str) -> str:
    value = given.get(name, default)
    if not isinstance(value, str):
        raise BadArgumentError(f"{where}: {name} is {value!r}: text is wanted")
    return value


def read_capacity(given: Mapping[str, object], where: str) -> str | int | None:
    """As CXLPool.create takes it; None: nothing was said."""
    capacity = given.get("capacity")
    if capacity is None:
        return None
    if isinstance(capacity, bool) or not isinstance(capacity, (int, str)):
        raise BadArgumentError(f"{where}: capacity is {capacity!r}: text like 8GiB is wanted")
    if capacity != ALL:
        parse_bytes(capacity)
    return capacity


def read_place(given: Mapping[str, object], default: str, where: str) -> str:
    place = read_text(given, "where", default, where)
    if place == "anonymous:":
        raise BadArgumentError(
            f"{where}: where is 'anonymous:', but the engine has several processes that must find "
            "the pool: give a folder, or leave it away"
        )
    return place
