"""Reads pools from outside: who uses them, what was counted. Nothing is disturbed."""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from glob import glob
from typing import NoReturn

from cxlkv import _core
from cxlkv.errors import (
    CorruptError,
    CXLKVError,
    GeometryError,
    NotAPoolError,
    PoolMissingError,
    TruncatedError,
    VersionError,
)
from cxlkv.layout import KVLayout
from cxlkv.machine.regions import STRIPED, is_device, parse_where, striped_paths
from cxlkv.machine.sizes import tokens_in
from cxlkv.refusals import no_attribute

__all__ = ["Counters", "Overview", "Process", "find", "inspect"]

SHARED_MEMORY = "/dev/shm"
MAGIC = b"CXLKVPOL"
PART_MAGIC = b"CXLKVSTR"  # of the label of a striped pool's part
PAGE_STATES = ("free", "held", "published", "quarantined", "retired", "withdrawn", "elsewhere")
COUNTERS = {
    "appended_bytes": "K and V appended to sequences",
    "scored_bytes": "Bytes read to choose pages",
    "fetched_bytes": "Bytes copied out by fetch",
    "attended_bytes": "K and V read by attention",
    "corrupt_pieces": "Pieces and records whose CRC was wrong",
    "stale_handles": "Handles that adopt() refused because their pages were freed",
    "pool_full_errors": "Operations refused because too few pages were free",
    "match_keys_asked": "Prefix keys that match() looked for",
    "match_keys_hit": "Of them, keys that the hit covers",
    "window_pages_freed": "Pages given back because no later token can see them",
    "window_pages_skipped": "Pages never taken because no later token can see them",
    "audited_selects": "Selects that were measured against the exact method",
    "reaped_processes": "Processes that died with the pool open, whose pages were taken back",
    "rebuilds": "Times that the allocator was derived anew after a death inside it",
    "queued_drops": "Page references that could not be given back at once, and were later",
    "lock_waits": "Waits for the pool's lock that took more than 1 ms",
    "lost_lines": "Looks at a line about hosts that ended in a bus error",
    "log_rescans": "Times that another host's log could not be followed, and all was read anew",
    "lost_forgets": "Pages of dead hosts that newcomers find, though they were to be forgotten",
}
_DRAFT = re.compile(r".\.[0-9a-f]{16}\.new$")
# As native/src/format/state_folder.c names them; up to 0.1.0 they lay in /dev/shm itself.
_HOST_STATE = re.compile(
    r"/dev/shm/(cxlkv\.[0-9]+/[0-9a-f]{32}(-[0-9a-f]+)+|cxlkv-[0-9a-f]{32}-[0-9a-f]+)\.host"
)
_POOL_NAME = re.compile(r"/(cxlkv[^/]*|[^/]*\.(pool|cxlkv))$")
_DAMAGE = (CorruptError, TruncatedError, VersionError, GeometryError)


