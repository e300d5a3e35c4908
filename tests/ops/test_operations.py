"""`cxlkv pool list`, `gc` and `top`, and what they stand on, with real processes, some killed.

All but a few look only in a folder of their own in /dev/shm: other tests work there as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import BusyError, PoolMissingError
from cxlkv.ops.gc import collect, find_garbage
from cxlkv.ops.top import COLUMNS, Processes
from cxlkv.stats import Overview, find, inspect
from tests.support.stopping import stop

from ..support.command import run
from ..support.damaging import poke
from ..support.processes import Child
from ..support.states import host_states

LAYOUT = KVLayout(
    layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32", model_id="test/model"
)
RECORD_BYTES = 2 * 2 * 2 * 8 * 4  # K and V of a token in both layers
WAIT_S = 60

# Appends tokens, publishes the first 8, says so, and goes on to match them until its stdin ends.
WORKER = """
import sys, numpy as np
from cxlkv import CXLPool
pool = CXLPool.open(sys.argv[1], threads=1)
seq = pool.sequence()
tokens = int(sys.argv[2])
rows = np.ones((tokens, 2, 8), np.float32)
for layer in range(2):
    seq.append(layer, rows, rows)
pool.publish_prefix(seq, list(range(min(8, tokens))))
pool.match_prefix(list(range(16))).release()
print("ready", flush=True)
while sys.stdin.readline():
    seq.fetch(0)
    print("ready", flush=True)
"""

# Stops for ever inside the creation of a pool, with its file made and not yet formatted.
CREATE_AND_STOP = """
import sys
from cxlkv import CXLPool, KVLayout
layout = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
CXLPool.create(sys.argv[1], layout=layout, capacity=int(sys.argv[2]))
"""


@pytest.fixture
def folder(shm_path: Path) -> Path:
    made = shm_path.with_suffix("")
    made.mkdir()
    return made


@pytest.fixture
def path(folder: Path) -> str:
    return str(folder / "test.pool")


@contextlib.contextmanager
def worker(path: str, tokens: int) -> Iterator[Child]:
    with Child("-c", WORKER, path, tokens) as child:
        assert child.hear() == "ready"
        yield child


def command(*arguments: str) -> str:
    """What the command prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "cxlkv.ops.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "140"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def states(places: list[str]) -> dict[str, str]:
    return {Path(overview.path).name: overview.state for overview in find(places)}


def make(path: str) -> CXLPool:
    return CXLPool.create(path, layout=LAYOUT, capacity="3MiB", threads=1)


# ---- looking ----


def test_a_look_from_outside_is_what_the_pool_says(path: str) -> None:
    with make(path) as pool, worker(path, 12) as one, worker(path, 5) as two:
        for overview in (pool.admin.overview(), inspect(path)):
            stats = pool.stats()
            assert overview.state == "live"
            assert overview.settled
            assert overview.model_id == "test/model"
            assert overview.identity == pool.describe()["identity"]
            assert overview.pages_total == stats["pages_total"]
            for name, key in (("free", "free"), ("held", "held"), ("published", "published_only")):
                assert overview.pages[name] == stats[f"pages_{key}"]
            assert sum(overview.pages.values()) == overview.pages_total
            rows = {process.pid: process for process in overview.processes}
            assert rows.keys() == {os.getpid(), one.pid, two.pid}
            assert all(process.alive for process in rows.values())
            assert rows[one.pid].pages_held == 3
            assert rows[two.pid].pages_held == 1
            assert rows[one.pid].sequences == 1  # its hit was released and is gone
            assert rows[one.pid].counters["appended_bytes"] == 12 * RECORD_BYTES
            assert rows[one.pid].counters["match_keys_asked"] == 4
            assert rows[one.pid].counters.hits == 0.5
            assert rows[os.getpid()].counters["appended_bytes"] == 0
            assert rows[os.getpid()].counters.hits is None
            assert overview.totals["appended_bytes"] == 17 * RECORD_BYTES
        assert pool.stats()["processes"] == 3, "who looks takes no slot"
    assert inspect(path).state == "idle"


