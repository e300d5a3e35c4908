"""Steps of some of a decoder's requests, and errors that are of one request alone."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import (
    BadArgumentError,
    CorruptError,
    CXLKVError,
    GpuError,
    PoolFullError,
    RegistrationError,
    ReleasedError,
    StaleError,
    WorkerError,
)
from cxlkv.gpu.decode import Decoder
from cxlkv.kernels import runtime
from cxlkv.layout import LayerGroup
from cxlkv.ndp.engine import Budget

from .test_gpu_decode import (
    ATTEND_MAX,
    BY_DEVICE,
    DIM,
    GROUP,
    HEADS,
    HOST,
    LAYERS,
    ON_CPU,
    PAGE,
    Model,
    Place,
    Seen,
    decoder_of,
    resident_of,
)
from .test_gpu_decode import by_words as by_words  # fixtures
from .test_gpu_decode import device as device
from .test_gpu_decode import seen as seen
from .test_gpu_encodings import KeptModel

ROWS = 3
Ways = dict[str, object]
IN_PLACE: Ways = {"hot_pages": 0}
PARTIAL: Ways = {"hot_pages": 24, "place": {"refused": ""}}
"""Partial results cross the link: the driver refuses the pool."""
WAYS = [IN_PLACE, PARTIAL, *({"hot_pages": 24, "place": each} for each in (HOST, *BY_DEVICE))]
Between = Callable[[int], object]


class Make(Protocol):
    def __call__(self, model: Model, way: Ways, **more: object) -> Decoder: ...


@pytest.fixture
def made(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A decoder by one of WAYS, of three places and all pages unless said."""
    decoders = []

    def make(model: Model, way: Ways, **more: object) -> Decoder:
        def refuse(*_: object) -> None:
            raise RegistrationError("no pinning today")

        way = dict(way)
        if way.get("place") == {"refused": ""}:
            monkeypatch.setattr("cxlkv.gpu.resident.Mapping", refuse)
            del way["place"]
        on = device if way["hot_pages"] else "cpu"
        sizes = {"requests": 3, "budget": Budget(pages=24), "pages_max": 24}
        decoders.append(decoder_of(model, on, **{**sizes, **way, **more}))  # type: ignore[arg-type]
        return decoders[-1]

    yield make
    for decoder in decoders:
        decoder.close()


def step(
    model: Model,
    decoder: Decoder,
    counts: dict[int, int],
    *,
    between: Between | None = None,
    hints: bool = False,
    seen: Seen | None = None,
) -> dict[int, CXLKVError]:
    """A step of so many rows of these requests; all other rows are NaN. Outputs and sequences of
    all are right, but for the outputs of those that end_each() returns."""
    layout, lead = model.layout, (decoder._requests, decoder._rows)
    taken = torch.zeros(lead, dtype=torch.bool)
    for request, count in counts.items():
        taken[request, :count] = True

    def draw(*shape: int) -> torch.Tensor:
        rows = torch.where(taken[..., None, None], model.draw(*lead, *shape), torch.nan)
        return rows.to(decoder.device)

    decoder.begin(counts)
    drawn, outs = [], []
    for layer in range(layout.layers):
        if between is not None:
            between(layer)
        if hints and layer + 1 < layout.layers:
            decoder.hint(layer + 1, draw(HEADS * GROUP, layout.head_dim))
        q, k = draw(HEADS * GROUP, layout.head_dim), draw(HEADS, layout.head_dim)
        v = draw(HEADS, layout.value_head_dim) if layout.values == "own" else None
        outs.append(decoder.layer(layer, q, k, v))
        drawn.append(
            [q.cpu(), k.cpu(), (k if v is None else v)[..., : layout.value_head_dim].cpu()]
        )
    errors = decoder.end_each()
    for layer, (out, (q, k, v)) in enumerate(zip(outs, drawn, strict=True)):
        wrong = torch.tensor([request in errors for request in range(lead[0])])
        assert not out.cpu()[~taken & ~wrong[:, None]].any()
        for request in counts.keys() - errors.keys():
            count = counts[request]
            kept = model.rows[request][layer]
            new = k[request, :count], v[request, :count]
            kept = torch.cat([kept[0], new[0]]), torch.cat([kept[1], new[1]])
            model.rows[request][layer] = kept
            pages = None if seen is None else seen[layer][request]
            wanted = model.plain(q[request, :count], *kept, pages, layout.windows[layer])
            found = out[request, :count].cpu().double().numpy()
            assert np.abs(found - wanted).max() < ATTEND_MAX[model.dtype]
    check_sequences(model, decoder, counts.keys() - errors.keys())
    return errors


