"""What cxlkv.ndp.portable runs: loops over pages, compiled by numba for the CPU that runs them.

Each kernel has one compiled form for all dtypes: keys become float32 in a small buffer first. They
share out pages over numba.get_num_threads() threads and run without the GIL. The first call
compiles, which takes some seconds; later processes find the machine code in numba's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from cxlkv.errors import UnsupportedError

try:
    import numba
    import numba.extending
    from llvmlite import ir
except ImportError as error:
    raise UnsupportedError(
        "cxlkv.ndp.portable compiles with numba, which is not installed: pip install 'cxlkv[numba]'"
    ) from error

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Bits = npt.NDArray[np.uint32]
Whole = npt.NDArray[np.int64]
Strides = tuple[int, int]
Function = TypeVar("Function", bound=Callable[..., object])

EXACT, DIGEST, LOG_SUM = 0, 1, 2  # kinds of scores
LANES = 4  # queries that share a loaded key
AHEAD = 4096  # elements from keys to those to ask for: prefetchers of CPUs stop at 4 KiB
LINE_BYTES = 64
SKETCH_TOKENS = SKETCH_CHANNELS = (
    16  # native/src/kernels/sketch.h: the tokens of a block, codes of a word
)
TOGETHER, SOON = 64, 8  # tokens scored one after another; how long before that a key is asked for
# Sums may be reordered, which is what lets a compiler use vectors. NaN and infinity keep their
# meaning: a broken key must be chosen and seen.
REORDERED = {"reassoc", "contract", "nsz"}


def compiled(function: Function, **options: Any) -> Function:
    """numba's decorator, with a type."""
    return cast(Function, numba.njit(nogil=True, **options)(function))


def parallel(function: Function) -> Function:
    """The same for what Python calls: the machine code is kept for later processes, where numba
    finds a folder that it may write to."""
    try:
        return compiled(function, parallel=True, cache=True)
    except RuntimeError:
        return compiled(function, parallel=True)


reordered = partial(compiled, fastmath=REORDERED)
ranged = cast(Callable[[int, int], range], numba.prange)


