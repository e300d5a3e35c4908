"""Describes the hosts of a shared pool, as one of them sees the others."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from cxlkv import _core
from cxlkv.errors import CXLKVError

STATUS = ("unused", "live", "left", "damaged")  # by the core's number


@dataclass(frozen=True)
class Host:
    """One host: state is "unused", "live", "unseen" (it says that it is there, and has not beaten
    yet since this host first looked: live or dead), "silent" (for longer than a lease), "fenced"
    (its epoch was ended), "off" (and its machine is declared off), "left" (in order) or "damaged".
    build: the version of cxlkv that runs there, or ran last; "" where no build has told it.
    """

    number: int
    state: str
    epoch: int
    is_self: bool
    silent_s: float  # since this host saw it beat last; 0 for itself and for those not there
    extents: int
    build: str
    seen: bool  # False: silent_s is since this host first looked, and in truth it is longer


def build_text(build: int) -> str:
    """The version that the core wrote as a number; "" for 0."""
    return f"{build // 10000}.{build // 100 % 100}.{build % 100}" if build else ""


def format_of(handle: _core.Handle) -> dict[str, object]:
    """The format version of a pool, the build that made or upgraded it, and the features of each
    word that its bytes need: "compatible" ones may be unknown to a build, "readers" to one that
    only looks, "incompatible" to none."""
    found = _core.pool_format(handle)
    words = ("compatible", "readers", "incompatible")
    bits = {word: [bit for bit in range(64) if found[word] >> bit & 1] for word in words}
    return {"version": found["version"], "build": build_text(found["build"]), **bits}


def hosts_of(handle: _core.Handle) -> list[Host]:
    """List all hosts that the pool has slots for, by number."""
    return [_host(row) for row in _core.pool_hosts(handle)]


def numbers_here(path: str) -> list[int]:
    """List the numbers that this machine has a host state for, in the pool at `path`."""
    try:
        found, identity = os.stat(path), _core.inspect(path).identity
        names = os.listdir(f"/dev/shm/cxlkv.{found.st_uid}")
    except (OSError, CXLKVError):  # no process has it open here, or open() will say what is wrong
        return []
    state = re.compile(rf"{identity}-{found.st_dev:x}-{found.st_ino:x}-([0-9a-f]{{2}})\.host")
    return sorted(int(match[1], 16) for match in map(state.fullmatch, names) if match)


def _host(row: dict[str, int]) -> Host:
    silent_s = row["silent_ns"] / 1e9
    state = STATUS[row["status"]]
    if state == "live":
        said = next((word for word in ("off", "fenced", "silent") if row[word]), "")
        state = said or ("live" if row["seen"] else "unseen")
    return Host(
        number=row["number"],
        state=state,
        epoch=row["epoch"],
        is_self=bool(row["is_self"]),
        silent_s=round(silent_s, 3) if STATUS[row["status"]] == "live" else 0.0,
        extents=row["extents"],
        build=build_text(row["build"]),
        seen=bool(row["seen"]),
    )
