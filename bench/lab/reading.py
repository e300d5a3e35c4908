"""Reads texts with full attention and with forms in a pool, each token given (teacher-forced).

Full attention is transformers' own: one pass over the whole text. Its keys and values of the
context go into the pool, and each form reads on from a fork of them, a token at a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from cxlkv.adapters.transformers.cache import CXLCache
from cxlkv.adapters.transformers.queries import LastQueries
from cxlkv.bench.lab.hits import HotHits
from cxlkv.demo.forms import Form, FormsCache, Outside
from cxlkv.demo.full_attention import append_cache, divergence_from, keys_and_values
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import same_pages
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence as Tokens

Figures = npt.NDArray[np.float32]
ROWS_MAX = 64
"""Full attention's logits are made for so many tokens at a time."""
KEPT_TOKENS = 16384
"""Keys and values of texts as long as this are kept in a file: they take minutes to compute."""
QUERIES = 64
"""Queries of the last tokens of the text that methods learn from."""


@dataclass(frozen=True)
class Steps:
    """Figures of forms [forms, steps] beside full attention's [steps], in nats.

    losses: negative log-likelihood of the text's next token. divergences: Kullback-Leibler, from
    full attention's distribution. agreed: the most likely token is full attention's.
    scored, fetched: bytes [forms], that each form alone would read in a step, on average;
    sketched: how many of its lists were chosen by sketches; kept: which share of its selects
    chose among pages that were best in an earlier step.
    """

    full: Figures
    losses: Figures
    divergences: Figures
    agreed: npt.NDArray[np.bool_]
    scored: npt.NDArray[np.int64]
    fetched: npt.NDArray[np.int64]
    sketched: npt.NDArray[np.int64]
    kept: npt.NDArray[np.float32]


