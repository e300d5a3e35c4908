"""What the demo on a text measures: one model reads on, under one page budget beside another.

All of them read the same context first, the pool's once for all budgets. Then they take turns,
token by token, so that each is held against full attention at once and a busy machine hits all
alike.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from cxlkv.adapters.transformers import CXLCache
from cxlkv.demo.caches import RandomPages
from cxlkv.demo.text.inputs import quiet
from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool

TOKENS_MIN = 256
STEPS_OF_TOKENS = 32
"""One of so many tokens is evaluated, the rest is context; but no more than STEPS_MAX are."""
STEPS_MAX = 256
CHUNK_TOKENS = 4096
"""A longer context is read in chunks, so that what a layer computes for it has a bound."""
POOLED = "cxlkv"
"""The attention that reads from a pool, as transformers knows it."""


@dataclass(frozen=True)
class Plan:
    """`context` tokens are read, then `steps` more, one at a time; each predicts the next."""

    context: int
    steps: int
    page_tokens: int = 16
    shares: tuple[float, ...] = (0.02, 0.05, 0.10, 0.25, 0.50)

    @classmethod
    def of(cls, tokens: int) -> Plan:
        """The plan for a text of that many tokens; BadArgumentError for less than TOKENS_MIN."""
        if tokens < TOKENS_MIN:
            raise BadArgumentError(f"{tokens} tokens are too few: at least {TOKENS_MIN}")
        steps = min(tokens // STEPS_OF_TOKENS, STEPS_MAX)
        return cls(tokens - steps - 1, steps)

    @property
    def tokens(self) -> int:
        """Tokens of the text in use, the last one as what is predicted only."""
        return self.context + self.steps + 1

    @property
    def page_count(self) -> int:
        """Pages that the first of the steps sees."""
        return -(-(self.context + 1) // self.page_tokens)

    def budgets(self) -> dict[float, Budget]:
        """By share; rounded down, so that "5 % of the pages" is never more than that.

        Left out are those with no page to choose, as the forced ones take them all.
        """
        found = {share: Budget(pages=max(1, int(share * self.page_count))) for share in self.shares}
        return {s: b for s, b in found.items() if (b.pages or 0) > b.sinks + b.recent}


@dataclass
class Track:
    """Collects the figures of one kind of attention: one number a step in each list."""

    losses: list[float] = field(default_factory=list)
    """Negative log-likelihood of the text's next token, in nats."""
    best: list[int] = field(default_factory=list)
    """The most likely next token."""
    gaps: list[float] = field(default_factory=list)
    """By how many nats full attention finds this best token less likely than its own."""
    divergences: list[float] = field(default_factory=list)
    """Kullback-Leibler divergence from full attention's distribution, in nats."""
    step_us: list[float] = field(default_factory=list)
    bytes_scored: float = 0.0  # the mean for a step
    bytes_read: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / len(self.losses))

    @property
    def divergence(self) -> float:
        return sum(self.divergences) / len(self.divergences)

    def agreement(self, full: Track) -> float:
        """The share of steps with the same best token."""
        same = [a == b for a, b in zip(self.best, full.best, strict=True)]
        return sum(same) / len(same)

    def note(self, chances: Tensor, full: Tensor, target: int) -> None:
        """Record one step; `chances` and `full` are log-probabilities, float32 [vocabulary]."""
        best = int(chances.argmax())
        self.losses.append(-float(chances[target]))
        self.best.append(best)
        self.gaps.append(float(full.max() - full[best]))
        # A token that full attention rules out adds nothing, but 0 times minus infinity is nan.
        parts = (full.exp() * (full - chances)).masked_fill(full.isneginf(), 0.0)
        self.divergences.append(max(0.0, float(parts.sum())))
        if not math.isfinite(self.losses[-1] + self.divergences[-1]):
            raise CXLKVError(
                f"the model gives token {target} of the text no finite likelihood: its numbers "
                "overflow (float16 does so), or it never learned that token"
            )


@dataclass(frozen=True)
class Row:
    """One budget: selected pages, beside as many random ones unless it is all of them."""

    share: float
    pages: int
    selected: Track
    random: Track | None


