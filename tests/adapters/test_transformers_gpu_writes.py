"""attention="gpu" in passes of many tokens: pages that a WriteThrough writes while the model
computes, on host tensors; held to those that a host appends."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cxlkv import CXLPool
from cxlkv.adapters.common import gpu_writes
from cxlkv.adapters.common.gpu_writes import GpuWrites
from cxlkv.adapters.transformers import CXLCache, layout_of, sparse_prefill
from cxlkv.errors import ClosedError, CorruptError, PoolFullError, RegistrationError
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.write import WriteThrough
from cxlkv.kernels import runtime
from cxlkv.ndp.engine import same_pages
from cxlkv.sequence import Batch

from ..support.lengths import matrix
from ..support.page_bytes import check_same_bytes
from ..support.small_models import PAGE_TOKENS, generate, pool_for, prompts, run
from .test_transformers_models import MODELS, all_free, dynamic, make
from .test_transformers_models import llama as llama  # a fixture

pytestmark = pytest.mark.usefixtures("references")


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


@pytest.fixture
def pool(llama: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(llama, capacity="32MiB") as made:
        yield made


class Ways:
    """Counts tokens that were written by either way, once for each layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.written, self.appended = 0, 0
        put, append = WriteThrough.put, Batch.append

        def counted_put(
            writer: WriteThrough, to: Batch, layer: int, k: Tensor, *more: object, **named: object
        ) -> None:
            self.written += len(k)
            put(writer, to, layer, k, *more, **named)  # type: ignore[arg-type]

        def counted_append(batch: Batch, layer: int, k: Tensor, *more: object) -> None:
            self.appended += len(k)
            append(batch, layer, k, *more)  # type: ignore[arg-type]

        monkeypatch.setattr(WriteThrough, "put", counted_put)
        monkeypatch.setattr(Batch, "append", counted_append)


def by_host(cache: CXLCache, monkeypatch: pytest.MonkeyPatch) -> CXLCache:
    """The same, whose passes the host appends."""
    monkeypatch.setattr(cache._writes, "begin", lambda *_: False)
    return cache


def caches(
    model: PreTrainedModel, pools: tuple[CXLPool, CXLPool], monkeypatch: pytest.MonkeyPatch
) -> tuple[CXLCache, CXLCache]:
    here, there = (CXLCache(pool, model, attention="gpu") for pool in pools)
    return here, by_host(there, monkeypatch)


