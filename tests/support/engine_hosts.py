"""The suite of engines that are several hosts of one pool: whatever becomes of one of them, the
others go on, and what anybody finds is right.

    class TestMyEngine(HostsSuite):
        program = Path(__file__).with_name("life.py")  # calls nursery.serve()
        form = "mha"
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest

from cxlkv import ObjectPool

from .forked import Nursery
from .nursery import Engine
from .waiting import until

LEASE_S = 1.0
HOSTS = 4
WATCHER = 3  # the test itself; engines find their numbers by themselves
PAGES = 6
"""Pages of each text."""
WHOLE = [PAGES, True]


class Bench:
    """A pool, and engines that are hosts of it."""

    def __init__(self, nursery: Nursery[Engine], path: Path, form: str):
        self._nursery, self.path, self._form = nursery, path, form
        self._engines: list[Engine] = []

    def begin(self, **more: object) -> Engine:
        settings = {
            "form": self._form,
            "where": str(self.path),
            "capacity": "32MiB",
            "sharing": "software",
            "hosts": HOSTS,
            "host": "auto",
            "lease_s": LEASE_S,
            **more,
        }
        self._engines.append(self._nursery.begin(settings))
        return self._engines[-1]

    def watch(self, host: int = WATCHER) -> ObjectPool:
        return ObjectPool.open(self.path, host=host, lease_s=LEASE_S, threads=1)

    def kill_all(self) -> None:
        for engine in self._engines:
            engine.kill()

    def check_all(self) -> None:
        """When all have ended, nothing is held and nothing is wrong."""
        for host in range(HOSTS):
            with self.watch(host) as pool:
                assert pool.admin.check(deep=True)["problems"] == []
                stats = pool.stats()
                assert stats["pages_held"] == stats["pages_withdrawn"] == 0, (host, stats)


def whole(engine: Engine, texts: Sequence[int]) -> bool:
    return engine.load(texts) == [WHOLE] * len(texts)


def right(engine: Engine, texts: Sequence[int]) -> bool:
    """All that is found."""
    found = engine.load(texts)
    return all(isinstance(one, list) and one[1] for one in found)


def check_failures(engine: Engine, *kinds: str) -> None:
    """Check for failures of these kinds."""
    found = engine.ask("failures")
    assert isinstance(found, dict)
    assert set(found) <= set(kinds), found


@pytest.fixture(scope="class")
def nursery(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nursery[Engine]]:
    """Nursery of the suite's class; test modules import it."""
    command = [sys.executable, str(request.cls.program)]
    with Nursery(command, tmp_path_factory.mktemp("engines"), Engine) as made:
        yield made


