"""The binding: one function for each of the C core, same noun, checked; the only user of cffi."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from cxlkv import errors
from cxlkv._core import abi
from cxlkv._native import ffi, lib
from cxlkv.arrays import View
from cxlkv.layout import STORED, VALUES, KVLayout, LayerGroup

abi.check(lib)  # before anything of the core is used

FORMAT_VERSION: int = lib.CXLKV_FORMAT_VERSION
_EXCEPTIONS: Mapping[int, type[errors.CXLKVError]] = {
    lib.CXLKV_E_NOT_A_POOL: errors.NotAPoolError,
    lib.CXLKV_E_VERSION: errors.VersionError,
    lib.CXLKV_E_GEOMETRY: errors.GeometryError,
    lib.CXLKV_E_CORRUPT: errors.CorruptError,
    lib.CXLKV_E_TRUNCATED: errors.TruncatedError,
    lib.CXLKV_E_POOL_EXISTS: errors.PoolExistsError,
    lib.CXLKV_E_POOL_FULL: errors.PoolFullError,
    lib.CXLKV_E_STALE: errors.StaleError,
    lib.CXLKV_E_CLOSED: errors.ClosedError,
    lib.CXLKV_E_RELEASED: errors.ReleasedError,
    lib.CXLKV_E_ORDER: errors.OrderError,
    lib.CXLKV_E_UNEVEN: errors.UnevenError,
    lib.CXLKV_E_POISON: errors.PoisonError,
    lib.CXLKV_E_BUSY: errors.BusyError,
    lib.CXLKV_E_TIMEOUT: errors.LockTimeoutError,
    lib.CXLKV_E_PROCESSES: errors.BusyError,
    lib.CXLKV_E_ARGUMENT: errors.BadArgumentError,
    lib.CXLKV_E_FENCED: errors.FencedError,
    lib.CXLKV_E_HOST: errors.HostError,
    lib.CXLKV_E_WORKER: errors.WorkerError,
    errno.ETIMEDOUT: errors.PeerError,
    errno.ECANCELED: errors.PeerError,
    errno.ENOENT: errors.PoolMissingError,
    errno.ENOMEM: errors.MemoryShortError,
    errno.ENOSPC: errors.MemoryShortError,
}
E_ROOM: int = -lib.CXLKV_E_ROOM

Handle = Any  # a cffi pointer to an opaque struct of the core
Made = TypeVar("Made")
Pages = npt.NDArray[np.int32]
Starts = npt.NDArray[np.int32]

_local = threading.local()


def check(code: int) -> int:
    """`code` if it is >= 0, else the exception that its number stands for."""
    if code >= 0:
        return code
    text = ffi.string(lib.cxlkv_error_text()).decode(errors="replace")
    raise _EXCEPTIONS.get(-code, errors.SystemCallError)(text)


# ---- what the core makes ----


def _place(kind: str, destroy: Any, size: int = 0) -> Any:
    """Where a call of the core puts the object that it makes: a pointer, NULL before.

    It has its destructor before the call. An interrupt (Ctrl-C) may come behind any bytecode: were
    the pointer taken out first and given a destructor then, one in between would leave an object
    that nobody can release. The destructor is a function of the core, in which none can come.
    """
    return ffi.gc(ffi.new(kind), destroy, size)


def _handle(place: Any) -> Handle:
    """The object at a place, which lives as long as the handle, or until ffi.release().

    The handle's destructor is a comparison: it does nothing, and belongs to the place, which is so
    kept for as long as the handle. (Of what does nothing and holds a reference it is the fastest.)
    """
    return ffi.gc(place[0], place.__eq__)


def keep(into: list[Made], make: Callable[..., Made], *arguments: Any) -> None:
    """into.append(make(*arguments)), of a function in C: no interrupt comes between the two.

    Python asks for signals between bytecodes, and this is one call. Who looks into the list in a
    `finally` knows whether something was made that is to be given back.
    """
    into.extend(map(make, *((argument,) for argument in arguments)))


# ---- the build ----


def version() -> str:
    """The version of the C core."""
    return str(ffi.string(lib.cxlkv_version()).decode())


def isa() -> str:
    """The instruction set that scoring uses now: "serial", "avx2", "avx512_bf16", "neon" ..."""
    return str(ffi.string(lib.cxlkv_isa_name()).decode())


def isa_force(name: str) -> None:
    """Force one of them for this process, or "auto"; raises UnsupportedError when CPU or build lack
    it, BadArgumentError when there is none of that name."""
    code = lib.cxlkv_isa_force(name.encode())
    if code == -errno.ENOTSUP:
        raise errors.UnsupportedError(ffi.string(lib.cxlkv_error_text()).decode())
    check(code)


def crc32c(data: bytes | npt.NDArray[np.uint8], crc: int = 0) -> int:
    """CRC32C (Castagnoli) of `data`, continuing from `crc`."""
    buffer = ffi.from_buffer(data)
    return int(lib.cxlkv_crc32c(crc, buffer, len(buffer)))


# ---- what `cxlkv bench coherence` measures ----

# By the core's number: writes that end with a fence, reads after one, and the protocol.
COHERENCE_OPERATIONS = (
    "store",
    "stream",
    "write_back",
    "invalidate",
    "evict",
    "read",
    "read_invalidated",
    "read_evicted",
    "publish",
    "acquire",
    "acquire_unpinned",
    "unpin",
)
VISIBILITY_MODES = ("coherent", "fast", "strict")


def coherence_time_s(
    operation: str,
    memory: npt.NDArray[np.uint8],
    local: npt.NDArray[np.uint8],
    first: int,
    repeat: int,
    batch: int = 1,
    checksum: bool = False,
    generation: int = 1,
    mode: str = "fast",
) -> float:
    """Seconds for `repeat` batches of records of local.size bytes, taken in turn from `first` on.

    memory is at a line and is split into as many records as it holds, 128 bytes more for each.
    """
    args = ffi.new("cxlkv_coherence_args *")
    args.operation = COHERENCE_OPERATIONS.index(operation)
    args.mode = VISIBILITY_MODES.index(mode)
    args.batch, args.checksum, args.generation = batch, int(checksum), generation
    args.record_bytes, args.record_count = local.size, memory.size // (local.size + 128)
    args.first, args.repeat = first, repeat
    args.memory = ffi.cast("uint8_t *", memory.ctypes.data)
    args.local = ffi.cast("uint8_t *", local.ctypes.data)
    return check(lib.cxlkv_coherence_time(args)) * 1e-9


def coherence_calls_ns(mode: str, size: int, count: int) -> npt.NDArray[np.uint64]:
    """Of each of `count` round trips, with `size` bytes there and back."""
    out = np.zeros(count, np.uint64)
    at = ffi.cast("uint64_t *", out.ctypes.data)
    check(lib.cxlkv_coherence_calls(VISIBILITY_MODES.index(mode), size, count, at))
    return out


def coherence_visible_ns(mode: str, record_bytes: int, count: int) -> npt.NDArray[np.uint64]:
    """From before each record is copied and published until another thread has it."""
    out = np.zeros(count, np.uint64)
    at = ffi.cast("uint64_t *", out.ctypes.data)
    check(lib.cxlkv_coherence_visible(VISIBILITY_MODES.index(mode), record_bytes, count, at))
    return out


def coherence_instruction() -> str:
    """What writes lines back here: "clwb", "clflushopt", "clflush", "dc" or "none"."""
    return str(ffi.string(lib.cxlkv_coherence_instruction()).decode())


# ---- what `cxlkv bench latency`, bandwidth, copy and gather measure ----

# By the core's number; "past": by stores that go past the cache.
MEMORY_KINDS = (
    "chase",
    "read",
    "write",
    "write_past",
    "mixed",
    "mixed_past",
    "copy",
    "copy_past",
)


class Stream(NamedTuple):
    """One thread's loop over memory, as cxlkv_memory_stream says."""

    kind: str
    memory: npt.NDArray[np.uint8]
    cpu: int = -1
    block_bytes: int = 256 << 10
    pace_ns: int = 0
    first_word: int = 0


