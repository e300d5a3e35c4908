"""`cxlkv demo`: a language model answers questions about a document from a pool, streaming.

The document is read once. Then each question is asked three times at once: of transformers' own
cache with full attention, of a pool of which each step reads a share of the pages, and of as many
random pages.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from cxlkv.adapters.transformers import LayerStep
from cxlkv.demo.forms import Form, FormsCache
from cxlkv.demo.full_attention import append_cache
from cxlkv.ndp.engine import Selection
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

HANDBOOK = Path(__file__).parent / "handbook"
CHUNK_TOKENS = 1024
ANSWER_TOKENS_MAX = 24
STEPS_TRIED = 3
FORMS = ("full", "selected", "random")


@dataclass(frozen=True)
class Question:
    """answer: a pattern that stands in each right answer. at: about which token of the document
    the fact ends."""

    question: str
    answer: str
    at: int

    def is_right(self, answer: str) -> bool:
        return re.search(self.answer, answer) is not None


def handbook() -> tuple[str, list[Question]]:
    """The document that ships with cxlkv, written for it, and questions about it."""
    questions = json.loads((HANDBOOK / "questions.json").read_text())
    return (HANDBOOK / "handbook.txt").read_text(), [Question(**one) for one in questions]


@dataclass
class Answer:
    """What one form said, its first sentence; seconds and bytes of all steps together."""

    text: str = ""
    steps: int = 0
    seconds: float = 0.0
    bytes_scored: int = 0
    bytes_read: int = 0


@dataclass
class Asked:
    """A question, its answers by form, and how often each page was chosen, of selected pages."""

    question: Question
    answers: dict[str, Answer] = field(default_factory=dict)
    chosen: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


class CountedCache(FormsCache):
    """One row; counts how often each page is chosen, by all layers and heads, forced ones left
    out."""

    def __init__(self, pool: CXLPool, model: PreTrainedModel, form: Form, fork: Sequence) -> None:
        super().__init__(pool, model, [form], [fork])
        self.form = form
        self.chosen = np.zeros(0, np.int64)

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        picked = super().choose(part, queries)
        if picked is not None:
            last = -(-int(part.step.lengths[0]) // self.pool.layout.page_tokens)
            pages = picked.pages[picked.pages >= self.form.sinks]
            pages = pages[pages < last - self.form.recent]
            counted = np.bincount(pages, minlength=last)
            self.chosen = counted + np.pad(self.chosen, (0, last - len(self.chosen)))
        return picked


class Examiner:
    """A model with a document read, in transformers' cache and in a pool."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        pool: CXLPool,
        share: float,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool
        self.share = share
        self.cache = DynamicCache()
        self.context: Sequence = pool.sequence()
        self.tail = ""

    def tokens(self, document: str) -> Tensor:
        """The beginning of a chat up to the question, int64 [tokens]; keeps what ends it."""
        whole = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{document}\n\nQuestion: @"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert isinstance(whole, str)
        head, self.tail = whole.rsplit(" @", 1)
        return self.ids(head)

    def ids(self, text: str) -> Tensor:
        found = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(found, dtype=torch.int64)

    def read(self, tokens: Tensor, advance: Callable[[int], None]) -> None:
        """Prefill by transformers, chunk by chunk; its keys and values go into the pool, too."""
        for chunk in torch.split(tokens, CHUNK_TOKENS):
            self.forward("sdpa", chunk, self.cache)
            advance(len(chunk))
        append_cache(self.context, self.cache)

    def ask(self, question: Question) -> Iterator[Asked]:
        """Yields the answers as they grow: after each step that all forms made."""
        asked = Asked(question, {form: Answer() for form in FORMS})
        ids = self.ids(f" {question.question}{self.tail}")
        before = self.cache.get_seq_length()
        caches = {
            "full": self.cache,
            "selected": self._fork("two_stage" if self.pool.sketch else "exact"),
            "random": self._fork("random"),
        }
        logits = {form: self._read_on(form, cache, ids, asked) for form, cache in caches.items()}
        said: dict[str, list[int]] = {form: [] for form in FORMS}
        open_forms = set(FORMS)
        try:
            while open_forms:
                for form in sorted(open_forms):
                    token = int(logits[form].argmax())
                    said[form].append(token)
                    text = str(self.tokenizer.decode(said[form], skip_special_tokens=True))
                    asked.answers[form].text = text.strip()
                    ended = token == self.model.config.eos_token_id or is_sentence(text)
                    if ended or len(said[form]) == ANSWER_TOKENS_MAX:
                        open_forms.discard(form)
                    else:
                        logits[form] = self._step(form, caches[form], token, asked)
                yield asked
        finally:
            self.cache.crop(before - self.cache.get_seq_length())
            for form in ("selected", "random"):
                cache = caches[form]
                assert isinstance(cache, CountedCache)
                read = cache.read[cache.form]
                asked.answers[form].bytes_scored = read.scored
                asked.answers[form].bytes_read = read.fetched
                if form == "selected":
                    asked.chosen = cache.chosen
                cache.release()
            full = asked.answers["full"]
            full.bytes_read = full.steps * before * self.pool.layout.token_bytes
        yield asked

    def step(self) -> None:
        """One step behind the document, which leaves nothing."""
        before = self.cache.get_seq_length()
        self.forward("sdpa", self.ids(" a"), self.cache)
        self.cache.crop(before - self.cache.get_seq_length())

    def release(self) -> None:
        self.context.release()

    def _fork(self, method: str) -> CountedCache:
        form = Form(method, self.share)
        return CountedCache(self.pool, self.model, form, self.context.fork())

    def _read_on(self, form: str, cache: object, ids: Tensor, asked: Asked) -> Tensor:
        """The question; from the pool a token at a step, so that it too attends to few pages."""
        if form == "full":
            return self.forward("sdpa", ids, cache)
        for token in ids.tolist():
            logits = self._step(form, cache, token, asked)
        return logits

    def _step(self, form: str, cache: object, token: int, asked: Asked) -> Tensor:
        answer, began = asked.answers[form], time.perf_counter()
        logits = self.forward("sdpa" if form == "full" else "cxlkv", torch.tensor([token]), cache)
        answer.seconds += time.perf_counter() - began
        answer.steps += 1
        return logits

    @torch.inference_mode()
    def forward(self, attention: str, tokens: Tensor, cache: object) -> Tensor:
        """Logits of what comes behind int64 [tokens], float [words]."""
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        out = self.model(input_ids=tokens[None], past_key_values=cache, logits_to_keep=1)
        assert isinstance(out.logits, Tensor)
        return out.logits[0, -1]


@contextmanager
def quicker_threads(step: Callable[[], object]) -> Iterator[int]:
    """Has torch take all of its threads, or one, whichever makes a step sooner here; yields how
    many. Its threads wait for one another, so that on cores which others use all are slower."""
    all_threads = torch.get_num_threads()
    seconds = dict.fromkeys((all_threads, 1), math.inf)
    try:
        for _ in range(STEPS_TRIED):
            for count in seconds:
                torch.set_num_threads(count)
                began = time.perf_counter()
                step()
                seconds[count] = min(seconds[count], time.perf_counter() - began)
        best = min(seconds, key=seconds.__getitem__)
        torch.set_num_threads(best)
        yield best
    finally:
        torch.set_num_threads(all_threads)


def is_sentence(text: str) -> bool:
    """Whether it ends as a sentence does; answers are cut there."""
    return re.search(r"[.!?]\"?\s*$", text) is not None and len(text.split()) > 2
