"""What the demo measures: a model asked about contexts in a pool, one page budget after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForTokenClassification

from cxlkv.adapters.transformers import CXLCache
from cxlkv.demo.caches import RandomPages, Weighed, WeighedRandomPages
from cxlkv.demo.task import Context, make_context
from cxlkv.errors import BadArgumentError
from cxlkv.ndp import scorers
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool

TRAINED_TOKENS = 16_384
"""The length of context that the demo's model was trained for."""
TOKENS_MIN, TOKENS_MAX = 2048, 1 << 20


@dataclass(frozen=True)
class Plan:
    """The plan of the questions: `questions` about each context, `together` in one step.

    method: how pages are chosen, as in Batch.select.
    """

    tokens: int = TRAINED_TOKENS
    facts: int = 256
    seeds: tuple[int, ...] = (101, 102)
    questions: int = 64
    together: int = 32
    shares: tuple[float, ...] = (0.01, 0.02, 0.05, 0.10, 0.20, 0.50, 1.0)
    method: str = "auto"

    @classmethod
    def of(cls, tokens: int | None, method: str | None) -> Plan:
        """The default plan with another length or method; BadArgumentError for what is none.

        Beyond the default length all questions are about one context and asked one by one, so that
        bytes and times are those of a decode step, and transformers' own cache fits in memory.
        """
        if method is not None:
            scorers.check(method)
        plan = replace(cls(), method=method or cls.method)
        if tokens is None:
            return plan
        if not TOKENS_MIN <= tokens <= TOKENS_MAX:
            raise BadArgumentError(f"{tokens} tokens: from {TOKENS_MIN} to {TOKENS_MAX}")
        if tokens <= TRAINED_TOKENS:
            return replace(plan, tokens=tokens)
        return replace(
            plan,
            tokens=tokens,
            seeds=plan.seeds[:1],
            questions=plan.questions * len(plan.seeds),
            together=1,
        )

    def contexts(self) -> list[Context]:
        return [make_context(s, self.tokens, self.facts, self.questions) for s in self.seeds]


@dataclass
class Asked:
    """Holds the answers to all questions, in order, with their times and bytes."""

    right: list[bool] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    token_us: list[float] = field(default_factory=list)  # a sample a batch of questions
    bytes_scored: float = 0.0  # the mean for a question
    bytes_read: float = 0.0

    @property
    def right_share(self) -> float:
        return sum(self.right) / len(self.right)


@dataclass(frozen=True)
class Row:
    """One budget: selected pages beside as many random ones; mass is the attention kept."""

    share: float
    pages: int
    selected: Asked
    random: Asked
    mass: float
    random_mass: float


Step = Callable[[Tensor], tuple[Tensor, float]]
"""Token ids [questions, 1] to (logits [questions, classes], seconds)."""


