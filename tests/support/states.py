"""What tests and pools leave in shared memory: where host states lie, and whose they are."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from cxlkv import CXLPool
from cxlkv.errors import BusyError, CXLKVError
from cxlkv.ops.gc import Garbage, collect

SHARED_MEMORY = Path("/dev/shm")
SESSION = os.environ.setdefault("CXLKV_TEST_SESSION", uuid.uuid4().hex[:12])
"""Id of this run of the tests: workers and children of tests inherit it."""
OWN = f"cxlkv-test-{SESSION}-"
"""How all names that this run makes in shared memory begin."""
_HEAD_BYTES = 16 << 10  # of a host state: the path of its pool is in there


def state_folder(user: int | None = None) -> Path:
    """The one of the files of a user; of this one, if none is named."""
    return SHARED_MEMORY / f"cxlkv.{os.geteuid() if user is None else user}"


def host_states(identity: object = "*", suffix: str = ".host") -> list[Path]:
    """States of the pool with this identity, or all of this user's; suffix ".worker": slots of
    workers.
    """
    return sorted(state_folder().glob(f"{identity}-*{suffix}"))


def states_of(path: object) -> list[Path]:
    """Host states of pools whose path begins like this."""
    found = []
    for state in host_states():
        with contextlib.suppress(FileNotFoundError), state.open("rb") as file:
            if os.fsencode(str(path)) in file.read(_HEAD_BYTES):
                found.append(state)
    return found


def remove(path: Path) -> None:
    """A pool, what lies beside it under its name, and host states of killed processes."""
    for found in path.parent.glob(f"{path.stem}*"):
        if found.is_dir():
            shutil.rmtree(found)
        else:
            try:
                CXLPool.remove(found)
            except BusyError:
                raise  # a process of the test still has it open
            except (CXLKVError, OSError):  # no pool, or a damaged one
                pass
            found.unlink(missing_ok=True)  # one that was made in place stays
    for state in states_of(path.with_suffix("")):
        collect(Garbage(str(state), "orphan", 0))


def left_behind(folder: Path) -> list[Path]:
    """What this run left in shared memory; folder: where its pools lay that are files."""
    files = [path for path in SHARED_MEMORY.iterdir() if path.name.startswith(OWN)]
    return sorted({*files, *states_of(SHARED_MEMORY / OWN), *states_of(f"{folder}/")})
