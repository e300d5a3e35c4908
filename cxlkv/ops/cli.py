"""The command line: this machine, pools, the demo and the benchmarks.

Nothing heavy (torch, the benchmarks) is imported before a command needs it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cxlkv.config import format_bytes
from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError
from cxlkv.ops.advise import advise
from cxlkv.ops.info import info, ranges

if TYPE_CHECKING:
    from cxlkv.layout import KVLayout
    from cxlkv.stats import Overview

app = typer.Typer(
    help="A KV-cache pool in CXL and other tiered memory, with scoring near the data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
pool_app = typer.Typer(help="Make, find, watch, check and remove pools.", no_args_is_help=True)
app.add_typer(pool_app, name="pool")


bench_app = typer.Typer(
    help="Run microbenchmarks, or the litmus tests of memory that hosts share; compare and show "
    "what they found. `bench CASE` is short for `bench run CASE`.",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")
app.command()(info)
app.command()(advise)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result file here.")]
CsvFile = Annotated[
    Path | None, typer.Option("--csv", help="Write the figures here, without raw samples.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes and few rounds; all: within a minute.")
]
Folders = Annotated[
    list[str] | None,
    typer.Argument(help="Where to look: folders and what is below, or files.", show_default=False),
]
HostNumber = Annotated[
    int | None,
    typer.Option("--host", help="Which host this is, in a shared pool (default: CXLKV_HOST)."),
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
NearSize = Annotated[str, typer.Option(help="replay: size of the near tier, with --far.")]
ColdSize = Annotated[str, typer.Option(help="replay: size of the cold tier, with --far.")]
Minutes = Annotated[
    float | None, typer.Option(help="replay: only so much of the trace's time.", min=0)
]
ReplayPool = Annotated[
    Path | None,
    typer.Option(help="replay: the pool's file, with --far; a killed run goes on there."),
]
PoolPath = Annotated[Path, typer.Argument(help="The pool's file, e.g. /dev/shm/pool.cxlkv.")]


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


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model of Hugging Face, with tokenizer.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file (UTF-8) for --model.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Length of the context: 16384, or 4096 of --text.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="How pages are chosen: exact, digest, two_stage; not with --model."),
    ] = None,
    handover: Annotated[
        bool,
        typer.Option("--handover", help="One process reads, another one answers; no picture."),
    ] = False,
    json_file: JsonFile = None,
    picture: Annotated[Path, typer.Option(help="Draw the result into this file.")] = Path(
        "cxlkv-demo.png"
    ),
) -> None:
    """Show the whole way once, on the small model that is in the package, or on one of yours.

    Offline. The packaged model takes about a minute, with --tokens 65536 some minutes. With --model
    and --text: perplexity, and agreement with full attention, at each budget. With --handover: one
    process reads the context, another one answers from its pages. Exit code 1 if a check does not
    hold.
    """
    if (model is None) != (text is None) or (method is not None and model is not None):
        raise BadArgumentError("--model and --text go together, and without --method")
    if handover and (model is not None or method is not None):
        raise BadArgumentError("--handover goes with --tokens and --json only")
    try:
        from cxlkv.demo import handover as handing_over
        from cxlkv.demo.measure import Plan
        from cxlkv.demo.run import run
        from cxlkv.demo.text.run import run as run_text
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the demo needs {error.name}: install it with pip install 'cxlkv[demo]'"
        ) from error
    if handover:
        passed = handing_over.run(json_file, tokens)
    elif model is None or text is None:
        passed = run(json_path=json_file, picture=picture, plan=Plan.of(tokens, method))
    else:
        passed = run_text(model, text, tokens, json_path=json_file, picture=picture)
    if not passed:
        raise typer.Exit(1)


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
    near: NearSize = "0",
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
            trace, policy, (far, near, cold), minutes, pool, json_path=json_file, picture=picture
        )
        return
    if trace or policy or far or minutes or pool or near != "0" or cold != "0":
        raise BadArgumentError("--trace, --policy, --near, --far, --cold ... go with replay only")
    if case == "litmus":
        run_litmus([Path(each) for each in region or []], role, rounds, certificate, json_file)
        return
    if role or rounds or certificate:
        raise BadArgumentError("--role, --rounds and --certificate go with litmus only")
    place = one_place(region or [], case)
    try:
        if case == "all":
            run_all(quick, json_file, csv_file)
        elif case in ("peers", "store", "vllm"):
            run_side_by_side(case, json_file, csv_file, quick)
        elif case == "recall":
            run_recall(model, json_file, picture)
        else:
            run(case, json_file, picture, csv_file, quick, place)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"bench {case} needs {error.name}: install it with pip install 'cxlkv[demo]'"
        ) from error


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
    try:
        from cxlkv.bench import page
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"bench report needs {error.name}: install it with pip install 'cxlkv[report]'"
        ) from error
    page.write(runs, out)
    Console(soft_wrap=True).print(Text(f"written: {out}"))


@pool_app.command()
def create(
    path: PoolPath,
    capacity: Annotated[str, typer.Option(help="Size, e.g. 2GiB; all of a device: all.")],
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels of a head.")] = None,
    page_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a page: 16 if not given.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the stored keys and values: bf16 if not given.")
    ] = None,
    object_bytes: Annotated[
        str | None, typer.Option(help="Instead: a pool of objects up to this size, e.g. 2MiB.")
    ] = None,
    sharing: Annotated[
        str, typer.Option(help="host; or between hosts: software, hw_coherent.")
    ] = "host",
    hosts: Annotated[int | None, typer.Option(help="How many hosts may share it.")] = None,
    host: HostNumber = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite what lies there, unless it is a pool.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Overwrite a pool that nobody uses, with all that it holds."
        ),
    ] = False,
) -> None:
    """Make a pool for one model's KV cache, or for objects that are stored by their keys."""
    from cxlkv.machine.regions import parse_place
    from cxlkv.pool import CXLPool

    if parse_place(path).path is None:
        node = "" if str(path) == "anonymous:" else f"{path}:"
        raise BadArgumentError(
            f"{path} is memory without a name, and ends with this command: name a file, as "
            f"{node}/dev/shm/my.pool"
        )
    shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    layout = layout_of(object_bytes, shape, {"page_tokens": page_tokens, "dtype": dtype})
    with CXLPool.create(
        path,
        layout=layout,
        capacity=capacity,
        sharing=sharing,
        hosts=hosts,
        host=host,
        force=force,
        replace=replace,
    ) as pool:
        Console().print(table(str(path), pool.stats()))


