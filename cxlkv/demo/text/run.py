"""`cxlkv demo --model PATH --text FILE`: what page budgets cost a local model on a text."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel

from cxlkv.adapters.transformers import layout_of
from cxlkv.demo.progress import finish, progress_of
from cxlkv.demo.text import inputs
from cxlkv.demo.text.measure import EVERY, TOKENS_MIN, Plan, Reading, Wanted
from cxlkv.demo.text.picture import draw
from cxlkv.demo.text.report import Found, fallbacks, result_of, table_of, tie_note
from cxlkv.errors import BadArgumentError, MemoryShortError
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.machine.topology import probe
from cxlkv.pool import CXLPool

TOKENS = 4096
RUN_PAGES = 16
EXTENT_PAGES = 64


def run(
    folder: Path,
    text: Path,
    tokens: int | None = None,
    rows: Wanted = EVERY,
    json_path: Path | None = None,
    picture: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Measure, print, draw into `picture`, write the result file; True when all checks hold.

    tokens: how many of the text are used, TOKENS if None; a text or a model that ends earlier sets
    the end. rows: of the table. Raises
    BadArgumentError, UnsupportedError and MemoryShortError before anything is computed, OSError
    where a file cannot be read or written.
    """
    console = console or Console()
    check_outputs(json_path, picture)
    config = inputs.read_config(folder)
    layout = layout_of(config)  # refuses what a pool cannot hold before the weights are read
    decoder = config.get_text_config(decoder=True)
    wanted, notes = token_limit(tokens, getattr(decoder, "max_position_embeddings", None))
    ids = inputs.read_tokens(folder, inputs.read_text(text, wanted), decoder.vocab_size)
    if len(ids) < TOKENS_MIN:
        raise BadArgumentError(
            f"{text} has {len(ids)} tokens; at least {TOKENS_MIN} are needed: give a longer text"
        )
    plan = Plan.of(min(wanted, len(ids)), rows)
    check_room(folder, layout, plan)
    model = inputs.read_model(folder)
    layout = layout_of(model, plan.page_tokens)
    name = folder.resolve().name
    notes = [
        f"model: {name}, a {type(model).__name__} of {model.num_parameters():,} parameters in "
        f"{layout.dtype}; text: {text.name}, its first {plan.tokens:,} tokens, {plan.context:,} of "
        f"them context",
        *notes,
    ]
    capacity = capacity_bytes(layout, plan)
    notes.append(f"keys and values: a pool of {format_bytes(capacity)} in anonymous memory")
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    # Anonymous, so that nothing is left of it, even where the system ends the process for memory.
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity) as pool:
        found, more = measure(model, pool, ids, plan, console)
    result = result_of(found)
    result.notes[:0] = [*notes, *more]
    console.print(table_of(found))
    for note in (*fallbacks(found), tie_note(found)):
        console.print(Text(note), soft_wrap=True)
    if picture is not None:
        draw(picture, name, text.name, found)
        console.print(Text(f"Picture: {picture}"), soft_wrap=True)
    return finish(result, console, json_path)


def check_outputs(json_path: Path | None, picture: Path | None) -> None:
    """Raise now what writing the files would raise minutes later."""
    for path in (json_path, picture):
        if path is not None and not path.parent.is_dir():
            raise BadArgumentError(f"{path}: the folder {path.parent} does not exist")


def token_limit(tokens: int | None, positions: int | None) -> tuple[int, list[str]]:
    """How many tokens of a text to use, at most; and a note where the model sets the limit."""
    if tokens is not None and tokens < TOKENS_MIN:
        raise BadArgumentError(f"--tokens {tokens}: at least {TOKENS_MIN} are needed")
    wanted = TOKENS if tokens is None else tokens
    if positions is None or positions >= wanted:
        return wanted, []
    if positions < TOKENS_MIN:
        raise BadArgumentError(
            f"the model takes {positions} tokens; at least {TOKENS_MIN} are needed"
        )
    return positions, [f"the model takes no more than {positions:,} tokens"]


def capacity_bytes(layout: KVLayout, plan: Plan) -> int:
    """Room for the context, and for what each fork of it adds, which begins a run of its own."""
    runs = -(-(plan.steps // layout.page_tokens + 2) // RUN_PAGES) + 1
    pages = plan.page_count + len(plan.forms()) * runs * RUN_PAGES + EXTENT_PAGES
    # Digests, headers and padding come to less than a quarter of this.
    return pages * layout.page_tokens * layout.stored_token_bytes * 4 // 3 + (4 << 20)


def check_room(folder: Path, layout: KVLayout, plan: Plan) -> None:
    """Raises MemoryShortError where the machine cannot hold all of it at once, by far."""
    weights, pool = inputs.weights_bytes(folder), capacity_bytes(layout, plan)
    own = plan.tokens * layout.token_bytes
    memory = probe().memory
    # What a container uses now counts files that it read, the model's among them: so its limit.
    limits = [b for b in (memory.available_bytes, memory.cgroup_limit_bytes) if b is not None]
    if weights + pool + own > min(limits, default=weights + pool + own):
        raise MemoryShortError(
            f"{format_bytes(weights + pool + own)} wanted, {format_bytes(min(limits))} there: the "
            f"weights take {format_bytes(weights)}, the pool {format_bytes(pool)}, transformers' "
            f"own cache {format_bytes(own)}. Give fewer --tokens than {plan.tokens}, or a smaller "
            "model"
        )


def measure(
    model: PreTrainedModel, pool: CXLPool, ids: Tensor, plan: Plan, console: Console
) -> tuple[Found, list[str]]:
    """Measure every kind of attention, showing progress; returns the figures and notes."""
    reading = Reading(model, pool, ids, plan)
    with progress_of(console, plan.steps) as progress:
        progress.begin(f"reading {plan.context:,} tokens")
        own_s, pool_s = reading.prefill()
        progress.begin("predicting")
        full, rows = reading.decode(progress.advance)
    notes = [
        f"context read by transformers in {own_s:.2f} s, into the pool in {pool_s:.2f} s",
        "forms are rows of one batch, forks of the context's pages, fed with the text's own "
        "tokens; scored and fetched bytes are what one request alone reads for a token, in all "
        "layers without a window",
    ]
    shown = {row.form.share for row in rows}
    if left_out := [f"{100 * s:g} %" for s in plan.shares if s not in shown]:
        notes.append(f"left out, as the forced pages are as many: {', '.join(left_out)}")
    return Found(plan, pool.layout.dtype, full, rows), notes
