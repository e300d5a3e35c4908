"""What pools of K and V and pools of objects have in common: create, open, describe, close."""

from __future__ import annotations

import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, TypedDict, cast

from cxlkv import _core, _io_hooks
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    CXLKVError,
    GeometryError,
    HostError,
    NotAPoolError,
    PoolExistsError,
    SystemCallError,
    shown,
    state_of,
)
from cxlkv.layout import KVLayout, differences, format_bytes
from cxlkv.machine import numa_mode, prefault
from cxlkv.machine.coherence import (
    AUTO,
    DURABLE,
    LEASE_S,
    SHARING,
    Host,
    HostNumber,
    flushes_of,
    named_host,
    parse_host,
    parse_sharing,
)
from cxlkv.machine.hosts import format_of, numbers_here
from cxlkv.machine.huge_pages import check_huge, page_kind
from cxlkv.machine.lifetime import BeforeClose, Closing
from cxlkv.machine.placement import (
    OPEN_PAGES,
    check_nodes,
    durable_note,
    mask_of,
    placement_of,
    warn_of_moves,
)
from cxlkv.machine.regions import (
    capacity_bytes_at,
    check_host_folder,
    check_room,
    is_device,
    is_striped,
    one_maker,
    parse_place,
    parse_where,
)
from cxlkv.numbers import is_whole
from cxlkv.pages import Hotness, Pages, Records
from cxlkv.pool.admin import Admin
from cxlkv.refusals import refusing
from cxlkv.sequence import Batch, Sequence
from cxlkv.stats import inspect

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from cxlkv.config import PoolConfig

Path = str | os.PathLike[str]
THREADS_MAX = 1024  # the core's limit
SETTLE_S = 1.0  # between two machines that take a host's number at once; far more than they need


class Options(TypedDict, total=False):
    """Arguments of create() that a configuration has, too, beside layout and capacity."""

    sketch: bool | None
    sharing: str
    durable: str
    hosts: int | None
    host: HostNumber
    lease_s: float
    threads: int | None
    huge: str | None


