"""The binding of pools: make, open, describe and map them, and take pages of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv._core.base import (
    Handle,
    check,
    checked,
    crc32c,
    handle_of,
    made,
    new_place,
    numbers_of,
    view_of,
)
from cxlkv._native import ffi, lib
from cxlkv.layout import ENCODINGS, STORED, VALUES, KVLayout, LayerGroup, Rotary, States

_POOL = ("cxlkv_pool **", lib.cxlkv_pool_destroy)
# Counters that stats() tells of this process, and those of all; telemetry has the others too.
_OWN = (
    *("appended_bytes", "scored_bytes", "fetched_bytes", "attended_bytes", "corrupt_pieces"),
    *("stale_handles", "window_pages_freed", "window_pages_skipped", "queued_drops", "lock_waits"),
)
_OF_THE_POOL = ("reaped_processes", "rebuilds", "lost_lines", "log_rescans", "lost_forgets")


def _layout_struct(layout: KVLayout, checksum: bool, sketch: bool) -> Any:
    layout.check_stored()
    made = ffi.new("cxlkv_layout *")
    made.layers, made.page_tokens = layout.layers, layout.page_tokens
    if layout.has_shapes:
        for shape, group in zip(made.shapes, layout.groups, strict=False):
            _fill_shape(shape, group)
    else:
        _fill_shape(made, layout.groups[0])
    made.k_encoding = ENCODINGS.index(layout.k_encoding)
    made.v_encoding = ENCODINGS.index(layout.v_encoding)
    made.group_count = len(layout.groups)
    _fill_rotary(made.rotary, layout)
    made.windows = [group.window or 0 for group in layout.groups]
    made.group_of = list(layout.order)
    made.checksum, made.sketch = int(checksum), int(sketch)
    made.shard = list(layout.shard)
    made.model_id = layout.model_id.encode()
    if layout.states is not None:
        made.state_bytes, made.state_digest = layout.states.bytes, layout.states.digest
    made.object_bytes = layout.object_limit or 0
    return made


def _fill_shape(made: Any, group: LayerGroup) -> None:
    """Fills in a cxlkv_shape, or a cxlkv_layout whose layers all have this shape."""
    made.kv_heads, made.head_dim = group.kv_heads, group.head_dim
    made.value_head_dim = group.value_head_dim or group.head_dim
    made.dtype, made.values = STORED.index(group.dtype), VALUES.index(group.values)


def _fill_rotary(made: Any, layout: KVLayout) -> None:
    frequencies: list[float] = []
    for index, group in enumerate(layout.groups):
        if group.rotary is not None:
            made.pairs[index] = len(group.rotary.frequencies)
            made.neighbours |= group.rotary.neighbours << index
            frequencies += group.rotary.frequencies
    made.frequencies = frequencies


def _rotary_from(got: Any, group: int) -> Rotary | None:
    """The Rotary of a cxlkv_rotary, which the core has checked."""
    first, count = sum(got.pairs[0:group]), got.pairs[group]
    if not count:
        return None
    frequencies = tuple(got.frequencies[first : first + count])
    return Rotary(frequencies, bool(got.neighbours >> group & 1))


def layout_crc(layout: KVLayout, sketch: bool) -> int:
    """The CRC of what a pool of this layout and another must agree in to exchange records;
    record_shape() has it of a pool."""
    described = bytes(ffi.buffer(_layout_struct(layout, False, sketch)))
    last = "rotary" if layout.is_encoded else "k_encoding"  # as before there were any
    states, at, shapes = (
        ffi.offsetof("cxlkv_layout", name) for name in ("state_digest", "object_bytes", "shapes")
    )
    told = described[: ffi.offsetof("cxlkv_layout", last)]
    told += described[states:at] if layout.states is not None else b""
    told += described[shapes:] if layout.has_shapes else b""
    return crc32c(told + (described[at:shapes] if layout.object_limit else b""))


def _sharing_struct(sharing: tuple[int, int, int]) -> Any:
    return ffi.new("cxlkv_sharing *", dict(zip(("kind", "durable", "hosts"), sharing, strict=True)))


def _host_struct(host: tuple[int, bool, float] | None) -> Any:
    if host is None:
        return ffi.NULL
    return ffi.new("cxlkv_host *", {"number": host[0], "certified": host[1], "lease_s": host[2]})


def pool_place() -> Any:
    """The place of a pool that is to be made: a caller that is interrupted finds it there."""
    return new_place(*_POOL)


def pool_unmake(place: Any, path: str | None) -> None:
    """Closes and removes the pool that was made there, if one was."""
    if place[0] != ffi.NULL:
        lib.cxlkv_pool_close(place[0], False)
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
    small_pages: bool = False,
) -> Handle:
    """sharing is (kind, durable, hosts), host (number, certified, lease_s); nodes bit by node; out
    is a pool_place()."""
    out = pool_place() if out is None else out
    where = ffi.NULL if path is None else ffi.new("char[]", path.encode())
    flags = lib.CXLKV_CREATE_FORCE if force else 0
    flags |= lib.CXLKV_CREATE_IN_PLACE if in_place else 0
    flags |= lib.CXLKV_CREATE_REPLACE if replace else 0
    flags |= lib.CXLKV_CREATE_SMALL_PAGES if small_pages else 0
    described = _layout_struct(layout, checksum, sketch)
    shared = _sharing_struct(sharing)
    own = _host_struct(host)
    check(lib.cxlkv_pool_create(where, described, shared, capacity_bytes, flags, own, nodes, out))
    return handle_of(out)


def pool_plan(
    layout: KVLayout,
    checksum: bool,
    sketch: bool,
    sharing: tuple[int, int, int],
    capacity_bytes: int,
) -> dict[str, int]:
    """The geometry that pool_create() of the same would give the pool; nothing is made."""
    planned = ffi.new("cxlkv_geometry *")
    described, shared = _layout_struct(layout, checksum, sketch), _sharing_struct(sharing)
    check(lib.cxlkv_pool_plan(described, shared, capacity_bytes, planned))
    return numbers_of(planned[0])


class LayerPlace(NamedTuple):
    """Where the pieces of a layer lie; tuples are by kind: digest, sketch, K, V."""

    part: int  # which of the pages for the same tokens
    row: int  # of its layers
    piece_bytes: tuple[int, ...]  # from one kv head's to the next; 0: the pool has none
    offsets: tuple[int, ...]  # of slot 0, from the extent's start
    slot_bytes: tuple[int, ...]  # from one slot to the next


def layer_places(layout: KVLayout, geometry: Mapping[str, int]) -> tuple[LayerPlace, ...]:
    """Of each layer, in a pool of this geometry."""
    return _planned(layout, geometry)[0]


def planned_state_pages(layout: KVLayout, geometry: Mapping[str, int]) -> int:
    """Pages of a state checkpoint in a pool of this geometry."""
    return _planned(layout, geometry)[1] if layout.states is not None else 0


def _planned(layout: KVLayout, geometry: Mapping[str, int]) -> tuple[tuple[LayerPlace, ...], int]:
    described = _layout_struct(layout, True, geometry["sketch_piece_bytes"] > 0)
    got = ffi.new("cxlkv_layer_place[]", layout.layers)
    of = (described, ffi.new("cxlkv_geometry *", dict(geometry)), got)
    states = check(lib.cxlkv_pool_plan_layers(*of))
    places = (
        LayerPlace(one.part, one.row, *map(tuple, (one.piece_bytes, one.offsets, one.slot_bytes)))
        for one in got
    )
    return tuple(places), states


def pool_open(path: str, host: tuple[int, bool, float] | None) -> Handle:
    return made(*_POOL, lib.cxlkv_pool_open, path.encode(), _host_struct(host))


def pool_close(pool: Handle) -> None:
    check(lib.cxlkv_pool_close(pool, False))


def pool_may_close(pool: Handle) -> None:
    """Raises what a close would raise now."""
    check(lib.cxlkv_pool_close(pool, True))


pool_set: Callable[[Handle, int, int], int] = checked(lib.cxlkv_pool_set)
count_audit: Callable[[Handle, float, float], int] = checked(lib.cxlkv_pool_count_audit)
# Brings so many bytes of the region into memory, from an offset on, as huge pages or as they are;
# returns the next offset.
pool_prefault: Callable[[Handle, int, int, int], int] = checked(lib.cxlkv_pool_prefault)


def pool_set_threads(pool: Handle, threads: int) -> None:
    pool_set(pool, lib.CXLKV_SET_THREADS, threads)


def _description(pool: Handle) -> Any:
    """Hold it while its structs and arrays are read: cffi frees it beneath them."""
    got = ffi.new("cxlkv_description *")
    lib.cxlkv_pool_describe(pool, got)
    return got


def pool_layout(pool: Handle) -> tuple[KVLayout, bool, bool]:
    """The pool's layout, and whether its pieces have checksums, and its keys sketches."""
    described = _description(pool)  # of which its layout is a part
    got = described.layout
    return layout_from(got), bool(got.checksum), bool(got.sketch)


