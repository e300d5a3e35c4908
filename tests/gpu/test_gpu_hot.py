"""The hot buffer as a decode step uses it: stories with literal page numbers and real bytes."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv.errors import BadArgumentError, MemoryShortError, UnsupportedError
from cxlkv.gpu.hot import HotBuffer, SlotCounts, slots_of_heads
from cxlkv.kernels.slots import Assigned

from ..support.lengths import matrix

PAGE_TOKENS, DIM, VALUE_DIM = 3, 4, 6


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU in the interpreter or, where there is a GPU, by the reference; and the GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def make(
    device: torch.device | str,
    *,
    requests: int = 1,
    layers: int = 1,
    kv_heads: int = 1,
    slots: SlotCounts = 4,
    pages_max: int = 10,
    page_tokens: int = PAGE_TOKENS,
    value_head_dim: int | None = VALUE_DIM,
    dtype: torch.dtype = torch.float32,
) -> HotBuffer:
    return HotBuffer(
        requests=requests,
        layers=layers,
        kv_heads=kv_heads,
        slots=slots,
        pages_max=pages_max,
        page_tokens=page_tokens,
        head_dim=DIM,
        value_head_dim=value_head_dim,
        dtype=dtype,
        device=device,
    )


def selected(pages: list[int], hot: HotBuffer) -> torch.Tensor:
    """The same list for each head of each request."""
    row = torch.tensor(pages, dtype=torch.int32, device=hot.device)
    return row.expand(hot.requests, hot.kv_heads, len(pages)).contiguous()


def no_tags(hot: HotBuffer) -> torch.Tensor:
    return torch.zeros((hot.requests, hot.pages_max), dtype=torch.int64, device=hot.device)


def piece_of(page: int, request: int, head: int) -> float:
    """What a page's piece is full of: its name."""
    return 1000.0 * request + 100.0 * head + page


def fetch(hot: HotBuffer, layer: int, found: Assigned) -> None:
    """Brings what was missed, to the addresses given, and only there."""
    for (request, head, i), page in np.ndenumerate(found.miss_pages.cpu().numpy()):
        for part, at in enumerate(found.miss_targets):
            if at is None:
                continue
            target = int(at[request, head, i])
            assert (target != 0) == (page >= 0)
            if target:
                matches = [
                    piece
                    for piece in hot.pieces(layer, request, head)[part]
                    if piece.data_ptr() == target
                ]
                assert len(matches) == 1, "the address is that of a slot of this head"
                matches[0].fill_(piece_of(int(page), request, head))


def check_bytes(hot: HotBuffer, layer: int, tags: torch.Tensor) -> None:
    """Every slot that says it holds a page has that page's bytes at its address."""
    held = hot.residents(layer, tags)
    for (request, head, slot), page in np.ndenumerate(held.pages.cpu().numpy()):
        if page < 0:
            continue
        for part, at in enumerate((held.keys_at, held.values_at)):
            if at is not None:
                piece = hot.pieces(layer, request, head)[part][slot]
                assert int(at[request, head, slot]) == piece.data_ptr()
                assert bool((piece == piece_of(int(page), request, head)).all())


def test_steady_pages_stay(device: torch.device) -> None:
    hot = make(device)
    tags = no_tags(hot)
    first = hot.assign(0, selected([1, 2], hot), tags)
    assert first.missed.tolist() == [[[1, 1]]]
    assert first.slot.tolist() == [[[0, 1]]]
    fetch(hot, 0, first)
    second = hot.assign(0, selected([2, 3], hot), tags)
    assert second.missed.tolist() == [[[0, 1]]]
    assert second.slot.tolist() == [[[1, 2]]]
    assert second.keys_at[0, 0, 0] == first.keys_at[0, 0, 1]
    fetch(hot, 0, second)
    check_bytes(hot, 0, tags)
    assert hot.residents(0, tags).pages.tolist() == [[[1, 2, 3, -1]]]
    # 4 and 5: one into the free slot, one over page 1, which was used longest ago.
    third = hot.assign(0, selected([4, 5], hot), tags)
    assert third.slot.tolist() == [[[3, 0]]]
    fetch(hot, 0, third)
    check_bytes(hot, 0, tags)
    assert hot.counters() == (1, 5, 0)


