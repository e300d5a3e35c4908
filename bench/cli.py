"""`cxlkv bench CASE`: runs cases, shows their figures, writes the result file."""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cxlkv.bench import compare, reading
from cxlkv.bench.result import Result, lower_is_better
from cxlkv.errors import BadArgumentError, CXLKVError


def _copying(result: Result) -> None:
    from cxlkv.bench.cases import transfer

    result.notes.append(transfer.working_set_note(transfer.Size()))
    transfer.run(result)


def _allocating(result: Result) -> None:
    from cxlkv.bench.cases import forks

    forks.run(result)


def _selecting(result: Result) -> None:
    from cxlkv.bench.cases import selection

    selection.run(result)


def _calling(result: Result) -> None:
    from cxlkv.bench.cases import calls

    calls.run(result)


def _grouping(result: Result) -> None:
    from cxlkv.bench.cases import windows

    windows.run(result)


def _cohering(result: Result) -> None:
    from cxlkv.bench.cases import coherence

    coherence.run(result)


def _ndp(result: Result) -> None:
    from cxlkv.bench.cases import ndp

    ndp.run(result)


def _working(result: Result) -> None:
    from cxlkv.bench.cases import worker

    worker.run(result)


def _hotness(result: Result) -> None:
    from cxlkv.bench.cases import hotness

    hotness.run(result)


def _deciding(result: Result) -> None:
    from cxlkv.bench.cases import policy

    policy.run(result)


def _matching(result: Result) -> None:
    from cxlkv.bench.cases import prefix

    prefix.run(result)


def _moving(result: Result) -> None:
    from cxlkv.bench.cases import near

    near.run_moves(result)
    result.ratios["move_to_memcpy"] = result.ratios["move_crc_1_to_memcpy"]


def _decoding(result: Result) -> None:
    from cxlkv.bench.cases import near

    near.run_decode(result)


def _cold(result: Result) -> None:
    from cxlkv.bench.cases import cold

    with tempfile.TemporaryDirectory() as folder:
        cold.run(result, Path(folder))


def _packing(result: Result) -> None:
    from cxlkv.bench.cases import compression

    compression.run(result)


def _paged(result: Result) -> None:
    from cxlkv.bench.cases import paged

    paged.run(result)


def _link(result: Result) -> None:
    from cxlkv.bench.cases import link

    link.run(result)


def _transport(result: Result) -> None:
    from cxlkv.bench.cases import transport

    transport.run(result)


def _micro(result: Result, name: str, quick: bool, region: str | None) -> None:
    case = import_module(f"cxlkv.bench.cases.{MODULES.get(name, name)}")
    place = () if region is None else (region,)
    case.run(result, case.QUICK if quick else case.Size(), *place)


# Cases that have a quick size, each a module with run(), Size and QUICK.
MICRO = ["latency", "bandwidth", "alloc", "copy", "gather", "publish", "agree"]
QUICK = MICRO[:-1]  # of `all --quick`
PLACED = ("latency", "bandwidth")  # of the memory of a place, if one is given
PARTS: dict[str, Callable[[Result], None]] = {
    "calling": _calling,
    "allocating": _allocating,
    "copying": _copying,
    "selecting": _selecting,
    "grouping": _grouping,
    "coherence": _cohering,
    "ndp": _ndp,
    "working": _working,
    "hotness": _hotness,
    "deciding": _deciding,
    "matching": _matching,
    "moving": _moving,
    "decoding": _decoding,
    "cold": _cold,
    "packing": _packing,
    "paged": _paged,
    "link": _link,
    "transport": _transport,
}
# Where a case's name is not its module's, or it is one function of several there.
MODULES = {
    "alloc": "pages",
    "allocating": "forks",
    "calling": "calls",
    "copying": "transfer",
    "deciding": "policy",
    "decoding": "near:run_decode",
    "grouping": "windows",
    "matching": "prefix",
    "moving": "near:run_moves",
    "packing": "compression",
    "selecting": "selection",
    "working": "worker",
}
# Run by functions of their own, as they take options of their own.
OWN = {
    "recall": "cases.recall",
    "replay": "replay.case",
    "litmus": "cases.litmus",
    "peers": "peers.cli",
    "store": "peers.store",
    "vllm": "vllm.cli",
}
WARNINGS_SHOWN = 6
FOUNDATION = ["calling", "allocating", "copying", "selecting"]
TIERS = ["hotness", "deciding", "matching", "moving", "cold", "packing", "decoding"]
SEVERAL = {"foundation": FOUNDATION, "tiers": TIERS}
CASES = {**{name: [name] for name in (*MICRO, *PARTS)}, **SEVERAL}


