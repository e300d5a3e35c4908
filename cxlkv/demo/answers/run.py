"""Runs the demo's answers: shows them as they come, then a table, a picture and a result."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cxlkv.adapters.transformers import layout_of
from cxlkv.bench.cli import labelled
from cxlkv.bench.result import Result
from cxlkv.demo import smollm2
from cxlkv.demo.answers.ask import FORMS, Asked, Examiner, Question, handbook, quicker_threads
from cxlkv.demo.answers.picture import WORDS, draw, figures_of
from cxlkv.demo.progress import finish, progress_of
from cxlkv.demo.text.inputs import quiet
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.pool import CXLPool

SHARE = 0.10


def run(
    folder: Path,
    json_path: Path | None = None,
    picture: Path | None = None,
    console: Console | None = None,
    encoding: str = "none",
) -> bool:
    """Ask all questions; True when chosen pages answer as full attention does, but for a few.

    folder: the model's, as smollm2.prepare() returns it. encoding: what the pool keeps keys and
    values as; transformers' own cache, with all of them, has them as the model made them.
    """
    console = console or Console()
    document, questions = handbook()
    with quiet():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    layout = layout_of(model, encoding=encoding)
    capacity = 2 * 8192 * layout.stored_token_bytes
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity) as pool:
        examiner = Examiner(model, tokenizer, pool, SHARE)
        tokens = examiner.tokens(document)
        with progress_of(console, len(tokens)) as progress:
            progress.begin(f"reading {len(tokens):,} tokens")
            examiner.read(tokens, progress.advance)
        kv_bytes = len(tokens) * layout.token_bytes
        console.print(
            Text(
                f"{smollm2.NAME} has read {len(tokens):,} tokens: {format_bytes(kv_bytes)} of keys "
                f"and values{kept_text(layout, len(tokens))}. Each step now reads "
                f"{100 * SHARE:g} % of the pages."
            ),
            soft_wrap=True,
        )
        threads = torch.get_num_threads()
        with quicker_threads(examiner.step) as quicker:
            if quicker < threads:
                console.print(
                    f"Other programs use these cores: a step takes less time with {quicker} thread "
                    f"than with {threads}. The speeds below say little.",
                    soft_wrap=True,
                )
            asked = [ask(examiner, question, console) for question in questions]
        examiner.release()
    result = result_of(asked, kv_bytes)
    console.print(labelled(table_of(asked, kv_bytes), result.emulated))
    console.print(
        "What a token read: from the pool, what was scored to choose pages "
        f"({scored_text(layout)}) and the pages themselves.",
        soft_wrap=True,
    )
    title = f"{smollm2.NAME} answers from {100 * SHARE:g} % of what it has read"
    if picture is not None:
        draw(picture, title, asked, len(tokens), layout.page_tokens)
        console.print(Text(f"Picture: {picture}"), soft_wrap=True)
    return finish(result, console, json_path)


def kept_text(layout: KVLayout, tokens: int) -> str:
    if not layout.is_encoded:
        return ""
    kept = format_bytes(tokens * layout.stored_token_bytes)
    return f", which the pool keeps as {layout.encoding} in {kept}"


def scored_text(layout: KVLayout) -> str:
    if layout.sketches(None):
        return "sketches of 2 bits a channel, and the keys of the best"
    return f"all keys, in {layout.k_encoding}"


def ask(examiner: Examiner, question: Question, console: Console) -> Asked:
    """One question, its answers shown as they grow; without a terminal, when they are whole."""
    if not console.is_terminal:
        *_, asked = examiner.ask(question)
        console.print(answers_of(asked), "")
        return asked
    with Live(console=console, refresh_per_second=12) as live:
        for asked in examiner.ask(question):
            live.update(answers_of(asked))
    return asked


def answers_of(asked: Asked) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_row("", Text(asked.question.question, style="bold"))
    for form in FORMS:
        answer = asked.answers[form]
        right = asked.question.is_right(answer.text)
        table.add_row(
            Text(WORDS[form], style="dim"), Text(answer.text, style="green" if right else "red")
        )
    return table


def table_of(asked: list[Asked], kv_bytes: int) -> Table:
    table = Table(title=f"{len(asked)} questions; keys and values: {format_bytes(kv_bytes)}")
    for name in ("", "right", "read a token", "of all", "tokens/s"):
        table.add_column(name, justify="right" if name else "left")
    for form in FORMS:
        right, megabytes, speed = figures_of(asked, form)
        share = 1e6 * megabytes / kv_bytes
        table.add_row(
            WORDS[form], f"{right:g}", f"{megabytes:.1f} MB", f"{100 * share:.1f} %", f"{speed:.1f}"
        )
    return table


def result_of(asked: list[Asked], kv_bytes: int) -> Result:
    result = Result("demo-answers")
    full, selected, random = (figures_of(asked, form)[0] for form in FORMS)
    result.checks = {
        "full_attention_answers": full >= 0.8 * len(asked),
        "chosen_pages_keep_80_percent_of_the_answers": selected >= 0.8 * full,
        "random_pages_keep_less_than_half": random < 0.5 * full,
    }
    result.measure("kv_bytes", [kv_bytes], "bytes")
    for form in FORMS:
        right, megabytes, speed = figures_of(asked, form)
        result.measure(f"right_{form}", [right], "answers")
        result.measure(f"read_{form}", [1e6 * megabytes], "bytes a token")
        seconds = [1e3 * a.answers[form].seconds / a.answers[form].steps for a in asked]
        result.measure(f"token_time_{form}", seconds, "ms")
        result.ratios[f"right_{form}_to_full"] = right / full if full else 0.0
        result.ratios[f"read_{form}_to_kv_bytes"] = 1e6 * megabytes / kv_bytes
        result.ratios[f"speed_{form}_to_full"] = speed / figures_of(asked, "full")[2]
    return result
