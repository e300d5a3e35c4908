"""What pages keep, by layer and head: attention mass, the output's error, recall of the best pages.

All is asked with the queries of full attention, so that no form's own errors add up. The attention
that each page holds, and the output of all pages, are computed here from the keys and values that
transformers made: neither the pool nor its scores are trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from cxlkv.adapters.transformers import LayerStep
from cxlkv.demo.forms import Form, FormsCache, Outside, Pages
from cxlkv.errors import UnsupportedError
from cxlkv.ndp.engine import Selection
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens

Kept = npt.NDArray[np.float32]


class WatchedCache(FormsCache):
    """One row of full attention; while `watched`, each layer's query is asked of all forms too.

    A form with refresh chooses among what its own sequence kept in the step before, so that it has
    a fork to itself, and is asked in every step.

    held: keys and values of each layer, of all tokens that will be read, [kv_heads, tokens, dim].
    Of each watched step, mass, error: [forms, layers, q_heads]; attainable: the mass of the best
    list of that length, recall: the share of it that is chosen, [forms, layers, kv_heads]. Layers
    are those without a window: the others choose nothing.
    """

    def __init__(
        self,
        pool: CXLPool,
        model: object,
        forms: Sequence[Form],
        sequence: Tokens,
        held: Sequence[tuple[Tensor, Tensor]],
        seed: int,
        others: Mapping[str, Outside] | None = None,
    ) -> None:
        super().__init__(pool, model, [Form.full()], [sequence], seed, others)
        self.forms = tuple(forms)
        self.held = held
        self.watched = False
        windows = pool.layout.windows
        self.choosing = [layer for layer, window in enumerate(windows) if window is None]
        self.followers = [
            Follower(pool, form, sequence.fork(), held) if form.refresh > 1 else None
            for form in forms
        ]
        self.mass: list[Kept] = []
        self.error: list[Kept] = []
        self.attainable: list[Kept] = []
        self.recall: list[Kept] = []

    def attend(
        self, batch: Batch, part: LayerStep, queries: Tensor, picked: Selection | None
    ) -> Tensor:
        out = super().attend(batch, part, queries, picked)
        lengths = part.step.lengths
        followed = [one.choose(self, part, queries) if one else None for one in self.followers]
        if not self.watched or part.window is not None:
            return out
        if part.index == self.first_chosen:
            layout = self.pool.layout
            for kept, heads in (
                (self.mass, self._config.num_attention_heads),
                (self.error, self._config.num_attention_heads),
                (self.attainable, layout.kv_heads),
                (self.recall, layout.kv_heads),
            ):
                kept.append(np.empty((len(self.forms), len(self.choosing), heads), np.float32))
        layer = self.choosing.index(part.index)
        by_token, wanted = self.by_arithmetic(part, queries)
        true = by_token.sum(axis=-1)
        for at, form in enumerate(self.forms):
            chosen = followed[at] or self.choose_of(
                form.method, (form,), batch, part, queries, lengths
            )
            some = super().attend(batch, part, queries, chosen)
            error = (some.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            self.mass[-1][at, layer] = mass_of(chosen, by_token)
            self.error[-1][at, layer] = error[0].numpy()
            best, recall = beside_best(chosen.pages[0], true.mean(axis=1), form)
            self.attainable[-1][at, layer], self.recall[-1][at, layer] = best, recall
        return out

    def release(self) -> None:
        super().release()
        for follower in self.followers:
            if follower:
                follower.sequence.release()

    def by_arithmetic(self, part: LayerStep, queries: Tensor) -> tuple[Kept, Tensor]:
        """The weights of attention, float32 [kv_heads, group, pages, page_tokens], and the output,
        float32 [1, q_heads, dim]."""
        if part.sinks is not None:
            raise UnsupportedError("attention with sinks has weights that no page holds")
        layout, length = self.pool.layout, int(part.step.lengths[0])
        keys, values = (one[:, :length].float() for one in self.held[part.index])
        grouped = queries[0].float().reshape(layout.kv_heads, -1, queries.shape[-1])
        scores = part.scale * grouped @ keys.mT
        if part.softcap:
            scores = part.softcap * torch.tanh(scores / part.softcap)
        weights = scores.softmax(dim=-1)
        out = (weights @ values).reshape(1, -1, values.shape[-1])
        padded = pad(weights, (0, -length % layout.page_tokens))
        by_token = padded.reshape(*padded.shape[:2], -1, layout.page_tokens)
        return np.asarray(by_token.numpy(), np.float32), out


class Follower:
    """A sequence beside full attention's that reads what it reads, for a form with refresh."""

    def __init__(
        self, pool: CXLPool, form: Form, sequence: Tokens, held: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.form = form
        self.sequence = sequence
        self.batch = pool.batch([sequence])
        self.held = held

    def choose(self, cache: FormsCache, part: LayerStep, queries: Tensor) -> Selection | None:
        """The pages of this step's query, of one layer after the other; None: all of a window."""
        length = part.step.lengths
        last = slice(int(length[0]) - 1, int(length[0]))
        keys, values = (one[:, last].transpose(0, 1).contiguous() for one in self.held[part.index])
        self.sequence.append(part.index, keys, values)
        if part.window is not None:
            return None
        form = self.form
        return cache.choose_of(form.method, (form,), self.batch, part, queries, length)


def mass_of(chosen: Selection, true: Kept) -> Kept:
    """The share of attention, [kv_heads, group, pages, tokens], that one list's tokens hold, by
    query head; those that its log-weights leave out do not count."""
    kept = []
    for head, pages in enumerate(chosen.pages[0]):
        held = true[head][:, pages[pages >= 0]]
        if chosen.log_weights is not None:
            held = held * (chosen.log_weights[0, head][pages >= 0] > -np.inf)
        kept.append(held.sum(axis=(1, 2)))
    return np.concatenate(kept).astype(np.float32)


def beside_best(chosen: Pages, true: Kept, form: Form) -> tuple[Kept, Kept]:
    """For each kv head: the mass of the pages that hold most, of [kv_heads, pages], in lists as
    long as the chosen ones, and the share of them that is chosen; forced pages are in the mass
    alone.
    """
    mass, recall = [], []
    for pages, masses in zip(chosen, true, strict=True):
        first, last = form.sinks, len(masses) - form.recent
        free = pages[(pages >= first) & (pages < last)]
        best = first + np.argsort(-masses[first:last])[: len(free)]
        mass.append(masses[:first].sum() + masses[best].sum() + masses[last:].sum())
        recall.append(np.isin(best, free).mean() if len(free) else 1.0)
    return np.array(mass, np.float32), np.array(recall, np.float32)
