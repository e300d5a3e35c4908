"""`cxlkv bench` runs the benchmarks, and compares and shows what they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cxlkv.errors import BadArgumentError
from cxlkv.ops.console import JsonFile, needing

bench_app = typer.Typer(
    help="Run microbenchmarks, or the litmus tests of memory that hosts share; compare and show "
    "what they found. `bench CASE` is short for `bench run CASE`.",
    no_args_is_help=True,
)

CsvFile = Annotated[
    Path | None, typer.Option("--csv", help="Write the figures here, without raw samples.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes and few rounds; all: within a minute.")
]
Regions = Annotated[
    list[str] | None,
    typer.Option(
        help="litmus: a dax device without a pool, or a scratch file. Overwritten. latency, "
        "bandwidth: whose memory is measured: anonymous:, numa:N, dax:DEVICE or a file that is "
        "made and removed."
    ),
]
# Of `bench litmus`.
LitmusRole = Annotated[
    str | None,
    typer.Option(help="litmus: a on one host, b on the other; both on this one if not given."),
]
LitmusRounds = Annotated[
    int | None, typer.Option(help="litmus: rounds of each test: 50000 if not given.", min=1)
]
Certificate = Annotated[Path | None, typer.Option(help="litmus: where the certificate goes.")]
# Of `bench replay`.
Trace = Annotated[
    str | None,
    typer.Option(help="replay: a file in Mooncake's format, or agents, loops, scans, zipf."),
]
PolicyName = Annotated[
    str | None, typer.Option(help="replay: one policy; all if not given (adaptive with --far).")
]
FarSize = Annotated[
    str | None, typer.Option(help="replay: real bytes in a pool of 10%, 5000 (pages) or 2GiB.")
]
LocalSize = Annotated[
    str, typer.Option("--local", "--near", help="replay: size of the local tier, with --far.")
]
ColdSize = Annotated[str, typer.Option(help="replay: size of the cold tier, with --far.")]
Minutes = Annotated[
    float | None, typer.Option(help="replay: only so much of the trace's time.", min=0)
]
ReplayPool = Annotated[
    Path | None,
    typer.Option(help="replay: the pool's file, with --far; a killed run goes on there."),
]


@bench_app.command("run")
def bench(
    case: Annotated[str, typer.Argument(help="Which one: `bench list` says what there is.")],
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    quick: Quick = False,
    region: Regions = None,
    role: LitmusRole = None,
    rounds: LitmusRounds = None,
    certificate: Certificate = None,
    model: Annotated[
        Path | None,
        typer.Option(help="recall: also of the causal language model in this folder."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="link, ndp, recall, replay: draw the figures into this file."),
    ] = None,
    trace: Trace = None,
    policy: PolicyName = None,
    far: FarSize = None,
    local: LocalSize = "0",
    cold: ColdSize = "0",
    minutes: Minutes = None,
    pool: ReplayPool = None,
) -> None:
    """Run one microbenchmark on this machine, all of them, or the litmus tests.

    Exit code 1 if a check does not hold: no speeds are then reported.
    ndp and recall take ten minutes or so, and need torch and transformers. replay judges eviction
    policies by a trace; with --far also tiers, with real bytes. peers puts other projects' stores
    beside ours, as far as `make peers` has made their environments in build/peers, and store does
    so with objects. vllm puts the engine with and without us side by side, in the environment that
    `make test-vllm` makes.
    """
    from cxlkv.bench.cli import run, run_all, run_litmus, run_recall, run_replay

    if (quick or csv_file) and case in ("recall", "replay", "litmus", "peers"):
        raise BadArgumentError(f"--quick and --csv do not go with {case}")
    drawn = ("ndp", "recall", "replay", "link")
    if (picture and case not in drawn) or (model and case != "recall"):
        raise BadArgumentError(f"--picture goes with {', '.join(drawn)}; --model with recall")
    if case == "replay":
        if trace is None:
            raise BadArgumentError("replay needs --trace: a file, or the name of a family")
        run_replay(
            trace, policy, (far, local, cold), minutes, pool, json_path=json_file, picture=picture
        )
        return
    if trace or policy or far or minutes or pool or local != "0" or cold != "0":
        raise BadArgumentError("--trace, --policy, --local, --far, --cold ... go with replay only")
    if case == "litmus":
        run_litmus([Path(each) for each in region or []], role, rounds, certificate, json_file)
        return
    if role or rounds or certificate:
        raise BadArgumentError("--role, --rounds and --certificate go with litmus only")
    place = one_place(region or [], case)
    with needing("demo", f"bench {case}"):
        if case == "all":
            run_all(quick, json_file, csv_file)
        elif case in ("peers", "store", "vllm"):
            run_side_by_side(case, json_file, csv_file, quick)
        elif case == "recall":
            run_recall(model, json_file, picture)
        else:
            run(case, json_file, picture, csv_file, quick, place)


def run_side_by_side(case: str, json_file: Path | None, csv_file: Path | None, quick: bool) -> None:
    """Others beside us, each in a process of its own."""
    if case == "vllm":
        from cxlkv.bench.vllm.cli import run_vllm

        run_vllm(json_file, csv_file, quick)
        return
    if case == "store":
        from cxlkv.bench.peers import store

        store.run_store(json_file, csv_file, store.QUICK if quick else store.Size())
        return
    from cxlkv.bench.peers.cli import run_peers

    run_peers(json_file)


def one_place(regions: Sequence[str], case: str) -> str | None:
    """Where the memory that a case measures is to lie, if that was said."""
    if len(regions) > 1 or (regions and case in ("all", "peers", "recall", "store", "vllm")):
        raise BadArgumentError("--region: one, with latency or bandwidth; litmus takes several")
    return regions[0] if regions else None


@bench_app.command("list")
def bench_list() -> None:
    """Say which cases there are, and what each measures."""
    from cxlkv.bench.cli import list_cases, wide_console

    wide_console().print(list_cases())


@bench_app.command("compare")
def bench_compare(
    old: Annotated[Path, typer.Argument(help="Result file (--json) of the run before.")],
    new: Annotated[Path, typer.Argument(help="Result file of the same case now.")],
    threshold: Annotated[
        float, typer.Option(help="Percent of change that is let pass.", min=0)
    ] = 10.0,
) -> None:
    """Say what changed between two runs, and whether that is sure.

    Exit code 3 if a figure surely got worse by more than the threshold, 1 if the two cannot be
    compared: another case, another emulation, a failed check, a damaged file.
    """
    from cxlkv.bench.cli import run_compare
    from cxlkv.bench.compare import WORSE_EXIT

    if not run_compare(old, new, threshold):
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