class Streamed(NamedTuple):
    """What a loop did."""

    moved_bytes: int
    steps: int
    seconds: float
    sum: int


@contextlib.contextmanager
def memory_taken(size: int, node: int = -1) -> Iterator[npt.NDArray[np.uint8]]:
    """Private memory, of one NUMA node if that is given; gone when the block ends."""
    at = ffi.new("uint8_t **")
    try:
        check(lib.cxlkv_memory_take(size, node, at))
        yield np.frombuffer(ffi.buffer(at[0], size), np.uint8)
    finally:
        if at[0] != ffi.NULL:
            check(lib.cxlkv_memory_give(at[0], size))


def memory_ring(memory: npt.NDArray[np.uint8], seed: int) -> None:
    """Make one ring of its lines, for "chase"."""
    at = ffi.cast("uint8_t *", memory.ctypes.data)
    check(lib.cxlkv_memory_ring(at, memory.size, seed))


def memory_run(streams: Sequence[Stream], seconds: float) -> list[Streamed]:
    """Run all of them at once, each for so long."""
    args = ffi.new("cxlkv_memory_stream[]", len(streams))
    for into, stream in zip(args, streams, strict=True):
        into.kind, into.cpu = MEMORY_KINDS.index(stream.kind), stream.cpu
        into.memory = ffi.cast("uint8_t *", stream.memory.ctypes.data)
        into.bytes, into.block_bytes = stream.memory.size, stream.block_bytes
        into.pace_ns, into.first_word = stream.pace_ns, stream.first_word
    check(lib.cxlkv_memory_run(args, len(streams), round(seconds * 1e9)))
    return [Streamed(s.moved_bytes, s.steps, s.elapsed_ns * 1e-9, s.sum) for s in args]


def memory_gather_s(
    to: npt.NDArray[np.uint8],
    memory: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.uint64],
    piece_bytes: int,
) -> float:
    """Seconds for a memcpy of each piece of `memory`; they come one behind the other in `to`."""
    if to.size < offsets.size * piece_bytes or not offsets.flags.c_contiguous:
        raise errors.BadArgumentError("the pieces do not fit into `to`")
    return 1e-9 * check(
        lib.cxlkv_memory_gather(
            ffi.cast("uint8_t *", to.ctypes.data),
            ffi.cast("uint8_t *", memory.ctypes.data),
            memory.size,
            ffi.cast("uint64_t *", offsets.ctypes.data),
            offsets.size,
            piece_bytes,
        )
    )


# ---- pools ----


def _layout_struct(layout: KVLayout, checksum: bool, sketch: bool) -> Any:
    shape = layout.shape
    made = ffi.new("cxlkv_layout *")
    made.layers, made.kv_heads = layout.layers, shape.kv_heads
    made.head_dim, made.value_head_dim = shape.head_dim, layout.value_head_dim
    made.page_tokens = layout.page_tokens
    made.dtype = STORED.index(shape.dtype)
    made.values = VALUES.index(shape.values)
    made.group_count = len(layout.groups)
    made.windows = [group.window or 0 for group in layout.groups]
    made.group_of = list(layout.order)
    made.checksum, made.sketch = int(checksum), int(sketch)
    made.shard = list(layout.shard)
    made.model_id = layout.model_id.encode()
    return made


def _host_struct(host: tuple[int, bool, float] | None) -> Any:
    if host is None:
        return ffi.NULL
    return ffi.new("cxlkv_host *", {"number": host[0], "certified": host[1], "lease_s": host[2]})


def pool_place() -> Any:
    """For a pool that is to be made: who is interrupted finds it there."""
    return _place("cxlkv_pool **", lib.cxlkv_pool_destroy_at)


def pool_unmake(place: Any, path: str | None) -> None:
    """Closes and removes the pool that was made there, if one was."""
    if place[0] != ffi.NULL:
        lib.cxlkv_pool_close(place[0])
        if path is not None:
            lib.cxlkv_pool_remove(path.encode())


def pool_create(
    path: str | None,
    layout: KVLayout,
    checksum: bool,
    sketch: bool,
    sharing: tuple[int, int, int],
    capacity_bytes: int,
    force: bool,
    host: tuple[int, bool, float] | None,
    nodes: int = 0,
    in_place: bool = False,
    out: Any = None,
    replace: bool = False,
) -> Handle:
    """sharing is (kind, durable, hosts), host (number, certified, lease_s); nodes bit by node; out
    is a pool_place()."""
    out = pool_place() if out is None else out
    where = ffi.NULL if path is None else ffi.new("char[]", path.encode())
    flags = lib.CXLKV_CREATE_FORCE if force else 0
    flags |= lib.CXLKV_CREATE_IN_PLACE if in_place else 0
    flags |= lib.CXLKV_CREATE_REPLACE if replace else 0
    described = _layout_struct(layout, checksum, sketch)
    shared = ffi.new(
        "cxlkv_sharing *", dict(zip(("kind", "durable", "hosts"), sharing, strict=True))
    )
    own = _host_struct(host)
    check(
        lib.cxlkv_pool_create_at(where, described, shared, capacity_bytes, flags, own, nodes, out)
    )
    return _handle(out)


def pool_open(path: str, host: tuple[int, bool, float] | None) -> Handle:
    out = pool_place()
    check(lib.cxlkv_pool_open(path.encode(), _host_struct(host), out))
    return _handle(out)


def pool_close(pool: Handle) -> None:
    check(lib.cxlkv_pool_close(pool))


def pool_may_close(pool: Handle) -> None:
    check(lib.cxlkv_pool_may_close(pool))


def pool_remove(path: str) -> None:
    check(lib.cxlkv_pool_remove(path.encode()))


def pool_upgrade(path: str) -> int:
    """The format version that the pool had."""
    return check(lib.cxlkv_pool_upgrade(path.encode()))


def pool_format(pool: Handle) -> dict[str, int]:
    """A cxlkv_format."""
    got = ffi.new("cxlkv_format *")
    check(lib.cxlkv_pool_format(pool, got))
    return _fields(got)


def pool_layout(pool: Handle) -> tuple[KVLayout, bool, bool]:
    """The pool's layout, and whether its pieces have checksums, and its keys sketches."""
    got = ffi.new("cxlkv_layout *")
    check(lib.cxlkv_pool_layout(pool, got))
    order = list(got.group_of)[: got.layers]
    groups = [
        LayerGroup(
            layers=order.count(index),
            kv_heads=got.kv_heads,
            head_dim=got.head_dim,
            value_head_dim=got.value_head_dim,
            dtype=STORED[got.dtype],
            window=got.windows[index] or None,
            values=VALUES[got.values],
        )
        for index in range(got.group_count)
    ]
    layout = KVLayout.of(
        groups,
        order,
        page_tokens=got.page_tokens,
        shard=(got.shard[0], got.shard[1], got.shard[2], got.shard[3]),
        model_id=ffi.string(got.model_id).decode(errors="replace"),
    )
    return layout, bool(got.checksum), bool(got.sketch)


