"""The NDP worker is a process near the memory that selects and attends for others.

docs/explanation/ndp-worker.md says what it is for; the work is done in native/src/worker/server.c,
the client's end is in native/src/worker/client.c. Here it is only begun, watched and ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FrameType

import numpy as np

from cxlkv import _core
from cxlkv.arrays import Array, BudgetRow, view
from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError
from cxlkv.layout import DTYPES, KVLayout
from cxlkv.machine.topology import Machine
from cxlkv.ndp import choosers, scorers, simd
from cxlkv.ndp.engine import PERS, Asked, Budget, Selection

SLOTS = 8
PAYLOAD_BYTES = 1 << 20  # of a request, and of an answer
SERVE_S = 0.2  # so long a signal may wait
STATUS_S = 60
STATES_S = 0.02  # a call in which states are made longer is to be made again
FORGET_S = 0.1  # what clients let go is kept so much longer, while others ask


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
    choose: Choosers | None = None,
) -> None:
    """Serve clients until SIGTERM or SIGINT; `say` gets a line at first, now and then, and last.
    choose: what answers for choosers.

    Raises BusyError when the pool has a worker already.
    """
    with stop_signals() as stopped:
        worker = _core.worker_make(pool, slots, request_bytes, response_bytes, mode)
        try:
            say(f"worker {os.getpid()}: serves up to {slots} processes")
            waited_s, requests = 0.0, 0
            while not stopped:
                begin = time.monotonic()
                _core.worker_serve(worker, SERVE_S)
                if choose:
                    choose.answer(worker)
                waited_s += time.monotonic() - begin
                if waited_s >= STATUS_S:
                    waited_s, state = 0.0, _core.worker_state(worker)
                    if state["requests"] != requests:
                        say(status_line(state))
                    requests = state["requests"]
            say(f"{status_line(_core.worker_state(worker))}: ends")
        finally:
            _core.worker_destroy(worker)


class Choosers:
    """Those of a worker by their numbers, and the states that they have made for its clients, which
    live as long as a client has the sequence."""

    def __init__(self, pool: _core.Handle, layout: KVLayout, methods: Iterable[str]) -> None:
        """methods: as `cxlkv ndp-worker --methods` has them, scorers among them, which the core
        gets. Raises BadArgumentError for unknown ones."""
        self._pool, self._layout = pool, layout
        self._known: dict[int, choosers.AnyChooser] = {}
        self._held: dict[int, choosers.Held] = {}
        self._forget_s = 0.0
        for word in methods:
            chooser = choosers.of(word)
            if chooser is None:
                scorers.number_of(pool, layout, word)
                continue
            choosers.try_out(chooser, layout)
            self._known[choosers.number_of(chooser)] = chooser

    def answer(self, worker: _core.Handle) -> None:
        """What a client asks now, if anything."""
        asked = _core.worker_asked(worker)
        if asked is not None:
            self._answer(worker, asked)
        # Behind it: who told its sequences anew has found their states again by now.
        if asked is None or time.monotonic() > self._forget_s:
            self._forget(worker)

    def _answer(self, worker: _core.Handle, asked: _core.WorkerQuestion) -> None:
        try:
            found = self._select(asked)
        except choosers.UnfinishedError as error:
            _core.worker_refuse(worker, str(error), again=True)
        except Exception as error:  # of anyone's code; the client does it, and gets its own
            _core.worker_refuse(worker, f"{type(error).__name__}: {error}", again=False)
        else:
            of = found.rows
            rows = None if of is None else (of.k, of.v, of.log_counts)
            with contextlib.suppress(CXLKVError):  # it is too long, and the client was told so
                _core.worker_answer(
                    worker,
                    found.pages,
                    found.log_weights,
                    rows,
                    found.bytes_scored,
                    found.bytes_fetched,
                )

    def _select(self, asked: _core.WorkerQuestion) -> Selection:
        chooser, layout = self._known.get(asked.chooser), self._layout.of_layer(asked.layer)
        if chooser is None:
            known = ", ".join(each.name for each in self._known.values()) or "none"
            raise UnsupportedError(
                f"the worker does not know the chooser of number {asked.chooser}, of another name, "
                f"seed or code; those that it was begun with (--methods): {known}"
            )
        if DTYPES[asked.dtype] != "float32":
            raise UnsupportedError(f"queries of {DTYPES[asked.dtype]}: choosers take float32")
        shape = (int(asked.starts[-1]), asked.q_heads, layout.head_dim)
        question = Asked(
            layer=asked.layer,
            queries=view(np.frombuffer(bytearray(asked.queries), np.float32).reshape(shape), "q"),
            starts=asked.starts,
            budgets=tuple(_budget_of(row, asked.per) for row in asked.budgets),
            method=chooser.name,
            scale=asked.scale,
        )
        choosers.check_budgets(chooser, layout, question)
        texts = [
            choosers.Text(
                sequence,
                tokens,
                partial(self._fetch, sequence, asked.layer),
                self._held.setdefault(table, choosers.Held()),
            )
            for sequence, tokens, table in zip(
                asked.sequences, asked.tokens, asked.tables, strict=True
            )
        ]
        end_s = time.monotonic() + STATES_S
        return choosers.select_here(chooser, self._pool, layout, texts, question, end_s)

    def _fetch(self, sequence: _core.Handle, layer: int, picked: Selection) -> tuple[Array, Array]:
        batch = _core.batch_create(self._pool, [sequence])
        return simd.fetch(batch, self._layout.of_layer(layer), layer, picked, 1, 0, None)

    def _forget(self, worker: _core.Handle) -> None:
        if self._held:
            there = _core.worker_tables(worker)
            self._held = {table: of for table, of in self._held.items() if table in there}
        self._forget_s = time.monotonic() + FORGET_S


@lru_cache(maxsize=256)
def _budget_of(row: BudgetRow, per: int) -> Budget:
    """What Budget.row() was of."""
    return Budget(
        pages=row.pages if row.kind == 0 else None,
        share=(None, row.amount, None, 1.0)[row.kind],
        mass=row.amount if row.kind == 2 else None,
        sinks=row.sinks,
        recent=row.recent,
        per=PERS[per],
    )


def status_line(state: dict[str, int]) -> str:
    return (
        f"worker {state['pid']}: {state['clients']} of {state['slots']} slots taken, "
        f"{state['requests']} requests, {state['refused']} of them refused"
    )
