"""A text from the pool is adopted by what the pool keeps of its pages; keys and values come, and
are checked, when they are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import CorruptError
from cxlkv.gpu import index
from cxlkv.gpu.decode import Decoder
from cxlkv.gpu.index import DeviceIndex
from cxlkv.kernels.copies import copy_fragments
from cxlkv.kernels.encode import encode
from cxlkv.kernels.reference_index import sketched
from cxlkv.layout import LayerGroup
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.pages import layer_places, places_of
from cxlkv.sequence import Sequence

from ..support.damaging import damage_piece
from .test_gpu_decode import (
    ATTEND_MAX,
    BY_DEVICE,
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    Model,
    Place,
    decoder_of,
    device,
    resident_of,
)

__all__ = ["device"]

Summaries = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
PAGES, RING = 40, 2
STORED = [place for place in BY_DEVICE if place["method"] != "mean_std"]
DIGEST, SKETCH = ({"index": "device", "method": method} for method in ("digest", "sketch"))


class Adopted:
    """A text that another process has published; the same for the same seed."""

    def __init__(
        self,
        path: Path,
        seed: int,
        layout: KVLayout | None = None,
        *,
        sketch: bool | None = None,
        checksum: bool = True,
    ):
        self.model = Model(seed, layout=layout, dtype="bfloat16")
        keys, layout = [bytes([i] * 16) for i in range(PAGES)], self.model.layout
        with CXLPool.create(
            path, layout=layout, capacity="4MiB", threads=1, sketch=sketch, checksum=checksum
        ) as pool:
            self.model.pool = pool
            sequence, self.kept = self.model.sequence(PAGES * PAGE)
            pool.publish(sequence, keys, PAGE)
        self.pool = self.model.pool = CXLPool.open(path, threads=1)
        self.hit = self.pool.match(keys)
        self.sequence = self.hit.sequence()

    def decoder(self, device: torch.device, place: Place, budget: Budget | None = None) -> Decoder:
        made = decoder_of(
            self.model,
            device,
            budget=budget or Budget(pages=6, sinks=1, recent=1),
            hot_pages=60,
            place=place,
        )
        self.model.rows = {made.add(self.sequence): list(self.kept)}
        return made

    def steps(self, decoder: Decoder, count: int) -> list[torch.Tensor]:
        torch.manual_seed(7)
        outs = []
        for _ in range(count):
            decoder.begin()
            outs += [out.clone().cpu() for out in self.model.layers(decoder)]
            decoder.end()
        return outs

    def stored(self, kind: str) -> Summaries:
        """[layers, pages, kv_heads, bytes] of the pool."""
        geometry, layout = self.pool.pages.geometry, self.model.layout
        memory = np.frombuffer(self.pool._region_view(), np.uint8)
        size = geometry[f"{kind}_piece_bytes"]
        rows = []
        for layer in range(layout.layers):
            at = places_of(
                geometry, layer_places(layout, geometry)[layer], self.sequence.places(layer).pages
            )
            offsets = at.digests if kind == "digest" else at.sketches
            assert offsets is not None
            found = memory[offsets[:, None] + np.arange(HEADS * size)]
            rows.append(found.reshape(len(offsets), HEADS, size))
        return np.stack(rows)

    def close(self) -> None:
        self.hit.release()
        self.pool.close()


@pytest.fixture
def text(tmp_path: Path, seed: int) -> Iterator[Adopted]:
    made = Adopted(tmp_path / "kv.pool", seed)
    yield made
    made.close()


def index_of(decoder: Decoder) -> DeviceIndex:
    found = resident_of(decoder).index
    assert found is not None
    return found


def summaries(decoder: Decoder) -> Summaries:
    """[layers, pages, kv_heads, bytes] of the first request."""
    own = index_of(decoder)
    (part,) = range(len(own._layers))
    slots = own._slots[part, 0]
    return own.summaries[:, slots[slots >= 0].long()].cpu().numpy()


def check_sketches(one: Summaries, other: Summaries) -> None:
    """Equal but for channels on a border between two codes, and sums in another order."""
    (codes, scales), (right_codes, right_scales) = (
        sketched(torch.from_numpy(each), PAGE, DIM) for each in (one, other)
    )
    assert (codes != right_codes).float().mean() < 0.01
    torch.testing.assert_close(scales, right_scales, rtol=0.02, atol=0.0)


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that the index has gathered, and pages of a layer that the host has fetched."""
    found = {"gathered": 0, "fetched": 0}
    copy, fetch = copy_fragments, Sequence.fetch

    def counted(sources: torch.Tensor, targets: torch.Tensor, size: int) -> None:
        found["gathered"] += sources.numel() * size
        copy(sources, targets, size)

    def noted(
        self: Sequence, layer: int, picked: Selection, *rest: object, **more: object
    ) -> object:
        found["fetched"] += picked.pages.shape[-1]
        return fetch(self, layer, picked, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(index, "copy_fragments", counted)
    monkeypatch.setattr(Sequence, "fetch", noted)
    return found


def in_the_old_way(patch: pytest.MonkeyPatch) -> None:
    """Each page is fetched to be summarised."""
    patch.setattr(index, "_kept", lambda *asked: None)
    patch.setattr(DeviceIndex, "_in_ring", lambda *asked: {})


@pytest.mark.parametrize("place", STORED)
def test_summaries_alone_cross(
    device: torch.device, text: Adopted, place: Place, crossing: dict[str, int]
) -> None:
    """With their checksums, four a head; the ring's pages were fetched when it was loaded."""
    with text.decoder(device, place) as decoder:
        assert crossing == {"gathered": 0, "fetched": RING * LAYERS}
        decoder.begin()
        piece = index_of(decoder).form.bytes + 16
        older = PAGES - RING
        assert crossing["gathered"] == older * LAYERS * HEADS * piece
        assert crossing["fetched"] == RING * LAYERS
        decoder.abandon()
        wanted = text.stored(place["method"])[:, :older]
        np.testing.assert_array_equal(summaries(decoder)[:, :older], wanted)


@pytest.mark.parametrize("place", BY_DEVICE)
def test_pages_and_outputs_are_those_of_the_old_way(
    device: torch.device, tmp_path: Path, seed: int, place: Place
) -> None:
    """To the bit where summaries are: instruction sets have sketches of their own."""
    found = []
    for old in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if old:
                in_the_old_way(patch)
            text = Adopted(tmp_path / f"{old}.pool", seed)
            with text.decoder(device, place) as decoder:
                outs = text.steps(decoder, 9)
                found.append((summaries(decoder), outs))
            text.close()
    (one, wanted), (other, outs) = found
    if place["method"] == "sketch":
        check_sketches(one, other)
    else:
        np.testing.assert_array_equal(one, other)
    if np.array_equal(one, other):
        assert all(a.equal(b) for a, b in zip(wanted, outs, strict=True))


@pytest.mark.parametrize("place", BY_DEVICE)
def test_a_step_s_own_pages_are_summarised_in_the_ring(
    device: torch.device, text: Adopted, place: Place, crossing: dict[str, int]
) -> None:
    with text.decoder(device, place) as decoder:
        text.steps(decoder, 1)
        before = dict(crossing)
        text.steps(decoder, 3 * PAGE)
        assert crossing == before
        found = summaries(decoder)
        assert found.shape[1] == PAGES + 3
        if place["method"] == "digest":
            np.testing.assert_array_equal(found, text.stored("digest"))
        if place["method"] == "sketch":
            check_sketches(found, text.stored("sketch"))


def test_pages_of_all_requests_and_layers_are_summarised_at_once(
    device: torch.device, text: Adopted, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    with decoder_of(
        text.model, device, budget=Budget(pages=4), requests=3, hot_pages=40, place=DIGEST
    ) as decoder:
        for tokens in (43, 31, 7):
            decoder.add(text.model.sequence(tokens)[0])
        decoder.begin()
        text.model.layers(decoder, requests=3)
        decoder.end()

        def noted(k: torch.Tensor, *rest: object, **more: object) -> object:
            calls.append(len(k))
            return encode(k, *rest, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(index, "encode", noted)
        decoder.begin()  # each has filled a page
        decoder.abandon()
        assert calls == [3 * LAYERS * PAGE]


def test_layers_in_parts_and_windows(device: torch.device, tmp_path: Path, seed: int) -> None:
    """A ring has no pages that lie behind a window."""
    full = LayerGroup(layers=3, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16")
    near = LayerGroup(layers=1, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", window=6)
    found = []
    for old in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if old:
                in_the_old_way(patch)
            model = Model(seed, layout=KVLayout.of([near, full], page_tokens=PAGE))
            with decoder_of(
                model, device, budget=Budget(pages=6), recent_pages=5, hot_pages=40, place=DIGEST
            ) as decoder:
                decoder.add(model.sequence(90)[0])
                for _ in range(6):
                    decoder.begin()
                    found += model.layers(decoder, *range(4))
                    decoder.end()
            model.pool.close()
    half = len(found) // 2
    assert all(a.equal(b) for a, b in zip(found[:half], found[half:], strict=True))


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("place", BY_DEVICE)
def test_a_damaged_piece_is_an_error_of_the_step_that_fetches_it(
    device: torch.device, text: Adopted, place: Place, kind: str
) -> None:
    pages = [int(text.sequence.places(1).pages[page]) for page in (0, 9)]
    damage_piece(text.pool, pages[0], 1, kind)
    with text.decoder(device, place) as decoder:
        if place["method"] == "mean_std":  # whose summaries are made of fetched keys
            with pytest.raises(CorruptError, match="is wrong"):
                decoder.begin()
            return
        hot = resident_of(decoder).hot
        assert hot is not None
        for _ in range(2):  # nothing of it stays that would be a hit
            decoder.begin()
            text.model.layers(decoder)
            named = f"page 0 of request 0, layer 1, kv head 0: the CRC of its {kind[0].upper()}"
            with pytest.raises(CorruptError, match=named):
                decoder.end()
            assert len(text.sequence) == PAGES * PAGE
            held = hot.residents(1, resident_of(decoder)._tables.tags[0]).pages
            assert int((held >= 0).sum()) == 0
        damage_piece(text.pool, pages[0], 1, kind)  # as it was
        everything = Budget(pages=PAGES + 2)
    with text.decoder(device, place, everything) as decoder:
        assert text.model.step(decoder, None) < ATTEND_MAX[text.model.dtype]


def test_a_damaged_piece_that_a_hint_brought_in_vain_is_none(
    device: torch.device, text: Adopted
) -> None:
    page = int(text.sequence.places(1).pages[0])
    damage_piece(text.pool, page, 1)
    with text.decoder(device, DIGEST, Budget(pages=2, sinks=0, recent=1)) as decoder:
        resident = resident_of(decoder)
        decoder.begin()
        text.model.layers(decoder, 0)
        lists = torch.full_like(resident._hint.known, -1)
        lists[..., 0] = 0
        resident._hint.known.copy_(lists)
        resident._fetch(1, resident._hint)
        assert resident._hint.found[0] > 0
        chosen = resident._choice.known
        choose = resident._choose

        def other(layer: int, q: torch.Tensor, lane: object) -> None:
            choose(layer, q, lane)  # type: ignore[arg-type]
            chosen.clamp_(min=1)

        resident._choose = other  # type: ignore[method-assign]
        text.model.layers(decoder, 1)
        decoder.end()


@pytest.mark.parametrize("place", STORED)
def test_a_damaged_summary_is_refused(device: torch.device, text: Adopted, place: Place) -> None:
    geometry = text.pool.pages.geometry
    second = layer_places(text.model.layout, geometry)[1]
    at = places_of(geometry, second, text.sequence.places(1).pages)
    first = at.digests if place["method"] == "digest" else at.sketches
    assert first is not None
    memory = np.frombuffer(text.pool._region_view(), np.uint8)
    address = torch.frombuffer(memory, dtype=torch.uint8)  # the pool's own memory
    with text.decoder(device, place) as decoder:
        address[int(first[3]) + 11] ^= 4
        for _ in range(2):
            with pytest.raises(
                CorruptError, match=f"layer 1, kv head 0: the CRC of its {place['method']}"
            ):
                decoder.begin()
            own = index_of(decoder)
            assert not own._held
            assert sorted(own._free[0]) == list(range(64))
        address[int(first[3]) + 11] ^= 4
        text.steps(decoder, 2)


@pytest.mark.parametrize("encoding", ["int8", "int4", "int8,int4"])
def test_in_encoded_pools_sketches_are_the_pool_s(
    device: torch.device, tmp_path: Path, seed: int, encoding: str, crossing: dict[str, int]
) -> None:
    """Its digests have another form: these are made of decoded keys, as before."""
    layout = KVLayout(
        layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, dtype="bfloat16"
    ).encoded(encoding)
    text = Adopted(tmp_path / "kv.pool", seed, layout, sketch=True)
    with text.decoder(device, SKETCH) as decoder:
        text.steps(decoder, 2 * PAGE + 1)
        np.testing.assert_array_equal(summaries(decoder), text.stored("sketch"))
        assert crossing["fetched"] == RING * LAYERS
    with text.decoder(device, DIGEST) as decoder:
        text.steps(decoder, 1)
        assert crossing["fetched"] == (RING + RING + PAGES + 2) * LAYERS
    page = int(text.sequence.places(0).pages[0])
    damage_piece(text.pool, page, 0, "keys")
    with text.decoder(device, SKETCH) as decoder:
        decoder.begin()
        text.model.layers(decoder)
        with pytest.raises(CorruptError, match=r"page 0 .*layer 0, kv head 0: the CRC of its K"):
            decoder.end()
    text.close()


def test_a_pool_without_checksums(device: torch.device, tmp_path: Path, seed: int) -> None:
    text = Adopted(tmp_path / "kv.pool", seed, checksum=False)
    with text.decoder(device, SKETCH) as decoder:
        text.steps(decoder, 5)
    text.close()
