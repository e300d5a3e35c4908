"""What users write for vLLM, where its pools lie, what is refused by name; without the engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.adapters.common.pools import share_bytes
from cxlkv.adapters.vllm import pools
from cxlkv.adapters.vllm.messages import Options
from cxlkv.adapters.vllm.plugin import register
from cxlkv.adapters.vllm.settings import (
    Settings,
    attends_in_pool,
    check_enclosing,
    check_loads,
    read_options,
    read_settings,
)
from cxlkv.errors import (
    BadArgumentError,
    GeometryError,
    MemoryShortError,
    PoolMissingError,
    UnsupportedError,
)

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
WORDS: dict[str, object] = {"model": "tiny", "dtype": "float32"}


def test_the_form_of_attention_is_read_from_a_file_as_well(tmp_path: Path) -> None:
    """The backend and the connector ask for it before the settings are checked as a whole."""
    file = tmp_path / "cxlkv.yaml"
    file.write_text("attention: pool\nload: async\n")
    named: dict[str, object] = {"config": str(file)}
    alone: list[dict[str, object]] = [{"attention": form} for form in ("pool", "engine")]
    given = [named, {**named, "attention": "engine"}, {}, *alone]
    for words in given:
        assert attends_in_pool(words) == (read_settings(words).attention == "pool")
    assert [attends_in_pool(words) for words in given] == [True, False, False, True, False]


def test_settings_as_they_are_written() -> None:
    found = read_settings(
        {
            "attention": "pool",
            "where": "/dev/shm/",
            "capacity": "8GiB",
            "salt": "tenant",
            "budget": {"share": 0.1, "sinks": 2},
            "method": "attention",
            "audit": 0.01,
            "load": "async",
            "deadline_s": 2,
            "load_failure": "fail",
        }
    )
    assert found.budget == Budget(share=0.1, sinks=2)
    assert (found.attention, found.load, found.deadline_s) == ("pool", "async", 2.0)
    assert found.load_failure == "fail"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention": "poool"}, "attention is 'poool': one of engine, pool"),
        ({"load": 3}, "load is 3: one of sync, async"),
        ({"sharing": "softwar"}, "sharing is 'softwar': one of host, hw_coherent, software"),
        ({"sharing": "software", "hosts": 65}, "hosts is 65: a whole number from 1 to 64"),
        ({"sharing": "software", "host": "me"}, "host is 'me': a whole number .*, or \"auto\""),
        ({"sharing": "software", "lease_s": 0}, "lease_s is 0: a number from 0.01"),
        ({"host": 1}, "host is for a pool that hosts share: add sharing, software"),
        ({"hosts": 2}, "hosts is for a pool that hosts share: add sharing, software"),
        ({"load_failure": "ignore"}, "load_failure is 'ignore': one of recompute, fail"),
        ({"deadline_s": 0}, "deadline_s is 0: a number above 0"),
        ({"audit": 2}, "audit: 2 is not a share of the selects, or 0 for none"),
        ({"local": "1GiB"}, "local needs attention: pool"),
        ({"shards": 0}, "shards is 0: a whole number, 1 or more"),
        ({"attention": "pool", "shards": 2}, "shards needs attention: engine"),
        ({"worker": True}, "worker needs attention: pool"),
        ({"attention": "pool", "worker": 1}, "worker is 1: true or false is wanted"),
        ({"attention": "pool", "local": "much"}, "'much' is not a size"),
        ({"method": "best"}, "method 'best': use one of exact, digest, two_stage, auto, attention"),
        (
            {"attention": "pool", "budget": {"mass": 0.9}, "method": "digest"},
            "method is 'digest': a budget of mass needs one of auto, exact, attention",
        ),
        ({"budget": {"share": 0.1}}, "budget needs attention: pool"),
        ({"attention": "pool", "budget": 64}, r'in settings {"pages": 64}'),
        ({"attention": "pool", "budget": {"part": 0.1}}, "budget: .* of pages, share, mass"),
        (
            {"attention": "pool", "budget": {"share": 2}},
            "budget: 2 is not a share of the pages: write it like 0.05 or 5%",
        ),
        ({"attention": "pool", "budget": {"pages": 1.5}}, "budget: a budget of 1.5 pages: a whole"),
        (
            {"attention": "pool", "budget": {"share": "a"}},
            "budget: 'a' is not a share of the pages",
        ),
        (
            {"attention": "pool", "budget": {"pages": 4, "by_layer": 3}},
            "by_layer=3: a mapping of",
        ),
        (
            {"attention": "pool", "budget": {"pages": 4, "by_layer": {"a": 3}}},
            "by_layer: 'a' is no number of a layer",
        ),
    ],
)
def test_mistakes_in_settings_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadArgumentError, match=said):
        read_settings(given)


def test_a_request_may_ask_for_other_options() -> None:
    settings = Settings(attention="pool", budget=Budget(share=0.5))
    assert read_options(None, settings) == Options(Budget(share=0.5))
    assert read_options({"do_remote_decode": True}, settings) == Options(Budget(share=0.5))
    assert read_options({"cxlkv": {"budget": None}}, settings) == Options(None)
    assert read_options({"cxlkv": {"budget": True}}, settings) == Options(Budget())
    assert read_options({"cxlkv": {"budget": 0.05}}, settings) == Options(Budget(share=0.05))
    layers = {"share": 0.1, "dense_layers": 2, "by_layer": {"5": 0.3}}
    wanted = Budget(share=0.1, dense_layers=2, by_layer={5: 0.3})
    assert read_options({"cxlkv": {"budget": layers}}, settings) == Options(wanted)
    asked = {"cxlkv": {"budget": {"pages": 8}, "save": False}}
    assert read_options(asked, settings) == Options(Budget(pages=8), save=False)
    deep = {"cxlkv": {"tier": "far", "ttl_s": 60}}
    assert read_options(deep, settings) == Options(Budget(share=0.5), tier="far", ttl_s=60)
    assert read_options({"cxlkv": {"priority": 100}}, Settings()) == Options(priority=100)
    for wrong in ({"cxlkv": 1}, {"cxlkv": {"safe": True}}, {"cxlkv": {"save": "no"}}):
        with pytest.raises(BadArgumentError, match="kv_transfer_params"):
            read_options(wrong, settings)
    for priority in (-1, 101, 1.5, True, "3"):
        with pytest.raises(BadArgumentError, match=r"priority is .*: a whole number from 0 to 100"):
            read_options({"cxlkv": {"priority": priority}}, settings)


def test_without_vllm_the_plugin_does_nothing() -> None:
    register()


def test_each_model_and_rank_has_a_path_of_its_own(tmp_path: Path) -> None:
    folder = f"{tmp_path}/"
    ranks = [pools.Ranks(2, 1, rank) for rank in range(2)]
    paths = [pools.pool_path(folder, WORDS, one, *one.own) for one in ranks]
    paths.append(pools.pool_path(folder, {**WORDS, "model": "other"}, ranks[0], 0))
    paths.append(pools.pool_path(folder, WORDS, pools.Ranks(), 0))
    assert len(set(paths)) == 4
    assert pools.pool_path(str(tmp_path), WORDS, ranks[0], 0) == paths[0]
    assert pools.pool_path(f"numa:0:{folder}", WORDS, ranks[0], 0) == f"numa:0:{paths[0]}"
    one = f"{tmp_path}/one.pool"
    assert pools.pool_path(one, WORDS, pools.Ranks(), 0) == one
    assert pools.pool_path(one, WORDS, ranks[1], 1) == f"{one}.1of2"
    with pytest.raises(BadArgumentError, match="memory without a name"):
        pools.pool_path("numa:0", WORDS, ranks[0], 0)


def test_ranks_name_their_shards() -> None:
    ranks = [pools.Ranks(2, 2, rank) for rank in range(4)]
    wanted = [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    assert [[one.shard(number) for number in one.own] for one in ranks] == [[of] for of in wanted]
    ranks = [pools.Ranks(1, 2, rank, split=2) for rank in range(2)]
    assert [one.shard(number) for one in ranks for number in one.own] == wanted


def test_a_pool_is_made_once_and_then_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, ranks = f"{tmp_path}/a.pool", pools.Ranks()
    caplog.set_level("INFO", "cxlkv")
    with pools.make_or_open(path, LAYOUT, "8MiB", ranks, 8) as made:
        assert made.layout == LAYOUT
        assert f"made {path}, for {pools.tokens_of(made)} tokens" in caplog.text
    with pools.make_or_open(path, LAYOUT, "16MiB", ranks, 1 << 30) as found:
        assert found.checksum
    assert f"found {path}" in caplog.text
    assert "its capacity stays" in caplog.text
    assert "one request may have 1073741824" in caplog.text
    other = KVLayout(layers=3, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
    with pytest.raises(GeometryError, match="Give a folder as where"):
        pools.make_or_open(path, other, "8MiB", ranks, 8)


def test_a_pool_without_checksums_is_refused(tmp_path: Path) -> None:
    path = f"{tmp_path}/a.pool"
    CXLPool.create(path, layout=LAYOUT, capacity="8MiB", checksum=False).close()
    with pytest.raises(GeometryError, match="has no checksums"):
        pools.make_or_open(path, LAYOUT, "8MiB", pools.Ranks(), 8)


def test_the_scheduler_names_a_rank_whose_pool_is_not_here(tmp_path: Path) -> None:
    path = f"{tmp_path}/a.pool"
    pools.make_or_open(path, LAYOUT, "8MiB", pools.Ranks(), 8).close()
    with pytest.raises(PoolMissingError, match="ranks on several machines are not served yet"):
        pools.open_all([path, f"{tmp_path}/b.pool"])


def test_capacity_is_a_share_of_what_may_be_used(tmp_path: Path) -> None:
    one = share_bytes(f"{tmp_path}/a.pool")
    half = share_bytes(f"{tmp_path}/a.pool", 2)
    assert 0 < half < one


def test_a_file_system_that_is_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = list(os.statvfs(tmp_path))
    space[4] = (1 << 20) // space[1]  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(space))
    with pytest.raises(MemoryShortError, match=r"a\.pool: .* its file system, is .* too little"):
        share_bytes(f"{tmp_path}/a.pool")


@dataclass
class Spec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 32
    sliding_window: int = 64
    attention_chunk_size: int = 128


def test_groups_that_are_not_served_are_named_with_what_serves_the_model() -> None:
    """The remedies are tried in tests/vllm/test_models.py."""
    pools.check_groups([("FullAttentionSpec", Spec())])
    pools.check_groups([("RequestRowSpec", Spec())], in_pool=True)
    alone = "start vLLM without --kv-transfer-config$"
    full, window, state = "FullAttentionSpec", "SlidingWindowSpec", "MambaSpec"
    chunks = "ChunkedLocalAttentionSpec"
    for kinds in ([window, full], [chunks, full], [window], [full, full], [state, full]):
        pools.check_groups([(kind, Spec()) for kind in kinds])
    for kinds, said in [
        ([state], f"states alone .*{alone}"),
        ([], f"this model has no layer with K and V, .*{alone}"),
        (["CrossAttentionSpec"], rf"layers \(CrossAttentionSpec\) that are not served: {alone}"),
    ]:
        with pytest.raises(UnsupportedError, match=said):
            pools.check_groups([(kind, Spec()) for kind in kinds])
    for kinds, said in [
        ([full], "vLLM has not loaded the plugin"),
        (["MLAAttentionSpec"], "vLLM has not loaded the plugin"),
        ([state], 'the pool has no states .*leave out "attention"'),
        ([chunks], 'in chunks .*leave out "attention"'),
    ]:
        with pytest.raises(UnsupportedError, match=said):
            pools.check_groups([(kind, Spec()) for kind in kinds], in_pool=True)


def test_hashes_that_begin_at_random() -> None:
    assert pools.hash_concern("sha256", {}) is None
    assert pools.hash_concern("xxhash_cbor", {"PYTHONHASHSEED": "0"}) is None
    for environment in ({}, {"PYTHONHASHSEED": ""}):
        found = pools.hash_concern("xxhash", environment)
        assert found is not None
        assert "set PYTHONHASHSEED" in found


def test_inside_another_connector_the_engine_must_be_told_to_compute_what_failed() -> None:
    """We have a copy of its settings there: what we set in it nobody reads."""
    beside = Settings(load="async")
    check_loads(beside, "MultiConnector", "recompute")
    check_loads(Settings(load="async", load_failure="fail"), "MultiConnector", "fail")
    said = 'beside "kv_connector": "MultiConnector" write "kv_load_failure_policy": "recompute"'
    with pytest.raises(BadArgumentError, match=said):
        check_loads(beside, "MultiConnector", "fail")
    with pytest.raises(BadArgumentError, match='inside MultiConnector write "load": "async"'):
        check_loads(Settings(), "MultiConnector", "recompute")
    check_enclosing(Settings(), "MultiConnector")
    with pytest.raises(BadArgumentError, match="inside MultiConnector: the engine has no blocks"):
        check_enclosing(Settings(attention="pool"), "MultiConnector")
