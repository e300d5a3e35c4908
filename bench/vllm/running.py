"""Runs vLLM with and without us: time to the first token and decode speed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import inf
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from cxlkv.bench.peers.running import Ring, SideBySide, need_room
from cxlkv.bench.peers.talking import ContenderError, Program, checked
from cxlkv.bench.result import short
from cxlkv.bench.vllm.model import Model
from cxlkv.errors import UnsupportedError

PYTHON = Path("build/vllm/env/bin/python")
PYTHON_VARIABLE = "CXLKV_VLLM_PYTHON"
SHARED = "/dev/shm"
PACKAGE = "cxlkv.bench.vllm"
ASLEEP = 0.1
"""CPUs that an engine may use while it is not asked; one that spins uses a whole one."""
IDLE_LEAST_S = 5.0
"""In less, the fifth of a second that answers leave behind them looks like spinning."""
FIRST_TOKENS = 4  # of a request whose first one is timed; the others are checked

STOCK, CACHED, ENGINE_ATTENTION, POOL_ATTENTION = NAMES = (
    "stock",
    "cached",
    "engine_attention",
    "pool_attention",
)
"""vLLM alone, which computes all; with its own prefix cache; with prefixes in our pool; with K and
V of all requests in our pool, and attention there."""
OURS = (ENGINE_ATTENTION, POOL_ATTENTION)

BOUNDS = {
    "ttft_engine_attention_hit_to_stock": 0.3,
    "ttft_pool_attention_hit_to_stock": 0.3,
    "ttft_engine_attention_miss_to_stock": 1.03,
    "ttft_pool_attention_miss_to_stock": 1.03,
}
"""Largest ratios of times."""

TIE = 0.5
"""Two logits that are so near are as good as one in bf16: between 16 and 32, where the largest ones
of SmolLM2 are, a step is 0.125, and rounding in 30 layers is another step or two."""

Ways = Mapping[str, tuple[str, dict[str, object] | None]]
"""How an engine decodes, and our part of a request's kv_transfer_params."""

WAYS: Ways = {
    CACHED: (CACHED, None),
    ENGINE_ATTENTION: (ENGINE_ATTENTION, None),
    POOL_ATTENTION: (POOL_ATTENTION, None),
    "pool_attention_100": (POOL_ATTENTION, {"budget": {"share": 1.0}}),
    "pool_attention_10": (POOL_ATTENTION, {"budget": {"share": 0.1}}),
}
"""Without a budget nothing is chosen; stock's decode is that of `cached`."""
CHOSEN = ("pool_attention_10",)
"""Other tokens than stock's are no mistake of theirs."""


@dataclass(frozen=True)
class Size:
    """Texts of random ids: a prefix, which is there or not, and less than a block that is new.

    decode: (tokens of the prefix, requests at once) of each case; longer prefixes than
    prefix_tokens go without `engine_attention`. rounds: measured ones, after one that warms.
    """

    model: Model = field(default_factory=Model)
    prefix_tokens: int = 8 << 10
    rounds: int = 5
    decode: tuple[tuple[int, int], ...] = ((8 << 10, 1), (8 << 10, 4), (32 << 10, 1))
    decode_tokens: int = 65
    decode_rounds: int = 5
    step_tokens: int = 2048
    block_tokens: int = 32
    engine_space_gib: int = 1
    pool_bytes: int = 3 << 29
    limit_s: float = 300.0
    bounds: Mapping[str, float] = field(default_factory=lambda: BOUNDS)


QUICK = Size(
    model=Model(layers=2, hidden=128, heads=4, kv_heads=2, vocab=512, max_tokens=2048),
    prefix_tokens=512,
    rounds=2,
    decode=((512, 1), (512, 2), (1024, 1)),
    decode_tokens=9,
    decode_rounds=2,
    step_tokens=512,
    pool_bytes=64 << 20,
    bounds={},
)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Answer(BaseModel):
    """What an engine answered; bench/vllm/engine.py explains the fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tokens: list[list[int]]
    cached: list[int]
    first_s: Positive
    decode_s: Positive
    decoded: Annotated[int, Field(ge=0)]
    idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    idle_used_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Weighed(BaseModel):
    """What an engine says of tokens that could follow; bench/vllm/engine.py."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    logprobs: list[float]