def pool_sharing(pool: Handle) -> tuple[int, int, int]:
    """(kind, durable, hosts), as pool_create() takes them."""
    got = ffi.new("cxlkv_sharing *")
    check(lib.cxlkv_pool_sharing(pool, got))
    return got.kind, got.durable, got.hosts


def _fields(struct: Any) -> dict[str, int]:
    fields = ffi.typeof(struct).item.fields
    return {name: int(getattr(struct, name)) for name, _ in fields if name != "reserved"}


def pool_geometry(pool: Handle) -> dict[str, int]:
    got = ffi.new("cxlkv_geometry *")
    check(lib.cxlkv_pool_geometry(pool, got))
    return _fields(got)


def pool_identity(pool: Handle) -> str:
    got = ffi.new("uint8_t[16]")
    check(lib.cxlkv_pool_identity(pool, got))
    return bytes(ffi.buffer(got)).hex()


def pool_stats(pool: Handle) -> dict[str, int]:
    got = ffi.new("cxlkv_stats *")
    check(lib.cxlkv_pool_stats(pool, got))
    return _fields(got)


def pool_hosts(pool: Handle) -> list[dict[str, int]]:
    rows = ffi.new("cxlkv_host_row[]", HOSTS_MAX)
    count = check(lib.cxlkv_pool_hosts(pool, rows, HOSTS_MAX))
    return [_numbers(rows[i]) for i in range(count)]


def pool_fence(pool: Handle, host: int, confirmed_off: bool) -> None:
    check(lib.cxlkv_pool_fence(pool, host, int(confirmed_off)))


def pool_check(pool: Handle, deep: bool, repair: bool) -> tuple[int, list[str]]:
    """How many problems there are, and their texts as far as 64 KiB hold them; before them what was
    repaired, in lines that say so."""
    size = 1 << 16
    text = ffi.new("char[]", size)
    flags = (lib.CXLKV_CHECK_DEEP if deep else 0) | (lib.CXLKV_CHECK_REPAIR if repair else 0)
    count = check(lib.cxlkv_pool_check(pool, flags, text, size))
    return count, ffi.string(text).decode(errors="replace").splitlines()


def pool_page_kind(pool: Handle) -> str:
    return str(ffi.string(lib.cxlkv_pool_page_kind(pool)).decode())


def pool_placed(pool: Handle, pages_max: int) -> tuple[dict[str, int], list[int]]:
    """The numbers of a cxlkv_placed, and its pages by node."""
    got = ffi.new("cxlkv_placed *")
    check(lib.cxlkv_pool_placed(pool, pages_max, got))
    names = ("policy", "wanted_nodes", "page_bytes", "pages_unseen", "pages_elsewhere")
    return {name: int(getattr(got, name)) for name in names}, list(got.pages_on)


def pool_set_threads(pool: Handle, threads: int) -> None:
    check(lib.cxlkv_pool_set_threads(pool, threads))


# ---- from outside, and what all processes count ----

GC_KINDS = ("half-made", "orphan", "idle")  # by the core's number
PROCESSES_MAX = 128
HOSTS_MAX = 64


class Overview(NamedTuple):
    """A cxlkv_overview with its rows: (numbers, counters) of each process."""

    numbers: dict[str, int]
    identity: str
    model_id: str
    totals: dict[str, int]
    processes: list[tuple[dict[str, int], dict[str, int]]]


def _numbers(struct: Any) -> dict[str, int]:
    fields = ffi.typeof(struct).fields
    return {
        name: int(getattr(struct, name))
        for name, field in fields
        if field.type.kind == "primitive" and name != "reserved"
    }


def _overview(fill: Callable[[Any, Any, int], int]) -> Overview:
    got = ffi.new("cxlkv_overview *")
    rows = ffi.new("cxlkv_process[]", PROCESSES_MAX)
    count = min(check(fill(got, rows, PROCESSES_MAX)), PROCESSES_MAX)
    return Overview(
        numbers=_numbers(got[0]),
        identity=bytes(ffi.buffer(got.identity)).hex(),
        model_id=ffi.string(got.model_id).decode(errors="replace"),
        totals=_numbers(got.totals),
        processes=[(_numbers(rows[i]), _numbers(rows[i].counters)) for i in range(count)],
    )


def pool_processes(pool: Handle) -> Overview:
    return _overview(lambda got, rows, count: lib.cxlkv_pool_processes(pool, got, rows, count))


def peek(path: str) -> Overview:
    """The same of a pool that is not opened: reads only."""
    name = os.fsencode(path)
    return _overview(lambda got, rows, count: lib.cxlkv_peek(name, got, rows, count))


class StripedPart(NamedTuple):
    """A device or file as part `number` of the `parts` of a striped pool, `identity` in hex."""

    number: int
    parts: int
    identity: str


def striped_part(path: str) -> StripedPart:
    """Raises NotAPoolError where it is none."""
    got = ffi.new("cxlkv_stripe *")
    check(lib.cxlkv_stripe_look(os.fsencode(path), got))
    return StripedPart(got.index, got.count, bytes(ffi.buffer(got.identity)).hex())


def gc(path: str, kind: str, idle_s: float, removes: bool) -> bool:
    """True when the file is provably nobody's; it is removed then, if `removes`."""
    code = lib.cxlkv_gc(os.fsencode(path), GC_KINDS.index(kind), idle_s, int(removes))
    return check(code) == 1


def state_folder() -> int:
    """A descriptor of this user's folder of host states, which other users cannot enter."""
    return int(check(lib.cxlkv_state_folder()))


def count_audit(pool: Handle, recall: float, mass: float) -> None:
    check(lib.cxlkv_pool_count_audit(pool, recall, mass))


# ---- pages ----


def pages_alloc(pool: Handle, pages: npt.NDArray[np.uint32]) -> None:
    """Fills `pages`, all of them; what raises leaves them as they were."""
    check(lib.cxlkv_pages_alloc(pool, len(pages), ffi.from_buffer("uint32_t[]", pages, True)))


def pages_free(pool: Handle, pages: npt.NDArray[np.uint32]) -> None:
    check(lib.cxlkv_pages_free(pool, len(pages), ffi.from_buffer("uint32_t[]", pages)))


# ---- sequences ----


def sequence_create(pool: Handle) -> Handle:
    out = _place("cxlkv_sequence **", lib.cxlkv_sequence_destroy_at)
    check(lib.cxlkv_sequence_create(pool, out))
    return _handle(out)


def sequence_fork(sequence: Handle) -> Handle:
    out = _place("cxlkv_sequence **", lib.cxlkv_sequence_destroy_at)
    check(lib.cxlkv_sequence_fork(sequence, out))
    return _handle(out)


def sequence_truncate(sequence: Handle, tokens: int) -> None:
    check(lib.cxlkv_sequence_truncate(sequence, tokens))


def sequence_release(sequence: Handle) -> None:
    check(lib.cxlkv_sequence_release(sequence))


def sequence_tokens(sequence: Handle) -> int:
    return check(lib.cxlkv_sequence_tokens(sequence))


