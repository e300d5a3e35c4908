"""The worker's side of attention in the pool, without the engine: what each row sees, failures.

One suite for steps in host memory and for those of a device, of which the host's memory stands in
the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cxlkv import Budget, CXLPool
from cxlkv.adapters.common.pools import make_or_open
from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.adapters.vllm.admission import Admission
from cxlkv.adapters.vllm.messages import Continued, Message, Options, unpacked
from cxlkv.adapters.vllm.pools import open_all
from cxlkv.errors import MemoryShortError, PoolFullError
from cxlkv.sequence import Batch
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

pytest.importorskip("torch", reason="vLLM's tensors are torch's")

import torch

from cxlkv.adapters.vllm.pool_attention import PoolAttention, Rows, Scores, attend_alone

from ..support.damaging import damage_piece
from ..support.pool_attention_texts import (
    BLOCK,
    CAPACITY,
    HEADS,
    KV_HEADS,
    NAMES,
    PAGE,
    Text,
    by_index,
    is_right,
    is_zero,
    layout,
    on_device,
    run,
    scores_of,
    without_interpreter,
)
from ..support.states import states_of

if TYPE_CHECKING:
    from torch import Tensor

Make = Callable[[CXLPool], PoolAttention]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CXLPool]:
    with CXLPool.create(tmp_path / "a.pool", layout=layout(), capacity=CAPACITY) as made:
        yield made


def on_host(pool: CXLPool) -> PoolAttention:
    return PoolAttention(pool, NAMES, block_tokens=BLOCK, decode_rows=3, method="exact")


@pytest.fixture(params=[on_host, on_device, by_index])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    without_interpreter(monkeypatch)
    made: Make = request.param
    return made


@pytest.fixture
def attention(pool: CXLPool, make: Make) -> Iterator[PoolAttention]:
    made = make(pool)
    yield made
    assert pool.admin.check()["clean"]
    made.close()


def test_rows_see_their_own_text(attention: PoolAttention) -> None:
    """Prefill in pieces, decode beside it, requests that end, request rows that others take."""
    one, two, three = Text("one", 70), Text("two", 33), Text("three", 50)
    started = Message(started=[one.start(1), two.start(2)])
    assert all(map(is_right, run(attention, started, [(1, one, 0, 40), (2, two, 0, 30)])))
    # In another order, with a newcomer between them.
    rows = [(2, two, 30, 1), (5, three, 0, 17), (1, one, 40, 9)]
    assert all(map(is_right, run(attention, Message(started=[three.start(5)]), rows)))
    # One ends, and its request row is another's in the same step.
    four = Text("four", 20)
    message = Message(started=[four.start(2)], ended=["two"])
    rows = [(1, one, 49, 1), (2, four, 0, 20), (5, three, 17, 33)]
    assert all(map(is_right, run(attention, message, rows)))
    assert not attention.bad_blocks()
    assert not attention.report().failures


def test_speculated_tokens_that_were_rejected_are_cut_off(attention: PoolAttention) -> None:
    one, wrong = Text("one", 64), Text("wrong", 64)
    run(attention, Message(started=[one.start(1)]), [(1, one, 0, 30)])
    run(attention, Message(), [(1, wrong, 30, 3)])  # drafts of which none is accepted
    assert is_right(run(attention, Message(), [(1, one, 30, 3)])[0])
    assert is_right(run(attention, Message(), [(1, one, 31, 3)])[0])


def test_budgets_choose_pages_for_decoding_rows_only(attention: PoolAttention) -> None:
    few, whole = Options(Budget(pages=4)), Options(Budget(share=1.0))
    one, two, three = Text("one", 90, few), Text("two", 90, whole), Text("three", 90)
    starts = [text.start(row) for row, text in enumerate((one, two, three), 1)]
    rows = [(1, one, 0, 80), (2, two, 0, 80), (3, three, 0, 80)]
    assert all(map(is_right, run(attention, Message(started=starts), rows)))
    rows = [(1, one, 80, 1), (2, two, 80, 2), (3, three, 80, 1)]
    assert [is_right(piece) for piece in run(attention, Message(), rows)] == [False, True, True]
    rows = [(1, one, 81, 9), (2, two, 82, 1), (3, three, 81, 1)]  # more rows than a decode has
    assert all(map(is_right, run(attention, Message(), rows))) is True


def test_dense_layers_are_not_scored(pool: CXLPool, attention: PoolAttention) -> None:
    dense = Options(Budget(pages=4, dense_layers=len(NAMES)))
    one, two = Text("one", 90, dense), Text("two", 90, dense)
    starts = [text.start(row) for row, text in enumerate((one, two), 1)]
    run(attention, Message(started=starts), [(1, one, 0, 80), (2, two, 0, 80)])
    found = run(attention, Message(), [(1, one, 80, 1), (2, two, 80, 2)])
    assert all(map(is_right, found))
    assert pool.stats()["scored_bytes"] == 0


def test_a_hit_is_adopted_and_goes_on(pool: CXLPool, attention: PoolAttention) -> None:
    one = Text("one", 70)
    run(attention, Message(started=[one.start(1)]), [(1, one, 0, 70)])
    assert [(span.first, span.last) for span in attention.report().stored] == [(0, 4)]
    again = Text("one", 70)
    with pool.match(unpacked(one.keys, BLOCK)) as hit:
        assert hit.tokens == 64
        again.name = "again"
        message = Message(started=[again.start(2, handle=hit.handle, tokens=64)], ended=["one"])
        assert is_right(run(attention, message, [(2, again, 64, 6)])[0])
    assert not attention.report().failures


def test_what_a_quota_refuses_is_computed_and_not_published(pool: CXLPool) -> None:
    tiers, parts = Tiers(pool), pool.pages.geometry["part_count"]
    quota = Quota(tiers, 5 * BLOCK // PAGE * parts)
    attention = PoolAttention(pool, NAMES, block_tokens=BLOCK, tiers=tiers, quota=quota)
    one, two = Text("one", 70), Text("two", 200)
    rows = [(1, one, 0, 70), (2, two, 0, 100)]
    starts = [one.start(1), two.start(2)]
    assert all(map(is_right, run(attention, Message(started=starts), rows)))
    report = attention.report()
    assert [(span.request, span.first, span.last) for span in report.stored] == [("one", 0, 4)]
    assert report.failures == {"quota": 1}
    assert is_right(run(attention, Message(), [(2, two, 100, 70)])[0])
    assert not attention.report().failures, "it is not asked for again"
    with pool.match(unpacked(two.keys, BLOCK)) as hit:
        assert hit.tokens == 0
    attention.close()


def test_what_one_host_publishes_another_finds(shm_path: Path) -> None:
    """By an engine's settings alone; the other host's scheduler is the host that its worker is."""
    shared = PoolSettings(sharing="software", hosts=2, lease_s=0.3)

    def worker() -> PoolAttention:
        pool, _ = make_or_open(CXLPool, str(shm_path), layout(), "8MiB", shared=shared)
        return on_host(pool)

    first = worker()
    for state in states_of(shm_path):
        state.unlink()  # from here on we are another machine
    second = worker()
    (scheduler,) = open_all([str(shm_path)], shared)
    assert [host.is_self for host in scheduler.admin.hosts()] == [False, True]
    one, again = Text("one", 70), Text("one", 70)
    room = Admission([scheduler])
    assert room.fits("again", 0, 70), "what no host has yet is room"
    assert not room.fits("again", 0, room.tokens + PAGE)
    assert is_right(run(first, Message(started=[one.start(1)]), [(1, one, 0, 70)])[0])
    with scheduler.match(unpacked(one.keys, BLOCK)) as hit:
        assert hit.tokens == 64
        message = Message(started=[again.start(2, handle=hit.handle, tokens=64)])
        assert is_right(run(second, message, [(2, again, 64, 6)])[0])
    assert not second.report().failures
    scheduler.close()
    for engine in (second, first):
        assert engine.pool.admin.check()["clean"]
        engine.close()


def test_a_pool_that_is_lost_and_opened_anew(pool: CXLPool, make: Make, tmp_path: Path) -> None:
    """Lost in the middle of a step: its requests compute again, whole texts at once."""
    attention, room = make(pool), Admission([pool])
    one, two, three = Text("one", 70), Text("two", 40), Text("three", 50)
    run(attention, Message(started=[one.start(1)]), [(1, one, 0, 40)])
    attention.hear(Message(started=[two.start(2)]))
    attention.end_step()
    pool.close()
    assert not room.fits("one", 40, 70)
    one_row, two_row = run(attention, Message(), [(1, one, 40, 1), (2, two, 0, 40)])
    assert (is_zero(one_row), is_right(two_row)) == (True, True)
    assert attention.bad_blocks() == {1}
    assert attention.report().failures.keys() == {"host"}
    with CXLPool.open(tmp_path / "a.pool", threads=1) as again:
        attention.reopened(again)
        rows = [(1, one, 0, 69), (2, two, 39, 1), (3, three, 0, 50)]
        found = run(attention, Message(started=[three.start(3)]), rows)
        assert [is_right(piece) for piece in found] == [True, False, True]
        assert attention.bad_blocks() == {2}
        assert all(map(is_right, run(attention, Message(), [(1, one, 69, 1), (2, two, 0, 40)])))
        with again.match(unpacked(three.keys, BLOCK)) as hit:
            assert hit.tokens == 48
        attention.close()


def test_a_hit_that_is_gone_gives_zeros_and_is_computed_again(
    pool: CXLPool, attention: PoolAttention
) -> None:
    one, two = Text("one", 70), Text("two", 40)
    run(attention, Message(started=[one.start(1)]), [(1, one, 0, 70)])
    with pool.match(unpacked(one.keys, BLOCK)) as hit:
        handle = hit.handle
    pool.forget(unpacked(one.keys, BLOCK))
    run(attention, Message(ended=["one"]), [])
    one.name = "again"
    started = [one.start(3, handle=handle, tokens=64), two.start(4)]
    rows = [(3, one, 64, 6), (4, two, 0, 40), (7, two, 0, 5)]  # nobody has the last request row
    found = run(attention, Message(started=started), rows)
    assert [is_zero(piece) for piece in found] == [True, False, True]
    assert is_right(found[1])
    assert attention.bad_blocks() == {3, 7}
    assert is_right(run(attention, Message(), [(3, one, 0, 70)])[0])
    assert not attention.bad_blocks()
    assert attention.report().failures["stale"] >= 1


def test_sinks_are_a_key_without_value() -> None:
    one, sinks = Text("one", 40), torch.tensor([0.5, -1.0, 2.0, 30.0])
    k, v = (of[0].repeat_interleave(HEADS // KV_HEADS, 1) for of in (one.k, one.v))
    logits = torch.einsum("qhd,khd->qhk", one.q[0], k)
    logits.masked_fill_(torch.ones(40, 40).triu(1)[:, None].bool(), -torch.inf)
    weights = torch.cat([logits, sinks[None, :, None].expand(40, -1, 1)], -1).softmax(-1)
    wanted = torch.einsum("qhk,khd->qhd", weights[..., :-1], v)
    assert torch.allclose(one.wanted(0, Scores(1.0, sinks=sinks)), wanted, atol=1e-5)


def test_a_layer_attends_to_what_another_one_has_appended(
    pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or gives zeros, and the engine begins again, where that could not be appended."""
    attention, one = on_host(pool), Text("one", 70)

    def shared(first: int, count: int) -> Tensor:
        step = attention.step([1], np.array([0, count], np.int32), [first + count])
        for layer in range(len(NAMES)):
            q, k, v = (of[layer, first : first + count] for of in (one.q, one.k, one.v))
            own, others = torch.empty_like(q), torch.full_like(q, torch.nan)
            step.attend(layer, Rows(q, k, v, own), scores_of(layer))
            wanted = one.wanted(layer, scores_of(layer))[first : first + count]
            assert torch.allclose(own, wanted, atol=1e-5)
        nothing = torch.full_like(k, torch.nan)
        step.attend(1, Rows(q.flip(1), nothing, nothing, others), scores_of(1), is_shared=True)
        return others

    attention.hear(Message(started=[one.start(1)]))
    turned = attend_alone(one.q[1].flip(1), one.k[1], one.v[1], scores_of(1))
    assert torch.allclose(shared(0, 40), turned[:40], atol=1e-5)
    attention.end_step()
    attention.hear(Message())
    assert torch.allclose(shared(40, 3), turned[40:43], atol=1e-5)
    attention.end_step()
    attention.hear(Message(ended=["one"], started=[one.start(1)]))

    def full(*_: object, **__: object) -> None:
        raise PoolFullError("the pool is full")

    monkeypatch.setattr(Batch, "decode", full)
    monkeypatch.setattr(Batch, "attend", full)
    assert not shared(0, 40).any()
    assert attention.bad_blocks() == {1}
    attention.close()


