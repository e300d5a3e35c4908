"""`cxlkv bench CASE`: runs cases, shows their figures, writes the result file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cxlkv.bench import compare
from cxlkv.bench.registry import (
    TABLE,
    Options,
    Say,
    Shown,
    named,
)
from cxlkv.bench.result import HERE, Result, check_clock, lower_is_better, read
from cxlkv.emulation.link import marked
from cxlkv.errors import BadArgumentError, CXLKVError

WARNINGS_SHOWN = 6
UNBOUNDED_WIDTH = 2000
THRESHOLD_PERCENT = 10.0  # of change that `bench compare` lets pass


def run(name: str, options: Options) -> Result:
    """Run a case, print its table, write its files.

    Raises BadArgumentError for an unknown case, or an option that does not go with it, SystemExit
    when a check fails.
    """
    case = named(name)
    case.refuse_other_options(options)
    if case.over_links:
        check_clock(f"bench {name}")
    if len(options.region) > 1 and "role" not in case.options:
        raise BadArgumentError("--region: one with memory; litmus takes several")
    return perform(name, run_all if name == "all" else case.run, options)


def perform(name: str, measure: Callable[[Options, Say], Shown], options: Options) -> Result:
    """Everything round a measurement; raises SystemExit when a check fails."""
    check_files(options.json, options.picture)
    console, steps = wide_console(), set[str]()
    warning = load_warning()
    if warning:
        console.print(Text(warning, style="yellow"), soft_wrap=True)
    with console.status(f"{name} ...") as status:

        def say(text: str) -> None:
            status.update(f"{text} ...")
            step = text.partition(":")[0]
            if not console.is_terminal and step not in {*steps, name}:  # no status is shown there
                steps.add(step)
                console.print(f"{step} ...", markup=False)

        shown = measure(options, say)
    result = shown.result
    label = None
    if name != "all":  # whose parts have been labelled
        tell_late(result)
        label = result.emulated
    for one in shown.tables or [table(result)]:
        console.print(labelled(one, label))
    for line in (*shown.lines, *result.notes):
        console.print(Text(marked(line, label)), soft_wrap=True)
    if warning:
        result.notes.insert(0, warning)
    if options.picture is not None and shown.draw is not None:
        shown.draw(options.picture)
        console.print(f"picture: {options.picture}", soft_wrap=True)
    finish(result, console, options.json)
    show_doubts(result, console)
    return result


def run_all(options: Options, say: Say) -> Shown:
    """Every case in one result, figures as CASE/NAME; what cannot run here is named and why. The
    figures of a case of which a check failed are left out."""
    whole, tables = Result("all"), list[Table]()
    for part in (leaf for case in TABLE for leaf in case.leaves):
        if part.is_command or not part.module or (options.quick and not part.is_short):
            continue
        say(part.name)
        result = Result(part.name, over_links=part.over_links)
        try:
            part.measure(result, replace(options, json=None))
        except ModuleNotFoundError as error:
            whole.notes.append(f"{part.name}: not measured, {error.name} is not installed")
        except (CXLKVError, OSError) as error:
            whole.notes.append(f"{part.name}: not measured, {error}")
        else:
            tell_late(result)
            add(whole, result)
            shown = part.tables(result) or [table(result)]
            tables += [labelled(one, result.emulated) for one in shown]
    return Shown(whole, tables)


def add(whole: Result, part: Result) -> None:
    """Takes a part's figures, if its checks hold."""
    whole.checks.update({f"{part.case}/{name}": holds for name, holds in part.checks.items()})
    if not part.checks:
        whole.checks[f"{part.case}/was_checked"] = False
    whole.notes.extend(marked(note, part.emulated) for note in part.notes)
    if part.passed:
        whole.metrics.update({f"{part.case}/{name}": m for name, m in part.metrics.items()})
        whole.ratios.update({f"{part.case}/{name}": r for name, r in part.ratios.items()})
        for name in (*part.metrics, *part.ratios):
            whole.put_label(f"{part.case}/{name}", part.label_of(name) or HERE)


