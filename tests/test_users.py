"""Other users of the machine: what they plant at the project's names is never worked on.

Goal: whatever another user puts where a host state, its folder, a worker's slots or an engine's
pool would lie (files, folders, links, FIFOs, locks), every open ends within a bound, with an error
that names the file and what mends it, and what was planted stays as it was. Method: as root, that
can be anybody; the victim is a user of its own for each test, so that nobody else's folder is met.
New features with names of their own add them here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import SystemRandom

import pytest

from cxlkv import KVLayout, ObjectPool
from cxlkv.adapters.common.pools import make_or_open
from cxlkv.errors import BadArgumentError
from cxlkv.machine.regions import one_maker
from cxlkv.ndp.worker import worker_use
from cxlkv.ops.gc import collect, find_garbage

from .support.states import SHARED_MEMORY, host_states, state_folder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

LAYOUT = KVLayout.objects("4KiB")
STRANGER = 65534
BOUND_S = 20  # for what takes milliseconds on an idle machine


@pytest.fixture
def victim() -> Iterator[int]:
    """A user that nobody else is, without a folder."""
    user = SystemRandom().randrange(100_000, 2**31)
    yield user
    folder = state_folder(user)
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder where everybody may make files, as /dev/shm is."""
    folder = SHARED_MEMORY / f"cxlkv-test-users-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


class Other:
    """A forked process that becomes `user`, calls `does` with a function that waits for the word to
    go on, and says what came of it. It ends within the bound."""

    def __init__(self, user: int, does: Callable[[Callable[[], None]], object]) -> None:
        said, self._go = os.pipe(), os.pipe()
        self._said = said[0]
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._go[1])
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
                os.umask(0o22)
                self._report(said[1], self._answer(does, said[1]))
            finally:
                os._exit(0)
        os.close(said[1])
        os.close(self._go[0])

    def _answer(self, does: Callable[[Callable[[], None]], object], fd: int) -> str:
        def waits() -> None:
            self._report(fd, "waits")
            os.read(self._go[0], 1)

        try:
            return str(does(waits))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _report(self, fd: int, text: str) -> None:
        os.write(fd, text.encode() + b"\0")

    def hear(self) -> str:
        """The next that it says."""
        text = b""
        while not text.endswith(b"\0"):
            ready, _, _ = select.select([self._said], [], [], BOUND_S)
            got = os.read(self._said, 1) if ready else b""
            if not got:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"it was silent for {BOUND_S} s" if not ready else "it died")
            text += got
        return text[:-1].decode()

    def end(self) -> str:
        os.close(self._go[1])
        said = self.hear()
        os.close(self._said)
        os.waitpid(self.pid, 0)
        return said


def outcome(user: int, does: Callable[[], object]) -> str:
    """What that user's process says: the result, or the error."""
    return Other(user, lambda _: does()).end()


@contextlib.contextmanager
def waiting(user: int, does: Callable[[Callable[[], None]], object]) -> Iterator[Other]:
    other = Other(user, does)
    assert other.hear() == "waits"
    yield other
    other.end()


def opens(path: Path, host: int | None = None) -> Callable[[], str]:
    def does() -> str:
        with ObjectPool.open(path, threads=1, host=host) as pool:
            if host is None:
                pool.put("a", b"12")
            return f"fine: {pool.stats()['processes']}"

    return does


def keeps_open(path: Path, host: int | None = None) -> Callable[[Callable[[], None]], None]:
    def does(waits: Callable[[], None]) -> None:
        with ObjectPool.open(path, threads=1, host=host):
            waits()

    return does


def keeps_locked(path: Path, byte: int) -> Callable[[Callable[[], None]], None]:
    def does(waits: Callable[[], None]) -> None:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
            waits()

    return does


def make(place: Path, owner: int, host: int | None = None) -> Path:
    """An idle pool of that user; with a host, one that two share."""
    path = place / "a.pool"

    def does() -> str:
        create = partial(ObjectPool.create, path, layout=LAYOUT, capacity="4MiB", threads=1)
        made = create() if host is None else create(sharing="software", hosts=2, host=host)
        made.close()
        return "made"

    assert outcome(owner, does) == "made"
    return path


def owned(path: Path, user: int) -> Path:
    os.chown(path, user, user, follow_symlinks=False)
    return path


# ---- the folder ----


def plant_folder(at: Path) -> None:
    at.mkdir()
    at.chmod(0o777)


def plant_file(at: Path) -> None:
    at.touch()


def plant_fifo(at: Path) -> None:
    os.mkfifo(at, 0o666)


