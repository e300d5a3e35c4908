"""Hosts that die: seen by others, fenced by an operator, repaired, and coming back.

Other hosts are real processes of this machine, each with its own host number; they do what they are
told line by line, so that nothing here waits for a time but for a lease to pass.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

from cxlkv import CXLPool, KVLayout, Sequence
from cxlkv.errors import BadArgumentError, BusyError, CorruptError, PoolFullError
from cxlkv.machine.hosts import Host
from cxlkv.ops.cli import app
from tests.support.processes import Child
from tests.support.stopping import stop

from ..support.damaging import change_byte, poke

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
LEASE_S = 0.3
TEXTS = {name: list(range(1000 * i, 1000 * i + 32)) for i, name in enumerate("abc", start=1)}

HOST = """
import json, sys
from cxlkv import CXLPool
from tests.coherence.test_fencing import TEXTS, LEASE_S, publish, right
pool = CXLPool.open(sys.argv[1], host=int(sys.argv[2]), lease_s=LEASE_S, threads=1)
kept = []
print(json.dumps("open"), flush=True)
for line in sys.stdin:
    what, *rest = json.loads(line)
    try:
        if what == "publish":
            kept.append(publish(pool, rest[0]))
            answer = "published"
        elif what == "match":
            answer = right(pool, rest[0])
        elif what == "stats":
            answer = pool.stats()
        else:
            answer = [vars(host) for host in pool.admin.hosts()]
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


def rows(name: str, layer: int, kind: int) -> npt.NDArray[np.float32]:
    seed = [ord(name), layer, kind]
    return np.random.default_rng(seed).standard_normal((32, 2, 8)).astype(np.float32)


def publish(pool: CXLPool, name: str) -> Sequence:
    sequence = pool.sequence()
    for layer in range(LAYOUT.layers):
        sequence.append(layer, rows(name, layer, 0), rows(name, layer, 1))
    pool.publish_prefix(sequence, TEXTS[name])
    return sequence


def right(pool: CXLPool, name: str) -> int:
    """Tokens that match, each byte of them compared; -1 when one is wrong."""
    with pool.match_prefix(TEXTS[name]) as hit:
        if not hit:
            return 0
        sequence = hit.sequence()
        for layer in range(LAYOUT.layers):
            for kind, got in enumerate(sequence.fetch(layer)):
                found = np.asarray(got).transpose(1, 2, 0, 3).reshape(-1, 2, 8)[: hit.tokens]
                if not np.array_equal(found, rows(name, layer, kind)[: hit.tokens]):
                    return -1
        return hit.tokens


class Other(Child):
    """A process that is another host."""

    def __init__(self, path: str, number: int) -> None:
        super().__init__("-c", HOST, path, number)
        assert self.hear() == '"open"'

    def do(self, *what: object) -> object:
        return json.loads(self.ask(json.dumps(what)))


@pytest.fixture
def path(shm_path: Path) -> str:
    return str(shm_path)


@pytest.fixture
def pool(path: str) -> Iterator[CXLPool]:
    with CXLPool.create(
        path,
        layout=LAYOUT,
        capacity="8MiB",
        sharing="software",
        hosts=4,
        host=0,
        lease_s=LEASE_S,
        threads=1,
    ) as made:
        yield made


@pytest.fixture
def other(path: str, pool: CXLPool) -> Iterator[Other]:
    made = Other(path, 1)
    yield made
    made.kill()


def state(pool: CXLPool, number: int) -> Host:
    return pool.admin.hosts()[number]


def geometry_of(pool: CXLPool) -> dict[str, int]:
    found = pool.describe()["geometry"]
    assert isinstance(found, dict)
    return found


def owned(pool: CXLPool, number: int) -> int:
    """Pages in the extents of a host."""
    return state(pool, number).extents * geometry_of(pool)["slab_slots"]


