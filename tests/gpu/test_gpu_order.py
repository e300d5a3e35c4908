"""The order of events: decode steps by streams that run late give what they give in sequence.

Every copy and kernel is delayed at will, in as many orders as there are seeds; what a stream may
not do before another is then seen in the outputs, which are compared to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import pytest
import torch

from cxlkv import KVLayout, _core
from cxlkv.errors import CXLKVError, StaleError
from cxlkv.gpu.copier import Copier
from cxlkv.gpu.decode import Decoder
from cxlkv.gpu.index import DeviceIndex, Marks
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.resident import Resident
from cxlkv.gpu.staging import Staging
from cxlkv.gpu.write import WriteThrough
from cxlkv.kernels import runtime
from cxlkv.ndp.engine import Budget

from ..support.late_streams import Fault, Schedule, Site
from ..support.lengths import nightly
from .test_gpu_decode import (
    BY_DEVICE,
    DIM,
    GROUP,
    HEADS,
    HOST,
    PAGE,
    Model,
    Place,
    decoder_of,
    resident_of,
)

LAYERS = 3
OPERATIONS = 6


P = ParamSpec("P")
R = TypeVar("R")


class Text:
    """A decoder's life: steps with a small hot buffer, and all that happens between them. The same
    seed has the same calls, by a schedule or without."""

    def __init__(self, seed: int, place: Place, hints: bool, schedule: Schedule | None = None):
        layout = KVLayout(
            layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, dtype="float32"
        )
        self.model, self.random = Model(seed, layout=layout), np.random.default_rng(seed)
        self.hints, self.schedule = hints, schedule
        self.streams = [] if schedule is None else [schedule.current]
        self.found: list[torch.Tensor] = []
        self.decoder: Decoder = decoder_of(
            self.model,
            "cpu",
            requests=2,
            budget=Budget(pages=4, sinks=1, recent=1),
            hot_pages=5,
            place=place,
        )
        hot = resident_of(self.decoder).hot
        if schedule is not None and hot is not None:
            address, size = _core.pool_memory(self.model.pool._handle)
            schedule.readable.append(range(address, address + size))
            for slots in hot._state:
                schedule.writable |= set(slots.slot_keys_at.flatten().tolist())
                assert slots.slot_values_at is not None
                schedule.writable |= set(slots.slot_values_at.flatten().tolist())
        for tokens in (70, 33):
            self.add(tokens)

    def call(self, work: Callable[P, R], *given: P.args, **_: P.kwargs) -> R:
        if self.schedule is None:
            return work(*given)  # type: ignore[call-arg]
        with self.schedule.use(self.schedule.random.choice(self.streams)):
            late = [self.schedule.given(x) if torch.is_tensor(x) else x for x in given]
            with self.schedule:
                return work(*late)  # type: ignore[arg-type, call-arg]

    def add(self, tokens: int) -> None:
        self.call(self.decoder.add, self.model.sequence(tokens)[0])

    def layer(self, layer: int) -> torch.Tensor:
        """And perhaps a hint for the next."""
        heads = HEADS * GROUP
        if self.hints and layer + 1 < LAYERS and self.random.random() < 0.8:
            self.call(self.decoder.hint, layer + 1, self.model.draw(2, 1, heads, DIM))
        rows = [self.model.draw(2, 1, count, DIM) for count in (heads, HEADS, HEADS)]
        return self.call(self.decoder.layer, layer, *rows)

    def step(self) -> None:
        self.call(self.decoder.begin)
        outs = [self.layer(layer) for layer in range(LAYERS)]
        self.call(self.decoder.end)
        self.found += [out.clone() for out in outs]

    def abandoned(self) -> None:
        """A step that ends on its way, with a hint that no layer waits for."""
        self.call(self.decoder.begin)
        for layer in range(int(self.random.integers(1, LAYERS))):
            self.layer(layer)
        self.call(self.decoder.abandon)

    def stale(self) -> None:
        """A page that is another by its generation, when it is fetched, is an error of this step
        alone."""
        resident = resident_of(self.decoder)
        hot, generation = resident.hot, resident._tables.rows[0].generations[0, 0]
        assert hot is not None

        def change(by: int) -> None:
            resident.follow()
            hot.forget(0)
            generation.add_(by)

        self.call(self.decoder.begin)
        self.call(change, 1)
        for layer in range(LAYERS):
            self.layer(layer)
        with pytest.raises(StaleError):
            self.call(self.decoder.end)
        self.call(change, -1)

    def truncated(self) -> None:
        request = int(self.random.integers(2))
        tokens = len(self.decoder._of(request)) - int(self.random.integers(1, 9))
        self.call(self.decoder.truncate, request, tokens)

    def changed(self) -> None:
        """Rows that somebody else appends, in the place of the last ones."""
        request = int(self.random.integers(2))
        sequence = self.decoder._of(request)
        tokens = len(sequence) - int(self.random.integers(0, 6))
        sequence.truncate(tokens)
        for layer in range(LAYERS):
            k, v = (self.model.draw(7, HEADS, DIM) for _ in range(2))
            sequence.append(layer, k, v)
        self.call(self.decoder.changed, request, tokens)

    def another(self) -> None:
        request = int(self.random.integers(2))
        self.call(self.decoder.remove, request).release()
        self.add(int(self.random.integers(20, 80)))

    def run(self, operations: int) -> list[torch.Tensor]:
        self.step()
        for _ in range(operations):
            between = [self.abandoned, self.truncated, self.changed, self.another, self.stale]
            if self.random.random() < 0.7:
                between[int(self.random.integers(len(between)))]()
            self.step()
        self.found += [torch.from_numpy(x) for x in self.decoder.by_layer()[:3]]
        self.call(self.decoder.close)
        self.model.pool.close()
        return self.found


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


Break = Callable[[pytest.MonkeyPatch, Schedule], None]


def late(
    seed: int, place: Place, hints: bool, number: int, *, wanders: bool, breaks: Break | None = None
) -> tuple[list[torch.Tensor], Schedule]:
    """The same by a schedule. wanders: each call is made on one of three streams."""
    with pytest.MonkeyPatch.context() as patch:
        schedule = Schedule(number)
        schedule.stand_in(patch)
        if breaks is not None:
            breaks(patch, schedule)
        text = Text(seed, place, hints, schedule)
        if wanders:
            text.streams += [schedule.new(), schedule.new()]
        return text.run(OPERATIONS), schedule


def differs(
    seed: int,
    place: Place,
    hints: bool,
    orders: int,
    *,
    wanders: bool = False,
    breaks: Break | None = None,
) -> int | None:
    """The first of so many orders, each of another text, whose outputs or counts are others."""
    for number in range(orders):
        wanted = Text(seed + number, place, hints).run(OPERATIONS)
        found, _ = late(seed + number, place, hints, number, wanders=wanders, breaks=breaks)
        if not all(one.equal(other) for one, other in zip(wanted, found, strict=True)):
            return number
    return None


@pytest.mark.parametrize("hints", [False, True])
@pytest.mark.parametrize("wanders", [False, True])
@pytest.mark.parametrize(
    ("place", "orders"),
    [(HOST, 2), (BY_DEVICE[0], 2), *(nightly(place, 150) for place in [HOST, *BY_DEVICE])],
)
def test_outputs_are_those_of_any_order(
    seed: int, place: Place, hints: bool, wanders: bool, orders: int
) -> None:
    assert differs(seed, place, hints, orders, wanders=wanders) is None


# ---- each order is needed ----

SITES = {
    "streams.fork.record": 2,
    "streams.fork.wait_event": 1,
    "streams.join.wait_event": 1,
    "streams.synchronize.synchronize": 1,
    "resident.follow.wait_stream": 1,
    "resident.synchronize.synchronize": 1,
    "decode.layer.await_answer": 2,
}
"""How often each function of the step's path calls what orders streams."""


