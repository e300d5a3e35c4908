"""`cxlkv bench` runs the benchmarks, and compares and shows what they found."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cxlkv.ops.console import AsJson, JsonFile, needing, print_json

bench_app = typer.Typer(
    help="Run microbenchmarks, or the litmus tests of memory that hosts share; compare and show "
    "what they found. `bench CASE` is short for `bench run CASE`.",
    no_args_is_help=True,
)

Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes and few rounds; all: within a minute.")
]
Regions = Annotated[
    list[str] | None,
    typer.Option(
        help="litmus: a dax device without a pool, or a scratch file. Overwritten. memory: "
        "whose memory is measured: anonymous:, numa:N, dax:DEVICE or a file that is "
        "made and removed."
    ),
]
# Of `bench litmus`.
LitmusRole = Annotated[
    str | None,
    typer.Option(help="litmus: a on one host, b on the other; both on this one if not given."),
]
LitmusRounds = Annotated[
    int | None,
    typer.Option(help="litmus: rounds of each test.", min=1, show_default="50000"),
]
Certificate = Annotated[Path | None, typer.Option(help="litmus: where the certificate goes.")]
# Of `bench replay`.
Trace = Annotated[
    str | None,
    typer.Option(help="replay: a file in Mooncake's format, or agents, loops, scans, zipf."),
]


@bench_app.command("run")
def bench(
    case: Annotated[
        str | None, typer.Argument(help="Which one; without it, a list of those there are.")
    ] = None,
    json: JsonFile = None,
    quick: Quick = False,
    region: Regions = None,
    role: LitmusRole = None,
    rounds: LitmusRounds = None,
    certificate: Certificate = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="recall: also of the causal language model in this folder. vllm: smollm2, a "
            "trained model instead of random weights."
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="recall: what --model reads; Python's library if not given.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="decode/..., link, ndp, recall, replay: draw the figures into this file."
        ),
    ] = None,
    trace: Trace = None,
) -> None:
    """Run one microbenchmark on this machine, all of them, or the litmus tests.

    Exit code 1 if a check does not hold: no speeds are then reported.
    decode, ndp and recall take ten minutes or so, and need torch and transformers. replay judges
    eviction policies by a trace. store compares ours with those of other projects that `make
    peers` has installed in build/peers. llama puts the pool's attention beside
    llama.cpp's decode steps, if `make build/peers/llama` has installed it. vllm puts the engine
    with and without us side by side, in the environment that `make test-vllm` makes.
    """
    if case is None:
        list_cases(json)
        return
    given = {**locals(), "region": tuple(region or ())}  # by the names of Options
    with needing("demo", f"bench {given.pop('case')}"):
        from cxlkv.bench.cli import run
        from cxlkv.bench.registry import Options

        run(case, Options(**given))


def list_cases(json_file: Path | None) -> None:
    """Say which cases there are, what each measures, and about how long it takes."""
    from cxlkv.bench.registry import lines_of_cases, list_of_cases
    from cxlkv.machine.state import write_whole

    if json_file is not None:
        write_whole(json_file, dumps({"cases": list_of_cases()}, indent=2) + "\n")
        return
    console = Console()
    for line in lines_of_cases(console.width):
        console.print(Text(line), soft_wrap=True)


@bench_app.command("compare")
def bench_compare(
    old: Annotated[Path, typer.Argument(help="Result file (--json) of the run before.")],
    new: Annotated[Path, typer.Argument(help="Result file of the same case now.")],
    as_json: AsJson = False,
) -> None:
    """Say what changed between two runs, and whether that is sure.

    Exit code 3 if a figure surely got worse by more than 10 %, 1 if the two cannot be
    compared: another case, another emulation, a failed check, a damaged file.
    """
    from cxlkv.bench.cli import run_compare
    from cxlkv.bench.compare import WORSE_EXIT

    if not run_compare(old, new, print_json if as_json else None):
        raise typer.Exit(WORSE_EXIT)


@bench_app.command("report")
def bench_report(
    runs: Annotated[list[Path], typer.Argument(help="Result files (--json) of runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")],
) -> None:
    """Write one HTML page about runs, with pictures, that needs nothing but itself."""
    with needing("report", "bench report"):
        from cxlkv.bench import page
    page.write(runs, out)
    Console(soft_wrap=True).print(Text(f"written: {out}"))
