"""Hosts that die, stop, come back or are damaged: others go on, and nobody reads wrong bytes.

Who dies or stops is a process of its own, which runs what it is told line by line. The rest is as
in test_hosts.py.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from cxlkv import CXLPool, _core
from cxlkv.errors import (
    BadArgumentError,
    CorruptError,
    CXLKVError,
    GeometryError,
    HostError,
)
from tests.support.stopping import stop

from ..conftest import audit
from ..support.damaging import poke
from ..support.forking import in_child
from ..support.lengths import nightly
from ..support.pool_worker import is_alive
from ..support.processes import Child, python
from ..support.states import host_states
from ..support.texts import numbers, verify
from ..support.waiting import until
from .test_hosts import (
    HOSTS,
    TOKENS,
    Hosts,
    fill_up,
    forget,
    found,
    make,
    publish,
    text,
    write,
    write_soon,
)
from .test_hosts import hosts as hosts
from .test_processes import DIE_WITH_THE_LOCK, MUTEX_OFFSET

SHORT_LEASE_S = 0.3
NEVER_S = 3600.0  # a keeper that does not work while a test runs
NAME_LINE, BEAT_LINE, LOCK_LINE, LOG_LINES = 0, 1, 2, 16  # of a host's block; types.h

REMOTE = """
import sys
from cxlkv.errors import CXLKVError
from tests.coherence.test_hosts import *
pool = CXLPool.open(sys.argv[1], host=int(sys.argv[2]), lease_s=float(sys.argv[3]), threads=1)
print("open", flush=True)
for line in sys.stdin:
    try:
        value = eval(f"({line})")
    except CXLKVError as error:
        value = f"{type(error).__name__}: {error}"
    print(value, flush=True)
"""


class Remote(Child):
    """A process on a host; ask() evaluates there, and has `pool`."""

    def __init__(self, stack: ExitStack, path: str, host: int, lease_s: float = SHORT_LEASE_S):
        super().__init__("-c", REMOTE, path, host, lease_s)
        stack.enter_context(self)
        assert self.hear() == "open"


def host_state(path: str, host: int) -> Path:
    """The file that a machine's end takes along."""
    (found,) = host_states(path_identity(path), f"-{host:02x}.host")
    return found


