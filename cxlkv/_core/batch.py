"""The binding of batches: append, select, fetch and attend, one call for all sequences."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv import errors
from cxlkv._core.base import (
    E_BUSY,
    E_ROOM,
    Handle,
    check,
    flat,
    int32s,
    int64s,
    made,
    new_place,
)
from cxlkv._native import ffi, lib
from cxlkv.arrays import PageIndices, Starts, Units, View


class _Arguments(threading.local):
    """A thread's structs for arguments: filled and used within one call, so never shared. They have
    addresses of arrays, which the call's own arguments keep."""

    def __init__(self) -> None:
        self.keys = ffi.new("cxlkv_rows *")
        self.values = ffi.new("cxlkv_rows *")
        self.select = ffi.new("cxlkv_select_args *")
        self.fetch = ffi.new("cxlkv_fetch_args *")
        self.attend = ffi.new("cxlkv_attend_args *")


_arguments = _Arguments()


def _fill_rows(struct: Any, view: View) -> None:
    struct.data = ffi.cast("void *", view.address)
    struct.stride_bytes = view.strides
    struct.dtype = view.dtype


def batch_create(pool: Handle, sequences: Sequence[Handle]) -> Handle:
    of = (pool, len(sequences), list(sequences))
    return made("cxlkv_batch **", lib.cxlkv_batch_destroy, lib.cxlkv_batch_create, *of)


def batch_append(
    batch: Handle, layer: int, keys: View, values: View | None, starts: Starts, rewind: int
) -> int:
    """values is None when they are a prefix of the keys; rewind -1: none given."""
    key_rows, value_rows = _arguments.keys, ffi.NULL
    key_rows.data = ffi.cast("void *", keys.address)
    key_rows.stride_bytes, key_rows.dtype = keys.strides, keys.dtype
    if values is not None:
        value_rows = _arguments.values
        value_rows.data = ffi.cast("void *", values.address)
        value_rows.stride_bytes, value_rows.dtype = values.strides, values.dtype
    offsets = ffi.from_buffer("int32_t[]", starts)
    code: int = lib.cxlkv_batch_append(batch, layer, key_rows, value_rows, offsets, rewind)
    return code if code >= 0 else check(code)


def _fill_blocks(keys: View, values: View | None, starts: Starts, blocks: Starts) -> Any:
    """A cxlkv_blocks of [block_count, kv_heads, block_tokens, dim]."""
    struct = ffi.new("cxlkv_blocks *")
    struct.keys = ffi.cast("void *", keys.address)
    struct.key_stride_bytes = keys.strides[:2]
    if values is not None:
        struct.values = ffi.cast("void *", values.address)
        struct.value_stride_bytes = values.strides[:2]
    struct.block_count, struct.block_tokens = keys.shape[0], keys.shape[2]
    struct.dtype = keys.dtype
    struct.starts, struct.blocks = int32s(starts), int32s(blocks)
    return struct


def batch_append_blocks(
    batch: Handle,
    layer: int,
    keys: View,
    values: View | None,
    blocks: Starts,
    starts: Starts,
    rewind: int,
) -> int:
    """Append blocks: the last two axes of keys and values are contiguous; starts[-1] is
    len(blocks)."""
    struct = _fill_blocks(keys, values, starts, blocks)
    return check(lib.cxlkv_batch_append_blocks(batch, layer, struct, rewind))


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
    struct = _fill_blocks(keys, values, starts, blocks)
    good = np.zeros(len(first), np.int32)
    code = lib.cxlkv_batch_fetch_blocks(batch, layer, struct, int32s(first), int32s(good, True))
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
    args.starts = int32s(starts)
    args.pages = flat("uint32_t", pages)
    args.checksums = ffi.NULL if checksums is None else flat("uint32_t", checksums)
    args.rewind, args.verify = rewind, int(verify)
    return check(lib.cxlkv_batch_attach(batch, args))


def budgets(rows: Sequence[tuple[int, int, float, int, int]]) -> Any:
    """An array of cxlkv_budget from (kind, pages, amount, sinks, recent)."""
    return ffi.new("cxlkv_budget[]", list(rows))


