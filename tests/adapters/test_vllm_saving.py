"""The thread that saves what a device has copied to host memory, by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import MemoryShortError
from cxlkv.gpu import streams
from cxlkv.tiers import Tiers

torch = pytest.importorskip("torch", reason="the engine's blocks are torch's")

from cxlkv.adapters.vllm.device_blocks import Staged  # noqa: E402  it needs torch
from cxlkv.adapters.vllm.saving import Ring, Save, SavedText, Saver  # noqa: E402

TOKENS, BYTES = 4, 4 * 8 * 4
CPU = torch.device("cpu")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CXLPool]:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=TOKENS, dtype="float32")
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="4MiB", threads=1) as made:
        yield made


@pytest.fixture
def saver(pool: CXLPool) -> Iterator[Saver]:
    """Its work is done when a test says so."""
    how = (pool, Tiers(pool), None, Ring(1 << 12, CPU))
    made = Saver(*how, unit=TOKENS, groups=[0], ratios=[1], threaded=False)
    yield made
    made.close()
    assert pool.stats()["pages_held"] == 0


def save_of(saver: Saver, name: str, key: bytes) -> Save:
    """The first block of a text of this name."""
    memory = saver._ring.take(BYTES)
    assert memory is not None
    rows = memory.view(torch.float32).view(1, 1, TOKENS, 8)
    text, starts = SavedText(name, key * 16, 0, 1), [np.array([0, 1], np.int32)]
    staged = Staged(rows, rows, streams.event(CPU))
    return Save([text], starts, TOKENS, memory, [staged])


def test_a_cancelled_request_stays_so_behind_the_end_of_another_one_of_its_name(
    saver: Saver, pool: CXLPool
) -> None:
    """One that was preempted and has begun again, while the thread is behind."""
    saver.submit(save_of(saver, "a", b"1"))
    saver.end("a", b"", 0)
    saver.work()
    saver.submit(save_of(saver, "a", b"2"))
    saver.cancel(["a"])
    for _ in range(2):
        saver.work()
    assert pool.stats()["pages_published"] == 1
    saver.end("a", b"", 0)
    saver.submit(save_of(saver, "a", b"3"))
    for _ in range(2):
        saver.work()
    assert pool.stats()["pages_published"] == 2
    assert not saver._cancelled
    assert not saver._ends


def test_a_host_that_gives_no_pinned_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*given: object, **how: object) -> object:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(streams, "pinned", short)
    with pytest.raises(MemoryShortError, match=r"no 4096 bytes of pinned memory .*batched-tokens"):
        Ring(4096, CPU)


def test_a_host_that_has_no_thread_now_is_asked_again(
    pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = (pool, Tiers(pool), None, Ring(1 << 12, CPU))
    made = Saver(*how, unit=TOKENS, groups=[0], ratios=[1])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        made.submit(save_of(made, "a", b"1"))
    assert pool.stats()["pages_published"] == 0
    made.submit(save_of(made, "b", b"2"))
    made.wait()
    made.close()
    assert pool.stats()["pages_published"] == 2


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