@pool_app.command()
def inspect(path: PoolPath, host: HostNumber = None, as_json: AsJson = False) -> None:
    """Say what a pool stores, where its parts lie, and how many pages are in which state."""
    from cxlkv.pool import CXLPool

    with CXLPool.open(path, host=host) as pool:
        described, stats = pool.describe(), pool.stats()
    layout = cast("KVLayout", described.pop("layout"))
    geometry = cast("dict[str, int]", described.pop("geometry"))
    if as_json:
        stored = {**asdict(layout), "object_bytes": layout.object_bytes}
        print_json({**described, "layout": stored, "geometry": geometry, "stats": stats})
        return
    console = Console()
    of: dict[str, object] = {"page_tokens": layout.page_tokens}
    groups = layout.groups
    if layout.object_bytes is not None:
        of = {"stores": "objects, one to a page", "object_bytes": layout.object_bytes}
        groups = ()
        del described["sketch"]
        geometry = {name: number for name, number in geometry.items() if number}  # what it has
    of |= {"shard": layout.shard, "model_id": layout.model_id}
    console.print(table(str(path), {**described, **of}))
    for index, group in enumerate(groups):
        layers = [layer for layer, group_of in enumerate(layout.order) if group_of == index]
        console.print(table(f"layer group {index}", {**asdict(group), "layers": ranges(layers)}))
    console.print(table("where its parts lie", geometry))
    console.print(table("pages now", stats))


