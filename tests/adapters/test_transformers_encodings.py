"""CXLCache over pools that keep keys and values in fewer bits: as a cache that rounds them so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cxlkv import Batch, Budget, CXLPool, Selection
from cxlkv.adapters.common.gpu_chunks import GpuChunks
from cxlkv.adapters.transformers import CXLCache, LayerStep, hand_over, take_over
from cxlkv.errors import UnsupportedError
from cxlkv.kernels import runtime

from ..support.kept import kept
from ..support.small_models import LAYERS, close, generate, pool_for, prompts, run
from .test_transformers_models import all_free, make
from .test_transformers_models import llama as llama  # a fixture

ENCODINGS = ("int8", "int4", "int8,int4", "none,int4", "fp8_e4m3", "progressive")


class Rounded(DynamicCache):
    """Attends to keys and values as an encoded pool keeps them."""

    encoding = "none"

    def update(  # type: ignore[override]
        self, *states: Tensor, **more: object
    ) -> tuple[Tensor, Tensor]:
        keys, values, *rest = states
        how = self.encoding.split(",")
        rounded = (kept(keys.numpy(), how[0]), kept(values.numpy(), how[-1]))
        new = [torch.from_numpy(one).to(keys) for one in rounded]
        return super().update(*new, *rest, **more)  # type: ignore[arg-type]


def reference(encoding: str) -> Rounded:
    cache = Rounded()
    cache.encoding = encoding
    return cache


@contextmanager
def pool_of(model: object, encoding: str) -> Iterator[CXLPool]:
    with pool_for(model, capacity="32MiB", encoding=encoding) as pool:
        assert pool.layout.encoding == encoding
        yield pool
        assert all_free(pool)


def by_steps(model: PreTrainedModel, cache: CXLCache, ends: tuple[int, ...]) -> Tensor:
    """Logits of a padded batch that comes in steps, [real tokens, vocabulary]."""
    ids, mask = prompts((90, 61, 3))
    steps = zip((0, *ends), ends, strict=False)
    found = [run(model, ids[:, a:b], cache, mask[:, :b]) for a, b in steps]
    return torch.cat(found, dim=1)[mask.bool()]


FORMS: list[dict[str, str]] = [
    {"attention": "pool"},
    {"attention": "gpu"},
    {"attention": "gpu", "index": "device", "method": "digest"},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_logits_are_those_of_rounded_keys_and_values(
    llama: PreTrainedModel,
    encoding: str,
    form: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    ids, mask = prompts((90, 61, 3))
    wanted = run(llama, ids, reference(encoding), mask)[mask.bool()]
    plain = run(llama, ids, DynamicCache(), mask)[mask.bool()]
    with pool_of(llama, encoding) as pool:
        if form["attention"] == "gpu" and not set(encoding.split(",")) <= {"none", "int8", "int4"}:
            with pytest.raises(UnsupportedError, match="int8 and int4"):
                CXLCache(pool, llama, **form)  # type: ignore[arg-type]
            return
        cache = CXLCache(pool, llama, Budget(share=1.0), **form)  # type: ignore[arg-type]
        found = by_steps(llama, cache, (41, 58, 59, 84, 85, 86, 87, 88, 89, 90))
        cache.release()
    error, rounding = (found - wanted).abs().max(), (wanted - plain).abs().max()
    print(f"{encoding}: {float(error):.2g} from the rounded ones, these {float(rounding):.2g}")
    assert error < min(0.05, float(rounding) / 4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt-oss", "qwen3-windows"])
def test_logits_do_not_depend_on_the_steps(name: str) -> None:
    """With 4 bits, a first step that attended to its own tensors would be 0.9 to 3.3 apart."""
    model = make(name)
    with pool_of(model, "int4") as pool:
        found = []
        for ends in ((90,), (1, 2, 90), (41, 58, 59, 84, 85, 86, 87, 88, 89, 90)):
            cache = CXLCache(pool, model)
            found.append(by_steps(model, cache, ends))
            cache.release()
    for other in found[1:]:
        apart = float((other - found[0]).abs().max())
        print(f"{name}: {apart:.2g} apart")
        assert apart < 0.01


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_generated_tokens_are_those_of_rounded_keys_and_values(
    llama: PreTrainedModel, encoding: str
) -> None:
    ids, mask = prompts((96, 80))
    wanted = generate(llama, ids, mask, reference(encoding))
    with pool_of(llama, encoding) as pool:
        cache = CXLCache(pool, llama)
        assert torch.equal(generate(llama, ids, mask, cache), wanted)
        before = cache.counters.bytes_read
        assert before % pool.layout.stored_token_bytes == 0
        cache.release()


def test_a_budget_with_an_error_reads_fewer_bits(llama: PreTrainedModel) -> None:
    found, read = [], []
    with pool_of(llama, "progressive") as pool:
        for error in (0.0, 0.1):
            cache = CXLCache(pool, llama, Budget(share=1.0, error=error))
            found.append(by_steps(llama, cache, (88, 89, 90)))
            read.append(cache.counters.bytes_read)
            cache.release()
    assert torch.isfinite(found[1]).all()
    print(f"{float((found[1] - found[0]).abs().max()):.2g} apart, {read[1] / read[0]:.3f} of bytes")
    assert 0.5 < read[1] / read[0] < 0.95
    assert float((found[1] - found[0]).abs().mean()) < 0.05


class OnBoth(CXLCache):
    """Attends in the pool, and to the same pages as tensors; keeps how far these are apart."""

    apart: list[float]

    def attend(
        self, batch: Batch, part: LayerStep, queries: Tensor, picked: Selection | None
    ) -> Tensor:
        out = super().attend(batch, part, queries, picked)
        if picked is not None:
            chunks, query = GpuChunks(self.pool), part.step.unrows(queries).transpose(1, 2)
            other = part.step.rows(
                chunks.attend(part, self.sequences, query, None, picked).transpose(1, 2)
            )
            self.apart.append(float((out - other).abs().max() / other.abs().max()))
        return out


@pytest.mark.parametrize("encoding", ["int8", "int4", "fp8_e4m3"])
def test_few_pages_are_the_same_in_the_pool_and_on_the_device(
    llama: PreTrainedModel, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for queries and weights, which the pool rounds to 14 bits."""
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    ids, mask = prompts((96, 80))
    with pool_of(llama, encoding) as pool:
        cache = OnBoth(pool, llama, Budget(pages=4))
        cache.apart = []
        generate(llama, ids, mask, cache)
        cache.release()
    print(f"{len(cache.apart)} calls, {max(cache.apart):.2g} apart")
    assert len(cache.apart) == 15 * LAYERS
    assert 0 < max(cache.apart) < 1e-3