def sequence_layer_tokens(sequence: Handle, layer: int) -> int:
    return check(lib.cxlkv_sequence_layer_tokens(sequence, layer))


def sequence_pages(sequence: Handle) -> npt.NDArray[np.uint32]:
    """Ids of its complete pages in the pool."""
    count = check(lib.cxlkv_sequence_pages(sequence, ffi.NULL, 0))
    pages = np.empty(count, np.uint32)
    got = lib.cxlkv_sequence_pages(sequence, ffi.from_buffer("uint32_t[]", pages, True), count)
    return pages[: check(got)]


def pool_prefault(pool: Handle, offset: int, size: int) -> int:
    """Brings so many bytes of the region into memory; returns the next offset."""
    return check(lib.cxlkv_pool_prefault(pool, offset, size))


def pool_memory(pool: Handle) -> tuple[int, int]:
    """(address, bytes) of the region in this process, until the pool is closed."""
    address = ffi.new("uint64_t *")
    size = check(lib.cxlkv_pool_memory(pool, address))
    return int(address[0]), size


def pool_view(pool: Handle) -> tuple[memoryview, weakref.ref[object]]:
    """The region, which keeps the pool open; and a reference that is dead once the view, its
    slices, and the arrays made of it are all gone."""
    return _view(*pool_memory(pool), (pool,))


def _view(
    address: int, size: int, kept: tuple[object, ...]
) -> tuple[memoryview, weakref.ref[object]]:
    """Of memory that lasts as long as what is `kept`; and a reference to its buffer."""
    # As _handle() does: it compares two pointers with a third, when the memory has no view left.
    memory = ffi.buffer(ffi.gc(ffi.cast(_BYTES, address), kept.__contains__), size)
    return memoryview(memory), weakref.ref(memory)


class Places(NamedTuple):
    """Where complete pages of a layer lie in the region, each array [pages]; -1: nowhere.

    Keys and values: of all kv heads, side by side at the geometry's key_piece_bytes and
    value_piece_bytes. Descriptors: -1 also of pages that have no seal yet.
    """

    keys: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]
    descriptors: npt.NDArray[np.int64]
    pages: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]


def sequence_places(sequence: Handle, layer: int, first: int = 0, room: int = 0) -> Places:
    """Of the pages from `first` on that are complete in the layer; room: a guess of how many."""
    while True:
        keys, values, descriptors = (np.empty(room, np.int64) for _ in range(3))
        pages, generations = np.empty(room, np.uint32), np.empty(room, np.uint64)
        out = (
            *(_int64(array, True) for array in (keys, values, descriptors)),
            _flat("uint32_t", pages, True),
            _flat("uint64_t", generations, True),
        )
        n = check(lib.cxlkv_sequence_places(sequence, layer, first, room, *out))
        if n <= room:
            return Places(keys[:n], values[:n], descriptors[:n], pages[:n], generations[:n])
        room = n


def sequence_export(sequence: Handle) -> bytes:
    size = check(lib.cxlkv_sequence_export(sequence, ffi.NULL, 0))
    out = ffi.new("uint8_t[]", size)
    return bytes(ffi.buffer(out, check(lib.cxlkv_sequence_export(sequence, out, size))))


def sequence_adopt(pool: Handle, handle: bytes) -> Handle:
    out = _place("cxlkv_sequence **", lib.cxlkv_sequence_destroy_at)
    check(lib.cxlkv_sequence_adopt(pool, handle, len(handle), out))
    return _handle(out)


# ---- prefixes ----

KEYS_CHAINED: int = lib.CXLKV_KEYS_CHAINED
KEYS_CONTENT: int = lib.CXLKV_KEYS_CONTENT
HASH_BYTES = 16
TokenIds = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint8]


