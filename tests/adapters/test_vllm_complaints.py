"""What users of other connectors complain about, and no other test covers: docs/engines/vllm.md."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedConfig

from cxlkv import CXLPool, KVLayout
from cxlkv.adapters.common.keys import space_of
from cxlkv.adapters.common.pools import share_bytes
from cxlkv.adapters.vllm import pools
from cxlkv.adapters.vllm.loading import BlockMemory, Load, Loader, Part
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.emulation.link import emulate
from cxlkv.emulation.profiles import Profile
from cxlkv.errors import BadArgumentError
from cxlkv.machine.topology import MIB, Memory, probe

from ..support.paged_engine import TOKENS, Engine, make_pool, text

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, page_tokens=TOKENS, dtype="float32")
SLOW = Profile(
    what="a slow link", source="made up", standing="assumed", latency_ns=2e7, read_gb_per_s=1
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    found = str(tmp_path / "a.pool")
    make_pool(found, LAYOUT)
    return found


def test_nothing_is_done_before_its_bytes_are_there(path: str) -> None:
    """Layer by layer over a slow link: whoever is told that a layer is there finds it there."""
    made = np.random.default_rng(1).standard_normal((3, 6 * TOKENS, 2, 8)).astype(np.float32)
    with CXLPool.open(path, threads=1) as pool, emulate(pool, SLOW):
        sequence = pool.sequence()
        for layer in range(3):
            sequence.append(layer, made[layer], -made[layer])
        keys = np.full((3, 8, 2, TOKENS, 8), np.nan, np.float32)
        values = np.full_like(keys, np.nan)
        memory = [BlockMemory(keys[layer], values[layer]) for layer in range(3)]
        blocks = [7, 2, 4, 0, 1, 3]
        load = Load(pool, [Part("a", sequence, [blocks], [0], 0, 6 * TOKENS)], deadline_s=60)
        loader = Loader(memory)
        loader.begin(load)
        for layer in range(3):
            load.wait(layer + 1)
            wanted = made[layer].reshape(6, TOKENS, 2, 8).swapaxes(1, 2)
            assert np.array_equal(keys[layer, blocks], wanted)
            assert np.array_equal(values[layer, blocks], -wanted)
        load.wait(4)
        assert load.has_ended
        assert load.parts[0].good == 6 * TOKENS
        loader.close()


def test_a_load_that_fails_for_any_reason_ends_and_the_next_one_goes_on(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = np.zeros((1, 4, 2, TOKENS, 8), np.float32)
    values = np.zeros_like(keys)
    made = np.random.default_rng(1).standard_normal((TOKENS, 2, 8)).astype(np.float32)
    with CXLPool.open(path, threads=1) as pool:
        loads = []
        for block in (1 << 40, 2):  # the first one is no int32
            sequence = pool.sequence()
            for layer in range(3):
                sequence.append(layer, made, made)
            loads.append(
                Load(pool, [Part("a", sequence, [[block]], [0], 0, TOKENS)], deadline_s=60)
            )
        loader = Loader([BlockMemory(keys[0], values[0])] * 3)
        for load in loads:
            loader.begin(load)
        for load in loads:
            load.wait(4)
        loader.close()
        assert [load.parts[0].good for load in loads] == [0, TOKENS]
        assert [load.parts[0].has_failed for load in loads] == [True, False]
        assert pool.stats()["pages_held"] == 0
    assert np.array_equal(keys[0, 2], made.swapaxes(0, 1))
    assert "the engine computes instead" in caplog.text


def test_a_request_that_waits_for_its_hit_goes_on_when_all_of_it_is_there(path: str) -> None:
    first, second = Engine([path]), Engine([path], Settings(load="async", deadline_s=60))
    first.serve("a", text(1, 33))
    with emulate(second.ranks[0].worker.pool, SLOW):
        request = second.serve("a", text(1, 33))
        assert request.is_loading
        while request.is_loading:
            second.step()
        assert second.cached["a"] == 32
        assert second.recomputed == 0
        second.close()
    first.close()


def test_512_requests_at_once(tmp_path: Path) -> None:
    """On a pool with room for some: all go on, and when they have gone nothing stays behind."""
    path = str(tmp_path / "small.pool")
    make_pool(path, LAYOUT, "4MiB")
    engine = Engine([path], blocks=4000)
    for number in range(512):
        engine.add(str(number), text(number, 20))
    engine.step()
    engine.step()
    assert not engine.wrongly_stored
    assert engine.ranks[0].worker.requests.failures()["full"] >= 1
    for number in range(0, 512, 3):
        engine.end(str(number))  # aborted
    engine.step()
    engine.close()
    assert len(engine.free) == 4000
    with CXLPool.open(path, threads=1) as pool:
        stats = pool.stats()
        assert stats["pages_held"] == 0
        assert 0 < stats["pages_published"] <= stats["pages_total"]
        assert pool.admin.check(deep=True)["clean"]


DEFAULT_ROPE: dict[str, object] = {"rope_theta": 1e4, "rope_type": "default"}


def config(folder: str) -> SimpleNamespace:
    """What words_of() reads of vLLM's configuration."""
    text = {"original_max_position_embeddings": 2048}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=folder,
            revision=None,
            seed=0,
            dtype="bfloat16",
            quantization=None,
            hf_overrides={},
            max_model_len=4096,
            hf_text_config=PreTrainedConfig.from_dict(
                {"rope_parameters": {**DEFAULT_ROPE}, **text}
            ),
            disable_sliding_window=False,
            mm_processor_kwargs=None,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )


def spec() -> SimpleNamespace:
    return SimpleNamespace(block_size=32, num_kv_heads=8, head_size=128)


KINDS = [("FullAttentionSpec", spec())]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model_config", "model", "other/model"),
        ("model_config", "revision", "main"),
        ("model_config", "dtype", "float16"),
        ("model_config", "quantization", "awq"),
        ("model_config", "hf_overrides", {"rope_theta": 1}),
        ("model_config", "hf_overrides", lambda config: config),
        ("model_config", "model_weights", "s3://models/m"),
        ("model_config", "disable_sliding_window", True),
        ("model_config", "mm_processor_kwargs", {"num_crops": 4}),
        ("cache_config", "cache_dtype", "fp8"),
        ("cache_config", "prefix_caching_hash_algo", "sha256_cbor"),
        ("parallel_config", "tensor_parallel_size", 2),
        ("parallel_config", "pipeline_parallel_size", 2),
        ("spec", "block_size", 64),
        ("spec", "num_kv_heads", 4),
        ("spec", "head_size", 64),
        ("", "packing", "amx"),
        ("", "salt", "tenant"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_word_of_the_engine_makes_other_keys(
    tmp_path: Path, part: str, name: str, value: object
) -> None:
    """Else another model's K and V would be hit."""

    def space(changed: bool) -> bytes:
        found = config(str(tmp_path))
        found.spec = spec()
        whole = found
        own = {"packing": "vec", "salt": ""}
        if changed and not part:
            own[name] = str(value)
        elif changed:
            for step in part.split("."):
                found = getattr(found, step)
            setattr(found, name, value)
        words = pools.words_of(whole, [("FullAttentionSpec", whole.spec)], own["packing"])
        return space_of(words, own["salt"])

    assert space(False) == space(False) != space(True)


def test_each_group_of_layers_is_in_the_key(tmp_path: Path) -> None:
    def space(*groups: tuple[str, dict[str, int]]) -> bytes:
        kinds = [(kind, SimpleNamespace(**{**vars(spec()), **own})) for kind, own in groups]
        return space_of(pools.words_of(config(str(tmp_path)), kinds, "vec"), "")

    full, window = ("FullAttentionSpec", dict[str, int]()), "SlidingWindowSpec"
    chunks = ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 64})
    found = [
        space(full),
        space((window, {"sliding_window": 64})),
        space(full, (window, {"sliding_window": 64})),
        space(full, (window, {"sliding_window": 128})),
        space(full, (window, {"sliding_window": 64, "block_size": 64})),
        space(full, (window, {"sliding_window": 64, "num_kv_heads": 4})),
        space(full, (window, {"sliding_window": 64, "head_size": 64})),
        space(full, chunks),
        space(full, full),
    ]
    assert len(set(found)) == len(found)
    same = space(full, (window, {"sliding_window": 64}), (window, {"sliding_window": 64}))
    assert same == found[2]  # layers of one kind in two tables are of one kind in the pool


