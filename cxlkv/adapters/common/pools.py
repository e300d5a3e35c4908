"""Engines' pools: where each lies, how large it is, who makes it, what the log says of it.

A place that a user names is a folder, in which each kind of content gets a file of its own, or the
path of one pool. Whoever comes first makes it; the others find it, and see that it serves them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from typing import TypeVar

from cxlkv.adapters.common.settings import UNSHARED, PoolSettings
from cxlkv.errors import BadArgumentError, GeometryError, MemoryShortError
from cxlkv.layout import KVLayout, differences, format_bytes, parse_bytes
from cxlkv.machine.regions import is_device, one_maker, parse_place
from cxlkv.machine.topology import Machine, missing, probe
from cxlkv.pool import Pool
from cxlkv.stats import Overview
from cxlkv.tiers import Tiers
from cxlkv.tiers.cold_mooncake import is_mooncake
from cxlkv.tiers.quota import Quota
from cxlkv.tiers.remote import RemoteTier

Kind = TypeVar("Kind", bound=Pool)

log = logging.getLogger("cxlkv")

SHARED_MEMORY = "/dev/shm/"
MODEL_LENGTH_MAX = 60  # of a model's name in a file's
SHARE = 0.25
"""Share of the memory that this container may still use, for all of an engine's pools, if the user
sets no capacity."""
LEAST_BYTES = 4 << 20
"""Less than this holds no page of most models beside what each pool has for itself."""


def path_for(where: str, name: str, model: str = "") -> str:
    """The path of a pool for a place that a user named: in a folder, the file of this name.

    model: whose it is, which a name like cxlkv-ENGINE-HASH.pool then says, for people; a pool that
    an engine up to 0.2 made keeps the name without it. Raises BadArgumentError for memory without a
    name, which no other process could find.
    """
    scheme, colon, path = where.rpartition(":")
    if path.endswith("/") or os.path.isdir(path):
        plain = os.path.join(path, name)
        if model and not os.path.lexists(plain):
            engine, rest = name.split("-", 2)[1:]
            plain = os.path.join(path, f"cxlkv-{engine}-{readable(model)}-{rest}")
        return f"{scheme}{colon}{plain}"
    if parse_place(where).path is None:
        raise BadArgumentError(
            f"where is {where!r}: memory without a name, but the engine has several processes that "
            "must find the pool: give a folder or a path"
        )
    return where


def readable(model: str) -> str:
    """The last component of a model's path or name, in letters that a file name may have."""
    last = model.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-.")[:MODEL_LENGTH_MAX] or "model"


def make_or_open(
    kind: type[Kind],
    path: str,
    layout: KVLayout,
    capacity: str | int | None,
    *,
    parts: int = 1,
    sketch: bool | None = False,
    shared: PoolSettings = UNSHARED,
    slots: bool = False,
) -> tuple[Kind, bool]:
    """The pool at `path`, a CXLPool or an ObjectPool, and whether it was made now; else it keeps
    its capacity.

    capacity: of it alone; None: share_bytes(), as one of `parts` pools. sketch: as create() takes
    it. shared: which hosts share it, and how. slots: an object may lie in several.
    Raises GeometryError for a pool that stores something else, or is shared otherwise; one of
    larger objects will do for objects. Raises BadArgumentError for another user's, HostError where
    another machine is this host.
    """
    place = parse_place(path).path
    assert place is not None, "path_for() refuses places without a name"
    with one_maker():
        if _is_there(place, shared):
            _refuse_strangers(place)
            return _opened(kind, path, layout, shared, slots), False
        size = share_bytes(place, parts) if capacity is None else capacity
        made = kind.create(
            path,
            layout=layout,
            capacity=size,
            sketch=sketch,
            sharing=shared.sharing,
            hosts=shared.hosts,
            host=shared.as_host,
            lease_s=shared.lease_s,
        )
        return made, True