PLANTS: dict[str, Callable[[Path], object]] = {
    "an open folder": plant_folder,
    "a private folder": lambda at: at.mkdir(0o700),
    "a file": plant_file,
    "a fifo": plant_fifo,
    "a link to the victim's own": lambda at: at.symlink_to(at.parent / f"{at.name}.elsewhere"),
}


def facts(path: Path) -> tuple[int, ...]:
    status = os.lstat(path)
    return status.st_ino, status.st_uid, status.st_mode, status.st_size, status.st_mtime_ns


@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.parametrize("opener", ["owner", "root"])
def test_a_folder_of_another_user_is_refused(
    place: Path, victim: int, what: str, opener: str
) -> None:
    path = make(place, victim)
    folder = state_folder(victim)
    folder.rmdir()
    elsewhere = folder.with_name(f"{folder.name}.elsewhere")
    elsewhere.mkdir(0o700)
    owned(elsewhere, victim)
    PLANTS[what](folder)
    owned(folder, STRANGER)
    before = facts(folder)
    try:
        began = time.monotonic()
        said = outcome(victim if opener == "owner" else 0, opens(path))
        assert said.startswith("SystemCallError"), said
        assert str(folder) in said, said
        if opener == "root" or "-rwx" not in stat.filemode(before[2]):
            assert f"rm {folder}" in said or f"rm -r {folder}" in said or "as that user" in said
        assert time.monotonic() - began < BOUND_S
        assert facts(folder) == before
        assert list(elsewhere.iterdir()) == []
    finally:
        elsewhere.rmdir()
    if folder.is_dir() and not folder.is_symlink():
        folder.rmdir()
    else:
        folder.unlink()
    assert outcome(victim, opens(path)) == "fine: 1"


def test_a_folder_that_others_may_enter_is_refused(place: Path, victim: int) -> None:
    """Its owner opened it up: what lies in it may be anybody's by now."""
    path = make(place, victim)
    for mode in (0o755, 0o701, 0o1700, 0o500):
        state_folder(victim).chmod(mode)
        said = outcome(victim, opens(path))
        assert f"chmod 700 {state_folder(victim)}" in said, said
    state_folder(victim).chmod(0o700)
    assert outcome(victim, opens(path)) == "fine: 1"


def test_root_works_beside_the_owner(place: Path, victim: int) -> None:
    """Whoever comes first makes the folder and the state, and both belong to the owner."""
    path = make(place, victim)
    for first, second in ((0, victim), (victim, 0)):
        shutil.rmtree(state_folder(victim))
        with waiting(first, keeps_open(path)):
            (state,) = state_folder(victim).iterdir()
            for each, mode in ((state, 0o600), (state.parent, 0o700)):
                assert (each.stat().st_uid, stat.S_IMODE(each.stat().st_mode)) == (victim, mode)
            assert outcome(second, opens(path)) == "fine: 2"
        assert list(state_folder(victim).iterdir()) == []


def test_a_third_user_is_told_whose_pool_it_is(place: Path, victim: int) -> None:
    path = make(place, victim)
    path.chmod(0o666)
    said = outcome(STRANGER, opens(path))
    assert f"belongs to user {victim}" in said, said
    assert "as that user" in said, said
    shutil.rmtree(state_folder(victim))  # nor does it make one
    said = outcome(STRANGER, opens(path))
    assert f"belongs to user {victim}" in said, said
    assert "as that user" in said, said
    assert not state_folder(victim).exists()
    assert not list(SHARED_MEMORY.glob(f"cxlkv.{victim}.*"))


# ---- what lies in it ----


def name_of_state(path: Path, victim: int, host: int | None) -> Path:
    with waiting(victim, keeps_open(path, host)):
        (state,) = state_folder(victim).glob("*.host")
    assert not state.exists()
    return state


@pytest.mark.parametrize("host", [None, 0])
def test_only_a_file_of_the_owner_with_one_name_is_a_state(
    place: Path, victim: int, host: int | None
) -> None:
    """Its owner may have moved a folder there, or root was careless."""
    path = make(place, victim, host)
    state = name_of_state(path, victim, host)
    other = owned_file(place / "other", victim)

    def refused(word: str) -> None:
        began = time.monotonic()
        for user in (victim, 0):
            said = outcome(user, opens(path, host))
            assert str(state) in said, said
            assert word in said, said
        assert time.monotonic() - began < 2 * BOUND_S
        assert other.read_bytes() == b"mine"
        state.unlink()

    owned_file(state, STRANGER)
    refused("no file of user")
    os.link(other, state)
    refused("no file of user")
    state.symlink_to(other)
    refused("is a link")
    os.mkfifo(state)
    owned(state, victim)
    refused("no file of user")
    assert outcome(victim, opens(path, host)) == "fine: 1"


