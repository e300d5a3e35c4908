"""The decode step against plain attention: every kernel in the interpreter, or on the GPU."""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    CorruptError,
    GpuError,
    GpuMemoryError,
    MemoryShortError,
    OrderError,
    PoolFullError,
    RegistrationError,
    ReleasedError,
    StaleError,
    UnevenError,
    UnsupportedError,
    WorkerError,
)
from cxlkv.gpu.decode import Decoder
from cxlkv.gpu.errors import gpu_errors
from cxlkv.gpu.mailbox import Mailbox
from cxlkv.gpu.resident import Resident
from cxlkv.kernels import runtime
from cxlkv.kernels.index import FORMS
from cxlkv.layout import LayerGroup
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.sequence import Batch, Sequence

from ..support.lengths import nightly
from ..support.reference import attend as attend_reference

PAGE, HEADS, GROUP, DIM, LAYERS = 4, 2, 2, 16, 2
ATTEND_MAX = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU with the torch references of all kernels, or a GPU with the kernels."""
    if request.param == "reference":
        monkeypatch.setattr(runtime, "INTERPRETED", False)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


Place = dict[str, str]
HOST: Place = {}
BY_DEVICE: list[Place] = [{"index": "device", "method": method} for method in FORMS]
PLACES = [HOST, *BY_DEVICE]
"""Where pages are chosen: by the host, and by each index on the device."""

# Of device, for tests of what the other has not.
ON_CPU = pytest.mark.parametrize("device", ["reference"], indirect=True)
ON_GPU = pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


class Model:
    """A pool, its sequences, and the same rows in plain tensors."""

    def __init__(self, seed: int, *, dtype: str = "float32", layout: KVLayout | None = None):
        torch.manual_seed(seed)
        self.layout = layout or KVLayout(
            layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, dtype=dtype
        )
        self.dtype: torch.dtype = getattr(torch, self.layout.dtype)
        self.pool = CXLPool.create("anonymous:", layout=self.layout, capacity="4MiB", threads=1)
        self.rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.dtype)

    def sequence(self, tokens: int) -> tuple[Sequence, list[tuple[torch.Tensor, torch.Tensor]]]:
        sequence, kept = self.pool.sequence(), []
        layout = self.layout
        for layer in range(layout.layers):
            k = self.draw(tokens, layout.kv_heads, layout.head_dim)
            own = layout.values == "own"
            v = self.draw(tokens, layout.kv_heads, layout.value_head_dim) if own else None
            sequence.append(layer, k, v)
            kept.append((k, k[..., : layout.value_head_dim] if v is None else v))
        return sequence, kept

    def add(self, decoder: Decoder, *lengths: int, budget: Budget | None = None) -> int:
        """Requests of so many tokens; returns the last one."""
        for tokens in lengths:
            sequence, kept = self.sequence(tokens)
            request = decoder.add(sequence, budget)
            self.rows[request] = kept
        return request

    def step(
        self,
        decoder: Decoder,
        seen: list[dict[int, set[tuple[int, int]]]] | None,
        hints: str | None = None,
    ) -> float:
        """One step of all requests; returns the largest error. seen: pages attended to, by layer
        and request, as (head, page); None: all of them. hints: "right" ones for each layer, or
        "wrong" ones, before the layer in front of it."""
        layout, lead = self.layout, (decoder._requests, decoder._rows)
        decoder.begin()
        drawn = [self.draw(*lead, HEADS * GROUP, layout.head_dim) for _ in range(layout.layers)]
        outs, queries = [], []
        for layer, q in enumerate(drawn):
            ahead = range(layer + (layer > 0), min(layer + 2, layout.layers))
            for other in ahead if hints else ():
                guess = drawn[other] if hints == "right" else self.draw(*q.shape)
                decoder.hint(other, guess.to(decoder.device))
            k = self.draw(*lead, layout.kv_heads, layout.head_dim)
            own = layout.values == "own"
            v = self.draw(*lead, layout.kv_heads, layout.value_head_dim) if own else None
            for request, kept in self.rows.items():
                before = kept[layer]
                value = k[..., : layout.value_head_dim] if v is None else v
                kept[layer] = (
                    torch.cat([before[0], k[request]]),
                    torch.cat([before[1], value[request]]),
                )
            on = [None if x is None else x.to(decoder.device) for x in (q, k, v)]
            assert on[0] is not None
            assert on[1] is not None
            outs.append(decoder.layer(layer, on[0], on[1], on[2]))
            queries.append(q)
        decoder.end()
        errors = [0.0]
        for layer, (q, out) in enumerate(zip(queries, outs, strict=True)):
            for request, kept in self.rows.items():
                pages = None if seen is None else seen[layer][request]
                wanted = self.plain(q[request], *kept[layer], pages, layout.windows[layer])
                found = out[request].cpu().double().numpy()
                errors.append(float(np.abs(found - wanted).max()))
        return max(errors)

    def steps(self, decoder: Decoder, count: int = 1, hints: str | None = None) -> None:
        """Each of them is attention to all pages."""
        for _ in range(count):
            assert self.step(decoder, None, hints) < ATTEND_MAX[self.dtype]

    def drawn(self, decoder: Decoder, requests: int = 1) -> tuple[torch.Tensor, ...]:
        """Rows of a layer: q, k, v."""
        return tuple(
            self.draw(requests, 1, heads, DIM).to(decoder.device)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )

    def layers(self, decoder: Decoder, *layers: int, requests: int = 1) -> list[torch.Tensor]:
        """Some layers of a step with random rows, all of them unless said; what comes out."""
        rows = self.drawn(decoder, requests)
        return [decoder.layer(layer, *rows) for layer in layers or range(LAYERS)]

    def plain(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: set[tuple[int, int]] | None,
        window: int | None,
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        picked = None
        if pages is not None:
            lists = [sorted(p for head, p in pages if head == h) for h in range(HEADS)]
            longest = max(map(len, lists))
            filled = np.full((1, HEADS, longest), -1, np.int32)
            for head, own in enumerate(lists):
                filled[0, head, : len(own)] = own
            starts = np.array([0, len(q)], np.int32)
            scores = np.zeros(filled.shape, np.float32)
            counts = np.zeros((1, HEADS), np.int32)
            picked = Selection(filled, scores, counts, 0, 0, "sequence", starts)
        out, _ = attend_reference(
            [k.float().numpy()],
            [v.float().numpy()],
            q.float().numpy(),
            np.array([0, len(q)], np.int32),
            page_tokens=self.layout.page_tokens,
            picked=picked,
            window=window,
        )
        return out


def decoder_of(
    model: Model,
    device: torch.device | str,
    *,
    budget: Budget,
    hot_pages: int | list[int] = 6,
    requests: int = 1,
    pages_max: int = 64,
    recent_pages: int = 2,
    place: Place = HOST,
    **more: object,
) -> Decoder:
    """For the model's query heads and pool."""
    return Decoder(
        model.pool,
        requests=requests,
        q_heads=HEADS * GROUP,
        budget=budget,
        pages_max=pages_max,
        device=device,
        hot_pages=hot_pages,
        recent_pages=recent_pages,
        **{**more, **place},  # type: ignore[arg-type]
    )