def test_totals_outlive_whoever_counted(path: str) -> None:
    """Killed, closed, closed by all, opened again: the totals only grow."""
    make(path).close()
    seen = []

    def note(overview: Overview) -> None:
        seen.append(overview.totals["appended_bytes"])

    with worker(path, 8):
        note(inspect(path))
    killed = inspect(path)
    assert (killed.state, killed.settled) == ("idle", False)
    assert [process.alive for process in killed.processes] == [False]
    note(killed)
    with CXLPool.open(path) as pool, worker(path, 4):
        note(pool.admin.overview())
        assert pool.admin.overview().totals["reaped_processes"] == 1
    note(inspect(path))
    CXLPool.open(path).close()  # settles: the host state is gone
    settled = inspect(path)
    assert (settled.state, settled.settled, settled.processes) == ("idle", True, ())
    assert settled.totals["reaped_processes"] == 2
    note(settled)
    assert seen == [tokens * RECORD_BYTES for tokens in (8, 8, 12, 12, 12)]


def test_an_idle_pool_shows_what_is_published(path: str) -> None:
    with make(path), worker(path, 12):
        pass
    CXLPool.open(path).close()
    overview = inspect(path)
    assert (overview.pages["published"], overview.prefix_pages) == (2, 2)
    assert overview.pages["free"] == overview.pages_total - 2


