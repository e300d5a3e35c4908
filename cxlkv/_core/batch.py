"""The binding of batches: append, select, fetch and attend, one call for all sequences."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
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
from cxlkv.arrays import BudgetRow, PageIndices, Starts, Units, View
from cxlkv.layout import KVLayout


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


Scored = Any  # a cxlkv_scored: how it went that pages were chosen


class Criteria(NamedTuple):
    """The fields of a cxlkv_criteria but its budgets: how to choose pages, as the core numbers it.
    errors: how many of its errors an estimate may be short; read_rate: GB/s, 0: not known."""

    method: int
    union: int
    per: int
    refresh: int = 1
    scorer: int = 0
    errors: float = 0.0
    read_rate: float = 0.0


@dataclass(frozen=True)
class Criterion:
    """The struct of the core, and the budgets that it has the address of."""

    struct: Any
    budgets: Any


def criterion(rows: Sequence[BudgetRow], criteria: Criteria) -> Criterion:
    """rows: one for all sequences, or one for each."""
    made, budgets = ffi.new("cxlkv_criteria *"), ffi.new("cxlkv_budget[]", list(rows))
    made.budgets, made.budget_count = budgets, len(rows)
    made.method, made.union_over, made.per, made.refresh, made.scorer = criteria[:5]
    made.errors, made.read_rate = criteria[5:]
    return Criterion(made[0], budgets)


def _fill_select(
    args: Any, layer: int, queries: View, starts: Starts, by: Criterion, scale: float
) -> None:
    rows = args.queries
    rows.data = ffi.cast("void *", queries.address)
    rows.stride_bytes, rows.dtype = queries.strides, queries.dtype
    args.layer, args.q_heads, args.by, args.scale = layer, queries.shape[1], by.struct, scale
    args.starts = ffi.from_buffer("int32_t[]", starts)


def batch_cheapest(
    batch: Handle, layer: int, queries: View, starts: Starts, by: Criterion, scale: float
) -> int:
    """What method "auto" comes to in a decode."""
    args = ffi.new("cxlkv_select_args *", {"asks": 1})
    _fill_select(args, layer, queries, starts, by, scale)
    check(lib.cxlkv_batch_select(batch, args))
    return int(args.found.method)


def batch_select(
    batch: Handle,
    layer: int,
    queries: View,
    starts: Starts,
    by: Criterion,
    scale: float,
    pages: PageIndices,
    scores: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
) -> tuple[int, int, Scored]:
    """Fills the three arrays; returns (code, k, how it went, until this thread's next call). code
    is E_ROOM when pages is too small for k, and then nothing was scored."""
    args = _arguments.select
    _fill_select(args, layer, queries, starts, by, scale)
    args.capacity = pages.size
    args.pages = ffi.from_buffer("int32_t[]", pages, True)
    args.scores = ffi.from_buffer("float[]", scores, True)
    args.counts = ffi.from_buffer("int32_t[]", counts, True)
    code = lib.cxlkv_batch_select(batch, args)
    if code < 0 and code != E_ROOM:
        check(code)
    return code, args.k, args.found


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
    by: Criterion,
    scale: float,
    first: int,
    layout: KVLayout,
    may_wait: bool,
) -> Chosen | None:
    """By the worker, for sequences from `first` on; None: this process has to. by.scorer: the
    chooser's number. may_wait: whether it may be asked again, else BusyError of a worker that is to
    do it in any case."""
    args = _arguments.select
    _fill_select(args, layer, queries, starts, by, scale)
    out = new_place("cxlkv_choice **", lib.cxlkv_choice_destroy)
    code = lib.cxlkv_batch_choose(batch, args, first, may_wait, out)
    if code == E_BUSY and may_wait:
        return _UNFINISHED
    if check(code) == 0:
        return None
    try:
        return _chosen(out[0], layout)
    finally:
        ffi.release(out)


def _chosen(choice: Any, layout: KVLayout) -> Chosen:
    heads, picked = layout.kv_heads, choice.picked
    lists, k, n = picked.lists, picked.k, picked.row_count

    def copy(pointer: Any, dtype: type, *shape: int) -> npt.NDArray[Any]:
        size = 4 * int(np.prod(shape))
        return np.frombuffer(ffi.buffer(pointer, size), dtype).reshape(shape).copy()

    weights, rows = None, None
    if picked.weight_tokens:
        weights = copy(picked.log_weights, np.float32, lists, heads, k, layout.page_tokens)
    if n:
        rows = (
            copy(picked.row_keys, np.float32, lists, heads, n, layout.head_dim),
            copy(picked.row_values, np.float32, lists, heads, n, layout.value_head_dim),
            copy(picked.row_log_counts, np.float32, lists, heads, n),
        )
    pages = copy(picked.pages, np.int32, lists, heads, k)
    return Chosen(choice.end, pages, weights, rows, choice.bytes_scored, choice.bytes_fetched)


class Picked(NamedTuple):
    """Chosen pages [lists, kv_heads, k], and per what a list is, by the core's number. An attend
    also takes, contiguous: log_weights [lists, kv_heads, k, page_tokens or 1]; of virtual rows k, v
    and log_counts [lists, kv_heads, n, ..]."""

    pages: PageIndices
    per: int
    weights: npt.NDArray[np.float32] | None = None
    rows: tuple[npt.NDArray[np.float32], ...] | None = None


def _fill_picked(struct: Any, picked: Picked | None) -> None:
    if picked is None:
        struct.pages = ffi.NULL
        return
    pages = picked.pages
    struct.pages = ffi.from_buffer("int32_t[]", pages)
    struct.lists, struct.k, struct.per = pages.shape[0], pages.shape[2], picked.per


def batch_fetch(
    batch: Handle,
    layer: int,
    picked: Picked | None,
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


def batch_verify(batch: Handle, layer: int, picked: Picked) -> None:
    struct = ffi.new("cxlkv_picked *")
    _fill_picked(struct, picked)
    check(lib.cxlkv_batch_chosen(batch, layer, struct, ffi.NULL, True, ffi.NULL))


def _attend_weighed(batch: Handle, args: Any, picked: Picked) -> int:
    """The next attend of this thread finds the struct without weights and rows."""
    struct = args.picked
    try:
        if picked.weights is not None:
            struct.weight_tokens = picked.weights.shape[3]
            struct.log_weights = flat("float", picked.weights)
        if picked.rows is not None:
            struct.row_keys, struct.row_values, struct.row_log_counts = (
                flat("float", each) for each in picked.rows
            )
            struct.row_count = picked.rows[2].shape[2]
        return int(lib.cxlkv_batch_attend(batch, args))
    finally:
        struct.log_weights = struct.row_keys = ffi.NULL
        struct.row_values = struct.row_log_counts = ffi.NULL
        struct.row_count = 0


def batch_attend(
    batch: Handle,
    layer: int,
    queries: View,
    starts: Starts,
    picked: Picked | None,
    scale: float,
    softcap: float,
    error: float,
    out: int,
    lse: int,
    mass: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Fills memory at the addresses out and lse, and [rows, kv_heads, k] at mass (address,
    elements); returns (the bytes of K and V that were read, k). E_ROOM in place of the bytes: mass
    is too small for k, and nothing was read."""
    args = _arguments.attend
    rows = args.queries
    rows.data = ffi.cast("void *", queries.address)
    rows.stride_bytes, rows.dtype = queries.strides, queries.dtype
    _fill_picked(args.picked, picked)
    args.layer, args.q_heads = layer, queries.shape[1]
    args.starts = ffi.from_buffer("int32_t[]", starts)
    args.scale, args.softcap, args.error = scale, softcap, error
    args.out, args.lse = ffi.cast("void *", out), ffi.cast("float *", lse)
    args.mass = ffi.NULL
    if mass is not None:
        args.mass, args.mass_capacity = ffi.cast("float *", mass[0]), mass[1]
    if picked is None or (picked.weights is None and picked.rows is None):
        code = lib.cxlkv_batch_attend(batch, args)
    else:
        code = _attend_weighed(batch, args, picked)
    if code < 0 and (code != E_ROOM or mass is None):
        check(code)
    return code, args.mass_k


class DecodeArguments:
    """All that a decode takes but its layer and the addresses of its arrays, which each call gives:
    the layers of a step share the rest. One call at a time.

    views are of (q, k, v). by None: attend to all pages.
    """

    def __init__(
        self,
        views: tuple[View, View, View | None],
        starts: Starts,
        rewind: int,
        by: Criterion | None,
        scale: float,
        softcap: float,
        error: float,
    ):
        self._args = args = ffi.new("cxlkv_decode_args *")
        self._kept = (starts, by)  # the struct has their addresses
        rows = (args.queries, args.keys, args.values)
        self._rows = rows[: 2 if views[2] is None else 3]
        for struct, each in zip(rows, views, strict=True):
            if each is not None:
                struct.stride_bytes, struct.dtype = each.strides, each.dtype
        args.q_heads, args.rewind, args.starts = views[0].shape[1], rewind, int32s(starts)
        if by is not None:
            args.by = by.struct
        args.scale, args.softcap, args.error = scale, softcap, error

    def call(self, batch: Handle, layer: int, addresses: Sequence[int], out: int, lse: int) -> Any:
        """Fills out and lse; returns the call's struct, which is the next call's, too. addresses:
        of q, k and, where there is one, v.

        After an error, `error.appended` says whether the tokens are there.
        """
        args = self._args
        args.layer = layer
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


def batch_units(batch: Handle, layer: int, picked: Picked, starts: Starts) -> Units:
    """The units of chosen pages, in their shape; -1 for what cannot be promoted."""
    struct = ffi.new("cxlkv_picked *")
    _fill_picked(struct, picked)
    units = np.empty(picked.pages.shape, np.int64)
    out = int64s(units, True)
    check(lib.cxlkv_batch_chosen(batch, layer, struct, int32s(starts), False, out))
    return units


class ScorerCode(NamedTuple):
    """A scorer's cxlkv_scorer: bytes of a summary, bytes read of it and of its parameters (0:
    score() returns how many), and addresses of its two C functions.
    """

    summary_bytes: int
    read_bytes: int
    parameter_bytes: int
    log_sums: bool
    summarise: int
    score: int


def pool_add_scorer(
    pool: Handle,
    number: int,
    name: str,
    code: ScorerCode,
    parameters: npt.NDArray[np.float32] | None,
) -> None:
    """parameters [layers, kv_heads, n]. These and the functions stay where they are as long as the
    pool is open."""
    struct = ffi.new("cxlkv_scorer *")
    struct.id, struct.name = number, name.encode()[: ffi.sizeof(struct.name) - 1]
    struct.summary_bytes, struct.read_bytes = code.summary_bytes, code.read_bytes
    struct.parameter_bytes, struct.log_sums = code.parameter_bytes, code.log_sums
    struct.summarise = ffi.cast(ffi.typeof(struct.summarise), code.summarise)
    struct.score = ffi.cast(ffi.typeof(struct.score), code.score)
    if parameters is not None:
        struct.parameters = ffi.from_buffer("float[]", parameters)
        struct.parameter_count = parameters.shape[2]
    check(lib.cxlkv_pool_add_scorer(pool, struct))
