"""`cxlkv demo`: a trained transformer answers from a pool, of which only chosen pages are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from transformers import LlamaForTokenClassification
from transformers.utils import logging

from cxlkv.adapters.transformers import layout_of
from cxlkv.bench.cli import labelled
from cxlkv.bench.result import Result
from cxlkv.demo.measure import TRAINED_TOKENS, Asked, Examiner, Plan, Row
from cxlkv.demo.picture import draw
from cxlkv.demo.progress import tell
from cxlkv.emulation.link import marked
from cxlkv.errors import MemoryShortError
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.machine.topology import probe
from cxlkv.pool import CXLPool

MODEL = Path(__file__).parent / "model"
SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARE = 0.05
"""Up to this share of the pages must keep the answers."""


def run(
    json_path: Path | None = None,
    picture: Path | None = None,
    plan: Plan | None = None,
    console: Console | None = None,
) -> bool:
    """Measure, print, draw into `picture`, write the result file; True when all checks hold.

    Works offline. Raises OSError where a file cannot be written, MemoryShortError where there is
    no memory for the pool (tens of MiB).
    """
    plan = plan or Plan()
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 100)
    model = load_model()
    with demo_pool(layout_of(model), plan) as (pool, place):
        console.print(Text(f"The KV cache lies in {place}."), soft_wrap=True)
        examiner = Examiner(model, pool, plan)
        full, rows, notes = measure(examiner, console)
        kv_bytes = examiner.kv_bytes()
    result = result_of(plan, full, rows, kv_bytes)
    result.notes += [f"memory: {place}", *notes, *notes_on(plan)]
    console.print(labelled(table_of(plan, full, rows, kv_bytes), result.emulated))
    for note in notes_on(plan):
        console.print(Text(note), soft_wrap=True)
    if picture is not None:
        title = f"{len(full.right)} questions about {plan.tokens:,} tokens, from a far-memory pool"
        draw(picture, title, rows, full, kv_bytes)
        console.print(Text(f"Picture: {picture}"), soft_wrap=True)
    return finish(result, console, json_path)


def finish(result: Result, console: Console, json_path: Path | None) -> bool:
    """Write the result file, print a line for each check, then the verdict, which is returned."""
    if told := result.late_text():
        result.notes.append(told)
        console.print(Text(marked(told, result.emulated)), soft_wrap=True)
    if json_path is not None:
        result.write(json_path)
        console.print(Text(f"Result file: {json_path}"), soft_wrap=True)
    for name, holds in result.checks.items():
        mark = Text("  yes  " if holds else "  NO   ", style="green" if holds else "bold red")
        console.print(mark + Text(name.replace("_", " "), style="default"))
    verdict = "PASS" if result.passed else "FAIL"
    console.print(Text(f"demo: {verdict}", style="bold green" if result.passed else "bold red"))
    return result.passed


def load_model() -> LlamaForTokenClassification:
    """The model in the package, its bfloat16 weights widened to float32."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: LlamaForTokenClassification = LlamaForTokenClassification.from_pretrained(
        MODEL, dtype=torch.float32, local_files_only=True
    )
    return model


@contextmanager
def demo_pool(layout: KVLayout, plan: Plan) -> Iterator[tuple[CXLPool, str]]:
    """A pool for the plan's contexts, and where it lies: /dev/shm if there is room, else memory."""
    tokens = plan.tokens * len(plan.seeds)
    # Digests, sketches, headers and the rounding to extents come to less than a third of this.
    capacity = tokens * layout.stored_token_bytes * 4 // 3 + (4 << 20)
    path = SHARED_MEMORY / f"cxlkv-demo-{os.getpid()}.pool"
    try:
        pool = CXLPool.create(path, layout=layout, capacity=capacity)
        place = str(path)
    except (MemoryShortError, OSError, ValueError):
        pool = CXLPool.create("anonymous:", layout=layout, capacity=capacity)
        place = f"anonymous memory, as {SHARED_MEMORY} has no room"
    try:
        nodes = len(probe().nodes)
        kind = pool.describe()["page_kind"]
        where = "one NUMA node" if nodes <= 1 else f"{nodes} NUMA nodes, placed by the kernel"
        yield pool, f"{place} ({format_bytes(capacity)}, {kind} pages, on {where})"
    finally:
        pool.close()
        if pool.path is not None:
            CXLPool.remove(path)


def measure(examiner: Examiner, console: Console) -> tuple[Asked, list[Row], list[str]]:
    """Measure full attention, then each budget, showing progress; returns the rows and notes."""
    plan = examiner.plan
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def begin(step: str) -> None:
            tell(console, step)
            progress.update(task, description=step)

        begin(f"reading {len(plan.seeds)} x {plan.tokens:,} tokens")
        prefill_s = examiner.prefill()
        examiner.warm_up()
        begin("asking with full attention, transformers' own cache")
        full = examiner.ask_in_full()
        rows = []
        for share in plan.shares:
            begin(f"asking with {100 * share:g} % of the pages")
            rows.append(examiner.row(share))
        examiner.release()
    tokens = plan.tokens * len(plan.seeds)
    return full, rows, [
        f"prefill through the pool: {tokens} tokens in {prefill_s:.2f} s",
        f"questions in steps of {plan.together}, on forks that share their context's pages; times "
        "are of whole model steps; DynamicCache holds a copy of the context for each question, and "
        "its update copies that again in each step, which is part of its time",
        "scored and fetched bytes are for a question, all layers; questions of one step are scored "
        "in one pass over the pages that they share, of which each has its part; attention mass is "
        "exp(lse of the pages - lse of all), the mean over heads, layers and questions",
    ]  # fmt: skip


