"""Reads what Intel's Memory Latency Checker has printed, to put it beside our own figures.

Its tables, in any order and number: idle latency (a line, or a matrix of nodes), peak injection
bandwidths by read ratio, bandwidths between nodes, loaded latencies. What else it prints is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cxlkv.errors import BadArgumentError

FILE_BYTES_MAX = 4 << 20
NODES_MAX = 64
NUMBER = r"\d+(?:\.\d+)?"
IDLE = re.compile(rf"Each iteration took .*\(\s*({NUMBER})\s*(ns|us|ms)\s*\)")
PEAK = re.compile(rf"((?:ALL Reads|\d+:\d+ Reads-Writes|Stream-triad like)\s*):\s*({NUMBER})\s*$")
TRAFFIC = re.compile(r"Using (.*?)\s*traffic(?: type)?\s*(.*)$", re.IGNORECASE)
LOADED = re.compile(rf"\s*(\d+)\s+({NUMBER})\s+({NUMBER})\s*$")
TO_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6}

Matrix = dict[tuple[int, int], float]
"""By node of the CPUs and node of the memory."""
Points = list[tuple[float, float]]
"""Of a curve: GB/s and ns."""


@dataclass
class Mlc:
    """Latencies in ns, bandwidths in GB/s (1e9 bytes). curves: by kind of traffic, points of
    (bandwidth, latency), from little load to much."""

    name: str
    version: str = ""
    idle_ns: list[float] = field(default_factory=list)
    latency: Matrix = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    bandwidth: Matrix = field(default_factory=dict)
    curves: dict[str, Points] = field(default_factory=dict)

    def idle(self) -> float | None:
        """Of a node's CPUs and its own memory: the best of the matrix, or what stands alone."""
        own = [value for (near, node), value in self.latency.items() if near == node]
        found = own or self.idle_ns or list(self.latency.values())
        return min(found, default=None)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each of its numbers but those of curves, and what it is of."""
        for ns in self.idle_ns:
            yield "idle latency", f"{ns:.4g} ns"
        for what, cells, unit in (
            ("idle latency", self.latency, "ns"),
            ("read bandwidth", self.bandwidth, "GB/s"),
        ):
            for (near, node), value in cells.items():
                yield f"{what}, CPUs of node {near}, memory of {node}", f"{value:.4g} {unit}"
        for name, speed in self.peak.items():
            yield name, f"{speed:.4g} GB/s"


def read(path: Path) -> Mlc:
    """Raises BadArgumentError for a file without any of its tables."""
    try:
        data = path.read_bytes()[: FILE_BYTES_MAX + 1]
    except OSError as error:
        raise BadArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise BadArgumentError(f"{path}: more than {FILE_BYTES_MAX >> 20} MiB, no output of mlc")
    found = parse(data.decode(errors="replace"), path.name)
    if not (found.idle_ns or found.latency or found.peak or found.bandwidth or found.curves):
        raise BadArgumentError(
            f"{path}: no table of Intel MLC in it: the text that `mlc`, or mlc --loaded_latency, "
            "--latency_matrix and so on, prints is wanted"
        )
    return found


def parse(text: str, name: str) -> Mlc:
    found = Mlc(name)
    lines = text.splitlines()
    section = traffic = ""
    for index, line in enumerate(lines):
        if version := re.search(r"Memory Latency Checker.* - (v\S+)", line):
            found.version = version[1]
        elif line.lstrip().startswith("Measuring "):
            section, traffic = line.lower(), "reads only"
        elif idle := IDLE.search(line):
            found.idle_ns.append(float(idle[1]) * TO_NS[idle[2]])
        elif peak := PEAK.search(line):
            found.peak[peak[1].strip()] = float(peak[2]) / 1e3
        elif "loaded latenc" in section and (told := TRAFFIC.search(line)):
            traffic = _in_words(f"{told[1]} {told[2]}")
        elif "loaded latenc" in section and (point := LOADED.match(line)):
            points = found.curves.setdefault(traffic, [])
            points.append((float(point[3]) / 1e3, float(point[2])))
        elif line.split()[:2] == ["Numa", "node"] and len(line.split()) > 2:
            _matrix_into(found, section, line, lines[index + 1 :])
    for points in found.curves.values():
        points.reverse()  # it begins with the most
    return found


def _in_words(traffic: str) -> str:
    """Read-only, or a ratio, as our own curves are called."""
    ratio = re.search(r"(\d+):(\d+)", traffic)
    if ratio:
        return f"{ratio[1]}:{ratio[2]} reads and writes"
    return "reads only" if "read-only" in traffic.lower() else traffic.strip().lower()


def _matrix_into(found: Mlc, section: str, head: str, lines: Sequence[str]) -> None:
    if "idle latenc" in section or not section:
        found.latency.update(_matrix(head, lines, 1.0))
    elif "bandwidth" in section:
        found.bandwidth.update(_matrix(head, lines, 1e-3))


def _matrix(
    head: str, lines: Sequence[str], scale: float
) -> Iterator[tuple[tuple[int, int], float]]:
    """Rows below a head of nodes, until one is none; "-" where nothing was measured."""
    nodes = [int(word) for word in head.split()[2:] if word.isdigit()][:NODES_MAX]
    for line in lines[:NODES_MAX]:
        first, *words = line.split() or [""]
        if not first.isdigit() or len(words) != len(nodes):
            return
        for node, word in zip(nodes, words, strict=True):
            if re.fullmatch(NUMBER, word):
                yield (int(first), node), float(word) * scale
