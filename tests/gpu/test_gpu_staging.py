"""Pages through a ring of buffers: the bytes of fetch(), and no buffer is filled too early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    CorruptError,
    MemoryShortError,
    UnsupportedError,
)
from cxlkv.gpu import staging as module
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.staging import Ring, Staging
from cxlkv.layout import LayerGroup
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.sequence import Batch

from ..test_records import grown

HEADS, DIM, PAGE_TOKENS = 2, 8, 4


def batch_of(pool: CXLPool, rng: np.random.Generator, lengths: tuple[int, ...]) -> Batch:
    return pool.batch([grown(pool, rng, tokens) for tokens in lengths])


def chosen(batch: Batch, rng: np.random.Generator, pages: int, per: str = "query") -> Selection:
    q = rng.standard_normal((len(batch), HEADS, DIM), np.float32)
    starts = np.arange(len(batch) + 1)
    return batch.select(1, q, starts, Budget(pages=pages, per=per))


@pytest.fixture
def batch(pool: CXLPool, rng: np.random.Generator) -> Batch:
    return batch_of(pool, rng, (23, 9))


def same(staged: torch.Tensor, fetched: object) -> bool:
    assert isinstance(fetched, torch.Tensor)
    return torch.equal(staged, fetched)


def fetched(batch: Batch, picked: Selection, like: torch.Tensor) -> tuple[object, object]:
    shape = picked.pages.shape
    out = (torch.empty(*shape, PAGE_TOKENS, DIM, dtype=like.dtype), torch.empty_like(like))
    return batch.fetch(1, picked, out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("columns", [1, 2, 100])
@pytest.mark.parametrize("per", ["query", "sequence"])
def test_the_bytes_are_those_of_fetch(
    dtype: str, columns: int, per: str, rng: np.random.Generator
) -> None:
    layout = KVLayout(layers=2, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE_TOKENS, dtype=dtype)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        batch = batch_of(pool, rng, (23, 9, 31))
        picked = chosen(batch, rng, 5, per)
        piece = 3 * HEADS * PAGE_TOKENS * DIM * (4 if dtype == "float32" else 2)
        buffer = 2 * piece * columns + 2 * module.ALIGNMENT_BYTES
        staging = Staging(pool, "cpu", buffer=buffer, buffers=2)
        staged = staging.get(batch, 1, picked)
        staged.wait()
        keys, values = fetched(batch, picked, staged.values)
        assert same(staged.keys, keys)
        assert same(staged.values, values)
        assert staged.keys.abs().sum() > 0
        out = (torch.full_like(staged.keys, 9), torch.full_like(staged.values, 9))
        again = staging.get(batch, 1, picked, out)
        assert again.keys is out[0]
        assert same(out[0], keys)
        assert same(out[1], values)
        staging.close()


def test_values_in_the_keys_are_a_view(rng: np.random.Generator) -> None:
    group = LayerGroup(
        layers=2,
        kv_heads=HEADS,
        head_dim=DIM,
        value_head_dim=4,
        dtype="float32",
        values="key_prefix",
    )
    layout = KVLayout.of([group], page_tokens=PAGE_TOKENS)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        batch = batch_of(pool, rng, (23, 9))
        picked = chosen(batch, rng, 3)
        staging = Staging(pool, "cpu")
        staged = staging.get(batch, 1, picked)
        keys, values = fetched(batch, picked, staged.values)
        assert same(staged.keys, keys)
        assert same(staged.values, values)
        keys_at, values_at = staged.tables()
        assert torch.equal(keys_at, values_at)
        out = (torch.empty_like(staged.keys), torch.empty(staged.values.shape))
        staging.get(batch, 1, picked, out)
        assert same(out[1], values)
        out[0].zero_()
        assert staging.get(batch, 1, picked, out[:1]).values.data_ptr() == out[0].data_ptr()
        assert same(out[0], keys)


def test_addresses_of_the_pieces(pool: CXLPool, batch: Batch, rng: np.random.Generator) -> None:
    staged = Staging(pool, "cpu").get(batch, 1, chosen(batch, rng, 4))
    for at, pages in zip(staged.tables(), (staged.keys, staged.values), strict=True):
        assert at.dtype == torch.int64
        assert at.shape == pages.shape[:3]
        for i in np.ndindex(*at.shape):
            assert int(at[i]) == pages[i].data_ptr()


def test_one_sequences_selection(pool: CXLPool, rng: np.random.Generator) -> None:
    batch = batch_of(pool, rng, (23,))
    q = rng.standard_normal((HEADS, DIM)).astype(np.float32)
    picked = batch.sequences[0].select(1, q, top_k=3)
    assert picked.pages.ndim == 2
    staged = Staging(pool, "cpu").get(batch, 1, picked)
    assert torch.equal(
        staged.keys[0], torch.from_numpy(np.asarray(batch.sequences[0].fetch(1, picked)[0]))
    )


class Event:
    """What the device would tell of a buffer; records that somebody waited."""

    def __init__(self, log: list[str], name: str, done: bool) -> None:
        self.log, self.name, self.done = log, name, done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.log.append(self.name)
        self.done = True


def test_a_busy_buffer_is_waited_for_and_only_then_filled() -> None:
    log: list[str] = []
    ring = Ring([torch.zeros(1), torch.zeros(1), torch.zeros(1)])
    for turn in range(3):
        ring.take().busy = Event(log, f"copy {turn}", done=turn == 1)
    assert log == []
    assert ring.waits == 0
    for turn in range(3):
        buffer = ring.take()
        assert buffer is ring.buffers[turn]
        assert log[-1] == f"copy {turn}"
        assert buffer.busy is None
    assert ring.waits == 2
    ring.take()
    assert ring.waits == 2


def test_get_waits_before_it_fills(pool: CXLPool, batch: Batch, rng: np.random.Generator) -> None:
    picked = chosen(batch, rng, 4)
    staging = Staging(pool, "cpu", buffers=1)
    ring = staging._ring
    assert ring is not None
    memory = ring.buffers[0].memory
    memory.fill_(7)

    class Checked(Event):
        def synchronize(self) -> None:
            assert (memory == 7).all(), "filled while the device read it"
            super().synchronize()

    log: list[str] = []
    ring.buffers[0].busy = Checked(log, "copy", done=False)
    staging.get(batch, 1, picked)
    assert log == ["copy"]
    assert staging.waits == 1
    assert not (memory == 7).all()
    ring.buffers[0].busy = Event(log, "last", done=False)
    staging.close()
    staging.close()
    assert log == ["copy", "last"]
    with pytest.raises(ClosedError):
        staging.get(batch, 1, picked)


def test_damage_is_found_before_it_is_sent(pool: CXLPool, rng: np.random.Generator) -> None:
    batch = batch_of(pool, rng, (23,))
    picked = chosen(batch, rng, 5)
    mapping = Mapping(pool, "cpu")
    page = int(picked.pages[0, 0, 0])
    table = mapping.pages(batch.sequences[0], 1)
    place = int(table.keys_at[0, page]) - mapping.device_address
    before = int(mapping.tensor[place])
    mapping.tensor[place] = before ^ 1
    out = tuple(torch.full((*picked.pages.shape, PAGE_TOKENS, DIM), 9.0) for _ in range(2))
    with pytest.raises(CorruptError):
        Staging(pool, "cpu").get(batch, 1, picked, (out[0], out[1]))
    assert (out[0] == 9).all()
    mapping.tensor[place] = before
    mapping.close()


def test_bad_arguments(pool: CXLPool, batch: Batch, rng: np.random.Generator) -> None:
    picked = chosen(batch, rng, 4)
    with pytest.raises(BadArgumentError, match="larger ones"):
        Staging(pool, "cpu", buffer=600).get(batch, 1, picked)
    with pytest.raises(BadArgumentError, match="0 buffers"):
        Staging(pool, "cpu", buffers=0)
    with pytest.raises(UnsupportedError, match="not for meta"):
        Staging(pool, "meta")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no CUDA device"):
            Staging(pool, "cuda")
    staging = Staging(pool, "cpu")
    staged = staging.get(batch, 1, picked)
    for wrong in (staged.keys.half(), staged.keys[:, :, :1]):
        with pytest.raises(BadArgumentError, match="out keys"):
            staging.get(batch, 1, picked, (wrong, staged.values))
    with pytest.raises(BadArgumentError, match="out is 1 tensors: keys and values"):
        staging.get(batch, 1, picked, [staged.keys])
    with pytest.raises(MemoryShortError, match="pinned memory"):
        Staging(pool, "cpu", buffer=1 << 60)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 3, 100])
def test_on_a_gpu(tmp_path: Path, columns: int, rng: np.random.Generator) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    layout = KVLayout(layers=2, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE_TOKENS)
    with CXLPool.create(tmp_path / "pool", layout=layout, capacity="8MiB", threads=1) as pool:
        batch = batch_of(pool, rng, (230, 90))
        picked = chosen(batch, rng, 20)
        piece = 2 * HEADS * PAGE_TOKENS * DIM * 2
        staging = Staging(pool, "cuda", buffer=2 * piece * columns + 512, buffers=2)
        for _ in range(5):
            staged = staging.get(batch, 1, picked)
            staged.wait()
            keys, values = fetched(batch, picked, staged.values.cpu())
            assert same(staged.keys.cpu(), keys)
            assert same(staged.values.cpu(), values)
        staging.close()
