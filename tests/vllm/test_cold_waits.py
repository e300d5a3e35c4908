"""vLLM with a cold file below a pool of less than two prompts: whose prefix comes back from there
waits for it, and for no deadline; whom the pool has no room for, for requests that run alone.
CXLKV_STARTS: of engines, for each form."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from .conftest import MakeEngine
from .engines import BLOCK_TOKENS, VOCABULARY_SIZE, Engine
from .test_prefixes import check, folder_in

STARTS = int(os.environ.get("CXLKV_STARTS", "1"))
COUNT, TOKENS = 20, 660
CACHED = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
DEADLINE_S = 5.0


def texts(count: int, tokens: int, seed: int = 7) -> list[list[int]]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(0, VOCABULARY_SIZE, tokens).tolist() for _ in range(count)]


def settings_in(tmp_path: Path, attention: str, load: str = "sync") -> dict[str, object]:
    _, extra = folder_in(tmp_path)
    cold = {"cold": f"{tmp_path}/cold/", "cold_capacity": "256MiB", "deadline_s": DEADLINE_S}
    return {**extra, **cold, "capacity": "4MiB", "attention": attention, "load": load}


class Served:
    """One prompt after the other: tokens, how many were there, and the seconds of each."""

    def __init__(self, engine: Engine):
        self.tokens: list[list[int]] = []
        self.cached: list[int] = []
        self.seconds: list[float] = []
        for prompt in texts(COUNT, TOKENS):
            began_s = time.monotonic()
            found = engine.generate([prompt], max_tokens=6)
            self.seconds.append(time.monotonic() - began_s)
            self.tokens += found["tokens"]
            self.cached += found["cached"]


@pytest.mark.parametrize(
    ("attention", "load", "processes"),
    [
        *(("pool", "sync", False), ("pool", "sync", True)),
        *(("engine", "sync", False), ("engine", "async", False)),
    ],
)
def test_hits_wait_for_no_deadline(
    make_engine: MakeEngine,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    attention: str,
    load: str,
    processes: bool,
) -> None:
    """All are hits, at most twice as slow as what computes them."""
    stock = make_engine()
    assert stock.ready() is None
    wanted = Served(stock).tokens
    stock.end()
    for start in range(STARTS):
        here = tmp_path / f"start{start}"
        here.mkdir()
        # One core for all threads of the process: as vLLM binds them where it finds no more.
        engine = make_engine(
            settings_in(here, attention, load),
            processes=processes,
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0"},
        )
        assert engine.ready() is None
        computed = Served(engine)
        engine.forget()
        hits = Served(engine)
        slowest = f"{max(computed.seconds):.3f} s computed, {max(hits.seconds):.3f} s as a hit"
        record_property("show", f"cold file, {attention}, {load}, {processes=}: slowest {slowest}")
        assert (computed.tokens, computed.cached) == (wanted, [0] * COUNT)
        assert (hits.tokens, hits.cached) == (wanted, [CACHED] * COUNT)
        assert max(hits.seconds) < DEADLINE_S / 4, slowest
        assert statistics.median(hits.seconds) < 2 * statistics.median(computed.seconds)
        engine.end()
        assert check(here / "pools")["pages_held"] == 0


def test_what_is_held_for_later_ones_keeps_nobody_waiting(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """One that does not fit beside the first; the prefix of one behind it has come meanwhile, and
    is held. Then one that needs what ttl_s keeps."""
    engine = make_engine(settings_in(tmp_path, "pool"))
    assert engine.ready() is None
    (first, large), (behind,) = texts(2, 660), texts(1, 590, seed=8)
    for prompt in (behind, *texts(2, 660, seed=9)):
        engine.generate([prompt], max_tokens=2)
    began_s = time.monotonic()
    found = engine.generate([first[:500], large, behind], max_tokens=40)
    assert found["cached"] == [0, 0, 576]
    engine.generate(texts(1, 570), 2, extra_args={"kv_transfer_params": {"cxlkv": {"ttl_s": 600}}})
    engine.generate(texts(1, 1000, seed=10), max_tokens=2)
    assert time.monotonic() - began_s < 20, "of the leases of hits, 60, or of ttl_s"
    engine.end()
    assert check(tmp_path / "pools")["pages_held"] == 0
