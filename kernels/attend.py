"""Paged sparse decode attention over tables of addresses, split over pages (flash-decoding).

Each page of a list has an address of its own for its keys and its values, so one launch reads any
mix of sources: a hot buffer, pages just fetched, the mapped pool itself. The partial results of the
splits (arXiv 2311.01282) are merged by the kernel of `merge.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TypedDict

import torch

from cxlkv.arrays import memory_of, positive_float32
from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_attend as reference
from cxlkv.kernels.attend_shape import (
    FLOATS,
    Call,
    Shape,
    Tiles,
    splits_of,
    tiles_of,
)
from cxlkv.kernels.rotate import rotate
from cxlkv.kernels.runtime import check_table, check_tensor, current, one_device, runs_triton

INTERPRETED_MULTIPROCESSORS = 4
"""What splits are chosen for where there is no GPU: the interpreter runs programs in turn."""

PAGE_TOKENS_MAX = 1024
DIM_MAX = 1024
SPLITS_MAX = 1 << 12
SOFTCAP_MAX = 1e4
"""Models have 50 or less."""
CODE_BITS = {"none": 0, "int8": 8, "int4": 4}
TOKENS_MAX = 1 << 30
"""Most tokens of a list: places are counted in 32 bits."""


def attend(
    q: torch.Tensor,
    keys_at: torch.Tensor,
    values_at: torch.Tensor | None,
    pages: torch.Tensor,
    positions: torch.Tensor,
    *,
    page_tokens: int,
    value_dim: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    log_weights: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    encodings: tuple[str, str] = ("none", "none"),
    splits: int | None = None,
    programs: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q.k) v over the listed pages: (out, lse), float32.

    q: [lists, rows, q_heads, dim], rows of channels contiguous; several rows are query tokens that
    share a list. keys_at, values_at: int64 [lists, kv_heads, k], addresses of pieces [page_tokens,
    dim] and [page_tokens, value_dim]; 0: nothing is there. values_at=None: values are the first
    value_dim channels of the keys (MLA, arXiv 2405.04434). pages: int32 like keys_at, a page's
    index in its sequence, each once; -1: padding. positions: int64 [lists, rows], of each row's
    token; -1: there is no such row.

    Token t of page p has position p * page_tokens + t. A row sees `window` positions (None: all),
    its own the last; other tokens do not matter, whatever their bytes. A NaN among the logits that
    a row sees makes its results NaN. softcap: logits become softcap * tanh(logit / softcap), off by
    2**-23 of it, up to 1e4. scale: dim ** -0.5 if None. log_weights: float32 [lists, kv_heads, k,
    page_tokens], added to all that; -inf leaves a token out. dtype: of keys and values, if not q's.

    encodings: of keys and of values, "int8" or "int4" where pieces are as a pool keeps them, codes
    and scales (fetch(decoded=False) gives them). They become numbers in registers. A q of 16 bits
    is rounded to 11 once it is rotated, and so are weights; one of float32 to 22.

    out: [lists, rows, q_heads, value_dim]; lse: [lists, rows, q_heads], natural. Where nothing was
    seen: 0 and -inf. splits: of each list; None: best for `programs` at once, None: as many as the
    GPU holds. scratch: float32, value_dim + 1 for each row, head and split; None: allocated. With
    a smaller one there are fewer splits. Nothing else is allocated, but a rotated q where keys are
    codes, and nothing waits for the device: with out, lse and scratch given, a call can be captured
    in a CUDA graph, once rotate.prepare() was called where there are codes.

    Addresses are multiples of 16 that the device can read: neither is checked. Raises
    BadArgumentError for shapes, dtypes and numbers that do not fit; UnsupportedError where only
    values are codes and keys are too wide for shared memory (more than 256 channels of float32
    beside int4 of as many, 512 beside int8; twice that in 16 bits beside int4).
    """
    bits = _bits_of(encodings, values_at is not None)
    shape = _shape(q, keys_at, values_at, page_tokens, value_dim, softcap, dtype, bits)
    scale = shape.dim**-0.5 if scale is None else positive_float32(scale, "scale")
    call = Call(q, keys_at, values_at, pages, positions, scale, softcap, window, log_weights)
    _check(call, page_tokens)
    out = _result("out", out, (*q.shape[:3], shape.value_dim), q.device)
    lse = _result("lse", lse, tuple(q.shape[:3]), q.device)
    device = one_device(q=q, out=out, lse=lse, scratch=scratch)
    if keys_at.shape[2] == 0:
        out.zero_()
        lse.fill_(float("-inf"))
    elif runs_triton(device) and lse.numel():
        _run(call, shape, (splits, programs), scratch, out, lse)
    elif lse.numel():
        found = reference.attend(call, shape)
        out.copy_(found[0])
        lse.copy_(found[1])
    return out, lse


