"""`cxlkv bench peers`: runs the peers that have environments, prints the side-by-side table."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from cxlkv.bench.cli import check_files, finish, wide_console
from cxlkv.bench.peers.running import ENVIRONMENTS, NAMES, SideBySide, Size, programs_of, run

SIZE = Size()


def run_peers(
    json_path: Path | None, environments: Path = ENVIRONMENTS, size: Size = SIZE
) -> SideBySide:
    """Raises SystemExit when our own answers, or those of plain copies, were wrong."""
    check_files(json_path)
    console, result = wide_console(), SideBySide("peers")
    with console.status("peers ...") as status:
        run(result, programs_of(result, environments), size, progress=status.update)
    console.print(table(result))
    say_who(result, console)
    finish(result, console, json_path)
    return result


def say_who(result: SideBySide, console: Console) -> None:
    """Prints each measured peer's version, and why the others were not measured."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    console.print(f"versions: {versions}", soft_wrap=True, markup=False)
    for name, reason in result.missing.items():
        console.print(f"missing: {name}: {reason}", soft_wrap=True, markup=False)


def table(result: SideBySide) -> Table:
    """GB/s, medians; of each peer the fastest form, by name. Empty: it does not offer this."""
    made = Table(title="cxlkv bench peers, GB/s", show_lines=True)
    names = [name for name in NAMES if any(row.peer == name for row in result.rows)]
    for column in ("case", "object", "threads", *names):
        made.add_column(column, no_wrap=True)
    for case, object_bytes, threads in sorted(result.groups()):
        best = result.fastest(case, object_bytes, threads)
        cells = [f"{best[n].median:.2f}\n{best[n].form}" if n in best else "" for n in names]
        kind = f"{object_bytes >> 10} KiB" if object_bytes else "keys"
        made.add_row(case, kind, str(threads), *cells)
    return made
