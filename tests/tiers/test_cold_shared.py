"""Processes share a cold file: what was stored is there or a miss, whoever of them dies or stops.

What they have in common with the file itself is in test_cold_mooncake.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import BusyError, ClosedError, GeometryError, NotAColdFileError
from cxlkv.prefix import prefix_keys
from cxlkv.tiers import Tiers, cold_server, cold_shared
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_shared import SharedColdTier

from ..support.forking import child_beside
from ..support.lengths import nightly
from ..support.processes import Child
from ..support.threads import run_all
from ..support.waiting import until
from ..test_records import grown, names_of_keys, read_all
from .test_cold import SHAPE, capacity, load, names, record, records

SLOTS = 24

# Takes orders: store N, load N, exit; says what came of it, and whether it has the file.
WORKER = """
import json, sys
import numpy as np
from cxlkv.tiers import cold_shared
from cxlkv.tiers.cold_file import RecordShape
from cxlkv.tiers.cold_shared import SharedColdTier
from tests.support.cold_storer import name, noise
cold_shared.ANSWER_S = float(sys.argv[3])
with SharedColdTier(
    sys.argv[1], shape=RecordShape(1000, 7, "a layout"), capacity=int(sys.argv[2]), fsync="none"
) as tier:
    print(json.dumps({"owner": tier.is_owner}), flush=True)
    for line in sys.stdin:
        does, *numbers = line.split()
        numbers = [int(n) for n in numbers]
        given = np.stack([name(n) for n in numbers])
        if does == "store":
            found = tier.store(given, np.stack([noise(n, 1000) for n in numbers])).tolist()
        else:
            out = np.full((len(numbers), 1000), 255, np.uint8)
            found = tier.load(given, out).tolist()
            right = [bool((row == noise(n, 1000)).all()) for n, row in zip(numbers, out)]
            assert right == found, (numbers, right, found)
        print(json.dumps({"found": found, "owner": tier.is_owner}), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.cold"


def shared(path: Path, slots: int = SLOTS) -> SharedColdTier:
    return SharedColdTier(path, shape=SHAPE, capacity=capacity(slots), fsync="none")


def worker(path: Path, answer_s: float = 5.0) -> Child:
    return Child("-c", WORKER, path, capacity(SLOTS), answer_s)


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_shared, "ANSWER_S", 0.3)
    monkeypatch.setattr(cold_shared, "SETUP_S", 0.5)
    monkeypatch.setattr(cold_shared, "PAUSE_S", 0.01)


# ---- who has the file ----


def test_the_next_one_takes_the_file(path: Path) -> None:
    with shared(path) as second_owner:
        second_owner.close()
        with shared(path) as first, shared(path) as second, shared(path) as third:
            assert first.store(names(1, 2), records(1, 2)).all()
            assert load(second, 1, 2, 3) == load(third, 1, 2, 3) == [True, True, False]
            first.close()
            assert third.store(names(3), records(3)).all()
            assert load(second, 1, 2, 3) == [True, True, True]
            assert (second.is_owner, third.is_owner) == (False, True)
            assert second.check(deep=True) == third.check(deep=True) == []
            assert second.stats()["records"] == 3
            assert second.stats()["errors"] == 0
    assert not list(path.parent.glob("*.sock")), "a socket stays behind"


