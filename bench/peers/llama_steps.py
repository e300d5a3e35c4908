"""What context costs a decode step of SmolLM2: llama.cpp by type of cache, and attention in a pool.

llama.cpp is a program in an environment of its own. Both read the same text and are given the same
tokens; what a step takes is measured behind several lengths of it, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention

from cxlkv.arrays import Array
from cxlkv.bench import sources
from cxlkv.bench.lab.texts import beginnings
from cxlkv.bench.peers.running import ENVIRONMENTS, Ring, SideBySide
from cxlkv.bench.peers.talking import ContenderError, Program, checked, program_of
from cxlkv.bench.pools import pool_in_file
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.sources import Taken
from cxlkv.demo import smollm2
from cxlkv.demo.text.inputs import read_model
from cxlkv.errors import UnsupportedError
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch

PEER = "llama"
TYPES = ("f16", "q8_0", "q4_0")
"""Types of the peer's cache: bench/peers/llama.py."""
OURS: dict[str, str | None] = {"full": None, "5_exact": "exact", "5_two_stage": "two_stage"}
"""Methods; None attends to all pages."""
SHARE = 0.05
ROW = np.array([0, 1], np.int32)
"""One sequence, one token."""
TOLERANCE = 2**-7
"""Largest difference of attention to all pages from torch's in float32: outputs are bf16."""


@dataclass(frozen=True)
class Size:
    """behind: tokens before the first step. A sample is the median of a round's steps."""

    behind: tuple[int, ...] = (500, 3500, 7000)
    steps: int = 16
    rounds: int = 7
    threads: int = 2
    settle_s: float = 0.1
    limit_s: float = 600.0


QUICK = Size(behind=(100, 300), steps=6, rounds=2)
Figures = Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1)]


class Stepped(BaseModel):
    """What the peer says of its steps."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    seconds: Figures
    losses: Figures


class Pool:
    """Attention of a model's layers in a pool, behind texts of several lengths."""

    def __init__(self, pool: CXLPool, taken: Sequence[Taken], size: Size):
        self.size, self.budget = size, Budget(share=SHARE)
        self.taken = [
            replace(one, keys=one.keys.contiguous(), values=one.values.contiguous())
            for one in taken
        ]
        self.batches = {behind: self._read(pool, behind) for behind in size.behind}

    def _read(self, pool: CXLPool, behind: int) -> Batch:
        sequence = pool.sequence()
        for layer, one in enumerate(self.taken):
            sequence.append(layer, one.keys[:behind], one.values[:behind])
        return pool.batch([sequence])

    def steps(self, form: str, behind: int) -> list[float]:
        """Seconds of each: in every layer a token is appended and attends."""
        seconds = []
        for at in range(self.size.steps):
            began = time.perf_counter()
            for layer in range(len(self.taken)):
                self._decode(form, behind, at, layer)
            seconds.append(time.perf_counter() - began)
        self.batches[behind].sequences[0].truncate(behind)
        return seconds

    def _decode(self, form: str, behind: int, at: int, layer: int) -> Array:
        method, one, token = OURS[form], self.taken[layer], slice(behind + at, behind + at + 1)
        new = (one.queries[at : at + 1], one.keys[token], one.values[token])
        budget = self.budget if method else None
        return self.batches[behind].decode(layer, *new, ROW, budget, method or "auto").out

    def is_right(self, behind: int) -> bool:
        """Whether attention to all pages is torch's, in every layer of a step."""
        errors = []
        for layer, one in enumerate(self.taken):
            found = torch.as_tensor(self._decode("full", behind, 0, layer))
            keys, values = (
                rows[: behind + 1].float().transpose(0, 1)[None] for rows in (one.keys, one.values)
            )
            query = one.queries[0].float()[None, :, None]
            right = scaled_dot_product_attention(query, keys, values, enable_gqa=True)[0, :, 0]
            errors.append(float((found[0].float() - right).abs().max() / values.abs().max()))
        self.batches[behind].sequences[0].truncate(behind)
        return max(errors) <= TOLERANCE


class Peer:
    """llama.cpp, while it answers."""

    def __init__(self, result: SideBySide, size: Size, ids: Sequence[int], model: Path):
        self.result, self.size, self.ring = result, size, Ring(result)
        self.asked: dict[str, object] = {"op": "open", "model": str(model), "ids": list(ids)}
        self.asked |= {"behind": list(size.behind), "steps": size.steps, "threads": size.threads}
        self.losses: dict[tuple[str, int], float] = {}

    def open(self, program: Program, log: Path) -> None:
        self.ring.join(program, log, self.size.limit_s)
        with self.ring.dropping(PEER):
            if PEER in self.ring.talks:
                weights = self.ring.talks[PEER].ask(self.asked).get("weights")
                self.result.notes.append(f"llama: weights: {weights}")

    def steps(self, form: str, behind: int) -> list[float]:
        """Empty when it is out of the run."""
        with self.ring.dropping(PEER):
            if PEER in self.ring.talks:
                request = {"op": "steps", "form": form, "behind": behind}
                found = checked(Stepped, self.ring.talks[PEER].ask(request))
                self.losses[form, behind] = float(np.mean(found.losses))
                return found.seconds
        return []