def measure(result: Result, part: str, quick: bool = False, region: str | None = None) -> None:
    """Run one part of a case; BadArgumentError where it has no quick size, or takes no place."""
    if region is not None and part not in PLACED:
        raise BadArgumentError(f"--region goes with litmus, {', '.join(PLACED)}; not with {part}")
    if part in MICRO:
        _micro(result, part, quick, region)
    elif quick:
        raise BadArgumentError(
            f"--quick goes with all, store, vllm, {', '.join(MICRO)}; not with {part}"
        )
    else:
        PARTS[part](result)


def list_cases() -> Table:
    """Every case by name, with the first line of its module, or of its function."""
    made = Table(title="cxlkv bench CASE")
    made.add_column("case", no_wrap=True)
    made.add_column("what it measures")
    for name in (*MICRO, *PARTS, *OWN):
        module = OWN.get(name, f"cases.{MODULES.get(name, name)}")
        made.add_row(name, first_line(f"cxlkv.bench.{module}"))
    for name, parts in SEVERAL.items():
        made.add_row(name, ", ".join(parts))
    made.add_row("all", f"all that can run here; --quick: {', '.join(QUICK)}, within a minute")
    return made


def first_line(place: str) -> str:
    """Of the docstring of MODULE or MODULE:FUNCTION; it is not imported, so torch is not needed to
    be told of it."""
    module, _, function = place.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    found: ast.Module | ast.FunctionDef = ast.parse(Path(spec.origin).read_text())
    for node in found.body if function else ():
        if isinstance(node, ast.FunctionDef) and node.name == function:
            found = node
    docstring = ast.get_docstring(found) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ")


def run_all(quick: bool, json_path: Path | None, csv_path: Path | None) -> Result:
    """Every case in one result, figures as CASE/NAME; what cannot run here is named and why.

    Raises SystemExit when a check failed: the figures of that case are then left out.
    """
    check_files(json_path, csv_path)
    console, whole = wide_console(), Result("all")
    say_load(whole, console)
    said = len(whole.notes)
    parts = QUICK if quick else [*MICRO, *PARTS]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=len(parts))
        for part in parts:
            bar.update(task, description=part)
            result = Result(part)
            try:
                measure(result, part, quick)
            except ModuleNotFoundError as error:
                whole.notes.append(f"{part}: not measured, {error.name} is not installed")
            except (CXLKVError, OSError) as error:
                whole.notes.append(f"{part}: not measured, {error}")
            else:
                add(whole, result)
                console.print(table(result))
                show_doubts(result, console)
            bar.advance(task)
    for note in whole.notes[said:]:
        console.print(Text(note), soft_wrap=True)
    finish(whole, console, json_path, csv_path)
    return whole


def add(whole: Result, part: Result) -> None:
    """Takes a part's figures, if its checks hold."""
    whole.checks.update({f"{part.case}/{name}": holds for name, holds in part.checks.items()})
    if not part.checks:
        whole.checks[f"{part.case}/was_checked"] = False
    whole.notes.extend(part.notes)
    if part.passed:
        whole.metrics.update({f"{part.case}/{name}": m for name, m in part.metrics.items()})
        whole.ratios.update({f"{part.case}/{name}": r for name, r in part.ratios.items()})