def dense(model: Model, device: torch.device | str, hot_pages: int = 24, **more: object) -> Decoder:
    """With a budget of all pages of the longest request, 24: it must be plain attention."""
    more |= {"budget": Budget(pages=24), "pages_max": 24, "hot_pages": hot_pages}
    return decoder_of(model, device, **more)  # type: ignore[arg-type]


@pytest.fixture
def model(seed: int) -> Model:
    return Model(seed)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.Tensor]]:
    """(layer, pages [requests, kv_heads, k]) of each attention on the device, in order."""
    found: list[tuple[int, torch.Tensor]] = []
    attend = Resident._attend

    def record(self: Resident, layer: int, *rest: object) -> None:
        pages = rest[3]
        assert isinstance(pages, torch.Tensor)
        found.append((layer, pages.clone().cpu()))
        attend(self, layer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Resident, "_attend", record)
    return found


def resident_of(decoder: Decoder) -> Resident:
    assert decoder._resident is not None
    return decoder._resident


class Seen(list[dict[int, set[tuple[int, int]]]]):
    """by_layer() of what will have been recorded when it is asked: at the end of a step."""

    def __init__(self, found: list[tuple[int, torch.Tensor]]):
        self._found = found

    def __getitem__(  # type: ignore[override]
        self, layer: object
    ) -> dict[int, set[tuple[int, int]]]:
        assert isinstance(layer, int)
        return by_layer(self._found, LAYERS)[layer]


def by_layer(
    found: list[tuple[int, torch.Tensor]], layers: int
) -> list[dict[int, set[tuple[int, int]]]]:
    """Pages of one step by layer; no page is attended to twice."""
    made: list[dict[int, set[tuple[int, int]]]] = [{} for _ in range(layers)]
    for layer, pages in found:
        for request in range(len(pages)):
            own = made[layer].setdefault(request, set())
            for head in range(pages.shape[1]):
                for page in pages[request, head].tolist():
                    if page >= 0:
                        assert (head, page) not in own, "attended to twice"
                        own.add((head, page))
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("hot_pages", "place"), [(0, HOST), *((24, each) for each in PLACES)])
def test_with_a_budget_of_all_pages_it_is_attention(
    device: torch.device, seed: int, dtype: str, hot_pages: int, place: Place
) -> None:
    model = Model(seed, dtype=dtype)
    with dense(model, device, requests=3, hot_pages=hot_pages, place=place) as decoder:
        model.add(decoder, 50, 7)  # the third place stays empty
        model.steps(decoder, 6)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="the kernels are compiled here, for the GPU")
@pytest.mark.parametrize("place", [HOST, BY_DEVICE[-1]])
@pytest.mark.parametrize("dtype", ["bfloat16", nightly("float32")])
def test_in_the_interpreter_it_is_attention(seed: int, dtype: str, place: Place) -> None:
    """The kernels themselves, all of them, over two steps and the end of a page."""
    model = Model(seed, dtype=dtype)
    sizes = {"requests": 2, "pages_max": 8, "hot_pages": 8}
    with decoder_of(model, "cpu", budget=Budget(pages=8), **sizes, place=place) as decoder:
        model.add(decoder, 23)
        model.steps(decoder, 2)


