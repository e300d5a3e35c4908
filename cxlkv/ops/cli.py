"""The command line: one entry, and a module of this folder for each group of commands.

Nothing heavy (torch, the benchmarks) is imported before a command needs it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from cxlkv.errors import CXLKVError
from cxlkv.ops.advise import advise
from cxlkv.ops.bench import bench_app
from cxlkv.ops.demo import demo
from cxlkv.ops.doctor import doctor
from cxlkv.ops.info import info
from cxlkv.ops.lab import lab
from cxlkv.ops.pool import pool_app
from cxlkv.ops.services import metrics, ndp_worker, serve_pool
from cxlkv.ops.size import size
from cxlkv.ops.tune import tune
from cxlkv.refusals import refused_words

# By what somebody wants; `cxlkv --help` has them in this order.
START, RUN, MEASURE, SERVE = "Start here", "Run a pool", "Measure", "Serve"
ORDER = (
    *("demo", "info", "doctor", "size", "pool", "advise", "tune", "bench", "lab"),
    *("serve", "metrics", "ndp-worker"),
)


# Said when something is missing in such a command.
EXAMPLES = {
    "cxlkv size": "cxlkv size smollm2 --tokens 32K",
    "cxlkv pool create": "cxlkv pool create /dev/shm/my.pool --model smollm2 --capacity 1GiB",
    "cxlkv serve": "cxlkv serve /dev/shm/my.pool --listen 10.0.0.1:7777 --secret FILE",
}


class InOrder(TyperGroup):
    """Lists the commands as they are met, not groups behind all others."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    cls=InOrder,
    help="A KV-cache pool in CXL and other tiered memory, with scoring near the data.",
    epilog="Each command and each group has a --help. `--install-completion` lets the shell "
    "complete commands and options (bash, zsh, fish) from its next start on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(pool_app, name="pool", rich_help_panel=RUN)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
app.command(rich_help_panel=START)(demo)
app.command(rich_help_panel=START)(info)
app.command(rich_help_panel=START)(doctor)
app.command(rich_help_panel=START)(size)
app.command(rich_help_panel=MEASURE)(advise)
app.command(rich_help_panel=MEASURE)(tune)
app.command(rich_help_panel=MEASURE)(lab)
app.command("serve", rich_help_panel=SERVE)(serve_pool)
app.command(rich_help_panel=SERVE)(metrics)
app.command("ndp-worker", rich_help_panel=SERVE)(ndp_worker)


def told_version(asked: bool) -> None:
    if asked:
        typer.echo(f"cxlkv {version('cxlkv')}")
        raise typer.Exit


@app.callback()
def options(
    asked: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and end.", callback=told_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of no command."""


def fill_paragraphs(of: typer.Typer) -> None:
    """Docstrings have lines of 100 columns; in a help each paragraph fills the terminal's own."""
    for each in of.registered_commands:
        text = inspect.getdoc(each.callback) or ""
        each.help = "\n\n".join(" ".join(part.split("\n")) for part in text.split("\n\n"))


for each_app in (app, pool_app, bench_app):
    fill_paragraphs(each_app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; an expected failure is one red line and exit code 1, no traceback. A command
    line that does not parse is three or four lines and exit code 2.

    Expected are our own errors and the operating system's: no such file, no permission. Lines are
    never broken: what they name is copied by people.
    """
    words = sys.argv[1:] if arguments is None else arguments
    given = spelled_out(words)
    if refused := refused_words(words) or refused_words(given):
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {refused}", style="red"))
        raise SystemExit(2)
    try:
        code = app(args=given, prog_name="cxlkv", standalone_mode=False)
    except (CXLKVError, OSError) as error:
        line = Text(f"error: {error}", style="red")
        Console(stderr=True, soft_wrap=True).print(line)
        raise SystemExit(1) from error
    except typer.Abort as error:
        typer.echo("Nothing was done.", err=True)
        raise SystemExit(1) from error
    except Exception as error:
        if not isinstance(error, typer.BadParameter.__mro__[1]):  # UsageError, of typer or click
            raise
        usage = cast("typer.BadParameter", error)
        usage.show()
        example = EXAMPLES.get(usage.ctx.command_path if usage.ctx else "")
        if example and type(error).__name__ == "MissingParameter":
            typer.echo(f"For example: {example}", err=True)
        raise SystemExit(2) from error
    raise SystemExit(code if isinstance(code, int) else 0)


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """`bench CASE` is short for `bench run CASE`, and `bench` for all of its cases."""
    commands = {*(command.name for command in bench_app.registered_commands), "--help"}
    if [*arguments] == ["bench"]:
        return ["bench", "run"]
    if len(arguments) > 1 and arguments[0] == "bench" and arguments[1] not in commands:
        return ["bench", "run", *arguments[1:]]
    return list(arguments)


if __name__ == "__main__":
    main()
