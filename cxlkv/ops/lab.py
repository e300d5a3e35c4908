"""`cxlkv lab` measures what attending to chosen pages costs a trained model in quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cxlkv.ops.console import needing

lab_app = typer.Typer(
    help="Measure what attending to chosen pages costs a trained model in quality.",
    no_args_is_help=True,
)
Folder = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder of the run, cxlkv-lab or cxlkv-lab-quick; a killed run goes on."
    ),
]


Methods = Annotated[
    str, typer.Option(help="In place of these forms: methods of docs/methods.md, or all.")
]
Budgets = Annotated[str, typer.Option(help="With --methods: shares of the pages.")]
Texts = Annotated[
    int | None, typer.Option(help="Only so many texts, and as many contexts of tasks.", min=1)
]
Steps = Annotated[
    int | None, typer.Option(help="Only so many steps behind each text's prefix.", min=8)
]


@lab_app.command("run")
def lab_run(
    out: Folder = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few minutes, too little to conclude from.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model; SmolLM2-135M if not given.")
    ] = None,
    forms: Annotated[
        str,
        typer.Option(
            help="Only forms of these names, * for any characters, with commas between: "
            "'exact 5 %,*refresh*'. All pages are always there."
        ),
    ] = "",
    methods: Methods = "",
    budgets: Budgets = "0.02,0.05,0.15",
    texts: Texts = None,
    steps: Steps = None,
) -> None:
    """Measure all forms of selection against full attention on 16 texts and 200 questions.

    Writes lab.json, its page lab.html, lab.png and lab-heads.png into the folder. Takes some two
    hours on two cores; --quick a few minutes. Killed, it goes on where it stopped; several at once,
    on one folder, share the work: one for each core, with OMP_NUM_THREADS=1, is fastest. Exit code
    1 if a check does not hold. With --forms a folder of its own is wanted.
    """
    with needing("lab", "the lab"):
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
    if forms:
        plan = plan.only([pattern.strip() for pattern in forms.split(",")])
    if methods:
        plan = plan.of_methods(known_methods(methods), budgets, texts or METHOD_TEXTS)
        for reason in filter(None, map(peers.why_not, peers.NAMES)) if methods == "all" else ():
            console.print(Text(f"left out: {reason}"), soft_wrap=True)
    plan = plan.shorter(None if methods else texts, steps)
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


@lab_app.command("prefill")
def lab_prefill(
    out: Annotated[Path, typer.Option("--out", help="Folder of the result file.")] = Path(
        "cxlkv-lab-prefill"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Three shorter texts, too little to conclude from.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model; SmolLM2-135M if not given.")
    ] = None,
) -> None:
    """Measure what block-sparse prefill costs over dense prefill, on 16 texts.

    Writes lab-prefill.json into the folder, anew behind each text, and prints a table.
    """
    with needing("lab", "the lab"):
        from cxlkv.bench.lab import prefill
        from cxlkv.demo.smollm2 import prepare
    console = Console()
    plan = prefill.PrefillPlan.quick() if quick else prefill.PrefillPlan()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "lab-prefill.json"

    def tell(found: prefill.Readings) -> None:
        prefill.result_of(found).write(path)
        console.print(prefill.table_of(found))

    prefill.measure(model or prepare(console), plan, tell)
    console.print(Text(f"Result file: {path}"), soft_wrap=True)


@lab_app.command("encodings")
def lab_encodings(
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the run, cxlkv-lab-encodings; a killed run goes on."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three shorter texts, too little to conclude from.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model; SmolLM2-135M if not given.")
    ] = None,
    encodings: Annotated[
        str,
        typer.Option(help="Only encodings of these names, * for any characters: 'int8*;fp8'."),
    ] = "",
) -> None:
    """Measure what keys and values in few bits cost over full attention, on 16 texts.

    Writes lab-encodings.json and its picture lab-encodings.png into the folder. Takes some 40
    minutes; killed, it goes on with the next text. Several at once, on one folder, share the work.
    """
    with needing("lab", "the lab"):
        from cxlkv.bench.lab import encodings_report as report
        from cxlkv.bench.lab.encodings import CodesPlan, measure
        from cxlkv.demo.smollm2 import prepare
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 110)
    plan = CodesPlan.quick() if quick else CodesPlan()
    if encodings:
        plan = plan.only([pattern.strip() for pattern in encodings.split(";")])
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