def test_layers_and_requests_are_apart_and_a_request_is_forgotten_in_all(
    device: torch.device,
) -> None:
    hot = make(device, requests=2, layers=3, kv_heads=2, slots=[4, 2, 3])
    tags = no_tags(hot)
    for layer, pages in enumerate(([1, 2], [3, 4], [5, 6])):
        found = hot.assign(layer, selected(pages, hot), tags)
        assert found.missed.all()
        fetch(hot, layer, found)
    hot.forget(0)
    for layer, pages in enumerate(([1, 2, -1, -1], [3, 4], [5, 6, -1])):
        held = hot.residents(layer, tags).pages
        assert held[0].tolist() == [[-1] * len(pages)] * 2
        assert held[1].tolist() == [pages] * 2
        check_bytes(hot, layer, tags)
    found = hot.assign(1, selected([4, 3], hot), tags)
    assert found.missed.tolist() == [[[1, 1]] * 2, [[0, 0]] * 2]


def test_a_page_that_is_written_anew_is_fetched_anew(device: torch.device) -> None:
    hot = make(device, requests=2)
    tags = no_tags(hot)
    fetch(hot, 0, hot.assign(0, selected([1, 2, 3], hot), tags))
    tags[1, 2:] = 1  # request 1 was truncated to two pages; others have their numbers now
    assert hot.residents(0, tags).pages.tolist() == [[[1, 2, 3, -1]], [[1, -1, -1, -1]]]
    found = hot.assign(0, selected([1, 2], hot), tags)
    assert found.missed.tolist() == [[[0, 0]], [[0, 1]]]


def test_a_fetch_that_fails_leaves_no_page_behind(device: torch.device) -> None:
    """A device flag says that nothing came; the next step misses the same pages again."""
    hot = make(device)
    tags = no_tags(hot)
    fetch(hot, 0, hot.assign(0, selected([1, 2], hot), tags))
    found = hot.assign(0, selected([2, 7], hot), tags)
    flag = torch.ones(1, dtype=torch.int32, device=device)
    hot.invalidate(0, found, flag)
    assert hot.residents(0, tags).pages.tolist() == [[[1, 2, -1, -1]]]
    check_bytes(hot, 0, tags)
    again = hot.assign(0, selected([2, 7], hot), tags)
    assert again.missed.tolist() == [[[0, 1]]]
    hot.invalidate(0, again)
    assert hot.assign(0, selected([2, 7], hot), tags).missed.tolist() == [[[0, 1]]]


@matrix(dtype=[torch.float32, torch.float16, torch.bfloat16], value_head_dim=[VALUE_DIM, None])
def test_a_budget_for_each_layer_and_head(
    device: torch.device,
    dtype: torch.dtype,
    value_head_dim: int | None,
    rng: np.random.Generator,
) -> None:
    """Random steps; each head uses its own slots only, at addresses of its own."""
    hot = make(
        device,
        requests=2,
        layers=2,
        kv_heads=2,
        slots=[[5, 3], [4, 7]],
        value_head_dim=value_head_dim,
        dtype=dtype,
    )
    tags = no_tags(hot)
    for _ in range(4):
        for layer in range(2):
            pages = np.stack([rng.choice(10, 3, replace=False) for _ in range(4)])
            given = torch.from_numpy(pages.reshape(2, 2, 3)).to(device, torch.int32)
            found = hot.assign(layer, given, tags)
            assert (found.values_at is None) == (value_head_dim is None)
            fetch(hot, layer, found)
            check_bytes(hot, layer, tags)
    for layer, limits in enumerate(hot.limits):
        at = hot.residents(layer, tags).keys_at
        assert at.shape == (2, 2, max(limits))
        given_away = at[at != 0]
        assert len(given_away) == len(set(given_away.tolist())) == 2 * sum(limits)
        assert not (at % 16).any()
        for head, limit in enumerate(limits):
            assert not at[:, head, limit:].any()
    assert hot.counters().hits > 0


