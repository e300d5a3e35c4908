"""The command line: one entry, and a module of this folder for each group of commands.

Nothing heavy (torch, the benchmarks) is imported before a command needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.text import Text

from cxlkv.errors import CXLKVError
from cxlkv.ops.advise import advise
from cxlkv.ops.bench import bench_app
from cxlkv.ops.demo import demo
from cxlkv.ops.doctor import doctor
from cxlkv.ops.info import info
from cxlkv.ops.lab import lab_app
from cxlkv.ops.pool import pool_app
from cxlkv.ops.services import metrics, ndp_worker, serve_pool
from cxlkv.ops.size import size
from cxlkv.ops.tune import tune

app = typer.Typer(
    help="A KV-cache pool in CXL and other tiered memory, with scoring near the data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(pool_app, name="pool")
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")
for command in (info, doctor, size, advise, demo, tune, metrics):
    app.command()(command)
app.command("ndp-worker")(ndp_worker)
app.command("serve")(serve_pool)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; an expected failure is one red line and exit code 1, no traceback.

    Expected are our own errors and the operating system's: no such file, no permission.
    """
    try:
        app(args=spelled_out(sys.argv[1:] if arguments is None else arguments))
    except (CXLKVError, OSError) as error:
        line = Text(f"error: {error}", style="red")
        Console(stderr=True, soft_wrap=True).print(line)
        raise SystemExit(1) from error


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """`bench CASE` is short for `bench run CASE`."""
    commands = {*(command.name for command in bench_app.registered_commands), "--help"}
    if len(arguments) > 1 and arguments[0] == "bench" and arguments[1] not in commands:
        return ["bench", "run", *arguments[1:]]
    return list(arguments)


if __name__ == "__main__":
    main()