def notes_on(plan: Plan) -> list[str]:
    """Explain how a plan differs from the default one."""
    notes = []
    if plan.method != Plan.method:
        notes.append(f"pages are chosen by method {plan.method!r}")
    if plan.tokens > TRAINED_TOKENS:
        notes.append(
            f"the model was trained for {TRAINED_TOKENS:,} tokens: full attention may lose answers "
            "here, too, and selections are held to what it gives"
        )
    return notes


def result_of(plan: Plan, full: Asked, rows: list[Row], kv_bytes: int) -> Result:
    """The result file's content: checks, metrics, ratios."""
    result = Result("demo")
    every = [row for row in rows if row.share == 1.0]
    small = [row for row in rows if row.share <= SMALL_SHARE]
    wanted = full.right_share
    if plan.tokens <= TRAINED_TOKENS:
        result.checks["full_attention_right"] = wanted >= 0.95
    result.checks |= {
        "all_pages_equal": bool(every)
        and all(row.selected.answers == full.answers for row in every),
        "five_percent_keeps_95": bool(small)
        and max(row.selected.right_share for row in small) >= 0.95 * wanted,
        "random_keeps_under_30": bool(small)
        and max(row.random.right_share for row in small) < 0.30 * wanted,
    }
    result.measure("full_right", [wanted], "share of answers")
    result.measure("full_token_time", full.token_us, "us")
    result.measure("kv_bytes", [kv_bytes], "bytes")
    for row in rows:
        name = f"at_{100 * row.share:g}_percent"
        result.measure(f"right_{name}", [row.selected.right_share], "share of answers")
        result.measure(f"random_right_{name}", [row.random.right_share], "share of answers")
        result.measure(f"mass_{name}", [row.mass], "share of attention")
        result.measure(f"random_mass_{name}", [row.random_mass], "share of attention")
        result.measure(f"pages_{name}", [row.pages], "pages")
        result.measure(f"bytes_scored_{name}", [row.selected.bytes_scored], "bytes a token")
        result.measure(f"bytes_fetched_{name}", [row.selected.bytes_read], "bytes a token")
        token_time = result.measure(f"token_time_{name}", row.selected.token_us, "us")
        result.ratios |= {
            f"right_{name}_to_full": row.selected.right_share / wanted if wanted else 0.0,
            f"random_right_{name}_to_full": row.random.right_share / wanted if wanted else 0.0,
            f"bytes_fetched_{name}_to_kv_bytes": row.selected.bytes_read / kv_bytes,
            f"bytes_scored_{name}_to_kv_bytes": row.selected.bytes_scored / kv_bytes,
            f"token_time_{name}_to_dynamic_cache": token_time.median
            / result.metrics["full_token_time"].median,
        }
    return result


def table_of(plan: Plan, full: Asked, rows: list[Row], kv_bytes: int) -> Table:
    """Format the result for a terminal: a line for each budget, full attention last."""
    part = f"a question's part of a pass for {plan.together}" if plan.together > 1 else "a question"
    table = Table(
        title=f"{len(full.right)} questions about {plan.tokens:,} tokens; "
        f"keys and values: {format_bytes(kv_bytes)} a question",
        caption="forced pages (the first, the last two) counted; random: as many pages, drawn;\n"
        f"scored: bytes read to choose, {part};\n"
        "full: transformers' DynamicCache, which copies its context in each step",
    )
    for name in "pages|right|random|mass|random|scored|fetched|of KV|time".split("|"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        asked = row.selected
        table.add_row(
            f"{100 * row.share:g} % ({row.pages})",
            f"{asked.right_share:.3f}",
            Text(f"{row.random.right_share:.3f}", style="dim"),
            f"{row.mass:.3f}",
            Text(f"{row.random_mass:.3f}", style="dim"),
            format_bytes(round(asked.bytes_scored)),
            format_bytes(round(asked.bytes_read)),
            f"{100 * asked.bytes_read / kv_bytes:.1f} %",
            milliseconds(asked),
        )
    table.add_section()
    table.add_row(
        "full", f"{full.right_share:.3f}", "", "1.000", "", "", format_bytes(kv_bytes),
        "100.0 %", milliseconds(full),
    )  # fmt: skip
    return table


def milliseconds(asked: Asked) -> str:
    """The median time for a question."""
    times = sorted(asked.token_us)
    return f"{times[len(times) // 2] / 1e3:.2f} ms"
