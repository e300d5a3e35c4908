"""Whether bandwidth and latency agree with other programs: mbw, perf bench, a C loop of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cxlkv.arrays import Bytes
from cxlkv.bench import loops, streams
from cxlkv.bench.loops import Stream
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.result import Result
from cxlkv.errors import UnsupportedError

LOOP = Path(__file__).resolve().parent / "agree.c"
AGREE_WITHIN = 0.15


@dataclass(frozen=True)
class Size:
    """Twice as much memory is copied through, read and chased through as a copy is long."""

    copy_bytes: int = 128 << 20
    sample_s: float = 0.1
    rounds: int = 20


QUICK = Size(copy_bytes=64 << 20, sample_s=0.05, rounds=5)

Tool = Callable[[], dict[str, float]]


def run(result: Result, size: Size = Size()) -> None:
    """Ours and theirs take turns on one CPU; ratios NAME_to_TOOL are of the medians.

    Raises UnsupportedError where none of the other programs is to be had.
    """
    allowed = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        tools = found_tools(size, Path(folder), result.notes)
        if not tools:
            raise UnsupportedError("agree compares with mbw, perf or a C loop: apt install mbw gcc")
        cpu = min(allowed)
        os.sched_setaffinity(0, {cpu})  # programs that are started inherit it
        try:
            with loops.memory_taken(2 * size.copy_bytes) as data:
                streams.number(data)
                tools = {"ours": _ours(result, data, cpu, size), **tools}
                found = interleave_reported(tools, size.rounds)
        finally:
            os.sched_setaffinity(0, allowed)
    for tool, samples in found.items():
        for what in samples[0]:
            unit = "ns" if what == "latency" else "GB/s"
            result.measure(f"{what}_{tool}", [sample[what] for sample in samples], unit)
    for name in [name for name in result.metrics if not name.endswith("_ours")]:
        what, _, tool = name.partition("_")
        ours = result.metrics[f"{what}_ours"].median
        ratio = result.ratios[f"{what}_to_{tool}"] = ours / result.metrics[name].median
        agrees = result.checks[f"{what}_agrees_with_{tool}"] = abs(ratio - 1) <= AGREE_WITHIN
        result.notes.append(
            f"{what}: ours is {ratio:.3f} of {tool}'s, medians of {size.rounds} alternations: "
            + ("agrees within 15 %" if agrees else "DISAGREES by more than 15 %")
        )


def _ours(result: Result, data: Bytes, cpu: int, size: Size) -> Tool:
    """The same loops as in the case memory; a copy is one call of memcpy."""
    copy = Stream("copy", data, cpu, block_bytes=size.copy_bytes)
    read = Stream("read", data, cpu)

    def measure() -> dict[str, float]:
        (copied,) = loops.memory_run([copy], size.sample_s)
        result.checks["copy_right"] = streams.contents_are_right(copy, copied)
        streams.number(data)
        (did,) = loops.memory_run([read], size.sample_s)
        result.checks["read_right"] = streams.sum_is_right(read, did, 0)
        # The ring is made in what was read: it has the same pages.
        loops.memory_ring(data, seed=1)
        chase = Stream("chase", data, cpu)
        (chased,) = loops.memory_run([chase], size.sample_s)
        result.checks["latency_right"] = streams.sum_is_right(chase, chased, 0)
        return {
            "copy": streams.speed([copied]),
            "read": streams.speed([did]),
            "latency": chased.seconds / chased.steps * 1e9,
        }

    return measure


def found_tools(size: Size, folder: Path, notes: list[str]) -> dict[str, Tool]:
    """Those that are here and work; the notes say which are not, and why."""
    mib = size.copy_bytes >> 20
    mbw = ["mbw", "-q", "-t0", "-n", "5", str(mib)]
    perf = ["perf", "bench", "mem", "memcpy", "-f", "default", "-s", f"{mib}MB", "-l", "5"]
    tools: dict[str, Tool] = {
        "mbw": lambda: {"copy": _gb_per_s(mbw, r"AVG.*Copy: ([\d.]+) (M)iB/s")},
        "perf": lambda: {"copy": _gb_per_s(perf, r"([\d.]+) ([MG])B/sec")},
    }
    program = folder / "agree"
    compiler = shutil.which("cc") or "cc"
    # Its fastest form: as STREAM is compiled.
    build = [compiler, "-O3", "-march=native", "-funroll-loops", "-o", str(program), str(LOOP)]

    def loop() -> dict[str, float]:
        if not program.exists():
            _output(build)
        text = _output([str(program), str(2 * size.copy_bytes)])
        try:
            read, latency = (float(word) for word in text.split())
        except ValueError as error:
            raise UnsupportedError(f"agree.c printed {text!r}") from error
        return {"read": read, "latency": latency}

    works: dict[str, Tool] = {}
    for name, tool in {"loop": loop, **tools}.items():
        try:
            tool()
        except UnsupportedError as error:
            notes.append(f"{name}: not measured, {error}")
        else:
            works[name] = tool
    return works


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise UnsupportedError(f"{command[0]} is not installed") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise UnsupportedError(f"{command[0]} does not work here: {error}") from error
    return done.stdout


def _gb_per_s(command: list[str], pattern: str) -> float:
    """What is printed is of 2**30 or 2**20 bytes."""
    text = _output(command)
    found = re.search(pattern, text)
    if found is None or float(found[1]) <= 0:
        raise UnsupportedError(f"{command[0]} printed something else than a figure: {text[-99:]!r}")
    return float(found[1]) * {"M": 2**20, "G": 2**30}[found[2]] / 1e9