def run(
    result: SideBySide,
    program: Program | None,
    size: Size,
    taken: Sequence[Taken],
    ids: Sequence[int],
    model: Path,
    place: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Metrics WHO_FORM_ms_behind_TOKENS and WHO_FORM_ms_per_1000, which is the slope of a line
    through them, round by round; ratios of the peer's slopes to ours where both rise.

    taken: every layer of the model, with keys, values and `size.steps` queries behind `ids`; model:
    the GGUF file. The log goes to `place`. program: None where there is no peer.
    """
    layout = layout_of(taken)
    tokens = sum(size.behind) + len(size.behind) * (size.steps + layout.page_tokens)
    peer = Peer(result, size, ids, model)
    with pool_in_file(
        layout, int(1.2 * layout.token_bytes * tokens) + (64 << 20), threads=size.threads
    ) as (pool, _):
        ours = Pool(pool, taken, size)
        try:
            if program is not None:
                progress("llama.cpp reads the text")
                peer.open(program, place / f"{PEER}.log")
            ways = [("pool", form, ours.steps) for form in OURS]
            ways += [(PEER, form, peer.steps) for form in TYPES]
            found: dict[tuple[str, str, int], list[float]] = {}
            for turn in range(size.rounds + 1):
                progress(f"steps: round {turn} of {size.rounds}")
                for who, form, steps in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    for behind in size.behind:
                        time.sleep(size.settle_s)  # teams of threads spin for a while
                        seconds = steps(form, behind)
                        if turn and seconds:
                            ms = 1e3 * float(np.median(seconds))
                            found.setdefault((who, form, behind), []).append(ms)
        finally:
            peer.ring.stop()
        for behind in size.behind:
            result.checks[f"pool_is_torch_behind_{behind}"] = ours.is_right(behind)
    if PEER in result.missing:
        found = {key: samples for key, samples in found.items() if key[0] != PEER}
    else:
        measure_losses(result, peer.losses)
    measure_steps(result, found, size)


def layout_of(taken: Sequence[Taken]) -> KVLayout:
    _, kv_heads, head_dim = taken[0].keys.shape
    return KVLayout(layers=len(taken), kv_heads=kv_heads, head_dim=head_dim, page_tokens=16)


def measure_losses(result: SideBySide, losses: Mapping[tuple[str, int], float]) -> None:
    for (form, behind), loss in losses.items():
        result.measure(f"{PEER}_{form}_loss_behind_{behind}", [loss], "nats")


def measure_steps(
    result: SideBySide, found: Mapping[tuple[str, str, int], Sequence[float]], size: Size
) -> None:
    slopes = {}
    for (who, form, behind), samples in found.items():
        result.measure(f"{who}_{form}_ms_behind_{behind}", samples, "ms")
    for who, form in dict.fromkeys((who, form) for who, form, _ in found):
        rounds = zip(*(found[who, form, behind] for behind in size.behind), strict=True)
        slopes[who, form] = result.measure(
            f"{who}_{form}_ms_per_1000",
            [1000 * float(np.polyfit(size.behind, one, 1)[0]) for one in rounds],
            "ms/1000 tokens",
        ).median
    for (who, form), slope in slopes.items():
        for (other, cache), peers in slopes.items():
            if who != PEER and other == PEER and min(slope, peers) > 0:
                result.ratios[f"per_1000_{who}_{form}_to_{other}_{cache}"] = peers / slope


def command(
    options: Options, say: Say, environments: Path = ENVIRONMENTS, size: Size | None = None
) -> Shown:
    """Runs without llama.cpp, too, and says what it needs. Raises UnsupportedError where the model
    is not installed."""
    result, size = SideBySide("llama"), size or (QUICK if options.quick else Size())
    say("preparing the model")
    folder, file = smollm2.prepare(Console(quiet=True)), smollm2.model_file()
    if file is None:
        raise UnsupportedError(f"the file that llama.cpp reads is not installed: {smollm2.INSTALL}")
    smollm2.verify(file, lambda count: None)
    (ids,) = beginnings(folder, max(size.behind) + size.steps, 1)
    say("the model reads the text")
    taken = sources.take(smollm2.NAME, read_model(folder), torch.tensor(ids), size.steps)
    try:
        program = program_of(PEER, environments)
    except ContenderError as error:
        program, result.missing[PEER] = None, str(error)
    with TemporaryDirectory() as made:
        run(result, program, size, taken, ids, file, Path(made), say)
    result.notes.append(
        f"pool: {len(taken)} layers, a token appended and attended to, without the model's "
        f"matrices; {PEER}: whole steps; {size.threads} threads, one sequence"
    )
    return Shown(result, lines=result.who())
