"""The loops of choosers, which numba compiles; other threads run meanwhile."""

from __future__ import annotations

import math

import numba
import numpy as np

from cxlkv.ndp.methods.bfloat16 import FASTMATH, from_bfloat16, to_bfloat16

TABLES, BITS = 75, 8
LEAST = 1e-4
"""No token is taken to be drawn more seldom."""

# ---- clusters ----


@numba.njit(nogil=True)
def add_to(rows, nearest, sums):
    """sums[nearest[t]] += rows[t]"""
    for t in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            sums[nearest[t], d] += rows[t, d]


@numba.njit(nogil=True)
def count_cells(cells, offset, first, last, counts):
    """Count tokens [first, last) of cells [kv_heads, tokens] by cluster."""
    for head in range(cells.shape[0]):
        for t in range(max(0, first), min(cells.shape[1], last)):
            counts[head, offset + cells[head, t]] += 1


@numba.njit(nogil=True)
def share_out(order, counts, count, left):
    """How many tokens each cluster gives, the best first, until there are `count`."""
    for head in range(order.shape[0]):
        wanted = count
        for at in order[head]:
            left[head, at] = min(wanted, counts[head, at])
            wanted -= left[head, at]


@numba.njit(nogil=True)
def take(cells, offset, first, last, left, log_weights):
    """The first left[head, cluster] tokens of each cluster are in."""
    for head in range(cells.shape[0]):
        for t in range(max(0, first), min(cells.shape[1], last)):
            at = offset + cells[head, t]
            if left[head, at] > 0:
                left[head, at] -= 1
                log_weights[head, t] = 0


# ---- samples ----


@numba.njit(nogil=True)
def rounded(numbers, out):
    for i in range(numbers.size):
        out.flat[i] = to_bfloat16(numbers.flat[i])


@numba.njit(nogil=True)
def codes_of(signs, codes):
    """signs [n, TABLES * BITS] to bytes [n, TABLES]."""
    for i in range(codes.shape[0]):
        for table in range(codes.shape[1]):
            value = 0
            for bit in range(BITS):
                value |= int(signs[i, table * BITS + bit] > 0) << bit
            codes[i, table] = value


@numba.njit(nogil=True)
def member_of(token, seed, n):
    """Which of n queries a token is hashed against, as if it were drawn."""
    mixed = np.uint64(token) * np.uint64(2654435761) + seed
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return np.int64((mixed ^ (mixed >> np.uint64(33))) >> np.uint64(8)) % n


@numba.njit(nogil=True)
def second_hits(codes, theirs, seed, begin, first, last, hits):
    """For each token of a run that begins at token `begin`: the table in which its byte equals its
    query's for the second time; TABLES: there is none. codes [kv_heads, tokens, TABLES], theirs
    [kv_heads, n, TABLES]
    """
    for head in range(codes.shape[0]):
        for t in range(max(0, first - begin), min(codes.shape[1], last - begin)):
            member = member_of(begin + t, seed, theirs.shape[1])
            seen = 0
            for table in range(TABLES):
                seen += codes[head, t, table] == theirs[head, member, table]
                if seen == 2:
                    hits[head, begin + t] = table
                    break


@numba.njit(nogil=True, fastmath=FASTMATH)
def weigh(keys, centre, queries, begin, hits, tables, log_weights):
    """log_weights of the tokens of a run that two of the first `tables` tables have."""
    heads, n, dim = queries.shape
    for head in range(heads):
        for t in range(keys.shape[1]):
            if hits[head, begin + t] >= tables[head]:
                continue
            square = 1e-30
            for d in range(dim):
                square += (from_bfloat16(keys[head, t, d]) - centre[head, d]) ** 2
            chance = 0.0
            for i in range(n):
                product, length = 0.0, 1e-30
                for d in range(dim):
                    q = queries[head, i, d]
                    product += q * (from_bfloat16(keys[head, t, d]) - centre[head, d])
                    length += q * q
                cosine = min(max(float(product / math.sqrt(square * length)), -1.0), 1.0)
                same = (1 - math.acos(cosine) / math.pi) ** BITS
                never = (1 - same) ** tables[head]
                once = tables[head] * same * (1 - same) ** (tables[head] - 1)
                chance += 1 - never - once
            log_weights[head, begin + t] = -math.log(max(LEAST, chance / n))


@numba.njit(nogil=True, fastmath=FASTMATH)
def estimate(keys, queries, channels, factors, begin, logits):
    """logits [kv_heads, n, tokens] of a run, by the query's channels [kv_heads, n, m] alone."""
    for head in range(queries.shape[0]):
        for i in range(queries.shape[1]):
            own = logits[head, i, begin : begin + keys.shape[2]]
            own[:] = 0
            for channel in channels[head, i]:
                q = factors[head, i] * queries[head, i, channel]
                row = keys[head, channel]
                for t in range(row.shape[0]):
                    own[t] += q * from_bfloat16(row[t])


@numba.njit(nogil=True, fastmath=FASTMATH)
def products(keys, queries, scale, begin, tokens, logits):
    """logits [n, len(tokens)] of those tokens of one head that a run has; keys [dim, tokens]."""
    for at in range(tokens.shape[0]):
        t = tokens[at] - begin
        if 0 <= t < keys.shape[1]:
            for i in range(queries.shape[0]):
                total = np.float32(0)
                for d in range(queries.shape[1]):
                    total += queries[i, d] * from_bfloat16(keys[d, t])
                logits[i, at] = scale * total