def test_bytes_counts_all_tensors(device: torch.device) -> None:
    """Pieces of 3 * 4 * 2 = 24 and 3 * 6 * 2 = 36 bytes begin at multiples of 16."""
    hot = make(device, requests=2, layers=2, slots=[4, 5], dtype=torch.bfloat16)
    pieces = 2 * (4 + 5) * (32 + 48)
    a_slot = 4 + 8 + 4 + 4 + 4 + 8 + 8
    tables = 2 * (4 + 5) * a_slot + 2 * 2 * (10 * 2 + 4) + 2 * 4
    assert hot.bytes == pieces + tables + 6 * 2 * 2 * 8
    keys, values = hot.pieces(1, 1, 0)
    assert keys.shape == (5, PAGE_TOKENS, DIM)
    assert values.shape == (5, PAGE_TOKENS, VALUE_DIM)
    assert keys[1].data_ptr() - keys[0].data_ptr() == 32
    keys.fill_(7)
    word = ctypes.c_uint16
    if device.type == "cpu":
        at = int(hot.residents(1, no_tags(hot)).keys_at[1, 0, 4])
        assert word.from_address(at).value == 0x40E0  # 7.0 as bfloat16


def test_outputs_are_used_again(device: torch.device) -> None:
    hot = make(device, kv_heads=2, slots=[[4, 3]])
    tags, out = no_tags(hot), hot.outputs(3)
    assert hot.assign(0, selected([1, 2, 3], hot), tags, out) is out
    assert out.missed.all()
    hot.assign(0, selected([3, -1, 2], hot), tags, out)
    assert out.slot.tolist() == [[[2, -1, 1]] * 2]
    held = torch.empty((1, 2, 4), dtype=torch.int32, device=device)
    assert hot.residents(0, tags, held).pages is held
    for k in (0, 4):
        with pytest.raises(BadArgumentError, match="a head has 3 slots"):
            hot.outputs(k)


def test_arguments_that_cannot_be() -> None:
    wrong: list[SlotCounts] = [0, -1, 2**15, [4], [4] * 3, [[4, 4], [4]], [[4, 4], [4, 0]]]
    for slots in wrong:
        with pytest.raises(BadArgumentError, match="slots="):
            slots_of_heads(slots, layers=2, kv_heads=2)
    calls: dict[str, Callable[[], HotBuffer]] = {
        "requests": lambda: make("cpu", requests=0),
        "layers": lambda: make("cpu", layers=0),
        "kv_heads": lambda: make("cpu", kv_heads=0),
        "pages_max": lambda: make("cpu", pages_max=0),
        "page_tokens": lambda: make("cpu", page_tokens=0),
        "value_head_dim": lambda: make("cpu", value_head_dim=0),
    }
    for name, call in calls.items():
        with pytest.raises(BadArgumentError, match=f"{name} is 0"):
            call()
    hot = make("cpu")
    tags = no_tags(hot)
    with pytest.raises(BadArgumentError, match="a selection of 5 pages a head"):
        hot.assign(0, selected([1, 2, 3, 4, 5], hot), tags)
    for layer in (-1, 1):
        with pytest.raises(BadArgumentError, match=f"layer {layer}: there are 1"):
            hot.residents(layer, tags)
    for request in (-1, 1):
        with pytest.raises(BadArgumentError, match=f"request {request}: there are 1"):
            hot.forget(request)
    with pytest.raises(UnsupportedError, match="the hot buffer on meta"):
        make("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match=r"the hot buffer on cuda: .* cpu only"):
        make("cuda")


def test_too_little_memory_is_said_before_any_is_taken(device: torch.device) -> None:
    with pytest.raises(MemoryShortError, match=r"TiB.*wanted|wants .* TiB, cuda.* GiB free"):
        make(device, requests=2**10, slots=2**15 - 1, page_tokens=2**16, layers=64)


@pytest.fixture
def little_room() -> Iterator[int]:
    """A limit on this process's addresses that leaves 256 MiB."""
    gc.collect()  # a pool of an earlier test would leave its room later
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    room_bytes = 256 << 20
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room_bytes, before[1]))
    yield room_bytes
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("pages_max", [10, 96 << 20])
def test_an_allocation_that_fails_half_way(little_room: int, pages_max: int) -> None:
    """The machine has the memory, this process may not have it: what was taken is given back.

    Pieces take 3/4 of the room. A second layer has none left, or the tables of many pages.
    """
    layers = 2 if pages_max == 10 else 1
    tokens = little_room * 3 // 4 // (4 * (DIM + VALUE_DIM) * 4)

    def too_much() -> HotBuffer:
        return make("cpu", layers=layers, page_tokens=tokens, pages_max=pages_max)

    with pytest.raises(MemoryShortError, match=r"wants 384 MiB, it is not to be had") as raised:
        too_much()
    # While the error is still at hand, with all frames that it names, the room is free.
    assert raised.tb is not None
    torch.empty(little_room * 3 // 4, dtype=torch.uint8)