def may_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="a host of its own needs mounts, which root may make")
class HostsSuite:
    """in_place: the engine reads the pool's memory itself."""

    program: ClassVar[Path]
    form: ClassVar[str]
    in_place: ClassVar[bool] = False

    @pytest.fixture
    def bench(self, nursery: Nursery[Engine], tmp_path: Path) -> Iterator[Bench]:
        made = Bench(nursery, tmp_path / "shared.pool", self.form)
        yield made
        made.kill_all()

    def test_an_engine_that_dies_leaves_what_it_has_stored(self, bench: Bench) -> None:
        """Killed in the middle of a save, and of a load: the other one goes on. What it had not
        published comes back with its number, or when it was declared off."""
        one, other = bench.begin(), bench.begin()
        assert one.ask("host") != other.ask("host")
        assert one.save([1, 2]) == [PAGES] * 2
        assert whole(other, [1, 2])
        assert other.save([3, 4]) == [PAGES] * 2
        assert whole(one, [3, 4])
        for where, text in (("save", 5), ("load", 1)):
            number = other.ask("host")
            assert isinstance(number, int)
            other.ask("mark", where=where, number=signal.SIGKILL)
            other.say(where, text=text)
            assert other.has_ended()
            assert whole(one, [1, 2, 3, 4])
            assert right(one, [5])
            with bench.watch() as watcher:
                until(lambda: watcher.admin.hosts()[number].state == "silent")  # noqa: B023
                assert watcher.admin.check(deep=True)["clean"]
                if where == "load":
                    watcher.admin.fence(number, confirmed_off=True)
            other = bench.begin()
            other.save([5])
            assert whole(other, [1, 2, 3, 4, 5])
            assert whole(one, [5])
        for engine in (one, other):
            check_failures(engine)
            engine.end()
        bench.check_all()

    def test_an_engine_that_was_fenced_comes_back_by_itself(self, bench: Bench) -> None:
        """Stopped for longer than a lease in the middle of a save or a load. Who was fenced only
        goes on; declared off, it misses and stores nothing until it has the pool open again."""
        one, other = bench.begin(), bench.begin()
        assert one.save([1, 2]) == [PAGES] * 2
        number = other.ask("host")
        assert isinstance(number, int)
        with bench.watch() as watcher:
            for text, (off, where) in enumerate(
                [(off, where) for off in (False, True) for where in ("save", "load")], 10
            ):
                until(lambda: whole(other, [1, 2]))
                other.ask("mark", where=where, number=signal.SIGSTOP)
                other.say(where, text=text if where == "save" else 1)
                until(lambda: watcher.admin.hosts()[number].state == "silent")
                watcher.admin.fence(number, confirmed_off=off)
                if off:  # others write where it was about to
                    watcher.pages.free(watcher.pages.alloc(watcher.stats()["pages_free"]))
                os.kill(other.pid, signal.SIGCONT)
                done = other.hear()
                if not (off and where == "load" and self.in_place):  # others may write there
                    pages, is_right = done if isinstance(done, list) else (done, True)
                    assert isinstance(pages, int)
                    assert pages < PAGES if off else pages == PAGES
                    assert is_right
                until(lambda: watcher.admin.hosts()[number].state == "live")
                assert right(one, [1, 2, text])
        until(lambda: whole(other, [1, 2]))
        other.save([20])
        assert whole(one, [20])
        until(lambda: other.log.read_text().count("is open again, as host") == 2)
        check_failures(one)
        check_failures(other, "host")
        for engine in (one, other):
            engine.end()
        bench.check_all()

    def test_a_pool_that_another_host_has_filled(self, bench: Bench) -> None:
        """An engine without free pages gets some; both go on in a pool too small for either."""
        one, other = bench.begin(capacity="24MiB"), bench.begin()
        pages = one.ask("pages")
        assert isinstance(pages, int)
        last = pages // PAGES + 2
        one.save(range(last))
        assert whole(one, [last - 1])
        mine = count(last)

        def saved() -> bool:
            text = next(mine)
            other.save([text])
            return whole(other, [text])

        until(saved)
        assert whole(one, [next(mine) - 1])
        for text in range(1000, 1000 + last):
            (one if text % 2 else other).save([text])
        for engine in (one, other):
            assert right(engine, range(1000, 1000 + last))
            check_failures(engine, "full")
            engine.end()
        bench.check_all()

    def test_a_pool_whose_file_is_removed(self, bench: Bench) -> None:
        """An engine that has it open keeps it, and the next one makes another."""
        one, other = bench.begin(), bench.begin()
        assert one.save([1]) == [PAGES]
        bench.path.unlink()
        assert whole(other, [1])
        assert other.save([2]) == [PAGES]
        assert whole(one, [1, 2])
        assert other.ask("check") == []
        other.end()
        other = bench.begin()
        assert other.load([1, 2]) == [[0, True]] * 2
        assert other.save([1]) == [PAGES]
        assert whole(one, [1, 2])
        assert one.ask("check") == []
        check_failures(one)
        one.end()
        one = bench.begin()
        assert whole(one, [1])
        for engine in (one, other):
            check_failures(engine)
            engine.end()
        bench.check_all()

    def test_a_cold_file_across_a_restart(self, bench: Bench, tmp_path: Path) -> None:
        """It has what the pool had no room for; at last all, as the pool is gone."""
        cold = {"cold": f"{tmp_path}/cold/", "cold_capacity": "64MiB", "capacity": "16MiB"}
        engine = bench.begin(**cold)
        pages = engine.ask("pages")
        assert isinstance(pages, int)
        texts = range(2 * pages // PAGES)
        assert engine.save(texts) == [PAGES] * len(texts)
        for removed in (False, True):
            for text in texts:  # what has come back may go again before it is read
                until(lambda: whole(engine, [text]))  # noqa: B023
            check_failures(engine)
            engine.end()
            if removed:
                bench.check_all()
                ObjectPool.remove(bench.path)
            engine = bench.begin(**cold)
        there = [one for one in engine.load(texts) if one == WHOLE]
        assert len(there) > len(texts) // 4
        assert right(engine, texts)
        check_failures(engine)
        engine.end()
        bench.check_all()
