"""Pages that a GPU writes through: read as if their K and V had been appended."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv import CXLPool, KVLayout, LayerGroup
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    CorruptError,
    OrderError,
    PoolFullError,
    UnevenError,
)
from cxlkv.gpu.copier import Copier
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.write import Sent, WriteThrough
from cxlkv.kernels import crc32c, encode
from cxlkv.kernels.runtime import INTERPRETED
from cxlkv.layout import ENCODINGS
from cxlkv.ndp.engine import Budget
from cxlkv.sequence import Batch, Sequence

from ..support.lengths import matrix
from ..support.page_bytes import check_same_bytes
from ..support.sharing import shared

SEED = 7030
Rows = tuple[torch.Tensor, torch.Tensor | None]

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture(autouse=True)
def references(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On "cpu" the torch references, which are faster than the interpreter."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is None or parameters.params.get("device", "cpu") == "cpu":
        for module in (encode, crc32c):
            monkeypatch.setattr(module, "runs_triton", lambda device: False)


def layout_of(kind: str) -> KVLayout:
    if kind == "mla":
        group = LayerGroup(
            layers=2, kv_heads=1, head_dim=40, value_head_dim=32, values="key_prefix"
        )
        return KVLayout.of([group], page_tokens=4)
    groups = [LayerGroup(layers=2, kv_heads=2, head_dim=16, value_head_dim=8)]
    if kind == "windows":
        groups.append(LayerGroup(layers=1, kv_heads=2, head_dim=16, value_head_dim=8, window=6))
    return KVLayout.of(groups, page_tokens=4)


@pytest.fixture
def pool(shm_path: Path, request: pytest.FixtureRequest) -> Iterator[CXLPool]:
    """In shared memory: a kernel does not pin a file on a disk for a device that writes."""
    layout = layout_of(getattr(request, "param", "plain"))
    with CXLPool.create(shm_path, layout=layout, capacity="4MiB", threads=2) as made:
        yield made


def rows_of(layout: KVLayout, tokens: int, device: torch.device, seed: int = SEED) -> list[Rows]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(dim: int) -> torch.Tensor:
        made = torch.randn((tokens, layout.kv_heads, dim), generator=generator)
        return made.to(getattr(torch, layout.dtype)).to(device)

    own = layout.values == "own"
    return [
        (numbers(layout.head_dim), numbers(layout.value_head_dim) if own else None)
        for _ in range(layout.layers)
    ]


def append_all(sequence: Sequence, rows: list[Rows], rewind: int | None = None) -> None:
    for layer, (k, v) in enumerate(rows):
        sequence.append(layer, k.cpu(), None if v is None else v.cpu(), rewind=rewind)


def check_same(one: Sequence, other: Sequence) -> None:
    assert len(one) == len(other)
    layout = one._layout
    generator = torch.Generator().manual_seed(SEED)
    for layer in range(layout.layers):
        q = torch.randn((layout.kv_heads, layout.head_dim), generator=generator)
        for method in ("exact", "digest"):
            chosen = one.select(layer, q, Budget(pages=3), method=method)
            wanted = other.select(layer, q, Budget(pages=3), method=method)
            np.testing.assert_array_equal(chosen.pages, wanted.pages)
            np.testing.assert_array_equal(chosen.scores, wanted.scores)
        staged = one.select(layer, q, Budget(pages=3), method="two_stage", recall=1.0)
        np.testing.assert_array_equal(
            np.sort(staged.pages),
            np.sort(one.select(layer, q, Budget(pages=3), method="exact").pages),
        )
        for left, right in zip(one.attend(layer, q), other.attend(layer, q), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)


def put_all(
    writer: WriteThrough, sequence: Sequence, rows: list[Rows], rewind: int | None = None
) -> None:
    for layer, (k, v) in enumerate(rows):
        writer.put(sequence, layer, k, v, rewind=rewind if layer == 0 else None)


def writer_for(pool: CXLPool, device: torch.device, way: str) -> WriteThrough:
    return WriteThrough(pool, Copier(Mapping(pool, device)) if way == "copier" else None)


WAYS = pytest.mark.parametrize("way", ["copier", "pinned memory"])


@matrix(pool=["plain", "mla"], way=["copier", "pinned memory"], indirect=["pool"])
def test_a_chunk_reads_as_if_it_were_appended(
    pool: CXLPool, device: torch.device, way: str
) -> None:
    layout = pool.layout
    before, chunk, rest = (rows_of(layout, n, device, SEED + n) for n in (8, 12, 3))
    written, appended = pool.sequence(), pool.sequence()
    append_all(written, before)
    writer = writer_for(pool, device, way)
    for layer, (k, v) in enumerate(chunk):
        writer.put(written, layer, k, v)
        assert len(written) == 8
    writer.finish(verify=True)
    append_all(written, rest)
    for rows in (before, chunk, rest):
        append_all(appended, rows)
    check_same(written, appended)
    # Made of the sequence's new end, by the same object.
    written.truncate(20)
    appended.truncate(20)
    put_all(writer, written, before)
    writer.finish()
    append_all(appended, before)
    check_same(written, appended)
    assert pool.admin.check(deep=True)["clean"]
    assert pool.stats()["pages_held"] == len(written.pages) + len(appended.pages)


@matrix(
    dtype=["bfloat16", "float16", "float32"],
    k_encoding=ENCODINGS,
    v_encoding=ENCODINGS,
    way=["copier", "pinned memory"],
)
def test_pages_of_codes_are_those_that_an_append_writes(
    shm_path: Path, device: torch.device, dtype: str, k_encoding: str, v_encoding: str, way: str
) -> None:
    """All of a record: its pieces, their sums, and nothing else."""
    layout = KVLayout(
        layers=2,
        kv_heads=2,
        head_dim=24,
        value_head_dim=20,
        page_tokens=20,
        dtype=dtype,
        k_encoding=k_encoding,
        v_encoding=v_encoding,
    )
    with CXLPool.create(shm_path, layout=layout, capacity="4MiB", threads=2) as pool:
        rows = rows_of(layout, 40, device)
        written, appended = pool.sequence(), pool.sequence()
        writer = writer_for(pool, device, way)
        put_all(writer, written, rows)
        writer.finish(verify=True)
        append_all(appended, rows)
        append_all(written, rows_of(layout, 3, device))
        append_all(appended, rows_of(layout, 3, device))
        check_same_bytes((pool, written), (pool, appended))
        for layer in range(2):  # what is read of them, open tails too
            for left, right in zip(written.fetch(layer), appended.fetch(layer), strict=True):
                assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
        assert pool.admin.check(deep=True)["clean"]


@WAYS
@pytest.mark.parametrize("device", ["cpu", INTERPRETER, ON_GPU], indirect=True)
def test_a_batch(pool: CXLPool, device: torch.device, way: str) -> None:
    rows = rows_of(pool.layout, 20, device)
    sequences = [pool.sequence() for _ in range(3)]
    batch, writer = pool.batch(sequences), writer_for(pool, device, way)
    starts = np.array([0, 8, 8, 20], np.int32)
    for layer, (k, v) in enumerate(rows):
        writer.put(batch, layer, k, v, starts)
    writer.finish(verify=True)
    for sequence, first, end in zip(sequences, starts[:-1], starts[1:], strict=True):
        appended = pool.sequence()
        append_all(appended, [(k[first:end], v[first:end]) for k, v in rows if v is not None])
        assert len(sequence) == end - first
        if end > first:
            check_same(sequence, appended)


@pytest.mark.parametrize("pool", ["windows"], indirect=True)
@pytest.mark.parametrize("rewind", [None, 0, 4])
def test_pages_behind_a_window_are_not_taken(
    pool: CXLPool, device: torch.device, rewind: int | None
) -> None:
    written, appended = pool.sequence(), pool.sequence()
    writer = writer_for(pool, device, "copier")
    for n in (8, 20):
        rows = rows_of(pool.layout, n, device, SEED + n)
        free = pool.stats()["pages_free"]
        append_all(appended, rows, rewind)
        taken = free - pool.stats()["pages_free"]
        put_all(writer, written, rows, rewind)
        writer.finish(verify=True)
        assert free - pool.stats()["pages_free"] == 2 * taken
        assert len(written.pages) == len(appended.pages)
        check_same(written, appended)


@WAYS
def test_abandoned_pages_are_free_again(pool: CXLPool, device: torch.device, way: str) -> None:
    free = pool.stats()["pages_free"]
    k, v = rows_of(pool.layout, 8, device)[0]
    writer = writer_for(pool, device, way)
    sequence = pool.sequence()
    writer.put(sequence, 0, k, v)
    assert pool.stats()["pages_free"] == free - 2
    writer.abandon()
    writer.abandon()
    assert pool.stats()["pages_free"] == free
    with writer:
        writer.put(sequence, 0, k, v)
    assert pool.stats()["pages_free"] == free
    writer.put(sequence, 0, k, v)
    del writer
    gc.collect()
    assert pool.stats()["pages_free"] == free
    assert len(sequence) == 0


def test_pages_are_not_freed_while_a_device_writes_to_them(pool: CXLPool) -> None:
    """abandon() waits first."""
    free, seen = pool.stats()["pages_free"], list[int]()

    class Event:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            seen.append(pool.stats()["pages_free"])

    k, v = rows_of(pool.layout, 8, torch.device("cpu"))[0]
    writer = WriteThrough(pool)
    writer.put(pool.sequence(), 0, k, v)
    chunk = writer._state.chunk
    assert chunk is not None
    chunk.sent.append(Sent(None, Event()))
    writer.abandon()
    assert seen == [free - 2]
    assert pool.stats()["pages_free"] == free


def test_nobody_has_pages_before_they_have_arrived(
    pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """finish() waits for all layers, and has the host's copies made behind that."""
    order = []

    class Event:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            order.append("arrived")

    rows = rows_of(pool.layout, 8, torch.device("cpu"))
    writer, sequence = WriteThrough(pool), pool.sequence()
    put_all(writer, sequence, rows)
    chunk = writer._state.chunk
    assert chunk is not None
    late = [Sent(sent.memory, Event(), sent.by_host) for sent in chunk.sent]
    move = ctypes.memmove

    def moved(target: int, source: int, size: int) -> int:
        order.append("copied")
        return move(target, source, size)

    monkeypatch.setattr(ctypes, "memmove", moved)
    chunk.sent.clear()
    chunk.sent.extend(late)
    attach = type(chunk.batch).attach

    def attached(batch: Batch, *given: object, **named: object) -> None:
        order.append("attached")
        attach(batch, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(type(chunk.batch), "attach", attached)
    writer.finish(verify=True)
    copies = order.count("copied")
    assert copies
    assert order == ["arrived", *["copied"] * copies, "attached"]


def test_closing_the_pool_abandons(tmp_path: Path) -> None:
    layout = layout_of("plain")
    pool = CXLPool.create(tmp_path / "other", layout=layout, capacity="4MiB")
    writer, sequence = WriteThrough(pool), pool.sequence()
    k, v = rows_of(layout, 8, torch.device("cpu"))[0]
    writer.put(sequence, 0, k, v)
    pool.close()
    with pytest.raises(ClosedError, match="the pool was closed"):
        writer.put(sequence, 1, k, v)
    with pytest.raises(ClosedError, match="the pool was closed"):
        writer.finish()
    writer.abandon()


def test_bad_input(pool: CXLPool, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    (k, v), _ = rows_of(pool.layout, 8, cpu)
    assert v is not None
    writer, sequence, free = WriteThrough(pool), pool.sequence(), pool.stats()["pages_free"]
    with pytest.raises(OrderError, match="layer 1: the next one is 0"):
        writer.put(sequence, 1, k, v)
    with pytest.raises(OrderError, match="0 of 2 layers"):
        writer.finish()
    with pytest.raises(BadArgumentError, match="fills pages of 4 tokens"):
        writer.put(sequence, 0, k[:6], v[:6])
    with pytest.raises(BadArgumentError, match="no tokens"):
        writer.put(sequence, 0, k[:0], v[:0])
    with pytest.raises(BadArgumentError, match="v is None"):
        writer.put(sequence, 0, k, None)
    with pytest.raises(BadArgumentError, match=r"k is torch\.float32"):
        writer.put(sequence, 0, k.float(), v)
    with pytest.raises(BadArgumentError, match=r"v is torch\.bfloat16 \(4, 2, 8\)"):
        writer.put(sequence, 0, k, v[:4])
    with pytest.raises(BadArgumentError, match="a batch needs them"):
        writer.put(pool.batch([sequence]), 0, k, v)
    with pytest.raises(BadArgumentError, match=r"starts \[0, 4\] for 8 rows"):
        writer.put(sequence, 0, k, v, [0, 4])
    open_tail, uneven = pool.sequence(), pool.sequence()
    append_all(open_tail, [(k[:3], v[:3])] * 2)
    uneven.append(0, k[:3], v[:3])
    with pytest.raises(BadArgumentError, match="no multiple of 4"):
        writer.put(open_tail, 0, k, v)
    with pytest.raises(UnevenError):
        writer.put(uneven, 0, k, v)
    with pytest.raises(PoolFullError):
        writer.put(sequence, 0, *(x.repeat(4096, 1, 1) for x in (k, v)))
    assert pool.stats()["pages_free"] == free
    writer.put(sequence, 0, k, v)
    with pytest.raises(BadArgumentError, match="same sequences and starts"):
        writer.put(sequence, 1, k[:4], v[:4])
    with pytest.raises(OrderError, match="1 of 2 layers"):
        writer.finish()
    writer.put(sequence, 1, k, v)
    sequence.append(0, k[:1], v[:1])
    with pytest.raises(UnevenError):
        writer.finish()
    sequence.truncate(0)
    writer.finish()
    with CXLPool.create(tmp_path / "other", layout=pool.layout, capacity="4MiB") as other:
        with pytest.raises(BadArgumentError, match="another pool"):
            WriteThrough(pool, Copier(Mapping(other, "cpu")))
        with pytest.raises(BadArgumentError, match="another pool"):
            writer.put(other.sequence(), 0, k, v)


def test_bytes_that_change_on_their_way_are_found(pool: CXLPool) -> None:
    rows = rows_of(pool.layout, 8, torch.device("cpu"))
    writer, sequence = WriteThrough(pool), pool.sequence()
    put_all(writer, sequence, rows)
    chunk = writer._state.chunk
    assert chunk is not None
    writer._drain(chunk, wait=True)
    chunk.sums[1, 0, 1, 2] ^= 1
    with pytest.raises(CorruptError, match="kv head 1: its K"):
        writer.finish(verify=True)
    writer.abandon()
    assert pool.stats()["pages_held"] == 0


def test_tiers_make_room(pool: CXLPool) -> None:
    """A full pool asks who serves it, as an append does."""
    rows = rows_of(pool.layout, 8, torch.device("cpu"))
    held = pool.pages.alloc(pool.stats()["pages_free"] - 1)

    def make(pages: int) -> bool:
        assert pages == 2
        pool.pages.free(held)
        return True

    pool.pages.register(make)
    writer, sequence = WriteThrough(pool), pool.sequence()
    put_all(writer, sequence, rows)
    writer.finish()
    assert len(sequence) == 8


def test_where_hosts_share_the_pool_the_host_copies(tmp_path: Path, device: torch.device) -> None:
    with shared(tmp_path / "shared", layout_of("plain")) as pool:
        written, appended = pool.sequence(), pool.sequence()
        rows = rows_of(pool.layout, 8, device)
        writer = WriteThrough(pool)
        put_all(writer, written, rows)
        writer.finish(verify=True)
        append_all(appended, rows)
        check_same(written, appended)