def share_bytes(place: str, parts: int = 1) -> int:
    """Bytes for one of so many pools, of what this container may still use and the file system
    has. Raises MemoryShortError for hardly any."""
    memory = probe().memory
    free = [b for b in (memory.available_bytes,) if b is not None]
    if memory.cgroup_limit_bytes is not None:
        free.append(memory.cgroup_limit_bytes - (memory.cgroup_usage_bytes or 0))
    if not is_device(place):
        space = os.statvfs(os.path.dirname(os.path.abspath(place)))
        if space.f_blocks:
            # Half of a file system may be used, which is often smaller than memory.
            free.append(int(space.f_bavail * space.f_frsize * 0.5 / SHARE))
    if not free:
        raise BadArgumentError(
            "cxlkv: how much memory there is cannot be seen here (/proc/meminfo is masked): say "
            'the capacity, like "capacity": "8GiB"'
        )
    share = int(min(free) * SHARE) // parts
    if share < LEAST_BYTES:
        raise MemoryShortError(
            f"{place}: the share of free memory, and of its file system, is {format_bytes(share)}: "
            "too little for a pool. Free some, or place it where there is more"
        )
    return share


def _is_there(place: str, shared: PoolSettings) -> bool:
    if not is_device(place):
        return os.path.lexists(place)
    try:
        Pool.open(place, threads=1, host=shared.as_host, lease_s=shared.lease_s).close()
    except (BadArgumentError, ValueError):  # no pool there
        return False
    return True


def _refuse_strangers(place: str) -> None:
    """Root may open anybody's pool, and the name that an engine looks for is no secret: where
    everybody may make files, whoever made one first would answer the engine's requests."""
    if is_device(place):
        return
    for look in (os.lstat, os.stat):
        owner = look(place).st_uid
        if owner != os.geteuid():
            raise BadArgumentError(
                f"{place} belongs to user {owner}, and this engine runs as user {os.geteuid()}: "
                "what lies there would be taken for what this engine computed. Run as its owner, "
                "give it to this user (chown), or give another place as where"
            )


def open_shared(path: str, shared: PoolSettings, threads: int | None = None) -> Pool:
    """A pool that is there, as the host that the settings say. Raises GeometryError for one that is
    shared otherwise, BadArgumentError where it is shared and they do not say so."""
    try:
        pool = Pool.open(path, host=shared.as_host, lease_s=shared.lease_s, threads=threads)
    except BadArgumentError as error:
        if shared.as_host is not None or "hosts share this pool" not in str(error):
            raise
        raise BadArgumentError(
            f'{error}. In an engine\'s settings: "sharing" as the pool has it, which `cxlkv pool '
            'inspect` says, and "host": "auto"'
        ) from error
    sharing, _, hosts = pool._sharing()
    for name, there in (("sharing", sharing), ("hosts", hosts)):
        wanted = getattr(shared, name)
        if wanted is not None and wanted != there:
            pool.close()
            raise GeometryError(
                f"{path}: {name} is {there!r} there, and {wanted!r} in the settings: write "
                f'"{name}": {json.dumps(there)}, or give another place as where'
            )
    return pool


def _opened(
    kind: type[Kind], path: str, layout: KVLayout, shared: PoolSettings, slots: bool
) -> Kind:
    pool = open_shared(path, shared)
    there = pool.layout
    most = there.object_bytes and (there.object_bytes if slots else there.page_tokens)
    larger = (most or 0) >= (layout.object_bytes or 0) > 0
    if (there == layout or larger) and pool.checksum and isinstance(pool, kind):
        return pool
    found = [] if larger else list(differences(there, layout))
    if not pool.checksum:
        found.append("it has no checksums")
    pool.close()
    if isinstance(pool, kind) and _but_for_encodings(there) == _but_for_encodings(layout) != there:
        raise GeometryError(
            f"{path} keeps keys and values as {there.encoding}; wanted here: {layout.encoding}. "
            f'Write "encoding": "{there.encoding}", or give a folder as where, in which each '
            "encoding gets a file of its own"
        )
    raise GeometryError(
        f"{path} is another pool than the one wanted: {'; '.join(found)}. Give a folder as where, "
        "in which each model gets a file of its own, or another path"
    )


def _but_for_encodings(layout: KVLayout) -> KVLayout:
    return layout if layout.object_bytes is not None else layout.encoded("none")


def bring_in(pool: Pool, huge: str) -> None:
    """All of its memory, in a thread; before this returns where huge pages are required."""
    try:
        pool.is_prefaulted = True
        pool.admin.prefault(background=True, huge=huge)
    except BaseException:
        pool.close()
        raise


