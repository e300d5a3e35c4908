"""Attention in the pool for tensors on a device, with tensors of the host in their place.

The kernels are interpreted; the link copies to memory of its own, as it does from a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cxlkv import Budget, CXLPool
from cxlkv.adapters.vllm.admission import Room
from cxlkv.adapters.vllm.messages import Message, Options, unpacked
from cxlkv.errors import UnsupportedError

pytest.importorskip("torch", reason="vLLM's tensors are torch's")

import torch

from cxlkv.adapters.vllm import gpu_step as subject
from cxlkv.adapters.vllm.gpu_step import DeviceStep, Link, Split, attend_behind, attend_to_own
from cxlkv.adapters.vllm.pool_attention import (
    ALL,
    EARLIER,
    Group,
    PoolAttention,
    Scores,
    attend_alone,
)
from cxlkv.kernels import attend as attending
from cxlkv.kernels import merge as merging

from ..support.damaging import damage_piece
from ..support.pool_attention_texts import (
    BLOCK,
    CAPACITY,
    CLOSE,
    NAMES,
    Text,
    is_right,
    is_zero,
    layout,
    run,
)

HOST = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=str)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CXLPool]:
    with CXLPool.create(tmp_path / "a.pool", layout=layout(), capacity=CAPACITY) as made:
        yield made


def over_link(pool: CXLPool) -> PoolAttention:
    step = partial(DeviceStep, Link(HOST))
    return PoolAttention(pool, NAMES, block_tokens=BLOCK, decode_rows=3, step=step)


@pytest.fixture
def attention(pool: CXLPool) -> Iterator[PoolAttention]:
    made = over_link(pool)
    yield made
    assert pool.admin.check()["clean"]
    made.close()


@pytest.fixture
def uninterpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch in place of the kernels: interpreted, they take their time."""
    for one in (attending, merging):
        monkeypatch.setattr(one, "runs_triton", lambda device: False)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int]]:
    """What is attended near the pool, in the order of calls: (kind, rows)."""
    seen: list[tuple[tuple[str, ...], int]] = []
    attend = Group.attend

    def watched(self: Group, *given: object) -> object:
        seen.append((self.kind, int(self.starts[-1])))
        return attend(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Group, "attend", watched)
    return seen


@DTYPES
def test_rows_see_their_own_text(
    tmp_path: Path,
    dtype: torch.dtype,
    kinds: list[tuple[tuple[str, ...], int]],
    request: pytest.FixtureRequest,
) -> None:
    """First chunks, later ones, decode, requests that end, request rows that others take."""
    if dtype != torch.float16:
        request.getfixturevalue("uninterpreted")
    name = str(dtype).removeprefix("torch.")
    with CXLPool.create(tmp_path / "b.pool", layout=layout(name), capacity=CAPACITY) as pool:
        attention = over_link(pool)
        one, two, three = (
            Text(*given, dtype=dtype) for given in (("one", 90), ("two", 33), ("three", 70))
        )
        started = Message(started=[one.start(1), two.start(2)])
        assert all(map(is_right, run(attention, started, [(1, one, 0, 41), (2, two, 0, 30)])))
        assert not kinds, "first chunks need nothing of the pool"
        # In another order, with a newcomer between them. 41 + 29: from the middle of a page.
        rows = [(2, two, 30, 1), (5, three, 0, 17), (1, one, 41, 29)]
        assert all(map(is_right, run(attention, Message(started=[three.start(5)]), rows)))
        assert kinds == [(ALL, 1), (EARLIER, 29)] * 2
        # One ends, and its request row is another's in the same step; 3 rows are a decode.
        kinds.clear()
        four = Text("four", 20, dtype=dtype)
        message = Message(started=[four.start(2)], ended=["two"])
        rows = [(1, one, 70, 3), (2, four, 0, 20), (5, three, 17, 53)]
        assert all(map(is_right, run(attention, message, rows)))
        assert kinds == [(ALL, 3), (EARLIER, 53)] * 2
        assert not attention.bad_blocks()
        assert not attention.report().failures
        attention.close()


