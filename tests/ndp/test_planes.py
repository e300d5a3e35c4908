"""Attention over a pool in two planes: how far its outputs are off, and how many bits it reads."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, Sequence
from cxlkv.arrays import Doubles, Floats
from cxlkv.emulation.link import emulate
from cxlkv.errors import BadArgumentError

from ..test_encodings import case_of, drawn, layout_of, pool_of

ERRORS = (0.003, 0.01, 0.03, 0.1, 0.3)
DIM, TOKENS = 64, 1500


def spread(rng: np.random.Generator, tokens: int, heads: int, sharp: float) -> Floats:
    """Keys of which a few are near a query of ones, by head, as a model's attention has them."""
    keys = rng.standard_normal((tokens, heads, DIM), np.float32)
    keys[:: tokens // 7] += sharp
    return keys


@pytest.fixture(params=[0.0, 0.15, 0.6], ids=["flat", "uneven", "sharp"])
def pairs(
    request: pytest.FixtureRequest, rng: np.random.Generator
) -> Iterator[dict[str, tuple[CXLPool, Sequence]]]:
    """The same tokens in codes of 8 bits, and in planes."""
    keys = spread(rng, TOKENS, 2, request.param)
    values = rng.standard_normal((TOKENS, 2, DIM), np.float32)
    made = {}
    for encoding in ("int8", "progressive"):
        pool = pool_of(layout_of((encoding, encoding), dim=DIM, page_tokens=16), TOKENS)
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        made[encoding] = (pool, sequence)
    yield made
    for pool, _ in made.values():
        pool.close()


def off(out: object, want: object) -> Doubles:
    """The length of each output's difference, in those of values, whose channels are normal."""
    gap = np.asarray(out, np.float64) - np.asarray(want, np.float64)
    return np.asarray(np.linalg.norm(gap, axis=-1) / DIM**0.5, np.float64)


def read_of(pool: CXLPool, sequence: Sequence, q: Floats, error: float) -> tuple[Floats, float]:
    """The output, and bits that were read for each element in sight."""
    found = pool.batch([sequence]).decode(
        0,
        q,
        np.zeros((len(q), 2, DIM), np.float32),
        np.zeros((len(q), 2, DIM), np.float32),
        [0, len(q)],
        Budget(share=1.0, error=error),
    )
    sequence.truncate(TOKENS)
    return np.asarray(found.out), found.bytes_read * 8 / (2 * 2 * DIM * (TOKENS + len(q)))


def test_outputs_are_no_further_off_than_is_allowed(
    pairs: dict[str, tuple[CXLPool, Sequence]], rng: np.random.Generator
) -> None:
    q = (1 + rng.standard_normal((4, 6, DIM))).astype(np.float32)
    want, _ = read_of(*pairs["int8"], q, 0)
    whole, bits = read_of(*pairs["progressive"], q, 0)
    np.testing.assert_array_equal(whole, want)
    assert 8 < bits < 8.6  # the last page has room for more tokens
    before = bits
    for error in ERRORS:
        got, bits = read_of(*pairs["progressive"], q, error)
        assert float(np.sqrt((off(got, want) ** 2).mean())) <= error
        assert 4 < bits <= before + 1e-9
        before = bits
    assert before < 5
    nearly, bits = read_of(*pairs["progressive"], q, 1e-6)
    np.testing.assert_allclose(nearly, want, atol=2e-5)
    assert bits > 8


def test_a_sum_of_planes_is_the_same_by_any_way(
    pairs: dict[str, tuple[CXLPool, Sequence]], rng: np.random.Generator
) -> None:
    """Alone, with others, forked, over chosen pages, under a softcap."""
    pool, sequence = pairs["progressive"]
    q = (1 + rng.standard_normal((1, 4, DIM))).astype(np.float32)
    alone, lse = sequence.attend(0, q, error=0.03)
    twin = sequence.fork()
    pair = pool.batch([sequence, twin])
    both = np.asarray(pair.attend(0, np.concatenate([q, q]), [0, 1, 2], error=0.03)[0])
    np.testing.assert_array_equal(both[0], both[1])
    np.testing.assert_allclose(both[:1], alone, atol=2e-5)
    twin.release()
    every = sequence.select(0, q, Budget(share=1.0), method="exact")
    listed, _ = sequence.attend(0, q, every, error=0.03)
    np.testing.assert_allclose(listed, alone, atol=2e-2)
    some = sequence.select(0, q, Budget(pages=20), method="two_stage")
    few, some_lse = sequence.attend(0, q, some, error=0.03)
    exact, exact_lse = sequence.attend(0, q, some)
    assert float(off(few, exact).max()) < 0.06
    np.testing.assert_allclose(some_lse, exact_lse, atol=0.1)
    assert (np.asarray(some_lse) <= np.asarray(lse) + 0.1).all()
    capped, _ = sequence.attend(0, q, softcap=5.0, error=0.03)
    want, _ = sequence.attend(0, q, softcap=5.0)
    assert float(off(capped, want).max()) < 0.06


@pytest.mark.parametrize("sharp", [10, 20, 40])
def test_outputs_of_coarse_logits(sharp: float, rng: np.random.Generator) -> None:
    """By the upper planes they are off by 1, 2 and 4, so that shares are off by whole factors."""
    layout = layout_of(("progressive", "progressive"), dim=DIM, page_tokens=16)
    keys, values = (rng.standard_normal((4000, 2, DIM), np.float32) for _ in range(2))
    q = (sharp * rng.standard_normal((40, 1, 4, DIM))).astype(np.float32)
    with pool_of(layout, 4000) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        want = np.stack([sequence.attend(0, row)[0] for row in q])
        for error in (0.01, 0.03, 0.1):
            got = np.stack([sequence.attend(0, row, error=error)[0] for row in q])
            assert float(np.sqrt((off(got, want) ** 2).mean())) <= error


@pytest.mark.parametrize("common", [0, 1, 10, np.inf])
def test_values_that_are_alike_are_no_further_off_than_one_is(
    common: float, rng: np.random.Generator
) -> None:
    """A row that all values have, so many times as long as what is their own: its rounding does not
    cancel, so that an error holds only while that is short."""
    layout = layout_of(("progressive", "progressive"), dim=DIM, page_tokens=16, kv_heads=1)
    keys = rng.standard_normal((4000, 1, DIM), np.float32)
    own = rng.standard_normal((4000, 1, DIM), np.float32)
    row = rng.standard_normal((1, 1, DIM), np.float32)
    values = own + common * row if np.isfinite(common) else own * 0 + row
    q = rng.standard_normal((1, 4, DIM), np.float32)
    with pool_of(layout, 4000) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        want, _ = sequence.attend(0, q)
        got, _ = sequence.attend(0, q, error=0.01)
        gap = np.linalg.norm(np.asarray(got) - np.asarray(want), axis=-1)
        found = float(np.sqrt((gap**2).mean()) / np.linalg.norm(values, axis=-1).mean())
        assert found <= (0.01 if common <= 1 else 0.12)


@pytest.mark.parametrize(
    "pair",
    [("progressive", "int8"), ("int4", "progressive"), ("none", "progressive")],
    ids="-".join,
)
@pytest.mark.parametrize("window", [None, 100])
def test_one_of_the_two_in_planes(
    pair: tuple[str, str], window: int | None, rng: np.random.Generator
) -> None:
    """Several sequences and rows, some of which do not see all of a page."""
    layout = layout_of(pair, dim=DIM, value_dim=32, page_tokens=16, window=window)
    case = case_of(rng, layout, (900, 40, 333), (1, 3, 2))
    with pool_of(layout, 1400) as pool:
        sequences = [pool.sequence() for _ in case.keys]
        for sequence, k, v in zip(sequences, case.keys, case.values, strict=True):
            sequence.append(0, k, v)
        batch = pool.batch(sequences)
        want, want_lse = batch.attend(0, case.queries, case.starts)
        longest = max(np.linalg.norm(v, axis=-1).max() for v in case.values)
        for error in (1e-6, 0.03, 0.5):
            got, lse = batch.attend(0, case.queries, case.starts, error=error)
            gap = np.linalg.norm(np.asarray(got) - np.asarray(want), axis=-1) / longest
            assert float(np.sqrt((gap**2).mean())) <= max(error, 1e-4)
            if pair[0] != "progressive":
                np.testing.assert_allclose(lse, want_lse, atol=1e-4)


@pytest.mark.parametrize("place", [3, 700, 1400])
def test_a_page_that_has_all_is_read_in_all_bits(place: int, rng: np.random.Generator) -> None:
    """Wherever it lies among the ranges of a sequence, whose sums are put together."""
    layout = layout_of(("progressive", "progressive"), dim=DIM, page_tokens=16)
    keys, values = rng.standard_normal((2, TOKENS, 2, DIM), np.float32)
    keys[place] = 4
    q = np.ones((1, 4, DIM), np.float32)
    with pool_of(layout, TOKENS) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        got, want = (np.asarray(sequence.attend(0, q, error=e)[0]) for e in (0.02, 0.0))
        assert float(off(got, want).max()) < 1e-4


def test_an_emulated_link_moves_what_is_read(
    pairs: dict[str, tuple[CXLPool, Sequence]], rng: np.random.Generator
) -> None:
    pool, sequence = pairs["progressive"]
    q = rng.standard_normal((1, 4, DIM), np.float32)
    seconds = []
    for error in (0.0, 1e-6, 0.3):
        with emulate(pool, "astera-a1000-remote-socket", mode="virtual") as link:
            sequence.attend(0, q, error=error)
            seconds.append(link.seconds)
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)
    assert seconds[2] < 0.8 * seconds[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_spoils_what_it_spoils_in_all_bits(bad: float, rng: np.random.Generator) -> None:
    layout = layout_of(("progressive", "progressive"), dim=DIM, page_tokens=16)
    keys, values = drawn(rng, layout, 700)
    keys[333, 0, 5] = bad
    q = rng.standard_normal((1, 4, DIM), np.float32)
    with pool_of(layout, 700) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        want, got = (np.asarray(sequence.attend(0, q, error=e)[0]) for e in (0.0, 0.05))
        assert np.isnan(want[0, :2]).all()
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


def test_a_pool_without_planes_takes_an_error_and_reads_all(rng: np.random.Generator) -> None:
    layout = layout_of(("int8", "int4"), dim=DIM, page_tokens=16)
    keys, values = drawn(rng, layout, 300)
    q = rng.standard_normal((1, 4, DIM), np.float32)
    with pool_of(layout, 300) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        for got, want in zip(sequence.attend(0, q, error=0.1), sequence.attend(0, q), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("error", [-0.1, np.nan, np.inf, "much", True, 1e39, 10**400])
def test_an_error_that_is_none(error: object, rng: np.random.Generator) -> None:
    with pytest.raises(BadArgumentError, match=r"error=.*: a number, 0 or more"):
        Budget(error=error)  # type: ignore[arg-type]
    layout = layout_of(("progressive", "none"), dim=DIM)
    with pool_of(layout, 10) as pool:
        sequence = pool.sequence()
        sequence.append(0, *drawn(rng, layout, 4))
        q = np.ones((1, 2, DIM), np.float32)
        with pytest.raises(BadArgumentError, match=r"error=.*: a number, 0 or more"):
            sequence.attend(0, q, error=error)  # type: ignore[call-overload]


def test_sequences_do_not_keep_the_room_of_an_attend(rng: np.random.Generator) -> None:
    """Logits by upper planes, 32 MB of each call here; memory of the process, in bytes."""

    def held() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    layout = layout_of(("progressive", "progressive"), dim=DIM, page_tokens=16)
    keys, values = drawn(rng, layout, 4000)
    q = rng.standard_normal((256, 8, DIM), np.float32)
    with pool_of(layout, 4000) as pool:
        first = pool.sequence()
        first.append(0, keys, values)
        sequences = [first, *(first.fork() for _ in range(9))]
        want, _ = first.attend(0, q, error=0.1)
        before = held()
        for sequence in sequences:
            np.testing.assert_array_equal(sequence.attend(0, q, error=0.1)[0], want)
        assert held() - before < 128 << 20