class RowPages(TypedDict):
    """Arguments of attend(), of pages of a token."""

    keys_at: torch.Tensor
    values_at: torch.Tensor
    pages: torch.Tensor
    positions: torch.Tensor
    page_tokens: int
    value_dim: int
    log_weights: torch.Tensor


def rows_as_pages(
    k: torch.Tensor, v: torch.Tensor, log_counts: torch.Tensor, positions: torch.Tensor
) -> RowPages:
    """Virtual rows (cxlkv.ndp.engine.VirtualRows, as tensors) as arguments of attend() beside q:
    pages of a token, which all query rows at `positions` see.

    attend(q.float(), **rows_as_pages(k, v, log_counts, positions)) and attend() to the pages make
    attention to both by merge(). k, v and log_counts are float32 and contiguous, and are read where
    they lie; channels are multiples of 4.
    """
    shape = tuple(log_counts.shape)
    check_tensor("k", k, torch.float32, (*shape, k.shape[-1]))
    check_tensor("v", v, torch.float32, (*shape, v.shape[-1]))
    check_tensor("log_counts", log_counts, torch.float32, shape)
    for name, rows in (("k", k), ("v", v)):
        if rows.shape[-1] % 4 or memory_of(rows, name) % 16:
            raise BadArgumentError(f"{name}: rows begin at multiples of 16 bytes")
    first = torch.arange(log_counts.numel(), device=k.device).view(shape)
    return {
        "keys_at": memory_of(k, "k") + first * (k.shape[-1] * 4),
        "values_at": memory_of(v, "v") + first * (v.shape[-1] * 4),
        "pages": torch.zeros(shape, dtype=torch.int32, device=k.device),
        "positions": torch.where(positions < 0, positions, 0),
        "page_tokens": 1,
        "value_dim": v.shape[-1],
        "log_weights": log_counts[..., None],
    }