@pytest.mark.usefixtures("uninterpreted")
def test_chunks_that_begin_and_end_anywhere(attention: PoolAttention) -> None:
    """Several later chunks in one call, from every place in a page, of every length around it."""
    texts = [Text(f"text {number}", 40) for number in range(9)]
    starts = [text.start(row) for row, text in enumerate(texts)]
    rows = [(row, text, 0, 8 + row) for row, text in enumerate(texts)]
    assert all(map(is_right, run(attention, Message(started=starts), rows)))
    for row, text in enumerate(texts):
        rows = [
            (row, text, 8 + row, 4 + row),
            (8 - row, texts[8 - row], 16 - row, 13),
        ]
        assert all(map(is_right, run(attention, Message(), rows[: 1 + (row != 4)])))


@pytest.mark.usefixtures("uninterpreted")
def test_budgets_choose_pages_for_decoding_rows_only(attention: PoolAttention) -> None:
    few, whole = Options(Budget(pages=4)), Options(Budget(share=1.0))
    one, two, three = Text("one", 90, few), Text("two", 90, whole), Text("three", 90)
    starts = [text.start(row) for row, text in enumerate((one, two, three), 1)]
    rows = [(1, one, 0, 80), (2, two, 0, 80), (3, three, 0, 80)]
    assert all(map(is_right, run(attention, Message(started=starts), rows)))
    rows = [(1, one, 80, 1), (2, two, 80, 2), (3, three, 80, 1)]
    assert [is_right(piece) for piece in run(attention, Message(), rows)] == [False, True, True]
    rows = [(1, one, 81, 9), (2, two, 82, 1), (3, three, 81, 1)]  # more rows than a decode has
    assert all(map(is_right, run(attention, Message(), rows)))


@pytest.mark.usefixtures("uninterpreted")
def test_a_hit_goes_on_and_one_that_is_gone_gives_zeros(
    pool: CXLPool, attention: PoolAttention
) -> None:
    one, two = Text("one", 90), Text("two", 40)
    run(attention, Message(started=[one.start(1)]), [(1, one, 0, 70)])
    with pool.match(unpacked(one.keys, BLOCK)) as hit:
        handle, one.name = hit.handle, "again"
        message = Message(started=[one.start(3, handle=handle, tokens=64)], ended=["one"])
        assert is_right(run(attention, message, [(3, one, 64, 20)])[0])
    pool.forget(unpacked(one.keys, BLOCK))
    run(attention, Message(ended=["again"]), [])
    one.name = "thrice"
    started = [one.start(3, handle=handle, tokens=64), two.start(4)]
    rows = [(3, one, 64, 20), (4, two, 0, 40), (7, two, 0, 5)]  # nobody has the last request row
    found = run(attention, Message(started=started), rows)
    assert [is_zero(piece) for piece in found] == [True, False, True]
    assert is_right(found[1])
    assert attention.bad_blocks() == {3, 7}
    assert is_right(run(attention, Message(), [(3, one, 0, 90)])[0])
    assert attention.report().failures["stale"] >= 1


@pytest.mark.usefixtures("uninterpreted")
def test_a_damaged_page_harms_only_its_own(
    tmp_path: Path, pool: CXLPool, attention: PoolAttention
) -> None:
    one, two = Text("one", 90), Text("two", 40)
    run(attention, Message(started=[one.start(1)]), [(1, one, 0, 70)])
    run(attention, Message(ended=["one"]), [])
    with CXLPool.open(tmp_path / "a.pool") as other:  # which has verified nothing yet
        fresh = over_link(other)
        hit = other.match(unpacked(one.keys, BLOCK))
        damage_piece(other, int(hit.sequence().pages[3]), 0, "keys")
        one.name = "again"
        started = [one.start(3, handle=hit.handle, tokens=64), two.start(4)]
        found = run(fresh, Message(started=started), [(3, one, 64, 20), (4, two, 0, 40)])
        hit.release()
        assert is_zero(found[0])
        assert is_right(found[1])
        assert fresh.bad_blocks() == {3}
        assert fresh.report().failures["corrupt"] == 1
        assert is_right(run(fresh, Message(), [(3, one, 0, 70)])[0])
        fresh.close()