def path_identity(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(32)[16:].hex()


def differs(path: str, offset: int, data: bytes) -> bool:
    return poke(path, offset, b"", len(data)) != data


def line_offset(pool: CXLPool, host: int, line: int) -> int:
    geometry = pool.pages.geometry
    return geometry["hosts_offset"] + host * geometry["host_block_bytes"] + line * 64


# ---- deaths ----


def test_a_machine_that_dies_and_comes_back(hosts: Hosts) -> None:
    """Others read what it published, nobody takes its extents, and it finds what it left."""
    other = hosts.open(1, SHORT_LEASE_S)
    died = Remote(hosts.stack, hosts.path, 0)
    assert died.ask("[publish(pool, seed) for seed in range(1, 9)]")
    assert died.ask("kept := write(pool, 50)")
    with other.match_prefix(text(1)) as hit:
        sequence = hit.sequence()
        died.kill()
        host_state(hosts.path, 0).unlink()
        full = fill_up(other)
        audit(other)
        for seed in range(1, 9):
            assert found(other, seed) == TOKENS
        assert other.stats()["pages_elsewhere"] >= 9 * 5, "its extents are not anybody's"
        verify(sequence, text(1))
    back = hosts.open(0, SHORT_LEASE_S)
    stats = back.stats()
    assert stats["pages_published_only"] == 8 * 5
    assert stats["pages_held"] == 0, "what was not published is free again"
    assert stats["pages_free"] == stats["pages_total"] - stats["pages_elsewhere"] - 8 * 5
    for seed in range(1, 9):
        assert found(back, seed) == found(other, seed) == TOKENS
    assert forget(other, 1) == 5
    until(lambda: back.stats()["pages_published"] == 7 * 5, "it reads the others' logs again")
    del full


def test_a_host_that_stops_for_longer_than_its_lease(hosts: Hosts) -> None:
    """Fenced while it waits for the lock, it goes on with its own pages and with what it borrowed:
    nobody says that it is off, so its pins hold."""
    owner = hosts.open(1, SHORT_LEASE_S)
    for seed in range(1, 11):
        publish(owner, seed)
    stopped = Remote(hosts.stack, hosts.path, 0)
    assert stopped.ask("publish(pool, 40), (own := write(pool, 50))")
    assert stopped.ask("hits := [pool.match_prefix(text(seed)) for seed in range(1, 11)]")
    assert stopped.ask("held := [hit.sequence() for hit in hits]")
    assert stopped.ask("[verify(s, text(i)) for i, s in enumerate(held, 1)][9]") == "None"
    stop(stopped.popen)
    name = struct.unpack("<QI", poke(hosts.path, line_offset(owner, 0, NAME_LINE), b"", 12))
    ticket = struct.pack("<Q", name[1] << 40 | 1)  # of its epoch, the first in the queue
    poke(hosts.path, line_offset(owner, 0, LOCK_LINE), ticket)
    for seed in range(6, 11):
        assert forget(owner, seed) == 5
    assert owner.stats()["pages_withdrawn"] == 5 * 5, "its pins hold"
    start = time.monotonic()
    full = fill_up(owner)
    assert time.monotonic() - start < 10 * SHORT_LEASE_S, "waited for its lease, then fenced it"
    assert owner.stats()["pages_withdrawn"] == 5 * 5, "its pins hold, fenced or not"
    full += fill_up(owner)
    stopped.popen.send_signal(signal.SIGCONT)
    assert stopped.ask("[verify(held[i], text(i + 1)) for i in range(10)][9]") == "None"
    assert stopped.ask("held[9].fork().truncate(2)") == "None"
    assert stopped.ask("verify(own, text(50))") == "None"
    assert stopped.ask("found(pool, 40)") == str(TOKENS)
    assert stopped.ask("found(pool, 3)") == str(TOKENS)
    assert stopped.ask("publish(pool, 41)") == "None"
    assert found(owner, 40) == found(owner, 41) == TOKENS
    assert stopped.ask("audit(pool)") == "None"
    assert stopped.ask("[thing.release() for thing in held + hits][0]") == "None"
    assert stopped.ask("pool.stats()['pages_borrowed']") == "0"
    until(lambda: owner.stats()["pages_withdrawn"] == 0, "and others have its pages")
    del full


def test_a_number_that_is_in_use_elsewhere(hosts: Hosts) -> None:
    """Another container with its own /dev/shm, or another machine, may hold it."""
    first = hosts.open(0)
    host_state(hosts.path, 0).unlink()
    with pytest.raises(HostError, match=r"two hosts with one number.*its own host="):
        hosts.open(0)
    publish(first, 1)
    assert found(hosts.open(1), 1) == TOKENS


def number_of(pool: CXLPool) -> int:
    (own,) = (host.number for host in pool.admin.hosts() if host.is_self)
    return own


def test_a_free_number(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's processes are one host; each machine takes the first number that is free."""
    for number in range(HOSTS):
        if number == 1:
            monkeypatch.setenv("CXLKV_HOST", "auto")
        asked = "auto" if number == 0 else None
        first, second = (hosts.open(asked, SHORT_LEASE_S) for _ in range(2))
        assert number_of(first) == number_of(second) == number
        publish(first, number)
        host_state(hosts.path, number).unlink()  # from here on we are another machine
    assert found(second, 0) == TOKENS
    with pytest.raises(HostError, match=r"other machines use all its numbers"):
        hosts.open("auto")
    for pool in hosts.pools[-2:]:
        pool.close()
    assert number_of(hosts.open("auto", SHORT_LEASE_S)) == HOSTS - 1


def test_who_lists_the_hosts_sees_that_its_number_was_taken(hosts: Hosts) -> None:
    """Also where its keeper has not looked yet: "auto" asks so, a moment after it took a number."""
    first = hosts.open(0, NEVER_S)
    host_state(hosts.path, 0).unlink()
    publish(hosts.open(0, SHORT_LEASE_S), 1)  # it beats, and the first did not
    with pytest.raises(HostError, match="another machine has become host 0"):
        first.admin.hosts()
    first.close()


def test_who_lost_a_number_takes_the_next(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = iter([HostError("another machine has become host 0")])
    look = _core.pool_hosts

    def hosts_of(pool: _core.Handle) -> list[dict[str, int]]:
        for error in lost:
            raise error
        return look(pool)

    monkeypatch.setattr(_core, "pool_hosts", hosts_of)
    assert number_of(hosts.open("auto", SHORT_LEASE_S)) == 1


def test_a_number_that_was_taken_while_its_host_stopped(hosts: Hosts) -> None:
    stopped = Remote(hosts.stack, hosts.path, 0)
    assert stopped.ask("publish(pool, 1)") == "None"
    stop(stopped.popen)
    host_state(hosts.path, 0).unlink()
    heir = hosts.open(0, SHORT_LEASE_S)
    assert found(heir, 1) == TOKENS
    stopped.popen.send_signal(signal.SIGCONT)
    until(lambda: stopped.ask("len(write(pool, 2))")[:9] == "HostError", "it notices")
    assert stopped.ask("pool.close()") == "None"
    publish(heir, 3)
    assert found(hosts.open(1), 3) == TOKENS


def test_the_child_of_a_fork_keeps_its_host_alive(hosts: Hosts) -> None:
    other = hosts.open(1)
    parent = Remote(hosts.stack, hosts.path, 0)
    assert parent.ask("publish(pool, 1), (own := write(pool, 2))")
    child = int(parent.ask("os.fork() and os._exit(0) or os.getpid()"))
    try:
        parent.popen.wait()
        at = line_offset(other, 0, BEAT_LINE)
        for _ in range(3):
            beats = poke(hosts.path, at, b"", 8)
            until(partial(differs, hosts.path, at, beats), "a keeper beats")
        assert parent.ask("verify(own, text(2))") == "None"
        assert parent.ask("audit(pool)") == "None"
        assert parent.ask("pool.stats()['processes']") == "1"
        assert found(other, 1) == TOKENS
    finally:
        os.kill(child, signal.SIGKILL)
        until(lambda: not is_alive(child), "it is dead")


def test_a_process_that_becomes_another_program(hosts: Hosts) -> None:
    """Its pages come back when that ends; until then its pid is alive."""
    stays, owner = hosts.open(0, SHORT_LEASE_S), hosts.open(1)
    publish(owner, 1)
    leaves = Remote(hosts.stack, hosts.path, 0)
    assert leaves.ask("hit := pool.match_prefix(text(1))")
    assert leaves.ask("own := write(pool, 2)")
    leaves.tell("os.execv('/bin/cat', ['cat'])")
    name = Path(f"/proc/{leaves.popen.pid}/comm")
    until(lambda: name.read_text() == "cat\n", "it runs")
    publish(stays, 3)
    assert found(owner, 3) == TOKENS
    assert leaves.ask("hello") == "hello"
    leaves.pipes[0].close()
    leaves.popen.wait()
    stats = stays.stats()
    assert stats["processes"] == 1
    assert stats["pages_held"] == stats["pages_borrowed"] == 0


def test_a_death_while_a_page_is_borrowed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pin and the reference: whoever repairs takes the pin away."""
    owner, other = hosts.open(0, SHORT_LEASE_S), hosts.open(1, NEVER_S)
    publish(owner, 1)
    at, size = line_offset(owner, 1, 0), owner.pages.geometry["host_block_bytes"]
    before = poke(hosts.path, at, b"", size)
    with other.match_prefix(text(1)):
        pinned = poke(hosts.path, at, b"", size)
    words = [i for i in range(0, size, 8) if before[i : i + 8] != pinned[i : i + 8]]
    assert words
    for word in words:
        poke(hosts.path, at + word, pinned[word : word + 8])
    assert forget(owner, 1) == 5
    assert owner.stats()["pages_withdrawn"] == 5
    monkeypatch.setenv("CXLKV_HOST", "1")
    state = str(host_state(hosts.path, 1))
    python(DIE_WITH_THE_LOCK, hosts.path, state, str(MUTEX_OFFSET), expected=-signal.SIGKILL)
    assert other.stats()["rebuilds"] == 1
    until(lambda: owner.stats()["pages_withdrawn"] == 0, "nobody pins them")


# ---- damage ----


def test_a_published_page_that_was_changed(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1)
    hosts.damaged = True
    publish(owner, 1)
    piece = numbers(text(1), 1, 0)[:4, 0].tobytes()  # K of layer 1, page 0, head 0
    offset = Path(hosts.path).read_bytes().find(piece)
    assert offset > 0
    poke(hosts.path, offset + 5, bytes([piece[5] ^ 4]))
    with other.match_prefix(text(1)) as hit:
        sequence = hit.sequence()
        sequence.fetch(0)
        with pytest.raises(CorruptError, match="the CRC of its K is wrong"):
            sequence.fetch(1)


def test_a_damaged_log_record(hosts: Hosts) -> None:
    """Whoever follows looks at the descriptors instead, once; its host mends it when told."""
    owner, other = hosts.open(0, NEVER_S), hosts.open(1, NEVER_S)
    publish(owner, 1)
    assert found(other, 1) == TOKENS
    publish(owner, 2)
    log = line_offset(owner, 0, LOG_LINES)
    for record in range(5, 10):
        poke(hosts.path, log + 64 * (record + 1) + 30, b"?")
    publish(owner, 3)
    assert found(other, 2) == found(other, 3) == TOKENS
    assert other.stats()["log_rescans"] == 1
    damage = r"host 0: the line of record 6 in its log is damaged.*pool check --repair` there"
    for pool in (owner, other):
        (problem,) = pool.admin.check()["problems"]
        assert re.match(damage, problem)
    assert not other.admin.check(repair=True)["repairs"], "only its owner writes a line"
    assert owner.admin.check(repair=True)["repairs"] == [
        "host 0 says anew in its log what it has published"
    ]
    publish(owner, 4)
    assert found(other, 3) == found(other, 4) == TOKENS


@pytest.mark.parametrize("sequence", [6, 1 << 40, (1 << 64) - 1])
def test_a_dead_hosts_log_that_ends_in_damage(hosts: Hosts, sequence: int) -> None:
    """Its line has the next number, or a larger one: others look at all descriptors once, and not
    at each lookup; when it comes back it mends the line, and is heard again."""
    other = hosts.open(1, NEVER_S)
    died = Remote(hosts.stack, hosts.path, 0)
    assert died.ask("publish(pool, 1)")
    assert found(other, 1) == TOKENS
    died.kill()
    poke(hosts.path, line_offset(other, 0, LOG_LINES + 6), struct.pack("<QQ", sequence, 2))
    for _ in range(20):
        assert found(other, 1) == TOKENS
    assert other.stats()["log_rescans"] == 1
    (problem,) = other.admin.check()["problems"]
    assert problem.startswith(f"host 0: the line of record {sequence} in its log is damaged")
    back = hosts.open(0, SHORT_LEASE_S)
    publish(back, 2)
    assert found(other, 2) == TOKENS
    assert other.stats()["log_rescans"] == 1


def test_a_damaged_place_in_the_queue(hosts: Hosts) -> None:
    """Its host beats, so nobody may pass over it; its keeper takes it away."""
    owner, other = hosts.open(0), hosts.open(1)
    publish(owner, 1)
    for place in (1 << 40 | 1, 2 << 40 | 1, 1 << 39, 77 << 40 | 5):
        poke(hosts.path, line_offset(owner, 0, LOCK_LINE), struct.pack("<Q", place))
        fill_up(other)[0].release()
        assert found(other, 1) == TOKENS


def test_beats_that_jump(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1)
    publish(owner, 1)
    for beats in (0, 1, 2**64 - 1, 2**40):
        poke(hosts.path, line_offset(owner, 0, BEAT_LINE), struct.pack("<3Q", beats, beats, beats))
        assert found(other, 1) == TOKENS
        write_soon(other, 2).release()


def name_line(host: int, epoch: int, status: int) -> bytes:
    """Twice; host_name in coherence/types.h."""
    name = struct.pack("<QIIIII", 12345, epoch, status, host, 0, 0)
    return 2 * (name + struct.pack("<I", _core.crc32c(name)))


def test_a_name_of_a_future_epoch(hosts: Hosts) -> None:
    owner = hosts.open(0)
    poke(hosts.path, line_offset(owner, 1, NAME_LINE), name_line(1, 5000, 1))
    publish(owner, 1)
    write(owner, 2, 400).release()
    assert found(hosts.open(1, SHORT_LEASE_S), 1) == TOKENS
    poke(hosts.path, line_offset(owner, 2, NAME_LINE), name_line(2, (1 << 24) - 2, 2))
    with pytest.raises(CorruptError, match=r"host 2 has used up its epochs: create the pool anew"):
        hosts.open(2)


def test_a_claim_of_a_future_epoch(hosts: Hosts) -> None:
    """It does not count: its host has not come so far."""
    owner, other = hosts.open(0), hosts.open(1)
    geometry = owner.pages.geometry
    blocks = geometry["hosts_offset"] + geometry["host_block_bytes"]  # host 1's
    raw = Path(hosts.path).read_bytes()[blocks : blocks + geometry["host_block_bytes"]]
    kept = write(other, 1)  # now a claim of host 1 is there
    after = Path(hosts.path).read_bytes()[blocks : blocks + geometry["host_block_bytes"]]
    claims = next(
        at
        for at in range(64 * 32, len(raw), 16)
        if raw[at : at + 16] == bytes(16) != after[at : at + 16]
        and after[at : at + 4] == b"\1\0\0\0"
    )
    extent = 0
    first = claims - claims % 64
    for extent in range(geometry["extent_count"]):
        claim = struct.pack("<3I", 100, 1, 9 << 1 | 1)
        crc = _core.crc32c(claim, _core.crc32c(struct.pack("<I", extent)))
        at = blocks + first + 32 * extent
        if after[first + 32 * extent : first + 32 * extent + 16] == bytes(16):
            poke(hosts.path, at, claim + struct.pack("<I", crc))
    full = fill_up(owner)
    assert owner.stats()["pages_elsewhere"] < geometry["page_count"] // 2
    verify(kept, text(1))
    del full


def test_damaged_names(hosts: Hosts) -> None:
    """No extent changes hands and nobody arrives; whoever is there goes on."""
    owner, other = hosts.open(0), hosts.open(1)
    publish(owner, 1)
    at = line_offset(owner, 0, NAME_LINE)
    before = poke(hosts.path, at, b"?" * 64)
    for host in (2, 3):
        with pytest.raises(CorruptError, match=r"the name line of host 0 is damaged.*pool check"):
            hosts.open(host)
    assert found(other, 1) == found(owner, 1) == TOKENS
    publish(owner, 2)
    assert found(other, 2) == TOKENS
    poke(hosts.path, at, before)
    assert found(hosts.open(2), 2) == TOKENS
    at = line_offset(owner, 3, NAME_LINE)
    before = poke(hosts.path, at, b"?" * 64)
    with pytest.raises(CorruptError, match="the name line of host 3 is damaged"):
        hosts.open(3)
    (problem,) = owner.admin.check()["problems"]
    assert problem.startswith("host 3: its name line is damaged")
    poke(hosts.path, at, before)


@pytest.mark.parametrize("round_number", [0, 1, *map(nightly, range(2, 6))])
def test_random_bytes_in_a_hosts_block(hosts: Hosts, seed: int, round_number: int) -> None:
    """Others work, or say what is wrong; they read right bytes or none."""
    random = Random(seed + round_number)
    hosts.damaged = True
    owner, other = hosts.open(0, SHORT_LEASE_S), hosts.open(1, SHORT_LEASE_S)
    for number in range(1, 6):
        publish(owner, number)
    geometry = owner.pages.geometry
    size = geometry["host_block_bytes"]
    damage = random.randbytes(size)
    first, end = sorted((random.randrange(size), random.randrange(size)))
    if round_number > 2:  # without the name
        first = max(first, 64)
    poke(hosts.path, line_offset(owner, 0, 0) + first, damage[first:end])
    for number in range(1, 6):
        assert found(other, number) in range(0, TOKENS + 1)
    for work in (lambda: write(other, 7), lambda: publish(other, 8), lambda: hosts.open(2)):
        with suppress(CXLKVError):
            work()
    for number in range(1, 6):
        assert found(other, number) in range(0, TOKENS + 1)
    for problem in other.admin.check(deep=True)["problems"]:
        assert problem.startswith("host 0: the line of record ")


# ---- arguments ----


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"hosts": 0}, BadArgumentError, "0 hosts: outside 1 to 64"),
        ({"hosts": 65}, BadArgumentError, "65 hosts: outside 1 to 64"),
        ({"host": 4}, BadArgumentError, "host 4: the pool has hosts 0 to 3"),
        ({"host": -1}, BadArgumentError, "host=-1: outside 0 to 63"),
        ({"host": None}, BadArgumentError, "say which one this is, host=0 to host=3"),
        ({"lease_s": 0}, BadArgumentError, "lease_s=0: outside 0.01 to 3600"),
        ({"lease_s": float("nan")}, BadArgumentError, "lease_s=nan: outside"),
        ({"checksum": False}, GeometryError, "sharing=software needs checksums"),
        ({"sharing": "everybody"}, BadArgumentError, "one of host, hw_coherent, software"),
        ({"durable": "ever"}, BadArgumentError, "durable='ever': one of process, host"),
        ({"sharing": "host", "hosts": 2}, BadArgumentError, "say sharing='software'"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, wrong: dict[str, object], error: type[CXLKVError], says: str
) -> None:
    path = tmp_path / "pool"
    with pytest.raises(error, match=says):
        make(str(path), **wrong)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [], "nothing was made"


def test_which_host_by_the_environment(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadArgumentError, match="say which one this is, host=0 to host=3"):
        CXLPool.open(hosts.path)
    monkeypatch.setenv("CXLKV_HOST", "one")
    with pytest.raises(BadArgumentError, match="CXLKV_HOST='one': the number of this host"):
        CXLPool.open(hosts.path)
    monkeypatch.setenv("CXLKV_HOST", str(HOSTS))
    with pytest.raises(BadArgumentError, match="host 4: the pool has hosts 0 to 3"):
        CXLPool.open(hosts.path)
    monkeypatch.setenv("CXLKV_HOST", "3")
    with CXLPool.open(hosts.path, threads=1) as pool:
        publish(pool, 1)
        assert found(pool, 1) == TOKENS


# ---- other kinds ----


@pytest.mark.parametrize("sharing", ["software", "hw_coherent"])
def test_durable_and_coherent(tmp_path: Path, sharing: str) -> None:
    path = str(tmp_path / "pool")
    with ExitStack() as stack:
        a = stack.enter_context(make(path, sharing=sharing, durable="host", hosts=2))
        b = stack.enter_context(CXLPool.open(path, host=1, threads=1))
        publish(a, 1)
        assert found(b, 1) == TOKENS
        sent = write(a, 2)
        sequence = b.adopt(sent.handle)
        verify(sequence, text(2))
        sequence.release()
        audit(a)
        audit(b)
    with CXLPool.open(path, host=0, threads=1) as pool:
        assert found(pool, 1) == TOKENS


def test_durable_where_one_host_uses_it(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    with make(path, sharing="host", durable="host", hosts=None, host=None) as pool:
        publish(pool, 1)
    with CXLPool.open(path, threads=1) as pool:
        assert found(pool, 1) == TOKENS
        audit(pool)


def test_anonymous_memory_for_one_host_and_its_forks() -> None:
    with make("anonymous:") as pool:
        sequence = write(pool, 1)
        in_child(partial(verify, sequence, text(1)))
        publish(pool, 2)
        assert found(pool, 2) == TOKENS
        audit(pool)