def test_a_drafter_with_layers_is_in_the_key(tmp_path: Path) -> None:
    def words(method: str | None = None, draft: str = "other", **own: object) -> dict[str, object]:
        found = config(str(tmp_path))
        model = SimpleNamespace(model=draft, revision=None, dtype="float32", quantization=None)
        ranks = SimpleNamespace(tensor_parallel_size=own.pop("ranks", 1))
        vars(model).update(own)
        found.speculative_config = method and SimpleNamespace(
            method=method, draft_model_config=model, draft_parallel_config=ranks
        )
        return pools.words_of(found, KINDS, "vec", identity="v1")

    assert words() == words("ngram") == words("suffix")
    found = [
        words(),
        words("mtp"),
        words("draft_model"),
        words("draft_model", "third"),
        words("draft_model", dtype="float16"),
        words("draft_model", revision="main"),
        words("draft_model", quantization="awq"),
        words("draft_model", ranks=2),
    ]
    assert len({space_of(one, "") for one in found}) == len(found)
    assert pools.are_identified(words())
    assert not pools.are_identified(words("draft_model")), "nothing names the drafter's weights"


def test_without_a_name_of_its_weights_an_engine_shares_nothing(tmp_path: Path) -> None:
    found = config(str(tmp_path))
    assert not pools.are_identified(pools.words_of(found, KINDS, "vec"))
    stated = [pools.words_of(found, KINDS, "vec", identity=name) for name in ("v1", "v1", "v2")]
    assert all(pools.are_identified(one) for one in stated)
    assert stated[0] == stated[1] != stated[2]
    found.load_config.load_format = "dummy"
    assert pools.are_identified(pools.words_of(found, KINDS, "vec"))


def test_max_model_len_is_in_the_key_where_a_rope_depends_on_it(tmp_path: Path) -> None:
    """Else an engine of another length finds nothing, and leaves a second pool behind."""

    def words(kind: str, length: int) -> dict[str, object]:
        found = config(str(tmp_path))
        found.model_config.max_model_len = length
        found.model_config.hf_text_config.rope_parameters["rope_type"] = kind
        return pools.words_of(found, KINDS, "vec")

    for kind in ("default", "linear", "llama3", "yarn"):
        assert words(kind, 1024) == words(kind, 4096)
    assert words("longrope", 1024) == words("longrope", 2048) != words("longrope", 2049)
    assert words("longrope", 2049) == words("longrope", 4096)
    assert words("unheard of", 1024) != words("unheard of", 2048)


def test_ranks_share_what_the_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each of them a quarter of the machine."""

    here = probe()

    def seen(memory: Memory, ranks: int) -> list[int]:
        with monkeypatch.context() as patch:
            patch.setattr("cxlkv.adapters.common.pools.probe", lambda: replace(here, memory=memory))
            return [share_bytes(str(tmp_path / "a.pool"), ranks)] * ranks

    free = Memory(1 << 60, 64 * MIB, None, None, None)
    assert seen(free, 1) == [16 * MIB]
    assert seen(free, 4) == [4 * MIB] * 4
    limited = replace(free, cgroup_limit_bytes=48 * MIB, cgroup_usage_bytes=16 * MIB)
    assert seen(limited, 2) == [4 * MIB] * 2  # a quarter of the 32 MiB that it has left
    endless = replace(free, available_bytes=1 << 60)
    space = os.statvfs(tmp_path)
    assert sum(seen(endless, 2)) <= 0.51 * space.f_bavail * space.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=0))
    with pytest.raises(BadArgumentError, match="say the capacity"):
        seen(replace(free, available_bytes=None), 1)
