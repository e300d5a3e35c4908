"""Copies by a kernel or by DMA: the choice, what is merged, and that all bytes arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import BadArgumentError, GpuMemoryError
from cxlkv.gpu.copier import Copier, Direction, Pieces, choose, merge, pieces_of, submit, tuned
from cxlkv.gpu.mapping import Mapping
from cxlkv.ndp import tuning
from cxlkv.ndp.tuning import GpuCopyConstants, Tuning

from ..support.fake_driver import OUT_OF_MEMORY, STREAM, FakeCuda
from ..support.sharing import shared
from ..test_records import grown

NO_CUTS = np.empty(0, np.int64)
KIB = 1024


@pytest.fixture
def mapping(pool: CXLPool) -> Iterator[Mapping]:
    with Mapping(pool, "cpu") as made:
        yield made


def pieces(sources: list[int], targets: list[int], sizes: list[int]) -> Pieces:
    return Pieces(*(np.array(row, np.int64) for row in (sources, targets, sizes)))


def scattered(count: int, size: int) -> Pieces:
    at = 4096 + np.arange(count) * 2 * size
    return Pieces(at, at + (1 << 30), np.full(count, size, np.int64))


@pytest.mark.parametrize(
    ("count", "size", "direction", "way"),
    [
        (128, 4 * KIB, "to_device", "kernel"),
        (16, 4 * KIB, "to_device", "kernel"),
        (15, 4 * KIB, "to_device", "dma"),
        (128, 128 * KIB - 16, "to_device", "kernel"),
        (128, 128 * KIB, "to_device", "dma"),
        (128, 256 * KIB, "to_device", "dma"),
        (128, 4 * KIB, "to_host", "dma"),
        (0, 4 * KIB, "to_device", "dma"),
        (128, 656, "to_device", "kernel"),
    ],
)
def test_the_choice(count: int, size: int, direction: Direction, way: str) -> None:
    made = scattered(count, size)
    assert choose(made, merge(made, NO_CUTS), direction, GpuCopyConstants()) == way


def test_the_choice_follows_what_was_measured() -> None:
    made = scattered(64, 32 * KIB)
    eager = GpuCopyConstants(kernel_piece_bytes_below=64 * KIB)
    assert choose(made, made, "to_device", eager) == "kernel"
    never = GpuCopyConstants(kernel_piece_bytes_below=0)
    assert choose(scattered(64, 16), scattered(64, 16), "to_device", never) == "dma"


def test_neighbours_count_as_one() -> None:
    at = 4096 + np.arange(64) * 4 * KIB
    side_by_side = Pieces(at, at + (1 << 30), np.full(64, 4 * KIB, np.int64))
    merged = merge(side_by_side, NO_CUTS)
    assert [row.tolist() for row in merged] == [[4096], [4096 + (1 << 30)], [256 * KIB]]
    assert choose(side_by_side, merged, "to_device", GpuCopyConstants()) == "dma"


def test_pieces_of_several_sizes_or_odd_places_go_by_dma() -> None:
    made = scattered(64, 4 * KIB)
    uneven = made._replace(sizes=made.sizes + np.arange(64) % 2)
    assert choose(uneven, uneven, "to_device", GpuCopyConstants()) == "dma"
    odd = made._replace(sources=made.sources + 8)
    assert choose(odd, odd, "to_device", GpuCopyConstants()) == "dma"
    words = Pieces(made.sources + 8, made.targets, made.sizes - 8)  # words of 8 bytes
    assert choose(words, words, "to_device", GpuCopyConstants()) == "kernel"


def test_what_is_merged() -> None:
    one = pieces([100, 110, 120, 130, 200], [500, 510, 520, 540, 610], [10, 10, 10, 10, 5])
    merged = merge(one, NO_CUTS)
    assert [row.tolist() for row in merged] == [[100, 130, 200], [500, 540, 610], [30, 10, 5]]
    cut = merge(one, np.array([120], np.int64))
    assert cut.sources.tolist() == [100, 120, 130, 200]
    cut = merge(one, np.array([510, 7], np.int64))
    assert cut.sizes.tolist() == [10, 20, 10, 5]
    assert merge(pieces([], [], []), NO_CUTS).sizes.size == 0


@pytest.mark.parametrize("several_sizes", [False, True])
@pytest.mark.parametrize("direction", ["to_device", "to_host"])
def test_on_the_cpu_all_bytes_arrive(
    mapping: Mapping, rng: np.random.Generator, direction: Direction, several_sizes: bool
) -> None:
    source = torch.from_numpy(rng.integers(0, 256, 1 << 16, dtype=np.uint8))
    target = torch.full((1 << 16,), 0xA5, dtype=torch.uint8)
    order = torch.from_numpy(rng.permutation(64).astype(np.int64))
    source_at = source.data_ptr() + torch.arange(64) * 1024
    target_at = target.data_ptr() + order * 1024
    source_at[3] = 0
    target_at[5] = 0
    sizes = rng.integers(1, 1000, 64) if several_sizes else np.full(64, 100)
    given = sizes if several_sizes else 100
    done = Copier(mapping).copy(source_at, target_at, given, direction)
    done.wait()
    done.synchronize()
    expected = torch.full((1 << 16,), 0xA5, dtype=torch.uint8)
    for i in range(64):
        if i not in (3, 5):
            size, to_at = int(sizes[i]), int(order[i]) * 1024
            expected[to_at : to_at + size] = source[i * 1024 : i * 1024 + size]
    assert torch.equal(target, expected)


def test_pages_of_a_pool(pool: CXLPool, mapping: Mapping, rng: np.random.Generator) -> None:
    sequence = grown(pool, rng, 12)
    table = mapping.pages(sequence, 1)
    got = torch.empty(2, 3, 4, 8)
    target_at = got.data_ptr() + torch.arange(6).view(2, 3) * 128
    Copier(mapping).copy(table.values_at, target_at, 128).wait()
    assert np.array_equal(got.numpy(), np.asarray(sequence.fetch(1)[1]))


def test_bad_arguments(mapping: Mapping) -> None:
    copier = Copier(mapping)
    at = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(BadArgumentError, match="int64 addresses"):
        copier.copy(at, at[:3], 16)
    with pytest.raises(BadArgumentError, match="int64 addresses"):
        copier.copy(at, at.float(), 16)
    with pytest.raises(BadArgumentError, match="or 4 of them"):
        copier.copy(at, at, [1, 2])
    with pytest.raises(BadArgumentError, match="or 4 of them"):
        copier.copy(at, at, 1.5)
    with pytest.raises(BadArgumentError, match="1 byte or more"):
        copier.copy(at, at, 0)
    with pytest.raises(BadArgumentError, match="direction"):
        copier.copy(at, at, 16, "sideways")  # type: ignore[arg-type]
    assert copier.copy(at, at, 16).event.query()  # type: ignore[no-untyped-call]


def test_a_device_does_not_write_to_a_pool_that_hosts_share(tmp_path: Path) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4)
    fake = FakeCuda(tmp_path)
    with shared(tmp_path / "shared", layout) as pool:
        mapping = Mapping(pool, "cuda:0", driver=fake.driver())
        mapping.device = torch.device("cpu")  # so that no stream is made
        copier = Copier(mapping)
        inside = torch.tensor([mapping.device_address + 4096])
        outside = torch.zeros(64, dtype=torch.uint8)
        at = torch.tensor([outside.data_ptr()])
        with pytest.raises(BadArgumentError, match="may only read"):
            copier.copy(at, inside, 16, "to_host")
        copier.copy(inside, at, 16)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_what_the_driver_is_given(tmp_path: Path, batch: int, rng: np.random.Generator) -> None:
    fake = FakeCuda(tmp_path, batch)
    driver = fake.driver()
    source = rng.integers(0, 256, 1 << 12, dtype=np.uint8)
    target = np.zeros(1 << 12, np.uint8)
    sources = source.ctypes.data + rng.permutation(8) * 512
    targets = target.ctypes.data + np.arange(8) * 512
    made = Pieces(sources, targets, np.full(8, 256, np.int64))
    submit(driver, 1, made, STREAM, batched=True)
    for i in range(8):
        at = int(sources[i]) - source.ctypes.data
        assert (target[i * 512 :][:256] == source[at : at + 256]).all()
    one_call = [("batch", 8, STREAM, 1)]
    assert fake.calls("batch") == (one_call if batch else [])
    assert len(fake.calls("cuMemcpyAsync")) == (0 if batch else 8)
    fake.forget()
    submit(driver, 1, made, STREAM, batched=False)  # as in a CUDA graph
    assert len(fake.calls("cuMemcpyAsync")) == 8
    fake.forget()
    submit(driver, 1, pieces([], [], []), STREAM, batched=True)
    assert fake.calls() == []
    fake.fail("batch" if batch else "cuMemcpyAsync", OUT_OF_MEMORY)
    with pytest.raises(GpuMemoryError):
        submit(driver, 1, made, STREAM, batched=True)


def test_no_copy_goes_across_two_registrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cxlkv.gpu.mapping.PIECE_BYTES_MAX", 40 << 20)
    fake = FakeCuda(tmp_path)
    fake.register_most(40 << 20)
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4)
    with CXLPool.create("anonymous:", layout=layout, capacity="128MiB", threads=1) as pool:
        driver = fake.driver()
        mapping = Mapping(pool, "cuda:0", driver=driver)
        cut = int(mapping.cuts[0])
        target = np.zeros(8192, np.uint8)
        at = torch.tensor([cut - 4096, cut])
        to = target.ctypes.data + torch.tensor([0, 4096])
        made = pieces_of(at, to, 4096)
        assert len(merge(made, NO_CUTS).sizes) == 1
        merged = merge(made, mapping.cuts)
        assert merged.sizes.tolist() == [4096, 4096]
        submit(driver, 0, merged, STREAM, batched=True)  # the driver refuses others


def test_constants_are_those_of_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = GpuCopyConstants(1, 2, 3, "NVIDIA H200")
    monkeypatch.setattr(tuning, "current", lambda: Tuning(gpu=measured))
    device = torch.device("cuda:0")
    assert tuned(torch.device("cpu")) == GpuCopyConstants()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert tuned(device) is measured
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    assert tuned(device) == GpuCopyConstants()


def test_dma_begins_after_the_current_stream_and_ends_with_an_event(
    pool: CXLPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: its streams are tested themselves")
    fake = FakeCuda(tmp_path)
    order: list[str] = []

    class Stream:
        cuda_stream = STREAM

        def __init__(self, device: torch.device | None = None) -> None: ...

        def wait_stream(self, stream: object) -> None:
            order.append(f"after the current stream, {len(fake.calls('batch'))} copies")

        def wait_event(self, event: object) -> None:
            order.append(f"after {event}, {len(fake.calls('batch'))} copies")

    class Event:
        def __init__(self, blocking: bool):
            assert not blocking

        def record(self, stream: Stream) -> None:
            order.append(f"event on {stream.cuda_stream}, {len(fake.calls('batch'))} copies")

        def wait(self, stream: Stream | None) -> None:
            order.append("the current stream waits")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    target = np.zeros(4096, np.uint8)
    with Mapping(pool, "cuda:0", driver=fake.driver()) as mapping:
        copier = Copier(mapping, GpuCopyConstants())
        source_at = torch.tensor([mapping.device_address, mapping.device_address + 4096])
        target_at = target.ctypes.data + torch.tensor([0, 64])
        copier.copy(source_at, target_at, 64).wait()
        copier.copy(source_at, target_at, 64, after="X")  # type: ignore[arg-type]
    assert bytes(target[:8]) == b"CXLKVPOL"
    first = ["after the current stream, 0 copies", f"event on {STREAM}, 1 copies"]
    second = ["after X, 1 copies", f"event on {STREAM}, 2 copies"]
    assert order == [*first, "the current stream waits", *second]


@pytest.mark.gpu
@pytest.mark.parametrize("tables", ["cpu", "cuda"])
@pytest.mark.parametrize(("count", "size"), [(128, 4096), (4, 4096), (32, 65536), (40, 656)])
def test_on_a_gpu_all_bytes_arrive(
    count: int, size: int, tables: str, rng: np.random.Generator
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    layout = KVLayout(layers=1, kv_heads=8, head_dim=128)
    with CXLPool.create("anonymous:", layout=layout, capacity="64MiB", threads=1) as pool:
        mapping = Mapping(pool, "cuda")
        half = mapping.size // 2
        # The superblock stays what it is; the rest is scratch for once.
        mapping.tensor[half:] = torch.from_numpy(
            rng.integers(0, 256, mapping.size - half, dtype=np.uint8)
        )
        places = torch.from_numpy(rng.permutation((mapping.size - half) // size - 1)[:count])
        places = (places + 1) * size
        target = torch.full((count + 2, size), 0xA5, dtype=torch.uint8, device="cuda")
        target_at = target[1:-1].data_ptr() + torch.arange(count) * size
        source_at = mapping.device_address + half + places
        copier = Copier(mapping)
        done = copier.copy(source_at.to(tables), target_at.to(tables), size)
        done.wait()
        got = target.cpu()
        assert (got[0] == 0xA5).all()
        assert (got[-1] == 0xA5).all()
        for i in range(count):
            at = half + int(places[i])
            assert torch.equal(got[1 + i], mapping.tensor[at : at + size])
        back_at = mapping.pool.pages.memory()[0] + half + torch.arange(count) * size
        target.fill_(7)
        copier.copy(target_at, back_at, size, "to_host").synchronize()
        assert (mapping.tensor[half : half + count * size] == 7).all()
