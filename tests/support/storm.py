"""Storms on a pool: processes of pool_worker.py that work on it, and are killed half way."""

from __future__ import annotations

import json
import os
import select
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .processes import Child

EVENTS = ("adopted", "hit", "tail_hits", "published", "fork", "truncate", "full", "forgotten")


class Process(Child):
    """A worker, on a host if the pool has several; what it says comes line by line."""

    def __init__(
        self,
        command: str,
        path: str,
        box: Path,
        seed: int,
        steps: int = 0,
        host: int | None = None,
        lease_s: float = 2.0,
    ):
        self.host = host
        own = {"CXLKV_TEST_LEASE_S": str(lease_s)}
        if host is not None:
            own["CXLKV_HOST"] = str(host)
        super().__init__("-m", "tests.support.pool_worker", command, path, box, seed, steps, **own)
        self.file = self.pipes[1]
        self.rest = b""
        self.ended = False
        self.done = 0
        self.seen = Counter[str]()
        self.seeds: list[int] = []  # of all texts of its own
        self.published: list[int] = []  # and not forgotten
        self.stats: dict[str, int] = {}

    def read(self) -> None:
        """Takes what it has said; waits for more when that is nothing."""
        got = os.read(self.file.fileno(), 1 << 16)
        self.ended = not got
        *lines, self.rest = (self.rest + got).split(b"\n")
        for line in lines:
            said = json.loads(line)
            self.done = said.get("done", self.done)
            self.seen.update(said.get("seen", {}))
            if "publishing" in said:
                self.seeds.append(said["publishing"])
            if "published" in said:
                self.published.append(said["published"])
            if "forgotten" in said:
                self.published.remove(said["forgotten"])
            if "stats" in said:
                self.stats = said["stats"]
                assert not said["problems"], said["problems"]

    def end(self, number: int | None = None, expected: int = 0) -> str:
        """Reads to its end, after a signal if one is given."""
        if number is not None:
            self.popen.send_signal(number)
        while not self.ended:
            self.read()
        return super().end(expected=expected)


def run(
    path: str, box: Path, seed: int, operations: int, hosts: Sequence[int | None], killed: set[int]
) -> Counter[str]:
    """What workers on these hosts have seen; those of some places in the list are killed half way,
    and others take over what is left."""
    share = operations // len(hosts)
    processes = [Process("work", path, box, seed + i, share, host) for i, host in enumerate(hosts)]
    victims = {processes[place] for place in killed}
    waiting = list(processes)
    try:
        while waiting:
            ready, _, _ = select.select([process.file for process in waiting], [], [])
            for process in [process for process in waiting if process.file in ready]:
                process.read()
                if process in victims and process.done >= share // 2:
                    victims.discard(process)
                    process.end(signal.SIGKILL, -signal.SIGKILL)
                    left = share - process.done
                    heir = Process("work", path, box, seed + 100 + left, left, process.host)
                    processes.append(heir)
                    waiting.append(heir)
                elif process.ended:
                    process.end()
                if process.ended:
                    waiting.remove(process)
        assert not victims, "a victim was never killed"
    finally:
        for process in processes:
            process.kill()
    seen = sum((process.seen for process in processes), Counter[str]())
    seen["operations"] = sum(process.done for process in processes)
    return seen