def _fill_select(
    args: Any,
    layer: int,
    queries: View,
    starts: Starts,
    budget_array: Any,
    codes: tuple[int, int, int, int, int],
    numbers: tuple[float, float, float],
) -> None:
    _fill_rows(args.queries, queries)
    args.layer, args.q_heads, args.starts = layer, queries.shape[1], int32s(starts)
    args.budgets, args.budget_count = budget_array, len(budget_array)
    args.method, args.union_over, args.per, args.refresh, args.scorer = codes
    args.scale, args.errors, args.read_rate = numbers


def batch_cheapest(
    batch: Handle,
    layer: int,
    queries: View,
    starts: Starts,
    budget_array: Any,
    codes: tuple[int, int, int, int, int],
    numbers: tuple[float, float, float],
) -> int:
    """What method "auto" comes to in a decode; arguments as of batch_select()."""
    args = _arguments.select
    _fill_select(args, layer, queries, starts, budget_array, codes, numbers)
    return check(lib.cxlkv_batch_cheapest(batch, args))


def batch_select(
    batch: Handle,
    layer: int,
    queries: View,
    starts: Starts,
    budget_array: Any,
    codes: tuple[int, int, int, int, int],
    numbers: tuple[float, float, float],
    pages: PageIndices,
    scores: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
) -> tuple[int, int, Any]:
    """Fills the three arrays; returns (code, k, the call's struct). code is E_ROOM when pages is
    too small for k, and then nothing was scored. codes is (method, union, per, refresh, scorer),
    numbers (scale, errors, read_rate)."""
    args = _arguments.select
    _fill_select(args, layer, queries, starts, budget_array, codes, numbers)
    args.capacity = pages.size
    args.pages, args.counts = int32s(pages, True), int32s(counts, True)
    args.scores = ffi.from_buffer("float[]", scores, True)
    code = lib.cxlkv_batch_select(batch, args)
    if code < 0 and code != E_ROOM:
        check(code)
    return code, args.k, args


class Chosen(NamedTuple):
    """What a worker's chooser chose for sequences up to `end`; 0: it has to be asked again. pages
    [lists, kv_heads, k]; log_weights [lists, kv_heads, k, page_tokens], None: all 0; rows: k, v and
    log_counts [lists, kv_heads, n, ..]."""

    end: int
    pages: PageIndices
    log_weights: npt.NDArray[np.float32] | None
    rows: tuple[npt.NDArray[np.float32], ...] | None
    bytes_scored: int
    bytes_fetched: int


_UNFINISHED = Chosen(0, np.empty((0, 0, 0), np.int32), None, None, 0, 0)


def batch_choose(
    batch: Handle,
    layer: int,
    queries: View,
    starts: Starts,
    budget_array: Any,
    words: tuple[int, int, float],
    first: int,
    dims: tuple[int, int, int, int],
    may_wait: bool,
) -> Chosen | None:
    """By the worker, for sequences from `first` on; None: this process has to. words is (per, the
    chooser's number, scale), dims (kv_heads, page_tokens, head_dim, value_head_dim). may_wait:
    whether it may be asked again, else BusyError of a worker that is to do it in any case."""
    args = _arguments.select
    per, chooser, scale = words
    codes = (0, 0, per, 0, chooser)
    _fill_select(args, layer, queries, starts, budget_array, codes, (scale, 0.0, 0.0))
    out = new_place("cxlkv_choice **", lib.cxlkv_choice_destroy)
    code = lib.cxlkv_batch_choose(batch, args, first, may_wait, out)
    if code == E_BUSY and may_wait:
        return _UNFINISHED
    if check(code) == 0:
        return None
    try:
        return _chosen(out[0], dims)
    finally:
        ffi.release(out)


def _chosen(choice: Any, dims: tuple[int, int, int, int]) -> Chosen:
    heads, page_tokens, head_dim, value_dim = dims
    picked = choice.picked
    lists, k, n = picked.lists, picked.k, picked.row_count

    def copy(pointer: Any, dtype: type, *shape: int) -> npt.NDArray[Any]:
        size = 4 * int(np.prod(shape))
        return np.frombuffer(ffi.buffer(pointer, size), dtype).reshape(shape).copy()

    weights, rows = None, None
    if picked.weight_tokens:
        weights = copy(picked.log_weights, np.float32, lists, heads, k, page_tokens)
    if n:
        rows = (
            copy(picked.row_keys, np.float32, lists, heads, n, head_dim),
            copy(picked.row_values, np.float32, lists, heads, n, value_dim),
            copy(picked.row_log_counts, np.float32, lists, heads, n),
        )
    pages = copy(picked.pages, np.int32, lists, heads, k)
    return Chosen(choice.end, pages, weights, rows, choice.bytes_scored, choice.bytes_fetched)