def open_tiers(
    pool: Pool,
    settings: PoolSettings,
    share: float = 1.0,
    *,
    moves: bool = True,
    local: str | int | None = None,
    remote: RemoteTier | None = None,
) -> Tiers:
    """The pool's tiers as the settings say. Each process of an engine has its own; they share the
    file. share: of cold_capacity and local, for this pool. moves: keep some pages free, in a
    thread, so that an append seldom waits for room. local, remote: as in Tiers.

    Raises what Tiers raises, and BadArgumentError where several pools would have one file.
    """
    cold, given = settings.cold, settings.cold_capacity
    if cold is not None and not is_mooncake(cold):
        assert given is not None, "read() refuses a file without its size"
        given = int(parse_bytes(given) * share)
        cold = _cold_path(cold, str(pool.path), share)
    tiers = Tiers(
        pool,
        local=None if local is None else int(parse_bytes(local) * share),
        cold=cold,
        cold_capacity=given,
        compress=settings.compress,
        policy=settings.policy,
        remote=remote,
    )
    if moves and (cold is not None or local is not None):
        tiers.start()
    return tiers


def quota_of(tiers: Tiers, settings: PoolSettings, share: float = 1.0) -> Quota | None:
    """This process's share of what the settings say, in these tiers' pool. Raises BadArgumentError
    where that is less than a page."""
    return None if settings.quota is None else Quota.of(tiers, int(settings.quota * share))


def _cold_path(cold: str, pool: str, share: float) -> str:
    if cold.endswith("/") or os.path.isdir(cold):
        os.makedirs(cold, mode=0o700, exist_ok=True)
        return os.path.join(cold, f"{os.path.basename(pool)}.cold")
    if share < 1:
        raise BadArgumentError(
            f"cold is {cold!r}, one file, and this engine has several pools, which need one each: "
            f'give a folder ("{cold}/")'
        )
    return cold


# ---- what is said at the start ----


@dataclass(frozen=True)
class Place:
    """A rank's pool. room_bytes: what its file system has left; missing_bytes: of the pool, that no
    page has been taken for yet."""

    path: str
    made: bool  # now; else it was there
    tokens: int
    bytes: int
    rank: int = 0
    ranks: int = 1
    room_bytes: int | None = None
    missing_bytes: int = 0


def say(place: Place, wanted_tokens: int) -> None:
    """Log what pool an engine has, once for it: by its first rank."""
    if place.rank:
        return
    log.info(found_at(place))
    for concern in concerns(place, probe(), wanted_tokens):
        log.warning(concern)


def measure(pool: Overview, made: bool, tokens: int, rank: int, ranks: int) -> Place:
    """Measure a pool's file; a device has neither free space nor holes."""
    room_bytes, missing_bytes = None, 0
    if os.path.isfile(pool.path):
        space = os.statvfs(pool.path)
        room_bytes = space.f_bavail * space.f_frsize if space.f_blocks else None
        missing_bytes = max(0, pool.bytes - os.stat(pool.path).st_blocks * 512)
    return Place(pool.path, made, tokens, pool.bytes, rank, ranks, room_bytes, missing_bytes)


def found_at(place: Place) -> str:
    found = "made" if place.made else "found"
    size = f"{place.tokens} tokens ({format_bytes(place.bytes)})"
    stays = "" if place.made else "; its capacity stays what it was made with"
    ranks = f"; each of the {place.ranks} ranks has one like it" if place.ranks > 1 else ""
    return f"cxlkv: {found} {place.path}, for {size}{stays}{ranks}"


def concerns(place: Place, machine: Machine, wanted_tokens: int) -> list[str]:
    """What is not ideal, each with what mends it. wanted_tokens: of the longest request."""
    found = []
    if place.tokens < wanted_tokens:
        found.append(
            f"cxlkv: the pool holds {place.tokens} tokens, and one request may have "
            f'{wanted_tokens}: give a larger "capacity"'
        )
    if place.room_bytes is not None and place.missing_bytes > place.room_bytes:
        found.append(
            f"cxlkv: {place.path} may still grow by {format_bytes(place.missing_bytes)}, and its "
            f"file system has {format_bytes(place.room_bytes)} left: what does not fit is not "
            "saved. Remove what else lies there, or make the pool smaller"
        )
    for advice in missing(machine):
        shared = "/dev/shm" in advice.what and place.path.startswith(SHARED_MEMORY)
        if shared or "locked" in advice.what:
            found.append(f"cxlkv: {advice.what}: {advice.why}. What mends it: {advice.command}")
    return found