def say_load(result: Result, console: Console) -> None:
    """A warning, if other programs are at work before anything is measured."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        warning = f"warning: load average {load:.1f} on {cores} cores: figures will be noisy"
        result.notes.append(warning)
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def show_doubts(result: Result, console: Console) -> None:
    """Says of noisy figures that they are, and the result file keeps all of it."""
    doubts = result.doubts() if result.passed else []
    for doubt in doubts[:WARNINGS_SHOWN]:
        console.print(Text(f"warning: {doubt}", style="yellow"), soft_wrap=True)
    if len(doubts) > WARNINGS_SHOWN:
        more = f"warning: {len(doubts) - WARNINGS_SHOWN} more like these; the raw samples tell"
        console.print(Text(more, style="yellow"), soft_wrap=True)


def run_compare(old_path: Path, new_path: Path, threshold_percent: float) -> bool:
    """Print what changed; whether nothing surely got worse by more than the threshold."""
    old, new = reading.read(old_path), reading.read(new_path)
    compare.refuse_unlike(old, new)
    console = wide_console()
    for difference in compare.differences(old, new):
        warning = f"warning: the machines differ in {difference}"
        console.print(Text(warning, style="yellow"), soft_wrap=True)
    changes = compare.changes(old, new, threshold_percent)
    if not changes:
        raise BadArgumentError("the two runs have no figure in common")
    console.print(compare.table(changes))
    for which, one, other in (("old", old, new), ("new", new, old)):
        known = {*other.metrics, *other.ratios}
        only = [name for name in (*one.metrics, *one.ratios) if name not in known]
        if only:
            console.print(Text(f"only in the {which} run: {', '.join(only)}"), soft_wrap=True)
    worse = [change.name for change in changes if change.is_worse]
    if worse:
        console.print(Text(f"worse by more than {threshold_percent:g} %: {', '.join(worse)}"))
    return not worse


def run(
    case: str,
    json_path: Path | None = None,
    picture: Path | None = None,
    csv_path: Path | None = None,
    quick: bool = False,
    region: str | None = None,
) -> Result:
    """Run a case ("foundation" and "tiers" are several in one run) and print its table; ndp draws.

    Raises BadArgumentError for an unknown case, SystemExit when a check fails.
    """
    if case not in CASES:
        known = ", ".join([*CASES, *OWN, "all"])
        raise BadArgumentError(f"unknown case {case!r}: one of {known}")
    check_files(json_path, picture, csv_path)
    console = wide_console()
    result = Result(case)
    say_load(result, console)
    said = len(result.notes)
    for part in CASES[case]:
        with console.status(f"{part} ..."):
            measure(result, part, quick, region)
    for note in result.notes[said:] if case == "ndp" or case in MICRO else ():
        console.print(Text(note), soft_wrap=True)
    if picture is not None:
        _draw(case, result, picture)
        console.print(f"picture: {picture}", soft_wrap=True)
    show(result, console, json_path, csv_path)
    show_doubts(result, console)
    return result


def _draw(case: str, result: Result, picture: Path) -> None:
    if case == "link":
        from cxlkv.bench.cases.link import draw

        draw(picture)
        return
    from cxlkv.bench.pictures import roofline

    roofline(result, picture)


def run_recall(model: Path | None, json_path: Path | None, picture: Path | None) -> Result:
    """What bytes buy, on each source of keys, and on the model in a folder if one is given."""
    from cxlkv.bench.cases import recall

    check_files(json_path, picture)
    console = wide_console()
    result = Result("recall")
    with console.status("recall ...") as status:
        found = recall.run(
            result, model=model, progress=lambda source: status.update(f"{source} ...")
        )
    console.print(recall.table(found))
    for note in result.notes:
        console.print(note, soft_wrap=True)
    if picture is not None:
        from cxlkv.bench import pictures

        pictures.recall(found, picture)
        console.print(f"picture: {picture}", soft_wrap=True)
    finish(result, console, json_path)
    return result


def run_replay(
    trace: str,
    policy: str | None,
    sizes: tuple[str | None, str, str],
    minutes: float | None,
    pool: Path | None,
    *,
    json_path: Path | None,
    picture: Path | None,
) -> Result:
    """A trace against policies, or with sizes (far, local, cold) against tiers of real bytes."""
    from cxlkv.bench.replay import case, traces
    from cxlkv.bench.replay.tiers import Where, parse_size
    from cxlkv.tiers.policy import DEFAULT, POLICIES, policy_named

    check_files(json_path, picture)
    far, local, cold = sizes
    if far is None and (pool is not None or (local, cold) != ("0", "0")):
        raise BadArgumentError("--local, --cold and --pool go with --far")
    if far is not None and picture is not None:
        raise BadArgumentError("--picture is of policies: it goes without --far")
    if policy is not None:
        policy_named(policy)  # an unknown one is said before minutes are spent
    family = traces.FAMILIES.get(trace)
    requests = traces.read(Path(trace)) if family is None else family(1)
    if minutes is not None:
        requests = [request for request in requests if request.time_s < 60 * minutes]
    if not requests:
        raise BadArgumentError(f"--minutes {minutes:g}: no request of {trace} is that early")
    console, result = wide_console(), Result("replay")
    result.notes.append(f"trace: {Path(trace).name}, {len(requests)} requests")
    with console.status("replay ...") as status:

        def say(text: str) -> None:
            status.update(f"{text} ...")

        if far is None:
            shares = sorted({*case.SHARES, *(case.MORE_SHARES if picture else ())})
            policies = tuple(POLICIES) if policy is None else (policy,)
            curves = case.run(result, requests, policies, shares, say)
        else:
            of = traces.distinct(requests)
            where = Where(
                far=parse_size(far, of),
                local=parse_size(local, of),
                cold=parse_size(cold, of),
                policy=policy or DEFAULT,
                path=pool,
            )
            case.run_bytes(result, requests, where, say)
    for note in result.notes:
        console.print(note, soft_wrap=True)
    if far is not None:
        show(result, console, json_path)
        return result
    console.print(case.table(curves))
    if picture is not None:
        from cxlkv.bench.pictures import replayed

        replayed(curves, picture)
        console.print(f"picture: {picture}", soft_wrap=True)
    finish(result, console, json_path)
    return result


def check_files(*paths: Path | None) -> None:
    """Before minutes are spent: BadArgumentError for a file that could not be written."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise BadArgumentError(f"{path}: its folder does not exist")