def layout_from(got: Any) -> KVLayout:
    """The KVLayout of a cxlkv_layout."""
    order = list(got.group_of)[: got.layers]
    groups = [
        LayerGroup(
            layers=order.count(index),
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_head_dim=shape.value_head_dim,
            dtype=STORED[shape.dtype],
            window=got.windows[index] or None,
            values=VALUES[shape.values],
            k_encoding=ENCODINGS[got.k_encoding],
            v_encoding=ENCODINGS[got.v_encoding],
            rotary=_rotary_from(got.rotary, index),
        )
        for index in range(got.group_count)
        for shape in [got if got.kv_heads else got.shapes[index]]
    ]
    if got.object_bytes:
        return KVLayout.objects(
            got.object_bytes,
            slot=got.page_tokens,
            shard=(got.shard[0], got.shard[1], got.shard[2], got.shard[3]),
            model_id=ffi.string(got.model_id).decode(errors="replace"),
        )
    return KVLayout.of(
        groups,
        order,
        page_tokens=got.page_tokens,
        shard=(got.shard[0], got.shard[1], got.shard[2], got.shard[3]),
        model_id=ffi.string(got.model_id).decode(errors="replace"),
        states=States(got.state_bytes, got.state_digest) if got.state_bytes else None,
    )


def pool_sharing(pool: Handle) -> tuple[int, int, int]:
    """(kind, durable, hosts), as pool_create() takes them."""
    described = _description(pool)
    return described.sharing.kind, described.sharing.durable, described.sharing.hosts