def test_how_it_flushes(pool: CXLPool) -> None:
    described = pool.describe()
    assert (described["sharing"], described["hosts"]) == ("software", 4)
    assert str(described["flushes"]).startswith("strict: no litmus certificate that holds")


def test_who_is_there(pool: CXLPool, other: Other) -> None:
    other.do("publish", "b")
    mine, theirs, nobody, _ = pool.admin.hosts()
    assert (mine.state, mine.is_self, mine.epoch) == ("live", True, 1)
    assert (theirs.state, theirs.is_self) == ("live", False)
    assert theirs.extents > 0
    assert (nobody.state, nobody.epoch, nobody.extents) == ("unused", 0, 0)
    other.popen.communicate()  # closes its stdin: it leaves in order
    assert state(pool, 1).state == "left"
    assert right(pool, "b") == 32


def test_a_host_that_beats_is_not_fenced(pool: CXLPool, other: Other) -> None:
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
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as alone,
        pytest.raises(BadArgumentError, match="there are no others"),
    ):
        alone.admin.hosts()


def test_fenced_while_it_was_stopped(pool: CXLPool, other: Other) -> None:
    """Its pages stay its own, what it published stays readable, and it comes back by itself."""
    other.do("publish", "b")
    stop(other.popen)
    pool.admin.fence(1)
    assert state(pool, 1).state == "fenced"
    assert right(pool, "b") == 32
    taken = pool.pages.alloc(pool.stats()["pages_total"] - owned(pool, 1))
    with pytest.raises(PoolFullError):
        pool.pages.alloc(1)
    pool.pages.free(taken)
    other.popen.send_signal(signal.SIGCONT)
    assert other.do("publish", "c") == "published"
    assert right(pool, "c") == 32
    assert other.do("match", "b") == 32
    back = state(pool, 1)
    assert (back.state, back.epoch) == ("live", 2)


def test_off_and_its_pages_taken(path: str, pool: CXLPool, other: Other) -> None:
    other.do("publish", "b")
    other.kill()
    pool.admin.fence(1, confirmed_off=True)
    assert (state(pool, 1).state, right(pool, "b")) == ("off", 32)
    total = pool.stats()["pages_total"]
    taken = pool.pages.alloc(total - 8)  # all but what b has published
    assert right(pool, "b") == 32
    pool.pages.free(taken)
    assert pool.stats()["pages_elsewhere"] == 0
    again = Other(path, 1)
    try:
        assert again.do("match", "b") == 32
        assert again.do("publish", "c") == "published"  # it asks us for an extent
        assert state(pool, 1).epoch == 2
        assert right(pool, "c") == 32
    finally:
        again.kill()


def test_declared_off_while_it_ran(pool: CXLPool, other: Other) -> None:
    """An operator's mistake: it must stop, and say why."""
    other.do("publish", "b")
    stop(other.popen)
    pool.admin.fence(1, confirmed_off=True)
    other.popen.send_signal(signal.SIGCONT)
    answer = other.do("stats")
    while "FencedError" not in str(answer):  # until its keeper has seen it
        answer = other.do("stats")
    assert "declared off while it ran" in str(answer)
    assert right(pool, "b") == 32


def test_commands(path: str, pool: CXLPool, other: Other) -> None:
    other.do("publish", "b")
    other.kill()
    run = CliRunner().invoke
    shown = run(app, ["pool", "hosts", path, "--host", "0", "--json"])
    assert [row["state"] for row in json.loads(shown.stdout)][2:] == ["unused", "unused"]
    done = run(app, ["pool", "fence", path, "1", "--confirmed-off", "--host", "0"])
    assert "host 1: off, epoch 1, " in done.stdout
    assert run(app, ["pool", "check", path, "--deep", "--repair", "--host", "0"]).exit_code == 0


# ---- repair ----


def damage(pool: CXLPool, page: int, offset: int) -> None:
    """Flips a bit of a page's descriptor in the file."""
    geometry = geometry_of(pool)
    extent, slot = divmod(page, geometry["slab_slots"])
    at = geometry["descriptors_offset"] + extent * geometry["descriptors_bytes"] + slot * 64
    change_byte(str(pool.path), at + offset)