def run_litmus(
    regions: Sequence[Path],
    role: str | None,
    rounds: int | None,
    certificate: Path | None,
    json_path: Path | None,
) -> Result:
    """Run the litmus tests, print what came of them, write the certificate."""
    from cxlkv.bench.cases import litmus

    console = wide_console()
    with console.status("litmus ...") as status:
        result, written = litmus.run(
            regions, role, rounds or litmus.ROUNDS, certificate, progress=status.update
        )
    for path in written:
        console.print(f"certificate: {path}", soft_wrap=True)
    for note in result.notes:
        console.print(note, soft_wrap=True)
    show(result, console, json_path)
    return result


def wide_console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 110)
    return console


def show(
    result: Result, console: Console, json_path: Path | None, csv_path: Path | None = None
) -> None:
    """Print the table and write the result files; raises SystemExit when a check failed."""
    console.print(table(result))
    finish(result, console, json_path, csv_path)


def finish(
    result: Result, console: Console, json_path: Path | None, csv_path: Path | None = None
) -> None:
    """Write the result files; raises SystemExit when a check failed."""
    for name, passed in result.checks.items():
        if not passed:
            text = f"check failed: {name}; no speeds and no ratios are reported"
            console.print(Text(text, style="red"))
    if json_path is not None:
        result.write(json_path)
        console.print(f"raw samples: {json_path}")
    if csv_path is not None:
        result.write_csv(csv_path)
        console.print(f"figures: {csv_path}")
    if not result.passed:
        raise SystemExit(1)


def table(result: Result) -> Table:
    """Metrics as median (low to high), then ratios; no times, speeds, ratios if a check failed."""
    made = Table(title=f"cxlkv bench {result.case}")
    for column in ("figure", "median", "low to high", "unit"):
        side: Literal["left", "right"] = "left" if column in ("figure", "unit") else "right"
        made.add_column(column, justify=side, no_wrap=True)
    for name, metric in result.metrics.items():
        if not result.passed and lower_is_better(metric.unit) is not None:
            continue  # a count, of violations say, is shown all the more
        unit, scale = metric.unit, 1.0
        if unit.startswith("bytes"):
            unit, scale = unit.replace("bytes", "MiB", 1), 1 / (1 << 20)
        low, high = scale * min(metric.samples), scale * max(metric.samples)
        made.add_row(name, f"{scale * metric.median:.4g}", f"{low:.4g} to {high:.4g}", unit)
    for name, value in result.ratios.items() if result.passed else ():
        made.add_row(name, f"{value:.3g}", "", "ratio")
    return made
