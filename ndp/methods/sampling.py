"""Choose tokens by chance, and weigh those that were drawn by how likely that was."""

from __future__ import annotations

import math
from functools import lru_cache, reduce
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.engine import VirtualRows
from cxlkv.ndp.kinds import Bytes, Choice, Chooser, Floats, Question, Words
from cxlkv.ndp.methods import loops
from cxlkv.ndp.methods.loops import BITS, TABLES

PART = 8
"""One channel of so many is read for an estimate."""
EPSILON, DELTA, BASE = 0.05, 0.05, 0.025


# ---- by hash tables ----


class Hashed(NamedTuple):
    """State of a run: keys as bfloat16 [kv_heads, tokens, dim], codes [kv_heads, tokens, TABLES],
    and the mean key [kv_heads, dim].
    """

    keys: Words
    codes: Bytes
    centre: Floats


@lru_cache(maxsize=8)
def planes_of(seed: int, dim: int) -> Floats:
    """[dim, TABLES * BITS]"""
    random = np.random.default_rng(seed)
    return random.standard_normal((dim, TABLES * BITS)).astype(np.float32)


class MagicPIG(Chooser[Hashed]):
    """MagicPIG (arXiv 2410.16179): tokens are drawn that are in the query's bucket in two hash
    tables or more, and weigh the inverse of the chance of that. Hashed are keys less their mean, by
    the signs of random projections; here in 75 tables by 8 bits, there in 150 by 10. There all that
    is drawn is attended to; here as many tables count as the budget has tokens for, and the mean is
    that of up to 4,096 tokens. There each query head draws; here each token is hashed against one
    head of the group, drawn anew in each step, so that the chance is the mean of theirs."""

    name = "magicpig"

    def state(self, keys: Floats, values: Floats) -> Hashed:
        heads, tokens, dim = keys.shape
        made = Hashed(
            np.empty(keys.shape, np.uint16),
            np.empty((heads, tokens, TABLES), np.uint8),
            keys.mean(1),
        )
        loops.rounded(keys, made.keys)
        planes = planes_of(self.seed, dim)
        for head in range(heads):
            loops.codes_of((keys[head] - made.centre[head]) @ planes, made.codes[head])
        return made

    def choose(self, states: list[Hashed], asked: Question) -> Choice:
        heads, n, dim = asked.queries.shape
        planes = planes_of(self.seed, dim)
        theirs = np.empty((heads, n, TABLES), np.uint8)
        for head in range(heads):
            loops.codes_of(asked.queries[head] @ planes, theirs[head])
        hits, seed = np.full((heads, asked.tokens), TABLES, np.uint8), np.uint64(asked.seed)
        begins = np.cumsum([0, *(state.codes.shape[1] for state in states)]).tolist()
        for state, begin in zip(states, begins, strict=False):
            loops.second_hits(state.codes, theirs, seed, begin, asked.first, asked.last, hits)
        by_table = np.array([np.bincount(of, minlength=TABLES + 1) for of in hits])
        tables = (np.cumsum(by_table[:, :TABLES], axis=1) <= asked.most).sum(1)
        log_weights = np.full((heads, asked.tokens), -np.inf, np.float32)
        for state, begin in zip(states, begins, strict=False):
            loops.weigh(state.keys, state.centre, asked.queries, begin, hits, tables, log_weights)
        looked = np.minimum(hits[:, asked.first : asked.last].astype(np.int64) + 1, TABLES)
        weighed = log_weights > -np.inf
        read = planes.nbytes + int(looked.sum()) + int(weighed.sum()) * dim * 2
        for state, begin in zip(states, begins, strict=False):
            some = weighed[:, begin : begin + state.codes.shape[1]].any(1)
            read += int(some.sum()) * dim * state.centre.itemsize
        return Choice(log_weights, None, read)


# ---- the best, and a sample of the rest ----


class ByChannel(NamedTuple):
    """State of a run: keys as bfloat16 [kv_heads, dim, tokens]; sums of values [kv_heads,
    value_dim].
    """

    keys: Words
    values: Floats


def sample_size(logits: Floats, chosen: int, rest: int) -> int:
    """How many of the `rest` tokens have to be drawn so that the sum of exp(logit) over all is
    right by EPSILON, but for DELTA of the cases: for each query, by the spread of those that are
    drawn already. logits [n, chosen + drawn]: the chosen tokens' first."""
    weights = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    drawn = weights[:, chosen:]
    whole = weights[:, :chosen].sum(1) + rest * drawn.mean(1)
    errors = NormalDist().inv_cdf(1 - DELTA) * drawn.std(1, ddof=1) * rest / (EPSILON * whole)
    size = float(np.max(errors)) ** 2
    return math.ceil(size) if size < rest else rest  # of keys that are no numbers, too


class OfChannels(Chooser[ByChannel]):
    """Logits are estimated as SparQ does, from an eighth of the channels."""

    def state(self, keys: Floats, values: Floats) -> ByChannel:
        kept = np.empty((keys.shape[0], keys.shape[2], keys.shape[1]), np.uint16)
        loops.rounded(np.ascontiguousarray(keys.swapaxes(1, 2)), kept)
        return ByChannel(kept, values.sum(1))


