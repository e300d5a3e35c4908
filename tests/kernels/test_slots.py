"""The slots of the hot buffer: kernels against their reference, and both against OrderedDicts."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_slots
from cxlkv.kernels.slots import (
    SLOTS_MAX,
    Assigned,
    Slots,
    assign,
    invalidate,
    new_assigned,
    new_slots,
    residents,
    slots_bytes,
)

CPU = torch.device("cpu")
GUARD = -77
MARGIN = 4096
Four = tuple[Slots, torch.Tensor]


def addresses(requests: int, limits: list[int], start: int, device: torch.device) -> torch.Tensor:
    """Made-up addresses of slots, 16 bytes apart; 0 beyond a head's limit."""
    shape = (requests, len(limits), max(limits))
    at = start + 16 * torch.arange(int(np.prod(shape)), device=device).view(shape)
    beyond = (
        torch.arange(max(limits), device=device) >= torch.tensor(limits, device=device)[:, None]
    )
    return at.masked_fill(beyond, 0)


def make(
    requests: int, limits: list[int], pages_max: int, device: torch.device, values: bool = True
) -> Slots:
    keys_at = addresses(requests, limits, 1 << 20, device)
    values_at = addresses(requests, limits, 1 << 40, device) if values else None
    return new_slots(limits, pages_max, keys_at, values_at)


def tables(state: Slots) -> dict[str, torch.Tensor]:
    found = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def with_tables(state: Slots, change: Callable[[torch.Tensor], torch.Tensor]) -> Slots:
    """Other slots, whose tables are made of those of the state."""
    other = copy.copy(state)
    for name, table in tables(state).items():
        object.__setattr__(other, name, change(table))
    return other


def copy_of(state: Slots) -> Slots:
    """Its own memory, on the CPU."""
    return with_tables(state, lambda table: table.clone().cpu())


def poisoned(state: Slots, k: int, device: torch.device) -> Assigned:
    """Outputs in which every element that is not written shows."""
    requests, kv_heads, _ = state.shape
    values = state.slot_values_at is not None
    out = new_assigned(requests, kv_heads, k, values=values, device=device)
    for table in out:
        if table is not None:
            table.fill_(GUARD)
    return out


def assert_agree(found: Slots, expected: Slots) -> None:
    wanted = tables(expected)
    for name, table in tables(found).items():
        if name != "scratch":
            torch.testing.assert_close(table.cpu(), wanted[name], rtol=0, atol=0, msg=name)


def assert_same(found: Assigned, expected: Assigned) -> None:
    for name, one, other in zip(Assigned._fields, found, expected, strict=True):
        if one is None or other is None:
            assert one is other, name
        else:
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, msg=name)


def step(state: Slots, pages: torch.Tensor, tags: torch.Tensor) -> Assigned:
    """One assign, of which every output and table must be what the reference makes."""
    expected_state = copy_of(state)
    expected = poisoned(expected_state, pages.shape[2], CPU)
    reference_slots.assign(expected_state, pages.cpu(), tags.cpu(), expected)
    out = poisoned(state, pages.shape[2], pages.device)
    found = assign(state, pages, tags, out)
    assert_same(found, expected)
    assert_agree(state, expected_state)
    now = residents(state, tags)
    assert torch.equal(now.cpu(), reference_slots.residents(expected_state, tags.cpu()))
    return found


def selection(
    rng: np.random.Generator, requests: int, heads: int, k: int, pages_max: int
) -> torch.Tensor:
    """Lists of different lengths with each page once, padding anywhere."""
    pages = np.full((requests, heads, k), -1, np.int32)
    for row in pages.reshape(-1, k):
        count = rng.integers(0, min(k, pages_max) + 1)
        places = rng.choice(k, count, replace=False)
        row[places] = rng.choice(pages_max, count, replace=False)
    return torch.from_numpy(pages)


