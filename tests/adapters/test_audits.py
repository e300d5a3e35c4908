"""Audits of hits: of every n-th one a block is computed again and compared. A planted page that is
whole, and wrong, withdraws its namespace, for all engines of the pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cxlkv import CXLPool, KVLayout
from cxlkv.adapters.common.audits import NOISE, ROUNDING, Audits, difference, is_withdrawn, withdraw
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.transformers import CXLRequests, layout_of
from cxlkv.adapters.vllm.engine_attention import EngineAttention
from cxlkv.errors import CorruptError
from cxlkv.layout import ENCODINGS
from cxlkv.prefix import prefix_keys
from cxlkv.tiers import Tiers

from ..support import paged_engine
from ..support.paged_engine import SPACE, text
from ..support.paged_engines import Engines, engines_in
from ..support.small_models import pool_for, prompts
from ..support.waiting import until
from .test_transformers_requests import PAGE, generate, llama, stock, windowed


def test_every_nth_hit() -> None:
    assert [Audits(3).is_due() for _ in range(2)] == [False, False]
    audits = Audits(3)
    assert [audits.is_due() for _ in range(7)] == [False, False, True] * 2 + [False]
    assert not any(Audits(0).is_due() for _ in range(5))


# ---- what is compared ----


def filled(pool: CXLPool, rows: torch.Tensor) -> PoolRequests:
    requests = PoolRequests(pool)
    requests.load("own", None, 0)
    for layer in range(pool.layout.layers):
        requests.sequence("own").append(layer, rows, rows.flip(0))
    return requests


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", sorted(NOISE))
def test_noise_is_no_difference(encoding: str, dtype: str) -> None:
    """Two thirds of what counts as noise pass, twice of it does not; of codes, their roundings
    come on top. One token may be off as it likes, for an expert that it took in one of both."""
    of = getattr(torch, dtype)
    layout = KVLayout(layers=2, kv_heads=2, head_dim=64, page_tokens=16, dtype=dtype)
    torch.manual_seed(1)
    rows = torch.randn(32, 2, 64)
    keys = prefix_keys(np.arange(32), 16)
    with CXLPool.create(
        "anonymous:", layout=layout.encoded(encoding), capacity="8MiB", threads=1
    ) as pool:
        requests = filled(pool, rows.to(of))
        requests.store("own", keys)
        for share, is_same in ((0.66, True), (2.0, False)):
            off = torch.randn(32, 2, 64) * NOISE[dtype] * share
            off += torch.randn(32, 2, 64) * ROUNDING[encoding] * (share if share > 1 else 0)
            off[20] = 5.0
            other = filled(pool, (rows + off).to(of))
            assert other.audit(keys, other.sequence("own"), 1) == is_same, share
            assert other.failures()["audit"] == (not is_same)
            other.release("own")
        with requests.match(keys) as hit:
            assert hit.tokens == 16, "what was wrong is found no more"
        requests.release("own")


def test_what_is_gone_is_not_audited() -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, page_tokens=16, dtype="float32")
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool:
        requests = filled(pool, torch.randn(32, 2, 8))
        assert requests.audit(prefix_keys(np.arange(32), 16), requests.sequence("own"), 1)
        assert not requests.failures()
        assert difference(pool, requests.sequence("own"), requests.sequence("own"), 0, 0, 2) == ""
        assert "keys of layer 0" in difference(
            pool, requests.sequence("own"), requests.sequence("own"), 0, 1, 1
        )
        requests.release("own")


def test_numbers_that_are_none() -> None:
    """Keys of half precision may overflow where both compute alike."""
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, page_tokens=16, dtype="float16")
    rows = torch.randn(32, 2, 8)
    keys = prefix_keys(np.arange(32), 16)
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool:
        rows[:, 0, 0], rows[::2, 1, 0] = torch.inf, torch.nan
        requests = filled(pool, rows.half())
        requests.store("own", keys)
        assert requests.audit(keys, requests.sequence("own"), 1)
        other = filled(pool, rows.nan_to_num(0, 0, 0).half())
        assert not other.audit(keys, other.sequence("own"), 1)
        for one in (requests, other):
            one.release("own")


# ---- a namespace that is withdrawn ----


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("encoding", ["none", "int8,int4"])
def test_a_withdrawn_namespace(tmp_path: Path, windows: bool, encoding: str) -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=16, dtype="bfloat16")
    if windows:
        layout = layout_of(windowed(), 16)
    path = tmp_path / "pool"
    with CXLPool.create(path, layout=layout.encoded(encoding), capacity="8MiB") as pool:
        assert not is_withdrawn(pool, SPACE)
        taken = pool.pages.alloc(pool.stats()["pages_free"])
        with pytest.raises(Exception, match="full"):
            withdraw(pool, SPACE)
        pool.pages.free(taken)
        withdraw(pool, SPACE)
        withdraw(pool, SPACE)
        assert is_withdrawn(pool, SPACE)
        assert not is_withdrawn(pool, SPACE[::-1])
        assert pool.stats()["sequences"] == 0
    with CXLPool.open(path) as pool:
        assert is_withdrawn(pool, SPACE)


def test_a_cold_file_that_outlives_the_pool_keeps_the_mark(tmp_path: Path) -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=16, dtype="bfloat16")
    cold = {"cold": tmp_path / "cold", "cold_capacity": "4MiB"}
    for there in (False, True):
        with (
            CXLPool.create(tmp_path / f"{there}", layout=layout, capacity="8MiB") as pool,
            Tiers(pool, **cold) as tiers,  # type: ignore[arg-type]
        ):
            assert is_withdrawn(pool, SPACE, tiers.cold) == there
            assert not is_withdrawn(pool, SPACE)
            withdraw(pool, SPACE, tiers.cold)


# ---- transformers ----


def plant(pool: CXLPool, requests: CXLRequests, ids: torch.Tensor) -> None:
    """Pages of another model under this one's keys."""
    wrong = CXLRequests(pool, llama(8), weights=0)
    wrong.load("wrong", None, 0)
    with torch.no_grad():
        llama(8)(ids, past_key_values=wrong.cache(["wrong"]))
    keys = requests.keys(ids[0].tolist())
    pool.publish(wrong.sequence("wrong"), keys, PAGE)
    wrong.release("wrong")