@pytest.mark.usefixtures("uninterpreted")
def test_a_full_pool_harms_nobody_but_who_wanted_more(tmp_path: Path) -> None:
    """A first chunk that has no room in the pool is right all the same: the device has it all."""
    with CXLPool.create(tmp_path / "c.pool", layout=layout(), capacity="2560KiB") as pool:
        attention = over_link(pool)
        small, large = Text("small", 60), Text("large", Room([pool]).tokens + 64)
        run(attention, Message(started=[small.start(1)]), [(1, small, 0, 40)])
        rows = [(1, small, 40, 11), (2, large, 0, large.tokens - 20)]
        assert all(map(is_right, run(attention, Message(started=[large.start(2)]), rows)))
        assert not attention.bad_blocks()
        found = run(attention, Message(), [(1, small, 51, 1), (2, large, large.tokens - 20, 20)])
        assert is_right(found[0])
        assert is_zero(found[1])
        assert attention.bad_blocks() == {2}
        assert attention.report().failures["full"] >= 1
        attention.close()


@pytest.mark.parametrize(
    ("dtype", "window", "softcap", "heads", "kv_heads"),
    [
        (torch.float32, None, 0.0, 6, 2),
        (torch.float32, 5, 2.0, 3, 1),
        (torch.float16, None, 2.0, 6, 2),
        (torch.float16, 70, 0.0, 2, 2),
        (torch.bfloat16, 70, 2.0, 2, 1),
        (torch.bfloat16, 5, 0.0, 2, 2),
    ],
)
def test_a_device_attends_to_its_own_rows(
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
    heads: int,
    kv_heads: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several launches and pieces; K and V as slices of one tensor, as an engine has them."""
    monkeypatch.setattr(subject, "ROWS_TOGETHER", 48)
    made = torch.Generator().manual_seed(seed)
    all_of = torch.randn((100, heads + 2 * kv_heads, 24), generator=made).to(dtype)
    q, k, v = torch.split(all_of, [heads, kv_heads, kv_heads], 1)
    scores = Scores(0.3, softcap, window)
    wanted = attend_alone(q.float(), k.float(), v.float(), scores)
    close = CLOSE[dtype]
    found = attend_to_own(q, k, v, scores)
    assert found.dtype == dtype
    assert torch.allclose(found.float(), wanted, atol=close, rtol=close)
    # Of rows 10 to 94 the tokens from 17 on, 7 behind the first.
    out, lse = attend_behind(Split(0, slice(10, 95), 7), q, k, v, scores)
    assert torch.equal(lse[:7], torch.full((7, heads), -torch.inf))
    assert not out[:7].any()
    wanted = attend_alone(q[17:95].float(), k[17:95].float(), v[17:95].float(), scores)
    assert torch.allclose(out[7:], wanted, atol=close, rtol=close)


def test_the_link_has_its_own_memory_and_keeps_it() -> None:
    link, there = Link(HOST), torch.arange(12.0).view(6, 2)
    here = link.bring("q", there, [slice(1, 3), slice(5, 6)])
    link.mark()
    link.wait()
    there[1:] = 0
    assert here[[1, 2, 5]].tolist() == [[2, 3], [4, 5], [10, 11]]
    assert link.room("q", (2, 3), torch.float32).data_ptr() == here.data_ptr()
    assert link.room("q", (7, 2), torch.float32).shape == (7, 2)
    link.send(here, there, [slice(2, 3)])
    assert there[2].tolist() == [4, 5]


def test_steps_are_made_for_the_device_that_the_engine_has() -> None:
    assert subject.steps_on(HOST) is None
    with pytest.raises(UnsupportedError, match="meta"):
        subject.steps_on(torch.device("meta"))