@refusing
class Pool(Closing):
    """What pools of K and V (CXLPool) and of objects (ObjectPool) have in common.

    Made by create() or open(); called on this class, they return the kind that the pool
    stores. After an os.fork() the child has its own references to all that it inherits. Methods may
    be called from any thread.
    """

    _instead = "open it by its path there, which one in anonymous memory has not"
    _kinds: ClassVar[dict[str, type[Pool]]] = {}  # name of what a pool stores: its class

    def __init_subclass__(cls, stores: str = "") -> None:
        """A class that says what it stores is the one that create() and open() make for it."""
        if stores:
            Pool._kinds[stores] = cls

    def __init__(self, handle: _core.Handle, path: str | None):
        self._handle = handle
        self.path = path
        self.layout, self.checksum, self.sketch = _core.pool_layout(handle)
        self.pages = Pages(handle)
        self.hotness = Hotness(handle)
        self.records = Records(handle)
        self.before_close = BeforeClose()
        self.is_prefaulted = False
        """Whether its memory comes into place otherwise than by use. Else a thread makes huge pages
        ahead of that, from the first sequence on."""
        self._lent: list[weakref.ref[object]] = []  # to the views of the region that are in use
        if os.environ.get(numa_mode.VARIABLE):
            self._emulate()

    @classmethod
    def create(
        cls,
        where: Path,
        *,
        layout: KVLayout,
        capacity: str | int,
        checksum: bool = True,
        sketch: bool | None = None,
        sharing: str = "host",
        durable: str = "process",
        hosts: int | None = None,
        host: HostNumber = None,
        lease_s: float = LEASE_S,
        threads: int | None = None,
        huge: str | None = None,
        force: bool = False,
        replace: bool = False,
    ) -> Self:
        """Make a pool at a path (/dev/shm, hugetlbfs, any file system), on a dax device, or in
        "anonymous:" memory; numa:1 is memory of that NUMA node, numa:1:/dev/shm/my.pool a file
        there, numa:0,1 is interleaved over both, dax:/mnt/my.pool is a file that is there, with the
        size that it keeps (docs/how-to/placement.md).

        capacity: bytes or text like "2GiB"; of a device, or a file that is there, also "all".
        checksum: a CRC32C for every piece, made at append and verified on reading. sketch: keys are
        also kept in 2 bits a channel, for select(method="two_stage"); by default of keys that are
        not encoded. threads: that scan and copy (default: the CPUs allowed here). huge: all memory
        comes into place at once, as by admin.prefault(); "never" takes no huge pages that the
        kernel would give, either. A file has mode 0600, is reserved whole, and appears finished or
        not at all; a device, or a file that is there, is formatted in place. Raises
        PoolExistsError, unless force=True for something that is no pool, replace=True to remove an
        unused pool with all its pages first; BusyError for one in use; MemoryShortError,
        GeometryError, BadArgumentError.

        sharing: "host" (one host), "software" (up to `hosts` hosts, 8 by default, whose caches do
        not see each other) or "hw_coherent" (they do). durable="host" writes back all that is
        published, so that it outlives this host. host: which one this is, from 0, on no two
        machines the same (default: the environment's CXLKV_HOST). A host that gives no sign for
        lease_s is suspected by the others. docs/explanation/coherence.md has the protocol.
        """
        if not isinstance(layout, KVLayout):
            raise BadArgumentError(f"layout is a KVLayout, not {type(layout).__name__}")
        kind = cls._for(layout)
        shared = parse_sharing(sharing, durable, hosts)
        _check_threads(1 if threads is None else threads)  # first: a pool made would stay behind
        if huge is not None:
            check_huge(huge)
        place = numa_mode.emulated(parse_place(where))
        path, nodes, in_place = place
        own = next(iter(parse_host(host, lease_s, path)[: shared[0]]), None)  # shared[0] 0: alone
        capacity_bytes = capacity_bytes_at(place, capacity)
        check_host_folder(path)
        if nodes:
            check_nodes(nodes, capacity_bytes)
        check_room(place, capacity_bytes)
        mask = mask_of(nodes)
        sketch = layout.sketches(sketch)
        made = _core.pool_place()
        described = (path, layout, checksum, sketch, shared, capacity_bytes)
        try:
            small = huge == "never"
            handle = _core.pool_create(*described, force, own, mask, in_place, made, replace, small)
            pool = kind(handle, path)._with_threads(threads)
            if huge is not None:
                pool.is_prefaulted = True
                pool.admin.prefault(huge=huge)
            return pool
        except BaseException:  # the caller never gets the pool
            _core.pool_unmake(made, path)
            raise

    @classmethod
    def open_or_create(
        cls,
        where: Path,
        *,
        layout: KVLayout,
        capacity: str | int,
        checksum: bool = True,
        **options: Unpack[Options],
    ) -> Self:
        """Open the pool at a path, or make it where there is none: the options are create()'s.

        Processes that start at once make it once. Raises GeometryError, which names all that
        differs, when the pool there is another than asked for; NotAPoolError for something else at
        the path; and what open() and create() raise. from_config() reads the same from a file.
        """
        from cxlkv.config import for_call

        call = f"{cls.__name__}.open_or_create"
        if unknown := options.keys() - Options.__annotations__:
            raise TypeError(f"{call}() got an unexpected keyword argument {min(unknown)!r}")
        place = os.fspath(where) if isinstance(where, os.PathLike) else where
        wanted = for_call(call, layout, where=place, capacity=capacity, **options)
        return cls._configured(wanted, layout, checksum)

    @classmethod
    def from_config(
        cls, config: Path | Mapping[str, object], *, layout: KVLayout | None = None
    ) -> Self:
        """The pool that a YAML file, or a mapping of the same keys, describes: opened or made.

        docs/reference/configuration.md explains the keys; layout: where they have none. One with
        tiers is opened by cxlkv.tiers.Tiers.from_config(). A pool that is there is opened, so that
        a restarted server finds its prefixes, and a missing one is made; processes that start at
        once make it once. Raises BadArgumentError with file, line and key;
        GeometryError when the pool there is another than described; and what open() and create()
        raise.
        """
        from cxlkv.config import read_config  # pydantic and yaml, which few programs need

        wanted, stored = read_config(config, layout)
        if of_tiers := wanted.of_tiers():
            raise BadArgumentError(
                f"{', '.join(of_tiers)}: these are of tiers, which this pool would not have: "
                "cxlkv.tiers.Tiers.from_config() opens it with them"
            )
        return cls._configured(wanted, stored)

    @classmethod
    def _configured(cls, wanted: PoolConfig, layout: KVLayout, checksum: bool = True) -> Self:
        path, _, in_place = parse_place(wanted.where)
        given = {name: getattr(wanted, name) for name in ("capacity", *Options.__annotations__)}
        make = partial(
            cls._for(layout).create, wanted.where, layout=layout, checksum=checksum, **given
        )
        if path is None:
            return make()
        with one_maker():
            if not _is_there(path, in_place):
                # Another user's process may make it meanwhile.
                with suppress(PoolExistsError):
                    return make()
            pool = Pool.open(
                wanted.where, host=wanted.host, lease_s=wanted.lease_s, threads=wanted.threads
            )
        described = pool.describe()
        names = ("sketch", "sharing", "durable", "hosts")
        there = {name: described[name] for name in names}
        geometry = _core.pool_geometry(pool._handle)
        differences = wanted.differences(layout, pool.layout, geometry, there)
        if pool.checksum != checksum:
            differences.append(
                f"checksum is {shown(pool.checksum)} there, {shown(checksum)} wanted"
            )
        if differences:
            pool.close()
            raise GeometryError(
                f"{path} is another pool than the one described: {'; '.join(differences)}. Give "
                f"the new one another path, or remove the old one: `cxlkv pool remove {path}`"
            )
        if wanted.huge is not None:
            try:
                pool.is_prefaulted = True
                pool.admin.prefault(huge=wanted.huge)
            except BaseException:
                pool.close()
                raise
        return cast("Self", pool)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        layout: KVLayout | None = None,
        host: HostNumber = None,
        lease_s: float = LEASE_S,
        threads: int | None = None,
        worker: bool = False,
    ) -> Self:
        """Attach to a pool that another process made.

        layout: what the caller expects; GeometryError when the pool has another. host and lease_s:
        as in create(), for a pool that several hosts share. worker: as CXLPool.use_worker(). Raises
        PoolMissingError, NotAPoolError, VersionError, CorruptError, TruncatedError, BusyError,
        HostError.
        """
        place, nodes, _ = numa_mode.emulated(parse_place(path))
        if place is None:
            raise BadArgumentError("an anonymous pool cannot be opened: fork, or use a file")
        check_host_folder(place)
        handle = _opened(place, host, lease_s)
        pool = cls._for(_core.pool_layout(handle)[0])(handle, place)
        if layout is not None and layout != pool.layout:
            pool.close()
            raise GeometryError(
                f"{place} is another pool than the layout given: "
                f"{'; '.join(differences(pool.layout, layout))}"
            )
        warn_of_moves(pool._handle, place, nodes)
        pool._with_threads(threads)
        if worker:
            _core.pool_use_worker(handle, "if_there", 0.0)
        return pool

    @classmethod
    def _for(cls, layout: KVLayout) -> type[Self]:
        """The class of a pool of this layout."""
        stored = "K and V" if layout.object_bytes is None else "objects"
        if stored == "objects":
            import_module("cxlkv.objects")  # which makes its kind known
        kind = cls._kinds.get(stored)
        if kind is not None and issubclass(cls, kind):
            return cls
        if kind is None or not issubclass(kind, cls):
            name = "a CXLPool" if stored == "K and V" else "an ObjectPool"
            raise BadArgumentError(f"this pool stores {stored}: it is {name}")
        return kind

    def _emulate(self) -> None:
        """Charge this process's transfers to the link that CXLKV_EMULATE names."""
        try:
            _io_hooks.plugin().begin_from_environment(self._handle)
        except BadArgumentError:
            self.close()
            raise

    @staticmethod
    def remove(path: Path) -> None:
        """Remove a pool's file, or wipe its superblock from a device, and from a file in which it
        was made in place; refuses what is no pool, and a pool that is in use."""
        _core.pool_remove(_named(path))

    @staticmethod
    def upgrade(path: Path) -> int:
        """Make a pool that an older release made one of this release's format, where it lies, and
        keep all that it holds; returns the format version that it had.

        Nobody may use it meanwhile, on any host. Stopped anywhere it is as before, or done; then
        again. docs/reference/releases.md says which releases read what. Raises BusyError,
        VersionError for what is older or newer than this build upgrades, CorruptError.
        """
        return _core.pool_upgrade(_named(path))

    def _with_threads(self, threads: int | None) -> Self:
        self.set_threads(len(os.sched_getaffinity(0)) if threads is None else threads)
        return self

    @property
    def admin(self) -> Admin:
        """What operators do: check, fence, scrub, pin, overview and more."""
        return Admin(self._handle, self.path, self._hashes, self.before_close)

    def set_threads(self, threads: int) -> None:
        """Set how many threads, the caller's included, share a scan or a copy."""
        _check_threads(threads)
        _core.pool_set_threads(self._handle, threads)

    def forget(self, keys: Iterable[str | bytes], *, strict: bool = True) -> int:
        """Take published pages, or objects, of `keys` out of the index; returns how many. Frees
        the unused.

        Pinned ones too: a pin protects from eviction, not from this call. strict:
        as in publish(); keys of content say it themselves. Keys of objects are what put() takes.
        """
        return _core.forget(self._handle, self._hashes(keys, strict))

    @abstractmethod
    def _hashes(self, keys: Iterable[str | bytes], strict: bool) -> bytes:
        """Hashes of keys, as the pool's calls take them."""

    def __repr__(self) -> str:
        """One line for people, of two calls into the core."""
        name = f"{type(self).__name__} {self.path or 'in anonymous memory'}"
        try:
            stats = self.stats()
            geometry = _core.pool_geometry(self._handle)
        except CXLKVError as error:
            return f"<{name}: {state_of(error)}>"
        free, page_bytes = stats["pages_free"], geometry["extent_bytes"] // geometry["slab_slots"]
        elsewhere = stats["pages_elsewhere"] - stats["pages_published_elsewhere"]
        used = stats["pages_total"] - free - elsewhere
        parts = [
            f"{count:,} pages {word} ({self._holds(count, geometry['part_count'])}"
            f"{format_bytes(count * page_bytes)})"
            for word, count in (("used", used), ("free", free))
        ]
        if elsewhere:
            parts.append(f"{elsewhere:,} of other hosts or of none")
        if published := stats["pages_published"]:
            parts.append(f"{published:,} published")
        return f"<{name}: {', '.join(parts)}; {self.layout.summary}>"

    def _holds(self, pages: int, parts: int) -> str:
        """What fits in so many pages, with a comma behind it."""
        tokens = f"{pages // parts * self.layout.page_tokens:,} tokens, "
        return tokens if parts == 1 else f"about {tokens}"  # a window keeps the end of a text

    def __contains__(self, one: Sequence | Batch) -> bool:
        """Whether it is a sequence of this pool, or a batch of some."""
        return one._pool is self._handle

    def stats(self) -> dict[str, int]:
        """Counts of pages, processes and sequences, and bytes moved by this process."""
        return _core.pool_stats(self._handle)

    def describe(self) -> dict[str, object]:
        """Layout, geometry and memory of the pool, for people."""
        sharing, durable, hosts = self._sharing()
        flushes = flushes_of(sharing, self.path)
        kind_of_pages = page_kind(self._handle)
        note = durable_note(durable, kind_of_pages)
        emulated = _io_hooks.label(self._handle)
        return {
            "path": self.path or "anonymous:",
            "identity": _core.pool_identity(self._handle),
            "format": format_of(self._handle),
            "page_kind": kind_of_pages,
            "placement": self._placement(),
            "layout": self.layout,
            "checksum": self.checksum,
            "sketch": self.sketch,
            "sharing": sharing,
            "durable": durable,
            "hosts": hosts,
            **({"flushes": flushes} if flushes else {}),
            **({"note": note} if note else {}),
            **({"emulated": emulated} if emulated else {}),
            "geometry": _core.pool_geometry(self._handle),
        }

    def _sharing(self) -> tuple[str, str, int]:
        """Kind of sharing, durability, and number of hosts; much cheaper than describe()."""
        kind, durable, hosts = _core.pool_sharing(self._handle)
        return SHARING[kind], DURABLE[durable], hosts

    def _placement(self) -> dict[str, object]:
        try:
            return placement_of(self._handle, OPEN_PAGES).summary()
        except SystemCallError as error:  # a container may forbid to ask
            return {"policy": f"not known: {error}"}

    def _region_view(self) -> memoryview:
        """The whole region, writable, in place. close() refuses while this view, a slice of it, or
        an array or tensor made of it is in use."""
        view, reference = _core.pool_view(self._handle)
        self._lent = [lent for lent in self._lent if lent() is not None] + [reference]
        return view

    def _make_huge_pages(self) -> None:
        if self.is_prefaulted:
            return
        self.is_prefaulted = True
        big = _core.pool_memory(self._handle)[1] >= prefault.LEAST_BYTES
        if big and self._sharing()[0] == "host":
            ahead = prefault.AsUsed(self._handle)
            ahead.start()
            self.before_close(ahead.end)

    def close(self) -> None:
        """Release all of this process's sequences and unmap; a second time does nothing.

        Raises BusyError while leases of the pool's memory are not released, or views of the region
        are in use: all is as before then.
        """
        if any(lent() is not None for lent in self._lent):
            raise BusyError(
                "a view of the pool's region, or a tensor of it (Mapping.tensor), is still in use: "
                "drop it (del), then close the pool"
            )
        _core.pool_may_close(self._handle)
        self.before_close.run()
        _core.pool_close(self._handle)


