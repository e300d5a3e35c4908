"""What the commands share: options that several of them have, and how they print."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cxlkv.errors import UnsupportedError
from cxlkv.layout import format_bytes

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result file here.")]


LayoutText = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="Instead: keys of a layout, {layers: 32, kv_heads: 8, head_dim: 128} or "
        "{object_bytes: 2MiB}, or a pool's YAML file.",
    ),
]


def finite(value: float | None) -> float | None:
    """For an option's callback: its bounds let NaN pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to go by")
    return value


CPU_TORCH = """
Without a GPU, install torch's CPU build first; pip's own choice brings CUDA, several GB:
  pip install torch --index-url https://download.pytorch.org/whl/cpu"""


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Turns the import of a package that is not installed into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        command = f"pip install 'cxlkv[{extra}]'"
        if error.name == "torch":
            command += CPU_TORCH
        raise UnsupportedError(f"{what} needs {error.name}: {command}") from error


@contextmanager
def step(text: str) -> Iterator[None]:
    """Says on stderr what takes its time: a moving line on a terminal, else a line that stays."""
    console = Console(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with console.status(f"{text} ..."):
            yield
        return
    typer.echo(f"{text} ...", err=True)
    yield


def print_json(value: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
    """To stdout, without colours or wrapping, for other programs to read."""
    typer.echo(json.dumps(value, indent=2, default=str))


def pairs(title: str, rows: Mapping[str, object]) -> Iterator[str]:
    """Lines of names and values; what is counted in bytes is shown as a size. Values are never cut:
    print them with soft_wrap."""
    yield title
    width = max((len(name) for name in rows), default=0)
    for name, value in rows.items():
        shown = format_bytes(value) if name.endswith("bytes") and isinstance(value, int) else value
        if isinstance(shown, Mapping):
            shown = ", ".join(f"{key} {part}" for key, part in shown.items() if part not in ([], 0))
        yield f"  {name.ljust(width)}  {shown}".rstrip()


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table. The last column is never cut, however narrow the terminal is: print them
    with soft_wrap. A column whose cells begin with digits stands at the right."""
    for_each = range(len(head))
    widths = [max(len(row[index]) for row in (head, *rows)) for index in for_each]
    right = [
        all(row[index].lstrip("<")[:1].isdigit() for row in rows if row[index])
        for index in for_each
    ]
    for row in (head, *rows):
        cells = zip(row, widths, right, strict=True)
        padded = [
            cell.rjust(width) if digits else cell.ljust(width) for cell, width, digits in cells
        ]
        yield "  ".join(padded).rstrip()