def emit_prefetch(_: object, array: Any, index: Any) -> Any:
    """(signature, emitter) of prefetch(array, index), which no Python function has."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        at = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [at.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [at.type], form)
        read, nearest_cache, data_cache = number(0), number(3), number(1)
        builder.call(function, [at, read, nearest_cache, data_cache])
        return context.get_dummy_value()

    return numba.types.void(array, index), emit


# Asks for the line in which array[index] lies; the index may be outside.
prefetch = cast(Callable[[Halves, int], None], numba.extending.intrinsic(emit_prefetch))


@compiled
def widen(halves: Halves, wholes: Floats, code: int, at: int, count: int, bits: Bits) -> None:
    """`count` elements from `at` on, as the bits of float32."""
    # Slices, here and below: an index that is a loop's own variable is known not to be negative.
    floats, source, full = bits.view(np.float32), halves[at : at + count], wholes[at : at + count]
    if code == 0:
        for i in range(count):
            bits[i] = np.uint32(source[i]) << np.uint32(16)
    elif code == 1:
        for i in range(count):
            half = np.uint32(source[i])
            size = half & np.uint32(0x7FFF)
            special = np.uint32(0x7F800000) if size >= 0x7C00 else np.uint32(0)
            bits[i] = (half & np.uint32(0x8000)) << np.uint32(16) | size << np.uint32(13) | special
        for i in range(count):
            floats[i] *= np.float32(2.0**112)  # what the biases of the exponents differ by
    else:
        for i in range(count):
            floats[i] = full[i]


@reordered
def dot(key: Floats, query: Floats, dim: int) -> np.float32:
    total = np.float32(0)
    for d in range(dim):
        total += key[d] * query[d]
    return total


@reordered
def dots(
    keys: Floats,
    stride: int,
    tokens: int,
    queries: Floats,
    dim: int,
    out: Floats,
    memory: Halves,
    ahead: int,
) -> None:
    """out[j, t] = q.k of 4 queries and all tokens, in blocks of 2 tokens that share the queries.

    Meanwhile the lines of memory[ahead:] come closer, as many elements as the keys have.
    """
    q0, q1, q2, q3 = queries[0], queries[1], queries[2], queries[3]
    out0, out1, out2, out3 = out[0], out[1], out[2], out[3]
    for t in range(0, tokens, 2):
        u = min(t + 1, tokens - 1)
        for i in range(0, 2 * stride, LINE_BYTES // 2):
            prefetch(memory, ahead + t * stride + i)
        a, b = keys[t * stride : t * stride + dim], keys[u * stride : u * stride + dim]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for d in range(dim):
            a0 += a[d] * q0[d]
            a1 += a[d] * q1[d]
            a2 += a[d] * q2[d]
            a3 += a[d] * q3[d]
            b0 += b[d] * q0[d]
            b1 += b[d] * q1[d]
            b2 += b[d] * q2[d]
            b3 += b[d] * q3[d]
        out0[t], out1[t], out2[t], out3[t] = a0, a1, a2, a3
        out0[u], out1[u], out2[u], out3[u] = b0, b1, b2, b3


@compiled
def logits_of(
    keys: Floats,
    stride: int,
    tokens: int,
    queries: Floats,
    dim: int,
    out: Floats,
    memory: Halves,
    ahead: int,
) -> None:
    """out[j, t] = q.k for `LANES` queries or fewer."""
    if len(queries) == LANES:
        dots(keys, stride, tokens, queries, dim, out, memory, ahead)
        return
    for t in range(tokens):
        key = keys[t * stride : t * stride + dim]
        for j in range(len(queries)):
            out[j, t] = dot(key, queries[j], dim)


@reordered
def bound(minima: Floats, maxima: Floats, query: Floats, dim: int) -> np.float32:
    """The largest q.k of any key between the minima and the maxima."""
    total = np.float32(0)
    for d in range(dim):
        total += query[d] * (minima[d] if query[d] < 0 else maxima[d])
    return total


@compiled
def largest(row: Floats) -> np.float32:
    """NaN if one is."""
    found: np.float32 = row[0]
    for i in range(len(row)):
        if row[i] > found or row[i] != row[i]:
            found = row[i]
    return found


@compiled
def score_head(
    keys: Floats,
    stride: int,
    first: int,
    count: int,
    queries: Floats,
    seen: Whole,
    kind: int,
    scale: np.float32,
    logits: Floats,
    out: Floats,
    page: int,
    memory: Halves,
    ahead: int,
) -> None:
    """out[:, page]: scores of one head's page for queries [n, dim].

    Its `count` tokens begin at position `first`; seen [n, 2]: first and last position in sight.
    """
    dim = queries.shape[1]
    for q in range(0, len(queries), LANES):
        here = min(LANES, len(queries) - q)
        if kind != DIGEST:
            logits_of(keys, stride, count, queries[q : q + here], dim, logits, memory, ahead)
        for j in range(here):
            low = max(seen[q + j, 0] - first, 0)
            high = min(seen[q + j, 1] - first + 1, count)
            if low >= high:
                continue
            if kind == DIGEST:
                out[q + j, page] = scale * bound(keys, keys[stride:], queries[q + j], dim)
                continue
            row = logits[j, low:high]
            best = scale * largest(row)
            if kind == LOG_SUM and best != -np.inf:
                total = np.float32(0)
                for t in range(len(row)):
                    total += np.exp(scale * row[t] - best)
                best += np.log(total)
            out[q + j, page] = best


@parallel
def score(
    halves: Halves,
    wholes: Floats,
    code: int,
    starts: Whole,
    strides: Strides,
    first_page: int,
    tokens: int,
    page_tokens: int,
    queries: Floats,
    seen: Whole,
    kind: int,
    scale: np.float32,
    out: Floats,
) -> None:
    """out [kv_heads, n, pages] from `first_page` to where starts end; queries [kv_heads, n, dim].

    A page that a query does not see keeps what is there.
    """
    heads, dim = queries.shape[0], queries.shape[2]
    for page in ranged(first_page, len(starts)):
        first = page * page_tokens
        count = min(page_tokens, tokens - first)
        rows = 2 if kind == DIGEST else count
        bits = np.empty(rows * strides[1], np.uint32)
        logits = np.empty((LANES, rows), np.float32)
        for head in range(heads):
            at = starts[page] + head * strides[0]
            widen(halves, wholes, code, at, (rows - 1) * strides[1] + dim, bits)
            keys = bits.view(np.float32)
            score_head(
                keys,
                strides[1],
                first,
                count,
                queries[head],
                seen,
                kind,
                scale,
                logits,
                out[head],
                page,
                halves,
                at + AHEAD,
            )


@reordered
def weigh(words: Bits, queries: Floats, sums: Floats) -> None:
    """sums[j, t] += queries[j].codes of 16 tokens, for 4 queries; words [16 channels][token].

    A token in each lane, and 4 channels at a time: a compiler makes vectors of the inner loop.
    """
    sums0, sums1, sums2, sums3 = sums[0], sums[1], sums[2], sums[3]
    three = np.uint32(3)
    for channel in range(0, len(words), 4):
        at = channel // SKETCH_CHANNELS * SKETCH_TOKENS
        line, shift = words[at : at + SKETCH_TOKENS], np.uint32(channel % SKETCH_CHANNELS * 2)
        p, q = queries[0, channel : channel + 4], queries[1, channel : channel + 4]
        r, s = queries[2, channel : channel + 4], queries[3, channel : channel + 4]
        p0, p1, p2, p3 = p[0], p[1], p[2], p[3]
        q0, q1, q2, q3 = q[0], q[1], q[2], q[3]
        r0, r1, r2, r3 = r[0], r[1], r[2], r[3]
        s0, s1, s2, s3 = s[0], s[1], s[2], s[3]
        for t in range(SKETCH_TOKENS):
            # numba widens what is shifted; cut back, all lanes stay 32 bits wide.
            codes = np.uint32(line[t] >> shift)
            a = np.float32(np.int32(codes & three))
            b = np.float32(np.int32(codes >> np.uint32(2) & three))
            c = np.float32(np.int32(codes >> np.uint32(4) & three))
            d = np.float32(np.int32(codes >> np.uint32(6) & three))
            sums0[t] += p0 * a + p1 * b + p2 * c + p3 * d
            sums1[t] += q0 * a + q1 * b + q2 * c + q3 * d
            sums2[t] += r0 * a + r1 * b + r2 * c + r3 * d
            sums3[t] += s0 * a + s1 * b + s2 * c + s3 * d


@compiled
def keep_larger(row: Floats, best: Floats) -> None:
    """The larger of each, in place; NaN if one is."""
    for t in range(SKETCH_TOKENS):
        best[t] = row[t] if row[t] > best[t] or row[t] != row[t] else best[t]


@parallel
def estimate(
    words: Bits,
    numbers: Floats,
    starts: Whole,
    strides: Strides,
    first_page: int,
    queries: Floats,
    offsets: Floats,
    out: Floats,
    scales: Floats,
) -> None:
    """Logits of all tokens as sketches tell them, out [kv_heads, pages, tokens], and their scales.

    words, numbers: one memory, as codes and as scales. queries [kv_heads, n, channels]: rotated and
    scaled, zeros up to 16 channels, n a multiple of LANES; offsets [kv_heads, n]: what is added to
    the sums, as a code stands for code - 1.5. The best over the queries; NaN where one is.
    """
    heads, count, channels = queries.shape
    tokens = out.shape[2]
    for page in ranged(0, out.shape[1]):
        sums = np.empty((LANES, SKETCH_TOKENS), np.float32)
        best = np.empty(SKETCH_TOKENS, np.float32)
        for head in range(heads):
            for first in range(0, tokens, SKETCH_TOKENS):
                at = starts[first_page + page] + head * strides[0]
                at += first // SKETCH_TOKENS * strides[1]
                best[:] = -np.inf
                for q in range(0, count, LANES):
                    for j in range(LANES):
                        sums[j, :] = offsets[head, q + j]
                    weigh(words[at : at + channels], queries[head, q : q + LANES], sums)
                    for j in range(LANES):
                        keep_larger(sums[j], best)
                own = numbers[at + channels : at + channels + SKETCH_TOKENS]
                for t in range(min(SKETCH_TOKENS, tokens - first)):
                    out[head, page, first + t] = best[t] * own[t]
                    scales[head, page, first + t] = own[t]


@parallel
def score_tokens(
    halves: Halves,
    wholes: Floats,
    code: int,
    starts: Whole,
    strides: Strides,
    heads: Whole,
    pages: Whole,
    tokens: Whole,
    queries: Floats,
    scale: np.float32,
    out: Floats,
) -> None:
    """out[i]: logit of token tokens[i] of page pages[i] in head heads[i], by its key: the best over
    queries [kv_heads, n, dim]; NaN if one is."""
    dim = queries.shape[2]
    for part in ranged(0, (len(out) + TOGETHER - 1) // TOGETHER):
        bits = np.empty(dim, np.uint32)
        logits = np.empty(queries.shape[1], np.float32)
        for i in range(part * TOGETHER, min(len(out), (part + 1) * TOGETHER)):
            next = min(i + SOON, len(out) - 1)
            at = starts[pages[next]] + heads[next] * strides[0] + tokens[next] * strides[1]
            for line in range(0, dim, LINE_BYTES // 2):
                prefetch(halves, at + line)
            at = starts[pages[i]] + heads[i] * strides[0] + tokens[i] * strides[1]
            widen(halves, wholes, code, at, dim, bits)
            for q in range(queries.shape[1]):
                logits[q] = dot(bits.view(np.float32), queries[heads[i], q], dim)
            out[i] = scale * largest(logits)


@reordered
def add_weighted(total: Floats, row: Floats, weight: np.float32) -> None:
    for d in range(len(total)):
        total[d] += weight * row[d]


@compiled
def online_softmax(
    row: Floats, scale: np.float32, softcap: np.float32, state: Floats
) -> np.float32:
    """Logits to weights; state is (largest logit, sum of weights). Returns by what older weights
    shrink."""
    for t in range(len(row)):
        row[t] *= scale
        if softcap > 0:
            row[t] = softcap * np.tanh(row[t] / softcap)
    top = largest(row)
    if top != top:
        state[1] = top  # as full attention would: a NaN key spoils its query's output, visibly
        row[:] = top
        return np.float32(1)
    if top == -np.inf:
        row[:] = 0
        return np.float32(1)
    shrink = np.float32(1)
    if top > state[0]:
        shrink = np.exp(state[0] - top)
        state[0] = top
    total = np.float32(0)
    for t in range(len(row)):
        row[t] = np.exp(row[t] - state[0])
        total += row[t]
    state[1] = state[1] * shrink + total
    return shrink


@compiled
def attend_head(
    keys: Floats,
    key_stride: int,
    values: Floats,
    value_stride: int,
    first: int,
    count: int,
    queries: Floats,
    seen: Whole,
    scale: np.float32,
    softcap: np.float32,
    logits: Floats,
    state: Floats,
    out: Floats,
    memory: Halves,
    ahead: int,
) -> None:
    """Adds one head's page to out [n, value_dim] and state [n, 2]."""
    dim, value_dim = queries.shape[1], out.shape[1]
    for q in range(0, len(queries), LANES):
        here = min(LANES, len(queries) - q)
        logits_of(keys, key_stride, count, queries[q : q + here], dim, logits, memory, ahead)
        for j in range(here):
            low = max(seen[q + j, 0] - first, 0)
            high = min(seen[q + j, 1] - first + 1, count)
            if low >= high:
                continue
            shrink = online_softmax(logits[j, low:high], scale, softcap, state[q + j])
            if shrink != 1:
                for d in range(value_dim):
                    out[q + j, d] *= shrink
            for t in range(low, high):
                row = values[t * value_stride : t * value_stride + value_dim]
                add_weighted(out[q + j], row, logits[j, t])


