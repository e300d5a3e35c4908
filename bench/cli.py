"""`cxlkv bench CASE`: runs cases, shows their figures, writes the result file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from cxlkv.bench.report import Result
from cxlkv.errors import BadArgumentError


def _copying(result: Result) -> None:
    from cxlkv.bench.cases import copying

    result.notes.append(copying.working_set_note(copying.Size()))
    copying.run(result)


def _allocating(result: Result) -> None:
    from cxlkv.bench.cases import allocating

    allocating.run(result)


def _selecting(result: Result) -> None:
    from cxlkv.bench.cases import selecting

    selecting.run(result)


def _calling(result: Result) -> None:
    from cxlkv.bench.cases import calling

    calling.run(result)


def _grouping(result: Result) -> None:
    from cxlkv.bench.cases import grouping

    grouping.run(result)


def _cohering(result: Result) -> None:
    from cxlkv.bench.cases import cohering

    cohering.run(result)


def _ndp(result: Result) -> None:
    from cxlkv.bench.cases import ndp

    ndp.run(result)


def _working(result: Result) -> None:
    from cxlkv.bench.cases import working

    working.run(result)


def _hotness(result: Result) -> None:
    from cxlkv.bench.cases import hotness

    hotness.run(result)


def _deciding(result: Result) -> None:
    from cxlkv.bench.cases import deciding

    deciding.run(result)


def _matching(result: Result) -> None:
    from cxlkv.bench.cases import matching

    matching.run(result)


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


def _link(result: Result) -> None:
    from cxlkv.bench.cases import link

    link.run(result)


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
    "link": _link,
}
FOUNDATION = ["calling", "allocating", "copying", "selecting"]
TIERS = ["hotness", "deciding", "matching", "moving", "cold", "decoding"]
CASES = {**{name: [name] for name in PARTS}, "foundation": FOUNDATION, "tiers": TIERS}


def run(case: str, json_path: Path | None = None, picture: Path | None = None) -> Result:
    """Run a case ("foundation" and "tiers" are several in one run) and print its table; ndp draws.

    Raises BadArgumentError for an unknown case, SystemExit when a check fails.
    """
    if case not in CASES:
        known = ", ".join([*CASES, "recall", "replay", "litmus"])
        raise BadArgumentError(f"unknown case {case!r}: one of {known}")
    check_files(json_path, picture)
    console = wide_console()
    result = Result(case)
    for part in CASES[case]:
        with console.status(f"{part} ..."):
            PARTS[part](result)
    for note in result.notes if case == "ndp" else ():
        console.print(note, soft_wrap=True)
    if picture is not None:
        _draw(case, result, picture)
        console.print(f"picture: {picture}", soft_wrap=True)
    show(result, console, json_path)
    return result


def _draw(case: str, result: Result, picture: Path) -> None:
    if case == "link":
        from cxlkv.bench.cases.link import draw

        draw(picture)
        return
    from cxlkv.bench.picture import roofline

    roofline(result, picture)


def run_recall(model: Path | None, json_path: Path | None, picture: Path | None) -> Result:
    """What bytes buy, on each source of keys, and on the model in a folder if one is given."""
    from cxlkv.bench.cases import recalling

    check_files(json_path, picture)
    console = wide_console()
    result = Result("recall")
    with console.status("recall ...") as status:
        found = recalling.run(
            result, model=model, progress=lambda source: status.update(f"{source} ...")
        )
    console.print(recalling.table(found))
    for note in result.notes:
        console.print(note, soft_wrap=True)
    if picture is not None:
        from cxlkv.bench.picture import recall

        recall(found, picture)
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
    """A trace against policies, or with sizes (far, near, cold) against tiers of real bytes."""
    from cxlkv.bench import traces
    from cxlkv.bench.cases import replay
    from cxlkv.bench.replaying_bytes import Where, parse_size
    from cxlkv.policy import DEFAULT, POLICIES, policy_named

    check_files(json_path, picture)
    far, near, cold = sizes
    if far is None and (pool is not None or (near, cold) != ("0", "0")):
        raise BadArgumentError("--near, --cold and --pool go with --far")
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
            shares = sorted({*replay.SHARES, *(replay.MORE_SHARES if picture else ())})
            policies = tuple(POLICIES) if policy is None else (policy,)
            curves = replay.run(result, requests, policies, shares, say)
        else:
            of = traces.distinct(requests)
            where = Where(
                far=parse_size(far, of),
                near=parse_size(near, of),
                cold=parse_size(cold, of),
                policy=policy or DEFAULT,
                path=pool,
            )
            replay.run_bytes(result, requests, where, say)
    for note in result.notes:
        console.print(note, soft_wrap=True)
    if far is not None:
        show(result, console, json_path)
        return result
    console.print(replay.table(curves))
    if picture is not None:
        from cxlkv.bench.picture import replayed

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
    from cxlkv.bench import litmus

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


def show(result: Result, console: Console, json_path: Path | None) -> None:
    """Print the table and write the result file; raises SystemExit when a check failed."""
    console.print(table(result))
    finish(result, console, json_path)


def finish(result: Result, console: Console, json_path: Path | None) -> None:
    """Write the result file; raises SystemExit when a check failed."""
    for name, passed in result.checks.items():
        if not passed:
            console.print(f"[red]check failed: {name}; no ratios are reported[/red]")
    if json_path is not None:
        result.write(json_path)
        console.print(f"raw samples: {json_path}")
    if not result.passed:
        raise SystemExit(1)


def table(result: Result) -> Table:
    """Metrics as median (low to high), then ratios."""
    made = Table(title=f"cxlkv bench {result.case}")
    for column in ("figure", "median", "low to high", "unit"):
        side: Literal["left", "right"] = "left" if column in ("figure", "unit") else "right"
        made.add_column(column, justify=side, no_wrap=True)
    for name, metric in result.metrics.items():
        unit, scale = metric.unit, 1.0
        if unit.startswith("bytes"):
            unit, scale = unit.replace("bytes", "MiB", 1), 1 / (1 << 20)
        low, high = scale * min(metric.samples), scale * max(metric.samples)
        made.add_row(name, f"{scale * metric.median:.4g}", f"{low:.4g} to {high:.4g}", unit)
    for name, value in result.ratios.items() if result.passed else ():
        made.add_row(name, f"{value:.3g}", "", "ratio")
    return made
