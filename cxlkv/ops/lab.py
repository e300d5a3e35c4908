"""`cxlkv lab` measures what attending to chosen pages costs a trained model in quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cxlkv.ops.console import needing

Texts = Annotated[
    int | None, typer.Option(help="run: only so many texts, and as many contexts of tasks.", min=1)
]

Prefix = Annotated[
    int | None,
    typer.Option(help="run: tokens that are read before a text's steps, 7000.", min=1000),
]


def lab(
    what: Annotated[str, typer.Argument(help="run, prefill or encodings.", metavar="WHAT")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run, cxlkv-lab...; a killed run goes on there."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Some minutes, too little to conclude from.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model; SmolLM2-135M if not given.")
    ] = None,
    forms: Annotated[
        str,
        typer.Option(
            help="run, encodings: only those of these names, * for any characters: "
            "'exact 5 %,*refresh*', 'int8*;fp8'. All pages are always there."
        ),
    ] = "",
    methods: Annotated[
        str,
        typer.Option(help="run: in place of these forms, methods of docs/methods.md, or all."),
    ] = "",
    budgets: Annotated[
        str, typer.Option(help="With --methods: shares of the pages.")
    ] = "0.02,0.05,0.15",
    texts: Texts = None,
    prefix: Prefix = None,
) -> None:
    """Measure what attending to chosen pages costs a trained model in quality, on 16 texts.

    run: all forms of selection against full attention, on 200 questions, too; lab.json, lab.html,
    lab.png and lab-heads.png in the folder. Some two hours on two cores. With --forms a folder of
    its own is wanted. prefill: what block-sparse prefill costs over dense prefill. encodings: what
    keys and values in few bits cost; some 40 minutes. Killed, it goes on where it stopped; several
    at once, on one folder, share the work: one for each core, with OMP_NUM_THREADS=1, is fastest.
    Exit code 1 if a check does not hold.
    """
    with needing("lab", "the lab"):
        if what == "run":
            return run_forms(out, quick, model, forms, methods, budgets, texts, prefix)
        if (forms and what == "prefill") or methods or texts or prefix:
            raise typer.BadParameter(f"--forms, --methods, --texts, --prefix: not with {what}")
        if what == "prefill":
            return run_prefill(out, quick, model)
        if what == "encodings":
            return run_encodings(out, quick, model, forms)
    raise typer.BadParameter(f"{what!r} is none of run, prefill, encodings")


def run_forms(
    out: Path | None,
    quick: bool,
    model: Path | None,
    forms: str,
    methods: str,
    budgets: str,
    texts: int | None,
    prefix: int | None,
) -> None:
    from cxlkv.bench import page
    from cxlkv.bench.lab import methods as table
    from cxlkv.bench.lab import peers, picture, report
    from cxlkv.bench.lab.run import load_units, run
    from cxlkv.bench.lab.units import METHOD_TEXTS, Plan, known_methods
    from cxlkv.demo.smollm2 import prepare
    from cxlkv.demo.text import inputs

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 170)
    plan = Plan.quick() if quick else Plan()
    if prefix:
        plan = plan.behind(prefix)
    if forms:
        plan = plan.only([pattern.strip() for pattern in forms.split(",")])
    if methods:
        plan = plan.of_methods(known_methods(methods), budgets, texts or METHOD_TEXTS)
        for reason in filter(None, map(peers.why_not, peers.NAMES)) if methods == "all" else ():
            console.print(Text(f"left out: {reason}"), soft_wrap=True)
    plan = plan.shorter(None if methods else texts)
    folder = model or prepare(console)
    out = out or Path("cxlkv-lab-quick" if quick else "cxlkv-lab")
    if elsewhere := run(out, folder, plan, console):
        text = f"Another process on {out} measures {', '.join(elsewhere)} and writes the page."
        console.print(Text(f"{text} If it is gone, run this again."), soft_wrap=True)
        return
    units = load_units(out, plan)
    found = report.find(plan, units, folder.name)
    result = report.result_of(found)
    console.print(report.fitting_table(found, console))
    for note in result.notes:
        console.print(Text(note), soft_wrap=True)
    if plan.timed:
        table.measure_times(out, result)
    result.write(out / "lab.json")
    page.write([out / "lab.json"], out / "lab.html")
    picture.draw(out, found, units)
    if plan.timed:
        table.write(out, found, inputs.read_config(folder), report.failed_checks(result))
    files = f"Result file: {out / 'lab.json'}; page: {out / 'lab.html'}"
    files += f"; tables: {out / 'methods.md'}" if plan.timed else ""
    console.print(Text(files), soft_wrap=True)
    end_by(report.failed_checks(result))


def end_by(failed: list[str]) -> None:
    """Exit code 1 where a check failed, with its name."""
    if failed:
        text = f"Failed checks: {', '.join(failed)}. These figures do not count: what each check "
        text += "is for is in docs/how-to/lab.md, 'What can fail'."
        Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)
        raise typer.Exit(1)


def run_prefill(out: Path | None, quick: bool, model: Path | None) -> None:
    """Writes lab-prefill.json into the folder, anew behind each text, and prints a table."""
    from cxlkv.bench.lab import prefill
    from cxlkv.demo.smollm2 import prepare

    console = Console()
    plan = prefill.PrefillPlan.quick() if quick else prefill.PrefillPlan()
    out = out or Path("cxlkv-lab-prefill")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "lab-prefill.json"

    def tell(found: prefill.Readings) -> None:
        prefill.result_of(found).write(path)
        console.print(prefill.table_of(found))

    prefill.measure(model or prepare(console), plan, tell)
    console.print(Text(f"Result file: {path}"), soft_wrap=True)


def run_encodings(out: Path | None, quick: bool, model: Path | None, forms: str) -> None:
    """Writes lab-encodings.json and its picture lab-encodings.png into the folder."""
    from cxlkv.bench.lab import encodings_report as report
    from cxlkv.bench.lab.encodings import CodesPlan, measure
    from cxlkv.demo.smollm2 import prepare

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 110)
    plan = CodesPlan.quick() if quick else CodesPlan()
    if forms:
        plan = plan.only([pattern.strip() for pattern in forms.split(";")])
    folder = model or prepare(console)
    out = out or Path("cxlkv-lab-encodings-quick" if quick else "cxlkv-lab-encodings")
    if elsewhere := measure(out, folder, plan, console):
        text = f"Another process on {out} reads {', '.join(elsewhere)} and writes the result."
        console.print(Text(f"{text} If it is gone, run this again."), soft_wrap=True)
        return
    found = report.find(out, plan, folder)
    console.print(report.table_of(found))
    report.result_of(found).write(out / "lab-encodings.json")
    report.draw(out / "lab-encodings.png", found)
    console.print(Text(f"Result file: {out / 'lab-encodings.json'}"), soft_wrap=True)
