"""Hosts that die: seen by others, fenced by an operator, repaired, and coming back.

Other hosts are processes that do what they are told, as in test_hosts_failing.py: nothing here
waits for a time but for a lease to pass.
"""

from __future__ import annotations

import json
import signal
import time

import pytest
from typer.testing import CliRunner

from cxlkv import CXLPool
from cxlkv.errors import BadArgumentError, BusyError, CorruptError, PoolFullError
from cxlkv.machine.hosts import Host
from cxlkv.ops.cli import app
from cxlkv.ops.pool import pool_lines, share_text
from cxlkv.stats import inspect
from tests.support.stopping import stop

from ..support.damaging import change_byte, poke
from ..support.processes import Child
from ..support.texts import SMALL, verify
from ..support.waiting import until
from .test_hosts import PAGE_TOKENS, TOKENS, Hosts, found, publish, text, write
from .test_hosts import hosts as hosts
from .test_hosts_failing import SHORT_LEASE_S, Remote


@pytest.fixture
def pool(hosts: Hosts) -> CXLPool:
    return hosts.open(0, SHORT_LEASE_S)


@pytest.fixture
def other(hosts: Hosts, pool: CXLPool) -> Remote:
    """Host 1, which has published text 1."""
    made = Remote(hosts.stack, hosts.path, 1)
    assert made.ask("publish(pool, 1)") == "None"
    return made


def state(pool: CXLPool, number: int) -> Host:
    return pool.admin.hosts()[number]


def geometry_of(pool: CXLPool) -> dict[str, int]:
    return pool.pages.geometry


def owned(pool: CXLPool, number: int) -> int:
    """Pages in the extents of a host."""
    return state(pool, number).extents * geometry_of(pool)["slab_slots"]


def test_how_it_flushes(pool: CXLPool) -> None:
    described = pool.describe()
    assert (described["sharing"], described["hosts"]) == ("software", 4)
    assert str(described["flushes"]).startswith("strict: no litmus certificate that holds")


def test_who_is_there(pool: CXLPool, other: Remote) -> None:
    mine, theirs, nobody, _ = pool.admin.hosts()
    assert (mine.state, mine.is_self, mine.epoch) == ("live", True, 2)
    assert (theirs.state, theirs.is_self) == ("live", False)
    assert theirs.extents > 0
    assert (nobody.state, nobody.epoch, nobody.extents) == ("unused", 0, 0)
    other.popen.communicate()  # closes its stdin: it leaves in order
    assert state(pool, 1).state == "left"
    assert found(pool, 1) == TOKENS


def test_a_host_that_beats_is_not_fenced(pool: CXLPool, other: Remote) -> None:
    for confirmed in (False, True):
        with pytest.raises(BusyError, match="host 1 beats: it runs, and is not fenced"):
            pool.admin.fence(1, confirmed_off=confirmed)
    assert state(pool, 1).state == "live"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "another one of 0 to 3"),
        (4, "another one"),
        (2, "it never was"),
        (-1, "outside 0 to 63"),
    ],
)
def test_who_cannot_be_fenced(pool: CXLPool, number: int, text: str) -> None:
    with pytest.raises(BadArgumentError, match=text):
        pool.admin.fence(number)


def test_one_host_has_no_others(make_pool: object) -> None:
    with (
        CXLPool.create("anonymous:", layout=SMALL, capacity="4MiB") as alone,
        pytest.raises(BadArgumentError, match="there are no others"),
    ):
        alone.admin.hosts()


def test_fenced_while_it_was_stopped(pool: CXLPool, other: Remote) -> None:
    """Its pages stay its own, what it published stays readable, and it comes back by itself."""
    stop(other.popen)
    pool.admin.fence(1)
    assert state(pool, 1).state == "fenced"
    assert found(pool, 1) == TOKENS
    taken = pool.pages.alloc(pool.stats()["pages_total"] - owned(pool, 1))
    with pytest.raises(PoolFullError):
        pool.pages.alloc(1)
    pool.pages.free(taken)
    other.popen.send_signal(signal.SIGCONT)
    assert other.ask("publish(pool, 2)") == "None"
    assert found(pool, 2) == TOKENS
    assert other.ask("found(pool, 1)") == str(TOKENS)
    until(lambda: state(pool, 1).state == "live", "its keeper has seen it")
    assert state(pool, 1).epoch == 2