@pytest.mark.parametrize("method", ["auto", "mean"])
def test_without_a_device_it_is_the_engine_alone(model: Model, method: str) -> None:
    if method == "mean":
        pytest.importorskip("numba", reason="numba compiles scorers")
    with Decoder(
        model.pool, requests=2, q_heads=4, budget=Budget(share=1.0), pages_max=64, method=method
    ) as decoder:
        model.add(decoder, 33, 4)
        model.steps(decoder, 4)
        assert decoder.stats.steps == 4
        assert decoder.stats.selects == 4 * LAYERS


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not map the pool."""

    def refuse(*_: object) -> None:
        raise RegistrationError("no pinning today")

    monkeypatch.setattr("cxlkv.gpu.resident.Mapping", refuse)


@pytest.mark.usefixtures("refused")
def test_where_the_pool_is_not_mapped_partial_results_cross(
    device: torch.device, model: Model
) -> None:
    with dense(model, device, requests=2) as decoder:
        assert decoder.fallback == "no pinning today"
        model.add(decoder, 50, 47)
        model.steps(decoder, 3)
        assert decoder.by_layer().fallbacks.tolist() == [3] * LAYERS
        # Of who was there before, nothing is in the output.
        decoder.remove(1).release()
        decoder.begin()
        assert not any(out[1].any() for out in model.layers(decoder, requests=2))
        decoder.end()


@pytest.mark.parametrize("place", PLACES)
def test_it_attends_to_what_is_there_and_what_is_chosen(
    device: torch.device,
    model: Model,
    seen: list[tuple[int, torch.Tensor]],
    place: Place,
) -> None:
    with decoder_of(
        model,
        device,
        requests=2,
        budget=Budget(pages=4, sinks=1, recent=1),
        pages_max=40,
        hot_pages=6,
        recent_pages=3,
        place=place,
    ) as decoder:
        model.add(decoder, 90, 61)
        for _ in range(8):
            seen.clear()
            assert model.step(decoder, Seen(seen)) < ATTEND_MAX[model.dtype]
            for layer in by_layer(seen, LAYERS):
                for pages in layer.values():
                    assert {(head, 0) for head in range(HEADS)} <= pages  # sinks
                    assert len(pages) <= HEADS * (6 + 4 + 3)
        resident = resident_of(decoder)
        assert resident.hot is not None
        assert resident.hot.counters().hits > 0


@pytest.mark.parametrize("place", PLACES)
def test_several_rows_windows_and_values_in_keys(
    device: torch.device, seed: int, place: Place
) -> None:
    full = LayerGroup(layers=1, kv_heads=HEADS, head_dim=DIM, dtype="float32")
    wider = replace(full, head_dim=DIM + 8, value_head_dim=DIM, values="key_prefix")
    for groups in ([replace(full, window=9), full], [wider]):
        model = Model(seed, layout=KVLayout.of(groups, page_tokens=PAGE))
        with dense(model, device, requests=2, rows=3, place=place) as decoder:
            model.add(decoder, 30, 9)
            model.steps(decoder, 4)


@pytest.mark.parametrize("place", PLACES)
def test_rejected_tokens_and_new_requests(device: torch.device, model: Model, place: Place) -> None:
    """Truncate back into complete pages, and a place that is used again: nothing old is seen."""
    with dense(model, device, requests=2, rows=2, place=place) as decoder:
        model.add(decoder, 40, 21)
        for cut in (1, 9, 0):
            model.steps(decoder)
            length = len(model.rows[0][0][0]) - cut
            decoder.truncate(0, length)
            model.rows[0] = [(k[:length], v[:length]) for k, v in model.rows[0]]
        decoder.remove(1).release()
        del model.rows[1]
        model.steps(decoder)
        assert model.add(decoder, 37) == 1
        model.steps(decoder, 3)


@pytest.mark.parametrize(
    ("hints", "place"),
    [(None, HOST), ("wrong", HOST), *((None, each) for each in BY_DEVICE), ("wrong", BY_DEVICE[0])],
)
def test_random_operations(
    device: torch.device,
    seed: int,
    seen: list[tuple[int, torch.Tensor]],
    hints: str | None,
    place: Place,
) -> None:
    """Requests come, go and are cut back, between steps with a small budget and a small buffer."""
    model, random = Model(seed), np.random.default_rng(seed)
    with decoder_of(
        model,
        device,
        requests=3,
        budget=Budget(pages=3, sinks=1, recent=1),
        pages_max=40,
        rows=2,
        hot_pages=[3, 5],
        place=place,
    ) as decoder:
        for _ in range(80):
            chance, there = random.random(), sorted(model.rows)
            if len(there) < 3 and (chance < 0.2 or not there):
                model.add(decoder, int(random.integers(0, 90)))
            elif chance < 0.25 and len(there) > 1:
                request = int(random.choice(there))
                decoder.remove(request).release()
                del model.rows[request]
            elif chance < 0.4:
                request = int(random.choice(there))
                tokens = len(model.rows[request][0][0])
                left = int(random.integers(max(0, tokens - 12), tokens + 1))
                decoder.truncate(request, left)
                model.rows[request] = [(k[:left], v[:left]) for k, v in model.rows[request]]
            else:
                seen.clear()
                assert model.step(decoder, Seen(seen), hints) < ATTEND_MAX[model.dtype]
                for layer in by_layer(seen, LAYERS):
                    for request, kept in model.rows.items():
                        newest = (len(kept[0][0]) - 1) // PAGE
                        assert {(head, newest) for head in range(HEADS)} <= layer[request]
        assert model.pool.admin.check()["clean"]


@pytest.fixture
def by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions go by words to a thread, as from a GPU; needs the interpreter for two kernels."""
    if not runtime.INTERPRETED:
        pytest.skip("the kernels are compiled here, for the GPU")
    made = Mailbox.__init__
    monkeypatch.setattr(Mailbox, "__init__", partialmethod(made, threaded=True))