def test_garbage_in_the_host_state_is_survived(path: str) -> None:
    """It is written by other processes: whatever stands there, looking ends and stays in bounds."""
    make(path).close()
    with worker(path, 8):
        pass
    (state,) = host_states(inspect(path).identity)
    whole = state.read_bytes()
    chance = random.Random(5)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 20, 500))):
            data[chance.randrange(128, 40_000)] = chance.randrange(256)
        state.write_bytes(data)
        overview = inspect(path)
        assert sum(overview.pages.values()) == overview.pages_total
    state.write_bytes(whole[: len(whole) // 2])
    assert inspect(path).processes == ()
    state.write_bytes(whole)
    assert len(inspect(path).processes) == 1


# ---- list ----


def test_list_tells_states_apart(folder: Path, path: str) -> None:
    with make(path), make(str(folder / "idle")) as idle:
        idle.close()
        damaged = folder / "damaged"
        damaged.write_bytes(Path(str(idle.path)).read_bytes())
        poke(damaged, 20, b"????")
        (folder / "notes.txt").write_text("CXLKV is a pool, this is not")
        (folder / "fake.0123456789abcdef.new").write_text("somebody else's")
        (folder / "link").symlink_to(path)
        os.mkfifo(folder / "pipe")
        inner = folder / "inner"
        inner.mkdir()
        with make(str(inner / "deep")):
            assert states([str(folder)]) == {
                "test.pool": "live",
                "idle": "idle",
                "damaged": "damaged",
                "deep": "live",
            }
            listed = json.loads(command("pool", "list", "--json", str(folder)))["pools"]
            assert [pool["state"] for pool in listed] == ["damaged", "idle", "live", "live"]
            assert "CRC is wrong" in listed[0]["detail"]
            assert [row["pid"] for row in listed[3]["processes"]] == [os.getpid()]
            text = command("pool", "list", str(folder))
            assert "test/model" in text
            assert str(os.getpid()) in text
        for left in (*inner.iterdir(), *(folder / name for name in ("pipe", "link"))):
            left.unlink()
        inner.rmdir()


def test_the_default_places_are_looked_in(path: str) -> None:
    with make(path):
        listed = json.loads(command("pool", "list", "--json"))["pools"]
        assert path in {pool["path"] for pool in listed}


def test_a_place_that_is_not_there_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PoolMissingError):
        find([str(folder / "absent")])
    for name in ("list", "gc"):
        ended = run(capsys, "pool", name, folder / "absent")
        assert (ended.code, "absent" in ended.err) == (1, True)


# ---- gc ----


def stopped_creation(path: str) -> subprocess.Popen[bytes]:
    """A process that is stopped while it makes a pool, whose file is PATH.<hex>.new so far."""
    process = subprocess.Popen([sys.executable, "-c", CREATE_AND_STOP, path, str(1 << 28)])
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        # It is locked before it has a size.
        if any(draft.stat().st_size for draft in Path(path).parent.glob("*.new")):
            stop(process)
            os.waitpid(process.pid, os.WUNTRACED)
            if list(Path(path).parent.glob("*.new")):
                return process
            raise AssertionError("the creation was faster than its stop")
        assert process.poll() is None
    raise AssertionError("no file appeared")


def test_a_creation_is_left_alone_until_it_is_killed(folder: Path, path: str) -> None:
    process = stopped_creation(path)
    try:
        (draft,) = folder.glob("*.new")
        assert states([str(folder)]) == {draft.name: "being made"}
        assert find_garbage([str(folder)]) == []
        assert command("pool", "gc", "--yes", str(folder)) == "Nothing is left over.\n"
        assert draft.exists()
        process.send_signal(signal.SIGCONT)
        assert process.wait(WAIT_S) == 0
        assert states([str(folder)]) == {"test.pool": "idle"}
    finally:
        process.kill()
        process.wait()


def test_gc_finds_what_a_kill_during_create_left(folder: Path, path: str) -> None:
    process = stopped_creation(path)
    process.kill()
    process.wait()
    (draft,) = folder.glob("*.new")
    assert states([str(folder)]) == {draft.name: "half-made"}
    assert "its creator was killed" in command("pool", "gc", "--json", str(folder))
    assert draft.exists()
    assert draft.name in command("pool", "gc", "--yes", str(folder))
    assert list(folder.iterdir()) == []


def test_the_second_name_of_a_finished_pool_goes_and_the_pool_stays(
    folder: Path, path: str
) -> None:
    """A kill came between the last two steps of a creation; and somebody uses the pool."""
    with make(path) as pool:
        os.link(path, f"{path}.0123456789abcdef.new")
        (left,) = find_garbage([str(folder)])
        assert collect(left)
        assert [file.name for file in folder.iterdir()] == ["test.pool"]
        assert pool.admin.check()["clean"]
        other = folder / "other.0123456789abcdef.new"
        os.link(path, other)  # whose second name it is, nobody can say
        assert find_garbage([str(folder)]) == []
        other.unlink()


def test_only_files_of_ours_count_as_half_made(folder: Path) -> None:
    name = "x.0123456789abcdef.new"
    for content in (b"hello", b"\0" * 5000, b"CXLKVPO"):
        (folder / name).write_bytes(content)
        assert find([str(folder)]) == []
        assert find_garbage([str(folder)]) == []
    (folder / name).write_bytes(b"")
    assert states([str(folder)]) == {name: "half-made"}
    (folder / name).rename(folder / "x.0123456789abcdeF.new")
    assert find([str(folder)]) == []


def test_gc_races_with_creations_and_breaks_none(folder: Path) -> None:
    """One process makes pools without pause, another cleans without pause. Cleaning may be faster
    than a creator's lock, and take its empty file: then the creator makes another."""
    code = (
        "import sys\nfrom cxlkv import CXLPool, KVLayout\n"
        "layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype='float32')\n"
        "for i in range(150):\n"
        "    path = f'{sys.argv[1]}/{i}.pool'\n"
        "    CXLPool.create(path, layout=layout, capacity='3MiB', threads=1).close()\n"
        "    assert CXLPool.open(path).admin.check()['clean']\n"
        "    CXLPool.remove(path)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    while process.poll() is None:
        for left in find_garbage([str(folder)]):
            collect(left)
    assert process.wait() == 0
    assert list(folder.iterdir()) == []


def test_gc_removes_the_host_state_of_a_pool_that_is_gone(path: str) -> None:
    """Only when its pool is gone, and nobody has it open."""
    with make(path) as pool:
        identity = str(pool.describe()["identity"])
    with worker(path, 8) as process:
        (state,) = map(str, host_states(identity))
        Path(path).rename(f"{path}.elsewhere")  # it seems gone, but is in use
        assert find_garbage([state]) == []
        Path(f"{path}.elsewhere").rename(path)
        process.kill()
        assert find_garbage([state]) == []  # its next user takes it over
    with open(path, "r+b") as file:
        file.write(b"CXLKVPOL\x01\0\0\0????")  # a damaged pool is removed without its state
    CXLPool.remove(path)
    (left,) = find_garbage([state])
    assert left.kind == "orphan"
    assert state in command("pool", "list", "--json")
    assert state in command("pool", "gc", "--yes", state)
    assert host_states(identity) == []


def test_idle_pools_go_only_when_asked_and_after_their_time(folder: Path, path: str) -> None:
    make(path).close()
    make(str(folder / "used")).close()
    with worker(str(folder / "used"), 4):
        for name in (path, str(folder / "used")):
            os.utime(name, (0, 0))
        assert find_garbage([str(folder)]) == []
        assert [left.path for left in find_garbage([str(folder)], 3600)] == [path]
        assert find_garbage([str(folder)], 1e12) == []
        command("pool", "gc", "--yes", "--idle-s", "3600", str(folder))
        assert [file.name for file in folder.iterdir()] == ["used"]


def test_an_idle_pool_is_young_again_when_somebody_leaves(folder: Path, path: str) -> None:
    make(path).close()
    os.utime(path, (0, 0))
    CXLPool.open(path).close()
    assert find_garbage([str(folder)], 3600) == []
    assert len(find_garbage([str(folder)], 0)) == 1


def test_a_pool_whose_users_were_killed_is_settled_first(folder: Path, path: str) -> None:
    """When they died is not known: gc takes back what they held, and the time begins."""
    make(path).close()
    with worker(path, 12):
        pass
    os.utime(path, (0, 0))
    (left,) = find_garbage([str(folder)], 3600)
    assert left.kind == "unsettled"
    assert "settled now" in command("pool", "gc", "--yes", "--idle-s", "3600", str(folder))
    overview = inspect(path)
    assert (overview.settled, overview.pages["held"], overview.pages["published"]) == (True, 0, 2)
    assert find_garbage([str(folder)], 3600) == []


def test_gc_asks_before_it_removes(folder: Path) -> None:
    (folder / "x.0123456789abcdef.new").touch()
    arguments = [sys.executable, "-m", "cxlkv.ops.cli", "pool", "gc", str(folder)]
    done = subprocess.run(arguments, input="n\n", text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert len(list(folder.iterdir())) == 1
    subprocess.run(arguments, input="y\n", text=True, capture_output=True, check=True)
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_files_of_another_user_are_left_alone(folder: Path, path: str) -> None:
    make(path).close()
    draft = folder / "x.0123456789abcdef.new"
    draft.touch()
    for file in (Path(path), draft):
        os.chown(file, 12345, 12345)
        os.utime(file, (0, 0))
    assert find_garbage([str(folder)], 0) == []


# ---- top ----


def test_top_once_shows_pools_and_who_does_what(folder: Path, path: str) -> None:
    with make(path), worker(path, 12) as one, worker(path, 8):
        text = command("pool", "top", "--once", "--interval-s", "0.05", str(folder))
    assert f"{path}\nlive  " in text
    assert "tokens  test/model" in text
    assert "held 5  published 0  free" in text
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [str(one.pid)]]
    assert "50.0 %" in line
    assert "python" in line
    assert "all, since it was made" in text


@contextlib.contextmanager
def top(place: str, terminal: bool = True) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """What `cxlkv pool top` writes to, a terminal of its own or a pipe; when the block is through,
    it ends well and without a complaint."""
    parent, child = pty.openpty() if terminal else os.pipe()
    arguments = ("pool", "top", "--interval-s", "0.05", place)
    process = subprocess.Popen(
        [sys.executable, "-m", "cxlkv.ops.cli", *arguments],
        stdin=child if terminal else subprocess.DEVNULL,
        stdout=child,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
        # A shell starts what runs behind it with the signal ignored, and that is inherited.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(child)
    try:
        yield parent, process
        drain_until_end(parent, process)
        assert process.returncode == 0
        assert process.stderr
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()
        os.close(parent)


def test_top_follows_pools_that_come_and_go_and_ends_with_q(path: str) -> None:
    """Each step waits for what the screen shows."""
    with top(path) as (screen, _):
        screen_shows(screen, "not there (yet)")
        with make(path):
            screen_shows(screen, "live")
        screen_shows(screen, "idle")
        CXLPool.remove(path)
        screen_shows(screen, "not there (yet)")
        os.write(screen, b"q")


@pytest.mark.parametrize("terminal", [True, False])
def test_top_ends_cleanly_with_control_c(folder: Path, path: str, terminal: bool) -> None:
    with make(path), top(str(folder), terminal) as (screen, process):
        screen_shows(screen, "live")
        process.send_signal(signal.SIGINT)


def screen_shows(fd: int, wanted: str) -> None:
    """Reads what is printed from now on until `wanted` is in it."""
    got = ""
    while wanted not in got:
        ready, _, _ = select.select([fd], [], [], WAIT_S)
        assert ready, f"{wanted!r} never came: {got[-2000:]}"
        got += os.read(fd, 65536).decode(errors="replace")


def drain_until_end(fd: int, process: subprocess.Popen[bytes]) -> None:
    """A program does not end while its terminal is full."""
    while process.poll() is None:
        ready, _, _ = select.select([fd], [], [], 0.1)
        with contextlib.suppress(OSError):
            if ready and not os.read(fd, 65536):
                process.wait(WAIT_S)


def test_names_of_others_cannot_steer_the_terminal(folder: Path) -> None:
    layout = KVLayout(
        layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32", model_id="\x1b[2Jx"
    )
    path = str(folder / "a\x1b]0;b\x07")
    with CXLPool.create(path, layout=layout, capacity="3MiB", threads=1):
        for arguments in (("list",), ("top", "--once", "--interval-s", "0.01"), ("gc",)):
            assert "\x1b" not in command("pool", *arguments, str(folder))


def test_nothing_is_sampled_where_nothing_was(path: str) -> None:
    with make(path) as pool:
        pool.sequence().append(0, *(np.ones((1, 2, 8), np.float32),) * 2)
        text = command("pool", "top", "--once", "--interval-s", "0.01", path)
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [str(os.getpid())]]
    assert line.split()[-3:] == ["-", "-", "-"]


def test_a_damaged_pool_is_removed_but_not_while_it_is_used(path: str) -> None:
    with make(path) as pool:
        poke(path, 20, b"????")
        with pytest.raises(BusyError, match="in use"):
            CXLPool.remove(path)
        assert pool.admin.check()["problem_count"] > 0
    CXLPool.remove(path)
    assert not Path(path).exists()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_top_never_cuts_a_number(width: int) -> None:
    """Fewer columns on a narrow terminal, each whole; who and how much stays."""
    table = Processes()
    numbers = ("1234567", "12,345", "99", "10.5 GiB", "717.1 MiB", "1.459 GiB", "1023 MiB")
    table.add(numbers[0], "python serve_a_model.py", *numbers[1:], "61.7 %", "100.0 %", "44.6 %")
    table.add("", "all, since it was made", "", "", *["1.5 TiB"] * 4, "-", "-", "-")
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    header, row, _ = console.export_text().splitlines()
    assert max(len(header), len(row)) <= width
    shown = header.split()
    assert shown == list(table.widths(width))
    assert {"pid", "command", "pages"} <= set(shown)
    for name, number in zip(("pid", "pages", "seqs", "append/s"), numbers, strict=False):
        assert (number in row) == (name in shown)
    assert (len(shown) == len(COLUMNS)) == (width >= 140)