def load_warning() -> str:
    """If other programs are at work before anything is measured."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= cores / 2:
        return ""
    return f"warning: load average {load:.1f} on {cores} cores: figures will be noisy"


def show_doubts(result: Result, console: Console) -> None:
    """Says of noisy figures that they are, and the result file keeps all of it."""
    doubts = result.doubts() if result.passed else []
    for doubt in doubts[:WARNINGS_SHOWN]:
        console.print(Text(f"warning: {doubt}", style="yellow"), soft_wrap=True)
    if len(doubts) > WARNINGS_SHOWN:
        more = f"warning: {len(doubts) - WARNINGS_SHOWN} more like these; the raw samples tell"
        console.print(Text(more, style="yellow"), soft_wrap=True)


def run_compare(
    old_path: Path, new_path: Path, tell: Callable[[dict[str, object]], None] | None = None
) -> bool:
    """Print what changed, or tell it; whether nothing surely got worse by more than
    THRESHOLD_PERCENT."""
    old, new = read(old_path), read(new_path)
    compare.refuse_unlike(old, new)
    if tell is not None:
        found = compare.changes(old, new, THRESHOLD_PERCENT)
        differences = compare.differences(old, new)
        told = {"case": new.case, "emulated": new.emulated, "machines": differences}
        tell({**told, "changes": [*map(asdict, found)]})
        return not any(change.verdict == "worse" for change in found)
    console = wide_console()
    for difference in compare.differences(old, new):
        warning = f"warning: the machines differ in {difference}"
        console.print(Text(warning, style="yellow"), soft_wrap=True)
    if compare.is_one_commit(old, new):
        text = f"both runs are of {new.commit} on one machine: whatever changed is noise"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    changes = compare.changes(old, new, THRESHOLD_PERCENT)
    if not changes:
        raise BadArgumentError("the two runs have no figure in common")
    console.print(compare.table(changes))
    for which, one, other in (("old", old, new), ("new", new, old)):
        known = {*other.metrics, *other.ratios}
        only = [name for name in (*one.metrics, *one.ratios) if name not in known]
        if only:
            console.print(Text(f"only in the {which} run: {', '.join(only)}"), soft_wrap=True)
    worse = [change.name for change in changes if change.verdict == "worse"]
    if worse:
        console.print(Text(f"worse by more than {THRESHOLD_PERCENT:g} %: {', '.join(worse)}"))
    return not worse


def check_files(*paths: Path | None) -> None:
    """Before minutes are spent: BadArgumentError for a file that could not be written."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise BadArgumentError(f"{path}: its folder does not exist")


def wide_console() -> Console:
    """Where there is no terminal, as wide as the widest table: files and pipes have no edge."""
    console = Console()
    if not console.is_terminal:
        console.width = UNBOUNDED_WIDTH
    return console


def show(result: Result, console: Console, json_path: Path | None) -> None:
    """Print the table, notes and doubts, write the result file; raises SystemExit when a check
    failed."""
    tell_late(result)
    console.print(labelled(table(result), result.emulated))
    for note in result.notes:
        console.print(Text(marked(note, result.emulated)), soft_wrap=True)
    finish(result, console, json_path)
    show_doubts(result, console)


def finish(result: Result, console: Console, json_path: Path | None) -> None:
    """Write the result file; raises SystemExit when a check failed."""
    for name, passed in result.checks.items():
        if not passed:
            text = f"check failed: {name}; no speeds and no ratios are reported"
            console.print(Text(text, style="red"))
    if json_path is not None:
        result.write(json_path)
        console.print(Text(f"raw samples: {json_path}"), soft_wrap=True)
    if not result.passed:
        raise SystemExit(1)


def tell_late(result: Result) -> None:
    """A note of how often this machine was slower than the link of CXLKV_EMULATE, if that waits."""
    if told := result.late_text():
        result.notes.append(told)


def labelled(made: Table, label: str | None) -> Table:
    """The table, with what is emulated in its title."""
    if label:
        made.title = marked(str(made.title or ""), label).strip()
    return made


def table(result: Result) -> Table:
    """Metrics as median (low to high), then ratios; no times, speeds, ratios if a check failed. A
    column says what is emulated, where figures differ in that."""
    made = Table(title=f"cxlkv bench {result.case}")
    for column in ("figure", "median", "low to high", "unit"):
        side: Literal["left", "right"] = "left" if column in ("figure", "unit") else "right"
        made.add_column(column, justify=side, no_wrap=column != "figure", overflow="fold")
    made.add_column("emulated", overflow="fold")
    for name, metric in result.metrics.items():
        if not result.passed and lower_is_better(metric.unit) is not None:
            continue  # a count, of violations say, is shown all the more
        unit, scale = metric.unit, 1.0
        if unit.startswith("bytes"):
            unit, scale = unit.replace("bytes", "MiB", 1), 1 / (1 << 20)
        low, high = scale * min(metric.samples), scale * max(metric.samples)
        interval, label = f"{low:.4g} to {high:.4g}", result.label_of(name) or ""
        made.add_row(name, f"{scale * metric.median:.4g}", interval, unit, label)
    for name, value in result.ratios.items() if result.passed else ():
        made.add_row(name, f"{value:.3g}", "", "ratio", result.label_of(name) or "")
    if not result.links:
        made.columns.pop()
    return made
