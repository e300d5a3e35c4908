"""`cxlkv bench peers`: runs the peers that have environments, prints the side-by-side table."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from cxlkv.bench.peers.running import ENVIRONMENTS, NAMES, SideBySide, Size, programs_of, run
from cxlkv.bench.registry import Options, Say, Shown

SIZE = Size()


def command(
    options: Options, say: Say, environments: Path = ENVIRONMENTS, size: Size = SIZE
) -> Shown:
    """Runs those that have environments."""
    result = SideBySide("peers")
    run(result, programs_of(result, environments), size, progress=say)
    return Shown(result, [table(result)], result.who())


def table(result: SideBySide) -> Table:
    """GB/s, medians; of each peer the fastest form, by name. Empty: it does not offer this."""
    made = Table(title="cxlkv bench peers, GB/s", show_lines=True)
    names = [name for name in NAMES if any(row.peer == name for row in result.rows)]
    for column in ("case", "object", "threads", *names):
        made.add_column(column, no_wrap=True)
    for case, object_bytes, threads in sorted(result.groups()):
        best = result.fastest(case, object_bytes, threads)
        cells = [f"{best[n].median:.2f}\n{best[n].form}" if n in best else "" for n in names]
        made.add_row(case, f"{object_bytes >> 10} KiB", str(threads), *cells)
    return made
