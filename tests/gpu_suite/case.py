"""One case of the GPU suite: python -m tests.gpu_suite.case CASE FOLDER [--seconds S] [--tiny].

Writes FOLDER/CASE.json after each part, so that a cut loses little. Exit status 77: what the case
measures is not there, and the last line says what.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from cxlkv.bench.measure import Samples, interleave_reported, seconds_of
from cxlkv.bench.result import Result
from cxlkv.errors import UnsupportedError

NO_FIGURES = "no GPU: no figures"
FLUSH_BYTES = 512 << 20  # several times any L2; reading it takes longer than a call takes the host
ROUNDS = 21


class Progress:
    """What a case reports to, and asks for the time that is left."""

    def __init__(self, result: Result, path: Path, seconds: float, figures: bool):
        self.result, self._path, self._figures = result, path, figures
        self._end = time.monotonic() + seconds

    def save(self, part: str = "", figures: str = "") -> None:
        """Write what there is so far and say how far that is."""
        if not self._figures:  # what was timed on a CPU, or tiny, is no figure
            self.result.metrics.clear()
            self.result.ratios.clear()
        self.result.write(self._path)
        if part:
            print(f"{part}: {figures}" if figures and self._figures else part, flush=True)

    def left(self, part: str) -> bool:
        """Whether there is time for a part; noted when not."""
        if time.monotonic() < self._end:
            return True
        self.result.notes.append(f"out of time before: {part}")
        return False


# ---- timing: functions in turn, the L2 emptied before each, events round it ----


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Replay:
    """A CUDA graph of one call, on a stream. It keeps what the call reads: the graph has addresses.

    Raises RuntimeError where the call does what cannot be captured."""

    def __init__(self, function: Callable[[], object], stream: torch.cuda.Stream):
        self._function = function
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._kept = function()

    def __call__(self) -> None:
        self._graph.replay()


class Timer:
    """Times functions on a stream of its own, which is not the legacy one: some calls refuse that.

    Between two samples a large buffer is read, so that the L2 holds clean lines of it only; while
    the GPU reads it, the host asks for what comes next, and so what the host takes for one call
    hides behind it, as it does in a decode step that has been captured. Where a call takes the
    host longer than that (a loop over thousands of copies), the device waits for the host, and the
    sample has it; captured() leaves the host out. On a CPU the same functions run, to see that they
    do: what comes out of that is no figure.
    """

    def __init__(self, device: torch.device, rounds: int = ROUNDS, warm: int = 3):
        self.device, self.rounds = device, rounds
        self.warm = warm if device.type == "cuda" else 0
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        words = FLUSH_BYTES // 4 if self.stream else 1
        self._flush = torch.ones(words, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)
        self.uncaptured: set[str] = set()
        self.wait()

    def here(self) -> AbstractContextManager[object]:
        """The stream that samples run on, as the current one."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def wait(self) -> None:
        if self.stream:
            torch.cuda.synchronize(self.device)

    def __call__(self, functions: Mapping[str, Callable[[], object]]) -> Samples:
        """Seconds on the device, `rounds` samples of each after `warm` unmeasured rounds; they take
        turns in a round."""
        calls = {name: partial(self.sample, function) for name, function in functions.items()}
        self.wait()  # what was prepared may be on another stream
        with self.here():
            return interleave_reported(calls, self.rounds, self.warm)

    def captured(
        self, functions: Mapping[str, Callable[[], object]]
    ) -> dict[str, Callable[[], object]]:
        """Each as the replay of a CUDA graph of one call, which takes the host next to nothing. One
        that cannot be captured stays a call, and `uncaptured` has its name. On a CPU all do."""
        found: dict[str, Callable[[], object]] = dict(functions)
        if self.stream is None:
            return found
        for name, function in functions.items():
            self.wait()
            with self.here():
                function()  # compiles, and brings tables to the device
            self.wait()
            try:
                found[name] = Replay(function, self.stream)
            except RuntimeError:
                self.wait()
                self.uncaptured.add(name)
        return found

    def sample(self, function: Callable[[], object]) -> float:
        if self.stream is None:
            return seconds_of(function)
        first, last = new_event(), new_event()
        torch.sum(self._flush, 0, out=self._sum)
        first.record()
        function()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def whole(self, function: Callable[[], object]) -> list[float]:
        """Seconds from the call until the device is idle again, as the host's clock tells them."""

        def until_idle() -> None:
            function()
            self.wait()

        def sample() -> float:
            self._flush.sum()
            self.wait()
            return seconds_of(until_idle)

        self.wait()
        with self.here():
            return interleave_reported({"": sample}, self.rounds, self.warm)[""]


# ---- one case ----


CASES = ("gather", "attend", "decode", "blocks")
"""Modules of this folder, with run(progress, device, size), Size and TINY."""


def run(name: str, folder: Path, device: torch.device, seconds: float, tiny: bool) -> Result:
    """Run a case into folder/name.json. On a CPU it is tiny."""
    figures = device.type == "cuda" and not tiny
    result = Result(f"gpu {name}")
    if not figures:
        result.notes.append(NO_FIGURES if device.type != "cuda" else "tiny: no figures")
    progress = Progress(result, folder / f"{name}.json", seconds, figures)
    try:
        case = import_module(f".{name}", __package__)
        size = case.TINY if tiny or device.type != "cuda" else case.Size()
        case.run(progress, device, size)
    finally:
        progress.save()  # what was found before an error stays
    return result


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One case of the GPU suite.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tiny", action="store_true", help="to see that it is right: no figures")
    given = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = run(given.case, given.folder, device, given.seconds, given.tiny)
    except UnsupportedError as error:
        print(f"{type(error).__name__}: {error}")
        return 77
    for check, held in result.checks.items():
        if not held:
            print(f"does not hold: {check}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
