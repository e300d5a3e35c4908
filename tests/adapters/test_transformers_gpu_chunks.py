"""attention="gpu" in passes of several tokens: blocks of pages, merged; on host tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cxlkv import Batch, Budget, CXLPool
from cxlkv.adapters.common import gpu_chunks, prefill
from cxlkv.adapters.common.prefill import attend_to_block
from cxlkv.adapters.transformers import CXLCache, LayerStep, Step
from cxlkv.errors import CorruptError, UnsupportedError
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.staging import Staged, Staging
from cxlkv.kernels import runtime
from cxlkv.ndp.engine import Selection

from ..support.lengths import matrix, nightly
from ..support.small_models import (
    LAYERS,
    PAGE_TOKENS,
    LargestTensor,
    attend_by,
    pool_for,
    prompts,
    run,
)
from .test_transformers_encodings import reference
from .test_transformers_models import MODELS, all_free, dynamic, make
from .test_transformers_models import llama as llama  # a fixture


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three pages of most models."""
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(gpu_chunks, "BLOCK_BYTES", 3 << 10)


@pytest.fixture
def pool(llama: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(llama, capacity="32MiB") as made:
        yield made


class LateStaging(Staging):
    """As slow as a device may be: the memory of a block has no right bytes from the moment that it
    is asked for until it is waited for; and none of a block that gave way to another."""

    writes: ClassVar[dict[int, Late]] = {}

    def get(
        self,
        batch: Batch,
        layer: int,
        picked: Selection,
        out: Sequence[Tensor] | None = None,
        *,
        decoded: bool = True,
    ) -> Staged:
        assert out is not None
        found = super().get(batch, layer, picked, decoded=decoded)
        for memory in out:
            memory.fill_(torch.nan)
        values = out[1] if len(out) > 1 else out[0][..., : found.values.shape[-1]]
        made = self.writes[out[0].data_ptr()] = Late(out[0], values, found.event, found)
        return made


@dataclass(frozen=True)
class Late(Staged):
    found: Staged | None = None

    def wait(self) -> None:
        assert self.found is not None
        assert LateStaging.writes[self.keys.data_ptr()] is self, "another block is on its way there"
        self.keys.copy_(self.found.keys)
        self.values.copy_(self.found.values)


def by_chunks(
    model: PreTrainedModel, cache: CXLCache, ids: Tensor, mask: Tensor, ends: Sequence[int]
) -> Tensor:
    steps = zip((0, *ends), ends, strict=False)
    return torch.cat([run(model, ids[:, a:b], cache, mask[:, :b]) for a, b in steps], 1)


@matrix(name=MODELS, tokens=[1, 2, 7, 33], times=2)
def test_chunks_give_the_logits_of_one_pass(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of unlike lengths, of which some have padding alone at first; nothing is attended to
    in the pool, and nothing before it is there or after it is written over."""
    monkeypatch.setattr(gpu_chunks, "Staging", LateStaging)
    monkeypatch.delattr(Batch, "attend")
    model = make(name)
    ids, mask = prompts((75, 52, 3))
    wanted = run(model, ids, dynamic(model), mask)
    with pool_for(model, capacity="32MiB") as pool:
        cache = CXLCache(pool, model, Budget(share=1.0), attention="gpu")
        cache.rewind_tokens = 0
        found = by_chunks(model, cache, ids, mask, (24, *range(24 + tokens, 75, tokens), 75))
        torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-3, atol=1e-4)
        cache.release()
        assert all_free(pool)


@pytest.mark.parametrize("encoding", ["int8", "int4,int8"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_an_encoded_pool_is_attended_to_as_it_is_kept(name: str, encoding: str) -> None:
    """As by a cache that rounds keys and values so; the first pass, too. Sums in another order may
    round a key to the next code, which a few tokens show."""
    model = make(name)
    ids, mask = prompts((75, 52, 3))
    wanted = run(model, ids, reference(encoding), mask)[mask.bool()]
    with pool_for(model, capacity="32MiB", encoding=encoding) as pool:
        cache = CXLCache(pool, model, attention="gpu")
        found = by_chunks(model, cache, ids, mask, (24, 31, 60, 75))[mask.bool()]
        cache.release()
    apart = (found - wanted).abs().amax(1)
    print(f"{float(apart.median()):.2g} apart, {float(apart.max()):.2g} at most")
    assert float(apart.median()) < 1e-4
    assert int((apart > 1e-2).sum()) < len(apart) // 20


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_outputs_do_not_depend_on_the_chunks(name: str) -> None:
    """In a pool of shorter numbers a pass's own tokens count as rounded, as those before it do."""
    model = make(name)
    ids, mask = prompts((75, 52))
    with pool_for(model, dtype="bfloat16") as pool:
        found = []
        for ends in ((24, 75), (24, 41, 60, 75)):
            cache = CXLCache(pool, model, attention="gpu")
            found.append(by_chunks(model, cache, ids, mask, ends)[mask.bool()])
            cache.release()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [Budget(pages=4), Budget(mass=0.6)], ids=["even", "ragged"])
def test_a_token_beside_padding_attends_to_the_pages_of_its_budget(
    llama: PreTrainedModel, pool: CXLPool, budget: Budget
) -> None:
    ids, mask = prompts((75, 30))
    caches = [
        CXLCache(pool, llama, budget, attention=place, method="exact") for place in ("pool", "gpu")
    ]
    few, found = (by_chunks(llama, cache, ids, mask, (40, 41, 42, 43)) for cache in caches)
    torch.testing.assert_close(found[0], few[0], rtol=1e-4, atol=1e-4)
    full = run(llama, ids[:, :43], dynamic(llama), mask[:, :43])
    assert not torch.allclose(full[0, 40:], few[0, 40:], atol=1e-2)
    one, other = (cache.counters for cache in caches)
    assert (one.steps, one.bytes_scored, one.bytes_read) == (
        3,
        other.bytes_scored,
        other.bytes_read,
    )
    caches[1].on_choice = lambda *_: None
    with pytest.raises(UnsupportedError, match=r"attention=.pool. does"):
        run(llama, ids[:, 43:44], caches[1], mask[:, :44])


def test_a_device_keeps_two_blocks_however_long_the_text(
    llama: PreTrainedModel, pool: CXLPool
) -> None:
    """No tensor of a pass is larger behind a longer text; the buffers end with the cache."""
    largest, peaks = [], []
    for tokens in (120, 480):
        ids, _ = prompts((tokens + 8,))
        cache = CXLCache(pool, llama, attention="gpu")
        run(llama, ids[:, :tokens], cache)
        attend_by(llama, cache)
        with LargestTensor(llama) as seen:
            run(llama, ids[:, tokens:], cache)
        largest.append(seen.largest_bytes)
        peaks.append(cache.counters.live_bytes_peak)
        chunks = cache._chunks
        assert chunks is not None
        assert chunks.bytes == 2 * gpu_chunks.BLOCK_BYTES
        cache.release()
        assert chunks.bytes == 0
    assert largest[0] == largest[1] < 480 * pool.layout.token_bytes // LAYERS
    own_bytes = 8 * pool.layout.token_bytes // LAYERS
    assert peaks == [2 * gpu_chunks.BLOCK_BYTES + own_bytes] * 2


def test_a_damaged_page_is_attended_to_by_nobody(
    llama: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = prompts((75,))
    cache = CXLCache(pool, llama, attention="gpu")
    run(llama, ids[:, :60], cache)
    mapping = Mapping(pool, "cpu")
    at = int(mapping.pages(cache.sequences[0], 1).keys_at[1, 7]) - mapping.device_address
    word = mapping.tensor[at : at + 4].view(torch.float32)
    right = float(word)
    word.fill_(1e6)
    seen: list[float] = []

    def watched(part: LayerStep, query: Tensor, key: Tensor, *rest: object) -> object:
        seen.append(float(key.abs().max()))
        return attend_to_block(part, query, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_chunks, "attend_to_block", watched)
    with pytest.raises(CorruptError):
        run(llama, ids[:, 60:], cache)
    blocks = 1 + -(-60 // PAGE_TOKENS // 3)
    assert len(seen) < 2 * blocks, "the second layer was not attended to the end"
    assert max(seen) < 1e3
    word.fill_(right)
    mapping.close()
    cache.crop(60)
    found = run(llama, ids[:, 60:], cache)
    wanted = run(llama, ids, dynamic(llama))[:, 60:]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@matrix(
    rows=[1, 5, 12],
    ahead=[0, 3, 11, 16],
    window=[None, 6, 30],
    softcap=[None, 3.0],
    dtype=["float32", "bfloat16"],
    times=3,
)
def test_a_block_is_attended_to_as_far_as_rows_see(
    rows: int,
    ahead: int,
    window: int | None,
    softcap: float | None,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch's kernel where there is nothing to hide, else by a few rows at a time."""
    monkeypatch.setattr(prefill, "BLOCK_LOGITS", 4 * 12 * 2)
    random = torch.Generator().manual_seed(rows * ahead)
    query, key, value = (
        torch.randn(shape, generator=random, dtype=torch.float64).to(getattr(torch, dtype))
        for shape in ((4, rows, 16), (2, 12, 16), (2, 12, 8))
    )
    part = LayerStep(0, cast(Step, None), 0.3, softcap, window)
    rows_seen = rows if window is None else min(rows, 11 + window - ahead)
    out, lse = attend_to_block(part, query[:, :rows_seen], key, value, ahead)
    at = ahead + np.arange(rows_seen)[:, None]
    seen = np.arange(12) <= at
    if window is not None:
        seen &= np.arange(12) > at - window
    logits = query.double()[:, :rows_seen] @ key.double().repeat_interleave(2, 0).mT * 0.3
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~torch.from_numpy(seen), -torch.inf)
    wanted = torch.softmax(logits, -1) @ value.double().repeat_interleave(2, 0)
    near = 1e-5 if dtype == "float32" else 0.03
    torch.testing.assert_close(out.double(), wanted.transpose(0, 1), rtol=near, atol=near)
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits, -1).T, rtol=near, atol=near)


def test_passes_may_be_inside_and_outside_of_inference_mode(
    llama: PreTrainedModel, pool: CXLPool
) -> None:
    ids, _ = prompts((60,))
    cache = CXLCache(pool, llama, attention="gpu")
    wanted = run(llama, ids, dynamic(llama))
    attend_by(llama, cache)
    ends = (20, 30, 31, 32, 50, 59, 60)
    for at, (first, last) in enumerate(zip((0, *ends), ends, strict=False)):
        with (torch.inference_mode, torch.no_grad)[at > 2]():
            found = llama(ids[:, first:last], past_key_values=cache).logits
        torch.testing.assert_close(found, wanted[:, first:last], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", *map(nightly, MODELS)])
def test_random_passes_are_those_of_the_pool(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, steps, crops and forks of a padded batch, by decoders and blocks in turn."""
    monkeypatch.setattr(gpu_chunks, "Staging", LateStaging)
    model, random = make(name), np.random.default_rng(seed)
    ids, mask = prompts((200, 200 - int(random.integers(40))))
    with pool_for(model, capacity="32MiB") as pool:
        budget = [Budget(share=1.0, recent=int(random.integers(1, 9))), None]
        pair = [CXLCache(pool, model), CXLCache(pool, model, budget, attention="gpu")]
        seen, left = 0, []
        for _ in range(16):
            kind = random.choice(["chunk", "step", "step", "crop", "fork", "leave"])
            if kind == "crop" and seen > 1:
                back = int(random.integers(1, min(seen, 12)))
                for cache in pair:
                    cache.crop(-back)
                seen -= back
            elif kind == "fork" and seen:
                left += pair
                pair = [cache.fork() for cache in pair]
            elif kind == "leave":
                pair[1].leave_device()
            else:
                end = min(200, seen + (int(random.integers(2, 30)) if kind == "chunk" else 1))
                one, other = (run(model, ids[:, seen:end], of, mask[:, :end]) for of in pair)
                real = mask[:, seen:end].bool()
                torch.testing.assert_close(other[real], one[real], rtol=1e-3, atol=1e-3)
                seen = end
        for cache in (*left, *pair):
            cache.release()
        assert all_free(pool)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt-oss", "deepseek-v3"])
def test_on_a_gpu(name: str, dtype: str) -> None:
    """As on host tensors; without a wait of the test's own."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = make(name).to(getattr(torch, dtype)).cuda()
    ids, mask = (one.cuda() for one in prompts((900, 520, 3)))
    wanted = run(model, ids, dynamic(model), mask)
    with pool_for(model, capacity="32MiB", dtype=dtype) as pool:
        cache = CXLCache(pool, model, Budget(share=1.0), attention="gpu")
        ends = (300, 301, 340, 600, 898, 899, 900)
        found = by_chunks(model, cache, ids, mask, ends)
        cache.release()
    near = 1e-3 if dtype == "float32" else 0.1
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=near, atol=near)