def test_transformers_find_a_planted_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, (ids, _) = llama(), prompts((40,))
    other = ids.flip(1)[:, :33]
    path = tmp_path / "pool"
    with CXLPool.create(path, layout=layout_of(model, PAGE), capacity="8MiB") as pool:
        auditing, beside = CXLRequests(pool, model, audit_hits=2), CXLRequests(pool, model)
        with auditing.begin(other) as cache:
            generate(model, other, None, cache)
        for begins in (32, 24, 32, 24):
            with auditing.begin(other) as cache:
                assert cache.get_seq_length() == begins
                assert torch.equal(generate(model, other, None, cache), stock(model, other))
        assert auditing.audited_hits == 2
        assert not auditing.failures()
        plant(pool, auditing, ids)
        with beside.begin(ids) as cache:
            assert cache.get_seq_length() == 32
            assert not torch.equal(generate(model, ids, None, cache), stock(model, ids))
        auditing._audits = Audits(1)

        def generate_audited() -> None:
            with auditing.begin(ids) as cache:
                assert cache.get_seq_length() == 24
                generate(model, ids, None, cache)

        with (
            caplog.at_level(logging.WARNING, "cxlkv"),
            pytest.raises(CorruptError, match="do it again"),
        ):
            generate_audited()
        assert auditing.failures()["audit"] == 1
        assert "not made as its key says" in caplog.text
        for requests in (auditing, beside, CXLRequests(pool, model)):
            for text_ids in (ids, other):
                with requests.begin(text_ids) as cache:
                    assert cache.get_seq_length() == 0
                    found = generate(model, text_ids, None, cache)
                    assert torch.equal(found, stock(model, text_ids))
    with CXLPool.open(path) as pool:
        for salt, begins in ((b"", 0), (b"new", 0), (b"new", 32)):
            with CXLRequests(pool, model, salt=salt).begin(ids) as cache:
                assert cache.get_seq_length() == begins
                assert torch.equal(generate(model, ids, None, cache), stock(model, ids))


