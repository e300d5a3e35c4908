"""`cxlkv bench store`: the store door, and a pool's pages, beside memcpy and other stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Table

from cxlkv.bench.peers import running
from cxlkv.bench.peers.running import ENVIRONMENTS, Row, SideBySide
from cxlkv.bench.peers.talking import Program
from cxlkv.bench.registry import Options, Say, Shown

PEERS = ("mooncake", "lmcache")
NAMES = ("objects", "ours", "plain", *PEERS)
FORMS = ("no_crc", "crc")
"""Our forms that have ratios; the bounds are the first one's."""
BESIDE = {
    "memcpy": ("plain", "memcpy"),
    "mooncake": ("mooncake", "batch"),
    "dax_backend": ("lmcache", "backend"),
}
"""What ratios are to: (peer, form)."""
BOUNDS = {"memcpy": 0.9, "mooncake": 1.5, "dax_backend": 3.0}
"""Least ratios of put and get."""


@dataclass(frozen=True)
class Size(running.Size):
    cases: tuple[str, ...] = ("first", "put", "get", "ranges", "lease")
    threads: tuple[int, ...] = tuple(dict.fromkeys((1, len(os.sched_getaffinity(0)))))
    bounds: Mapping[str, float] = field(default_factory=lambda: BOUNDS)


QUICK = Size(object_bytes=(64 << 10, 256 << 10), total_bytes=32 << 20, rounds=2, bounds={})


def command(
    options: Options, say: Say, environments: Path = ENVIRONMENTS, size: Size | None = None
) -> Shown:
    """Runs those that have environments."""
    result = SideBySide("store")
    programs = running.programs_of(result, environments, NAMES)
    run(result, programs, size or (QUICK if options.quick else Size()), say)
    return Shown(result, [table(result)], result.who())


def run(
    result: SideBySide,
    programs: Sequence[Program],
    size: Size,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """What running.measure() does, ratios of ours to BESIDE, and which bounds are kept."""
    running.measure(result, programs, size, progress)
    for row in [row for row in result.rows if row.peer == "objects" and row.form in FORMS]:
        for name, (peer, form) in BESIDE.items():
            other = row_of(result, row, peer, form)
            if row.case == "lease" or other is None:
                continue
            ratio = result.ratios[f"{row.metric}_to_{name}"] = row.median / other.median
            if row.form == FORMS[0] and row.case in ("put", "get") and name in size.bounds:
                least = size.bounds[name]
                kept = f"at least {least:g} wanted: {'kept' if ratio >= least else 'NOT kept'}"
                result.notes.append(f"{row.metric}_to_{name}: {ratio:.2f}, {kept}")


def row_of(result: SideBySide, beside: Row, peer: str, form: str) -> Row | None:
    """Row of the same case, object size and threads; None: the peer is missing, or cannot."""
    wanted = replace(beside, peer=peer, form=form).metric
    return next((row for row in result.rows if row.metric == wanted), None)


def table(result: SideBySide) -> Table:
    """Medians of our forms and of their peers'. Empty: the peer is missing, or cannot."""
    shown = {**{form: ("objects", form) for form in (*FORMS, "single")}, "pages": ("ours", "pages")}
    shown |= BESIDE
    made = Table(title="cxlkv bench store, GB/s; lease: us an object")
    for column in ("case", "object", "threads", *shown):
        made.add_column(column, no_wrap=True)
    for case, object_bytes, threads in sorted(result.groups()):
        found = {
            (row.peer, row.form): f"{row.median:.2f}"
            for row in result.rows
            if (row.case, row.object_bytes, row.threads) == (case, object_bytes, threads)
        }
        cells = [found.get(who, "") for who in shown.values()]
        made.add_row(case, f"{object_bytes >> 10} KiB", str(threads), *cells)
    return made