def check_sequences(model: Model, decoder: Decoder, whole: set[int]) -> None:
    """They are as long as the model's rows; and hold these, where they are whole."""
    layout = model.layout
    for request, kept in model.rows.items():
        sequence = decoder._of(request)
        for layer, (k, v) in enumerate(kept):
            assert sequence.tokens(layer) == len(k)
            if layout.windows[layer] is None and layout.k_encoding == "none" and request in whole:
                for rows, pages in zip((k, v), sequence.fetch(layer), strict=True):
                    held = torch.from_numpy(np.asarray(pages, np.float32)).flatten(1, 2)
                    assert torch.equal(held.transpose(0, 1)[: len(k)], rows.float())


def life(
    model: Model, decoder: Decoder, seed: int, steps: int, *, longest: int, **more: object
) -> None:
    """Requests come, go and are cut back; random ones of them take part in each step."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        chance, there = random.random(), sorted(model.rows)
        lengths = {request: len(model.rows[request][0][0]) for request in there}
        if len(there) < decoder._requests and (chance < 0.3 or not there):
            model.add(decoder, int(random.integers(0, longest // 2)))
        elif chance < 0.4:
            request = int(random.choice(there))
            decoder.remove(request).release()
            del model.rows[request]
        elif chance < 0.5 and set(model.layout.windows) == {None}:
            request = int(random.choice(there))
            left = int(random.integers(max(0, lengths[request] - 9), lengths[request] + 1))
            decoder.truncate(request, left)
            model.rows[request] = [(k[:left], v[:left]) for k, v in model.rows[request]]
        fits = [one for one in sorted(model.rows) if len(model.rows[one][0][0]) < longest]
        counts = {
            one: int(random.integers(1, decoder._rows + 1)) for one in fits if random.random() < 0.6
        }
        found = more.get("seen")
        if isinstance(found, Seen):
            found._found.clear()
        assert step(model, decoder, counts, **more) == {}  # type: ignore[arg-type]


@pytest.fixture
def model(seed: int) -> Model:
    return Model(seed)


@pytest.mark.parametrize("way", WAYS)
def test_random_requests_take_part(made: Make, model: Model, seed: int, way: Ways) -> None:
    life(model, made(model, way, rows=ROWS), seed, 40, longest=90)
    assert model.pool.admin.check()["clean"]


@pytest.mark.parametrize("way", WAYS[2:])
def test_random_requests_with_few_pages_and_hints(
    made: Make,
    model: Model,
    seed: int,
    seen: list[tuple[int, torch.Tensor]],
    way: Ways,
) -> None:
    decoder = made(
        model, way, rows=ROWS, budget=Budget(pages=4, sinks=1, recent=1), hot_pages=[4, 6]
    )
    life(model, decoder, seed, 40, longest=90, hints=True, seen=Seen(seen))


@pytest.mark.parametrize("way", [PARTIAL, WAYS[2], WAYS[3]])
def test_random_requests_with_windows_and_with_encodings(made: Make, seed: int, way: Ways) -> None:
    full = LayerGroup(layers=1, kv_heads=HEADS, head_dim=DIM, dtype="float32")
    layout = KVLayout.of([replace(full, window=9), full], page_tokens=PAGE)
    model = Model(seed, layout=layout)
    life(model, made(model, way, rows=ROWS), seed, 20, longest=90)
    layout = KVLayout(layers=2, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, dtype="bfloat16")
    encoded = KeptModel(seed, layout=layout.encoded("int8"))
    life(encoded, made(encoded, way, rows=ROWS), seed, 20, longest=90)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="the kernels are compiled here, for the GPU")
@pytest.mark.parametrize("place", [HOST, BY_DEVICE[-1]])
def test_in_the_interpreter_a_request_takes_part(seed: int, place: Place) -> None:
    model = Model(seed, dtype="bfloat16")
    sizes = {"requests": 2, "rows": 2, "pages_max": 8, "hot_pages": 8}
    with decoder_of(model, "cpu", budget=Budget(pages=8), **sizes, place=place) as decoder:
        model.add(decoder, 23, 9)
        for counts in ({1: 1}, {0: 1, 1: 2}):
            assert step(model, decoder, counts) == {}


@pytest.mark.parametrize("way", WAYS)
def test_nobody_takes_part(made: Make, model: Model, way: Ways) -> None:
    decoder = made(model, way)
    assert step(model, decoder, {}, hints=True) == {}
    model.add(decoder, 50, 7)
    for counts in ({}, {0: 1, 1: 1}, {}, {1: 1}):
        assert step(model, decoder, counts, hints=True) == {}
    assert decoder._lists == 24


def test_fewer_rows_choose_as_many_pages(made: Make, model: Model) -> None:
    """As in a decoder of so many rows, by a share of the pages that are there with them."""
    plans = []
    for rows in (1, ROWS):
        decoder = made(model, WAYS[-1], rows=rows, requests=1, budget=Budget(share=0.5))
        for tokens in range(40, 56):
            request = decoder.add(model.sequence(tokens)[0])
            decoder.begin({request: 1})
            plans.append(resident_of(decoder)._plan_host.tolist())
            decoder.abandon()
            decoder.remove(request).release()
    assert plans[:16] == plans[16:]


def test_counts_are_checked(made: Make, model: Model) -> None:
    decoder = made(model, IN_PLACE, rows=2)
    model.add(decoder, 5, 6)
    for counts, match in (
        ({2: 1}, "no request 2"),
        ({0: 1, "a": 1}, "no request 'a'"),
        ({0: 0}, "request 0: 0 rows, .* 1 to 2"),
        ({0: 1, 1: 3}, "request 1: 3 rows"),
        ({0: True}, "True rows"),
    ):
        with pytest.raises(BadArgumentError, match=match):
            decoder.begin(counts)  # type: ignore[arg-type]
    assert step(model, decoder, {1: 2}) == {}


# ---- what goes wrong for one request ----


def goes_on(model: Model, decoder: Decoder, *without: int) -> None:
    """All others are right in the next steps."""
    counts = {request: 1 for request in model.rows if request not in without}
    for _ in range(3):
        assert step(model, decoder, counts, hints=True) == {}


def memory(pool: CXLPool, at: int) -> ctypes.c_uint8:
    return ctypes.c_uint8.from_address(_core.pool_memory(pool._handle)[0] + at)


@pytest.mark.parametrize("way", WAYS[2:])
def test_a_piece_that_is_damaged_on_its_way(made: Make, model: Model, way: Ways) -> None:
    decoder = made(model, way)
    model.add(decoder, 41, 40, 43)
    bytes_of = [memory(model.pool, int(decoder._of(i).places(1).values[2])) for i in (1, 2)]
    for byte in bytes_of:
        byte.value ^= 1
    errors = step(model, decoder, {0: 1, 1: 1})
    assert errors.keys() == {1}
    assert isinstance(errors[1], CorruptError)
    by_host = way["place"] == BY_DEVICE[1]  # which fetches pages to summarise their keys
    named = "page 18" if by_host else "page 2 of request 1"
    assert f"{named}, layer 1, kv head 0: the CRC of its V" in str(errors[1])
    goes_on(model, decoder, 1, 2)
    errors = step(model, decoder, {0: 1, 1: 1, 2: 1})
    assert errors.keys() == {1, 2}
    assert by_host or "of request 2, layer 1, kv head 0" in str(errors[2])
    for byte in bytes_of:
        byte.value ^= 1
    goes_on(model, decoder)


@pytest.mark.parametrize("way", WAYS[2:])
def test_a_page_that_is_freed_on_its_way(made: Make, model: Model, way: Ways) -> None:
    decoder = made(model, way)
    model.add(decoder, 41, 40, 43)
    generation = resident_of(decoder)._tables.rows[0].generations[2, 0]
    first = iter([True])
    errors = step(
        model, decoder, {0: 1, 1: 1, 2: 1}, between=lambda _: generation.add_(next(first, False))
    )
    assert errors.keys() == {2}
    assert isinstance(errors[2], StaleError)
    generation -= 1
    goes_on(model, decoder)


@pytest.mark.parametrize("way", WAYS)
def test_a_page_that_the_host_finds_damaged(
    made: Make, model: Model, tmp_path: Path, way: Ways
) -> None:
    """It has not verified these before: they are of another process."""
    path, keys = tmp_path / "kv.pool", [bytes([i] * 16) for i in range(20)]
    with CXLPool.create(path, layout=model.layout, capacity="4MiB", threads=1) as pool:
        model.pool = pool
        kept = []
        for first in (0, 10):
            sequence, rows = model.sequence(40)
            kept.append(rows)
            pool.publish(sequence, keys[first : first + 10], PAGE)
    with CXLPool.open(path, threads=1) as pool:
        model.pool = pool
        hits = [pool.match(keys[first : first + 10]) for first in (0, 10)]
        sequences = [hit.sequence() for hit in hits]
        memory(pool, int(sequences[0].places(1).values[1])).value ^= 1
        with made(model, way) as decoder:
            for sequence, rows in zip(sequences, kept, strict=True):
                model.rows[decoder.add(sequence)] = rows
            errors = step(model, decoder, {0: 1, 1: 1})
            assert errors.keys() == {0}
            assert isinstance(errors[0], CorruptError)
            goes_on(model, decoder, 0)
        for hit in hits:
            hit.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_full_pool(made: Make, model: Model, way: Ways) -> None:
    """The first request and the last complete a page in the step; there is one left."""
    decoder = made(model, way, rows=2)
    model.add(decoder, 11, 9, 10)
    free = model.pool.stats()["pages_free"]
    filler = model.pool.pages.alloc(free - 1)
    errors = step(model, decoder, {0: 1, 1: 1, 2: 2})
    assert errors.keys() == {2}
    assert isinstance(errors[2], PoolFullError)
    goes_on(model, decoder, 0, 1, 2)
    assert step(model, decoder, {0: 2, 1: 1, 2: 1}) == {}
    model.pool.pages.free(filler)
    goes_on(model, decoder)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_that_is_released(made: Make, model: Model, way: Ways, layer: int) -> None:
    decoder = made(model, way)
    model.add(decoder, 41, 40, 43)

    def release(now: int) -> None:
        if now == layer:
            decoder._of(1).release()
            del model.rows[1]

    errors = step(model, decoder, {1: 1, 2: 1}, between=release, hints=True)
    assert errors.keys() == {1}
    assert isinstance(errors[1], ReleasedError | StaleError)  # its pages are free
    goes_on(model, decoder)
    decoder.remove(1)
    assert model.add(decoder, 17) == 1
    goes_on(model, decoder)


@pytest.mark.parametrize("way", WAYS[2:])
def test_a_hint_that_fails_is_no_error(
    made: Make, model: Model, monkeypatch: pytest.MonkeyPatch, way: Ways
) -> None:
    decoder = made(model, way)
    model.add(decoder, 41, 40)

    def fail(*_: object) -> None:
        raise CorruptError("a guess")

    monkeypatch.setattr(decoder._selector, "follow_hint", fail)
    goes_on(model, decoder)


@ON_CPU
@pytest.mark.usefixtures("by_words")
@pytest.mark.parametrize("error", [WorkerError, GpuError])
@pytest.mark.parametrize("way", [PARTIAL, WAYS[2]])
def test_a_late_host_is_an_error_of_all_that_take_part(
    made: Make,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    way: Ways,
    error: type[CXLKVError],
) -> None:
    """What it appends late is taken back, too, also where the device has failed by then."""
    go = threading.Event()
    decoder = made(model, way, deadline_s=1e-6)
    model.add(decoder, 41, 40, 43)
    resident, mail = resident_of(decoder), decoder._mail
    assert mail is not None
    serve, check = mail._serve, mail.check

    def slow(layer: int) -> None:
        go.wait()
        serve(layer)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def checked() -> None:
        go.set()
        check()

    with monkeypatch.context() as patch:
        patch.setattr(mail, "_serve", slow)
        patch.setattr(mail, "check", checked)
        if error is GpuError:
            patch.setattr(resident, "synchronize", fail)
        errors = step(model, decoder, {0: 1, 2: 1})
        assert errors.keys() == {0, 2}
        assert all(isinstance(one, error) for one in errors.values())
        with suppress(WorkerError):
            checked()
        check_sequences(model, decoder, set(model.rows))
    mail._deadline_s = 60.0
    goes_on(model, decoder)


@pytest.mark.parametrize("way", WAYS[1:4])
def test_a_kernel_that_fails_is_an_error_of_all_that_take_part(
    made: Make, model: Model, monkeypatch: pytest.MonkeyPatch, way: Ways
) -> None:
    decoder = made(model, way)
    model.add(decoder, 41, 40, 43)
    resident = resident_of(decoder)
    synchronize = resident.synchronize

    def fail() -> None:
        synchronize()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(resident, "synchronize", fail)
    errors = step(model, decoder, {0: 1, 2: 1})
    assert errors.keys() == {0, 2}
    assert all(isinstance(error, GpuError) for error in errors.values())
    decoder.begin({})
    model.layers(decoder, requests=3)
    with pytest.raises(GpuError):
        decoder.end_each()
    monkeypatch.setattr(resident, "synchronize", synchronize)
    goes_on(model, decoder)


@pytest.mark.parametrize("way", WAYS)
def test_end_takes_all_of_the_step_back(made: Make, model: Model, way: Ways) -> None:
    decoder = made(model, way)
    model.add(decoder, 11, 9)
    filler = model.pool.pages.alloc(model.pool.stats()["pages_free"])
    decoder.begin({0: 1, 1: 1})
    model.layers(decoder, requests=3)
    with pytest.raises(PoolFullError):
        decoder.end()
    check_sequences(model, decoder, {0, 1})
    model.pool.pages.free(filler)
    goes_on(model, decoder)