@pytest.mark.parametrize("model", [llama(), windowed()], ids=["llama", "windows"])
def test_a_padded_batch_is_audited(model: PreTrainedModel) -> None:
    ids, mask = prompts((40, 24))
    with pool_for(model, PAGE) as pool:
        requests = CXLRequests(pool, model, audit_hits=1)
        for begins in (0, 24, 24):
            with requests.begin(ids, mask) as cache:
                assert cache.get_seq_length() == begins
                assert torch.equal(generate(model, ids, mask, cache), stock(model, ids, mask))
        assert requests.audited_hits == 4
        assert not requests.failures()


# ---- vLLM's engine form; the pool's is in test_vllm_pool_attention.py ----


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with engines_in(tmp_path) as made:
        yield made


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_audits(engines: Engines, ranks: int, load: str) -> None:
    engine = engines(ranks, load=load, audit_hits=2)
    assert engine.run_to_end("first", text(1, 33)) == 0
    found = [engine.run_to_end(f"{n}", text(1, 33)) for n in range(4)]
    assert found == [32, 28, 32, 28]
    assert not engine.scheduling.failures


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_finds_a_planted_page(engines: Engines, ranks: int, load: str, chunk: int) -> None:
    """All that running requests have from the pool is computed again; no engine finds anything of
    the namespace any more, nor does one that starts later."""
    planting = engines(ranks)
    planting.weights = b"that are not in the key"
    for seed in (1, 2):
        planting.run_to_end(f"{seed}", text(seed, 33))
    beside = engines(ranks)
    engine = engines(ranks, load=load, audit_hits=2)
    engine.shares = True  # is wrong until the audit
    engine.serve("first", text(1, 33))
    engine.settle()
    assert engine.wrong(), "the pages are planted"
    engine.add("audited", text(2, 33))

    def have_audited() -> bool:
        engine.step(chunk=chunk, samples=False)
        return engine.scheduling.failures["audit"] == ranks

    until(have_audited)
    for _ in range(60):
        engine.step(chunk=chunk)
    assert engine.cached == {"first": 32, "audited": 28}
    assert not engine.wrong()
    for name in ("first", "audited"):
        engine.end(name)
    engine.step()
    for other in (engine, beside, engines(ranks)):
        for seed in (1, 2, 3):
            assert other.run_to_end(f"again {seed}", text(seed, 33)) == 0
    assert engine.run_to_end("own", text(3, 33)) == 32, "what it has stored itself since"
    assert engines(ranks).run_to_end("new", text(3, 33)) == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_vllm_sends_nothing_back_where_steps_overlap(
    engines: Engines, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not take back the step that it has scheduled meanwhile."""
    planting = engines()
    planting.weights = b"that are not in the key"
    planting.run_to_end("1", text(1, 33))
    monkeypatch.setattr(
        paged_engine, "EngineAttention", partial(EngineAttention, overlaps=overlaps)
    )
    engine = engines(load="async", audit_hits=1)
    engine.shares = True  # is wrong, and stays so where it is not sent back
    engine.add("audited", text(1, 33))

    def has_audited() -> bool:
        engine.step()
        return engine.scheduling.failures["audit"] == 1

    until(has_audited)
    for _ in range(3):
        engine.step()
    assert engine.recomputed == (0 if overlaps else 1)
    assert bool(engine.wrong()) == overlaps
    engine.end("audited")
    engine.step()
    assert engine.run_to_end("again", text(1, 33)) == 0