def sites_of(seed: int) -> dict[str, list[Site]]:
    """Those that a text passes, in the order of their lines."""
    found: dict[str, list[Site]] = {}
    for place in (HOST, BY_DEVICE[0]):
        _, schedule = late(seed, place, True, 0, wanders=True)
        for site in sorted(schedule.sites, key=lambda one: one[3]):
            known = found.setdefault(".".join(site[:3]), [])
            if site not in known:
                known.append(site)
    return found


def test_all_that_orders_streams_is_known(seed: int) -> None:
    assert {name: len(sites) for name, sites in sites_of(seed).items()} == SITES


def told(seed: int, place: Place, breaks: Break, *, wanders: bool, orders: int = 150) -> bool:
    try:
        return differs(seed, place, True, orders, wanders=wanders, breaks=breaks) is not None
    except (CXLKVError, Fault, pytest.fail.Exception):
        return True


NEEDED = [(name, number) for name, count in SITES.items() for number in range(count)]
NEEDED.remove(("resident.synchronize.synchronize", 0))  # check() reads from the device behind it


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "number"), NEEDED)
def test_a_wait_that_is_left_out_is_seen(seed: int, name: str, number: int) -> None:
    site = sites_of(seed)[name][number]

    def leave_out(_: pytest.MonkeyPatch, schedule: Schedule) -> None:
        schedule.dropped = site

    place = HOST if name.startswith("decode") else BY_DEVICE[0]
    assert told(seed, place, leave_out, wanders="follow" in name)


