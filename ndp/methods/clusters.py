"""Choose tokens by clusters of the sequence's keys."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.engine import VirtualRows
from cxlkv.ndp.kinds import Choice, Chooser, Floats, Question
from cxlkv.ndp.methods import loops

Numbers = npt.NDArray[np.int32]
Cells = npt.NDArray[np.uint16]
ROUNDS = 10
ESTIMATED = 0.232
"""Share of the clusters that Retro attends to by their centroids."""


class Clustered(NamedTuple):
    """Clusters of a run: cells uint16 [kv_heads, tokens], each token's cluster; means of the
    clusters' keys and values, float32 [kv_heads, clusters, dim].
    """

    cells: Cells
    keys: Floats
    values: Floats


def spherical_means(keys: Floats, count: int, as_they_are: bool) -> npt.NDArray[np.int64]:
    """The cluster of each of keys [tokens, dim]: k-means by the cosine, begun with keys at equal
    distances, or with products with them as they are. A centre is the sum of its keys as they are,
    so that long ones weigh more; both papers' code does this."""
    rows = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)
    first = ((np.arange(count) + 0.5) * len(rows) / count).astype(np.int64)
    centres = (keys if as_they_are else rows)[first].copy()
    for round_ in range(ROUNDS):
        nearest = np.argmax(rows @ centres.T, axis=1)
        if round_ < ROUNDS - 1:
            sums = np.zeros_like(centres)
            loops.add_to(keys, nearest, sums)
            lengths = np.linalg.norm(sums, axis=1, keepdims=True)
            centres = np.where(lengths > 0, sums / np.maximum(lengths, 1e-12), centres)
    found: npt.NDArray[np.int64] = nearest
    return found


class Clusters(Chooser[Clustered]):
    """ClusterKV (arXiv 2412.03213): k-means clusters of the keys by their cosine, and the tokens of
    those whose centroids are best, until the budget is full. The paper has clusters of the whole
    prompt, one for 80 tokens, and each query head chooses its own; here they are of runs of up to
    4,096 tokens, and the heads of a kv head choose by the sum of their softmaxes over centroids."""

    name = "clusters"
    cluster_tokens: ClassVar[int] = 80
    centred: ClassVar[bool] = False
    """Whether the run's mean key is taken off before the cosines, and the first clusters are those
    of the largest product."""
    estimates: ClassVar[bool] = False

    def state(self, keys: Floats, values: Floats) -> Clustered:
        heads, tokens, dim = keys.shape
        count = -(-tokens // self.cluster_tokens)
        cells = np.empty((heads, tokens), np.uint16)
        means = np.zeros((heads, count, dim), np.float32)
        of_values = np.zeros((heads, count, values.shape[2] * self.estimates), np.float32)
        for head, rows in enumerate(keys):
            own = rows - rows.mean(0) if self.centred else rows
            nearest = spherical_means(own, count, as_they_are=self.centred)
            sizes = np.maximum(np.bincount(nearest, minlength=count), 1)[:, None]
            loops.add_to(rows, nearest, means[head])
            means[head] /= sizes
            if self.estimates:
                loops.add_to(values[head], nearest, of_values[head])
                of_values[head] /= sizes
            cells[head] = nearest
        return Clustered(cells, means, of_values)

    def choose(self, states: list[Clustered], asked: Question) -> Choice:
        heads, clusters = len(asked.queries), sum(state.keys.shape[1] for state in states)
        offsets = np.cumsum([0, *(state.keys.shape[1] for state in states)])
        begins = np.cumsum([0, *(state.cells.shape[1] for state in states)])
        places = list(zip(states, offsets.tolist(), begins.tolist(), strict=False))
        counts = np.zeros((heads, clusters), np.int32)
        for state, offset, begin in places:
            loops.count_cells(state.cells, offset, asked.first - begin, asked.last - begin, counts)
        order = np.argsort(-self.rank(states, asked), axis=1, kind="stable")
        given = np.zeros_like(counts)
        loops.share_out(order, counts, asked.most, given)
        log_weights = np.full((heads, asked.tokens), -np.inf, np.float32)
        left = given.copy()
        for state, offset, begin in places:
            part = log_weights[:, begin : begin + state.cells.shape[1]]
            loops.take(state.cells, offset, asked.first - begin, asked.last - begin, left, part)
        read = sum(state.keys.nbytes for state in states)
        read += heads * (asked.last - asked.first) * states[0].cells.itemsize
        rows = self.rows(states, order, counts - given) if self.estimates else None
        return Choice(log_weights, rows, read + (0 if rows is None else rows.v.nbytes))

    def rank(self, states: list[Clustered], asked: Question) -> Floats:
        """[kv_heads, clusters]"""
        queries = asked.queries * np.float32(asked.scale)
        logits = np.concatenate([queries @ state.keys.swapaxes(1, 2) for state in states], axis=2)
        weights = np.exp(logits - logits.max(2, keepdims=True))
        found: Floats = (weights / weights.sum(2, keepdims=True)).sum(1)
        return found

    def rows(
        self, states: list[Clustered], order: npt.NDArray[np.int64], left: Numbers
    ) -> VirtualRows:
        """Rows of the best clusters that are not wholly attended to; left: number of tokens that
        are not.
        """
        heads, clusters = left.shape
        wholly = np.take_along_axis(left, order, axis=1) == 0
        best = np.take_along_axis(order, np.argsort(wholly, axis=1, kind="stable"), axis=1)
        best = best[:, : max(1, round(ESTIMATED * clusters))]
        at = np.arange(heads)[:, None]
        with np.errstate(divide="ignore"):
            log_counts = np.log(left[at, best].astype(np.float32))
        keys = np.empty((*best.shape, states[0].keys.shape[2]), np.float32)
        values = np.empty((*best.shape, states[0].values.shape[2]), np.float32)
        first = 0
        for state in states:  # of the best alone is read what they have
            head, row = np.nonzero((best >= first) & (best < first + state.keys.shape[1]))
            cluster = best[head, row] - first
            keys[head, row] = state.keys[head, cluster]
            values[head, row] = state.values[head, cluster]
            first += state.keys.shape[1]
        return VirtualRows(keys, values, log_counts)


class Retro(Clusters):
    """RetroInfer (arXiv 2505.02922): clusters of 16 tokens, of keys less their mean. The best are
    attended to token by token, and those that follow them by a row each, the mean of their keys and
    values, which counts for as many tokens as are left out. The paper's segments are of 8,192
    tokens, later ones of 1,024, and the steady zone lies outside of all clusters; here forced pages
    are in clusters, too, but not in the counts of their rows."""

    name = "retro"
    cluster_tokens = 16
    centred = True
    estimates = True
