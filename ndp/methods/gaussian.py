"""Score pages by the attention that a normal distribution of their keys would get."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import from_bfloat16, to_bfloat16


class Gaussian(Scorer):
    """log n + m + v / 2, where the logits of a page's n keys have the mean m and the variance v:
    the log of a normal distribution's moment generating function. v is taken from the variance of
    each channel, which makes it a quadratic form of q with a diagonal. As many bytes as a digest.
    """

    name = "gaussian"
    log_sums = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (2, shape.dim + shape.dim % 2), np.uint16

    @staticmethod
    def summarise(keys, first, parameters, summary):
        tokens, dim = keys.shape
        for d in range(dim):
            total = np.float32(0)
            square = np.float32(0)
            for t in range(tokens):
                total += keys[t, d]
            mean = total / tokens
            for t in range(tokens):
                square += (keys[t, d] - mean) * (keys[t, d] - mean)
            summary[0, d] = to_bfloat16(mean)
            summary[1, d] = to_bfloat16(square / tokens)

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for page in range(summaries.shape[0]):
            for i in range(queries.shape[0]):
                mean = np.float32(0)
                variance = np.float32(0)
                for d in range(queries.shape[1]):
                    q = scale * queries[i, d]
                    mean += q * from_bfloat16(summaries[page, 0, d])
                    variance += q * q * from_bfloat16(summaries[page, 1, d])
                scores[i, page] = np.log(tokens) + mean + variance / 2


class Locks(Scorer):
    """The same with the covariance as a diagonal and one direction, that of the most variance: v =
    sum(q_d^2 r_d) + (q.u)^2. Its page needs half as many bytes again as a digest. LOCKS (locks-kv)
    is after the same sum, but restores each key of a page, from a mean and eight directions in 4
    bits."""

    name = "locks"
    log_sums = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (3, shape.dim + -shape.dim % 4), np.uint16

    @staticmethod
    def summarise(keys, first, parameters, summary):
        tokens, dim = keys.shape
        for d in range(dim):
            total = np.float32(0)
            for t in range(tokens):
                total += keys[t, d]
            summary[0, d] = to_bfloat16(total / tokens)
            for t in range(tokens):
                keys[t, d] -= total / tokens
        direction = np.empty(dim, np.float32)
        weights = np.empty(tokens, np.float32)
        for t in range(tokens):
            weights[t] = 1 + t
        for _ in range(8):  # power iteration
            length = np.float32(1e-30)
            for d in range(dim):
                direction[d] = 0
                for t in range(tokens):
                    direction[d] += weights[t] * keys[t, d]
                length += direction[d] * direction[d]
            length = np.sqrt(length)
            for t in range(tokens):
                weights[t] = 0
                for d in range(dim):
                    weights[t] += keys[t, d] * direction[d] / length
        spread = np.float32(0)
        for t in range(tokens):
            spread += weights[t] * weights[t] / tokens
        for d in range(dim):
            u = direction[d] / length * np.sqrt(spread)
            square = np.float32(0)
            for t in range(tokens):
                square += keys[t, d] * keys[t, d]
            summary[1, d] = to_bfloat16(max(np.float32(0), square / tokens - u * u))
            summary[2, d] = to_bfloat16(u)

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for page in range(summaries.shape[0]):
            for i in range(queries.shape[0]):
                mean = np.float32(0)
                variance = np.float32(0)
                along = np.float32(0)
                for d in range(queries.shape[1]):
                    q = scale * queries[i, d]
                    mean += q * from_bfloat16(summaries[page, 0, d])
                    variance += q * q * from_bfloat16(summaries[page, 1, d])
                    along += q * from_bfloat16(summaries[page, 2, d])
                scores[i, page] = np.log(tokens) + mean + (variance + along * along) / 2