class Reader:
    """A model reading a text with one kind of attention and one cache, None for its own."""

    def __init__(self, model: PreTrainedModel, attention: str, cache: Cache | None = None) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self.track = Track()
        parameters = inspect.signature(model.forward).parameters
        self._more = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        """Read int64 [tokens]; the log-probabilities of what comes next, float32 [vocabulary]."""
        if self.model.config._attn_implementation != self.attention:
            self.model.set_attn_implementation(self.attention)
        began = time.perf_counter()
        out = self.model(
            input_ids=tokens[None], past_key_values=self.cache, use_cache=True, **self._more
        )
        self.track.step_us.append(1e6 * (time.perf_counter() - began))
        self.cache = cast("Cache | None", out.get("past_key_values"))
        return torch.log_softmax(out.logits[0, -1].float(), dim=-1)

    def prefill(self, tokens: Tensor) -> float:
        """Read the context; returns the seconds that it took."""
        for chunk in torch.split(tokens, CHUNK_TOKENS):
            self.read(chunk)
        seconds = sum(self.track.step_us) / 1e6
        self.track = Track()
        return seconds


class Reading:
    """Reads the text with transformers' full attention, and with each budget in the pool."""

    def __init__(self, model: PreTrainedModel, pool: CXLPool, tokens: Tensor, plan: Plan) -> None:
        self.plan = plan
        self.tokens = tokens
        self.full = Reader(model, str(model.config._attn_implementation))
        with quiet():  # a model that computes its attention in its own code only warns of it
            model.set_attn_implementation(POOLED)
        if model.config._attn_implementation != POOLED:
            raise UnsupportedError(
                f"{type(model).__name__} takes no attention but its own, so no pool can serve it: "
                "use a model that transformers' attention interface serves, like Llama or Qwen3"
            )
        self.base = CXLCache(pool, model)
        self.model = model

    def prefill(self) -> tuple[float, float]:
        """Read the context twice; returns the seconds that transformers took, and the pool's."""
        context = self.tokens[: self.plan.context]
        own_s = self.full.prefill(context)
        cache = self.full.cache
        if not isinstance(cache, Cache) or cache.get_seq_length() != len(context):
            raise UnsupportedError(
                f"{type(self.model).__name__} keeps no keys and values of what it read: "
                "no causal language model with attention"
            )
        return own_s, Reader(self.model, POOLED, self.base).prefill(context)

    def decode(self, advance: Callable[[], None]) -> tuple[Track, list[Row]]:
        """Decode all steps with all readers; `advance` is called after each step."""
        budgets = {**self.plan.budgets(), 1.0: Budget(share=1.0)}
        selected = {share: self._reader(CXLCache, budget) for share, budget in budgets.items()}
        random = {s: self._reader(RandomPages, b) for s, b in budgets.items() if s < 1}
        readers = [*selected.values(), *random.values()]
        for at in range(self.plan.context, self.plan.context + self.plan.steps):
            token, target = self.tokens[at : at + 1], int(self.tokens[at + 1])
            wanted = self.full.read(token)
            self.full.track.note(wanted, wanted, target)
            for reader in readers:
                reader.track.note(reader.read(token), wanted, target)
            advance()
        for reader in readers:
            self._finish(reader)
        seen = -(-(self.plan.tokens - 1) // self.plan.page_tokens)
        return self.full.track, [
            Row(
                share,
                budget.pages_at_most(seen),
                selected[share].track,
                random[share].track if share in random else None,
            )
            for share, budget in budgets.items()
        ]

    def _reader(self, kind: type[CXLCache], budget: Budget) -> Reader:
        forks = [sequence.fork() for sequence in self.base.sequences]
        cache = kind(self.base.pool, self.model, budget, sequences=forks)
        return Reader(self.model, POOLED, cache)

    def _finish(self, reader: Reader) -> None:
        cache = reader.cache
        assert isinstance(cache, CXLCache)
        reader.track.bytes_scored = cache.counters.bytes_scored / self.plan.steps
        reader.track.bytes_read = cache.counters.bytes_read / self.plan.steps
        cache.release()