def _run(
    call: Call,
    shape: Shape,
    wanted: tuple[int | None, int | None],
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """The kernel, and the merge of its splits where there are several; rotations where there are
    codes. wanted: splits and programs."""
    from cxlkv.kernels import attend_codes_triton, attend_triton, merge_triton  # they need Triton

    tiles = tiles_of(replace(shape, weighed=call.log_weights is not None))
    splits = _splits(call, shape, tiles, *wanted, scratch)
    launch = attend_codes_triton.launch if shape.encoded else attend_triton.launch
    if shape.encoded:
        q = call.q.contiguous()
        call = replace(call, q=rotate(q) if shape.key_bits else q)
    with current(call.q.device):
        if splits == 1:
            launch(call, shape, tiles, 1, out, lse)
        else:
            lines = lse.numel() * splits
            if scratch is None:
                scratch = torch.empty(lines * (shape.value_dim + 1), device=out.device)
            parts = scratch[: lines * shape.value_dim]
            sums = scratch[lines * shape.value_dim : lines * (shape.value_dim + 1)]
            launch(call, shape, tiles, splits, parts, sums)
            merge_triton.merge_strided(
                parts, sums, out, lse, splits, row_stride=splits, part_stride=1
            )
    if shape.value_bits:
        rotate(out, out, back=True)


def _splits(
    call: Call,
    shape: Shape,
    tiles: Tiles,
    splits: int | None,
    programs: int | None,
    scratch: torch.Tensor | None,
) -> int:
    """Splits of each list: those asked for, or the best that the scratch has room for."""
    line_floats = call.q.shape[:3].numel() * (shape.value_dim + 1)
    if scratch is not None:
        if scratch.dtype != torch.float32 or not scratch.is_contiguous():
            raise BadArgumentError(f"scratch is {scratch.dtype}: contiguous float32 is wanted")
        room = max(1, scratch.numel() // line_floats)
    if splits is not None:
        if not 1 <= splits <= SPLITS_MAX:
            raise BadArgumentError(f"splits is {splits}: outside 1 to {SPLITS_MAX}")
        if scratch is not None and splits > room:
            raise BadArgumentError(
                f"scratch of {scratch.numel()} float32 has room for {room} splits, not {splits}"
            )
        return splits
    if programs is None:
        programs = _multiprocessors(call.q.device) * tiles.resident
    elif programs < 1:
        raise BadArgumentError(f"programs is {programs}: 1 or more, or None")
    lists, kv_heads, k = call.keys_at.shape
    work = lists * kv_heads * -(-shape.rows * shape.group // tiles.lines)
    best = splits_of(work, -(-k * shape.page_room // tiles.tokens), programs)
    return best if scratch is None else min(best, room)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _shape(
    q: torch.Tensor,
    keys_at: torch.Tensor,
    values_at: torch.Tensor | None,
    page_tokens: int,
    value_dim: int | None,
    softcap: float | None,
    dtype: torch.dtype | None,
    bits: tuple[int, int],
) -> Shape:
    if q.ndim != 4 or keys_at.ndim != 3 or q.shape[0] != keys_at.shape[0]:
        raise BadArgumentError(
            f"q {tuple(q.shape)} and keys_at {tuple(keys_at.shape)}: wanted [lists, rows, q_heads, "
            "dim] and [lists, kv_heads, k]"
        )
    rows, q_heads, dim = q.shape[1:]
    kv_heads = keys_at.shape[1]
    value_dim = dim if value_dim is None else value_dim
    dtype = q.dtype if dtype is None else dtype
    if q.dtype not in FLOATS or dtype not in FLOATS:
        raise BadArgumentError(f"q of {q.dtype}, keys of {dtype}: float32, float16 or bfloat16")
    if kv_heads == 0 or q_heads % kv_heads or q_heads == 0:
        raise BadArgumentError(f"{q_heads} query heads over {kv_heads} kv heads: a multiple")
    if not (1 <= dim <= DIM_MAX and 1 <= value_dim <= DIM_MAX):
        raise BadArgumentError(f"dims {dim} and {value_dim}: outside 1 to {DIM_MAX}")
    if values_at is None and value_dim > dim:
        raise BadArgumentError(f"value_dim {value_dim}: values from keys of {dim} have no more")
    if q.stride(3) != 1 and dim > 1:
        raise BadArgumentError("the channels of q are not next to each other: pass q.contiguous()")
    if not 1 <= page_tokens <= PAGE_TOKENS_MAX:
        raise BadArgumentError(f"page_tokens is {page_tokens}: outside 1 to {PAGE_TOKENS_MAX}")
    if softcap is not None and positive_float32(softcap, "softcap") > SOFTCAP_MAX:
        raise BadArgumentError(f"softcap={softcap!r}: {SOFTCAP_MAX:g} at most")
    own = values_at is not None
    group = q_heads // kv_heads
    capped = softcap is not None
    shape = Shape(dtype, q.dtype, dim, value_dim, own, group, rows, page_tokens, capped, *bits)
    if keys_at.shape[2] * shape.page_room > TOKENS_MAX:
        raise BadArgumentError(f"{keys_at.shape[2]} pages of {page_tokens} tokens: too long a list")
    return shape


def _bits_of(encodings: tuple[str, str], own_values: bool) -> tuple[int, int]:
    """Bits of keys and of values; 0: none."""
    for name, encoding in zip(("keys", "values"), encodings, strict=True):
        if encoding not in CODE_BITS:
            raise BadArgumentError(
                f"encodings of {name}: {encoding!r} is none of {', '.join(CODE_BITS)}"
            )
    if not own_values and encodings != ("none", "none"):
        raise BadArgumentError("values from keys: these have no encoding")
    return CODE_BITS[encodings[0]], CODE_BITS[encodings[1]]


def _check(call: Call, page_tokens: int) -> None:
    lists, rows = call.q.shape[:2]
    table = tuple(call.keys_at.shape)
    check_table("keys_at", call.keys_at, table)
    if call.values_at is not None:
        check_table("values_at", call.values_at, table)
    check_table("positions", call.positions, (lists, rows))
    check_tensor("pages", call.pages, torch.int32, table)
    if call.log_weights is not None:
        check_tensor("log_weights", call.log_weights, torch.float32, (*table, page_tokens))
    if call.window is not None and not 1 <= call.window < 1 << 31:
        raise BadArgumentError(f"window is {call.window}: tokens, 1 to 2**31 - 1, or None")
    one_device(
        q=call.q,
        keys_at=call.keys_at,
        values_at=call.values_at,
        pages=call.pages,
        positions=call.positions,
        log_weights=call.log_weights,
    )


def _result(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, device=device)
    check_tensor(name, given, torch.float32, shape)
    return given
