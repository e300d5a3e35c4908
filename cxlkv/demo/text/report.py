"""The result of the demo on a text, for other programs and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from cxlkv.bench.result import Result
from cxlkv.demo.text.measure import Plan, Row, Track
from cxlkv.layout import format_bytes

TIE_NATS = {"float32": 0.001, "float16": 0.05, "bfloat16": 0.25}
"""Two best tokens count as tied when full attention's log-likelihoods are as near as this."""
DIVERGENCE_NATS = {"float32": 1e-4, "float16": 0.002, "bfloat16": 0.02}
"""How far all pages' distributions may lie from full attention's, on average: rounding only.

Not perplexity: over a few tokens, chance moves it further than a fault would.
"""


@dataclass(frozen=True)
class Found:
    """Full attention by transformers alone, and a row for each budget, all pages last."""

    plan: Plan
    dtype: str
    full: Track
    rows: Sequence[Row]

    @property
    def every(self) -> Track:
        """All pages, through the pool."""
        assert self.rows[-1].share == 1
        return self.rows[-1].selected

    @property
    def ties(self) -> int:
        """Steps at which all pages have another best token than full attention."""
        return round(len(self.full.best) * (1 - self.every.agreement(self.full)))


def result_of(found: Found) -> Result:
    """The result file's content: checks, metrics, ratios."""
    full, every = found.full, found.every
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
    result.measure("token_time_full", full.step_us, "us")
    result.measure("cache_bytes", [every.bytes_read], "bytes a token")
    for row in found.rows:
        name = f"at_{100 * row.share:g}_percent"
        result.measure(f"pages_{name}", [row.pages], "pages")
        measure_track(result, name, row.selected, found)
        if row.random is not None:
            measure_track(result, f"random_{name}", row.random, found)
    result.notes.append(tie_note(found))
    return result


def measure_track(result: Result, name: str, track: Track, found: Found) -> None:
    """The metrics and ratios of one way to attend."""
    full, cache_bytes = found.full, found.every.bytes_read
    result.measure(f"perplexity_{name}", [track.perplexity], "perplexity")
    result.measure(f"loss_{name}", track.losses, "nats a token")
    result.measure(f"agreement_{name}", [track.agreement(full)], "share of tokens")
    result.measure(f"divergence_{name}", [track.divergence], "nats a token")
    result.measure(f"bytes_scored_{name}", [track.bytes_scored], "bytes a token")
    result.measure(f"bytes_fetched_{name}", [track.bytes_read], "bytes a token")
    token_time = result.measure(f"token_time_{name}", track.step_us, "us")
    result.ratios |= {
        f"perplexity_{name}_to_full": track.perplexity / full.perplexity,
        f"bytes_scored_{name}_to_cache_bytes": track.bytes_scored / cache_bytes,
        f"bytes_fetched_{name}_to_cache_bytes": track.bytes_read / cache_bytes,
        f"token_time_{name}_to_full": token_time.median / result.metrics["token_time_full"].median,
    }


def tie_note(found: Found) -> str:
    """Say in words what the first check found."""
    steps = len(found.full.best)
    return (
        f"all pages: the best token of full attention in {steps - found.ties} of {steps} steps, "
        f"another in {found.ties}, at most {max(found.every.gaps):.2g} nats less likely to it; "
        f"{TIE_NATS[found.dtype]:g} nats in {found.dtype} pass as a tie; mean divergence "
        f"{found.every.divergence:.2g} nats, of {DIVERGENCE_NATS[found.dtype]:g} allowed"
    )


def table_of(found: Found) -> Table:
    """Format the result for 80 columns: a line for each budget, full attention last."""
    full, cache_bytes = found.full, found.every.bytes_read
    table = Table(
        title=f"{found.plan.steps} tokens predicted, each behind {found.plan.context:,} or more; "
        f"keys and values: {format_bytes(round(cache_bytes))}",
        caption="pages: the forced ones (first, last two) counted; to full: over that of full\n"
        "attention, by transformers alone; agrees: has its most likely token; KL: nats\n"
        "of divergence from it; scored, fetched: bytes read, of all keys and values;\n"
        "random: as many pages, drawn",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    heads = "share|pages|perplexity|to full|agrees|KL|scored|fetched|random:\nperplexity|agrees"
    for name in heads.split("|"):
        table.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for row in found.rows:
        random = cells(row.random, full) if row.random else [""] * 4
        table.add_row(
            percent(row.share),
            str(row.pages),
            *cells(row.selected, full),
            percent(row.selected.bytes_scored / cache_bytes),
            percent(row.selected.bytes_read / cache_bytes),
            Text(random[0], style="dim"),
            Text(random[2], style="dim"),
        )
    table.add_section()
    table.add_row("full", "", number(full.perplexity))
    return table


def cells(track: Track, full: Track) -> list[str]:
    """Perplexity, its ratio to full attention's, agreement, divergence."""
    return [
        number(track.perplexity),
        number(track.perplexity / full.perplexity),
        percent(track.agreement(full)),
        f"{track.divergence:.4f}" if track.divergence < 10 else number(track.divergence),
    ]


def number(value: float) -> str:
    """In seven columns at most, with three decimals where they fit."""
    return f"{value:.3f}" if value < 1000 else f"{value:.1f}" if value < 1e5 else f"{value:.1e}"


def percent(share: float) -> str:
    """In six columns: "5 %", "4.7 %", "100 %"; only what is all is called so."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.9):.3g} %"
