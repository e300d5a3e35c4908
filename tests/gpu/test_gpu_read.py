"""Pages that a device reads out of a registered pool, and verifies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cxlkv import CXLPool, KVLayout, LayerGroup
from cxlkv.errors import ClosedError, StaleError, UnsupportedError
from cxlkv.gpu import streams
from cxlkv.gpu.read import PageList, PageReader
from cxlkv.sequence import Sequence

from ..support.damaging import damage_piece
from ..support.paged_engines import use_references

TOKENS, HEADS, DIM, PAGES = 4, 2, 8, 6
Rows = npt.NDArray[np.float32]
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", "interpreter", ON_GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cpu":
        use_references(monkeypatch)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture(params=["own", "prefix"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CXLPool]:
    """Layers with windows between others."""
    is_latent = request.param == "prefix"
    full = LayerGroup(
        layers=2,
        kv_heads=1 if is_latent else HEADS,
        head_dim=DIM,
        dtype="float32",
        values="key_prefix" if is_latent else "own",
    )
    groups = [full, replace(full, layers=1, window=9)]
    layout = KVLayout.of(groups, page_tokens=TOKENS, order=[0, 1, 0])
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="4MiB") as made:
        yield made


def filled(pool: CXLPool, seed: int) -> tuple[Sequence, list[Rows]]:
    """A sequence of PAGES and a token; with K of its pages in each layer, as they come."""
    sequence, made, keys = pool.sequence(), np.random.default_rng(seed), list[Rows]()
    shape, has_values = (pool.layout.kv_heads, DIM), pool.layout.values == "own"
    for count in (PAGES * TOKENS, 1):  # by which a window goes on
        for layer in range(pool.layout.layers):
            rows = [made.random((count, *shape), np.float32) for _ in range(2)]
            sequence.append(layer, rows[0], rows[1] if has_values else None)
            if count > 1:
                keys.append(rows[0].reshape(PAGES, TOKENS, *shape).swapaxes(1, 2))
    return sequence, keys


def read(reader: PageReader, listed: PageList, layer: int) -> list[torch.Tensor]:
    """All of its pages."""
    pool, some = reader.pool, slice(0, listed.pieces.shape[1])
    shape = (some.stop, pool.layout.kv_heads, TOKENS, DIM)
    device = listed.found.device
    kinds = 2 if pool.layout.values == "own" else 1
    out = [torch.full(shape, torch.nan, device=device) for _ in range(kinds)]
    free = streams.event(device)
    free.record(streams.current(device))
    reader.copy(listed, layer, some, out, free).wait()
    reader.check(listed, layer, some, out)
    return out


def test_pages_of_several_sequences_come_as_they_are(
    pool: CXLPool, device: torch.device, seed: int
) -> None:
    (one, keys), (two, others) = filled(pool, seed), filled(pool, seed + 1)
    spans = [(one, 1, 4), (two, 0, 6)]
    with PageReader(pool, device) as reader, reader.using():
        for layer in (0, 2):
            listed = reader.pages(layer, spans)
            found = read(reader, listed, layer)[0].cpu().numpy()
            right = np.concatenate([keys[layer][1:4], others[layer]])
            np.testing.assert_array_equal(found, right)
            assert not listed.found.any()


def test_pages_behind_a_window_are_zeros(pool: CXLPool, device: torch.device, seed: int) -> None:
    sequence, keys = filled(pool, seed)
    with PageReader(pool, device) as reader, reader.using():
        listed = reader.pages(1, [(sequence, 0, PAGES)])
        found = read(reader, listed, 1)[0].cpu().numpy()
        behind = listed.pieces[0] == 0
        assert behind.any()
        assert not behind.all()
        assert not found[behind].any()
        first = int(behind.argmin())
        np.testing.assert_array_equal(found[first:], keys[1][first:])
        assert not listed.found.any()


@pytest.mark.parametrize("layer", [0, 2])
def test_damage_is_told_by_page(pool: CXLPool, device: torch.device, seed: int, layer: int) -> None:
    """In each layer, and of the pages of that list alone."""
    sequence, _ = filled(pool, seed)
    places = sequence.places(layer)
    kind = "values" if pool.layout.values == "own" else "keys"
    damage_piece(pool, int(places.pages[3]), layer, kind)
    with PageReader(pool, device) as reader, reader.using():
        listed = reader.pages(layer, [(sequence, 1, 5)])
        for of in (0, 2):
            read(reader, listed, of)
        assert listed.found.ne(0).tolist() == [False, False, True, False]


def test_a_page_that_was_given_away_is_told(pool: CXLPool, device: torch.device, seed: int) -> None:
    (one, _), (two, _) = filled(pool, seed), filled(pool, seed + 1)
    with PageReader(pool, device) as reader, reader.using():
        listed = reader.pages(0, [(one, 0, 2), (two, 0, 2)])
        one.release()
        read(reader, listed, 0)
        assert listed.found.ne(0).tolist() == [True, True, False, False]


def test_more_pages_than_are_complete_are_refused(pool: CXLPool, seed: int) -> None:
    sequence, _ = filled(pool, seed)
    with (
        PageReader(pool, torch.device("cpu")) as reader,
        reader.using(),
        pytest.raises(StaleError, match="fewer"),
    ):
        reader.pages(0, [(sequence, 0, PAGES + 1)])


def test_a_pool_is_closed_when_nobody_reads(pool: CXLPool) -> None:
    """By another thread, as where a pool is lost."""
    reader = PageReader(pool, torch.device("cpu"))
    closing = threading.Thread(target=pool.close)
    with reader.using():
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join()
    with pytest.raises(ClosedError), reader.using():
        pass


def test_what_a_device_cannot_read_is_refused() -> None:
    group = LayerGroup(layers=1, kv_heads=2, head_dim=64)
    unlike = LayerGroup(layers=1, kv_heads=4, head_dim=64)
    for layout in (
        KVLayout(layers=1, kv_heads=2, head_dim=64, page_tokens=16, k_encoding="int8"),
        KVLayout.of([group, unlike], page_tokens=16),
    ):
        with (
            CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool,
            pytest.raises(UnsupportedError, match="a device reads rows"),
        ):
            PageReader(pool, torch.device("cpu"))