def owned_file(path: Path, user: int) -> Path:
    path.write_bytes(b"mine")
    path.chmod(0o666)
    return owned(path, user)


def test_a_workers_slots_are_looked_at_as_well(place: Path, victim: int) -> None:
    path = make(place, victim)
    slots = name_of_state(path, victim, None).with_suffix(".worker")

    def use() -> str:
        with ObjectPool.open(path, threads=1, worker=True) as pool:
            return worker_use(pool._handle).why

    for plant in (plant_fifo, plant_file, lambda at: at.symlink_to(path)):
        plant(slots)
        owned(slots, STRANGER)
        said = outcome(victim, use)
        assert str(slots) in said, said
        assert not os.path.lexists(slots)  # the last one to leave takes along what lies there
    assert outcome(victim, opens(path)) == "fine: 1"


# ---- makers ----


def test_a_lock_on_the_pools_folder_holds_up_nobody(place: Path, victim: int) -> None:
    """Anybody may lock /dev/shm, where engines make their pools."""
    path = place / "a.pool"

    def locks(waits: Callable[[], None]) -> None:
        folder = os.open(place, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)
        waits()

    def makes() -> str:
        with one_maker():
            ObjectPool.create(path, layout=LAYOUT, capacity="4MiB", threads=1).close()
        return "made"

    with waiting(STRANGER, locks):
        assert outcome(victim, makes) == "made"


def test_an_engine_takes_no_pool_of_a_stranger(place: Path, victim: int) -> None:
    """Not even root's, which may open all: its name is known before it is made."""
    path = place / "a.pool"

    def makes() -> str:
        ObjectPool.create(path, layout=LAYOUT, capacity="4MiB", threads=1).close()
        return "made"

    assert outcome(victim, makes) == "made"
    link = place / "b.pool"
    link.symlink_to(path)
    for where in (path, link):
        with pytest.raises(BadArgumentError, match=f"user {victim}.*chown"):
            make_or_open(ObjectPool, str(where), LAYOUT, "4MiB")
    os.chown(path, 0, 0)
    with make_or_open(ObjectPool, str(path), LAYOUT, "4MiB")[0]:
        pass
    os.lchown(link, victim, victim)
    with pytest.raises(BadArgumentError, match=f"user {victim}"):
        make_or_open(ObjectPool, str(link), LAYOUT, "4MiB")


# ---- the place of older builds: /dev/shm itself ----


def older_state(path: Path) -> Path:
    with path.open("rb") as file:
        identity = file.read(32)[16:].hex()
    return SHARED_MEMORY / f"cxlkv-{identity}-{path.stat().st_ino:x}.host"


def test_what_is_planted_at_the_older_place_is_passed_over(place: Path, victim: int) -> None:
    path = make(place, victim)
    planted = older_state(path)
    owned_file(planted, STRANGER)
    try:
        with waiting(STRANGER, keeps_locked(planted, 0)):
            began = time.monotonic()
            assert outcome(victim, opens(path)) == "fine: 1"
            assert outcome(0, opens(path)) == "fine: 1"
            assert time.monotonic() - began < 2 * BOUND_S
        assert planted.read_bytes() == b"mine"
    finally:
        planted.unlink()


def test_a_pool_in_use_by_an_older_build_is_busy(place: Path, victim: int) -> None:
    path = make(place, victim)
    state = owned_file(older_state(path), victim)
    try:
        with waiting(victim, keeps_locked(state, 0)):
            said = outcome(victim, opens(path))
            assert said.startswith("BusyError"), said
            assert "older build" in said, said
            assert str(state) in said, said
        assert outcome(victim, opens(path)) == "fine: 1"
    finally:
        state.unlink()


def test_gc_takes_an_older_state_that_nobody_uses(place: Path) -> None:
    """Nobody will take it over, also where its pool is still there."""
    with ObjectPool.create(place / "a.pool", layout=LAYOUT, capacity="4MiB", threads=1) as pool:
        (state,) = host_states(pool.describe()["identity"])
        data = bytearray(state.read_bytes())
        data[:8] = b"CVKHST08"
        older = older_state(place / "a.pool")
        older.write_bytes(data)
    try:
        owned(older, STRANGER)
        assert find_garbage([str(older)]) == []
        owned(older, 0)
        (left,) = find_garbage([str(older)])
        assert collect(left)
        assert not older.exists()
    finally:
        older.unlink(missing_ok=True)