def _named(path: Path) -> bytes:
    place = parse_where(path)
    if place is None:
        raise BadArgumentError("an anonymous pool ends with its process")
    return place.encode()


def _is_there(path: str, in_place: bool) -> bool:
    """A file is, whatever it holds; a device, or a file in place, is when a pool lies on it."""
    if not (in_place or is_device(path) or is_striped(path)):
        return os.path.lexists(path)
    try:
        inspect(path)
    except NotAPoolError:
        return False
    return True


def _opened(path: str, host: HostNumber, lease_s: float) -> _core.Handle:
    """Open the pool as `host`; for "auto" as the first host that no other machine is."""
    if named_host(host) != AUTO:
        return _core.pool_open(path, next(iter(parse_host(host, lease_s, path)), None))
    taken: HostError | None = None
    for one in parse_host(host, lease_s, path, numbers_here(path)):
        try:
            return _settled(path, one)
        except HostError as error:
            taken = error.with_traceback(None)  # its frame keeps the pool open
        except BadArgumentError as error:
            if taken is None:
                raise
            raise HostError(
                f"{path}: other machines use all its numbers of hosts: {error}. Close the pool on "
                "one of them, or make a pool for more hosts"
            ) from taken
    raise HostError(f"{path}: other machines use all numbers of hosts") from taken


def _settled(path: str, host: Host) -> _core.Handle:
    """Open the pool as this host, and wait long enough to see another machine that took the same
    number in the same moment: then raise HostError."""
    handle = _core.pool_open(path, host)
    if SHARING[_core.pool_sharing(handle)[0]] != "host":
        time.sleep(min(host[2] / 2, SETTLE_S))
        _core.pool_hosts(handle)
    return handle


def _check_threads(threads: int) -> None:
    if not is_whole(threads, 1, THREADS_MAX):
        raise BadArgumentError(f"{threads} threads: outside 1 to {THREADS_MAX}")
