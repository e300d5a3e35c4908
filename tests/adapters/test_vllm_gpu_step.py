"""Attention in the pool for tensors on a device, with tensors of the host in their place.

The kernels are interpreted; the link copies to memory of its own, as it does from a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv import CXLPool
from cxlkv.adapters.vllm.messages import Message
from cxlkv.errors import UnsupportedError

pytest.importorskip("torch", reason="vLLM's tensors are torch's")

import torch

from cxlkv.adapters.vllm import gpu_step as subject
from cxlkv.adapters.vllm.gpu_step import Link, Split, attend_behind, attend_to_own
from cxlkv.adapters.vllm.pool_attention import (
    ALL,
    EARLIER,
    Group,
    Scores,
    attend_alone,
)

from ..support.lengths import nightly
from ..support.pool_attention_texts import (
    CAPACITY,
    CLOSE,
    HOST,
    Text,
    is_right,
    layout,
    over_link,
    run,
    without_interpreter,
)

DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=str)


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


@pytest.mark.parametrize(
    ("dtype", "by_kernels"),
    [*((dtype, False) for dtype in CLOSE), nightly(torch.float16, True)],
    ids=str,
)
def test_rows_see_their_own_text(
    tmp_path: Path,
    dtype: torch.dtype,
    by_kernels: bool,
    kinds: list[tuple[tuple[str, ...], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First chunks, later ones, decode, requests that end, request rows that others take."""
    if not by_kernels:
        without_interpreter(monkeypatch)
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


def test_chunks_that_begin_and_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several later chunks in one call, from every place in a page, of every length around it."""
    without_interpreter(monkeypatch)
    texts = [Text(f"text {number}", 40) for number in range(9)]
    starts = [text.start(row) for row, text in enumerate(texts)]
    rows = [(row, text, 0, 8 + row) for row, text in enumerate(texts)]
    with CXLPool.create(tmp_path / "a.pool", layout=layout(), capacity=CAPACITY) as pool:
        attention = over_link(pool)
        assert all(map(is_right, run(attention, Message(started=starts), rows)))
        for row, text in enumerate(texts):
            rows = [(row, text, 8 + row, 4 + row), (8 - row, texts[8 - row], 16 - row, 13)]
            assert all(map(is_right, run(attention, Message(), rows[: 1 + (row != 4)])))
        attention.close()


@pytest.mark.parametrize(
    ("dtype", "window", "softcap", "heads", "kv_heads"),
    [
        (torch.float32, None, 0.0, 6, 2),
        (torch.float32, 5, 2.0, 3, 1),
        nightly(torch.float16, None, 2.0, 6, 2),
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
    """Several launches and pieces; K and V are slices of one tensor, as an engine has them.

    The kernels in float16; in other dtypes, which the kernels' own tests have, torch's form.
    """
    if dtype != torch.float16:
        without_interpreter(monkeypatch)
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
    assert link.buffer("q", (2, 3), torch.float32).data_ptr() == here.data_ptr()
    assert link.buffer("q", (7, 2), torch.float32).shape == (7, 2)
    link.send(here, there, [slice(2, 3)])
    assert there[2].tolist() == [4, 5]


def test_steps_are_made_for_the_device_that_the_engine_has() -> None:
    assert subject.steps_on(HOST) is None
    with pytest.raises(UnsupportedError, match="meta"):
        subject.steps_on(torch.device("meta"))