@dataclass(frozen=True)
class Counters:
    """What was counted: by one process since it opened the pool, or by all since it was made.

    numbers: as cxlkv_counters in the C interface; hits, recall and mass are shares in [0, 1], None
    while nothing was asked or audited.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        return self.numbers.get(name, 0)

    @property
    def hits(self) -> float | None:
        """Share of the prefix keys asked for that were found."""
        return _share(self["match_keys_hit"], self["match_keys_asked"])

    @property
    def recall_sum(self) -> float:
        """Recall, summed over the audited selects."""
        return self["audited_recall"] / 2**32

    @property
    def mass_sum(self) -> float:
        """Attention mass kept, summed over the audited selects."""
        return self["audited_mass"] / 2**32

    @property
    def recall(self) -> float | None:
        return _share(self.recall_sum, self["audited_selects"])

    @property
    def mass(self) -> float | None:
        return _share(self.mass_sum, self["audited_selects"])


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True)
class Process:
    """One that has the pool open; alive=False: it was killed, and its pages wait to be reaped.
    start_time: as /proc/PID/stat has it here, to two ticks."""

    pid: int
    start_time: int
    alive: bool
    pages_held: int
    sequences: int
    counters: Counters


@dataclass(frozen=True)
class Overview:
    """A pool, or what a failure left of one.

    state: live (a process has it open), idle, damaged, half-made (its creator was killed), being
    made, orphan (a host state whose pool is gone), part (of a striped pool), or closed (another
    user's). pages: by PAGE_STATES; each page is in one state: a published page that a process holds
    counts as held; elsewhere: in extents of other hosts, or of none. settled: False while the
    counts include processes that have died. detail: a sentence more, or "".
    """

    path: str
    state: str
    detail: str = ""
    identity: str = ""
    model_id: str = ""
    bytes: int = 0
    tokens: int = 0  # that it has room for, of one request; 0: of objects, or not known
    layout: KVLayout | None = None
    pages: Mapping[str, int] = field(default_factory=dict)
    pages_total: int = 0
    prefix_pages: int = 0  # found by match(), held or not
    pinned_pages: int = 0  # of them, those that CXLPool.pin() marked on this host
    published_elsewhere: int = 0  # by other hosts
    processes: tuple[Process, ...] = ()
    totals: Counters = field(default_factory=Counters)
    settled: bool = True

    @property
    def pages_used(self) -> int:
        """Pages that are not free; of other hosts those that they have published: what else they
        hold is not seen from here."""
        unused = self.pages.get("free", 0) + self.pages.get("elsewhere", 0)
        return self.pages_total - unused + self.published_elsewhere


def of_pool(pool: _core.Handle, path: str | None) -> Overview:
    """Statistics of a pool that this process has open; reaps dead processes first."""
    got = _core.pool_processes(pool)
    return _overview(path or f"anonymous:{got.identity}", got)


def inspect(path: str) -> Overview:
    """Statistics of the pool at `path`, without opening it: reads the file and the host state,
    writes nothing.

    A pool that cannot be used is "damaged". path: also "dax:DEVICE" and "dax:DEVICE+DEVICE". Raises
    PoolMissingError, NotAPoolError, SystemCallError where the file may not be read, and
    UnsupportedError where a device is not there.
    """
    where = _plain(path)
    try:
        return _overview(where, _core.inspect(where))
    except _DAMAGE as error:
        size_bytes = sum(os.stat(each).st_size for each in striped_paths(where))
        return Overview(where, "damaged", str(error), bytes=size_bytes)


def __getattr__(name: str) -> NoReturn:
    no_attribute(__name__, name)


def _plain(place: str) -> str:
    """What "dax:" names, as it is opened; anything else is a path already."""
    return (parse_where(place) or place) if place.startswith(STRIPED) else place


def _overview(path: str, got: _core.Overview) -> Overview:
    numbers = got.numbers
    pages = {name: numbers[f"pages_{name}"] for name in PAGE_STATES}
    pages["published"] = numbers["pages_published_only"]
    detail = ""
    if numbers["in_use"] and not numbers["host_state"]:
        detail = "used by processes with another /dev/shm: who they are is not seen from here"
    return Overview(
        path=path,
        state="live" if numbers["in_use"] else "idle",
        detail=detail,
        identity=got.identity,
        model_id=got.layout.model_id,
        bytes=got.geometry["region_bytes"],
        tokens=tokens_in(got.layout, got.geometry),
        layout=got.layout,
        pages=pages,
        pages_total=numbers["pages_total"],
        prefix_pages=numbers["pages_published"],
        pinned_pages=numbers["pages_pinned"],
        published_elsewhere=numbers["pages_published_elsewhere"],
        processes=tuple(_process(*row) for row in got.processes),
        totals=Counters(got.totals),
        settled=bool(numbers["in_use"]) or not numbers["host_state"],
    )


def _process(row: Mapping[str, int], counters: Mapping[str, int]) -> Process:
    return Process(
        pid=row["pid"],
        start_time=row["start_time"],
        alive=bool(row["alive"]),
        pages_held=row["pages_held"],
        sequences=row["sequences"],
        counters=Counters(counters),
    )


# ---- finding ----


def pool_folders() -> list[str]:
    """Where pools lie unless somebody chose another place: /dev/shm, hugetlbfs, dax devices."""
    folders = [SHARED_MEMORY]
    with open("/proc/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, where, kind = line.split()[:3]
            if kind == "hugetlbfs":
                folders.append(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), where))
    return [folder for folder in folders if os.path.isdir(folder)] + sorted(glob("/dev/dax*"))


def find(places: Iterable[str], missing: list[str] | None = None) -> list[Overview]:
    """Pools and what failures left, in these folders and below, or at these files; by path.

    Links are not followed, other file systems below a folder not entered. A file that this user
    may not read is told of if its name is like a pool's, else passed over. A striped pool is one
    whose parts all lie there, or that is named. missing: gets the places that are not there, which
    raise PoolMissingError else.
    """
    found: dict[str, Overview] = {}
    parts: dict[str, _core.StripedPart] = {}
    for path in _files_below(places, missing):
        try:
            known = part_at(path) or recognise(path)
        except PermissionError:
            if _POOL_NAME.search(path):
                found[path] = _of_another(path)
            continue
        except (CXLKVError, OSError):
            continue  # gone since, not ours, or not to be read
        if isinstance(known, Overview):
            found[known.path] = known
        elif known:
            parts[path] = known
    for overview in _of_parts(parts):
        found[overview.path] = overview
    return [found[path] for path in sorted(found)]


def _of_parts(parts: Mapping[str, _core.StripedPart]) -> Iterator[Overview]:
    """The striped pools whose parts are all there, once each; the other parts one by one."""
    pools: dict[tuple[str, int], list[str]] = {}
    for path, part in sorted(parts.items(), key=lambda item: (item[1].number, item[0])):
        pools.setdefault((part.identity, part.parts), []).append(path)
    for (identity, count), paths in pools.items():
        if [parts[path].number for path in paths] == list(range(count)):
            where = STRIPED + "+".join(paths)
            try:
                yield inspect(where)
            except (CXLKVError, OSError) as error:
                yield Overview(where, "damaged", str(error), identity=identity)
            continue
        for path in paths:
            detail = (
                f"part {parts[path].number} of {count} of a striped pool: not all are here once"
            )
            yield Overview(path, "part", detail, identity, bytes=os.stat(path).st_size)


def part_at(path: str) -> _core.StripedPart | Overview | None:
    """What part of a striped pool the file or device is, None: of none; or a damaged one."""
    if path.startswith(STRIPED) or not (is_device(path) or _begins_with(path, PART_MAGIC)):
        return None
    try:
        return _core.striped_part(path)
    except NotAPoolError:
        return None
    except _DAMAGE as error:
        return Overview(path, "damaged", str(error), bytes=os.stat(path).st_size)


def recognise(path: str) -> Overview | None:
    """What the file is, or None when it has nothing to do with us."""
    name = os.path.basename(path)
    if _DRAFT.search(name):
        unused = _core.gc(path, "half-made", 0, False)
        return _file(path, "half-made" if unused else "being made")
    if _HOST_STATE.fullmatch(path):
        unused = _core.gc(path, "orphan", 0, False)
        return _file(path, "orphan") if unused else None
    of_us = path.startswith(STRIPED) or is_device(path) or _begins_with(path, MAGIC)
    return inspect(path) if of_us else None


def _of_another(path: str) -> Overview:
    """A file that this user may not read, and how to look at it."""
    status = os.lstat(path)
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user = f"#{status.st_uid}"
    detail = f"of user {user}, who alone may read it: sudo -u '{user}' cxlkv pool list"
    return Overview(path, "closed", detail, bytes=status.st_blocks * 512)


def _file(path: str, state: str) -> Overview:
    return Overview(path, state, bytes=os.lstat(path).st_blocks * 512)


def _begins_with(path: str, magic: bytes) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, len(magic)) == magic
    finally:
        os.close(fd)


def _files_below(places: Iterable[str], missing: list[str] | None) -> Iterator[str]:
    """Regular files; each place is a folder, or a file or device, or "dax:" as it is opened;
    missing is that of find()."""
    for place in map(_plain, places):
        if place.startswith(STRIPED):
            yield place
            continue
        try:
            status = os.stat(place)
        except FileNotFoundError as error:
            if missing is None:
                raise PoolMissingError(f"{place}: there is no such file or folder") from error
            missing.append(place)
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield os.path.realpath(place)
            continue
        folders = [os.path.abspath(place)]
        while folders:
            yield from _entries(folders, status.st_dev)


def _entries(folders: list[str], device: int) -> Iterator[str]:
    """Regular files of the last folder; the folders in it are added."""
    try:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_dev == device:
                    folders.append(entry.path)
                elif stat.S_ISREG(status.st_mode):
                    yield entry.path
    except (FileNotFoundError, PermissionError):
        return  # gone since, or of somebody else