@ON_CPU
@pytest.mark.usefixtures("by_words")
@pytest.mark.parametrize("hints", [None, "wrong"])
def test_a_thread_answers(device: torch.device, model: Model, hints: str | None) -> None:
    with dense(model, device, requests=2, deadline_s=60.0) as decoder:
        model.add(decoder, 50, 7)
        model.steps(decoder, 6, hints)
        decoder._of(0).release()
        with pytest.raises(ReleasedError):
            model.step(decoder, None)
        assert decoder._mail is not None
        thread = decoder._mail._thread
    assert thread is not None
    assert not thread.is_alive()


@ON_CPU
@pytest.mark.usefixtures("by_words")
def test_a_thread_that_is_late(
    device: torch.device, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ends with an error, and the next one is right: its question is another."""
    go = threading.Event()
    with dense(model, device, deadline_s=1e-6) as decoder:
        model.add(decoder, 50)
        assert decoder._mail is not None
        serve = decoder._mail._serve

        def slow(layer: int) -> None:
            go.wait()
            serve(layer)

        monkeypatch.setattr(decoder._mail, "_serve", slow)
        decoder.begin()
        model.layers(decoder)
        go.set()
        with pytest.raises(WorkerError, match="did not answer"):
            decoder.end()
        sequence = decoder._of(0)
        assert [sequence.tokens(layer) for layer in range(LAYERS)] == [50] * LAYERS
        decoder._mail._deadline_s = 60.0
        model.steps(decoder, 3)


@pytest.mark.parametrize("place", PLACES)
def test_right_hints_leave_nothing_to_fetch(
    device: torch.device, model: Model, place: Place
) -> None:
    """A guess that is the query itself names all that is chosen: the buffer has it by then, though
    it holds a sixth of the pages, and each step chooses others."""
    with decoder_of(
        model, device, budget=Budget(pages=4), requests=2, recent_pages=2, hot_pages=4, place=place
    ) as decoder:
        model.add(decoder, 90, 61)
        before = decoder.by_layer()
        for hints in ("right", None):
            for _ in range(6):
                model.step(decoder, None, hints)
            now = decoder.by_layer()
            missed, hinted = now.misses - before.misses, now.hinted - before.hinted
            assert (missed == 0).all() if hints else (missed > 0).all()
            assert (hinted > 0).all() if hints else (hinted == 0).all()
            before = now
        assert now.hits.shape == (LAYERS,)
        assert not now.fallbacks.any()
        assert (now.bytes == (now.misses + now.hinted) * PAGE * DIM * 2 * 4).all()
        resident = resident_of(decoder)
        assert resident.hot is not None
        assert resident.hot.counters()[:2] == (now.hits.sum(), now.misses.sum())
        stats = decoder.stats
        assert stats.hints == 6 * LAYERS
        if place == HOST:
            assert stats.hint_wanted > 0
            assert stats.hint_hit_rate == 1.0
            assert stats.selects == (2 + 1) * 6 * LAYERS


def test_random_hints_find_what_chance_finds(device: torch.device, model: Model) -> None:
    with decoder_of(
        model, device, budget=Budget(pages=5, sinks=0, recent=0), hot_pages=5
    ) as decoder:
        model.add(decoder, 200)
        for _ in range(30):
            model.step(decoder, None, "wrong")
        assert decoder.stats.hint_hit_rate < 0.4


def test_where_no_page_crosses_hints_do_nothing(model: Model) -> None:
    with Decoder(
        model.pool, requests=1, q_heads=4, budget=Budget(share=1.0), pages_max=64
    ) as decoder:
        model.add(decoder, 33)
        model.steps(decoder, 2, "wrong")
        assert decoder.stats.hints == 0


@pytest.mark.parametrize("place", [HOST, BY_DEVICE[0]])
def test_hints_out_of_order_are_refused(device: torch.device, model: Model, place: Place) -> None:
    q = model.drawn(dense(model, device))[0]
    with dense(model, device, place=place) as decoder:
        model.add(decoder, 50)
        with pytest.raises(OrderError, match="within a step"):
            decoder.hint(0, q)
        decoder.begin()
        decoder.hint(0, q)
        with pytest.raises(OrderError, match="already"):
            decoder.hint(0, q)
        with pytest.raises(OrderError, match="next two"):
            decoder.hint(2, q)
        with pytest.raises(BadArgumentError, match="wanted"):
            decoder.hint(1, q[..., :1])
        decoder.abandon()
        model.steps(decoder, 2)


def test_what_fails_near_the_data_is_raised_at_the_end(device: torch.device, model: Model) -> None:
    with decoder_of(model, device, budget=Budget(pages=4), pages_max=4096, hot_pages=4) as decoder:
        model.add(decoder, 8)
        filler = model.pool.pages.alloc(model.pool.stats()["pages_free"])
        for _ in range(3):
            model.step(decoder, None)
        with pytest.raises(PoolFullError):
            model.step(decoder, None)
        assert len(decoder._of(0)) == 11
        model.rows[0] = [(k[:11], v[:11]) for k, v in model.rows[0]]
        model.pool.pages.free(filler)
        model.step(decoder, None)  # and goes on
        decoder._of(0).release()
        with pytest.raises(ReleasedError):
            model.step(decoder, None)


@pytest.mark.parametrize("place", [HOST, BY_DEVICE[0]])
def test_a_damaged_page_is_an_error_of_its_step(
    device: torch.device, model: Model, tmp_path: Path, place: Place
) -> None:
    path, keys = tmp_path / "kv.pool", [bytes([i] * 16) for i in range(10)]
    with CXLPool.create(path, layout=model.layout, capacity="4MiB", threads=1) as pool:
        model.pool = pool
        pool.publish(model.sequence(40)[0], keys, PAGE)
    with CXLPool.open(path, threads=1) as pool, pool.match(keys) as hit:
        sequence = hit.sequence()
        address, _ = _core.pool_memory(pool._handle)
        at = int(_core.sequence_places(sequence._handle, 1).values[2])
        byte = ctypes.c_uint8.from_address(address + at)
        byte.value ^= 1
        model.pool = pool
        with decoder_of(
            model, device, budget=Budget(pages=12), hot_pages=12, place=place
        ) as decoder:
            decoder.add(sequence)
            decoder.begin()
            model.layers(decoder)
            with pytest.raises(CorruptError, match="V is wrong"):
                decoder.end()


def test_a_page_that_changes_once_it_was_verified_is_noticed(
    device: torch.device, model: Model
) -> None:
    """The host does not read again what this process wrote, or has verified."""
    with decoder_of(model, device, budget=Budget(pages=12), hot_pages=12) as decoder:
        sequence, _ = model.sequence(40)
        decoder.add(sequence)
        address, _ = _core.pool_memory(model.pool._handle)
        byte = ctypes.c_uint8.from_address(address + int(sequence.places(1).values[2]))
        for change, named in (
            (1, "page 2 of request 0, layer 1, kv head 0: .* V is wrong"),
            (0, ""),
        ):
            byte.value ^= 1
            decoder.begin()
            model.layers(decoder)
            if change:
                with pytest.raises(CorruptError, match=named):
                    decoder.end()
            else:
                decoder.end()
            assert len(sequence) == 40 + (not change)


def test_a_page_that_was_freed_on_its_way_is_noticed(device: torch.device, model: Model) -> None:
    with decoder_of(model, device, budget=Budget(pages=6), hot_pages=6) as decoder:
        model.add(decoder, 40)
        decoder.begin()  # the tables are made
        resident = resident_of(decoder)
        resident._tables.rows[0].generations[0, 0] += 1
        model.layers(decoder)
        with pytest.raises(StaleError, match="freed meanwhile"):
            decoder.end()
        # Nothing that came in that step stays in the hot buffer.
        assert resident.hot is not None
        for layer in range(LAYERS):
            pages = resident.hot.residents(layer, resident._tables.tags[0]).pages
            assert int((pages >= 0).sum()) == 0


@ON_GPU
def test_a_late_answer_is_an_error(device: torch.device, model: Model) -> None:
    """A thread is late, where a device waits; on the CPU the engine is called."""
    with decoder_of(model, device, budget=Budget(pages=6), hot_pages=6, deadline_s=1e-6) as decoder:
        model.add(decoder, 40)
        with pytest.raises(WorkerError, match="did not answer"):
            model.step(decoder, None)


def test_two_things_go_wrong_in_a_step(device: torch.device, model: Model) -> None:
    """The first one is raised, and the next step knows of neither."""
    with dense(model, device) as decoder:
        model.add(decoder, 43)
        resident = resident_of(decoder)
        decoder.begin()
        generation = resident._tables.rows[0].generations[0, 0]
        generation += 1
        model.layers(decoder, 0)
        resident.synchronize()
        filler = model.pool.pages.alloc(model.pool.stats()["pages_free"])
        generation -= 1
        model.layers(decoder, 1)
        decoder._of(0).release()
        with pytest.raises(StaleError):
            decoder.end()
        model.pool.pages.free(filler)


@ON_GPU
@pytest.mark.parametrize("hints", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_captured_step_is_the_same_step(
    device: torch.device, model: Model, place: Place, hints: bool
) -> None:
    """With hints the graph forks in front of each layer but the first."""

    def layers() -> list[torch.Tensor]:
        found = []
        for layer in range(LAYERS):
            if hints and layer + 1 < LAYERS:
                decoder.hint(layer + 1, still[0][layer + 1])
            found.append(decoder.layer(layer, *(x[layer] for x in still)))
        return found

    with dense(model, device, place=place) as decoder:
        model.add(decoder, 50)
        model.steps(decoder)  # compiles what is captured
        still = [model.draw(LAYERS, 1, 1, heads, DIM).to(device) for heads in (4, 2, 2)]
        graph = torch.cuda.CUDAGraph()
        decoder.begin()
        with torch.cuda.graph(graph):
            outs = layers()
        decoder.abandon()
        for _ in range(6):
            for tensor in still:
                tensor.copy_(torch.randn_like(tensor))
            decoder.begin()
            graph.replay()
            decoder.end(replayed=True)
            q, k, v = (tensor.cpu() for tensor in still)
            for layer in range(LAYERS):
                before = model.rows[0][layer]
                model.rows[0][layer] = (
                    torch.cat([before[0], k[layer, 0]]),
                    torch.cat([before[1], v[layer, 0]]),
                )
                wanted = model.plain(q[layer, 0], *model.rows[0][layer], None, None)
                found = outs[layer][0].cpu().double().numpy()
                assert np.abs(found - wanted).max() < ATTEND_MAX[model.dtype]


@pytest.mark.parametrize("where", ["attend", "copy_fragments", "merge"])
def test_a_kernel_that_fails_is_named(
    device: torch.device, model: Model, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    with decoder_of(model, device, budget=Budget(pages=6), hot_pages=6) as decoder:
        model.add(decoder, 40)
        monkeypatch.setattr(f"cxlkv.gpu.resident.{where}", fail)
        with pytest.raises(GpuError, match="layer 0: CUDA error: an illegal memory access was enc"):
            model.step(decoder, None)


def test_errors_of_torch_and_triton_have_names() -> None:
    class OutOfResources(Exception):
        __module__ = "triton.runtime.errors"

    with pytest.raises(GpuError, match="x: shared memory"), gpu_errors("x"):
        raise OutOfResources("shared memory")
    with pytest.raises(GpuMemoryError, match="fewer requests"), gpu_errors("x"):
        raise torch.OutOfMemoryError("tried to allocate")
    with pytest.raises(StaleError), gpu_errors("x"):
        raise StaleError("as it is")
    with pytest.raises(KeyError), gpu_errors("x"):
        raise KeyError("of our own")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("hot_pages", [0, 8])
def test_without_cuda_it_says_so(model: Model, hot_pages: int) -> None:
    with pytest.raises(UnsupportedError, match="CUDA"):
        decoder_of(model, "cuda", budget=Budget(pages=4), pages_max=8, hot_pages=hot_pages)


def test_misuse_is_named(device: torch.device, model: Model) -> None:
    with pytest.raises(BadArgumentError, match="3 query heads"):
        Decoder(model.pool, requests=1, q_heads=3, budget=Budget(pages=4), pages_max=8)
    decoder = decoder_of(model, device, budget=Budget(pages=4), pages_max=8, hot_pages=4)
    with pytest.raises(BadArgumentError, match="no request"):
        decoder.begin()
    uneven = model.pool.sequence()
    uneven.append(0, model.draw(3, HEADS, DIM), model.draw(3, HEADS, DIM))
    with pytest.raises(UnevenError):
        decoder.add(uneven)
    model.add(decoder, 5)
    with pytest.raises(BadArgumentError, match="places are taken"):
        decoder.add(uneven)
    rows = model.drawn(decoder)
    with pytest.raises(OrderError, match="begin"):
        decoder.layer(0, *rows)
    decoder.begin()
    with pytest.raises(OrderError, match="layer 1"):
        decoder.layer(1, *rows)
    with pytest.raises(BadArgumentError, match="q is"):
        decoder.layer(0, rows[1], rows[1], rows[2])
    with pytest.raises(OrderError, match="under way"):
        decoder.remove(0)
    decoder.layer(0, *rows)
    with pytest.raises(OrderError, match="all layers"):
        decoder.end()
    decoder.abandon()
    decoder.truncate(0, 5)
    decoder.close()
    decoder.close()
    with pytest.raises(ClosedError):
        decoder.begin()


# ---- the index on the device ----


def chosen_by_core(
    decoder: Decoder, request: int, layer: int, q: torch.Tensor, budget: Budget
) -> tuple[list[dict[int, float]], int, int]:
    """Scores of the pages in sight by the core, a head each; the first page that the ring has, and
    how many pages are to be chosen before it. After a step: the pool has its rows."""
    resident, sequence = resident_of(decoder), decoder._of(request)
    window = decoder.layout.windows[layer]
    tokens = len(sequence) - decoder._rows  # before the step
    pages = -(-len(sequence) // PAGE)
    low = 0 if window is None else max(0, tokens - window + 1) // PAGE
    ring = max(0, (len(sequence) - 1) // PAGE - resident._recent.slots + 1)
    wanted = max(0, budget.pages_at_most(pages - low, layer) - budget.recent)
    all_of_them = Budget(pages=pages, per="sequence")
    assert resident.index is not None
    picked = decoder.pool.batch([sequence]).select(
        layer, q, [0, len(q)], all_of_them, resident.index.form.name
    )
    scores = [
        {page: score for page, score in zip(*rows, strict=True) if low <= page < ring}
        for rows in zip(picked.pages[0].tolist(), picked.scores[0].tolist(), strict=True)
    ]
    return scores, low, max(wanted, min(budget.sinks, max(0, ring - low)))


@pytest.mark.parametrize("place", BY_DEVICE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 45])
def test_the_device_chooses_as_the_core_does(
    device: torch.device,
    seed: int,
    seen: list[tuple[int, torch.Tensor]],
    dtype: str,
    window: int | None,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages by the core's own scores of them: none that is left out is better by more than sums in
    another order, and queries that are rounded elsewhere, are off."""
    full = LayerGroup(layers=1, kv_heads=HEADS, head_dim=DIM, dtype=dtype)
    layout = KVLayout.of([replace(full, window=window), full], page_tokens=PAGE)
    model = Model(seed, layout=layout)
    budgets = Budget(share=0.3, sinks=2, recent=3), Budget(pages=9, sinks=2, recent=1)
    drawn: list[torch.Tensor] = []
    with decoder_of(
        model, device, budget=budgets[0], requests=2, rows=2, hot_pages=40, place=place
    ) as decoder:
        layer_of = decoder.layer

        def layer_noted(layer: int, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            drawn.append(q.cpu())
            return layer_of(layer, q, *rest)

        monkeypatch.setattr(decoder, "layer", layer_noted)
        model.add(decoder, 131)
        model.add(decoder, 90, budget=budgets[1])
        for _ in range(6):
            seen.clear()
            drawn.clear()
            assert model.step(decoder, Seen(seen)) < ATTEND_MAX[model.dtype]
            for layer, of in enumerate(by_layer(seen, LAYERS)):
                for request, pages in of.items():
                    budget = budgets[request]
                    scores, low, count = chosen_by_core(
                        decoder, request, layer, drawn[layer][request], budget
                    )
                    for head, by_page in enumerate(scores):
                        chosen = {p for h, p in pages if h == head} & set(by_page)
                        assert len(chosen) == min(count, len(by_page))
                        free = [p for p in chosen if p >= low + budget.sinks]
                        left_out = max((by_page[p] for p in set(by_page) - chosen), default=-1e9)
                        worst = min((by_page[p] for p in free), default=1e9)
                        slack = 0.02 if place["method"] != "digest" else 1e-5
                        assert left_out <= worst + slack * (1 + abs(worst))


@pytest.mark.parametrize("hot_pages", [0, 20])
def test_a_request_may_have_its_own_budget(
    device: torch.device, model: Model, hot_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are there in a step; a place has none of its last request's."""
    budgets = [Budget(pages=20), Budget(pages=3, recent=1, per="query"), Budget(share=0.125)]
    chosen: list[list[list[int]]] = []
    select = Batch.select

    def noted(self: Batch, *asked: object) -> Selection:
        picked = select(self, *asked)  # type: ignore[arg-type]
        chosen.append(picked.counts.tolist())
        return picked

    monkeypatch.setattr(Batch, "select", noted)
    with decoder_of(
        model, device, budget=budgets[0], requests=3, hot_pages=hot_pages, recent_pages=1
    ) as decoder:
        for budget in (None, *budgets[1:]):
            model.add(decoder, 119, budget=budget)
        for change, counts in (("none", [20, 3, 4]), ("remove", [3, 4]), ("add", [3, 3, 4])):
            if change == "remove":
                decoder.remove(0)
            elif change == "add":
                model.add(decoder, 119, budget=budgets[1])
            decoder.begin()
            model.layers(decoder, requests=3)
            decoder.end()
            assert chosen[-LAYERS:] == [[[count] * HEADS for count in counts]] * LAYERS
        for given, error, match in (
            (Budget(pages=21), BadArgumentError, "up to 21 pages, the decoder was made for 20"),
            (0.5, BadArgumentError, "up to 32 pages"),
            (Budget(mass=0.5), BadArgumentError, "up to 64 pages"),
            (Budget(pages=2, union="layer"), BadArgumentError, "share union="),
        ):
            decoder.remove(1)
            with pytest.raises(error, match=match):
                model.add(decoder, 5, budget=given)  # type: ignore[arg-type]
            model.add(decoder, 5)


@pytest.mark.parametrize("place", BY_DEVICE)
def test_the_hot_buffer_changes_no_output(device: torch.device, seed: int, place: Place) -> None:
    """It is emptied before each step, has room for all pages, or holds unwanted pages: shuffled
    ones, or those of wrong hints."""
    found: dict[str, list[torch.Tensor]] = {}
    for state, hot_pages in (("empty", 6), ("all of it", 60), ("shuffled", 9), ("hinted", 6)):
        model, random = Model(seed), np.random.default_rng(seed)
        budget, outs = Budget(pages=6, sinks=1, recent=1), found.setdefault(state, [])
        with decoder_of(
            model, device, budget=budget, requests=2, hot_pages=hot_pages, place=place
        ) as decoder:
            model.add(decoder, 140, 77)
            resident = resident_of(decoder)
            assert resident.hot is not None
            for _ in range(12):
                decoder.begin()
                for layer in range(LAYERS):
                    if state == "hinted":
                        guess = random.standard_normal((2, 1, HEADS * GROUP, DIM), np.float32)
                        decoder.hint(layer, torch.from_numpy(guess).to(device))
                    if state == "empty":
                        resident.hot.forget(0)
                        resident.hot.forget(1)
                    if state == "shuffled":
                        some = np.sort(random.permutation(19)[:6]).astype(np.int32)
                        lists = np.broadcast_to(some, (2, HEADS, 6)).copy()
                        resident._hint.known.copy_(torch.from_numpy(lists))
                        resident._fetch(layer, resident._hint)
                    outs += model.layers(decoder, layer, requests=2)
                decoder.end()
            counters = resident.hot.counters()
            assert (counters.hits == 0) == (state == "empty")
    for state in ("all of it", "shuffled", "hinted"):
        for one, other in zip(found["empty"], found[state], strict=True):
            assert one.cpu().equal(other.cpu()), state


class Noted(TorchDispatchMode):
    """Notes torch's operations that make a tensor or read one on the host, but for Triton's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.faults = 0, set[str]()

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        assert callable(func)
        frame, by_triton = sys._getframe(1), False
        while frame.f_back is not None and not by_triton:
            by_triton = "/triton/" in frame.f_code.co_filename
            frame = frame.f_back
        if not by_triton:
            self.count += 1
            returns = func._schema.returns  # type: ignore[attr-defined]
            if not all(one.alias_info for one in returns):  # neither a view nor in place
                self.faults.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not runtime.INTERPRETED, reason="the kernels' launches are Triton's own here")
@pytest.mark.parametrize("place", BY_DEVICE)
def test_a_layer_makes_no_tensor_and_reads_none(model: Model, place: Place) -> None:
    """What a graph captures with an index on the device: no memory of ours is taken in a step, and
    the host looks at nothing."""
    with decoder_of(model, "cpu", budget=Budget(pages=5), place=place) as decoder:
        model.add(decoder, 70)
        model.step(decoder, None)  # tables of rotations are brought once
        rows, noted = model.drawn(decoder), Noted()
        decoder.begin()
        with noted:
            for layer in range(LAYERS):
                if layer + 1 < LAYERS:
                    decoder.hint(layer + 1, rows[0])
                decoder.layer(layer, *rows)
        decoder.end()
        assert noted.count > 10
        assert not noted.faults


def test_requests_share_summaries_and_give_them_back(device: torch.device, model: Model) -> None:
    with decoder_of(
        model,
        device,
        budget=Budget(pages=5),
        requests=3,
        index_pages=30,
        place=BY_DEVICE[0],
    ) as decoder:
        sequence, _ = model.sequence(82)
        forks = [sequence, sequence.fork(), sequence.fork()]
        index = resident_of(decoder).index
        assert index is not None
        for fork in forks:
            decoder.add(fork)
        for _ in range(6):  # each fork completes a page of its own
            decoder.begin()
            model.layers(decoder, requests=3)
            decoder.end()
        assert len(index._held) == 20 + 3  # what the last step completed is not named yet
        decoder.truncate(2, 40)
        decoder.remove(1)
        decoder.add(model.sequence(90)[0])
        with pytest.raises(MemoryShortError, match="room for 30 pages"):
            decoder.begin()
        for request in range(3):
            decoder.remove(request)
        assert not index._held
        assert [len(free) for free in index._free] == [30]


@pytest.mark.parametrize(
    ("given", "where", "method", "reason"),
    [
        ({}, "device", "sketch", None),
        ({"method": "digest"}, "device", "digest", None),
        ({"method": "two_stage"}, "host", "two_stage", "reads keys"),
        ({"budget": Budget(mass=0.9), "hot_pages": 64}, "host", "auto", "mass="),
        ({"hot_pages": 0}, "host", "auto", "hot_pages="),
        ({"no room": True}, "host", "auto", "the index wants"),
        ({"no mapping": True}, "host", "auto", "the pool is not mapped: no driver"),
    ],
)
def test_auto_chooses_on_the_device_where_it_can(
    model: Model,
    given: dict[str, object],
    where: str,
    method: str,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*asked: object) -> None:
        raise MemoryShortError("the index wants")

    def no_mapping(*asked: object) -> None:
        raise RegistrationError("no driver")

    if given.pop("no room", False):
        monkeypatch.setattr("cxlkv.gpu.index.check_room", no_room)
    if given.pop("no mapping", False):
        monkeypatch.setattr("cxlkv.gpu.resident.Mapping", no_mapping)
    asked: dict[str, object] = {"index": "auto", "budget": Budget(pages=4), **given}
    with decoder_of(model, "cpu", **asked) as decoder:  # type: ignore[arg-type]
        assert (decoder.index, decoder._selector._method) == (where, method)
        assert (decoder.index_reason is None) == (reason is None)
        assert reason is None or reason in str(decoder.index_reason)
        decoder.add(model.sequence(90)[0])
        decoder.begin()
        model.layers(decoder, *range(model.layout.layers))
        decoder.end()


def test_what_the_device_does_not_choose_by_is_refused(model: Model) -> None:
    budget = Budget(pages=4)
    for given, error, match in (
        ({"method": "exact"}, UnsupportedError, "digest, mean_std, sketch"),
        ({"method": "two_stage"}, UnsupportedError, 'index="host"'),
        ({"method": "digest", "budget": Budget(mass=0.9)}, UnsupportedError, "mass="),
        ({"method": "digest", "budget": Budget(pages=4, refresh=3)}, UnsupportedError, "refresh="),
        (
            {"method": "digest", "budget": Budget(pages=4, union="layer")},
            UnsupportedError,
            "union=",
        ),
        ({"method": "digest", "hot_pages": 0}, BadArgumentError, "hot_pages="),
        ({"method": "digest", "index_pages": 0}, BadArgumentError, "index_pages=0"),
        ({"method": "digest", "index": "gpu"}, BadArgumentError, "index='gpu'"),
        ({"index": "host", "index_pages": 4}, BadArgumentError, "index_pages goes with"),
    ):
        asked: dict[str, object] = {"index": "device", "budget": budget, **given}
        with pytest.raises(error, match=match):
            decoder_of(model, "cpu", **asked)  # type: ignore[arg-type]
    place: Place = {"index": "device", "method": "digest"}
    with decoder_of(model, "cpu", budget=Budget(pages=6), place=place, recent_pages=3) as decoder:
        for own, match in (
            (Budget(pages=6, sinks=2), "as many sinks as the decoder .1, not 2"),
            (Budget(pages=6, recent=4), "device keeps .3, not 4"),
            (Budget(pages=6, refresh=2), "refresh="),
        ):
            with pytest.raises(UnsupportedError, match=match):
                model.add(decoder, 5, budget=own)
        model.add(decoder, 5, budget=Budget(pages=4, recent=3))