@contextmanager
def something_at(place: Path, what: str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        if what == "file":
            place.write_text("somebody's")
        elif what == "folder":
            place.mkdir()
        else:
            listener.bind(str(place))
            listener.listen()
        yield


@pytest.mark.parametrize("what", ["file", "folder", "program"])
def test_what_is_no_socket_of_ours_stays(path: Path, what: str) -> None:
    place = Path(cold_server.socket_path(str(path)))
    with something_at(place, what):
        before = place.lstat()
        with pytest.raises(NotAColdFileError, match=f"{place} is no cold tier's socket"):
            shared(path)
        assert os.path.samestat(before, place.lstat())
    place.rename(f"{place}.away")
    with shared(path) as tier:  # the file is free again
        assert tier.is_owner
        place.unlink()
        place.write_text("somebody's")
    assert place.read_text() == "somebody's"


@pytest.mark.parametrize("count", [6, nightly(100)])
def test_workers_that_are_killed(path: Path, seed: int, count: int) -> None:
    """Any worker, the owner too, at any time between two orders or in the middle of one: what
    store() said it has stays, as far as the file has room, and no byte is wrong."""
    rng, stored = random.Random(seed), set[int]()
    with ExitStack() as stack:
        workers: list[Child] = []
        kills = orders = 0
        while kills < count:
            while len(workers) < 3:
                workers.append(stack.enter_context(worker(path)))
                workers[-1].hear()
            one, numbers = rng.choice(workers), rng.sample(range(SLOTS), rng.randint(1, 8))
            does = rng.choice(["store", "load"])
            one.tell(f"{does} {' '.join(map(str, numbers))}")
            if rng.random() < 0.1:
                victim = rng.choice(workers)
                victim.popen.kill()
                victim.popen.wait()
                workers.remove(victim)
                kills += 1
                if victim is one:
                    continue
            answer = json.loads(one.hear())
            orders += 1
            for number, found in zip(numbers, answer["found"], strict=True):
                assert found or (does == "load" and number not in stored), (does, number)
                if does == "store":
                    stored.add(number)
        for one in workers:
            one.popen.kill()
            one.popen.wait()
    print(f"{orders} orders, {kills} kills")
    with closing(ColdTier(path, shape=SHAPE, capacity=capacity(SLOTS))) as tier:
        assert tier.check(deep=True) == []
        assert all(load(tier, *sorted(stored)))


def stop(process: Child) -> None:
    """When this returns, it does nothing more."""
    process.popen.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_an_owner_that_is_stopped_costs_a_deadline(path: Path, short_deadlines: None) -> None:
    with worker(path) as owner:
        owner.hear()
        with shared(path) as tier:
            assert tier.store(names(1, 2), records(1, 2)).all()
            stop(owner)
            assert load(tier, 1) == [False]
            assert f"process {owner.pid} has not answered" in tier.why_off
            assert tier.store(names(3), records(3)).tolist() == [False]
            assert tier.stats()["writes_off"] == 1
            with pytest.raises(BusyError, match=f"in use by process {owner.pid}.*not serve"):
                shared(path)
            owner.popen.send_signal(signal.SIGCONT)
            until(lambda: load(tier, 1, 2) == [True, True], "who goes on is not asked again")
            assert tier.why_off == ""
            stop(owner)
            assert load(tier, 2) == [False]
            owner.popen.kill()
            owner.popen.wait()
            until(lambda: load(tier, 1, 2) == [True, True], "nobody took the file")
            assert tier.is_owner


def test_what_two_settings_differ_in_is_named(path: Path) -> None:
    with shared(path), pytest.raises(GeometryError, match="capacity is 102400 there and 53248 her"):
        shared(path, 12)


def test_a_holder_that_serves_nobody(path: Path, short_deadlines: None) -> None:
    with (
        ColdTier(path, shape=SHAPE, capacity=capacity(SLOTS)),
        pytest.raises(BusyError, match=f"in use by process {os.getpid()}.*does not serve"),
    ):
        shared(path)


@pytest.mark.parametrize("name", ["a" * 200, "ü" * 100])
def test_long_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / ("b" * 200)
    folder.mkdir()
    with shared(folder / name) as owner, shared(folder / name) as peer:
        assert peer.store(names(1), records(1)).all()
        assert load(owner, 1) == [True]


def test_a_forked_child_finds_it_closed(path: Path) -> None:
    """And does not keep the file, nor the connection, when the parent is done with them."""
    with shared(path) as owner, shared(path) as peer:
        assert peer.store(names(1), records(1)).all()

        def child() -> None:
            for tier in (owner, peer):
                with pytest.raises(ClosedError):
                    load(tier, 1)

        with child_beside(child):
            assert load(peer, 1) == [True]
            owner.close()
            assert load(peer, 1) == [True]
            assert peer.is_owner


def test_threads_of_two_sides(path: Path, seed: int) -> None:
    with shared(path) as owner, shared(path) as peer:

        def run(number: int) -> None:
            rng, tier = random.Random(seed + number), (owner, peer)[number % 2]
            for _ in range(40):
                some = rng.sample(range(SLOTS), 4)
                tier.store(names(*some), records(*some))  # False: another thread stores it now
                load(tier, *some)

        run_all([partial(run, number) for number in range(6)])
        assert owner.check(deep=True) == []
        assert owner.stats()["corrupt"] == 0
        assert load(peer, *range(SLOTS)) == [True] * SLOTS


# ---- peers that are hostile, or broken ----


def messages() -> Iterator[Callable[[socket.socket], None]]:
    def sends(data: bytes, *sizes: int, seal: bool = True) -> Callable[[socket.socket], None]:
        def do(peer: socket.socket) -> None:
            memory = [os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in sizes]
            for one, size in zip(memory, sizes, strict=True):
                os.ftruncate(one, size)
                if seal:
                    fcntl.fcntl(one, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            socket.send_fds(peer, [data], memory)
            for one in memory:
                os.close(one)

        return do

    terms = cold_shared._terms(SHAPE, capacity(SLOTS), "none", None)
    hello, large = json.dumps(terms).encode(), 32 << 20
    yield sends(b"\xff\xfe", large)
    yield sends(b"[1, 2]", large)
    yield sends(b"[" * 60_000, large)
    yield sends(hello)
    yield sends(hello, 4096)
    yield sends(hello, large, seal=False)
    yield sends(hello, large, large)
    for request in (
        {"do": "store", "count": 1 << 40},
        {"do": "load", "count": -1},
        {"do": "contains"},
        {"do": "erase", "count": 1},
        {"count": 1},
    ):

        def follows(peer: socket.socket, request: object = request) -> None:
            sends(hello, large)(peer)
            cold_server.receive(peer)
            peer.send(json.dumps(request).encode())

        yield follows


def test_a_hostile_peer_is_its_own_loss(path: Path) -> None:
    with shared(path) as owner, shared(path) as friend:
        for hostile in messages():
            with cold_server.connect(str(path)) as peer:
                peer.settimeout(10)
                hostile(peer)
                while peer.recv(4096):  # answers, and then the end
                    pass
        assert friend.store(names(1), records(1)).all()
        assert load(owner, 1) == [True]


def test_a_peer_that_says_nothing_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_server, "WELCOME_S", 0.05)
    with shared(path) as tier, shared(path) as other, cold_server.connect(str(path)) as silent:
        silent.settimeout(60)
        assert silent.recv(1) == b""
        assert other.store(names(1), records(1)).all()
        assert load(tier, 1) == [True]


def test_memory_that_could_be_made_shorter_is_not_taken() -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 32 << 20)
    with pytest.raises(OSError, match="shorter"):
        cold_server.SharedRows(descriptor, 1000)
    os.close(descriptor)


