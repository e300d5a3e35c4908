"""Interrupts (Ctrl-C) in the middle of calls: at each place where Python runs a signal's handler,
and at random times. Not a test itself.

CPython runs handlers in the main thread between bytecodes: where a function or a generator begins,
behind a call, at a jump back. A tracing function that raises there is an interrupt at that place.
"""

from __future__ import annotations

import dis
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import cxlkv

PACKAGE = str(Path(cxlkv.__file__).parent)
Call = Callable[[], object]


class Interrupt(KeyboardInterrupt):
    """What Ctrl-C raises."""


@cache
def places_of(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which a handler may run.

    What it raises behind a call is raised by the call, for a `try`; what a tracing function raises
    is by the next instruction. So not where that is a return, which no `try` has in it; but in
    threading.py, where nothing else shows how Condition's `with` can be left with its lock taken.
    """
    returns_too = code.co_filename.endswith("threading.py")
    found: set[int] = set()
    called = False
    for each in dis.get_instructions(code):
        if called and each.opname not in ("CACHE", "PRECALL"):
            if returns_too or not each.opname.startswith("RETURN"):
                found.add(each.offset)
            called = False
        called |= each.opname.startswith("CALL")
        if each.opname.startswith(("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
            found.add(each.offset)
    return frozenset(found)


def _is_watched(frame: FrameType) -> bool:
    """The package's own, and those of context managers, which it is made with; not __del__(), out
    of which Python lets nothing come."""
    name = frame.f_code.co_filename
    watched = name.startswith(PACKAGE) or name.endswith(("contextlib.py", "threading.py"))
    return watched and frame.f_code.co_name != "__del__"


class _Tracer:
    """Raises at the n-th place, from 0; `passed`: how many there were before that."""

    def __init__(self, n: int):
        self.n, self.passed = n, 0

    def _pass(self) -> None:
        self.passed += 1
        if self.passed > self.n:
            sys.settrace(None)
            raise Interrupt

    def __call__(self, frame: FrameType, event: str, argument: object) -> object:
        if not _is_watched(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._pass()
        return self._local

    def _local(self, frame: FrameType, event: str, argument: object) -> object:
        if event == "opcode" and frame.f_lasti in places_of(frame.f_code):
            self._pass()
        return self._local


def interrupted_at(n: int, call: Call) -> int:
    """Calls, with an interrupt at the n-th place; how many places there were up to then."""
    before, tracer = sys.gettrace(), _Tracer(n)
    sys.settrace(tracer)  # type: ignore[arg-type]
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return tracer.passed


class Alarms:
    """Interrupts by SIGALRM, in a test with pytest.mark.timeout(method="thread")."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise Interrupt

    def interrupted(self, call: Call, most_s: float) -> bool:
        """Calls; whether an interrupt came, after up to most_s, before the end."""
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._rng.uniform(0, most_s)))
            call()
            self._armed = False
        except Interrupt:
            return True
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False


@contextmanager
def alarms(rng: random.Random) -> Iterator[Alarms]:
    made = Alarms(rng)
    before = signal.signal(signal.SIGALRM, made._handle)
    try:
        yield made
    finally:
        signal.signal(signal.SIGALRM, before)


def median_s(call: Call, settle: Call, rounds: int = 9) -> float:
    """How long the call takes."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
        settle()
    return sorted(times)[rounds // 2]
