"""Score tokens by codes of their keys in codebooks, which are learned from a text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Floats, Scorer, Shape

SUBSPACES = 8
WORDS = 64  # of each subspace
CELLS = 256  # of whole keys
ROUNDS = 10
SEED = 1
LEAST = 1e-300
"""Added to a sum of exponentials, so that its log is a number."""


def k_means(rows: Floats, count: int) -> Floats:
    """Lloyd's centroids [count, dim] of rows [n, dim], from rows drawn at random."""
    random = np.random.default_rng(SEED)
    centroids = rows[random.choice(len(rows), count, replace=len(rows) < count)].copy()
    for _ in range(ROUNDS):
        nearest = np.argmax(rows @ centroids.T - (centroids**2).sum(1) / 2, axis=1)
        sums = np.zeros_like(centroids)
        np.add.at(sums, nearest, rows)
        counts = np.bincount(nearest, minlength=count)[:, None]
        centroids = np.where(counts > 0, sums / np.maximum(counts, 1), centroids)
    return centroids.astype(np.float32)


class PQ(Scorer):
    """PQCache (arXiv 2407.12820): keys by product quantisation, 8 subspaces of 64 words, a byte
    each. A page has the attention that its tokens' estimates get. The paper learns the codebooks
    from each prompt; here they are learned once."""

    name = "pq"
    calibrated = True
    log_sums = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.tokens, SUBSPACES), np.uint8

    def calibrate(self, keys: Floats) -> Floats:
        """[SUBSPACES, WORDS, dim / SUBSPACES], of channels in their order, then zeros."""
        part = -(-keys.shape[1] // SUBSPACES)
        padded = np.pad(keys, ((0, 0), (0, part * SUBSPACES - keys.shape[1])))
        books = [k_means(padded[:, part * i : part * (i + 1)], WORDS) for i in range(SUBSPACES)]
        return np.stack(books).ravel()

    def parameter_count(self, shape: Shape) -> int:
        return -(-shape.dim // SUBSPACES) * SUBSPACES * WORDS

    @staticmethod
    def summarise(keys, first, parameters, summary):
        tokens, dim = keys.shape
        part = -(-dim // SUBSPACES)
        for t in range(tokens):
            for space in range(SUBSPACES):
                least = np.float32(np.inf)
                for word in range(WORDS):
                    square = np.float32(0)
                    for d in range(min(part, dim - space * part)):
                        apart = (
                            keys[t, space * part + d]
                            - parameters[(space * WORDS + word) * part + d]
                        )
                        square += apart * apart
                    if square < least:
                        least = square
                        summary[t, space] = word

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        dim = queries.shape[1]
        part = -(-dim // SUBSPACES)
        # exp of a sum is a product, so that a token needs no exp of its own.
        weights = np.empty((SUBSPACES, WORDS), np.float64)
        for i in range(queries.shape[0]):
            highest = np.float64(0)
            for space in range(SUBSPACES):
                for word in range(WORDS):
                    total = np.float32(0)
                    for d in range(min(part, dim - space * part)):
                        total += (
                            queries[i, space * part + d]
                            * parameters[(space * WORDS + word) * part + d]
                        )
                    weights[space, word] = scale * total
                top = np.max(weights[space])
                highest += top
                for word in range(WORDS):
                    weights[space, word] = np.exp(weights[space, word] - top)
            for page in range(summaries.shape[0]):
                attention = LEAST
                for t in range(tokens):
                    product = np.float64(1)
                    for space in range(SUBSPACES):
                        product *= weights[space, summaries[page, t, space]]
                    attention += product
                scores[i, page] = highest + np.log(attention)


class IVF(Scorer):
    """An inverted file over keys, as RetrievalAttention's baselines have it (arXiv 2409.10516): a
    token has the score of the nearest of 256 centroids, a byte a token, and a page the attention
    that its tokens would get. ClusterKV (arXiv 2412.03213) and RetroInfer (arXiv 2505.02922) choose
    by such scores, too, of centroids that they learn from each prompt."""

    name = "ivf"
    calibrated = True
    log_sums = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.tokens + -shape.tokens % 8,), np.uint8

    def calibrate(self, keys: Floats) -> Floats:
        """[CELLS, dim]"""
        return k_means(keys, CELLS).ravel()

    def parameter_count(self, shape: Shape) -> int:
        return CELLS * shape.dim

    @staticmethod
    def summarise(keys, first, parameters, summary):
        dim = keys.shape[1]
        for t in range(keys.shape[0]):
            least = np.float32(np.inf)
            for cell in range(CELLS):
                square = np.float32(0)
                for d in range(dim):
                    apart = keys[t, d] - parameters[cell * dim + d]
                    square += apart * apart
                if square < least:
                    least = square
                    summary[t] = cell

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        dim = queries.shape[1]
        weights = np.empty(CELLS, np.float64)
        for i in range(queries.shape[0]):
            for cell in range(CELLS):
                total = np.float32(0)
                for d in range(dim):
                    total += queries[i, d] * parameters[cell * dim + d]
                weights[cell] = scale * total
            top = np.max(weights)
            for cell in range(CELLS):
                weights[cell] = np.exp(weights[cell] - top)
            for page in range(summaries.shape[0]):
                attention = LEAST
                for t in range(tokens):
                    attention += weights[summaries[page, t]]
                scores[i, page] = top + np.log(attention)
