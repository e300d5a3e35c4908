"""SmolLM2 with encoded pools beside transformers' own caches of fewer bits: what given steps lose,
and what they take.

transformers' caches run in an environment of their own (bench/peers/caches.py), by the same code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from cxlkv.adapters.transformers import CXLCache, layout_of
from cxlkv.bench.lab.texts import beginnings
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.peers.caches import Figures, Given, Steps
from cxlkv.bench.peers.running import ENVIRONMENTS
from cxlkv.bench.peers.talking import ContenderError, Conversation, checked, program_of
from cxlkv.bench.result import Result
from cxlkv.bench.tables import medians, pivot
from cxlkv.demo import smollm2
from cxlkv.demo.text import inputs
from cxlkv.errors import UnsupportedError
from cxlkv.pool import CXLPool

PEER = "caches"
OURS = {"pool": "none", "pool_int8": "int8", "pool_int8_int4": "int8,int4", "pool_int4": "int4"}
"""Encodings; "dynamic" is transformers' plain cache, in our process."""


@dataclass(frozen=True)
class Points:
    """Lengths in tokens, by one thread: bench/peers/caches.py. limit_s: for one answer; the first
    one of quanto compiles."""

    texts: int = 3
    behind: int = 512
    steps: int = 96
    timed_behind: int = 3500
    timed_steps: int = 4
    rounds: int = 7
    limit_s: float = 600.0


class Losses(BaseModel):
    """What the peer says of a text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    losses: list[float]
    full: list[float]
    divergences: list[float]
    agreed: list[float]


class Seconds(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    seconds: list[float]


class InPools(Steps):
    """Ours; all pools go with the stack."""

    def __init__(self, given: Given, stack: ExitStack) -> None:
        self.stack = stack
        super().__init__(given, self.cache_of)

    def cache_of(self, form: str, model: PreTrainedModel, tokens: int) -> Cache:
        if form == "dynamic":
            return DynamicCache()
        layout = layout_of(model, encoding=OURS[form])
        capacity = int(1.5 * layout.token_bytes * (tokens + layout.page_tokens)) + (32 << 20)
        pool = CXLPool.create(
            "anonymous:", layout=layout, capacity=capacity, threads=self.given.threads
        )
        return CXLCache(self.stack.enter_context(pool), model)

    def attention(self, cache: Cache | None) -> str:
        return "cxlkv" if isinstance(cache, CXLCache) else "sdpa"


class InPeer:
    """transformers', while the peer answers."""

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk

    def quality(self, form: str, text: int) -> Figures:
        answer = self.talk.ask({"op": "quality", "form": form, "text": text})
        return checked(Losses, answer).model_dump()

    def seconds(self, form: str) -> list[float]:
        return checked(Seconds, self.talk.ask({"op": "steps", "form": form})).seconds


Way = InPools | InPeer


def run(result: Result, points: Points, environments: Path = ENVIRONMENTS) -> None:
    """Metrics step_FORM in ms, divergence_FORM in nats a token and loss_FORM, over full
    attention's, a sample for each text; ratios step_POOL_to_FORM, a form's time over ours. Notes
    say what is missing, and why."""
    try:
        folder = smollm2.prepare(Console(quiet=True))
    except UnsupportedError as error:
        result.notes.append(f"steps of a model: not measured, {error}")
        return
    timed = points.timed_behind + points.timed_steps * (points.rounds + 2)
    given = Given(
        str(folder),
        beginnings(folder, max(timed, points.behind + points.steps + 1), points.texts),
        points.behind,
        points.steps,
        points.timed_behind,
        points.timed_steps,
        threads=1,
    )
    with ExitStack() as stack:
        with inputs.quiet():
            ours = InPools(given, stack)
        ways: dict[str, Way] = dict.fromkeys(("dynamic", *OURS), ours)
        ways |= stack.enter_context(peer_of(result, given, points, environments))
        weigh(result, ways, points)
        take_turns(result, ways, points)


@contextmanager
def peer_of(
    result: Result, given: Given, points: Points, environments: Path
) -> Iterator[dict[str, Way]]:
    """Its forms, named hf_FORM; none, and a note, where it does not answer."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        try:
            log = Path(made) / f"{PEER}.log"
            talk = Conversation(program_of(PEER, environments), log, points.limit_s)
            stack.callback(talk.stop)
            talk.ask({"op": "open", **asdict(given)})
        except ContenderError as error:
            result.notes.append(f"transformers' caches: not measured, {error}")
            yield {}
            return
        result.notes.append(f"beside: {talk.version}'s QuantizedCache, by one thread")
        yield {f"hf_{form}": InPeer(talk) for form in talk.forms}


def weigh(result: Result, ways: dict[str, Way], points: Points) -> None:
    """Quality; a way that fails leaves `ways`, and a note says why."""
    for name, way in list(ways.items()):
        losses, divergences, agreed = [], [], []
        try:
            for text in range(points.texts):
                found = way.quality(name.removeprefix("hf_"), text)
                losses.append(float(np.sum(found["losses"]) / np.sum(found["full"])) - 1)
                divergences.append(float(np.mean(found["divergences"])))
                agreed.append(float(np.mean(found["agreed"])))
        except ContenderError as error:
            result.notes.append(f"{name}: not measured, {error}")
            del ways[name]
            continue
        result.measure(f"loss_{name}", losses, "share over full attention's")
        result.measure(f"divergence_{name}", divergences, "nats a token")
        result.measure(f"agreement_{name}", agreed, "share of tokens")
        if name in ("dynamic", "hf_dynamic", "pool"):
            result.checks[f"is_full_attention_{name}"] = max(divergences) < 1e-4


def take_turns(result: Result, ways: Mapping[str, Way], points: Points) -> None:
    def stepping(name: str, way: Way) -> Callable[[], float]:
        return lambda: float(np.median(way.seconds(name.removeprefix("hf_"))))

    forms = {name: stepping(name, way) for name, way in ways.items()}
    for form in forms.values():
        form()  # reads the text
    samples = interleave_reported(forms, points.rounds)
    ms = result.times(samples, "ms", "step_{}")
    for name in OURS:
        for other in ms:
            if other not in OURS:
                result.ratios[f"step_{name}_to_{other}"] = ms[other] / ms[name]


def tables(result: Result) -> list[Table]:
    """None where no model was read."""
    columns = ("step", "divergence", "loss", "agreement")
    return pivot("SmolLM2 by cache: ms, nats, shares", medians(result), columns)
