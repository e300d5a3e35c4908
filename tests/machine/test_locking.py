"""Locked memory: `cxlkv info`, `cxlkv doctor` and an engine's start all say what a try shows."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from cxlkv.machine.locking import limit_counts, try_lock
from cxlkv.machine.topology import probe

# Root of a user namespace has the right by name only: there the limit counts.
IN_NAMESPACE = ("unshare", "-r")
TOLD = """
import json
from cxlkv.machine.locking import try_lock
from cxlkv.machine.topology import missing, probe
told = [each.what for each in missing(probe()) if "locked" in each.what]
print(json.dumps([told, try_lock(1 << 30)]))
"""


def told(*shell: str) -> list[object]:
    """By a process whose limit is 64 KiB: what is said to be missing, and the errno of a try."""
    command = [*shell, "sh", "-c", 'ulimit -l 64 && exec "$@"', "sh", sys.executable, "-c", TOLD]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may have CAP_IPC_LOCK")
def test_a_limit_does_not_count_for_who_has_the_right() -> None:
    if told()[1]:
        pytest.skip("this root has no CAP_IPC_LOCK")
    assert told() == [[], 0]


@pytest.mark.skipif(
    subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="unshare -r: not allowed here",
)
def test_a_limit_counts_in_a_user_namespace() -> None:
    what, errno = told(*IN_NAMESPACE)
    assert what == ["only 0.0625 MiB may be locked in memory"]
    assert errno


def test_a_try_takes_no_memory_and_leaves_nothing_locked() -> None:
    def locked_kib() -> int:
        with open("/proc/self/status") as status:
            (line,) = [line for line in status if line.startswith("VmLck:")]
        return int(line.split()[1])

    before, peak_kib = locked_kib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try_lock(1 << 30)
    assert locked_kib() == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak_kib + (64 << 10)


def test_what_is_probed_is_what_counts() -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        pytest.skip("no limit of locked memory here")
    assert probe().memory.memlock_bytes == (limit if limit_counts(limit) else None)