def test_a_damaged_descriptor_is_mended_from_the_record(pool: CXLPool) -> None:
    publish(pool, "a").release()
    pages = pool.match_prefix(TEXTS["a"]).sequence().pages
    damage(pool, int(pages[2]), 30)
    assert right(pool, "a") == 8, "the chain ends before it"
    assert not pool.admin.check()["clean"]
    report = pool.admin.check(repair=True)
    assert report["clean"], report
    assert ["is published again" in line for line in report["repairs"]] == [True]
    assert right(pool, "a") == 32
    assert pool.admin.check(deep=True)["clean"]


def test_a_held_page_is_left_alone(pool: CXLPool) -> None:
    sequence = publish(pool, "a")
    damage(pool, int(sequence.pages[1]), 8)
    report = pool.admin.check(repair=True)
    assert not report["clean"]
    assert report["repairs"] == []
    np.testing.assert_array_equal(
        np.asarray(sequence.fetch(0)[0]).transpose(1, 2, 0, 3).reshape(-1, 2, 8), rows("a", 0, 0)
    )


def test_a_published_page_with_changed_bytes_is_forgotten(pool: CXLPool) -> None:
    publish(pool, "a").release()
    geometry = geometry_of(pool)
    with pool.match_prefix(TEXTS["a"]) as hit:
        page = int(hit.sequence().pages[3])
    extent, slot = divmod(page, geometry["slab_slots"])
    first = geometry["extents_offset"] + extent * geometry["extent_bytes"]
    at = first + geometry["layers_offset"] + slot * 2 * geometry["digest_piece_bytes"]
    change_byte(str(pool.path), at + 5)
    assert not pool.admin.check(deep=True)["clean"]
    report = pool.admin.check(deep=True, repair=True)
    assert report["clean"], report
    assert len(report["repairs"]) == 1
    assert right(pool, "a") == 12


def test_a_host_whose_name_is_damaged(path: str, pool: CXLPool, other: Other) -> None:
    other.do("publish", "b")
    other.kill()
    geometry = geometry_of(pool)
    name = geometry["hosts_offset"] + geometry["host_block_bytes"]
    change_byte(str(pool.path), name + 1)
    assert state(pool, 1).state == "live", "its second copy is whole"
    change_byte(str(pool.path), name + 33)
    assert state(pool, 1).state == "damaged"
    assert right(pool, "b") == 32
    with pytest.raises(CorruptError, match="confirmed to be off"):
        pool.admin.fence(1)
    pool.admin.fence(1, confirmed_off=True)
    assert state(pool, 1).state == "off"
    again = Other(path, 1)
    assert again.do("match", "b") == 32
    assert again.do("publish", "c") == "published"
    again.kill()
    assert right(pool, "c") == 32


def test_hosts_with_other_leases(path: str, pool: CXLPool) -> None:
    """Who beats within its own, longer lease is not suspected by one with a shorter lease."""
    with CXLPool.open(path, host=2, lease_s=60.0, threads=1) as slow:
        publish(slow, "c")
        began = time.monotonic()
        while time.monotonic() - began < 3 * LEASE_S:
            assert state(pool, 2).state == "live"
        assert right(pool, "c") == 32


def test_a_fence_that_damage_has_begun(pool: CXLPool, other: Other) -> None:
    """A live host's keeper takes it back: nobody waits for it for ever."""
    geometry = geometry_of(pool)
    word = geometry["hosts_offset"] + geometry["host_block_bytes"] + 256  # 1 says of host 0: closed
    assert pool.path
    poke(pool.path, word, (state(pool, 0).epoch << 40 | 1 << 38).to_bytes(8, "little"))
    pool.pages.free(pool.pages.alloc(64 * 20))  # takes extents: it commits, and asks for fences
    assert state(pool, 0).state == "live"
