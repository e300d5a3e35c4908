"""The setting "encoding" of vLLM: the pool keeps in fewer bits what the engine computes in full."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.adapters.common.keys import space_of
from cxlkv.adapters.vllm import pools
from cxlkv.adapters.vllm.messages import Message
from cxlkv.adapters.vllm.settings import Settings, read_settings
from cxlkv.errors import BadArgumentError, GeometryError, UnsupportedError

from ..support.kept import kept
from ..support.paged_engine import TOKENS, Engine, Rank, Request

if TYPE_CHECKING:
    from torch import Tensor

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, page_tokens=TOKENS, dtype="float32")


def test_the_setting_is_read() -> None:
    assert read_settings({}).encoding == "none"
    for written, read in (("int8", "int8"), ("int8, int4", "int8,int4"), ("int4,int4", "int4")):
        assert read_settings({"encoding": written}).encoding == read
    with pytest.raises(BadArgumentError, match="encoding 'fp8': one of none, int8, int4"):
        read_settings({"encoding": "fp8"})


# ---- it is part of what a pool is ----


def words(encoding: str) -> dict[str, object]:
    """An engine as vLLM describes itself."""
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    model = {"model": "tiny", "revision": None, "seed": 0, "dtype": "float32", "quantization": None}
    text = SimpleNamespace(to_dict=dict)
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(**model, hf_text_config=text, max_model_len=128),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
    )
    spec = SimpleNamespace(block_size=4, num_kv_heads=2, head_size=8)
    return pools.words_of(config, [("FullAttentionSpec", spec)], "rows", encoding)


def test_each_encoding_has_a_pool_and_keys_of_its_own(tmp_path: Path) -> None:
    found = [words(encoding) for encoding in ("none", "int8", "int8,int4")]
    paths = {pools.pool_path(f"{tmp_path}/", one, pools.Ranks(), 0) for one in found}
    assert len(paths) == len({space_of(one, "") for one in found}) == 3


def test_a_pool_of_another_encoding_is_refused(tmp_path: Path) -> None:
    path, ranks = f"{tmp_path}/a.pool", pools.Ranks()
    wanted = LAYOUT.encoded("int8,int4")
    with pools.make_or_open(path, wanted, "8MiB", ranks, 8, sketch=None) as made:
        assert (made.layout.encoding, made.sketch) == ("int8,int4", False)
    pools.make_or_open(path, wanted, "8MiB", ranks, 8).close()
    for other in ("none", "int8"):
        with pytest.raises(GeometryError) as told:
            pools.make_or_open(path, LAYOUT.encoded(other), "8MiB", ranks, 8)
        said = str(told.value)
        assert f"keeps keys and values as int8,int4; wanted here: {other}" in said
        assert '"encoding": "int8,int4"' in said


def test_an_engine_in_fp8_has_a_pool_in_fp8() -> None:
    for cache_dtype in ("auto", "bfloat16"):
        for encoding in ("none", "int8,int4", "fp8_e4m3"):
            assert pools.kept_as(cache_dtype, encoding) == encoding
    for cache_dtype in ("fp8", "fp8_e4m3"):
        for encoding in ("none", "fp8_e4m3"):
            assert pools.kept_as(cache_dtype, encoding) == "fp8_e4m3"
        with pytest.raises(BadArgumentError, match=f"int8.* with --kv-cache-dtype {cache_dtype}:"):
            pools.kept_as(cache_dtype, "int8")
    for cache_dtype in ("fp8_e5m2", "nvfp4", "int8_per_token_head"):
        with pytest.raises(UnsupportedError, match=f"{cache_dtype} is not served"):
            pools.kept_as(cache_dtype, "none")


def test_scales_are_refused_where_attention_is_in_the_pool() -> None:
    """The engine's attention hands bytes over, whatever they are to be multiplied by."""

    def layer(kind: str = "fp8", k: float = 1.0, v: float = 1.0) -> SimpleNamespace:
        return SimpleNamespace(kv_cache_dtype=kind, _k_scale_float=k, _v_scale_float=v)

    for in_pool in (False, True):
        pools.check_caches({"a": layer(), "b": layer()}, "fp8", in_pool)
        pools.check_caches({"a": layer("fp8_e4m3")}, "fp8", in_pool)
        pools.check_caches({"a": layer("auto", k=0.5)}, "auto", in_pool)
        with pytest.raises(UnsupportedError, match=r"auto and fp8 \(kv_cache_dtype_skip"):
            pools.check_caches({"a": layer(), "b": layer("auto")}, "fp8", in_pool)
        with pytest.raises(UnsupportedError, match="write --kv-cache-dtype fp8"):
            pools.check_caches({"a": layer()}, "auto", in_pool)
    for scaled in (layer(k=0.5), layer(v=2.0)):
        pools.check_caches({"a": layer(), "b": scaled}, "fp8")
        with pytest.raises(UnsupportedError, match="b has calibrated scales of fp8"):
            pools.check_caches({"a": layer(), "b": scaled}, "fp8", in_pool=True)