@parallel
def attend_parts(
    halves: Halves,
    wholes: Floats,
    code: int,
    keys: Whole,
    key_strides: Strides,
    values: Whole,
    value_strides: Strides,
    chosen: npt.NDArray[np.int32],
    tokens: int,
    page_tokens: int,
    queries: Floats,
    seen: Whole,
    scale: np.float32,
    softcap: np.float32,
    state: Floats,
    out: Floats,
) -> None:
    """Partial results: state [kv_heads, parts, n, 2] and out [kv_heads, parts, n, value_dim].

    chosen [kv_heads, k]: pages, negative ones are padding. queries [kv_heads, n, dim].
    """
    heads, parts, dim, value_dim = out.shape[0], out.shape[1], queries.shape[2], out.shape[3]
    k = chosen.shape[1]
    for item in ranged(0, heads * parts):
        head, part = item // parts, item % parts
        key_bits = np.empty(page_tokens * key_strides[1], np.uint32)
        value_bits = np.empty(page_tokens * value_strides[1], np.uint32)
        logits = np.empty((LANES, page_tokens), np.float32)
        for i in range(k * part // parts, k * (part + 1) // parts):
            page = chosen[head, i]
            if page < 0 or keys[page] < 0:
                continue
            first = page * page_tokens
            count = min(page_tokens, tokens - first)
            at = keys[page] + head * key_strides[0]
            widen(halves, wholes, code, at, (count - 1) * key_strides[1] + dim, key_bits)
            at = values[page] + head * value_strides[0]
            widen(halves, wholes, code, at, (count - 1) * value_strides[1] + value_dim, value_bits)
            attend_head(
                key_bits.view(np.float32),
                key_strides[1],
                value_bits.view(np.float32),
                value_strides[1],
                first,
                count,
                queries[head],
                seen,
                scale,
                softcap,
                logits,
                state[head, part],
                out[head, part],
                halves,
                at + AHEAD,
            )