def check_same(here: CXLCache, there: CXLCache) -> None:
    for one, other in zip(here.sequences, there.sequences, strict=True):
        assert len(one) == len(other)
        check_same_bytes((here.pool, one), (there.pool, other))
        if len(one) % PAGE_TOKENS:
            tail = same_pages([len(one) // PAGE_TOKENS], here.pool.layout.kv_heads)
            for layer in range(here.pool.layout.layers):
                found, wanted = one.fetch(layer, tail), other.fetch(layer, tail)
                for left, right in zip(found, wanted, strict=True):
                    assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
    assert here.pool.stats()["pages_free"] == there.pool.stats()["pages_free"]
    assert here.pool.admin.check(deep=True)["clean"]


@matrix(name=MODELS, encoding=["none", "int8", "int4,int8"])
def test_pools_are_those_that_a_host_appends_to(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In passes of drawn lengths, of rows of unlike lengths, padded on the left; and a fork's."""
    model, draw = make(name), random.Random(seed)
    if encoding != "none" and pool_is_of_latents(model):
        pytest.skip("latents are not encoded")
    lengths = (draw.randrange(40, 70), draw.randrange(1, 40), draw.randrange(1, 70))
    print(f"seed {seed}: {lengths}")
    ids, mask = prompts(lengths)
    with (
        pool_for(model, capacity="32MiB", encoding=encoding) as one,
        pool_for(model, capacity="32MiB", encoding=encoding) as other,
    ):
        ways = Ways(monkeypatch)
        here, there = caches(model, (one, other), monkeypatch)
        seen = 0
        while seen < ids.shape[1]:
            # The first one is long: in it the device writes pages of the longest row.
            end = min(ids.shape[1], seen + (draw.choice((1, 2, 7, 8, 16, 33)) if seen else 33))
            if here.sequences and draw.random() < 0.3:
                here, there = here.fork(), by_host(there.fork(), monkeypatch)
            outs = [run(model, ids[:, seen:end], cache, mask[:, :end]) for cache in (here, there)]
            torch.testing.assert_close(*(out[mask[:, seen:end].bool()] for out in outs))
            check_same(here, there)
            seen = end
        assert ways.written > 0


def pool_is_of_latents(model: PreTrainedModel) -> bool:
    with pool_for(model, capacity="32MiB") as pool:
        return pool.layout.values != "own"


def test_tokens_and_how_they_came(
    llama: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole pages by the device; by the host what is before and behind them. A prefix of the pool
    is not written again."""
    ids, mask = prompts((30, 13))
    wanted = generate(llama, ids, mask, dynamic(llama))
    ways, layers = Ways(monkeypatch), pool.layout.layers
    cache = CXLCache(pool, llama, attention="gpu")
    assert torch.equal(generate(llama, ids, mask, cache), wanted)
    assert ways.written == layers * (28 + 12)
    ways.written = ways.appended = 0
    first = cache.sequences[0].fork()
    first.truncate(16)
    other = CXLCache(pool, llama, attention="gpu", sequences=[first])
    run(llama, ids[:1, 16:], other, mask[:1])
    assert (ways.written, ways.appended) == (layers * 12, layers * 2)
    run(llama, ids[:1, :9], other)
    assert (ways.written, ways.appended) == (layers * 16, layers * 7)


def test_a_sparse_prefill_reads_its_own_tokens_in_the_pool(
    llama: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the host appends them, in a later chunk; the first one has its tensors."""
    monkeypatch.setattr(sparse_prefill, "TOKENS_LEAST", 130)
    ways, layers = Ways(monkeypatch), pool.layout.layers
    ids, mask = prompts((264,))
    wanted = run(llama, ids, dynamic(llama), mask)
    cache = CXLCache(pool, llama, attention="gpu", prefill_mass=1.0)
    found = [run(llama, ids[:, a:b], cache, mask[:, :b]) for a, b in ((0, 132), (132, 264))]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-4)
    assert cache.counters.prefill_blocks > 0
    assert (ways.written, ways.appended) == (layers * 132, layers * 132)


# ---- passes that fail ----


def failing(at: int, error: Exception, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The layer `at` raises before or after what it writes, or finish() does."""
    put, finish = GpuWrites.put, WriteThrough.finish

    def broken_put(writes: GpuWrites, layer: int, *rows: Tensor) -> None:
        if layer == at and kind == "before":
            raise error
        put(writes, layer, *rows)
        if layer == at and kind == "after":
            raise error

    def broken_finish(writer: WriteThrough, *, verify: bool = False) -> None:
        if kind == "end":
            raise error
        finish(writer, verify=verify)

    monkeypatch.setattr(GpuWrites, "put", broken_put)
    monkeypatch.setattr(WriteThrough, "finish", broken_finish)


@pytest.mark.parametrize("kind", ["before", "after", "end"])
@pytest.mark.parametrize("at", [0, 1, -1])
def test_a_pass_that_fails_leaves_nothing(
    llama: PreTrainedModel, pool: CXLPool, kind: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of which one begins inside of a page; the next pass is as if there had been none."""
    ids, mask = prompts((40, 39))
    wanted = run(llama, ids, dynamic(llama), mask)
    cache = CXLCache(pool, llama, attention="gpu")
    run(llama, ids[:, :20], cache, mask[:, :20])
    assert [len(one) % PAGE_TOKENS for one in cache.sequences] == [0, 3]
    free = pool.stats()["pages_free"]
    with monkeypatch.context() as patch:
        failing(at % pool.layout.layers, CorruptError("broken"), patch, kind)
        with pytest.raises(CorruptError, match="broken"):
            run(llama, ids[:, 20:], cache, mask)
    assert [len(one) for one in cache.sequences] == [20, 19]
    assert pool.stats()["pages_free"] == free
    found = run(llama, ids[:, 20:], cache, mask)
    torch.testing.assert_close(found[0], wanted[0, 20:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], wanted[1, 20:], rtol=1e-4, atol=1e-4)
    cache.release()
    assert all_free(pool)


def test_a_pool_that_is_full_leaves_nothing(llama: PreTrainedModel, pool: CXLPool) -> None:
    """At the first page, and where pages are there for some rows only."""
    ids, mask = prompts((40, 39))
    cache = CXLCache(pool, llama, attention="gpu")
    run(llama, ids[:, :20], cache, mask[:, :20])
    for left in (0, 5):
        filler = pool.pages.alloc(pool.stats()["pages_free"] - left)
        with pytest.raises(PoolFullError):
            run(llama, ids[:, 20:], cache, mask)
        assert pool.stats()["pages_free"] == left
        assert [len(one) for one in cache.sequences] == [20, 19]
        pool.pages.free(filler)
    run(llama, ids[:, 20:], cache, mask)
    assert [len(one) for one in cache.sequences] == [40, 39]


def test_what_failed_in_the_model_is_undone_by_crop_and_release(
    llama: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompts((40,))
    for undo in ("crop", "release"):
        cache = CXLCache(pool, llama, attention="gpu")
        run(llama, ids[:, :20], cache, mask[:, :20])
        free = pool.stats()["pages_free"]

        def broken(*_: object) -> None:
            raise RuntimeError("broken")

        hook = llama.model.layers[1].mlp.register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken"):
            run(llama, ids[:, 20:], cache, mask)
        hook.remove()
        assert pool.stats()["pages_free"] < free
        if undo == "crop":
            cache.crop(20)
            assert pool.stats()["pages_free"] == free
            run(llama, ids[:, 20:], cache, mask)
        cache.release()
        assert all_free(pool)


def test_a_closed_pool(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompts((40,))
    layout = layout_of(llama, PAGE_TOKENS)
    pool = CXLPool.create("anonymous:", layout=layout, capacity="4MiB")
    cache = CXLCache(pool, llama, attention="gpu")
    put = GpuWrites.put

    def closing(writes: GpuWrites, layer: int, *rows: Tensor) -> None:
        if layer == 1:
            pool.close()
        put(writes, layer, *rows)

    monkeypatch.setattr(GpuWrites, "put", closing)
    with pytest.raises(ClosedError):
        run(llama, ids, cache, mask)


# ---- the ways into the pool ----


@pytest.mark.parametrize("kind", ["refused", "shared"])
def test_a_pool_that_no_device_writes_goes_through_pinned_memory(
    llama: PreTrainedModel, pool: CXLPool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver does not register, and what hosts share."""
    made = []

    class Watched(WriteThrough):
        def __init__(self, pool: CXLPool, copier: object = None):
            made.append(copier)
            super().__init__(pool, copier)  # type: ignore[arg-type]

    class ReadOnly(Mapping):
        def __init__(self, *given: object):
            if kind == "refused":
                raise RegistrationError("the driver refuses")
            super().__init__(*given)  # type: ignore[arg-type]
            self.writable = False

    monkeypatch.setattr(gpu_writes, "WriteThrough", Watched)
    monkeypatch.setattr(gpu_writes, "Mapping", ReadOnly)
    ids, mask = prompts((33,))
    cache = CXLCache(pool, llama, attention="gpu")
    with pool_for(llama, capacity="32MiB") as other:
        there = by_host(CXLCache(other, llama, attention="gpu"), monkeypatch)
        for one in (cache, there):
            run(llama, ids, one, mask)
        check_same(cache, there)
    assert made == [None]