class Run:
    """One run: its engines, their answers, and which of these are right."""

    ways: ClassVar[Ways] = WAYS
    chosen: ClassVar[Sequence[str]] = CHOSEN
    sharing: ClassVar[Sequence[str]] = ()
    """Engines on the pool of one that is asked before them."""
    must_be_right: ClassVar[Sequence[str]] = NAMES
    """Engines whose failure fails a check; of others it is said why they are missing."""
    judge: str | None = None

    def __init__(
        self,
        result: SideBySide,
        size: Size,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.result, self.size, self.progress = result, size, progress
        self.ring = Ring(result)
        self.chance = random.Random(5)  # a run has the same texts as any other
        self.samples: dict[tuple[str, str], list[float]] = {}  # (metric, unit)
        self.idle: dict[str, list[float]] = {}  # seconds, and CPU seconds of them
        self.gaps: dict[tuple[int, ...], float] = {}

    @contextlib.contextmanager
    def running(self, programs: Iterable[Program], place: Path) -> Iterator[None]:
        """All of them, each asked once; they end with the block. Logs go to `place`."""
        with contextlib.ExitStack() as leaving:
            leaving.callback(self.ring.stop)
            for program in programs:
                self.progress(f"starting {program.name}")
                self.ring.join(program, place / f"{program.name}.log", self.size.limit_s)
                first = self.text(2 * self.size.block_tokens)
                self.ask(program.name, [first], FIRST_TOKENS, cached=0)
            yield
            self.ring.ask_all(list(self.ring.talks), {"op": "end"})

    def text(self, tokens: int) -> list[int]:
        """Token ids drawn at random, so that no earlier prompt shares a prefix with them."""
        return self.chance.choices(range(self.size.model.vocab), k=tokens)

    def ask(
        self,
        name: str,
        prompts: Sequence[list[int]],
        tokens: int,
        *,
        cached: int,
        options: Mapping[str, object] | None = None,
    ) -> Answer | None:
        """None from an engine that is out of the run; an answer of the wrong length puts it out."""
        with self.ring.dropping(name):
            if name not in self.ring.talks:
                return None
            asked = {"op": "generate", "prompts": prompts, "tokens": tokens, "options": options}
            answer = checked(Answer, self.ring.talks[name].ask(asked))
            if [len(one) for one in answer.tokens] != [tokens] * len(prompts):
                raise ContenderError("its answer has not as many tokens as asked")
            # Engines load what prompts have in common; what they had of it, they must say.
            if answer.cached != [cached] * len(prompts):
                raise ContenderError(f"cached tokens: {answer.cached}, {cached} of each expected")
            seconds = self.idle.setdefault(name, [0.0, 0.0])
            seconds[0] += answer.idle_s
            seconds[1] += answer.idle_used_s
            return answer
        return None

    def must_equal(
        self, name: str, prompts: Sequence[list[int]], answer: Answer, right: Answer, what: str
    ) -> bool:
        """Whether the tokens are stock's; who gives others is out of the run."""
        with self.ring.dropping(name):
            for request, place in differences(answer, right):
                before = prompts[request] + right.tokens[request][:place]
                own, stock = answer.tokens[request][place], right.tokens[request][place]
                if not self.is_tie(before, own, stock):
                    raise ContenderError(
                        f"{what}: other tokens than stock, from token {place} of request "
                        f"{request} on"
                    )
            return True
        return False

    def is_tie(self, before: list[int], own: int, stock: int) -> bool:
        """Whether rounding alone decides which of two tokens follows. The judge, an engine, gives
        the logits of both after the same tokens. Without a judge, in float32, it never does."""
        asked, judge = (*before, own, stock), self.judge
        if judge is not None and asked not in self.gaps and judge in self.ring.talks:
            with self.ring.dropping(judge):
                request = {"op": "weigh", "prompt": before, "tokens": [own, stock]}
                found = checked(Weighed, self.ring.talks[judge].ask(request))
                self.gaps[asked] = abs(found.logprobs[0] - found.logprobs[1])
        return self.gaps.get(asked, inf) <= TIE

    def add(self, name: str, unit: str, value: float) -> None:
        self.samples.setdefault((name, unit), []).append(value)

    # ---- the two groups of cases ----

    def first_tokens(self) -> list[list[int]]:
        """Time to the first token: prefixes that nobody has, then the same with other suffixes.

        Returns the prefixes, which all but stock have now.
        """
        size, prefixes = self.size, []
        for turn in range(size.rounds + 1):
            prefix = self.text(size.prefix_tokens)
            prefixes.append(prefix)
            for kind, there in (("miss", 0), ("hit", size.prefix_tokens)):
                self._first_token(turn, kind, prefix + self._suffix(), there)
        return prefixes

    def _suffix(self) -> list[int]:
        """Shorter than a block: nobody has anything of it, who decodes second neither."""
        return self.text(self.size.block_tokens - 1)

    def _first_token(self, turn: int, kind: str, prompt: list[int], there: int) -> None:
        answers: dict[str, Answer | None] = dict.fromkeys(NAMES)
        for name in rotated(NAMES, turn):
            self.progress(f"first token, round {turn} of {self.size.rounds}: {kind}, {name}")
            cached = 0 if name == STOCK else there
            answers[name] = self.ask(name, [prompt], FIRST_TOKENS, cached=cached)
        right = answers[STOCK]
        for name, answer in answers.items():
            if answer is None or right is None:
                continue
            what = f"{kind} of {there} tokens"
            if self.must_equal(name, [prompt], answer, right, what) and turn:
                what = STOCK if name == STOCK else f"{name}_{kind}"
                self.add(f"ttft_{what}", "s", answer.first_s)

    def decode(self, prefixes: list[list[int]], tokens: int, requests: int) -> None:
        """Tokens of a second, after the first ones; prefixes that are not there yet come first."""
        size, what = self.size, f"decode_{short(tokens)}_{requests}"
        ways = dict(self.ways)
        if tokens != size.prefix_tokens:
            del ways[ENGINE_ATTENTION]
            prefixes = [self.text(tokens) for _ in range(requests)]
            for name in dict.fromkeys(name for name, _ in ways.values()):
                self.progress(f"{what}: prefix, {name}")
                self.ask(name, [one + self._suffix() for one in prefixes], 1, cached=0)
        for turn in range(size.decode_rounds + 1):
            prompts = [one + self._suffix() for one in prefixes[-requests:]]
            self.decode_round(what, turn, prompts, ways, tokens)

    def decode_round(
        self, what: str, turn: int, prompts: Sequence[list[int]], ways: Ways, cached: int
    ) -> None:
        """All ways, of which another one comes first in each round; round 0 is not counted."""
        answers: dict[str, Answer | None] = dict.fromkeys(ways)
        for way in rotated(tuple(ways), turn):
            name, options = ways[way]
            self.progress(f"{what}, round {turn} of {self.size.decode_rounds}: {way}")
            answers[way] = self.ask(
                name, prompts, self.size.decode_tokens, cached=cached, options=options
            )
        if turn:
            self.decoded(what, prompts, answers)

    def decoded(
        self, what: str, prompts: Sequence[list[int]], answers: Mapping[str, Answer | None]
    ) -> None:
        right = answers[CACHED]
        for way, answer in answers.items():
            if answer is None or right is None:
                continue
            if way in self.chosen:
                self.add(f"{what}_{way}_same_tokens", "share", same_tokens(answer, right))
            elif not self.must_equal(self.ways[way][0], prompts, answer, right, f"{what}, {way}"):
                continue
            self.add(f"{what}_{way}", "tokens/s", answer.decoded / answer.decode_s)

    def case(self, prompts: Sequence[list[int]]) -> None:
        """Time to all first tokens where no cache holds any of the prompts; then, with all but
        less than a block there, tokens of a second of all requests."""
        what, there = f"{len(prompts[0])}_{len(prompts)}", self.there(prompts[0])
        for name in dict.fromkeys(name for name, _ in self.ways.values()):
            self.progress(f"prompts of {what}: {name}")
            is_there = name in self.sharing
            answer = self.ask(name, prompts, 1, cached=there if is_there else 0)
            if answer is not None and not is_there:
                self.add(f"prompt_{what}_{name}", "s", answer.first_s)
        for turn in range(self.size.decode_rounds + 1):
            self.decode_round(f"decode_{what}", turn, prompts, self.ways, there)

    def there(self, prompt: list[int]) -> int:
        """Tokens that an engine has which had the prompt before: all but less than a block."""
        return (len(prompt) - 1) // self.size.block_tokens * self.size.block_tokens

    # ---- what came of it ----

    def finish(self) -> None:
        """Checks, metrics and ratios of what was measured."""
        result = self.result
        for name in self.must_be_right:
            result.checks[f"{name}_right"] = name not in result.missing
            idle_s, used_s = self.idle.get(name, (0.0, 0.0))
            if idle_s > IDLE_LEAST_S:
                result.checks[f"{name}_slept"] = used_s <= ASLEEP * idle_s
        for (name, unit), samples in self.samples.items():
            result.measure(name, samples, unit)
        found = result.metrics
        for name, metric in found.items():
            # Of decode_8k_1_pool_attention, decode_8k_1_cached.
            decoded = "_".join([*name.split("_")[:3], CACHED])
            stock = "ttft_stock" if name.startswith("ttft_") else decoded
            if name != stock and stock in found and metric.unit == found[stock].unit:
                result.ratios[f"{name}_to_stock"] = metric.median / found[stock].median
        for name, most in self.size.bounds.items():
            if name in result.ratios:
                kept = "kept" if result.ratios[name] <= most else "NOT kept"
                result.notes.append(f"{name}: at most {most:g} wanted: {kept}")


def same_tokens(answer: Answer, right: Answer) -> float:
    """The share of tokens that are those of `right`, at the same places."""
    pairs = zip(chain(*answer.tokens), chain(*right.tokens), strict=True)
    return fmean(own == stock for own, stock in pairs)


def differences(answer: Answer, right: Answer) -> Iterator[tuple[int, int]]:
    """Requests with other tokens than `right`: their numbers, and the first wrong token of each."""
    for request, (own, stock) in enumerate(zip(answer.tokens, right.tokens, strict=True)):
        if own != stock:
            yield request, next(at for at in range(len(own)) if own[at] != stock[at])


def rotated(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Another one comes first in each round."""
    by %= len(names)
    return names[by:] + names[:by]


def run(
    result: SideBySide,
    programs: Sequence[Program],
    size: Size,
    place: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Metrics and ratios of all programs, whose names are NAMES; logs go to `place`.

    Who fails is `missing` from there on, and fails a check.
    """
    one = Run(result, size, progress)
    with one.running(programs, place):
        prefixes = one.first_tokens()
        for tokens, requests in size.decode:
            one.decode(prefixes, tokens, requests)
    one.finish()


def run_cases(
    one: Run, programs: Iterable[Program], place: Path, cases: Sequence[Sequence[list[int]]]
) -> None:
    """Metrics and ratios of a trained model's engines. cases: the prompts of each."""
    with one.running(programs, place):
        for prompts in cases:
            one.case(prompts)
    one.finish()
    if one.gaps:
        one.result.notes.append(
            f"{len(one.gaps)} times a token was another than stock's of the same dtype of the "
            f"cache: its logits of the two are at most {max(one.gaps.values()):.3f} apart"
        )


@contextlib.contextmanager
def shared_folder(needed_bytes: int, who_needs: str) -> Iterator[Path]:
    """A folder in shared memory for pools and logs; raises MemoryShortError where there is less."""
    with TemporaryDirectory(dir=SHARED, prefix="cxlkv-bench-vllm-") as made:
        need_room(made, needed_bytes, who_needs)
        yield Path(made)


def python_of_engines() -> str:
    """The Python of the environment that has vLLM. Raises UnsupportedError if there is none."""
    path = os.environ.get(PYTHON_VARIABLE) or str(PYTHON)
    if not os.access(path, os.X_OK):
        raise UnsupportedError(
            f"bench vllm needs an environment with vLLM, and {path} is no Python: make test-vllm "
            f"makes one in build/vllm/env, or set {PYTHON_VARIABLE} to the Python of another"
        )
    return path


def programs_of(python: str, place: Path, size: Size) -> list[Program]:
    """The engines, with their model and pools in `place`, for which it must have room."""
    need_room(place, 2 * size.pool_bytes + (256 << 20), "two pools and a model need")
    env = environment(place, size)
    make = [python, "-m", f"{PACKAGE}.model", str(place / "model"), json.dumps(asdict(size.model))]
    made = subprocess.run(make, env=env, capture_output=True, timeout=size.limit_s)
    if made.returncode:
        words = made.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UnsupportedError(f"{python} cannot make the model: {''.join(words)}")
    return [engine(name, python, settings_of(name, place, size), env) for name in NAMES]


def environment(place: Path, size: Size) -> dict[str, str]:
    """What engines see of ours, and their settings there."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(size.engine_space_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all cores for each, as one works at a time
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(place / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(place),  # what they leave there goes with it
    }


def engine(
    name: str, python: str, settings: Mapping[str, object], env: Mapping[str, str]
) -> Program:
    return Program(name, (python, "-m", f"{PACKAGE}.engine", json.dumps(settings)), env)


def settings_of(name: str, place: Path, size: Size) -> dict[str, object]:
    """What vllm.LLM takes. float32: so tokens can be compared one by one."""
    settings = {
        **of_all(size),
        "model": str(place / "model"),
        "dtype": "float32",
        "max_model_len": size.model.max_tokens,
        "enable_prefix_caching": name == CACHED,
    }
    if name in OURS:
        attention = "pool" if name == POOL_ATTENTION else "engine"
        pool = place / f"{name}.pool"
        settings["kv_transfer_config"] = connector(pool, size, attention=attention)
    return settings


def of_all(size: Size) -> dict[str, object]:
    """Settings that all engines have."""
    return {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_num_batched_tokens": size.step_tokens,
        "max_num_seqs": max(requests for _, requests in size.decode),
        "block_size": size.block_tokens,
    }


def of_trained(folder: Path, size: Size, **more: object) -> dict[str, object]:
    """What vllm.LLM takes of a trained model, in bf16 as it was trained."""
    own = {"model": str(folder), "dtype": "bfloat16", "enable_prefix_caching": False}
    return {**of_all(size), **own, **more}


def connector(pool: Path, size: Size, **extra: object) -> dict[str, object]:
    """Ours, with the pool in this file."""
    own = {"where": str(pool), "capacity": size.pool_bytes, "deadline_s": size.limit_s, **extra}
    return {
        "kv_connector": "CXLConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": own,
    }