def test_layers_that_a_step_left_out_are_filled_and_nobody_is_given_them(pool: CXLPool) -> None:
    """As a drafter's, near the longest text that it takes."""
    attention, one = on_host(pool), Text("one", 70)
    started = Message(started=[one.start(1)])
    for first, count, message in ((0, 40, started), (40, 20, Message()), (60, 1, Message())):
        attention.hear(message)
        step = attention.step([1], np.array([0, count], np.int32), [first + count])
        q, k, v = (of[0, first : first + count] for of in (one.q, one.k, one.v))
        out = torch.empty_like(q)
        step.attend(0, Rows(q, k, v, out), scores_of(0))
        wanted = one.wanted(0, scores_of(0))[first : first + count]
        assert torch.allclose(out, wanted, atol=1e-5)
        attention.end_step()
        assert not attention.bad_blocks()
    with pool.match(unpacked(one.keys, BLOCK)) as hit:
        assert hit.tokens == 0
    attention.close()


def test_many_rows_are_given_to_who_is_faster(pool: CXLPool) -> None:
    given: list[tuple[int, int]] = []

    def many(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        given.append((len(q), len(k)))
        whole = q.new_zeros(len(k), *q.shape[1:])
        whole[-len(q) :] = q
        return attend_alone(whole, k, v, scores)[-len(q) :]

    attention = PoolAttention(pool, NAMES, block_tokens=BLOCK, many=many)
    one, two = Text("one", 140), Text("two", 140)
    started = [one.start(1), two.start(2)]
    first = run(attention, Message(started=started), [(1, one, 0, 70), (2, two, 0, 9)])
    second = run(attention, Message(), [(1, one, 70, 3), (2, two, 9, 64)])
    assert all(is_right(found) for found in [*first, *second])
    assert given == [(70, 70), (64, 73)], "the other layer has a window"
    attention.close()


def test_a_damaged_page_is_forgotten_and_harms_only_its_own(
    tmp_path: Path, make: Make, attention: PoolAttention
) -> None:
    one, two = Text("one", 70), Text("two", 40)
    run(attention, Message(started=[one.start(1)]), [(1, one, 0, 70)])
    run(attention, Message(ended=["one"]), [])
    with CXLPool.open(tmp_path / "a.pool") as other:  # which has verified nothing yet
        fresh = make(other)
        hit = other.match(unpacked(one.keys, BLOCK))
        damage_piece(other, int(hit.sequence().pages[3]), 0, "keys")
        one.name = "again"
        started = [one.start(3, handle=hit.handle, tokens=64), two.start(4)]
        found = run(fresh, Message(started=started), [(3, one, 64, 6), (4, two, 0, 40)])
        hit.release()
        assert is_zero(found[0])
        assert is_right(found[1])
        assert fresh.bad_blocks() == {3}
        assert fresh.report().failures["corrupt"] == 1
        with other.match(unpacked(one.keys, BLOCK)) as hit:
            assert hit.tokens == BLOCK
        assert is_right(run(fresh, Message(), [(3, one, 0, 70)])[0])
        with other.match(unpacked(one.keys, BLOCK)) as hit:
            assert hit.tokens == 64
        fresh.close()


@pytest.mark.parametrize("is_wrong", [False, True])
def test_an_audited_hit(pool: CXLPool, attention: PoolAttention, is_wrong: bool) -> None:
    """The block behind it is compared when it is computed. Where it is another one, all that have
    hits begin again, and nothing that runs is published."""
    one, two = Text("other" if is_wrong else "one", 70), Text("two", 70)
    one.keys = Text("one", 70).keys
    rows = [(1, one, 0, 70), (2, two, 0, 70)]
    run(attention, Message(started=[one.start(1), two.start(2)]), rows)
    run(attention, Message(ended=[one.name, two.name]), [])
    attention.report()
    keys = unpacked(one.keys, BLOCK)
    again, beside, new = Text("one", 70), Text("two", 70), Text("new", 40)
    again.name, beside.name = "again", "beside"
    with pool.match(keys[:3]) as hit, pool.match(unpacked(two.keys, BLOCK)) as far:
        assert (hit.tokens, far.tokens) == (48, 64)
        started = [
            again.start(4, handle=hit.handle, tokens=48),
            beside.start(5, handle=far.handle, tokens=64),
            new.start(6),
        ]
        started[0].audit = True
        rows = [(4, again, 48, 10), (5, beside, 64, 6), (6, new, 0, 40)]
        run(attention, Message(started=started), rows)
    assert not attention.report().audited, "its block is not whole yet"
    rows = [(4, again, 58, 12), (5, beside, 70, 0)]
    run(attention, Message(), rows)
    report = attention.report()
    assert report.audited == 1
    assert report.failures["audit"] == is_wrong
    assert attention.bad_blocks() == ({4, 5} if is_wrong else set())
    with pool.match(keys) as hit:
        assert hit.tokens == (48 if is_wrong else 64)
    if is_wrong:
        found = run(attention, Message(), [(4, again, 0, 70), (5, beside, 0, 70)])
        assert all(is_right(piece) for piece in found)
        assert not attention.report().stored
        with pool.match(keys) as hit:
            assert hit.tokens == 48, "what is right of it is not believed to be its keys'"


def test_a_full_pool_harms_nobody_but_who_wanted_more(
    pool: CXLPool, attention: PoolAttention
) -> None:
    """A text that is longer than the pool: its first step is right, computed from the step alone;
    then it gives zeros, and the engine may begin again. The others go on."""
    small, large = Text("small", 60), Text("large", Admission([pool]).tokens + 64)
    run(attention, Message(started=[small.start(1)]), [(1, small, 0, 40)])
    rows = [(1, small, 40, 11), (2, large, 0, large.tokens - 20)]
    assert all(map(is_right, run(attention, Message(started=[large.start(2)]), rows)))
    assert not attention.bad_blocks()
    found = run(attention, Message(), [(1, small, 51, 1), (2, large, large.tokens - 20, 20)])
    assert is_right(found[0])
    assert is_zero(found[1])
    assert attention.bad_blocks() == {2}
    assert attention.report().failures["full"] >= 1


def test_pages_of_higher_priority_make_room_later(pool: CXLPool, attention: PoolAttention) -> None:
    """One text saves its pages, another finds them and saves nothing."""
    saved, found, plain = (
        Text("saved", 70, Options(priority=1)),
        Text("found", 40),
        Text("plain", 40),
    )
    started = [saved.start(1), found.start(2), plain.start(3)]
    run(attention, Message(started=started), [(1, saved, 0, 70), (2, found, 0, 40)])
    run(attention, Message(ended=["found"]), [(3, plain, 0, 40)])
    found.options = Options(priority=2, save=False)
    with pool.match(unpacked(found.keys, BLOCK)) as hit:
        again = found.start(2, handle=hit.handle, tokens=hit.tokens)
        run(attention, Message(started=[again]), [])
    run(attention, Message(ended=["saved", "found", "plain"]), [])
    tokens = (Admission([pool]).tokens - 128) // BLOCK * BLOCK
    for number in range(3):
        text = Text(f"text {number}", tokens)
        run(attention, Message(started=[text.start(1)]), [(1, text, 0, tokens)])
        run(attention, Message(ended=[text.name]), [])
    for one, there in ((saved, 64), (found, 32), (plain, 0)):
        with pool.match(unpacked(one.keys, BLOCK)) as hit:
            assert hit.tokens == there
    assert not attention.report().failures


def test_keys_that_come_later_are_published_then(pool: CXLPool, attention: PoolAttention) -> None:
    one = Text("one", 70)
    start, rest = one.start(1), one.keys[16:]
    start.keys = one.keys[:16]
    run(attention, Message(started=[start]), [(1, one, 0, 40)])
    assert [(span.first, span.last) for span in attention.report().stored] == [(0, 1)]
    run(attention, Message(continued=[Continued("one", [], rest, 40, 30)]), [(1, one, 40, 30)])
    assert [(span.first, span.last) for span in attention.report().stored] == [(1, 4)]
    unsaved = Text("unsaved", 40, Options(save=False))
    run(attention, Message(started=[unsaved.start(2)]), [(2, unsaved, 0, 40)])
    assert not attention.report().stored


def test_room_is_what_the_pool_has_less_what_was_promised(
    pool: CXLPool, attention: PoolAttention
) -> None:
    room = Admission([pool])
    room.check(room.tokens)
    with pytest.raises(MemoryShortError, match="max_model_len is"):
        room.check(room.tokens + 1)
    half = room.tokens // 2
    room.begin()
    assert room.fits("a", 0, half)
    room.take("a")
    assert room.fits("b", 0, half)
    assert not room.fits("b", 0, half + 2 * PAGE)
    room.fits("b", 0, half)
    room.take("b")
    assert not room.fits("c", 0, PAGE)
    room.give_back("b")  # preempted in this step
    assert room.fits("c", 0, half)
    room.begin()
    text = Text("a", half)
    run(attention, Message(started=[text.start(1)]), [(1, text, 0, half)])
    room.begin()
    assert room.fits("a", half, half + PAGE)
    assert not room.fits("c", 0, half + 2 * PAGE)
    run(attention, Message(ended=["a"]), [])
    room.begin()
    assert room.fits("c", 0, room.tokens)  # what is only published makes way