# ---- the engine's attention: prefixes ----


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("encoding", ["int8", "int8,int4"])
def test_blocks_come_back_as_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, load: str
) -> None:
    """Those that the engine computed are as it made them; loaded ones are rounded, once."""
    seen = {"as made": 0, "as kept": 0}

    def is_right_in(self: Rank, request: Request, index: int, layer: int, tokens: int = 4) -> bool:
        own = self.memory[layer][request.blocks[0][index]][:, :, :tokens]
        made = request.block(index, layer, self.heads[layer])[:, :, :tokens]
        if np.array_equal(own, made):
            seen["as made"] += 1
            return True
        how = encoding.split(",")
        rounded = np.stack([kept(made[0], how[0]), kept(made[1], how[-1])])
        seen["as kept"] += 1
        return np.allclose(own, rounded, rtol=0, atol=1e-5 * float(made.max()))

    monkeypatch.setattr(Rank, "is_right_in", is_right_in)
    path = str(tmp_path / "a.pool")
    layout = LAYOUT.encoded(encoding)
    CXLPool.create(path, layout=layout, capacity="8MiB", threads=1).close()
    settings = Settings.model_validate({"load": load, "encoding": encoding})
    first, second = Engine([path], settings), Engine([path], settings)
    ids = [int(one) for one in np.random.default_rng(1).integers(0, 97, 30)]
    first.serve("a", ids)
    first.step()
    second.serve("a", ids)
    second.settle()
    second.step()
    assert second.cached["a"] == 28
    assert second.recomputed == 0
    assert min(seen.values()) > 0, seen
    for engine in (first, second):
        engine.close()
    with CXLPool.open(path) as pool:
        assert pool.admin.check(deep=True)["clean"]


# ---- attention in the pool ----


@pytest.mark.parametrize("encoding", ["int8", "int4", "int8,int4", "progressive"])
def test_rows_attend_to_what_is_kept(tmp_path: Path, encoding: str) -> None:
    """Prefill in pieces, decode beside it, requests whose rows others take."""
    torch = pytest.importorskip("torch", reason="vLLM's tensors are torch's")
    from cxlkv.adapters.vllm.pool_attention import PoolAttention, Scores, attend_alone
    from tests.support import pool_attention_texts as texts

    class Kept(texts.Text):
        def wanted(self, layer: int, scores: Scores) -> Tensor:
            how = encoding.split(",")
            k, v = kept(self.k[layer].numpy(), how[0]), kept(self.v[layer].numpy(), how[-1])
            found = (torch.from_numpy(k).float(), torch.from_numpy(v).float())
            return attend_alone(self.q[layer], *found, scores)

    layout = texts.layout().encoded(encoding)
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity=texts.CAPACITY) as pool:
        attention = PoolAttention(pool, texts.NAMES, block_tokens=texts.BLOCK, decode_rows=3)
        one, two, plain = Kept("one", 70), Kept("two", 33), texts.Text("three", 40)
        starts = [text.start(row) for row, text in enumerate((one, two, plain), 1)]
        rows = [(1, one, 0, 40), (2, two, 0, 30), (3, plain, 0, 40)]
        found = texts.run(attention, Message(started=starts), rows, 1e-3)
        assert [texts.is_right(piece) for piece in found] == [True, True, False]
        found = texts.run(attention, Message(), [(2, two, 30, 1), (1, one, 40, 9)], 1e-3)
        assert all(map(texts.is_right, found))
        assert not attention.report().failures
        attention.close()


def test_a_device_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="vLLM's tensors are torch's")
    from cxlkv.adapters.vllm.device_steps import check_device

    gpu, no = torch.device("cuda"), {"shares": False, "drafts": False}
    check_device(torch.device("cpu"), LAYOUT, shares=True, drafts=True)
    check_device(gpu, LAYOUT.encoded("int8"), **no)
    with pytest.raises(UnsupportedError, match="layers that share others' K and V"):
        check_device(gpu, LAYOUT, **{**no, "shares": True})
    with pytest.raises(UnsupportedError, match="speculation by layers"):
        check_device(gpu, LAYOUT, **{**no, "drafts": True})
    with pytest.raises(UnsupportedError, match="meta: cpu and cuda are"):
        check_device(torch.device("meta"), LAYOUT, **no)
