"""The emulated link: what a pool's operations take through it beside what the profile says, and a
picture of loaded latency on top of the published points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from cxlkv.bench.measure import interleave, seconds_of
from cxlkv.bench.result import Result
from cxlkv.emulation.link import Link, emulate, link_of
from cxlkv.emulation.profiles import OURS, Profile, read
from cxlkv.emulation.sharing import Stream, simulate
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool

HOST_SHARE = 0.5
"""Share of the device's time: the host must take less, else its own time is measured."""
LATE_MOST = 0.25
"""Share of the calls: a neighbour's noise makes some late, and leaves the median as it is."""
LATENCY_SLOW = 1024.0
"""At least, for latency: what the clock and waking up cost, some 10 us, must be small beside it."""


@dataclass(frozen=True)
class Size:
    """32 MiB of K and V; a call fetches and attends all of it, an append writes it anew."""

    profile: str = "astera-a1000"
    tokens: int = 8192
    rounds: int = 11
    latency_calls: int = 20


def run(result: Result, size: Size = Size()) -> None:
    """fetch, attend, append in GB/s and the latency of a fetch of one page in us, by the clock.

    The profile is slowed by the power of two at which this host takes less than half of its time,
    which is in the notes. Ratios *_to_profile are measured over what the slowed profile says.
    """
    layout = KVLayout(layers=1, kv_heads=8, head_dim=128, dtype="float16")
    capacity = 4 * layout.token_bytes * size.tokens + (64 << 20)
    shape = (size.tokens, 8, 128)
    k = np.random.default_rng(1).standard_normal(shape, np.float32).astype(np.float16)
    q = np.random.default_rng(2).standard_normal((8, 128), np.float32)
    with CXLPool.create(
        "anonymous:", layout=layout, capacity=capacity, checksum=False, sketch=False
    ) as pool:
        sequence, one = pool.sequence(), pool.sequence()
        sequence.append(0, k, k)
        one.append(0, k[: layout.page_tokens], k[: layout.page_tokens])
        out = sequence.fetch(0)

        def append() -> None:
            sequence.truncate(0)
            sequence.append(0, k, k)

        calls: dict[str, Callable[[], object]] = {
            "fetch": lambda: sequence.fetch(0, out=out),
            "attend": lambda: sequence.attend(0, q),
            "append": append,
        }
        link = _slowed(pool, size, calls)
        with emulate(pool, link):
            _bandwidth(result, link, calls, size)
        small: dict[str, Callable[[], object]] = {"fetch": lambda: one.fetch(0)}
        link = _slowed(pool, size, small, LATENCY_SLOW)
        with emulate(pool, link):
            _latency(result, link, small["fetch"], size)
    _virtual(result)


def _slowed(
    pool: CXLPool, size: Size, calls: dict[str, Callable[[], object]], slow: float = 1.0
) -> Link:
    """A link slow enough for this host in each of the calls, by their medians."""
    times = interleave(calls, size.rounds)
    with emulate(pool, size.profile, mode="virtual") as counted:
        for name, call in calls.items():
            before = counted.seconds
            call()
            host_s, device_s = median(times[name]), counted.seconds - before
            while host_s > HOST_SHARE * device_s * slow:
                slow *= 2
    return link_of(size.profile, "wait", slow=slow)


def _bandwidth(
    result: Result, link: Link, calls: dict[str, Callable[[], object]], size: Size
) -> None:
    result.notes.append(f"link: bandwidth by {link.label}")
    moved = {name: _moved(link, name, call) for name, call in calls.items()}
    late = link.late_operations
    for name, speed in result.speeds(interleave(calls, size.rounds), moved).items():
        expected = moved[name] / link.alone_s(moved[name], write=name == "append") / 1e9
        result.ratio(f"{name}_to_profile", speed / expected, link.label)
    most = LATE_MOST * (size.rounds + 1) * len(calls)
    result.checks["host_faster_in_bulk"] = link.late_operations - late <= most


def _moved(link: Link, name: str, call: Callable[[], object]) -> int:
    """Bytes that a call is charged."""
    before = link.bytes[name]
    call()
    return link.bytes[name] - before


def _latency(result: Result, link: Link, call: Callable[[], object], size: Size) -> None:
    """Seconds to fetch one page, less what its bytes take at the link's bandwidth."""
    result.notes.append(f"link: latency by {link.label}")
    moved = _moved(link, "fetch", call)
    late = link.late_operations
    found = []
    for _ in range(size.latency_calls):
        bytes_s = moved / (1e9 * link.profile.gb_per_s(0))
        found.append(1e6 * (seconds_of(call) - bytes_s))
    metric = result.measure("latency", found, "us")
    ratio = metric.median * 1e3 / link.profile.latency_ns
    result.ratio("latency_to_profile", ratio, link.label)
    most = LATE_MOST * size.latency_calls
    result.checks["host_faster_in_latency"] = link.late_operations - late <= most


def _virtual(result: Result) -> None:
    """Every published point comes out on the virtual clock."""
    worst = 0.0
    for profile in read(OURS).values():
        found = loaded(profile, [load for load, _ in profile.loaded])
        for (_, latency), got in zip(profile.loaded, found, strict=True):
            worst = max(worst, abs(got / latency - 1))
    result.checks["virtual_exact"] = worst < 1e-9


def loaded(profile: Profile, loads: list[float]) -> list[float]:
    """ns of a line while another stream moves so much, on the virtual clock."""
    found = []
    for load in loads:
        background = Stream(10**9, at_most_gb_per_s=load)
        _, probe = simulate(profile, [background, Stream(64, begins_s=1e-4)], devices=64)
        found.append(1e9 * probe.latency_s[0])
    return found


def draw(result: Result, path: Path) -> None:
    """The curves that the model gives, on top of the published points."""
    from cxlkv.bench.style import BLUE, GREEN, GREY, INK, ORANGE, canvas, plain

    figure, (axes,) = canvas(7.2, 4.6)
    drawn = [(name, p) for name, p in read(OURS).items() if p.loaded]
    for (name, profile), color in zip(drawn, (BLUE, GREY, ORANGE, GREEN, INK), strict=False):
        loads = [profile.read_gb_per_s * step / 120 for step in range(1, 121)]
        axes.plot(loads, loaded(profile, loads), color=color, linewidth=1.2, label=name)
        x, y = zip((0.0, profile.latency_ns), *profile.loaded, strict=True)
        axes.plot(x, y, "o", color=color, markersize=5)
    axes.plot([], [], "o", color=INK, label="published points")
    axes.set_title("latency of a line under load: the link on its virtual clock", color=INK)
    axes.set_yscale("log")
    axes.set_yticks([100, 200, 500, 1000, 2000], ["100", "200", "500", "1000", "2000"])
    plain(axes, "GB/s that others move", "ns")
    axes.legend(frameon=False, loc="upper right", fontsize=8, labelcolor=INK)
    figure.savefig(path, dpi=150)