@pytest.mark.usefixtures("short_deadlines")
def test_an_owner_that_gets_no_descriptor_takes_the_next_peer(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures, accept = iter([errno.EMFILE, errno.ENOMEM]), socket.socket.accept

    def flaky(listener: socket.socket) -> tuple[socket.socket, object]:
        for code in failures:
            raise OSError(code, os.strerror(code))
        return accept(listener)

    monkeypatch.setattr(cold_server, "ACCEPT_PAUSE_S", 0.01)
    monkeypatch.setattr(cold_server._OwnedSocket, "accept", flaky)
    with shared(path) as owner, shared(path) as peer:
        assert peer.store(names(1), records(1)).all()
        assert load(owner, 1) == [True]
    assert caplog.text.count("takes no peer for now") == 1


@pytest.mark.usefixtures("short_deadlines")
def test_what_opens_it_again_outlives_anything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared(path) as owner, shared(path) as peer:
        assert peer.store(names(1), records(1)).all()
        with monkeypatch.context() as patch:

            def fail(tier: SharedColdTier) -> None:
                raise MemoryError

            patch.setattr(SharedColdTier, "_joined", fail)
            owner.close()
            until(lambda: "MemoryError" in peer._reason or not peer.contains(names(1)).all())
            until(lambda: "MemoryError" in peer._reason)
        until(lambda: bool(peer.contains(names(1)).all()))
        assert peer.is_owner


@pytest.mark.parametrize("said", [{}, {"stats": 5}, {"stats": None}, {"more": [1]}])
def test_an_owner_that_answers_nonsense_is_lost(
    path: Path, said: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared(path) as owner, shared(path) as peer:
        assert peer.store(names(1), records(1)).all()
        with monkeypatch.context() as patch:
            patch.setattr(cold_server.ColdServer, "_answer", lambda *_: said)
            assert "hits" not in peer.stats()
            assert peer.check() == [""]
        assert "hits" in peer.stats()
        assert load(owner, 1) == [True]


def test_memory_cannot_be_made_shorter(path: Path) -> None:
    """By a peer: the owner would die of SIGBUS."""
    descriptor, _ = cold_server.SharedRows.make(1000)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


# ---- pools ----


def test_two_tiers_of_one_pool(path: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """Each evicts to the file of both, and brings back what the other evicted."""
    layout = KVLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=16, dtype="float16")
    place, ids = str(tmp_path / "a.pool"), list(range(64))
    with (
        CXLPool.create(place, layout=layout, capacity="4MiB", threads=1) as pool,
        CXLPool.open(place, threads=1) as other,
        Tiers(pool, cold=path, cold_capacity="1MiB") as mine,
        Tiers(other, cold=path, cold_capacity="1MiB") as others,
    ):
        sequence = grown(pool, rng, len(ids))
        pool.publish_prefix(sequence, ids)
        wanted = names_of_keys(pool, prefix_keys(ids, 16))
        taken = read_all(pool, wanted)
        sequence.release()
        for one, another in ((mine, others), (others, mine)):
            assert one.reclaim(pool.stats()["pages_total"]) == 4
            with another.match_prefix(ids) as hit:
                assert hit.tokens == len(ids)
            np.testing.assert_array_equal(read_all(pool, wanted), taken)
        assert mine.stats()["cold_records"] == others.stats()["cold_records"] == 4


def test_records_are_whole(path: Path) -> None:
    """More rows than one message has room for."""
    many = range(100)
    with (
        SharedColdTier(path, shape=SHAPE, capacity=capacity(200), fsync="none"),
        SharedColdTier(path, shape=SHAPE, capacity=capacity(200), fsync="none") as peer,
    ):
        peer._side._shared.records = peer._side._shared.records[:7]  # type: ignore[union-attr]
        assert peer.store(names(*many), records(*many)).all()
        out = np.zeros((100, 1000), np.uint8)
        assert peer.load(names(*many), out).all()
        np.testing.assert_array_equal(out, np.stack([record(n) for n in many]))
