"""The NDP worker is a process near the memory that selects and attends for others.

docs/explanation/ndp-worker.md says what it is for; the work is done in native/src/worker/server.c,
the client's end is in native/src/worker/client.c. Here it is only begun, watched and ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from cxlkv import _core
from cxlkv.errors import BadArgumentError
from cxlkv.machine.topology import Machine

SLOTS = 8
PAYLOAD_BYTES = 1 << 20  # of a request, and of an answer
SERVE_S = 0.2  # so long a signal may wait
STATUS_S = 60


@dataclass(frozen=True)
class WorkerUse:
    """How the calls of this process went; `why` is of the last one that the worker did not do."""

    connected: bool
    pid: int
    selects: int
    selects_here: int
    attends: int
    attends_here: int
    connections: int
    why: str


def worker_use(pool: _core.Handle) -> WorkerUse:
    numbers, why = _core.pool_worker_state(pool)
    return WorkerUse(
        connected=bool(numbers["connected"]),
        pid=numbers["pid"],
        selects=numbers["selects"],
        selects_here=numbers["selects_here"],
        attends=numbers["attends"],
        attends_here=numbers["attends_here"],
        connections=numbers["connections"],
        why=why,
    )


def cpus_near(machine: Machine, node: int) -> tuple[int, ...]:
    """The CPUs allowed here of a memory node; a node without any (a CXL expander) has those of the
    nearest one that has some. Raises BadArgumentError."""
    nodes = {each.node: each for each in machine.nodes}
    if node not in nodes:
        known = ", ".join(str(number) for number in sorted(nodes)) or "none"
        raise BadArgumentError(f"there is no memory node {node} here: {known}")
    allowed = set(machine.cpu.cores_allowed)
    online = [nodes[number] for number in sorted(nodes)]
    distances = nodes[node].distances

    def far(index: int) -> tuple[bool, int]:
        distance = distances[index] if index < len(distances) else 255
        return online[index].node != node, distance

    for index in sorted(range(len(online)), key=far):
        cpus = tuple(cpu for cpu in online[index].cpus if cpu in allowed)
        if cpus:
            return cpus
    raise BadArgumentError(f"no CPU near node {node} is allowed here")


def pin(cpus: tuple[int, ...]) -> None:
    """This thread, and all threads that it begins from now on."""
    os.sched_setaffinity(0, cpus)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list in which SIGTERM and SIGINT leave their number, in place of what they do else."""
    got: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        got.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(
    pool: _core.Handle,
    say: Callable[[str], None],
    *,
    slots: int = SLOTS,
    request_bytes: int = PAYLOAD_BYTES,
    response_bytes: int = PAYLOAD_BYTES,
    mode: str = "coherent",
) -> None:
    """Serve clients until SIGTERM or SIGINT; `say` gets a line at first, now and then, and last.

    Raises BusyError when the pool has a worker already.
    """
    with stop_signals() as stopped:
        worker = _core.worker_make(pool, slots, request_bytes, response_bytes, mode)
        try:
            say(f"worker {os.getpid()}: serves up to {slots} processes")
            waited_s, requests = 0.0, 0
            while not stopped:
                _core.worker_serve(worker, SERVE_S)
                waited_s += SERVE_S
                if waited_s >= STATUS_S:
                    waited_s, state = 0.0, _core.worker_state(worker)
                    if state["requests"] != requests:
                        say(status_line(state))
                    requests = state["requests"]
            say(f"{status_line(_core.worker_state(worker))}: ends")
        finally:
            _core.worker_destroy(worker)


def status_line(state: dict[str, int]) -> str:
    return (
        f"worker {state['pid']}: {state['clients']} of {state['slots']} slots taken, "
        f"{state['requests']} requests, {state['refused']} of them refused"
    )