def stages(done: Any) -> tuple[int, float, int, int, int]:
    """Unpack the struct of a select or a decode: lists, mean error, tokens, bytes of sketches, of
    keys."""
    keys = done.bytes_scored - done.bytes_sketched
    return done.lists_staged, done.mean_error, done.tokens_scored, done.bytes_sketched, keys


def _fill_picked(struct: Any, picked: tuple[PageIndices, int] | None) -> None:
    """picked is ([lists, kv_heads, k], per)."""
    if picked is None:
        struct.pages = ffi.NULL
        return
    pages, struct.per = picked
    struct.pages, struct.lists, struct.k = int32s(pages), pages.shape[0], pages.shape[2]


def batch_fetch(
    batch: Handle,
    layer: int,
    picked: tuple[PageIndices, int] | None,
    starts: Starts | None,
    keys: tuple[int, int],
    values: tuple[int, int],
    as_kept: bool = False,
) -> tuple[int, int]:
    """Fills (address, bytes) of keys and values; returns (code, k), code E_ROOM when too small."""
    args = _arguments.fetch
    _fill_picked(args.picked, picked)
    args.layer, args.starts = layer, ffi.NULL if starts is None else int32s(starts)
    args.keys, args.key_capacity_bytes = ffi.cast("void *", keys[0]), keys[1]
    args.values, args.value_capacity_bytes = ffi.cast("void *", values[0]), values[1]
    args.as_kept = as_kept
    code = lib.cxlkv_batch_fetch(batch, args)
    if code < 0 and code != E_ROOM:
        check(code)
    return code, args.k


def batch_verify(batch: Handle, layer: int, picked: tuple[PageIndices, int]) -> None:
    struct = ffi.new("cxlkv_picked *")
    _fill_picked(struct, picked)
    check(lib.cxlkv_batch_verify(batch, layer, struct))


class More(NamedTuple):
    """What an attend's picked pages come with, contiguous: log_weights [lists, kv_heads, k,
    page_tokens or 1]; of virtual rows k, v and log_counts [lists, kv_heads, n, ..]."""

    weights: npt.NDArray[np.float32] | None
    rows: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]] | None


def _attend_to_more(batch: Handle, args: Any, more: More) -> int:
    """The next attend of this thread finds the struct without it."""
    picked = args.picked
    try:
        if more.weights is not None:
            picked.weight_tokens = more.weights.shape[3]
            picked.log_weights = flat("float", more.weights)
        if more.rows is not None:
            picked.row_keys, picked.row_values, picked.row_log_counts = (
                flat("float", each) for each in more.rows
            )
            picked.row_count = more.rows[2].shape[2]
        return int(lib.cxlkv_batch_attend(batch, args))
    finally:
        picked.log_weights = picked.row_keys = ffi.NULL
        picked.row_values = picked.row_log_counts = ffi.NULL
        picked.row_count = 0


def batch_attend(
    batch: Handle,
    layer: int,
    queries: View,
    starts: Starts,
    picked: tuple[PageIndices, int] | None,
    scale: float,
    softcap: float,
    error: float,
    out_address: int,
    lse: View,
    mass: tuple[int, int] | None = None,
    more: More | None = None,
) -> tuple[int, int]:
    """Fills out, lse and [rows, kv_heads, k] at mass (address, elements); returns (the bytes of K
    and V that were read, k). E_ROOM in place of the bytes: mass is too small for k, and
    nothing was read. more: with picked only."""
    args = _arguments.attend
    _fill_rows(args.queries, queries)
    _fill_picked(args.picked, picked)
    args.layer, args.q_heads, args.starts = layer, queries.shape[1], int32s(starts)
    args.scale, args.softcap, args.error = scale, softcap, error
    args.out = ffi.cast("void *", out_address)
    args.lse = ffi.cast("float *", lse.address)
    args.mass = ffi.NULL
    if mass is not None:
        args.mass, args.mass_capacity = ffi.cast("float *", mass[0]), mass[1]
    if more is None:
        code = lib.cxlkv_batch_attend(batch, args)
    else:
        code = _attend_to_more(batch, args, more)
    if code < 0 and (code != E_ROOM or mass is None):
        check(code)
    return code, args.mass_k