def with_one_lane(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    made = Resident._made_lane
    lanes: dict[int, object] = {}

    def shared(self: Resident, *args: object, **given: object) -> object:
        lane = made(self, *args, **given)  # type: ignore[arg-type]
        return lanes.setdefault(id(self), lane)

    patch.setattr(Resident, "_made_lane", shared)


def with_one_set_of_marks(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    made = DeviceIndex.marks
    marks: dict[int, Marks] = {}
    patch.setattr(DeviceIndex, "marks", lambda self: marks.setdefault(id(self), made(self)))


def without_keeping(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    hint = Decoder.hint

    def forgotten(self: Decoder, layer: int, q: torch.Tensor) -> None:
        hint(self, layer, q)
        self._guesses.clear()

    patch.setattr(Decoder, "hint", forgotten)


@pytest.mark.nightly
@pytest.mark.parametrize("breaks", [with_one_lane, with_one_set_of_marks, without_keeping])
def test_what_two_streams_share_is_seen(seed: int, breaks: Break) -> None:
    assert told(seed, BY_DEVICE[0], breaks, wanders=False)


@pytest.mark.nightly
@pytest.mark.parametrize("caller", ["load", "forget", "begin", "hint", "layer"])
def test_a_call_that_does_not_follow_is_seen(seed: int, caller: str) -> None:
    follow = Resident.follow

    def lose(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
        def followed(self: Resident) -> None:
            if sys._getframe(1).f_code.co_name != caller:
                follow(self)

        patch.setattr(Resident, "follow", followed)

    # The index waits for many summaries when a text comes: without it more is still on its way.
    place = HOST if caller == "load" else BY_DEVICE[0]
    assert told(seed, place, lose, wanders=True)


# ---- pages through a ring of buffers ----

STAGING = {
    "staging._event.record": 1,
    "staging._targets.wait_stream": 1,
    "staging.take.synchronize": 1,
    "staging.wait.wait_event": 1,
}


def stage(seed: int, site: Site | None = None) -> tuple[bool, Schedule]:
    """Pages of many choices through two small buffers, half of them into the same outputs: True
    when the bytes are those of fetch()."""
    model, random = Model(seed), np.random.default_rng(seed)
    batch = model.pool.batch([model.sequence(tokens)[0] for tokens in (70, 33)])
    schedule = Schedule(seed)
    schedule.dropped = site
    with pytest.MonkeyPatch.context() as patch:
        schedule.stand_in(patch)
        piece = 2 * 2 * HEADS * PAGE * DIM * 4
        staging = Staging(model.pool, "cpu", buffer=2 * piece + 512, buffers=2)
        shape = (2, HEADS, 5, PAGE, DIM)
        out = (torch.zeros(shape), torch.zeros(shape))
        found, wanted = [], []
        for number in range(8):
            q = random.standard_normal((2, HEADS * GROUP, DIM), np.float32)
            picked = batch.select(1, q, [0, 1, 2], Budget(pages=5, per="sequence"))
            wanted.append(batch.fetch(1, picked, (torch.zeros(shape), torch.zeros(shape))))
            with schedule:
                staged = staging.get(batch, 1, picked, out if number % 2 else None)
                staged.wait()
                read = torch.empty(2, *shape)  # by the stream that waits, at some time
                read[0].copy_(staged.keys)
                read[1].copy_(staged.values)
            found.append(read)
        schedule.pass_by(schedule.current.end())
        staging.close()
    model.pool.close()
    pairs = zip(found, wanted, strict=True)
    same = [np.array_equal(read[i], both[i]) for read, both in pairs for i in (0, 1)]
    return all(same), schedule


@pytest.mark.parametrize("orders", [4, nightly(1000)])
def test_staged_pages_are_those_of_any_order(seed: int, orders: int) -> None:
    sites = {site for number in range(orders) for site in _right_sites(seed + number)}
    names = [".".join(site[:3]) for site in sites]
    assert {name: names.count(name) for name in names} == STAGING | {"staging.close.synchronize": 1}


def _right_sites(seed: int) -> set[Site]:
    is_right, schedule = stage(seed)
    assert is_right
    return schedule.sites


@pytest.mark.parametrize("name", STAGING)
def test_a_wait_of_staging_that_is_left_out_is_seen(seed: int, name: str) -> None:
    (site,) = (one for one in stage(seed)[1].sites if ".".join(one[:3]) == name)
    assert not all(stage(seed + number, site)[0] for number in range(150))


# ---- pages that a device writes ----

WRITING = {
    "write": {
        "write._send_to_host.wait_stream": 1,
        "write._send_to_host.record": 1,
        "write.arrive.synchronize": 1,
        "write.abandon.synchronize": 1,  # needed by a copier's stream alone
    },
    "copier": {
        "copier._begin.wait_stream": 1,
        "copier._end.record": 1,
        "write.arrive.synchronize": 1,
        "write.abandon.synchronize": 1,
    },
}


def written(seed: int, way: str, site: Site | None = None) -> tuple[bool, Schedule]:
    """A chunk that is abandoned, whose pages are appended to at once, and one that is finished:
    True when both sequences have their rows. way: by a copier's stream, or by pinned memory."""
    model = Model(seed)
    schedule = Schedule(seed)
    schedule.dropped = site
    pool = model.pool
    with pytest.MonkeyPatch.context() as patch:
        schedule.stand_in(patch)
        copier = Copier(Mapping(pool, "cpu")) if way == "copier" else None
        writer = WriteThrough(pool, copier)
        rows = [[model.draw(8 * PAGE, HEADS, DIM) for _ in range(2)] for _ in range(2 * 2)]
        into = [pool.sequence(), pool.sequence()]
        with schedule:
            for layer, (k, v) in enumerate(rows[:1]):
                writer.put(into[0], layer, k, v)
            writer.abandon()
            for layer, (k, v) in enumerate(rows[:2]):
                into[0].append(layer, k, v)
            for layer, (k, v) in enumerate(rows[2:]):
                writer.put(into[1], layer, k, v)
            writer.finish()
        found = [rows for one in into for layer in (0, 1) for rows in one.fetch(layer)]
        schedule.pass_by(schedule.streams[-1].end())
        if copier is not None:
            copier.mapping.close()
    model.pool.close()
    wanted = [one.transpose(0, 1) for both in rows for one in both]
    pairs = zip(found, wanted, strict=True)
    return all(np.array_equal(np.asarray(a).reshape(b.shape), b) for a, b in pairs), schedule


@pytest.mark.parametrize("way", WRITING)
@pytest.mark.parametrize("orders", [4, nightly(1000)])
def test_written_pages_are_those_of_any_order(seed: int, way: str, orders: int) -> None:
    names: set[str] = set()
    for number in range(orders):
        is_right, schedule = written(seed + number, way)
        assert is_right
        names |= {".".join(site[:3]) for site in schedule.sites}
    assert names == set(WRITING[way])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name)
        for way, names in WRITING.items()
        for name in names
        if (way, name) != ("write", "write.abandon.synchronize")
    ],
)
def test_a_wait_of_writing_that_is_left_out_is_seen(seed: int, way: str, name: str) -> None:
    (site,) = (one for one in written(seed, way)[1].sites if ".".join(one[:3]) == name)

    def is_right(number: int) -> bool:
        try:
            return written(seed + number, way, site)[0]
        except CXLKVError:
            return False

    assert not all(is_right(number) for number in range(150))
