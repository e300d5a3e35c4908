"""Says how far a long run is, and at its end whether all checks hold."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from cxlkv.bench.result import Result
from cxlkv.emulation.link import marked

SAY_S = 30
"""Without a terminal, progress is a line that often."""


def tell(console: Console, step: str) -> None:
    """A line on stderr for each step, where there is no terminal that shows a bar."""
    if not console.is_terminal:
        print(f"{step} ...", file=sys.stderr, flush=True)


class Steps:
    """Counts steps of a run, of which `total - todo` were done by an earlier one."""

    def __init__(self, progress: Progress, console: Console, total: int, todo: int) -> None:
        self.progress = progress
        self.console = console
        self.total = total
        self.done = self.first = total - todo
        self.began = self.said = time.monotonic()
        self.task = progress.add_task("", total=total, completed=self.done)
        self.what = ""

    def begin(self, what: str) -> None:
        self.what = what
        tell(self.console, what)
        self.progress.update(self.task, description=what)

    def skip(self, steps: int) -> None:
        """So many were done by somebody else."""
        self.done += steps
        self.first += steps
        self.progress.update(self.task, completed=self.done)

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        self.progress.update(self.task, completed=self.done)
        now = time.monotonic()
        if not self.console.is_terminal and now - self.said >= SAY_S:
            self.said = now
            left_s = (now - self.began) / (self.done - self.first) * (self.total - self.done)
            left = f"{left_s / 60:.0f} minutes" if left_s > 100 else f"{left_s:.0f} s"
            share = f"{100 * self.done / self.total:.0f} %"
            self.console.print(f"{self.what}: {share}, about {left} to go", highlight=False)


@contextmanager
def progress_of(console: Console, total: int, todo: int | None = None) -> Iterator[Steps]:
    """A block that takes `todo` of `total` steps, all if None."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
        TextColumn("to go:"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Steps(progress, console, total, total if todo is None else todo)


def finish(result: Result, console: Console, json_path: Path | None) -> bool:
    """Write the result file, print a line for each check, then the verdict, which is returned."""
    if told := result.late_text():
        result.notes.append(told)
        console.print(Text(marked(told, result.emulated)), soft_wrap=True)
    if json_path is not None:
        result.write(json_path)
        console.print(Text(f"Result file: {json_path}"), soft_wrap=True)
    for name, holds in result.checks.items():
        mark = Text("  yes  " if holds else "  NO   ", style="green" if holds else "bold red")
        console.print(mark + Text(name.replace("_", " "), style="default"))
    verdict = "PASS" if result.passed else "FAIL"
    console.print(Text(f"demo: {verdict}", style="bold green" if result.passed else "bold red"))
    return result.passed