class DecodeArguments:
    """All that a decode takes but its layer and the addresses of its arrays, which each call gives:
    the layers of a step share the rest. One call at a time.

    views are of (q, k, v), codes (method, union, per, refresh, scorer), numbers (scale, softcap,
    error, errors, read_rate). budget_array None: attend to all pages.
    """

    def __init__(
        self,
        views: tuple[View, View, View | None],
        starts: Starts,
        rewind: int,
        budget_array: Any,
        codes: tuple[int, int, int, int, int],
        numbers: tuple[float, float, float, float, float],
    ):
        self._args = args = ffi.new("cxlkv_decode_args *")
        self._kept = (starts, budget_array)  # the struct has their addresses
        rows = (args.queries, args.keys, args.values)
        self._rows = rows[: 2 if views[2] is None else 3]
        for struct, each in zip(rows, views, strict=True):
            if each is not None:
                struct.stride_bytes, struct.dtype = each.strides, each.dtype
        args.q_heads, args.rewind, args.starts = views[0].shape[1], rewind, int32s(starts)
        if budget_array is not None:
            args.budgets, args.budget_count = budget_array, len(budget_array)
        self._method = codes[0]
        _, args.union_over, args.per, args.refresh, args.scorer = codes
        args.scale, args.softcap, args.error, args.errors, args.read_rate = numbers

    def call(self, batch: Handle, layer: int, addresses: Sequence[int], out: int, lse: int) -> Any:
        """Fills out and lse; returns the call's struct, which is the next call's, too. addresses:
        of q, k and, where there is one, v.

        After an error, `error.appended` says whether the tokens are there.
        """
        args = self._args
        args.layer, args.method = layer, self._method
        for struct, address in zip(self._rows, addresses, strict=True):
            struct.data = ffi.cast("void *", address)
        args.out, args.lse = ffi.cast("void *", out), ffi.cast("float *", lse)
        code = lib.cxlkv_batch_decode(batch, args)
        if code < 0:
            appended = bool(args.appended)
            try:
                check(code)
            except errors.CXLKVError as error:
                error.appended = appended
                raise
        return args


def batch_units(
    batch: Handle, layer: int, picked: tuple[PageIndices, int], starts: Starts
) -> Units:
    """The units of chosen pages, in their shape; -1 for what cannot be promoted."""
    struct = ffi.new("cxlkv_picked *")
    _fill_picked(struct, picked)
    units = np.empty(picked[0].shape, np.int64)
    check(lib.cxlkv_batch_units(batch, layer, struct, int32s(starts), int64s(units, True)))
    return units


def pool_add_scorer(
    pool: Handle,
    of: tuple[int, str],
    sizes: tuple[int, int, int, int],
    functions: tuple[int, int],
    parameters: npt.NDArray[np.float32] | None,
) -> None:
    """of: number and name; sizes: (summary_bytes, read_bytes, parameter_bytes, log_sums);
    functions: addresses of (summarise, score); parameters [layers, kv_heads, n]. These stay where
    they are as long as the pool is open."""
    struct = ffi.new("cxlkv_scorer *")
    struct.id, name = of
    struct.name = name.encode()[: ffi.sizeof(struct.name) - 1]
    struct.summary_bytes, struct.read_bytes, struct.parameter_bytes, struct.log_sums = sizes
    summarise, score = functions
    struct.summarise = ffi.cast(ffi.typeof(struct.summarise), summarise)
    struct.score = ffi.cast(ffi.typeof(struct.score), score)
    if parameters is not None:
        struct.parameters = ffi.from_buffer("float[]", parameters)
        struct.parameter_count = parameters.shape[2]
    check(lib.cxlkv_pool_add_scorer(pool, struct))