@pool_app.command()
def check(
    path: PoolPath,
    deep: Annotated[bool, typer.Option(help="Read every page and verify its CRCs.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="First mend damaged pages that nobody holds.")
    ] = False,
    host: HostNumber = None,
    as_json: AsJson = False,
) -> None:
    """Look for damage; exit code 1 if there is any that is left."""
    from cxlkv.pool import CXLPool

    with CXLPool.open(path, host=host) as pool:
        report = pool.check(deep=deep, repair=repair)
    if as_json:
        print_json(report)
    else:
        console = Console(soft_wrap=True)
        for line in report["repairs"]:
            console.print(Text(f"repaired: {line}", style="green"))
        for problem in report["problems"]:
            console.print(Text(str(problem), style="red"))
        console.print(f"{len(report['problems'])} problems" if report["problems"] else "clean")
    if not report["clean"]:
        raise typer.Exit(1)


@pool_app.command("hosts")
def list_hosts(path: PoolPath, host: HostNumber = None, as_json: AsJson = False) -> None:
    """The hosts of a shared pool: which are there, silent, fenced or gone, and what they own."""
    from cxlkv.pool import CXLPool

    with CXLPool.open(path, host=host) as pool:
        rows = [asdict(row) for row in pool.hosts()]
    if as_json:
        print_json(rows)
        return
    made = Table(title=f"hosts of {path}")
    for name in rows[0]:
        made.add_column(name)
    for row in rows:
        if row["state"] != "unused":
            made.add_row(*(str(value) for value in row.values()))
    Console().print(made)


@pool_app.command()
def fence(
    path: PoolPath,
    dead: Annotated[int, typer.Argument(metavar="DEAD", help="The number of the dead host.")],
    confirmed_off: Annotated[
        bool,
        typer.Option(
            "--confirmed-off", help="Its machine certainly does not run: others may have its pages."
        ),
    ] = False,
    host: HostNumber = None,
) -> None:
    """Declare a silent host dead: its epoch ends, what it published stays.

    With --confirmed-off others may take all that it owned.
    """
    from cxlkv.pool import CXLPool

    with CXLPool.open(path, host=host) as pool:
        pool.fence(dead, confirmed_off=confirmed_off)
        after = pool.hosts()[dead]
    Console().print(f"host {dead}: {after.state}, epoch {after.epoch}, {after.extents} extents")


@pool_app.command()
def remove(
    path: PoolPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a pool and all that is in it."""
    from cxlkv.pool import CXLPool

    if not yes:
        typer.confirm(f"Remove the pool {path} and all that is in it?", abort=True)
    CXLPool.remove(path)


@pool_app.command()
def upgrade(
    path: Annotated[str, typer.Argument(help="The pool's file or device, or dax:A+B.")],
) -> None:
    """Make a pool of an older release one of this release's format, and keep all that it holds.

    Nobody may have it open meanwhile, on any host. May be run again after it was stopped.
    """
    from cxlkv._core import FORMAT_VERSION as after
    from cxlkv.pool import CXLPool

    before = CXLPool.upgrade(path)
    what = f"has format version {after}" if before == after else f"{before} is now {after}"
    Console(soft_wrap=True).print(Text(f"{path}: {what}"))


@pool_app.command("list")
def list_pools(places: Folders = None, as_json: AsJson = False) -> None:
    """Find pools and what failures left of some; nothing is opened or changed.

    Looks in /dev/shm and the hugetlbfs mounts unless told where.
    """
    from cxlkv.stats import find, pool_folders

    found = find(places or pool_folders())
    if as_json:
        print_json({"pools": [asdict(overview) for overview in found]})
    else:
        Console().print(pool_table(found) if found else "No pools.")


@pool_app.command()
def gc(
    places: Folders = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    idle_s: Annotated[
        float | None,
        typer.Option(help="Also pools that nobody has used for so many seconds.", min=0),
    ] = None,
) -> None:
    """Remove what is provably nobody's: half-made pools, and host states without a pool.

    Looks in /dev/shm and the hugetlbfs mounts unless told where. A pool in use is never removed,
    nor a file of another user.
    """
    from cxlkv.ops.leftovers import clean, find_leftovers
    from cxlkv.stats import pool_folders

    console = Console(soft_wrap=True)
    found = find_leftovers(places or pool_folders(), idle_s)
    for item in found:
        console.print(Text(f"{item.path}: {format_bytes(item.bytes)}, {item.why}"))
    if not found:
        console.print("Nothing is left over.")
    if dry_run or not found:
        return
    if not yes:
        typer.confirm(f"Clean up these {len(found)}?", abort=True)
    for item in found:
        if not clean(item, idle_s):
            console.print(Text(f"{item.path}: gone, or in use again: left alone"))


@pool_app.command()
def top(
    places: Folders = None,
    interval_s: Annotated[float, typer.Option(help="Seconds between frames.", min=0.01)] = 2,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch pools, their processes and what these do; q ends it. Nothing is opened or changed."""
    from cxlkv.ops.top import run
    from cxlkv.stats import pool_folders

    run(places or pool_folders(), interval_s, once, Console())


@app.command()
def tune(
    json_file: JsonFile = None,
    threads: Annotated[int | None, typer.Option(help="That scan: all if not given.")] = None,
    pool: Annotated[
        Path | None, typer.Option(help="A pool: what far memory costs is measured in it.")
    ] = None,
    cold: Annotated[
        Path | None, typer.Option(help="Where a cold file is or will be: its disk is measured.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Only by what way pages get into the GPU faster.")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(help="Only this machine's memory, as a profile of this name for emulation."),
    ] = None,
) -> None:
    """Measure on this machine from how many pages on sketches pay, for select(method="auto"), and
    what reading, writing and attending cost, for `cxlkv advise`. What was measured of the GPU, or
    of all else, is kept."""
    from cxlkv.bench import cli, rates, tuning
    from cxlkv.bench.report import Result
    from cxlkv.ndp.tuning import default_path, read, this_machine, write

    if profile is not None:
        if threads or pool or cold or gpu:
            raise BadArgumentError("--profile goes without --threads, --pool, --cold and --gpu")
        tune_profile(profile, json_file)
        return
    console = cli.wide_console()
    result, path = Result("tune"), default_path()
    if gpu:
        if threads or pool or cold:
            raise BadArgumentError("--gpu goes without --threads, --pool and --cold")
        try:
            from cxlkv.bench import gpu_tuning
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"tune --gpu needs {error.name}: install it with pip install 'cxlkv[gpu]'"
            ) from error
        with console.status("measuring the GPU; a minute ..."):
            constants = gpu_tuning.run(result)
        found = replace(read(path), machine=this_machine(), gpu=constants)
    else:
        with console.status("measuring; half a minute ..."):
            costs = rates.run(result, rates.LAYOUT, pool=pool, cold=cold, threads=threads)
            found = replace(tuning.run(result, threads=threads), costs=costs, gpu=read(path).gpu)
    cli.show(result, console, json_file)  # ends it where a check failed: nothing is written then
    write(found, path)
    console.print(f"written: {path}", soft_wrap=True)


def tune_profile(name: str, json_file: Path | None) -> None:
    """`cxlkv tune --profile`: into the user's own profiles, for CXLKV_EMULATE and emulate()."""
    from cxlkv.bench import cli, link_tuning
    from cxlkv.bench.report import Result
    from cxlkv.emulation import profiles

    console, result = cli.wide_console(), Result("tune")
    profiles.check_new(profiles.own_path(), name)
    with console.status("measuring; half a minute ..."):
        found = link_tuning.run(result)
    cli.show(result, console, json_file)  # ends it where a check failed: nothing is written then
    profiles.write(profiles.own_path(), name, found)
    console.print(f"written: {name} in {profiles.own_path()}", soft_wrap=True)


@app.command()
def metrics(
    pools: Annotated[list[str], typer.Argument(help="The pools' files; they may come later.")],
    port: Annotated[int, typer.Option(help="TCP port; 0 takes a free one.", min=0, max=65535)],
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve Prometheus metrics of pools at /metrics, until Ctrl-C."""
    from cxlkv.ops.metrics import serve

    serve(pools, port, address)


@app.command("ndp-worker")
def ndp_worker(
    pool: Annotated[Path, typer.Option(help="The pool's file or device.")],
    node: Annotated[
        int | None,
        typer.Option(help="Run on the CPUs of this memory node, or those nearest to it."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads that work: the CPUs it may use if not given.", min=1),
    ] = None,
    slots: Annotated[int, typer.Option(help="Processes that it serves.", min=1, max=64)] = 8,
    host: HostNumber = None,
) -> None:
    """Select and attend for the processes of a pool, near its memory, until SIGTERM or Ctrl-C.

    They ask for it with CXLPool.open(..., worker=True), and do it themselves while it is away.
    """
    from cxlkv.machine.topology import probe
    from cxlkv.ndp.worker import cpus_near, pin, serve
    from cxlkv.pool import CXLPool

    if node is not None:
        pin(cpus_near(probe(), node))
    with CXLPool.open(pool, host=host, threads=threads) as opened:
        serve(opened._handle, lambda line: typer.echo(line), slots=slots)


@app.command("serve")
def serve_pool(
    pool: Annotated[Path, typer.Argument(help="The pool's file or device.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT of this machine's private network.")],
    secret: Annotated[Path, typer.Option(help="A file of mode 0600 that both sides have.")],
    device: Annotated[
        str | None, typer.Option(help="Also over this RDMA device; `rdma link` lists them.")
    ] = None,
    connections: Annotated[int, typer.Option(help="Peers at the same time.", min=1)] = 32,
    host: HostNumber = None,
) -> None:
    """Let other machines match, read, write and select in a pool, until SIGTERM or Ctrl-C.

    They use cxlkv.transport: docs/transport.md.
    """
    from cxlkv.ndp.worker import stop_signals
    from cxlkv.pool import CXLPool
    from cxlkv.transport import Server, read_secret
    from cxlkv.transport.wire import parse_address

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    known, where = read_secret(secret), parse_address(listen)
    with (
        stop_signals() as stopped,
        CXLPool.open(pool, host=host) as opened,
        Server(opened, where, known, device=device, connections=connections) as server,
    ):
        typer.echo(f"serves {pool} on {server.address[0]}:{server.address[1]}")
        while not stopped:
            time.sleep(0.2)


def layout_of(
    object_bytes: str | None, shape: Mapping[str, int | None], more: Mapping[str, int | str | None]
) -> KVLayout:
    """Of objects, or of K and V: then all of a shape is needed; what is None was not given."""
    from cxlkv.layout import KVLayout

    given = {name: value for name, value in {**shape, **more}.items() if value is not None}
    missing = [f"--{name.replace('_', '-')}" for name in shape if name not in given]
    if object_bytes is None and missing:
        raise BadArgumentError(f"{', '.join(missing)} missing: or --object-bytes, for objects")
    if object_bytes is None:
        return KVLayout(**given)  # type: ignore[arg-type]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise BadArgumentError(f"{names}: of K and V; a pool of objects has --object-bytes alone")
    return KVLayout.objects(object_bytes)


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


def pool_table(found: Sequence[Overview]) -> Table:
    """A line for each pool; used pages are those that are not free."""
    from cxlkv.ops.top import plain

    result = Table("path", "state", "model", "size", "pages used", "processes")
    for overview in found:
        used = overview.pages_total - overview.pages.get("free", 0)
        pids = [str(process.pid) for process in overview.processes if process.alive]
        result.add_row(
            Text(plain(overview.path), overflow="fold"),
            Text(plain(f"{overview.state}: {overview.detail}".rstrip(": "))),
            Text(plain(overview.model_id)),
            format_bytes(overview.bytes),
            f"{used} of {overview.pages_total}" if overview.pages_total else "",
            " ".join(pids),
        )
    return result


if __name__ == "__main__":
    main()