def test_off_and_its_pages_taken(hosts: Hosts, pool: CXLPool, other: Remote) -> None:
    other.kill()
    pool.admin.fence(1, confirmed_off=True)
    assert (state(pool, 1).state, found(pool, 1)) == ("off", TOKENS)
    total = pool.stats()["pages_total"]
    taken = pool.pages.alloc(total - TOKENS // PAGE_TOKENS)  # all but what it has published
    assert found(pool, 1) == TOKENS
    pool.pages.free(taken)
    assert pool.stats()["pages_elsewhere"] == 0
    again = Remote(hosts.stack, hosts.path, 1)
    assert again.ask("found(pool, 1)") == str(TOKENS)
    assert again.ask("publish(pool, 2)") == "None"  # it asks us for an extent
    assert state(pool, 1).epoch == 2
    assert found(pool, 2) == TOKENS


def test_declared_off_while_it_ran(pool: CXLPool, other: Remote) -> None:
    """An operator's mistake: it must stop, and say why."""
    stop(other.popen)
    pool.admin.fence(1, confirmed_off=True)
    other.popen.send_signal(signal.SIGCONT)
    while "FencedError" not in (answer := other.ask("pool.stats()")):  # its keeper has seen it
        pass
    assert "declared off while it ran" in answer
    assert found(pool, 1) == TOKENS


STOPPED = """
import signal, sys, threading
from cxlkv.errors import FencedError
from cxlkv.prefix import prefix_keys
from tests.coherence.test_hosts import *
from tests.support.texts import numbers
from tests.support.touching import at_touch

def stop():
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

def append_and_publish():
    sequence = pool.sequence()
    for layer in range(2):
        sequence.append(layer, *given[layer])
    return pool.publish(sequence, keys, PAGE_TOKENS)

def records():
    # Of the text, which is not in the pool any more.
    append_and_publish()
    found = pool.records.find(pool.records.names(keys.packed.tobytes()).reshape(-1, 16))
    read = np.zeros((len(found[0]), pool.records.shape[0]), np.uint8)
    assert not pool.records.read(*found, read).any()
    assert not pool.records.forget(*found, False).any()
    return read

pool = CXLPool.open(sys.argv[1], host=1, lease_s=1.0, threads=1)
ids = text(1, 40 * PAGE_TOKENS)
keys = prefix_keys(ids, PAGE_TOKENS)
given = [[numbers(ids, layer, kind) for kind in (0, 1)] for layer in range(2)]
touched, call = given[1][0], append_and_publish
if sys.argv[2] == "records":
    touched = records()
    call = lambda: pool.records.write(touched)
at_touch(touched.ctypes.data, touched.nbytes, stop)
print("it begins", flush=True)
try:
    print(call())
except FencedError:
    print("it is off")
"""


@pytest.mark.parametrize("what", ["append", "records"])
def test_what_a_host_was_writing_when_it_was_declared_off_is_not_published(
    hosts: Hosts, what: str
) -> None:
    """Stopped in the middle of a copy: it finds out before it publishes, as the pages are others'
    by then. No look of its keeper has to come first."""
    pool = hosts.open(0, 1.0)
    with Child("-c", STOPPED, hosts.path, what) as other:
        assert other.hear() == "it begins"
        until(lambda: state(pool, 1).state == "silent")
        pool.admin.fence(1, confirmed_off=True)
        taken = pool.pages.alloc(pool.stats()["pages_total"])
        other.popen.send_signal(signal.SIGCONT)
        assert other.end() == "it is off\n"
        pool.pages.free(taken)
        assert found(pool, 1) == 0


def test_commands(
    hosts: Hosts, pool: CXLPool, other: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.kill()
    monkeypatch.setenv("CXLKV_HOST", "0")
    run = CliRunner().invoke
    shown = run(app, ["pool", "inspect", hosts.path, "--json"])
    members = json.loads(shown.stdout)["members"]
    assert [row["state"] for row in members][2:] == ["unused", "unused"]
    done = run(app, ["pool", "fence", hosts.path, "1", "--confirmed-off"])
    assert "host 1: off, epoch 1, " in done.stdout
    checked = run(app, ["pool", "check", hosts.path, "--deep", "--repair"])
    assert checked.exit_code == 0
    elsewhere = pool.stats()["pages_elsewhere"]
    assert (
        f"clean\n{elsewhere} pages of other hosts, or of none, were not looked at" in checked.stdout
    )


def test_a_dead_host_is_live_to_nobody(hosts: Hosts, pool: CXLPool, other: Remote) -> None:
    """A host that joins after its death has never seen it beat, and does not call it alive."""
    other.kill()
    late = hosts.open(2, SHORT_LEASE_S)
    first = state(late, 1)
    assert (first.state, first.seen) == ("unseen", False)
    until(lambda: state(late, 1).state == "silent", "a lease has passed")
    assert not state(late, 1).seen
    until(lambda: state(late, 0).state == "live", "a host that beats was seen to")
    assert state(late, 0).seen


def test_the_command_waits_until_it_knows(
    hosts: Hosts, pool: CXLPool, other: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.kill()
    monkeypatch.setenv("CXLKV_HOST", "2")
    lines = CliRunner().invoke(app, ["pool", "inspect", hosts.path]).stdout
    row = next(line.split() for line in lines.splitlines() if line.split()[:1] == ["1"])
    assert (row[1], row[4]) == ("silent", ">")
    shown = CliRunner().invoke(app, ["pool", "inspect", hosts.path, "--json"])
    assert [row["state"] for row in json.loads(shown.stdout)["members"]] == [
        "live",
        "silent",
        "live",
        "unused",
    ]


def test_pages_that_hosts_may_take_are_not_used(pool: CXLPool, other: Remote) -> None:
    """By `pool list`, from outside: host 0 publishes twice, host 1 once; extents are much more."""
    publish(pool, 2)
    publish(pool, 3)
    seen = inspect(str(pool.path))
    text_pages = TOKENS // PAGE_TOKENS
    assert seen.pages["elsewhere"] > seen.pages_used
    assert (seen.pages_used, seen.published_elsewhere) == (3 * text_pages, text_pages)
    assert f": {3 * text_pages} pages used" in repr(pool)
    listed = list(pool_lines([seen]))[1]
    assert share_text(3 * text_pages, seen.pages_total) in listed


# ---- repair ----


def damage(pool: CXLPool, page: int, offset: int) -> None:
    """Flips a bit of a page's descriptor in the file."""
    geometry = geometry_of(pool)
    extent, slot = divmod(page, geometry["slab_slots"])
    at = geometry["descriptors_offset"] + extent * geometry["descriptors_bytes"] + slot * 64
    change_byte(str(pool.path), at + offset)


def test_a_damaged_descriptor_is_mended_from_the_record(pool: CXLPool) -> None:
    publish(pool, 3)
    pages = pool.match_prefix(text(3)).sequence().pages
    damage(pool, int(pages[2]), 30)
    assert found(pool, 3) == 8, "the chain ends before it"
    assert not pool.admin.check()["clean"]
    report = pool.admin.check(repair=True)
    assert report["clean"], report
    assert ["is published again" in line for line in report["repairs"]] == [True]
    assert found(pool, 3) == TOKENS
    assert pool.admin.check(deep=True)["clean"]


def test_a_held_page_is_left_alone(hosts: Hosts, pool: CXLPool) -> None:
    sequence, hosts.damaged = write(pool, 3), True
    damage(pool, int(sequence.pages[1]), 8)
    report = pool.admin.check(repair=True)
    assert not report["clean"]
    assert report["repairs"] == []
    verify(sequence, text(3))


def test_a_published_page_with_changed_bytes_is_forgotten(pool: CXLPool) -> None:
    publish(pool, 3)
    geometry = geometry_of(pool)
    with pool.match_prefix(text(3)) as hit:
        page = int(hit.sequence().pages[3])
    extent, slot = divmod(page, geometry["slab_slots"])
    first = geometry["extents_offset"] + extent * geometry["extent_bytes"]
    at = first + geometry["layers_offset"] + slot * 2 * geometry["digest_piece_bytes"]
    change_byte(str(pool.path), at + 5)
    assert not pool.admin.check(deep=True)["clean"]
    report = pool.admin.check(deep=True, repair=True)
    assert report["clean"], report
    assert len(report["repairs"]) == 1
    assert found(pool, 3) == 12


def test_a_host_whose_name_is_damaged(hosts: Hosts, pool: CXLPool, other: Remote) -> None:
    other.kill()
    geometry = geometry_of(pool)
    name = geometry["hosts_offset"] + geometry["host_block_bytes"]
    change_byte(str(pool.path), name + 1)
    assert state(pool, 1).state == "live", "its second copy is whole"
    change_byte(str(pool.path), name + 33)
    assert state(pool, 1).state == "damaged"
    assert found(pool, 1) == TOKENS
    with pytest.raises(CorruptError, match="confirmed to be off"):
        pool.admin.fence(1)
    pool.admin.fence(1, confirmed_off=True)
    assert state(pool, 1).state == "off"
    again = Remote(hosts.stack, hosts.path, 1)
    assert again.ask("found(pool, 1)") == str(TOKENS)
    assert again.ask("publish(pool, 2)") == "None"
    assert found(pool, 2) == TOKENS


def test_hosts_with_other_leases(hosts: Hosts, pool: CXLPool) -> None:
    """A host with a shorter lease does not suspect one that beats within its own, longer one."""
    publish(hosts.open(2, 60.0), 2)
    began = time.monotonic()
    while time.monotonic() - began < 3 * SHORT_LEASE_S:
        assert state(pool, 2).state == "live"
    assert found(pool, 2) == TOKENS


def test_a_fence_that_damage_has_begun(pool: CXLPool, other: Remote) -> None:
    """A live host's keeper takes it back: nobody waits for it for ever."""
    geometry = geometry_of(pool)
    word = geometry["hosts_offset"] + geometry["host_block_bytes"] + 256  # 1 says of host 0: closed
    assert pool.path
    poke(pool.path, word, (state(pool, 0).epoch << 40 | 1 << 38).to_bytes(8, "little"))
    pool.pages.free(pool.pages.alloc(160))  # takes extents: it commits, and asks for fences
    assert state(pool, 0).state == "live"
