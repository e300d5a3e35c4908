"""Verifying chosen pages for readers by address: each once, and again when freed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, _core
from cxlkv.errors import BadArgumentError, ClosedError, CorruptError, ReleasedError
from cxlkv.ndp.engine import Selection, unscored
from cxlkv.sequence import Sequence

from .support.texts import SMALL, grown
from .test_places import region_of

KEYS = [bytes([i] * 16) for i in range(5)]


def chosen(*lists: list[list[int]], per: str = "sequence") -> Selection:
    """A list of pages for each head of each sequence."""
    pages = np.array(lists, np.int32)
    return unscored(pages, np.arange(len(lists) + 1, dtype=np.int32), per)


def damage(pool: CXLPool, sequence: Sequence, layer: int, page: int) -> None:
    """Flip a bit of a page's keys."""
    region_of(pool)[_core.sequence_places(sequence._handle, layer).keys[page]] ^= 1


@pytest.fixture
def reopened(tmp_path: Path) -> CXLPool:
    """A pool with a published text of 5 pages, none of which this process has read."""
    path = tmp_path / "kv.pool"
    with CXLPool.create(path, layout=SMALL, capacity="4MiB", threads=1) as pool:
        pool.publish(grown(pool, range(20)), KEYS, 4)
    return CXLPool.open(path, threads=1)


def test_a_damaged_page_is_found_before_it_is_read(reopened: CXLPool) -> None:
    with reopened as pool, pool.match(KEYS) as hit:
        sequence = hit.sequence()
        damage(pool, sequence, 1, 3)
        batch = pool.batch([sequence])
        batch.verify(0, chosen([[0, 3, -1], [1, 2, 4]]))
        batch.verify(1, chosen([[0, -1, -1], [1, 2, 4]]))
        with pytest.raises(CorruptError, match="layer 1"):
            batch.verify(1, chosen([[0, 1], [3, -1]]))
        assert pool.stats()["corrupt_pieces"] == 1


def test_what_was_right_is_not_read_again(reopened: CXLPool) -> None:
    """It says what was seen, so that a step costs a look at a bit for each page."""
    with reopened as pool, pool.match(KEYS) as hit:
        sequence = hit.sequence()
        batch = pool.batch([sequence])
        batch.verify(1, chosen([[3], [3]]))
        damage(pool, sequence, 1, 3)
        batch.verify(1, chosen([[3], [3]]))
        with pytest.raises(CorruptError):
            sequence.fetch(1)


def test_what_was_written_here_is_right_and_a_tail_has_nothing_to_verify() -> None:
    with CXLPool.create("anonymous:", layout=SMALL, capacity="4MiB", threads=1) as pool:
        sequence = grown(pool, range(10))
        damage(pool, sequence, 1, 1)
        pool.batch([sequence]).verify(1, chosen([[0, 2], [1, -1]]))


def test_it_counts_as_use(reopened: CXLPool) -> None:
    with reopened as pool, pool.match(KEYS) as hit:
        sequence = hit.sequence()
        before = pool.hotness.counts()
        pool.batch([sequence]).verify(0, chosen([[1, 2], [1, -1]]))
        page = int(sequence.pages[1])
        assert pool.hotness.counts()[page] > before[page]


def test_bad_lists_are_refused(reopened: CXLPool) -> None:
    with reopened as pool, pool.match(KEYS) as hit:
        sequence = hit.sequence()
        batch = pool.batch([sequence])
        for pages, text in (([[5], [0]], "page 5, the sequence has 5"), ([[-2], [0]], "page -2")):
            with pytest.raises(BadArgumentError, match=text):
                batch.verify(0, chosen(pages))
        with pytest.raises(BadArgumentError, match="layer 2"):
            batch.verify(2, chosen([[0], [0]]))
        with pytest.raises(BadArgumentError, match="one for each of 1 sequences"):
            batch.verify(0, chosen([[0], [0]], [[0], [0]]))
        with pytest.raises(BadArgumentError, match="one for each of 1 sequences"):
            batch.verify(0, chosen([[0], [0]], per="query"))
        sequence.release()
        with pytest.raises(ReleasedError):
            batch.verify(0, chosen([[0], [0]]))
    with pytest.raises(ClosedError):
        batch.verify(0, chosen([[0], [0]]))
