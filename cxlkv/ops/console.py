"""What the commands share: options that several of them have, and how they print."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cxlkv.errors import UnsupportedError
from cxlkv.layout import format_bytes

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result file here.")]


HostNumber = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="<int>|auto",
        help="Which host this is, in a shared pool (default: CXLKV_HOST).",
    ),
]


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Turns the import of a package that is not installed into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{what} needs {error.name}: install it with pip install 'cxlkv[{extra}]'"
        ) from error


def print_json(value: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
    """To stdout, without colours or wrapping, for other programs to read."""
    typer.echo(json.dumps(value, indent=2, default=str))


def table(title: str, rows: Mapping[str, object]) -> Table:
    """Two columns: name and value; whatever is counted in bytes is shown as a size."""
    result = Table(title=Text(title), show_header=False)
    for name, value in rows.items():
        shown = format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else value
        result.add_row(Text(name), Text(str(shown)))
    return result