class VAttention(OfChannels):
    """vAttention (arXiv 2510.05688): forced pages, the tokens of the largest logits, and of the
    others a random sample, as many as it takes for a sum of exp(logit) within 5 % in 95 of 100
    cases, which stand for all of them. The paper takes any estimate of the logits; here it is
    SparQ's. Half of the budget are the best tokens, and the sample fills the other half at most, so
    that small budgets promise nothing. It is one sample for the heads of a kv head, of which the
    first tokens are the one that its size is estimated from."""

    name = "vattention"

    def choose(self, states: list[ByChannel], asked: Question) -> Choice:
        found, channels = estimates(states, asked)
        read = int(channels.sum()) * asked.tokens * 2
        rank = shares(found)[:, asked.first : asked.last]
        forced = np.r_[: asked.first, asked.last : asked.tokens]
        log_weights = np.full((len(rank), asked.tokens), -np.inf, np.float32)
        random = np.random.default_rng(asked.seed)
        best, free = asked.most // 2, asked.last - asked.first
        most = asked.most - best
        base = min(most, max(2, math.ceil(BASE * (free - best))))
        for head, ranked in enumerate(rank):
            order = asked.first + np.argpartition(-ranked, best)
            drawn = order[best + random.choice(free - best, most, replace=False)]
            known = np.concatenate([forced, order[:best], drawn[:base]])
            logits, size = exact(states, head, asked, known), most
            if base > 1:
                wanted = sample_size(logits, len(known) - base, free - best)
                size = min(max(wanted, base), most)
            log_weights[head, order[:best]] = 0
            log_weights[head, drawn[:size]] = math.log((free - best) / size)
            read += len(known) * int((~channels[head]).sum()) * 2
        return Choice(log_weights, None, read)


class SparQMean(OfChannels):
    """SparQ (arXiv 2312.04985) by tokens, and with the second half of its answer: what is not
    attended to has the mean of all values, with the share of the attention that the estimates give
    it. That is a row here, whose key makes the share right for each query head. It is a share of
    what the states are of: the last pages are beside it."""

    name = "sparq_mean"

    def choose(self, states: list[ByChannel], asked: Question) -> Choice:
        found, channels = estimates(states, asked)
        rank = shares(found)
        best = np.argpartition(-rank[:, asked.first : asked.last], asked.most - 1, axis=1)
        log_weights = np.full(rank.shape, -np.inf, np.float32)
        np.put_along_axis(log_weights, asked.first + best[:, : asked.most], 0, axis=1)
        known = log_weights == 0
        known[:, : asked.first] = known[:, asked.last :] = True
        rest = log_sums(np.where(known[:, None], -np.inf, found))
        rest -= log_sums(np.where(known[:, None], found, -np.inf))
        for head, tokens in enumerate(known):
            rest[head] += log_sums(exact(states, head, asked, np.flatnonzero(tokens)))
        middle = rest.mean(1, keepdims=True)
        keys = solved(asked.scale * asked.queries, rest - middle)
        values = reduce(np.add, [state.values for state in states]) / np.float32(asked.tokens)
        read = int(channels.sum()) * asked.tokens * 2 + sum(each.values.nbytes for each in states)
        read += int((known.sum(1) * (~channels).sum(1)).sum()) * 2
        return Choice(log_weights, VirtualRows(keys[:, None], values[:, None], middle), read)


def log_sums(logits: Floats) -> Floats:
    """Over the last axis."""
    top = logits.max(-1)
    sums: Floats = np.exp(logits - np.expand_dims(top, -1)).sum(-1)
    found: Floats = top + np.log(sums)
    return found


def solved(queries: Floats, logits: Floats) -> Floats:
    """Keys [kv_heads, dim] that have these logits [kv_heads, n] with queries [kv_heads, n, dim], or
    the nearest ones."""
    if not np.isfinite(queries).all():
        return np.zeros((len(queries), queries.shape[2]), np.float32)
    inverse = np.linalg.pinv(queries.astype(np.float64), rcond=1e-3)
    found: Floats = (inverse @ logits[..., None])[..., 0].astype(np.float32)
    return found


def exact(
    states: list[ByChannel], head: int, asked: Question, tokens: npt.NDArray[np.int64]
) -> Floats:
    """Logits [n, len(tokens)] of one kv head."""
    queries, begin = asked.queries[head], 0
    logits = np.empty((len(queries), len(tokens)), np.float32)
    for state in states:
        loops.products(state.keys[head], queries, asked.scale, begin, tokens, logits)
        begin += state.keys.shape[2]
    return logits


def estimates(states: list[ByChannel], asked: Question) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Logits [kv_heads, n, tokens] by the channels in which a query is largest, with SparQ's
    temperature, and which channels some query has, [kv_heads, dim]."""
    heads, n, dim = asked.queries.shape
    count = -(-dim // PART)
    sizes = np.abs(asked.queries)
    channels = np.argpartition(-sizes, count - 1, axis=2)[:, :, :count]
    kept = np.take_along_axis(sizes, channels, axis=2).sum(2)
    share = np.maximum(kept / np.maximum(sizes.sum(2), 1e-30), 1e-6)
    factors = (asked.scale / np.sqrt(share)).astype(np.float32)
    logits = np.empty((heads, n, asked.tokens), np.float32)
    begin = 0
    for state in states:
        loops.estimate(state.keys, asked.queries, channels, factors, begin, logits)
        begin += state.keys.shape[2]
    is_read = np.zeros((heads, dim), np.bool_)
    np.put_along_axis(is_read, channels.reshape(heads, -1), True, axis=1)
    return logits, is_read


def shares(logits: Floats) -> Floats:
    """[kv_heads, tokens]: of logits [kv_heads, n, tokens], the queries' softmaxes, added up."""
    weights = np.exp(logits - logits.max(2, keepdims=True))
    found: Floats = (weights / weights.sum(2, keepdims=True)).sum(1)
    return found
