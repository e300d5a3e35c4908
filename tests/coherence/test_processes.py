"""Several processes on one pool: nothing lost, doubled or torn, whoever is killed and whenever.

The processes are real ones (tests/support/pool_worker.py); they check every token that they read.
No sleeps: the test reads what they report.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, Sequence
from cxlkv.arrays import Floats
from cxlkv.errors import BusyError, ClosedError, StaleError
from cxlkv.prefix import content_keys, prefix_keys

from ..support.forking import child_beside, in_child
from ..support.lengths import nightly
from ..support.processes import Child, python
from ..support.states import host_states
from ..support.storm import EVENTS, Process, run
from ..support.texts import SMALL, numbers, verify
from .test_hosts import text, write

TOKENS = 10
CAPACITY_BYTES = (2 << 20) + (310 << 10)  # full now and then, and room to publish in between


@pytest.fixture
def pool_path(shm_path: Path) -> str:
    return str(shm_path)


@pytest.fixture
def pool(pool_path: str) -> Iterator[CXLPool]:
    with CXLPool.create(pool_path, layout=SMALL, capacity="3MiB", threads=1) as made:
        yield made


def fill(pool: CXLPool, seed: int) -> Sequence:
    return write(pool, seed, TOKENS)


def assert_holds(sequence: Sequence, seed: int) -> None:
    verify(sequence, text(seed, TOKENS))


def k_and_v(seed: int, layer: int) -> tuple[Floats, Floats]:
    return numbers(text(seed, TOKENS), layer, 0), numbers(text(seed, TOKENS), layer, 1)


def assert_settled(path: str) -> dict[str, int]:
    """Every page is free or published, and every byte of the published ones is right."""
    with CXLPool.open(path, threads=1) as pool:
        report = pool.admin.check(deep=True)
        assert report["clean"], report["problems"]
        stats = pool.stats()
        assert stats["processes"] == 1
        assert stats["pages_held"] == stats["pages_quarantined"] == stats["pages_retired"] == 0
        assert stats["pages_free"] + stats["pages_published_only"] == stats["pages_total"]
        return stats


@pytest.mark.parametrize("operations", [2_000, nightly(200_000)])
def test_four_processes_with_one_killed(
    pool_path: str, tmp_path: Path, seed: int, operations: int
) -> None:
    """`operations`, and as many again until each event was seen: their mix is the scheduler's."""
    path, box = pool_path, tmp_path
    CXLPool.create(path, layout=SMALL, capacity=CAPACITY_BYTES, threads=1).close()
    start = time.monotonic()
    with CXLPool.open(path, threads=1) as watcher:  # so that the host's counters outlive the rest
        seen, rounds = Counter[str](), 0
        while rounds == 0 or not all(seen[what] for what in EVENTS):
            own = seed + 1000 * rounds
            seen += run(path, box, own, operations, hosts=[None] * 4, killed={1})
            rounds += 1
        reaped = watcher.stats()["reaped_processes"]
    print(f"{seen['operations']} operations in {time.monotonic() - start:.1f} s: {dict(seen)}")
    assert seen["operations"] >= rounds * operations
    assert reaped == rounds
    assert_settled(path)