def test_a_sparse_prefill_attends_to_what_is_kept(llama: PreTrainedModel) -> None:
    ids, _ = prompts((2304,))
    as_made = run(llama, ids, DynamicCache())
    with pool_of(llama, "int4") as pool:
        found = []
        for mass in (1.0, None):
            cache = CXLCache(pool, llama, prefill_mass=mass)
            found.append(run(llama, ids, cache))
            assert (cache.counters.prefill_blocks > 0) == (mass is not None)
            cache.release()
    error, rounding = ((one - found[1]).abs().max() for one in (found[0], as_made))
    print(f"{float(error):.2g} apart, {float(rounding):.2g} from keys and values as made")
    assert error < min(0.05, float(rounding) / 4)


def test_a_handed_over_cache_goes_on_from_the_same_bytes(llama: PreTrainedModel) -> None:
    ids, _ = prompts((47,))
    with pool_of(llama, "int8,int4") as pool:
        cache = CXLCache(pool, llama)
        run(llama, ids[:, :-1], cache)
        data = hand_over(cache, llama)
        here = run(llama, ids[:, -1:], cache)
        other = take_over(data, pool, llama)
        cache.release()
        assert torch.equal(run(llama, ids[:, -1:], other), here)
        other.release()


def test_a_fork_and_a_crop_encode_nothing_again(llama: PreTrainedModel) -> None:
    ids, _ = prompts((47,))
    with pool_of(llama, "int4") as pool:
        cache = CXLCache(pool, llama)
        run(llama, ids[:, :40], cache)
        fork = cache.fork()
        wanted = run(llama, ids[:, 40:], cache)
        assert close(run(llama, ids[:, 40:], fork), wanted)
        fork.crop(-7)
        assert close(run(llama, ids[:, 40:], fork), wanted)
        fork.release()
        cache.release()
