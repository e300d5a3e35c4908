"""With vLLM: what its own /metrics, LLM.get_metrics() and its log say of hits, bytes and fill."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool
from cxlkv.adapters.common.metrics import QUOTA
from cxlkv.adapters.vllm.counting import STATES
from cxlkv.tiers.cold_file import RecordShape
from cxlkv.tiers.cold_shared import SharedColdTier

from .conftest import MakeEngine
from .engines import BLOCK_TOKENS, LAYERS, VOCABULARY_SIZE, Engine

TOKENS = 10 * BLOCK_TOKENS
TOKEN_BYTES = LAYERS * 2 * 32 * 2 * 4  # kv heads, head_dim, K and V, float32
Metrics = dict[str, float]


def prompt(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(one) for one in rng.integers(0, VOCABULARY_SIZE, TOKENS + 7)]


def metrics(engine: Engine, ready: Callable[[Metrics], bool]) -> Metrics:
    """When they are what is waited for: the pool is looked at once a second while steps are made,
    so the engine is kept busy with a prompt that is shorter than a block."""
    for _ in range(500):
        found = {name: float(str(value)) for name, value in engine.ask(do="metrics").items()}
        if ready(found):
            return found
        engine.generate([[1, 2, 3]], max_tokens=8)
    raise AssertionError(f"the metrics never became right: {found}")


def failures(found: Metrics) -> float:
    return sum(found[name] for name in found if name.startswith("vllm:cxlkv_failures"))


@pytest.mark.parametrize(
    ("processes", "ranks"),
    [(False, 1), (True, 1), (True, 2)],
    ids=["one process", "scheduler and worker", "two ranks"],
)
def test_hits_of_a_second_request_show(
    make_engine: MakeEngine, tmp_path: Path, processes: bool, ranks: int
) -> None:
    """Counters that stay 0 are what users complain about. Ranks share tokens, and add up bytes."""
    engine = make_engine(
        {"where": f"{tmp_path}/", "capacity": "32MiB", "quota": "16MiB"},
        processes=processes,
        tensor_parallel_size=ranks,
        disable_log_stats=False,
    )
    before = metrics(engine, lambda found: "vllm:cxlkv_pool_tokens free" in found)
    assert before["vllm:cxlkv_hit_tokens"] == 0
    assert before["vllm:cxlkv_failures corrupt"] == 0
    engine.generate([prompt(1)], max_tokens=1)
    engine.forget()
    assert engine.generate([prompt(1)], max_tokens=1)["cached"] == [TOKENS]
    engine.forget()  # what reads no prefixes is no miss
    skips = engine.generate([prompt(1)], max_tokens=1, skip_reading_prefix_cache=True)
    assert skips["cached"] == [0]
    moved_bytes = TOKENS * TOKEN_BYTES
    found = metrics(engine, lambda found: found["vllm:cxlkv_fetched_bytes"] >= moved_bytes)
    for name in ("saved", "loaded", "hit"):
        assert found[f"vllm:cxlkv_{name}_tokens"] == TOKENS
    assert found["vllm:external_prefix_cache_hits"] == TOKENS  # as the engine counts
    asked = found["vllm:external_prefix_cache_queries"] - len(prompt(1))  # the skipped one's
    assert found["vllm:cxlkv_asked_tokens"] == asked
    assert found["vllm:cxlkv_appended_bytes"] == found["vllm:cxlkv_fetched_bytes"] == moved_bytes
    (pool,) = list(tmp_path.glob("*.pool"))[-1:]
    with CXLPool.open(pool) as opened:
        page_bytes = opened.records.shape[0]
    for unit, wanted in (("tokens", TOKENS), ("bytes", TOKENS // BLOCK_TOKENS * page_bytes)):
        there = {state: found[f"vllm:cxlkv_pool_{unit} {state}"] for state in (*STATES, *QUOTA)}
        assert there["held"] + there["published"] == there["quota_used"] == wanted
        assert 0.4 < there["quota"] / (there["free"] + wanted) < 0.7
    assert failures(found) == 0
    log = engine.log()
    assert f"cxlkv: made {tmp_path}/cxlkv-vllm-" in log
    assert log.count("cxlkv: made") == 1
    assert f"KV Transfer metrics: cxlkv=hit rate 49 % of {2 * len(prompt(1))} prompt tokens" in log
    assert "tokens held), 0 failures" in log
    engine.end()


def test_audits_of_attention_in_the_pool_show(make_engine: MakeEngine, tmp_path: Path) -> None:
    extra = {"attention": "pool", "budget": {"share": 0.5}, "audit": 1.0, "method": "exact"}
    engine = make_engine(
        {"where": f"{tmp_path}/", "capacity": "32MiB", "local": "4MiB", "worker": True, **extra},
        environment={"CXLKV_EMULATE": "astera-a1000, virtual"},
        disable_log_stats=False,
    )
    for _ in range(2):
        engine.generate([prompt(2)], max_tokens=8)
    selects = 2 * 7 * LAYERS
    found = metrics(engine, lambda found: found["vllm:cxlkv_audited_selects"] >= selects)
    selects = int(found["vllm:cxlkv_audited_selects"])
    assert 0.9 * selects < found["vllm:cxlkv_audited_recall"] <= selects
    assert 0 < found["vllm:cxlkv_audited_mass"] <= selects
    assert found["vllm:cxlkv_scored_bytes"] > 0
    read, written = (found[f"vllm:cxlkv_link_bytes far {way}"] for way in ("read", "written"))
    assert 0 < found["vllm:cxlkv_scored_bytes"] < read
    assert written >= TOKENS * TOKEN_BYTES
    assert found["vllm:cxlkv_worker_calls"] == 0  # there is none
    assert found["vllm:cxlkv_worker_missed"] > 0
    assert found["vllm:cxlkv_local_bytes"] >= 0
    assert found["vllm:cxlkv_pool_bytes local"] <= 4 << 20
    assert found["vllm:cxlkv_hit_tokens"] == TOKENS
    assert found["vllm:cxlkv_loaded_tokens"] == 0  # adopted where it lies, not copied
    assert failures(found) == 0
    said = r"recall [01]\.\d\d, mass [01]\.\d\d \(\d+ audits\), 0 failures"
    assert re.search(said, engine.log())
    engine.end()


@pytest.mark.parametrize("attention", ["engine", "pool"])
def test_what_a_small_pool_moves_shows(
    make_engine: MakeEngine, tmp_path: Path, attention: str
) -> None:
    """To its file and back, by the file's own count, which another process asks for at the end."""
    cold = {"cold": f"{tmp_path}/a.cold", "cold_capacity": "64MiB", "deadline_s": 60}
    extra = {"where": f"{tmp_path}/a.pool", "capacity": "8MiB", "attention": attention, **cold}
    engine = make_engine(extra, disable_log_stats=False)
    texts = [prompt(seed) for seed in range(100, 140)]
    for _ in range(2):
        for first in range(0, len(texts), 4):
            engine.generate(texts[first : first + 4], max_tokens=2)
        engine.forget()
    with CXLPool.open(tmp_path / "a.pool") as pool:
        record_bytes, shape = pool.records.shape[0], RecordShape.of(pool)
    names = {way: f"vllm:cxlkv_link_bytes cold {way}" for way in ("read", "written")}
    with SharedColdTier(tmp_path / "a.cold", shape=shape, capacity="64MiB") as file:

        def is_all(found: Metrics) -> bool:
            stats = file.stats()
            return all(found[names[way]] == stats[f"bytes_{way}"] for way in names)

        found, stats = metrics(engine, is_all), file.stats()
        assert not file.is_owner
    assert min(found[name] for name in names.values()) > 0
    assert found["vllm:cxlkv_demoted_bytes"] >= stats["stored"] * record_bytes
    assert found["vllm:cxlkv_promoted_bytes"] > 0
    assert found["vllm:cxlkv_restored_tokens"] > 0
    assert found["vllm:cxlkv_pool_bytes cold"] == stats["slots_stored"] * stats["slot_bytes"]
    assert failures(found) == 0
    engine.end()