@pytest.mark.parametrize("kills", [12, nightly(1000)])
def test_killed_processes_leave_no_page_held(
    pool_path: str, tmp_path: Path, seed: int, kills: int
) -> None:
    """Two work on while others are killed beside them, wherever they happen to be."""
    path, box = pool_path, tmp_path
    CXLPool.create(path, layout=SMALL, capacity=CAPACITY_BYTES, threads=1).close()
    with CXLPool.open(path, threads=1) as watcher, ExitStack() as stack:
        killers = [Process("victims", path, box, seed + 1000 * i, kills // 2) for i in range(2)]
        steady = Process("work", path, box, seed + 5000, 40 * kills)
        for process in (*killers, steady):
            stack.callback(process.kill)
        for process in (*killers, steady):
            process.end()
        stats = watcher.stats()
        print({name: stats[name] for name in ("reaped_processes", "rebuilds")})
        # Who dies while it reaps another may leave that one uncounted, and a rebuild behind.
        assert kills - stats["rebuilds"] <= stats["reaped_processes"] <= kills
        assert watcher.admin.check(deep=True)["clean"]
    assert_settled(path)


# ---- what is left behind, one story each ----

MUTEX_OFFSET = 96  # of the lock in the host state, behind its fixed head

DIE_WITH_THE_LOCK = """
import ctypes, mmap, os, signal, sys
from cxlkv import CXLPool
pool = CXLPool.open(sys.argv[1])
with open(sys.argv[2], "r+b") as file:
    state = mmap.mmap(file.fileno(), 0)
lock = ctypes.c_char.from_buffer(state, int(sys.argv[3]))
libc = ctypes.CDLL(None)
assert libc.pthread_mutex_lock(ctypes.byref(lock)) == 0
os.kill(os.getpid(), signal.SIGKILL)
"""

LEAVE_WITHOUT_CLOSING = """
import os, signal, sys
import numpy as np
from cxlkv import CXLPool
pool = CXLPool.open(sys.argv[1])
seq = pool.sequence()
for layer in range(2):
    rows = np.arange(10 * 16, dtype=np.float32).reshape(10, 2, 8) + layer
    seq.append(layer, rows, rows + 0.5)
print(pool.publish_prefix(seq, list(range(8))), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def host_state(pool: CXLPool) -> Path:
    (found,) = host_states(pool.describe()["identity"])
    return found


def test_a_death_inside_the_lock_is_mended(pool: CXLPool) -> None:
    """The kernel tells the next one who takes the lock, and that one recounts everything."""
    sequence = fill(pool, 7)
    state = str(host_state(pool))
    for deaths in (1, 2):
        python(
            DIE_WITH_THE_LOCK, str(pool.path), state, str(MUTEX_OFFSET), expected=-signal.SIGKILL
        )
        stats = pool.stats()
        assert stats["rebuilds"] == stats["reaped_processes"] == deaths
        assert_holds(sequence, 7)
        assert pool.admin.check(deep=True)["clean"]
    sequence.release()
    assert pool.stats()["pages_free"] == pool.stats()["pages_total"]


def test_reopened_after_everybody_died(pool_path: str) -> None:
    """The host state still lies there: the next one reaps the dead; what they published stays."""
    CXLPool.create(pool_path, layout=SMALL, capacity="3MiB").close()
    for already in (False, True):
        published = int(python(LEAVE_WITHOUT_CLOSING, pool_path, expected=-signal.SIGKILL))
        assert published == (0 if already else 2)
    with CXLPool.open(pool_path) as pool:
        stats = pool.stats()
        assert stats["reaped_processes"] == 2  # one by the second, one by us
        assert stats["pages_held"] == 0
        assert stats["pages_published_only"] == 2
        with pool.match_prefix(list(range(8))) as hit:
            assert hit.tokens == 8
            k, _ = hit.sequence().fetch(1)
            assert np.asarray(k)[0, 0, 0, 0] == 1.0
        assert pool.admin.check(deep=True)["clean"]
    assert_settled(pool_path)


IN_ANOTHER_PROCESS = """
import sys
from cxlkv import CXLPool
from cxlkv.errors import BadArgumentError
from cxlkv.prefix import content_keys, prefix_keys
ids = list(range(10))
with CXLPool.open(sys.argv[1]) as pool:
    with pool.match_prefix([*ids, 77]) as hit:
        taken = hit.sequence()
        assert (hit.tokens, len(taken)) == (10, 10)
    assert (pool.stats()["pages_pinned"], pool.pages.evictable().sum()) == (2, 0)
    assert pool.admin.unpin(prefix_keys(ids, 4, tail=True)[:1]) == 1
    assert pool.admin.pin(prefix_keys(ids, 4, tail=True)[2:]) == 1
    with pool.match(content_keys(ids[:4], 4, b"content"), strict=False) as loose:
        assert (loose.tokens, loose.strict) == (4, False)
    assert pool.match_prefix(ids[:4], b"content").tokens == 0
    print(taken.handle.hex(), flush=True)
    sys.stdin.readline()
"""


def test_tails_pins_and_content_are_seen_by_other_processes(pool: CXLPool, pool_path: str) -> None:
    ids = list(range(10))
    sequence = fill(pool, 3)
    assert pool.publish_prefix(sequence, ids, tail=True) == 3
    assert pool.admin.pin(prefix_keys(ids, 4)) == 2
    other = fill(pool, 4)
    assert pool.publish(other, content_keys(ids[:4], 4, b"content"), 4, strict=False) == 1
    assert pool.admin.unpin(prefix_keys(ids, 4)[1:]) == 1
    assert pool.admin.pin(prefix_keys(ids, 4, tail=True)[2:]) == 1  # the one that nobody holds
    with Child("-c", IN_ANOTHER_PROCESS, pool_path) as child:
        adopted = pool.adopt(bytes.fromhex(child.hear()))
        child.end()
    assert_holds(adopted, 3)
    assert pool.stats()["pages_pinned"] == 1
    pool.close()
    with CXLPool.open(pool_path) as again:  # the last one had left: marks are gone, pages are not
        assert again.stats()["pages_pinned"] == 0
        assert again.match_prefix(ids).tokens == 10


def test_host_state_deleted_while_nobody_uses_the_pool(pool_path: str) -> None:
    """After a reboot with the pool on a disk the region alone says what is published."""
    with CXLPool.create(pool_path, layout=SMALL, capacity="3MiB") as pool:
        state = host_state(pool)
    assert not state.exists(), "the last one out takes the host state along"
    python(LEAVE_WITHOUT_CLOSING, pool_path, expected=-signal.SIGKILL)
    state.unlink()
    with CXLPool.open(pool_path) as pool:
        assert pool.stats()["pages_published_only"] == 2
        assert pool.stats()["pages_free"] == pool.stats()["pages_total"] - 2
        with pool.match_prefix(list(range(12))) as hit:
            assert hit.tokens == 8
    assert_settled(pool_path)


def test_host_state_deleted_while_in_use_excludes_newcomers(pool: CXLPool) -> None:
    """From a container with its own /dev/shm: two states for one pool would corrupt it."""
    sequence = fill(pool, 3)
    host_state(pool).unlink()
    with pytest.raises(BusyError, match="another /dev/shm"):
        CXLPool.open(str(pool.path))
    assert_holds(sequence, 3)


def test_a_copy_of_a_pool_is_a_pool_of_its_own(pool: CXLPool, tmp_path: Path) -> None:
    """It has the same identity and names the same host state, and must not share it."""
    sequence = fill(pool, 5)
    pool.publish_prefix(sequence, list(range(8)))
    copy = tmp_path / "copy.pool"
    copy.write_bytes(Path(str(pool.path)).read_bytes())
    with CXLPool.open(copy) as other:
        assert other.stats()["processes"] == pool.stats()["processes"] == 1
        assert other.stats()["pages_published_only"] == 2
        held = pool.stats()["pages_held"]
        more = [fill(other, seed) for seed in range(5)]
        assert pool.stats()["pages_held"] == held
        assert_holds(sequence, 5)
        assert_holds(more[4], 4)
        assert other.admin.check(deep=True)["clean"]
    assert pool.admin.check(deep=True)["clean"]


def test_fork_with_live_sequences(pool: CXLPool) -> None:
    """Parent and child go on with what both have; the child's end gives back only its own."""
    sequence = fill(pool, 11)
    held = pool.stats()["pages_held"]

    def go_on() -> None:
        assert pool.stats()["processes"] == 2
        assert_holds(sequence, 11)
        for layer in range(SMALL.layers):
            sequence.append(layer, *k_and_v(99, layer))
        assert len(sequence.fork()) == 2 * TOKENS

    in_child(go_on)
    assert_holds(sequence, 11)
    stats = pool.stats()
    assert (stats["pages_held"], stats["reaped_processes"]) == (held, 1)
    assert pool.admin.check(deep=True)["clean"]


def test_fork_and_the_parent_lets_go_first(pool: CXLPool) -> None:
    sequence = fill(pool, 12)
    with child_beside(lambda: assert_holds(sequence, 12)):  # when the block has ended
        sequence.release()
        assert pool.stats()["pages_held"] == TOKENS // SMALL.page_tokens
    assert pool.stats()["pages_held"] == 0


def work_until(stop: threading.Event, pool: CXLPool, path: str) -> None:
    """Takes what locks the core has: in operations, in opening, and of a pool that is closed."""
    while not stop.is_set():
        with CXLPool.open(path, threads=2) as other:
            kept = [fill(other, 5).fork() for _ in range(3)]
            fill(pool, 6).release()
            pool.stats()
        with suppress(ClosedError):
            other.stats()
        del kept


def test_children_of_a_process_with_busy_threads(pool: CXLPool, pool_path: str) -> None:
    """Whatever they are in the middle of, a child finds no lock taken and nothing half done."""
    sequence, stop = fill(pool, 13), threading.Event()
    threads = [threading.Thread(target=work_until, args=(stop, pool, pool_path)) for _ in range(2)]
    for thread in threads:
        thread.start()

    def use() -> None:
        assert_holds(sequence, 13)
        fill(pool, 14).release()
        with CXLPool.open(pool_path, threads=2) as other:
            assert_holds(fill(other, 15), 15)
        sequence.release()
        pool.close()

    try:
        for _ in range(30):
            in_child(use)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert_holds(sequence, 13)
    sequence.release()
    assert pool.stats()["pages_held"] == 0
    assert pool.admin.check(deep=True)["clean"]


ADOPT = """
import sys
import numpy as np
from cxlkv import CXLPool
with CXLPool.open(sys.argv[1]) as pool:
    seq = pool.adopt(bytes.fromhex(sys.argv[2]))
    k, v = (np.asarray(x) for x in seq.fetch(1))
    print(len(seq), k.sum(dtype=float), v.sum(dtype=float), flush=True)
    sys.stdin.readline()
    print(np.asarray(seq.fetch(1)[0]).sum(dtype=float), flush=True)
"""


def test_another_process_adopts_and_outlives_the_sender(pool: CXLPool) -> None:
    sequence = fill(pool, 21)
    with Child("-c", ADOPT, pool.path, sequence.handle.hex()) as other:
        tokens, k_sum, v_sum = other.hear().split()
        assert int(tokens) == TOKENS
        k, v = k_and_v(21, 1)
        assert (float(k_sum), float(v_sum)) == (k.sum(dtype=float), v.sum(dtype=float))
        handle = sequence.handle
        sequence.release()
        again = pool.stats()["pages_held"]
        assert again == TOKENS // SMALL.page_tokens, "the other still has the complete pages"
        assert float(other.ask("go on")) == k.sum(dtype=float)
        other.end()
    assert pool.stats()["pages_free"] == pool.stats()["pages_total"]
    with pytest.raises(StaleError, match="was freed"):
        pool.adopt(handle)


def test_spawned_by_multiprocessing(pool: CXLPool) -> None:
    """multiprocessing's spawn starts a fresh interpreter; all that it needs is path and handle."""
    sequence = fill(pool, 31)
    code = (
        "from cxlkv import CXLPool\n"
        f"with CXLPool.open({pool.path!r}) as pool:\n"
        f"    assert len(pool.adopt(bytes.fromhex('{sequence.handle.hex()}'))) == {TOKENS}\n"
        "    assert pool.stats()['processes'] == 2\n"
    )
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        processes.apply(exec, (code, {}))
    assert_holds(sequence, 31)


def test_closed_here_open_there(pool_path: str) -> None:
    first = CXLPool.create(pool_path, layout=SMALL, capacity="3MiB")
    second = CXLPool.open(pool_path)
    handle = fill(second, 41)
    fill(first, 40)
    first.close()
    with pytest.raises(ClosedError):
        first.stats()
    assert_holds(handle, 41)
    assert second.stats()["processes"] == 1
    second.close()
    assert_settled(pool_path)


def test_open_and_close_never_meet_a_busy_pool(pool_path: str) -> None:
    """Coming and going at random, in several processes: no newcomer is told "in use"."""
    CXLPool.create(pool_path, layout=SMALL, capacity="3MiB").close()
    code = (
        "import sys\nfrom cxlkv import CXLPool\n"
        "for _ in range(300):\n    CXLPool.open(sys.argv[1], threads=1).close()\n"
    )
    with ExitStack() as stack:
        for child in [stack.enter_context(Child("-c", code, pool_path)) for _ in range(3)]:
            child.end()
    assert_settled(pool_path)
