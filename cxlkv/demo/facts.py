"""Asks the small model in the package about facts in a pool: for benchmarks and tests.

task.py has what its contexts and questions are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForTokenClassification
from transformers.utils import logging

from cxlkv.adapters.transformers import CXLCache
from cxlkv.demo.task import FACT_KEYS, Context, make_context
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool

MODEL = Path(__file__).parent / "model"
TRAINED_TOKENS = 16_384
"""The length of context that the model was trained for."""
TOGETHER = 32
"""Questions that are asked in one step, up to that length."""


@dataclass(frozen=True)
class Plan:
    """`questions` about each context, of which there is one for each seed.

    Beyond the length that the model was trained for, questions are about one context and asked one
    by one, so that bytes are those of a decode step.
    """

    tokens: int = TRAINED_TOKENS
    questions: int = 64
    seeds: tuple[int, ...] = (101, 102)
    together: int = TOGETHER

    @classmethod
    def of(cls, tokens: int) -> Plan:
        if tokens <= TRAINED_TOKENS:
            return cls(tokens)
        return cls(tokens, cls.questions * len(cls.seeds), cls.seeds[:1], 1)

    def contexts(self) -> list[Context]:
        return [make_context(s, self.tokens, FACT_KEYS, self.questions) for s in self.seeds]


@dataclass
class Asked:
    """The answers to all questions, in order, and the mean bytes of a question."""

    right: list[bool] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    bytes_scored: float = 0.0

    @property
    def right_share(self) -> float:
        return sum(self.right) / len(self.right)


class Examiner:
    """Asks a model the questions of a plan. The contexts are read once, into the pool."""

    def __init__(self, model: LlamaForTokenClassification, pool: CXLPool, plan: Plan) -> None:
        model.set_attn_implementation("cxlkv")
        self.model = model
        self.pool = pool
        self.plan = plan
        self.contexts = plan.contexts()
        self.prefilled: list[CXLCache] = []

    def prefill(self) -> None:
        """Read all contexts into the pool."""
        for context in self.contexts:
            cache = CXLCache(self.pool, self.model)
            self._logits(torch.from_numpy(context.tokens)[None], cache)
            self.prefilled.append(cache)

    def pages(self) -> int:
        """Number of pages that a question sees, its own page included."""
        return -(-(self.plan.tokens + 1) // self.pool.layout.page_tokens)

    def budget(self, share: float) -> Budget:
        """Rounded down: "5 % of the pages" is never more than that, forced ones counted."""
        return Budget(pages=max(1, int(share * self.pages())))

    def ask(self, budget: Budget, method: str = "auto", kind: type[CXLCache] = CXLCache) -> Asked:
        """The answers from pages chosen by `method`, by a cache of a kind.

        Each question is one token right behind the context, on a fork of it.
        """
        asked = Asked()
        for context, base in zip(self.contexts, self.prefilled, strict=True):
            (sequence,) = base.sequences
            for first in range(0, len(context.questions), self.plan.together):
                some = slice(first, first + self.plan.together)
                ids = torch.from_numpy(context.questions[some])[:, None]
                forks = [sequence.fork() for _ in range(len(ids))]
                cache = kind(self.pool, self.model, budget, method=method, sequences=forks)
                answers = self._logits(ids, cache)[:, -1].argmax(-1).tolist()
                asked.bytes_scored += cache.counters.bytes_scored
                cache.release()
                asked.answers += answers
                wanted = context.answers[some].tolist()
                asked.right += [a == w for a, w in zip(answers, wanted, strict=True)]
        asked.bytes_scored /= len(asked.right)
        return asked

    def release(self) -> None:
        for cache in self.prefilled:
            cache.release()
        self.prefilled.clear()

    @torch.inference_mode()
    def _logits(self, ids: Tensor, cache: CXLCache) -> Tensor:
        logits = self.model(ids, past_key_values=cache, use_cache=True).logits
        assert isinstance(logits, Tensor)
        return logits


def load_model() -> LlamaForTokenClassification:
    """The model in the package, its bfloat16 weights widened to float32."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: LlamaForTokenClassification = LlamaForTokenClassification.from_pretrained(
        MODEL, dtype=torch.float32, local_files_only=True
    )
    return model


def pool_for(layout: KVLayout, plan: Plan) -> CXLPool:
    """A pool in anonymous memory for the plan's contexts."""
    tokens = plan.tokens * len(plan.seeds)
    # Digests, sketches, headers and the rounding to extents come to less than a third of this.
    capacity = tokens * layout.stored_token_bytes * 4 // 3 + (4 << 20)
    return CXLPool.create("anonymous:", layout=layout, capacity=capacity)
