"""What the demo on a text measures: forms of attention beside full attention, step by step.

Full attention is transformers' own. The pool has the context once; each form reads on from a fork
of it, and all of them are rows of one batch, fed with the text's own tokens.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from cxlkv.adapters.transformers import CXLCache
from cxlkv.demo.forms import Form, FormsCache, Read
from cxlkv.demo.full_attention import divergence_from
from cxlkv.demo.text.inputs import quiet
from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError
from cxlkv.ndp import scorers
from cxlkv.pool import CXLPool

TOKENS_MIN = 256
STEPS_OF_TOKENS = 32
"""One of so many tokens is evaluated, the rest is context; but no more than STEPS_MAX are."""
STEPS_MAX = 256
CHUNK_TOKENS = 4096
"""A longer context is read in chunks, so that what a layer computes for it has a bound."""
FULL_CHUNK_STEPS = 16
"""Full attention reads so many of the evaluated tokens at a time, as many rows of logits."""
POOLED = "cxlkv"
"""The attention that reads from a pool, as transformers knows it."""
METHODS = ("exact", "two_stage", "digest")
SHARES = (0.02, 0.05, 0.10, 0.25)


class Wanted(NamedTuple):
    """Each method at each share of the pages is a row."""

    methods: tuple[str, ...] = METHODS
    shares: tuple[float, ...] = SHARES


EVERY = Wanted()


@dataclass(frozen=True)
class Plan:
    """`context` tokens are read, then `steps` more, one at a time; each predicts the next."""

    context: int
    steps: int
    methods: tuple[str, ...] = METHODS
    shares: tuple[float, ...] = SHARES
    page_tokens: int = 16

    @classmethod
    def of(cls, tokens: int, wanted: Wanted = EVERY) -> Plan:
        """The plan for a text of that many tokens; BadArgumentError for less than TOKENS_MIN, and
        for a method that is none."""
        if tokens < TOKENS_MIN:
            raise BadArgumentError(f"{tokens} tokens are too few: at least {TOKENS_MIN}")
        for method in wanted.methods:
            scorers.check(method)
        steps = min(tokens // STEPS_OF_TOKENS, STEPS_MAX)
        return cls(tokens - steps - 1, steps, *wanted)

    @property
    def tokens(self) -> int:
        """Tokens of the text in use, the last one as what is predicted only."""
        return self.context + self.steps + 1

    @property
    def page_count(self) -> int:
        """Pages that the first of the steps sees."""
        return -(-(self.context + 1) // self.page_tokens)

    def forms(self) -> list[Form]:
        """All pages, then each method, then random pages, at each budget.

        Left out are budgets with no page to choose, as the forced ones take them all.
        """
        found = [Form.full()]
        for method in (*self.methods, "random"):
            forms = [Form(method, s) for s in self.shares]
            found += [form for form in forms if self.pages_of(form) > form.sinks + form.recent]
        return found

    def pages_of(self, form: Form) -> int:
        """Pages in a layer that is not dense."""
        return form.budget().pages_at_most(self.page_count, 0)


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
        self.divergences.append(float(divergence_from(full, chances)))
        if not math.isfinite(self.losses[-1] + self.divergences[-1]):
            raise CXLKVError(
                f"the model gives token {target} of the text no finite likelihood: its numbers "
                "overflow (float16 does so), or it never learned that token"
            )


@dataclass(frozen=True)
class Row:
    """One form: how many pages a head attends to, what it predicts and what it reads."""

    form: Form
    pages: int
    track: Track
    read: Read


class Reader:
    """A model reading a text with one kind of attention and one cache, None for its own."""

    def __init__(self, model: PreTrainedModel, attention: str, cache: Cache | None = None) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def read(self, tokens: Tensor, keep: int = 1) -> Tensor:
        """Read int64 [rows, tokens]; log-probabilities behind the last `keep` of them, float32
        [rows, keep, vocabulary]."""
        if self.model.config._attn_implementation != self.attention:
            self.model.set_attn_implementation(self.attention)
        out = self.model(
            input_ids=tokens,
            past_key_values=self.cache,
            use_cache=True,
            **({"logits_to_keep": keep} if self._keeps else {}),
        )
        self.cache = cast("Cache | None", out.get("past_key_values"))
        return torch.log_softmax(out.logits[:, -keep:].float(), dim=-1)

    def prefill(self, tokens: Tensor) -> float:
        """Read the context, int64 [tokens]; returns the seconds that it took."""
        began = time.perf_counter()
        for chunk in torch.split(tokens, CHUNK_TOKENS):
            self.read(chunk[None])
        return time.perf_counter() - began


class Reading:
    """Reads the text with transformers' full attention, and with each form from the pool."""

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
        """All forms read on, a token a step; `advance` is called after each step."""
        plan, forms = self.plan, self.plan.forms()
        forks = [self.base.sequences[0].fork() for _ in forms]
        cache = FormsCache(self.base.pool, self.model, forms, forks)
        reader, full = Reader(self.model, POOLED, cache), Track()
        tracks = [Track() for _ in forms]
        try:
            for first in range(0, plan.steps, FULL_CHUNK_STEPS):
                count = min(FULL_CHUNK_STEPS, plan.steps - first)
                given = self.tokens[plan.context + first :][: count + 1]
                wanted = self.full.read(given[None, :-1], count)[0]
                for token, target, chances in zip(given, given[1:].tolist(), wanted, strict=False):
                    full.note(chances, chances, target)
                    rows = reader.read(token.repeat(len(forms), 1))[:, -1]
                    for track, row in zip(tracks, rows, strict=True):
                        track.note(row, chances, target)
                    advance()
        finally:
            cache.release()
        return full, [
            Row(form, plan.pages_of(form), track, cache.read[form])
            for form, track in zip(forms, tracks, strict=True)
        ]