def page_keys(ids: TokenIds, page_tokens: int, kind: int, root: bytes) -> Hashes:
    """[pages, HASH_BYTES]"""
    keys = np.empty((len(ids) // page_tokens, HASH_BYTES), np.uint8)
    out = ffi.from_buffer("uint8_t[]", keys, True)
    given = ffi.from_buffer("int64_t[]", ids)
    check(lib.cxlkv_page_keys(given, len(ids), page_tokens, kind, root, out))
    return keys


def tail_keys(ids: TokenIds, before: bytes) -> Hashes:
    """Of the first 1, 2 ... of these ids."""
    keys = np.empty((len(ids), HASH_BYTES), np.uint8)
    out = ffi.from_buffer("uint8_t[]", keys, True)
    check(lib.cxlkv_tail_keys(ffi.from_buffer("int64_t[]", ids), len(ids), before, out))
    return keys


def publish(sequence: Handle, hashes: bytes, tokens_per_key: int, content: bool = False) -> int:
    function = lib.cxlkv_publish_content if content else lib.cxlkv_publish
    return check(function(sequence, len(hashes) // HASH_BYTES, tokens_per_key, hashes))


def publish_tail(sequence: Handle, tokens: int, before: bytes, key: bytes) -> int:
    return check(lib.cxlkv_publish_tail(sequence, tokens, before, key))


def match(
    pool: Handle, hashes: bytes, lease_s: float, *, single: bool = False, content: bool = False
) -> tuple[int, Handle]:
    return _match(pool, hashes, lease_s, single, content, None, b"")


def match_prefix(
    pool: Handle, hashes: bytes, lease_s: float, ids: TokenIds, root: bytes
) -> tuple[int, Handle]:
    """The same for keys of page_keys(), and a page that is not full behind them."""
    return _match(pool, hashes, lease_s, True, False, ids, root)


def _match(
    pool: Handle,
    hashes: bytes,
    lease_s: float,
    single: bool,
    content: bool,
    ids: TokenIds | None,
    root: bytes,
) -> tuple[int, Handle]:
    given, first = ffi.from_buffer("uint8_t[]", hashes), ffi.from_buffer("uint8_t[]", root)
    args = ffi.new("cxlkv_match_args *")
    args.hashes, args.count = given, len(hashes) // HASH_BYTES
    args.single, args.content, args.lease_s = single, content, lease_s
    if ids is not None:
        args.ids, args.id_count = ffi.from_buffer("int64_t[]", ids), len(ids)
        args.root = first
    out = _place("cxlkv_sequence **", lib.cxlkv_sequence_destroy_at)
    tokens = check(lib.cxlkv_match_with(pool, args, out))
    return tokens, _handle(out)


def forget(pool: Handle, hashes: bytes) -> int:
    return check(lib.cxlkv_forget(pool, len(hashes) // HASH_BYTES, hashes))


class Scrubbed(NamedTuple):
    """Pages that were overwritten; that will be, when the last who holds one lets go (poisoned ones
    never are); and those of other hosts, of which nothing was done: they are theirs to scrub."""

    pages: int
    held: int
    elsewhere: int


def scrub(pool: Handle, hashes: bytes) -> Scrubbed:
    out = ffi.new("cxlkv_scrubbed *")
    check(lib.cxlkv_scrub(pool, len(hashes) // HASH_BYTES, hashes, out))
    return Scrubbed(out.pages, out.held, out.elsewhere)


def pin(pool: Handle, hashes: bytes, pinned: bool) -> int:
    return check(lib.cxlkv_pin(pool, len(hashes) // HASH_BYTES, hashes, pinned))


def evictable(pool: Handle, page_count: int) -> npt.NDArray[np.bool_]:
    flags = np.empty(page_count, np.bool_)
    check(lib.cxlkv_evictable(pool, ffi.from_buffer("uint8_t[]", flags, True), page_count))
    return flags


# ---- whole records, out of the pool and into it ----

RECORD_PRESENT: int = lib.CXLKV_RECORD_PRESENT  # codes, by record or page; 0: done
PAGE_HELD: int = lib.CXLKV_PAGE_HELD
E_STALE: int = -lib.CXLKV_E_STALE
E_CORRUPT: int = -lib.CXLKV_E_CORRUPT
E_GEOMETRY: int = -lib.CXLKV_E_GEOMETRY
E_BUSY: int = -lib.CXLKV_E_BUSY
NO_PAGE = 2**32 - 1
Codes = npt.NDArray[np.int32]
Records = npt.NDArray[np.uint8]  # [count, record_bytes]
Names = npt.NDArray[np.uint8]  # [count, 16]: hashes under which pages are published


def record_shape(pool: Handle) -> tuple[int, int]:
    """Bytes of a record outside of the pool, and the CRC of what two pools must agree in."""
    layout = ffi.new("uint32_t *")
    return check(lib.cxlkv_record_bytes(pool, layout)), int(layout[0])


def _flat(kind: str, array: npt.NDArray[Any], writable: bool = False) -> Any:
    return ffi.from_buffer(f"{kind}[]", array, writable)


def records_read(
    pool: Handle,
    pages: npt.NDArray[np.uint32],
    generations: npt.NDArray[np.uint64],
    out: Records,
) -> Codes:
    """Fills rows of out with published pages of these generations; the codes say which."""
    _check_records(pool, len(pages), out)
    if len(generations) != len(pages):
        raise errors.BadArgumentError(f"{len(pages)} pages, {len(generations)} generations")
    codes = np.zeros(len(pages), np.int32)
    given = (_flat("uint32_t", pages), _flat("uint64_t", generations), _flat("uint8_t", out, True))
    check(lib.cxlkv_records_read(pool, len(pages), *given, _int32(codes, True)))
    return codes


def records_write(pool: Handle, records: Records, parents: Names | None = None) -> Codes:
    """Publishes records, all or none when pages are short (PoolFullError); the codes say which.

    parents: the name of the page before each, zeros for none; None: not known.
    """
    _check_records(pool, len(records), records)
    if parents is not None and parents.shape != (len(records), 16):
        raise errors.BadArgumentError(f"parents of shape {parents.shape}: a name for each record")
    codes = np.zeros(len(records), np.int32)
    before = ffi.NULL if parents is None else _flat("uint8_t", parents)
    given = (len(records), _flat("uint8_t", records), before, _int32(codes, True))
    check(lib.cxlkv_records_write(pool, *given))
    return codes


def _check_records(pool: Handle, count: int, records: Records) -> None:
    wanted = (count, record_shape(pool)[0])
    if records.shape != wanted or records.dtype != np.uint8 or not records.flags.c_contiguous:
        raise errors.BadArgumentError(
            f"records of shape {records.shape} and dtype {records.dtype}: {wanted} of uint8 "
            "wanted, without gaps"
        )


def names(pool: Handle, hashes: bytes, places: int) -> npt.NDArray[np.uint8]:
    """[keys, places, parts, 16]: under what match() looks for each of the keys, in its order."""
    if places < 0:
        raise errors.BadArgumentError(f"{places} places")
    count = len(hashes) // 16
    out = np.empty((count, places, pool_geometry(pool)["part_count"], 16), np.uint8)
    check(lib.cxlkv_names(pool, count, hashes, places, _flat("uint8_t", out, True)))
    return out


def find_pages(pool: Handle, names: Names) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """The published page of each name and its generation; NO_PAGE and 0 where there is none."""
    pages, generations = np.empty(len(names), np.uint32), np.empty(len(names), np.uint64)
    if names.shape != (len(names), 16) or not names.flags.c_contiguous:
        raise errors.BadArgumentError(f"names of shape {names.shape}: rows of 16 bytes wanted")
    given = (_flat("uint32_t", pages, True), _flat("uint64_t", generations, True))
    check(lib.cxlkv_find_pages(pool, len(names), _flat("uint8_t", names), *given))
    return pages, generations


def names_of(records: Records) -> Names:
    """Under which each of the records is published; zeros for one that was not read."""
    return np.ascontiguousarray(records[:, 16:32])


def forget_pages(
    pool: Handle,
    pages: npt.NDArray[np.uint32],
    generations: npt.NDArray[np.uint64],
    only_unheld: bool,
) -> Codes:
    """Takes published pages of these generations out of the index; code 0: the page is free now."""
    if len(generations) != len(pages):
        raise errors.BadArgumentError(f"{len(pages)} pages, {len(generations)} generations")
    codes = np.zeros(len(pages), np.int32)
    given = (_flat("uint32_t", pages), _flat("uint64_t", generations), int(only_unheld))
    check(lib.cxlkv_forget_pages(pool, len(pages), *given, _int32(codes, True)))
    return codes


# ---- objects: what put() and get_into() move; the pool stores them under keys of 16 bytes ----

Sizes = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]
ABSENT: int = lib.CXLKV_OBJECT_ABSENT
DAMAGED: int = lib.CXLKV_OBJECT_DAMAGED


def object_keys(names: bytes, ends: Addresses, root: bytes) -> Hashes:
    """Of the names that end at `ends` in `names`: [n, HASH_BYTES]."""
    keys = np.empty((len(ends), HASH_BYTES), np.uint8)
    given = ffi.from_buffer("uint64_t[]", ends)
    out = ffi.from_buffer("uint8_t[]", keys, True)
    check(lib.cxlkv_object_keys(names, given, len(ends), root, out))
    return keys


def _buffers(addresses: Addresses, sizes: Addresses, starts: Addresses | None) -> Any:
    """A cxlkv_buffers, and what must stay alive."""
    struct = ffi.new("cxlkv_buffers *")
    kept = struct.addresses, struct.sizes, struct.starts = (
        ffi.from_buffer("uint64_t[]", addresses),
        ffi.from_buffer("uint64_t[]", sizes),
        ffi.NULL if starts is None else ffi.from_buffer("uint64_t[]", starts),
    )
    return struct, kept


def objects_put(
    pool: Handle, keys: bytes, addresses: Addresses, sizes: Addresses, starts: Addresses | None
) -> npt.NDArray[np.int32]:
    """0 for each object that is new, RECORD_PRESENT for the others."""
    codes = np.empty(len(keys) // HASH_BYTES, np.int32)
    struct, kept = _buffers(addresses, sizes, starts)
    check(lib.cxlkv_objects_put(pool, len(codes), keys, struct, _int32(codes, True)))
    del kept
    return codes


def objects_get(
    pool: Handle, keys: bytes, addresses: Addresses, sizes: Addresses, starts: Addresses | None
) -> Sizes:
    """Bytes of each object, ABSENT or DAMAGED."""
    got = np.empty(len(keys) // HASH_BYTES, np.int64)
    struct, kept = _buffers(addresses, sizes, starts)
    check(lib.cxlkv_objects_get(pool, len(got), keys, struct, _int64(got, True)))
    del kept
    return got


def objects_sizes(pool: Handle, keys: bytes) -> Sizes:
    got = np.empty(len(keys) // HASH_BYTES, np.int64)
    check(lib.cxlkv_objects_sizes(pool, len(got), keys, _int64(got, True)))
    return got


def objects_ranges(pool: Handle, keys: bytes, ranges: Addresses, address: int, size: int) -> Sizes:
    """ranges is uint64 [m, 4]: object, offset, bytes, target in the memory at `address`."""
    got = np.empty(len(ranges), np.int64)
    given = ffi.cast("cxlkv_range *", ffi.from_buffer(ranges))
    to = ffi.cast("uint8_t *", address)
    count = len(keys) // HASH_BYTES
    check(
        lib.cxlkv_objects_ranges(pool, count, keys, len(ranges), given, to, size, _int64(got, True))
    )
    return got


def lease_take(pool: Handle, keys: bytes) -> tuple[Handle, Addresses, Sizes]:
    """The lease, and of each object its address, 0 where there is none, and its size."""
    count = len(keys) // HASH_BYTES
    addresses, sizes = np.zeros(count, np.uint64), np.empty(count, np.int64)
    out = _place("cxlkv_lease **", lib.cxlkv_lease_destroy_at)
    at = ffi.from_buffer("uint64_t[]", addresses, True)
    check(lib.cxlkv_lease_take(pool, count, keys, at, _int64(sizes, True), out))
    return _handle(out), addresses, sizes


def lease_reserve(pool: Handle, sizes: Addresses) -> tuple[Handle, Addresses]:
    """The lease, and the address of each page."""
    addresses = np.zeros(len(sizes), np.uint64)
    out = _place("cxlkv_lease **", lib.cxlkv_lease_destroy_at)
    at = ffi.from_buffer("uint64_t[]", addresses, True)
    given = ffi.from_buffer("uint64_t[]", sizes)
    check(lib.cxlkv_lease_reserve(pool, len(sizes), given, at, out))
    return _handle(out), addresses


_BYTES = ffi.typeof("uint8_t *")


def lease_views(
    pool: Handle, lease: Handle, places: Sequence[tuple[int, int]], writable: bool
) -> tuple[list[memoryview | None], list[weakref.ref[object] | None]]:
    """Of each (address, bytes) its memory, None at address 0; and a reference by which it can be
    told whether somebody has a view of it still, or of a part of it, in whatever form.

    Each keeps the lease, and the pool, which would be unmapped when nobody has it any more.
    """
    views: list[memoryview | None] = []
    memories: list[weakref.ref[object] | None] = []
    for address, size in places:
        view = reference = None
        if address:
            view, reference = _view(address, size, (pool, lease))
            if not writable:
                view = view.toreadonly()
        views.append(view)
        memories.append(reference)
    return views, memories


def lease_publish(
    lease: Handle, places: npt.NDArray[np.uint32], keys: bytes
) -> npt.NDArray[np.int32]:
    """As objects_put()."""
    codes = np.empty(len(places), np.int32)
    given = ffi.from_buffer("uint32_t[]", places)
    check(lib.cxlkv_lease_publish(lease, len(places), given, keys, _int32(codes, True)))
    return codes


def lease_release(lease: Handle, places: npt.NDArray[np.uint32] | None) -> None:
    """None: all. Of a closed pool nothing is left to give back."""
    given = ffi.NULL if places is None else ffi.from_buffer("uint32_t[]", places)
    code = lib.cxlkv_lease_release(lease, 0 if places is None else len(places), given)
    if code != -lib.CXLKV_E_CLOSED:
        check(code)


# ---- how much pages are used ----

PUBLISHED = np.dtype(
    [
        ("generation", np.uint64),
        ("hash", np.uint64, 2),
        *((name, np.uint32) for name in ("page", "used", "born", "parent", "hits", "heat")),
        *((name, np.uint32) for name in ("part", "flags")),
        ("reserved", np.uint32, 2),
    ]
)
assert PUBLISHED.itemsize == ffi.sizeof("cxlkv_published")
PUBLISHED_HELD: int = lib.CXLKV_PUBLISHED_HELD
PUBLISHED_PINNED: int = lib.CXLKV_PUBLISHED_PINNED


def hotness_read(
    pool: Handle, first: int, count: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], int]:
    """Counts of pages [first, first + count), the epochs of their last uses, and the epoch now."""
    counts, epochs = np.empty(count, np.uint32), np.empty(count, np.uint32)
    out = (ffi.from_buffer("uint32_t[]", array, True) for array in (counts, epochs))
    return counts, epochs, check(lib.cxlkv_hotness_read(pool, first, count, *out))


def hotness_advance(pool: Handle) -> int:
    return check(lib.cxlkv_hotness_advance(pool))


def hotness_enable(pool: Handle, on: bool) -> None:
    check(lib.cxlkv_hotness_enable(pool, int(on)))


def pool_published(pool: Handle) -> tuple[npt.NDArray[np.void], int]:
    """A row of PUBLISHED for each page that match() finds, by page; and the clock."""
    clock = ffi.new("uint64_t *")
    room = check(lib.cxlkv_pool_published(pool, ffi.NULL, 0, clock))
    while True:
        rows = np.empty(room, PUBLISHED)
        at = ffi.from_buffer("cxlkv_published[]", rows, True)
        count = check(lib.cxlkv_pool_published(pool, at, room, clock))
        if count <= room:
            return rows[:count], int(clock[0])
        room = count


def choose(
    scores: npt.NDArray[np.float32],
    ages: npt.NDArray[np.uint32],
    parents: npt.NDArray[np.uint32],
    blocked: npt.NDArray[np.bool_],
    wanted: int,
) -> npt.NDArray[np.uint32]:
    """Rows that go, leaves first; all five are of one length and contiguous, or this refuses."""
    count = len(scores)
    arrays = ((scores, np.float32), (ages, np.uint32), (parents, np.uint32), (blocked, np.bool_))
    if any(a.shape != (count,) or a.dtype != t or not a.flags.c_contiguous for a, t in arrays):
        raise errors.BadArgumentError("choose: arrays of one length, and of the documented types")
    chosen = np.empty(min(wanted, count), np.uint32)
    taken = check(
        lib.cxlkv_choose(
            count,
            ffi.from_buffer("float[]", scores),
            ffi.from_buffer("uint32_t[]", ages),
            ffi.from_buffer("uint32_t[]", parents),
            ffi.from_buffer("uint8_t[]", blocked),
            len(chosen),
            ffi.from_buffer("uint32_t[]", chosen, require_writable=True),
        )
    )
    return chosen[:taken]


# ---- batches: one call for all their sequences ----


class _Arguments:
    """A thread's structs for arguments: filled and used within one call, so never shared."""

    def __init__(self) -> None:
        self.keys = ffi.new("cxlkv_rows *")
        self.values = ffi.new("cxlkv_rows *")
        self.select = ffi.new("cxlkv_select_args *")
        self.fetch = ffi.new("cxlkv_fetch_args *")
        self.attend = ffi.new("cxlkv_attend_args *")


def _arguments() -> _Arguments:
    try:
        return _local.arguments  # type: ignore[no-any-return]
    except AttributeError:
        _local.arguments = _Arguments()
        return _local.arguments  # type: ignore[no-any-return]


def _fill_rows(struct: Any, view: View) -> None:
    struct.data = ffi.cast("void *", view.address)
    struct.stride_bytes = view.strides
    struct.dtype = view.dtype


def _int32(array: npt.NDArray[np.int32], writable: bool = False) -> Any:
    return ffi.from_buffer("int32_t[]", array, writable)


def batch_create(pool: Handle, sequences: Sequence[Handle]) -> Handle:
    out = _place("cxlkv_batch **", lib.cxlkv_batch_destroy_at)
    check(lib.cxlkv_batch_create(pool, len(sequences), list(sequences), out))
    return _handle(out)


def batch_append(
    batch: Handle, layer: int, keys: View, values: View | None, starts: Starts, rewind: int
) -> int:
    """values is None when they are a prefix of the keys; rewind -1: none given."""
    arguments = _arguments()
    _fill_rows(arguments.keys, keys)
    value_rows = ffi.NULL
    if values is not None:
        value_rows = arguments.values
        _fill_rows(value_rows, values)
    return check(
        lib.cxlkv_batch_append(batch, layer, arguments.keys, value_rows, _int32(starts), rewind)
    )


def _fill_blocks(keys: View, values: View | None, starts: Starts, blocks: Starts) -> Any:
    """A cxlkv_blocks of [block_count, kv_heads, block_tokens, dim], and what must stay alive."""
    struct = ffi.new("cxlkv_blocks *")
    struct.keys = ffi.cast("void *", keys.address)
    struct.key_stride_bytes = keys.strides[:2]
    if values is not None:
        struct.values = ffi.cast("void *", values.address)
        struct.value_stride_bytes = values.strides[:2]
    struct.block_count, struct.block_tokens = keys.shape[0], keys.shape[2]
    struct.dtype = keys.dtype
    kept = struct.starts, struct.blocks = _int32(starts), _int32(blocks)
    return struct, kept


def batch_append_blocks(
    batch: Handle,
    layer: int,
    keys: View,
    values: View | None,
    blocks: Starts,
    starts: Starts,
    rewind: int,
) -> int:
    """Of keys and values the last two axes are contiguous; starts[-1] is len(blocks)."""
    struct, kept = _fill_blocks(keys, values, starts, blocks)
    code = check(lib.cxlkv_batch_append_blocks(batch, layer, struct, rewind))
    del kept
    return code


def batch_fetch_blocks(
    batch: Handle,
    layer: int,
    keys: View,
    values: View | None,
    blocks: Starts,
    starts: Starts,
    first: Starts,
) -> int:
    """The same, as targets. Errors say in `good` how far each sequence is right."""
    struct, kept = _fill_blocks(keys, values, starts, blocks)
    good = np.zeros(len(first), np.int32)
    code = lib.cxlkv_batch_fetch_blocks(batch, layer, struct, _int32(first), _int32(good, True))
    del kept
    try:
        return check(code)
    except errors.CXLKVError as error:
        error.good = tuple(good.tolist())
        raise


def batch_attach(
    batch: Handle,
    starts: Starts,
    pages: npt.NDArray[np.uint32],
    checksums: npt.NDArray[np.uint32] | None,
    rewind: int,
    verify: bool,
) -> int:
    """pages [parts, n] and checksums [layers, n, kv_heads, 4] are contiguous; rewind -1: none."""
    args = ffi.new("cxlkv_attach_args *")
    args.starts = _int32(starts)
    args.pages = given = ffi.from_buffer("uint32_t[]", pages)
    sums = ffi.NULL if checksums is None else ffi.from_buffer("uint32_t[]", checksums)
    args.checksums = sums
    args.rewind, args.verify = rewind, int(verify)
    code = check(lib.cxlkv_batch_attach(batch, args))
    del given, sums  # until now they keep the arrays alive
    return code


def budgets(rows: Sequence[tuple[int, int, float, int, int]]) -> Any:
    """An array of cxlkv_budget from (kind, pages, amount, sinks, recent)."""
    return ffi.new("cxlkv_budget[]", list(rows))


def batch_select(
    batch: Handle,
    layer: int,
    queries: View,
    starts: Starts,
    budget_array: Any,
    codes: tuple[int, int, int],
    scale: float,
    errors: float,
    pages_min: int,
    pages: Pages,
    scores: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
) -> tuple[int, int, Any]:
    """Fills the three arrays; returns (code, k, the call's struct). code is E_ROOM when pages is
    too small for k, and then nothing was scored. codes is (method, union, per)."""
    args = _arguments().select
    _fill_rows(args.queries, queries)
    args.layer, args.q_heads = layer, queries.shape[1]
    args.budgets, args.budget_count = budget_array, len(budget_array)
    args.method, args.union_over, args.per = codes
    args.scale, args.errors, args.pages_min = scale, errors, pages_min
    args.capacity = pages.size
    kept = (_int32(starts), _int32(pages, True), _int32(counts, True))
    args.starts, args.pages, args.counts = kept
    kept_scores = ffi.from_buffer("float[]", scores, True)
    args.scores = kept_scores
    code = lib.cxlkv_batch_select(batch, args)
    if code < 0 and code != E_ROOM:
        check(code)
    return code, args.k, args


def _fill_picked(struct: Any, picked: tuple[Pages, int] | None) -> Any:
    """picked is ([lists, kv_heads, k], per); returns what must stay alive during the call."""
    if picked is None:
        struct.pages = ffi.NULL
        return None
    pages, per = picked
    kept = _int32(pages)
    struct.pages, struct.lists, struct.k, struct.per = kept, pages.shape[0], pages.shape[2], per
    return kept


def batch_fetch(
    batch: Handle,
    layer: int,
    picked: tuple[Pages, int] | None,
    starts: Starts | None,
    keys: tuple[int, int],
    values: tuple[int, int],
) -> tuple[int, int]:
    """Fills (address, bytes) of keys and values; returns (code, k), code E_ROOM when too small."""
    args = _arguments().fetch
    kept = _fill_picked(args.picked, picked)
    kept_starts = ffi.NULL if starts is None else _int32(starts)
    args.layer, args.starts = layer, kept_starts
    args.keys, args.key_capacity_bytes = ffi.cast("void *", keys[0]), keys[1]
    args.values, args.value_capacity_bytes = ffi.cast("void *", values[0]), values[1]
    code = lib.cxlkv_batch_fetch(batch, args)
    del kept
    if code < 0 and code != E_ROOM:
        check(code)
    return code, args.k


def batch_verify(batch: Handle, layer: int, picked: tuple[Pages, int]) -> None:
    struct = ffi.new("cxlkv_picked *")
    kept = _fill_picked(struct, picked)
    check(lib.cxlkv_batch_verify(batch, layer, struct))
    del kept


def batch_attend(
    batch: Handle,
    layer: int,
    queries: View,
    starts: Starts,
    picked: tuple[Pages, int] | None,
    scale: float,
    softcap: float,
    out_address: int,
    lse: View,
) -> int:
    """Fills out and lse; returns the bytes of K and V that were read."""
    args = _arguments().attend
    _fill_rows(args.queries, queries)
    kept = _fill_picked(args.picked, picked)
    kept_starts = _int32(starts)
    args.layer, args.q_heads, args.starts = layer, queries.shape[1], kept_starts
    args.scale, args.softcap = scale, softcap
    args.out = ffi.cast("void *", out_address)
    args.lse = ffi.cast("float *", lse.address)
    code = lib.cxlkv_batch_attend(batch, args)
    del kept
    return check(code)


# ---- the worker near the memory ----

WORKER_USES = ("none", "if_there", "only")  # by the core's number


def worker_make(
    pool: Handle, slots: int, request_bytes: int, response_bytes: int, mode: str
) -> Handle:
    out = _place("cxlkv_worker **", lib.cxlkv_worker_destroy_at)
    code = VISIBILITY_MODES.index(mode)
    check(lib.cxlkv_worker_make(pool, slots, request_bytes, response_bytes, code, out))
    return _handle(out)


def worker_destroy(worker: Handle) -> None:
    ffi.release(worker)


def worker_serve(worker: Handle, timeout_s: float) -> int:
    """Answers requests for so long; returns how many."""
    return check(lib.cxlkv_worker_serve(worker, timeout_s))


def worker_state(worker: Handle) -> dict[str, int]:
    """What the worker says of itself."""
    got = ffi.new("cxlkv_worker_state *")
    check(lib.cxlkv_worker_state_of(worker, got))
    return _numbers(got[0])


def pool_use_worker(pool: Handle, use: str, deadline_s: float) -> None:
    check(lib.cxlkv_pool_use_worker(pool, WORKER_USES.index(use), deadline_s))


def pool_worker_state(pool: Handle) -> tuple[dict[str, int], str]:
    """What this process's use of its worker has come to, and why the last call was not its."""
    got = ffi.new("cxlkv_worker_state *")
    check(lib.cxlkv_pool_worker_state(pool, got))
    return _numbers(got[0]), ffi.string(got.why).decode(errors="replace")


# ---- the near tier ----

Units = npt.NDArray[np.int64]
# By the core's number: what became of a unit that was to be promoted.
NEAR_CODES = ("done", "there", "no_room", "not_sealed", "changed", "damaged", "unknown")


def _int64(array: Units, writable: bool = False) -> Any:
    return ffi.from_buffer("int64_t[]", array, writable)


def near_make(pool: Handle, size: int, made: list[int]) -> None:
    """made: gets a 0 when the tier was made, also when an interrupt comes then."""
    keep(made, lib.cxlkv_near_make, pool, size)
    check(made[0])


def near_destroy(pool: Handle) -> None:
    check(lib.cxlkv_near_destroy(pool))


def near_promote(
    pool: Handle, units: Units, generations: npt.NDArray[np.uint64] | None
) -> tuple[int, npt.NDArray[np.int32]]:
    """How many can be read near now, and of each unit its place in NEAR_CODES."""
    codes = np.empty(len(units), np.int32)
    wanted = ffi.NULL if generations is None else ffi.from_buffer("uint64_t[]", generations)
    out = _int32(codes, True)
    done = check(lib.cxlkv_near_promote(pool, len(units), _int64(units), wanted, out))
    return done, codes


def near_demote(pool: Handle, units: Units) -> int:
    return check(lib.cxlkv_near_demote(pool, len(units), _int64(units)))


def near_heat(
    pool: Handle, room: int
) -> tuple[Units, npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """(units, counts, resident) of all units with a count or a copy; room is a guess of how many
    these are."""
    while True:
        units, counts = np.empty(room, np.int64), np.empty(room, np.uint32)
        resident = np.empty(room, np.uint8)
        found = check(
            lib.cxlkv_near_heat(
                pool,
                _int64(units, True),
                ffi.from_buffer("uint32_t[]", counts, True),
                ffi.from_buffer("uint8_t[]", resident, True),
                room,
            )
        )
        if found <= room:
            return units[:found], counts[:found], resident[:found].astype(np.bool_)
        room = found + found // 8


def near_stats(pool: Handle) -> dict[str, int]:
    got = ffi.new("cxlkv_near_state *")
    check(lib.cxlkv_near_stats(pool, got))
    return _numbers(got[0])


def batch_units(batch: Handle, layer: int, picked: tuple[Pages, int], starts: Starts) -> Units:
    """The units of chosen pages, in their shape; -1 for what cannot be promoted."""
    struct = ffi.new("cxlkv_picked *")
    kept = _fill_picked(struct, picked)
    units = np.empty(picked[0].shape, np.int64)
    check(lib.cxlkv_batch_units(batch, layer, struct, _int32(starts), _int64(units, True)))
    del kept
    return units


# ---- words that a device and this process share ----


def word_wait(address: int, old: int, timeout_s: float) -> tuple[bool, int]:
    """Waits for another value than `old` at an address that stays mapped: (whether it came, it)."""
    found = ffi.new("int64_t *")
    word = ffi.cast("int64_t *", address)
    return check(lib.cxlkv_word_wait(word, old, timeout_s, found)) == 1, int(found[0])


def word_store(address: int, value: int) -> None:
    """Stores it after all that was written before."""
    check(lib.cxlkv_word_store(ffi.cast("int64_t *", address), value))


# ---- the litmus run ----

LITMUS_REGIONS_MAX: int = lib.CXLKV_LITMUS_REGIONS_MAX
LITMUS_REGION_BYTES: int = lib.CXLKV_LITMUS_REGION_BYTES
LITMUS_MESSAGE_BYTES: int = lib.CXLKV_LITMUS_MESSAGE_BYTES
LITMUS_TESTS = ("message passing", "store buffering", "late eviction")  # by the core's number
LITMUS_KINDS = ("", "lost", "stale", "both old", "overwritten")


def flush_name() -> str:
    """What lines are written back with: "clwb", "clflushopt", "clflush", "dc" or "none"."""
    return str(ffi.string(lib.cxlkv_flush_name()).decode())


def litmus_make(addresses: Sequence[int], role: int, pressure_bytes: int, wait_s: float) -> Handle:
    """The regions stay mapped until the handle is gone, or released by litmus_destroy()."""
    out = _place("cxlkv_litmus **", lib.cxlkv_litmus_destroy_at, pressure_bytes)
    regions = ffi.new("void *[]", [ffi.cast("void *", address) for address in addresses])
    check(lib.cxlkv_litmus_make(regions, len(addresses), role, pressure_bytes, wait_s, out))
    return _handle(out)


def litmus_destroy(litmus: Handle) -> None:
    ffi.release(litmus)


def litmus_meet(litmus: Handle) -> bool:
    """One look for the other role."""
    return check(lib.cxlkv_litmus_meet(litmus)) == 1


def litmus_exchange(litmus: Handle, message: bytes) -> bytes:
    """Both roles: the other's message, filled up with zeros."""
    own = message.ljust(LITMUS_MESSAGE_BYTES, b"\0")
    peer = ffi.new("uint8_t[]", LITMUS_MESSAGE_BYTES)
    check(lib.cxlkv_litmus_exchange(litmus, own, peer))
    return bytes(ffi.buffer(peer))


class LitmusCounts:
    """A cxlkv_litmus_found that rounds add to."""

    def __init__(self) -> None:
        self.struct = ffi.new("cxlkv_litmus_found *")

    def numbers(self) -> dict[str, int]:
        return _numbers(self.struct[0])


def litmus_run(
    litmus: Handle, test: int, pair: tuple[int, int], rounds: range, counts: LitmusCounts
) -> None:
    which = ffi.new("cxlkv_litmus_case *")
    which.test, (which.first, which.second) = test, pair
    which.first_round, which.rounds = rounds.start, len(rounds)
    check(lib.cxlkv_litmus_run(litmus, which, counts.struct))


def litmus_give_up(litmus: Handle) -> None:
    lib.cxlkv_litmus_give_up(litmus)