def pool_geometry(pool: Handle) -> dict[str, int]:
    described = _description(pool)
    return numbers_of(described.geometry)


def pool_format(pool: Handle) -> dict[str, int]:
    """Numbers of a cxlkv_format: zeros of a closed pool."""
    described = _description(pool)
    return numbers_of(described.format)


def pool_identity(pool: Handle) -> str:
    described = _description(pool)
    return bytes(described.identity).hex()


def pool_stats(pool: Handle) -> dict[str, int]:
    got = ffi.new("cxlkv_stats *")
    check(lib.cxlkv_pool_stats(pool, got))
    found = numbers_of(got.pages, "pages_") | numbers_of(got[0])
    own, of_all = got.own, got.all
    for name in _OWN:
        found[name] = getattr(own, name)
    for name in _OF_THE_POOL:
        found[name] = getattr(of_all, name)
    return found


def pool_page_kind(pool: Handle) -> str:
    described = _description(pool)
    return str(ffi.string(described.page_kind).decode())


def pool_placed(pool: Handle, pages_max: int) -> tuple[dict[str, int], list[int]]:
    """The numbers of a cxlkv_placed, and its pages by node."""
    got = ffi.new("cxlkv_placed *")
    check(lib.cxlkv_pool_placed(pool, pages_max, got))
    names = ("policy", "wanted_nodes", "page_bytes", "pages_unseen", "pages_elsewhere")
    return {name: int(getattr(got, name)) for name in names}, list(got.pages_on)


def pages_alloc(pool: Handle, pages: npt.NDArray[np.uint32]) -> None:
    """Fills `pages`, all of them; what raises leaves them as they were."""
    check(lib.cxlkv_pages_alloc(pool, len(pages), ffi.from_buffer("uint32_t[]", pages, True)))


def pages_free(pool: Handle, pages: npt.NDArray[np.uint32]) -> None:
    check(lib.cxlkv_pages_free(pool, len(pages), ffi.from_buffer("uint32_t[]", pages)))


def pool_memory(pool: Handle) -> tuple[int, int]:
    """(address, bytes) of the region in this process, until the pool is closed."""
    address = ffi.new("uint64_t *")
    size = check(lib.cxlkv_pool_memory(pool, address))
    return int(address[0]), size


def pool_view(pool: Handle) -> tuple[memoryview, weakref.ref[object]]:
    """The region, which keeps the pool open; and a reference that is dead once the view, its
    slices, and the arrays made of it are all gone."""
    return view_of(*pool_memory(pool), (pool,))