class Reader:
    """A model, and a pool that holds one context at a time. peers: by their names, what makes
    other ways to choose for it. folder: where keys and values of long texts are kept, so that a
    run that is begun again does not compute them again."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: CXLPool,
        peers: Mapping[str, Callable[[Tokens], Outside]] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.model = model
        self.folder = folder
        self.pool = pool
        self.peers = dict(peers or {})
        self.others: dict[str, Outside] = {}
        self.own_attention = str(model.config._attn_implementation)
        if self.own_attention == "cxlkv":
            raise BadArgumentError("the model's own attention is wanted, not cxlkv")

    def read(self, tokens: Tensor, keep: int = 0) -> tuple[DynamicCache, Tensor]:
        """Full attention over int64 [tokens]: its cache, log-probabilities behind the last `keep`
        of them, float32 [keep, words]."""
        cache = self._read_prefix(tokens[: len(tokens) - keep])
        rest = torch.split(tokens[len(tokens) - keep :], ROWS_MAX)
        rows = [self.read_on(cache, some, len(some)) for some in rest if len(some)]
        return cache, torch.cat(rows) if rows else torch.empty(0)

    def _read_prefix(self, tokens: Tensor) -> DynamicCache:
        cache, path = DynamicCache(), None
        if self.folder is not None and len(tokens) >= KEPT_TOKENS:
            digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
            path = self.folder / f"prefix-{digest}.pt"
        if path is not None and path.exists():
            for layer, (keys, values) in enumerate(torch.load(path, weights_only=True)):
                cache.update(keys, values, layer)
            return cache
        self.read_on(cache, tokens, 0)
        if path is not None:
            made = [(keys[None], values[None]) for keys, values in keys_and_values(cache)]
            unfinished = path.with_suffix(".unfinished")
            torch.save(made, unfinished)
            unfinished.replace(path)
        return cache

    @torch.inference_mode()
    def read_on(self, cache: DynamicCache, tokens: Tensor, keep: int) -> Tensor:
        """The same behind what the cache holds, which grows by them."""
        self.model.set_attn_implementation(self.own_attention)
        logits = self.model(
            input_ids=tokens[None], past_key_values=cache, logits_to_keep=max(keep, 1)
        ).logits
        return torch.log_softmax(logits[0].float(), dim=-1)

    @torch.inference_mode()
    def last_queries(self, context: Tokens, tokens: Tensor) -> Figures:
        """Queries of the last QUERIES tokens of a context: [layers, rows, q_heads, dim]."""
        fork = context.fork()
        try:
            fork.truncate(len(tokens) - QUERIES)
            cache = CXLCache(self.pool, self.model, sequences=[fork])
            self.model.set_attn_implementation("cxlkv")
            with LastQueries(cache, QUERIES) as last:
                self.model(
                    input_ids=tokens[None, -QUERIES:], past_key_values=cache, logits_to_keep=1
                )
            return last.of(0)
        finally:
            fork.release()

    @contextmanager
    def context(self, cache: DynamicCache, length: int) -> Iterator[Tokens]:
        """The first `length` tokens of a cache as a sequence in the pool."""
        sequence = self.pool.sequence()
        try:
            append_cache(sequence, cache, length)
            self.others = {name: make(sequence) for name, make in self.peers.items()}
            yield sequence
        finally:
            for other in self.others.values():
                other.release()
            self.others = {}
            sequence.release()

    def rows(self, context: Tokens, forms: Sequence[Form], seed: int) -> FormsCache:
        """A row for each form, a fork of the context each; to be released."""
        forks = [context.fork() for _ in forms]
        return FormsCache(self.pool, self.model, forms, forks, seed, self.others)

    @torch.inference_mode()
    def step(self, cache: FormsCache, tokens: Tensor) -> Tensor:
        """One token a row, int64 [rows]: logits [rows, words]."""
        self.model.set_attn_implementation("cxlkv")
        logits = self.model(input_ids=tokens[:, None], past_key_values=cache).logits
        assert isinstance(logits, Tensor)
        return logits[:, -1]

    def compare(
        self,
        context: Tokens,
        forms: Sequence[Form],
        tokens: Tensor,
        full: Tensor,
        seed: int,
        advance: Callable[[], None],
        watch: Callable[[int], None] = lambda at: None,
        hits: HotHits | None = None,
    ) -> Steps:
        """All forms read `tokens` [steps + 1] behind the context; the last is only predicted.

        full: log-probabilities of full attention, float32 [steps, words]. seed: of random pages.
        watch: called before each step, with its number. hits: told what is chosen.
        """
        count = len(tokens) - 1
        losses = np.empty((len(forms), count), np.float32)
        divergences, agreed = np.empty_like(losses), np.empty(losses.shape, np.bool_)
        cache = self.rows(context, forms, seed)
        cache.on_choice = hits.take if hits else None
        try:
            for at in range(count):
                watch(at)
                logits = self.step(cache, tokens[at].repeat(len(forms)))
                chances = torch.log_softmax(logits.float(), dim=-1)
                losses[:, at] = -chances[:, tokens[at + 1]].numpy()
                divergences[:, at] = divergence_from(full[at], chances)
                agreed[:, at] = chances.argmax(-1) == full[at].argmax(-1)
                advance()
            read = [cache.read[form] for form in forms]
        finally:
            cache.release()
        return Steps(
            full=-full[torch.arange(count), tokens[1:]].numpy(),
            losses=losses,
            divergences=divergences,
            agreed=agreed,
            scored=np.array([one.scored // one.steps for one in read], np.int64),
            fetched=np.array([one.fetched // one.steps for one in read], np.int64),
            sketched=np.array([one.sketched for one in read], np.int64),
            kept=np.array([one.kept / one.selects for one in read], np.float32),
        )


def stale_pages(context: Tokens, held: Sequence[tuple[Tensor, Tensor]], page_tokens: int) -> int:
    """How many pages, by layer and kv head, do not hold the keys, or the values, that transformers
    made of these tokens."""
    count = 0
    for layer, made in enumerate(held):
        # Of layers with a window, too: they give back nothing before a second step.
        every = same_pages(range(context.page_count(layer)), len(made[0]))
        for stored, tensor in zip(context.fetch(layer, every), made, strict=True):
            wanted = tensor[:, : len(context)].float()
            wanted = pad(wanted, (0, 0, 0, -len(context) % page_tokens))
            found = np.asarray(stored)[0].astype(np.float32)
            differs = found != wanted.numpy().reshape(found.shape)
            count += int(differs.any(axis=(2, 3)).sum())
    return count
