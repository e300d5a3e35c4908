"""The result of the demo on a text, for other programs and for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from cxlkv.bench.lab.statistics import Bounded, bootstrap_blocks
from cxlkv.bench.result import Result
from cxlkv.demo.text.measure import Plan, Row, Track
from cxlkv.layout import format_bytes
from cxlkv.ndp.engine import STAGED_TOKENS

TIE_NATS = {"float32": 0.001, "float16": 0.05, "bfloat16": 0.25}
"""Two best tokens count as tied when full attention's log-likelihoods are as near as this."""
DIVERGENCE_NATS = {"float32": 1e-4, "float16": 0.002, "bfloat16": 0.02}
"""How far all pages' distributions may lie from full attention's, on average: rounding only.

Not perplexity: over a few tokens, chance moves it further than a fault would.
"""


@dataclass(frozen=True)
class Found:
    """Full attention by transformers alone, and a row for each form, all pages first."""

    plan: Plan
    dtype: str
    full: Track
    rows: Sequence[Row]

    @property
    def every(self) -> Row:
        """All pages, through the pool."""
        assert self.rows[0].form.method == "full"
        return self.rows[0]

    @property
    def cache_bytes(self) -> float:
        """Keys and values that a step with all pages reads."""
        return self.every.read.fetched / self.every.read.steps

    @property
    def ties(self) -> int:
        """Steps at which all pages have another best token than full attention."""
        return round(len(self.full.best) * (1 - self.every.track.agreement(self.full)))

    def loss(self, row: Row) -> Bounded:
        """By which share a form's perplexity is higher than full attention's."""
        return bootstrap_blocks(
            [own - full for own, full in zip(row.track.losses, self.full.losses, strict=True)]
        )


def result_of(found: Found) -> Result:
    """The result file's content: checks, metrics, ratios."""
    full, every = found.full, found.every.track
    result = Result("demo-text")
    result.checks = {
        "all_pages_have_the_best_tokens_of_full_attention": (
            max(every.gaps) <= TIE_NATS[found.dtype]
        ),
        "all_pages_have_the_distributions_of_full_attention": (
            every.divergence <= DIVERGENCE_NATS[found.dtype]
        ),
    }
    result.measure("perplexity_full", [full.perplexity], "perplexity")
    result.measure("loss_full", full.losses, "nats a token")
    result.measure("cache_bytes", [found.cache_bytes], "bytes a token")
    for row in found.rows:
        measure_row(result, row, found)
    result.notes += [*fallbacks(found), tie_note(found)]
    return result


def measure_row(result: Result, row: Row, found: Found) -> None:
    """The metrics and ratios of one form."""
    track, read = row.track, row.read
    name = f"{row.form.method}_at_{100 * row.form.share:g}_percent"
    result.measure(f"pages_{name}", [row.pages], "pages")
    result.measure(f"perplexity_{name}", [track.perplexity], "perplexity")
    result.measure(f"loss_{name}", track.losses, "nats a token")
    result.measure(f"agreement_{name}", [track.agreement(found.full)], "share of tokens")
    result.measure(f"divergence_{name}", [track.divergence], "nats a token")
    result.measure(f"bytes_scored_{name}", [read.scored / read.steps], "bytes a token")
    result.measure(f"bytes_fetched_{name}", [read.fetched / read.steps], "bytes a token")
    result.ratios |= {
        f"perplexity_{name}_to_full": track.perplexity / found.full.perplexity,
        f"bytes_scored_{name}_to_cache_bytes": read.scored / read.steps / found.cache_bytes,
        f"bytes_fetched_{name}_to_cache_bytes": read.fetched / read.steps / found.cache_bytes,
    }


def fallbacks(found: Found) -> list[str]:
    """Say in words where a method did not do what its name says."""
    fell = [row.form.share for row in found.rows if row.form.method == "two_stage"
            and not row.read.sketched]  # fmt: skip
    if not fell:
        return []
    tokens = found.plan.page_count * found.plan.page_tokens
    why = "too large a share of the pages, or keys too much alike"
    if tokens < STAGED_TOKENS:
        why = f"it reads sketches from {STAGED_TOKENS:,} tokens on, here are {tokens:,}"
    shares = ", ".join(percent(share) for share in fell)
    return [f"two_stage read every key, as exact does, at {shares}: {why}"]


def tie_note(found: Found) -> str:
    """Say in words what the first check found."""
    steps, every = len(found.full.best), found.every.track
    return (
        f"all pages: the best token of full attention in {steps - found.ties} of {steps} steps, "
        f"another in {found.ties}, at most {max(every.gaps):.2g} nats less likely to it; "
        f"{TIE_NATS[found.dtype]:g} nats in {found.dtype} pass as a tie; mean divergence "
        f"{every.divergence:.2g} nats, of {DIVERGENCE_NATS[found.dtype]:g} allowed"
    )


def table_of(found: Found) -> Table:
    """Format the result for 80 columns: a line for each form, full attention last."""
    table = Table(
        title=f"{found.plan.steps} tokens predicted, each behind {found.plan.context:,} or more; "
        f"keys and values: {format_bytes(round(found.cache_bytes))}\n"
        f"perplexity of full attention, by transformers alone: {number(found.full.perplexity)}",
        caption="pages: the forced ones (first, last two) counted; perplexity: over that of full\n"
        "attention, and 95 % interval (bootstrap of blocks); agrees: has its most likely\n"
        "token; KL: nats of divergence from it; scored, fetched: bytes that one request\n"
        "reads, of all keys and values",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    heads = "method|share|pages|perplexity\nto full|95 %\ninterval|agrees|KL|scored|fetched"
    for name in heads.split("|"):
        table.add_column(
            name, justify="left" if name == "method" else "right", vertical="bottom", no_wrap=True
        )
    method = "full"
    for row in found.rows:
        if row.form.method != method:
            table.add_section()
        method = row.form.method
        table.add_row(*cells(row, found), style="dim" if method == "random" else None)
    return table


def cells(row: Row, found: Found) -> list[str | Text]:
    loss, read = found.loss(row), row.read
    every = found.cache_bytes * read.steps
    return [
        "all pages" if row.form.method == "full" else row.form.method,
        percent(row.form.share),
        str(row.pages),
        number(math.exp(loss.mean)),
        f"{number(math.exp(loss.low))}-{number(math.exp(loss.high))}",
        percent(row.track.agreement(found.full)),
        f"{row.track.divergence:.4f}"
        if row.track.divergence < 10
        else number(row.track.divergence),
        percent(read.scored / every),
        percent(read.fetched / every),
    ]


def number(value: float) -> str:
    """In seven columns at most, with three decimals where they fit."""
    return f"{value:.3f}" if value < 1000 else f"{value:.1f}" if value < 1e5 else f"{value:.1e}"


def percent(share: float) -> str:
    """In six columns: "5 %", "4.7 %", "100 %"; only what is all is called so."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.9):.3g} %"
