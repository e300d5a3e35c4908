"""Finds files that no process uses, and removes them when a lock proves it.

A process that uses a pool, makes one, or has its host state open holds a lock on the file. Taking
that lock exclusively proves that nobody does; no name and no age is taken for proof.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from cxlkv import _core
from cxlkv.errors import BadArgumentError, CXLKVError, PoolMissingError
from cxlkv.machine.regions import is_device, is_striped
from cxlkv.stats import Overview, find


@dataclass(frozen=True)
class Garbage:
    """kind: "half-made", "orphan", "idle", or "unsettled": an idle pool of killed processes."""

    path: str
    kind: str
    bytes: int

    @property
    def why(self) -> str:
        return {
            "half-made": "its creator was killed",
            "orphan": "the host state of a pool that is gone",
            "idle": "not used for that long",
            "unsettled": "its processes were killed, and since when it is idle is not known:"
            " settled now, its time begins",
        }[self.kind]


def find_garbage(places: Iterable[str], idle_s: float | None = None) -> list[Garbage]:
    """List what collect() would act on, in these folders and below.

    idle_s: also pools that nobody has used for so many seconds. They may hold published pages.
    """
    found = []
    for overview in find(places):
        kind = _kind(overview, idle_s)
        if kind:
            found.append(Garbage(overview.path, kind, overview.bytes))
    return found


def _kind(overview: Overview, idle_s: float | None) -> str | None:
    if is_device(overview.path) or is_striped(overview.path):
        return None  # no file that could go: `cxlkv pool remove` wipes it, when told to
    try:
        if overview.state in ("half-made", "orphan"):
            ours = os.lstat(overview.path).st_uid == os.geteuid()
            return overview.state if ours else None
        if overview.state != "idle" or idle_s is None:
            return None
        if not overview.settled:
            return "unsettled"
        return "idle" if _core.gc(overview.path, "idle", idle_s, False) else None
    except (CXLKVError, OSError):
        return None  # of another user, or gone since


def collect(garbage: Garbage, idle_s: float | None = None) -> bool:
    """Remove it, or settle it; False when it is gone, or is in use again.

    An unsettled pool is opened and closed: the pages of killed processes are taken back, and the
    file's time says since when it is idle. A pool that several hosts share is settled by its own
    host, when that comes back.
    """
    try:
        if garbage.kind != "unsettled":
            return _core.gc(garbage.path, garbage.kind, idle_s or 0, True)
        _core.pool_close(_core.pool_open(garbage.path, None))
    except (PoolMissingError, BadArgumentError):
        return False
    return True
