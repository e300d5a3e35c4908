"""transformers' caches of fewer bits on a model: what they cost its predictions, and its steps.

    {"op": "open", "model": path, "texts": [[id, ...], ...], "behind": 512, "steps": 256,
     "timed_behind": 3500, "timed_steps": 8, "threads": 1}                   {}
    {"op": "quality", "form": "quanto4", "text": 0}                {"divergences": [...], ...}
    {"op": "steps", "form": "quanto4"}                             {"seconds": [...]}

Steps are given tokens, one at a time. Quality is that of a model in float32, over one pass with
full attention; time is that of the model as it is stored, behind the first text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import Cache

from .serving import Peer

CHUNK_TOKENS = 512
Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Given:
    """texts: token ids, longer than what is read of each; the first is the timed one, too. behind:
    tokens that are read in one pass before `steps` given ones. Likewise timed ones."""

    model: str
    texts: list[list[int]]
    behind: int
    steps: int
    timed_behind: int
    timed_steps: int
    threads: int


class Steps:
    """A model in two dtypes, and what full attention predicts. make: a cache for a form, of so many
    tokens."""

    def __init__(self, given: Given, make: Callable[[str, PreTrainedModel, int], Cache]) -> None:
        self.given, self.make = given, make
        torch.set_num_threads(given.threads)
        exact, stored = (
            AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype)
            for dtype in (torch.float32, "auto")
        )
        self.exact, self.stored = exact, stored
        self.full: dict[int, Tensor] = {}
        self.timed: dict[str, tuple[Cache, int]] = {}

    @torch.inference_mode()
    def quality(self, form: str, text: int) -> Figures:
        """losses, and full: full attention's; divergences from it, all in nats; agreed: 1.0 where
        the most likely token is the same one. One figure for each step."""
        given = self.given
        ids = torch.tensor(given.texts[text][: given.behind + given.steps + 1])
        if text not in self.full:
            self.full[text] = self.chances(ids[:-1], None)[-given.steps :]
        full, cache = self.full[text], self.make(form, self.exact, len(ids))
        self.chances(ids[: given.behind], cache)
        found = torch.cat([self.chances(ids[at : at + 1], cache) for at in self.range()])
        wanted = ids[given.behind + 1 :, None]
        divergences = (full.exp() * (full - found)).sum(-1).clamp_min(0)
        return {
            "losses": (-found.gather(1, wanted)[:, 0]).tolist(),
            "full": (-full.gather(1, wanted)[:, 0]).tolist(),
            "divergences": divergences.tolist(),
            "agreed": (full.argmax(-1) == found.argmax(-1)).float().tolist(),
        }

    def range(self) -> range:
        return range(self.given.behind, self.given.behind + self.given.steps)

    def chances(self, ids: Tensor, cache: Cache | None) -> Tensor:
        """Log-probabilities behind each token: float32 [tokens, words]."""
        self.exact.set_attn_implementation(self.attention(cache))
        logits = self.exact(
            input_ids=ids[None], past_key_values=cache, use_cache=cache is not None
        ).logits
        return torch.log_softmax(logits[0], dim=-1)

    def attention(self, cache: Cache | None) -> str:
        return "sdpa"

    @torch.inference_mode()
    def seconds(self, form: str) -> list[float]:
        """Seconds of the steps behind the timed text, which grows by them."""
        ids = torch.tensor(self.given.texts[0])
        if form not in self.timed:
            cache = self.make(form, self.stored, len(ids))
            self.stored.set_attn_implementation(self.attention(cache))
            for part in torch.split(ids[: self.given.timed_behind], CHUNK_TOKENS):
                self.stored(input_ids=part[None], past_key_values=cache, logits_to_keep=1)
            self.timed[form] = cache, self.given.timed_behind
        cache, first = self.timed[form]
        self.stored.set_attn_implementation(self.attention(cache))
        seconds = []
        for at in range(first, first + self.given.timed_steps):
            began = time.perf_counter()
            self.stored(input_ids=ids[None, at : at + 1], past_key_values=cache)
            seconds.append(time.perf_counter() - began)
        self.timed[form] = cache, first + self.given.timed_steps
        return seconds


class Caches(Peer):
    version = f"transformers {transformers.__version__}"
    forms: ClassVar = dict.fromkeys(
        ("dynamic", "quanto4", "quanto2", "hqq4", "fp8"), ("quality", "steps")
    )

    def answer(self, asked: dict[str, object]) -> dict[str, object]:
        kind = asked.pop("op")
        if kind == "open":
            self.steps = Steps(Given(**asked), cache_of)  # type: ignore[arg-type]
            return {}
        if kind == "quality":
            return {**self.steps.quality(str(asked["form"]), int(str(asked["text"])))}
        return {"seconds": self.steps.seconds(str(asked["form"]))}


def cache_of(form: str, model: PreTrainedModel, tokens: int) -> Cache:
    """With the options that are its defaults: groups of 64, the newest 127 tokens at most as they
    are, all of them quantized anew when these are 128."""
    if form == "dynamic":
        return DynamicCache()
    if form == "fp8":
        return QuantizedCache("fp8", model.config)
    return QuantizedCache(form[:-1], model.config, nbits=int(form[-1]))


PEER = Caches