class Examiner:
    """Asks a model the questions of a plan. The contexts are read once, into the pool."""

    def __init__(self, model: LlamaForTokenClassification, pool: CXLPool, plan: Plan) -> None:
        self.model = model
        self.pool = pool
        self.plan = plan
        self.contexts = plan.contexts()
        self.prefilled: list[CXLCache] = []

    def prefill(self) -> float:
        """Read all contexts into the pool; returns the seconds that it took."""
        began = time.perf_counter()
        for context in self.contexts:
            cache = CXLCache(self.pool, self.model)
            self._forward("cxlkv", torch.from_numpy(context.tokens)[None], cache)
            self.prefilled.append(cache)
        return time.perf_counter() - began

    def ask_in_full(self) -> Asked:
        """Answer with full attention: transformers' own DynamicCache and sdpa."""
        asked = Asked()
        for context in self.contexts:
            base = DynamicCache()
            self._forward("sdpa", torch.from_numpy(context.tokens)[None], base)
            wide = deepcopy(base)
            wide.batch_repeat_interleave(self.plan.together)

            def step(ids: Tensor, wide: DynamicCache = wide) -> tuple[Tensor, float]:
                answer = self._timed("sdpa", ids, wide)
                wide.crop(-1)
                return answer

            self._ask(context, step, asked)
        return asked

    def row(self, share: float) -> Row:
        """Measure one budget. The attention mass is measured in a separate run."""
        budget, total = self.budget(share), self.pages()
        selected = self.ask(budget)
        random, _ = self._ask_pool(RandomPages, budget)
        _, mass = self._ask_pool(Weighed, budget)
        _, random_mass = self._ask_pool(WeighedRandomPages, budget)
        return Row(share, budget.pages_at_most(total), selected, random, mass, random_mass)

    def ask(
        self, budget: Budget, method: str | None = None, kind: type[CXLCache] = CXLCache
    ) -> Asked:
        """The answers from pages chosen by `method`, the plan's if None, by a cache of a kind."""
        return self._ask_pool(kind, budget, method)[0]

    def pages(self) -> int:
        """Number of pages that a question sees, its own page included."""
        return -(-(self.plan.tokens + 1) // self.pool.layout.page_tokens)

    def budget(self, share: float) -> Budget:
        """Rounded down: "5 % of the pages" is never more than that, forced ones counted."""
        return Budget(pages=max(1, int(share * self.pages())))

    def kv_bytes(self) -> int:
        """Bytes of the keys and values that a question sees, its own included."""
        return (self.plan.tokens + 1) * self.pool.layout.stored_token_bytes

    def warm_up(self) -> None:
        """One untimed step of each kind: threads are started, pages mapped."""
        budget = Budget(share=self.plan.shares[0])
        for context, base in zip(self.contexts, self.prefilled, strict=True):
            fork = base.fork()
            fork.budget, fork.method = budget, self.plan.method
            self._forward("cxlkv", torch.from_numpy(context.questions[:1])[None], fork)
            fork.release()

    def release(self) -> None:
        for cache in self.prefilled:
            cache.release()
        self.prefilled.clear()

    def _ask_pool(
        self, kind: type[CXLCache], budget: Budget, method: str | None = None
    ) -> tuple[Asked, float]:
        asked, masses = Asked(), [torch.zeros(0)]
        method = method or self.plan.method
        for context, base in zip(self.contexts, self.prefilled, strict=True):

            def step(ids: Tensor, base: CXLCache = base) -> tuple[Tensor, float]:
                (sequence,) = base.sequences
                forks = [sequence.fork() for _ in range(len(ids))]
                cache = kind(self.pool, self.model, budget, method=method, sequences=forks)
                answer = self._timed("cxlkv", ids, cache)
                asked.bytes_scored += cache.counters.bytes_scored
                asked.bytes_read += cache.counters.bytes_read
                if isinstance(cache, Weighed):
                    masses.extend(cache.masses)
                cache.release()
                return answer

            self._ask(context, step, asked)
        asked.bytes_scored /= len(asked.right)
        asked.bytes_read /= len(asked.right)
        every = torch.cat(masses)
        return asked, float(every.mean()) if len(every) else 0.0

    def _ask(self, context: Context, step: Step, asked: Asked) -> None:
        """Each question is one token right behind the context, `together` of them in a step."""
        together = self.plan.together
        for first in range(0, len(context.questions), together):
            ids = torch.from_numpy(context.questions[first : first + together])[:, None]
            logits, seconds = step(ids)
            answers = logits.argmax(-1).tolist()
            wanted = context.answers[first : first + together].tolist()
            asked.answers += answers
            asked.right += [a == w for a, w in zip(answers, wanted, strict=True)]
            asked.token_us.append(1e6 * seconds / len(ids))

    def _timed(self, attention: str, ids: Tensor, cache: object) -> tuple[Tensor, float]:
        began = time.perf_counter()
        logits = self._forward(attention, ids, cache)
        return logits[:, -1], time.perf_counter() - began

    @torch.inference_mode()
    def _forward(self, attention: str, ids: Tensor, cache: object) -> Tensor:
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        logits = self.model(ids, past_key_values=cache, use_cache=True).logits
        assert isinstance(logits, Tensor)
        return logits
