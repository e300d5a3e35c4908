"""attention="gpu" for models with states, on host tensors: attention layers go by a Decoder, states
stay in transformers' own layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cxlkv import Budget, CXLPool
from cxlkv.adapters.common.gpu_writes import GpuWrites
from cxlkv.adapters.common.steps import Step
from cxlkv.adapters.transformers import CXLCache, CXLRequests, Hints, hand_over, take_over
from cxlkv.adapters.transformers.cache import FarLayer
from cxlkv.adapters.transformers.gpu_steps import GpuSteps
from cxlkv.errors import BadArgumentError, PoolFullError, UnsupportedError
from cxlkv.kernels import runtime

from ..support.hybrid_models import MODELS, WHOLE_TEXTS, dynamic, make
from ..support.lengths import matrix
from ..support.small_models import generate, pool_for, prompts, run
from .test_transformers_gpu import PLACES, by_gpu
from .test_transformers_gpu import references as references  # a fixture
from .test_transformers_hybrid import Found, answer, placed, texts, turn


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return make("qwen3.5")


@pytest.fixture
def pool(qwen: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(qwen) as made:
        yield made


@pytest.mark.usefixtures("references")
@matrix(name=MODELS, place=PLACES, mode=["greedy", "beams"])
def test_all_pages_give_the_tokens_of_dynamic_cache(name: str, place: str, mode: str) -> None:
    """Of a padded batch, and of a turn that goes on in a chunk."""
    model, more = make(name), {"num_beams": 3} if mode == "beams" else {}
    ids, mask = prompts((23, 9, 16))
    with pool_for(model) as pool:
        for budget in (None, Budget(share=1.0)):
            cache = by_gpu(pool, model, budget, place)
            found = generate(model, ids, mask, cache, **more)
            assert torch.equal(found, generate(model, ids, mask, dynamic(model), **more))
            assert cache.counters.by_layer is not None
            cache.release()
        if name not in WHOLE_TEXTS:
            one = texts()[0]
            out = answer(model, one, None, cache)
            longer = turn(one, out)
            whole = answer(model, longer, None, dynamic(model))
            assert torch.equal(answer(model, longer, None, cache), whole)
            cache.release()


def test_by_triton(qwen: PreTrainedModel, pool: CXLPool) -> None:
    """In its interpreter here."""
    pytest.importorskip("triton")
    assert runtime.INTERPRETED
    ids = texts()[2]
    cache = CXLCache(pool, qwen, attention="gpu", index="device", method="sketch")
    found, right = (
        answer(qwen, ids, None, one, max_new_tokens=3) for one in (cache, dynamic(qwen))
    )
    assert torch.equal(found, right)
    cache.release()


@pytest.mark.usefixtures("references")
def test_forks_crops_requests_and_hand_overs(
    qwen: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = texts()[0]
    wanted = answer(qwen, ids, None, dynamic(qwen))
    cache = by_gpu(pool, qwen, None, "sketch")
    placed(qwen, ids[:, :-1], cache)
    cache.checkpoint()
    kept = cache.states(0)
    fork = cache.fork()
    there = take_over(hand_over(cache, qwen), pool, qwen, attention="gpu")
    for one in (cache, fork, there):
        assert torch.equal(answer(qwen, ids, None, one), wanted)
    cache.crop(29)
    assert np.array_equal(cache.states(0), kept)
    assert torch.equal(answer(qwen, ids, None, cache), wanted)
    for one in (cache, fork, there):
        one.release()
    requests = CXLRequests(pool, qwen)
    found = Found(requests, monkeypatch)
    for _ in range(2):
        with requests.begin(ids, attention="gpu") as own:
            assert torch.equal(generate(qwen, ids, None, own, max_new_tokens=8), wanted)
            requests.keep(own, wanted)
    assert found.tokens == [0, 29]
    assert not requests.failures()


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("attention", ["pool", "gpu"])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1"])
def test_a_pass_that_failed_is_not_built_upon(
    name: str, tokens: int, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step, and a pass whose pages the device writes, which fails at its very end: in Falcon-H1
    the last layer attends."""
    model, ids = make(name), texts()[0]

    count = CXLCache._count_appended

    def fails(*_: object, **__: object) -> None:
        raise PoolFullError("a test")

    def counted(cache: CXLCache, layer: FarLayer, step: Step) -> None:
        (fails if layer is cache._far_layers[-1] else count)(cache, layer, step)

    with pool_for(model) as pool:
        cache = CXLCache(pool, model, attention=attention)
        placed(model, ids[:, :12], cache)
        cache.checkpoint()
        with monkeypatch.context() as broken:
            if attention == "pool":
                broken.setattr(CXLCache, "_count_appended", counted)
            else:
                broken.setattr(GpuSteps, "_end", fails)
                broken.setattr(GpuWrites, "finish", fails)
            with pytest.raises(PoolFullError):
                placed(model, ids[:, 12 : 12 + tokens], cache)
        for _ in range(2):
            with pytest.raises(BadArgumentError, match="a pass failed on its way"):
                placed(model, ids[:, 12:13], cache)
        with pytest.raises(BadArgumentError, match="a pass failed on its way"):
            cache.states(0)
        cache.crop(12)
        whole = run(model, ids, dynamic(model))
        found = placed(model, ids[:, 12:], cache)
        torch.testing.assert_close(found, whole[:, 12:], rtol=1e-4, atol=1e-4)
        cache.release()


def test_what_is_refused(qwen: PreTrainedModel, pool: CXLPool) -> None:
    cache = CXLCache(pool, qwen, attention="gpu")
    with pytest.raises(UnsupportedError, match="has layers with states"):
        cache.compile(qwen)
    with Hints(qwen, cache) as hints:
        assert hints.why
