"""Timing: functions measured in turn, so that noise hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Samples = dict[str, list[float]]
WARM_S = 0.05


def interleave(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    repeat: int = 1,
    settle_s: float = 0.0,
) -> Samples:
    """Seconds a call by name, `rounds` samples each, after one unmeasured round.

    One sample is the mean of `repeat` calls; the functions take turns within a round. settle_s is
    waited before each: an OpenMP team spins on its cores for a while after its last task. Then
    WARM_S of calls go unmeasured: threads that sleep, and the virtual CPUs under them, take
    milliseconds to wake, and in use calls follow one another.
    """
    samples: Samples = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            if settle_s:
                time.sleep(settle_s)
                began = time.perf_counter()
                while time.perf_counter() - began < WARM_S:
                    function()
            began = time.perf_counter()
            for _ in range(repeat):
                function()
            if turn:
                samples[name].append((time.perf_counter() - began) / repeat)
    return samples


def interleave_reported(functions: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """The same of functions that return their seconds: they loop in C and look at its clock."""
    samples: Samples = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            seconds = function()
            if turn:
                samples[name].append(seconds)
    return samples
