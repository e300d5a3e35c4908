"""Timing on a GPU: functions in turn, its L2 emptied before each, events round it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from cxlkv.bench.measure import Samples

FLUSH_BYTES = 512 << 20  # several times any L2; reading it takes longer than a call takes the host
ROUNDS = 21


@dataclass
class Timed:
    """Seconds by name: on the device, and what the host spent on the call itself."""

    device: Samples = field(default_factory=dict)
    host: Samples = field(default_factory=dict)


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Timer:
    """Times functions on a stream of its own, which is not the legacy one: some calls refuse that.

    Between two samples a large buffer is read, so that the L2 holds clean lines of it only; while
    the GPU reads it, the host asks for what comes next, and so what the host takes for one call
    hides behind it, as it does in a decode step that has been captured. Where a call takes the
    host longer than that (a loop over thousands of copies), the device waits for the host, and the
    sample has it. On a CPU the same functions run, to see that they do: what comes out of that is
    no figure.
    """

    def __init__(self, device: torch.device, rounds: int = ROUNDS, warm: int = 3):
        self.device, self.rounds = device, rounds
        self.warm = warm if device.type == "cuda" else 0
        self.stream = new_stream(device) if device.type == "cuda" else None
        words = FLUSH_BYTES // 4 if self.stream else 1
        self._flush = torch.ones(words, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)
        self.wait()

    def here(self) -> AbstractContextManager[object]:
        """The stream that samples run on, as the current one."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def wait(self) -> None:
        if self.stream:
            torch.cuda.synchronize(self.device)

    def __call__(
        self, functions: Mapping[str, Callable[[], object]], rounds: int | None = None
    ) -> Timed:
        """`rounds` samples of each after `warm` unmeasured rounds; they take turns in a round."""
        rounds = self.rounds if rounds is None else rounds
        timed = Timed({name: [] for name in functions}, {name: [] for name in functions})
        self.wait()  # what was prepared may be on another stream
        with self.here():
            for turn in range(-self.warm, rounds):
                for name, function in functions.items():
                    device_s, host_s = self._sample(function)
                    if turn >= 0:
                        timed.device[name].append(device_s)
                        timed.host[name].append(host_s)
        return timed

    def _sample(self, function: Callable[[], object]) -> tuple[float, float]:
        if self.stream is None:
            began = time.perf_counter()
            function()
            took = time.perf_counter() - began
            return took, took
        first, last = new_event(), new_event()
        torch.sum(self._flush, 0, out=self._sum)
        first.record()
        began = time.perf_counter()
        function()
        host_s = time.perf_counter() - began
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3, host_s

    def whole(self, function: Callable[[], object], rounds: int | None = None) -> list[float]:
        """Seconds from the call until the device is idle again, as the host's clock tells them."""
        samples = []
        self.wait()
        with self.here():
            for turn in range(-self.warm, self.rounds if rounds is None else rounds):
                self._flush.sum()
                self.wait()
                began = time.perf_counter()
                function()
                self.wait()
                if turn >= 0:
                    samples.append(time.perf_counter() - began)
        return samples