def one(pages: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([[pages]], dtype=torch.int32, device=device)


@pytest.fixture
def four(device: torch.device) -> Four:
    """The slots of one head, and the tags of 10 pages."""
    return make(1, [4], 10, device), torch.zeros((1, 10), dtype=torch.int64, device=device)


def test_story_of_four_slots(device: torch.device) -> None:
    state = make(1, [4], 10, device)
    tags = torch.arange(10, device=device).view(1, 10) + 100

    first = step(state, one([1, 2, -1], device), tags)
    assert first.slot.tolist() == [[[0, 1, -1]]]
    assert first.missed.tolist() == [[[1, 1, 0]]]

    second = step(state, one([2, 3, -1], device), tags)
    assert second.slot.tolist() == [[[1, 2, -1]]]
    assert second.missed.tolist() == [[[0, 1, 0]]]
    assert second.miss_pages.tolist() == [[[-1, 3, -1]]]
    keys_at, values_at = second.miss_targets
    assert keys_at.tolist() == [[[0, (1 << 20) + 32, 0]]]
    assert values_at is not None
    assert values_at.tolist() == [[[0, (1 << 40) + 32, 0]]]
    assert second.keys_at.tolist() == [[[(1 << 20) + 16, (1 << 20) + 32, 0]]]

    # 4 takes the last free slot; then 1 is the one that was used longest ago.
    assert step(state, one([-1, 4, 3], device), tags).slot.tolist() == [[[-1, 3, 2]]]
    assert step(state, one([5, 2, 3], device), tags).slot.tolist() == [[[0, 1, 2]]]
    assert residents(state, tags).tolist() == [[[5, 2, 3, 4]]]
    assert (int(state.hits), int(state.misses), int(state.errors)) == (4, 5, 0)


def test_another_tag_is_a_miss_and_its_slot_is_the_first_to_go(
    device: torch.device, four: Four
) -> None:
    state, tags = four
    step(state, one([1, 2, 3, 4], device), tags)
    tags[0, 3:] = 7  # truncated to three pages, and written anew
    assert residents(state, tags).tolist() == [[[1, 2, -1, -1]]]
    found = step(state, one([3, -1, -1, -1], device), tags)
    assert found.slot.tolist() == [[[2, -1, -1, -1]]]
    assert found.missed.tolist() == [[[1, 0, 0, 0]]]
    found = step(state, one([8, 9, -1, -1], device), tags)
    assert found.slot.tolist() == [[[3, 0, -1, -1]]]  # the slot of 4, then of 1


def test_failed_misses_are_taken_back(device: torch.device) -> None:
    state = make(2, [4, 4], 10, device)
    tags = torch.zeros((2, 10), dtype=torch.int64, device=device)
    pages = torch.tensor([1, 2, -1], dtype=torch.int32, device=device).expand(2, 2, 3).contiguous()
    step(state, pages, tags)
    found = step(state, pages + 1, tags)  # 2 is a hit, 3 is missed, and page 0 comes
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    invalidate(state, found, flag)
    assert residents(state, tags)[0, 0].tolist() == [1, 2, 3, 0]
    failed = torch.zeros((2, 1, 3), dtype=torch.bool, device=device)
    failed[1, 0, 0:2] = True
    invalidate(state, found, failed)
    assert residents(state, tags)[0, 1].tolist() == [1, 2, 3, 0]
    assert residents(state, tags)[1, 0].tolist() == [1, 2, -1, 0]  # the hit, page 2, stays
    again = step(state, pages + 1, tags)
    assert again.missed[:, 0].tolist() == [[0, 0, 0], [0, 1, 0]]
    flag += 3
    invalidate(state, again, flag)
    invalidate(state, found)
    # In request 1, `again` took page 3 back. In request 0, `found` did, and what it knows of it.
    assert residents(state, tags)[:, 0].tolist() == [[1, 2, -1, -1], [1, 2, -1, -1]]


def test_a_slot_that_was_given_away_since_is_not_taken_back(device: torch.device) -> None:
    state = make(1, [1], 10, device)
    tags = torch.zeros((1, 10), dtype=torch.int64, device=device)
    old = step(state, one([1], device), tags)
    step(state, one([2], device), tags)
    invalidate(state, old)
    assert residents(state, tags).tolist() == [[[2]]]


@pytest.mark.parametrize(
    ("slots", "k", "pages_max", "steps"),
    [(1, 1, 3, 4), (17, 16, 40, 5), (33, 7, 20, 5), (129, 128, 200, 3), (2049, 1100, 5000, 4)],
)
def test_random_selections(
    device: torch.device, rng: np.random.Generator, slots: int, k: int, pages_max: int, steps: int
) -> None:
    """Odd sizes, up to several blocks; heads with limits of their own; no values in one case."""
    requests, limits = 2, [slots, max(k, slots - 1)]
    state = make(requests, limits, pages_max, device, values=slots != 33)
    tags = torch.from_numpy(rng.integers(-(2**62), 2**62, (requests, pages_max))).to(device)
    for _ in range(steps):
        pages = selection(rng, requests, 2, k, pages_max).to(device)
        found = step(state, pages, tags)
        slot = found.slot
        assert torch.equal(slot >= 0, pages >= 0)
        assert all(
            len(set(row)) == len(row)
            for row in ([s for s in row if s >= 0] for row in slot.reshape(-1, k).tolist())
        )
        changed = torch.from_numpy(rng.random((requests, pages_max)) < 0.1).to(device)
        tags[changed] += 1
    assert int((state.hits + state.misses).sum()) > 0
    assert state.errors.tolist() == [0, 0]


def guarded(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The table as part of a larger one, full of GUARD before and behind; both."""
    whole = torch.full((table.numel() + 2 * MARGIN,), GUARD, dtype=table.dtype, device=table.device)
    inner = whole[MARGIN:-MARGIN].view(table.shape)
    inner.copy_(table)
    return inner, whole


def test_page_numbers_that_cannot_be(device: torch.device) -> None:
    """They are padding, are counted, and nothing outside the tables is touched."""
    pages_max = 10
    plain = make(2, [4, 5], pages_max, device)
    wholes: list[torch.Tensor] = []

    def guard(table: torch.Tensor) -> torch.Tensor:
        inner, whole = guarded(table)
        wholes.append(whole)
        return inner

    state = with_tables(plain, guard)
    tags = torch.zeros((2, pages_max), dtype=torch.int64, device=device)
    hostile = [[-2, 10, 3, 2**31 - 1], [-(2**31), 11, -1, 9]]
    pages = torch.tensor([hostile, [[0, 1, 2, 3], [9, 8, 10, 6]]], device=device).int()
    for _ in range(2):
        found = step(state, pages, tags)
    assert found.slot[0].tolist() == [[-1, -1, 0, -1], [-1, -1, -1, 0]]
    assert found.missed.sum() == 0
    assert state.errors.tolist() == [10, 2]
    for whole in wholes:
        outside = torch.cat([whole[:MARGIN], whole[-MARGIN:]])
        assert bool((outside == GUARD).all())


def test_a_page_named_twice_does_no_harm(device: torch.device, four: Four) -> None:
    """It is against the contract, and one page with two slots would be attended to twice."""
    state, tags = four
    assign(state, one([5, 5, 6], device), tags)
    held = residents(state, tags).flatten().tolist()
    assert sorted(held) == [-1, -1, 5, 6]
    found = assign(state, one([5, 5, 6], device), tags)
    assert found.missed.sum() == 0
    assert found.slot[0, 0, 0] == found.slot[0, 0, 1] == held.index(5)
    # The slot that lost is free, so one is left for each of two pages, and 6 stays.
    state = make(1, [4], 10, device)
    assign(state, one([6], device), tags)
    assign(state, one([5, 5], device), tags)
    assign(state, one([7, 8], device), tags)
    assert sorted(residents(state, tags).flatten().tolist()) == [5, 6, 7, 8]


def test_more_misses_than_slots_have_none(device: torch.device) -> None:
    """The wrapper refuses it; the kernel itself gives the rest no slot, and counts it."""
    state = dataclasses.replace(make(1, [4, 2], 10, device), limit_min=4)
    tags = torch.zeros((1, 10), dtype=torch.int64, device=device)
    pages = torch.tensor([[[1, 2, 3, 4], [1, 2, 3, 4]]], dtype=torch.int32, device=device)
    found = step(state, pages, tags)
    assert found.slot.tolist() == [[[0, 1, 2, 3], [0, 1, -1, -1]]]
    assert found.missed.tolist() == [[[1] * 4] * 2]
    assert found.miss_keys_at[0, 1, 2:].tolist() == [0, 0]
    assert int(state.errors) == 2


class Model:
    """One head of one request: a dictionary of page -> tag, least recently used first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: OrderedDict[int, int] = OrderedDict()

    def drop_stale(self, tags: list[int]) -> None:
        for page in [page for page, tag in self.held.items() if tags[page] != tag]:
            del self.held[page]

    def assign(self, pages: list[int], tags: list[int]) -> list[bool]:
        """Whether each was missed. Used pages go to the end: first the misses, then the hits."""
        self.drop_stale(tags)
        hits = [page for page in self.held if page in pages]
        misses = [page for page in pages if page >= 0 and page not in hits]
        for page in hits:
            self.held.move_to_end(page)
        while len(self.held) + len(misses) > self.limit:
            self.held.popitem(last=False)
        for page in misses:
            self.held[page] = tags[page]
        for page in hits:
            self.held.move_to_end(page)
        return [page in misses for page in pages]


REQUESTS, LIMITS, PAGES = 2, [5, 3], 9
K = min(LIMITS)
lists = st.lists(st.integers(0, PAGES - 1), max_size=K, unique=True).map(
    lambda pages: pages + [-1] * (K - len(pages))
)
requests_of = st.integers(0, REQUESTS - 1)


class SlotsMachine(RuleBasedStateMachine):
    """Selections, truncation, pages written anew, requests that end, fetches that fail."""

    device = CPU
    seen = np.zeros(2, np.int64)  # hits and misses of all runs

    @initialize()
    def start(self) -> None:
        self.state = make(REQUESTS, LIMITS, PAGES, self.device)
        self.tags = torch.zeros((REQUESTS, PAGES), dtype=torch.int64, device=self.device)
        self.models = [[Model(limit) for limit in LIMITS] for _ in range(REQUESTS)]
        self.last: tuple[Assigned, list[list[list[int]]]] | None = None
        self.counts = [[0, 0] for _ in range(REQUESTS)]

    def tags_of(self, request: int) -> list[int]:
        return [int(tag) for tag in self.tags[request].tolist()]

    @rule(pages=st.lists(lists, min_size=REQUESTS * len(LIMITS), max_size=REQUESTS * len(LIMITS)))
    def select(self, pages: list[list[int]]) -> None:
        self.select_rows(pages)

    @rule(place=st.integers(0, K - 1), page=st.integers(-1, PAGES - 1))
    def select_nearly_the_same(self, place: int, page: int) -> None:
        """Steady pages: one of each list is exchanged, or dropped."""
        if self.last is not None:
            rows = [list(row) for rows in self.last[1] for row in rows]
            for row in rows:
                row[place] = -1 if page in row else page
            self.select_rows(rows)

    def select_rows(self, pages: list[list[int]]) -> None:
        shape = (REQUESTS, len(LIMITS), K)
        given = torch.tensor(pages, dtype=torch.int32, device=self.device).view(shape)
        found = step(self.state, given, self.tags)
        by_request = [[[int(p) for p in row] for row in rows] for rows in given.tolist()]
        for request, rows in enumerate(by_request):
            for head, row in enumerate(rows):
                missed = self.models[request][head].assign(row, self.tags_of(request))
                assert found.missed[request, head].tolist() == missed
                self.counts[request][1] += sum(missed)
                self.counts[request][0] += sum(p >= 0 for p in row) - sum(missed)
                self.seen += np.array([sum(p >= 0 for p in row) - sum(missed), sum(missed)])
        self.last = found, by_request

    @rule(request=requests_of, first=st.integers(0, PAGES))
    def truncate(self, request: int, first: int) -> None:
        self.tags[request, first:] += 1

    @rule(request=requests_of, page=st.integers(0, PAGES - 1))
    def write_anew(self, request: int, page: int) -> None:
        self.tags[request, page] += 1

    @rule(request=requests_of)
    def forget(self, request: int) -> None:
        self.state.page_of_slot[request].fill_(-1)
        for model in self.models[request]:
            model.held.clear()

    @rule(request=requests_of)
    def fetch_fails(self, request: int) -> None:
        """What the last assign missed for one request does not arrive."""
        if self.last is None:
            return
        found, pages = self.last
        failed = torch.zeros((REQUESTS, 1, 1), dtype=torch.int32, device=self.device)
        failed[request] = 1
        invalidate(self.state, found, failed)
        for head, row in enumerate(pages[request]):
            missed = found.missed[request, head].tolist()
            for page, gone in zip(row, missed, strict=True):
                if gone:
                    self.models[request][head].held.pop(page, None)
        self.last = None

    @invariant()
    def agrees(self) -> None:
        held = residents(self.state, self.tags).tolist()
        order = self.state.order.tolist()
        for request, models in enumerate(self.models):
            for head, model in enumerate(models):
                model.drop_stale(self.tags_of(request))
                limit, slots = LIMITS[head], held[request][head]
                free = [s for s in range(limit) if slots[s] < 0]
                assert len(free) + len(model.held) == limit
                assert all(page == -1 for page in slots[limit:])
                assert sorted(order[request][head]) == list(range(max(LIMITS)))
                by_use = [slots[s] for s in order[request][head] if slots[s] >= 0]
                assert by_use == list(model.held)
        counts = torch.stack([self.state.hits, self.state.misses], 1).tolist()
        assert counts == self.counts
        assert not bool(self.state.errors.any())


def run_machine(device: torch.device, seed: int, examples: int) -> None:
    class OnDevice(SlotsMachine):
        pass

    OnDevice.device, OnDevice.seen = device, np.zeros(2, np.int64)
    hypothesis.seed(seed)(OnDevice)
    run_state_machine_as_test(
        OnDevice, settings=settings(max_examples=examples, stateful_step_count=30)
    )
    assert OnDevice.seen.min() > 0, "too little happened to say anything"


def test_slots_against_ordered_dicts(device: torch.device, seed: int) -> None:
    run_machine(device, seed, examples=8)


def test_reference_against_ordered_dicts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CPU tensors get without the interpreter."""
    monkeypatch.setattr("cxlkv.kernels.slots.runs_triton", lambda device: False)
    run_machine(CPU, seed, examples=50)


@pytest.mark.gpu
def test_a_graph_replays_steps(rng: np.random.Generator) -> None:
    """Captured once, replayed for selections that are written into the same memory."""
    device = torch.device("cuda")
    state = make(3, [64, 40], 200, device)
    tags = torch.from_numpy(rng.integers(0, 2**40, (3, 200))).to(device)
    pages = selection(rng, 3, 2, 40, 200).to(device)
    out = new_assigned(3, 2, 40, values=True, device=device)
    held = torch.empty(state.shape, dtype=torch.int32, device=device)
    failed = torch.zeros(1, dtype=torch.int32, device=device)

    def run() -> None:
        assign(state, pages, tags, out)
        invalidate(state, out, failed)
        residents(state, tags, held)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number in range(20):
        pages.copy_(selection(rng, 3, 2, 40, 200))
        tags[0, 100:] += 1
        failed.fill_(number % 5 == 0)
        expected_state, expected = copy_of(state), poisoned(copy_of(state), 40, CPU)
        reference_slots.assign(expected_state, pages.cpu(), tags.cpu(), expected)
        reference_slots.invalidate(expected_state, expected, failed.cpu().expand(3, 2, 40))
        graph.replay()
        assert_same(out, expected)
        assert_agree(state, expected_state)
        assert torch.equal(held.cpu(), reference_slots.residents(expected_state, tags.cpu()))


def test_arguments_that_cannot_be(device: torch.device) -> None:
    state = make(2, [4, 3], 10, device)
    tags = torch.zeros((2, 10), dtype=torch.int64, device=device)
    pages = torch.full((2, 2, 3), -1, dtype=torch.int32, device=device)
    wide = torch.full((2, 2, 4), -1, dtype=torch.int32, device=device)
    for wrong, text in (
        (wide, "a selection of 4 pages a head, but a head has 3 slots"),
        (pages.long(), "wanted contiguous int32"),
        (wide[:, :, ::2], "wanted contiguous int32"),
        (pages[:1], r"wanted \(2, 2, k\)"),
        (pages[:, :, :0], r"wanted \(2, 2, k\)"),
    ):
        with pytest.raises(BadArgumentError, match=text):
            assign(state, wrong, tags)
    with pytest.raises(BadArgumentError, match="tags is"):
        assign(state, pages, tags[:, :9].contiguous())
    with pytest.raises(BadArgumentError, match="tags is"):
        residents(state, tags.int())
    with pytest.raises(BadArgumentError, match="only one of out and the slots has values"):
        assign(state, pages, tags, new_assigned(2, 2, 3, values=False, device=device))
    with pytest.raises(BadArgumentError, match="out is not contiguous int32"):
        residents(state, tags, torch.empty((2, 2, 5), dtype=torch.int32, device=device))
    found = assign(state, pages, tags)
    with pytest.raises(BadArgumentError, match="does not expand"):
        invalidate(state, found, torch.zeros(5, dtype=torch.int32, device=device))
    with pytest.raises(BadArgumentError, match="integers or booleans"):
        invalidate(state, found, torch.zeros(1, device=device))
    assert not bool(state.errors.any())


def test_limits_that_cannot_be(device: torch.device) -> None:
    keys_at = addresses(1, [4, 4], 16, device)
    for limits in ([4], [4, 5], [3, 3], [4, 0]):
        with pytest.raises(BadArgumentError, match="one limit a head"):
            new_slots(limits, 10, keys_at, None)
    many = torch.zeros((1, 1, SLOTS_MAX + 1), dtype=torch.int64, device=device)
    with pytest.raises(BadArgumentError, match=f"from 1 to {SLOTS_MAX}"):
        new_slots([SLOTS_MAX + 1], 10, many, None)
    with pytest.raises(BadArgumentError, match="pages_max is 0"):
        new_slots([4, 4], 0, keys_at, None)
    with pytest.raises(BadArgumentError, match="values_at is"):
        new_slots([4, 4], 10, keys_at, keys_at[:, :1])


@pytest.mark.parametrize("values", [True, False])
def test_bytes_are_what_the_tables_take(values: bool) -> None:
    state = make(2, [4, 3], 10, CPU, values)
    counted = {name: t for name, t in tables(state).items() if name not in "hits misses errors"}
    taken = sum(table.numel() * table.element_size() for table in counted.values())
    assert taken == slots_bytes(2, 2, 4, 10, values=values)
