"""Timing: functions measured in turn, so that noise hits all of them alike; and what samples tell:
where the median lies, and whether to trust it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

Samples = dict[str, list[float]]
Sample = TypeVar("Sample")
WARM_S = 0.05
SAMPLES_TO_JUDGE = 5  # with fewer, noise is not told from the thing itself
SPREAD_MAX = 0.1  # of the median: a wider interval of it is said
OUTLIER_DEVIATIONS = 5
CONFIDENCE, RESAMPLES = 0.95, 2000


def seconds_of(call: Callable[[], object]) -> float:
    """What one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


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


def interleave_reported(
    functions: Mapping[str, Callable[[], Sample]], rounds: int, warm: int = 1
) -> dict[str, list[Sample]]:
    """The same of functions that return what they measured: they loop in C and look at its clock,
    or are programs of their own. warm: unmeasured rounds."""
    samples: dict[str, list[Sample]] = {name: [] for name in functions}
    for turn in range(-warm, rounds):
        for name, function in functions.items():
            sample = function()
            if turn >= 0:
                samples[name].append(sample)
    return samples


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies with CONFIDENCE, by order statistics: no shape is assumed.

    Fewer than six samples cannot give it: then it is the whole range.
    """
    ordered = sorted(samples)
    count, below, out = len(ordered), 0.0, 0
    # P(fewer than k of n samples lie below the median), k as large as the confidence lets it be.
    while out < count // 2:
        below += math.comb(count, out) / 2**count
        if below > (1 - CONFIDENCE) / 2:
            break
        out += 1
    first = max(out - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def change_interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """Interval of the new median over the old one, by the bootstrap; the same each time."""
    rng = np.random.default_rng(0)
    medians = [
        np.median(rng.choice(np.asarray(given, float), (RESAMPLES, len(given))), axis=1)
        for given in (old, new)
    ]
    low, high = np.quantile(medians[1] / medians[0], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def warnings_of(samples: Sequence[float]) -> list[str]:
    """What makes these samples doubtful, in the words that are shown: as hyperfine does."""
    found = []
    middle = statistics.median(samples)
    deviation = statistics.median(abs(sample - middle) for sample in samples)
    if len(samples) >= SAMPLES_TO_JUDGE and any(samples):
        low, high = median_interval(samples)
        if high - low > SPREAD_MAX * abs(middle):
            found.append(f"noisy: the median is only known within {low:.4g} to {high:.4g}")
        # 1.4826 median deviations are a standard deviation, where samples are spread normally.
        far = 1.4826 * OUTLIER_DEVIATIONS * max(deviation, 0.005 * abs(middle))
        outliers = sum(abs(sample - middle) > far for sample in samples)
        if abs(samples[0] - middle) > far and outliers == 1:
            found.append("the first sample is an outlier: was something not warm?")
        elif outliers > len(samples) / 10:
            found.append(f"{outliers} of {len(samples)} samples are outliers: is it quiet here?")
    return found
