"""What bytes buy: recall of pages and attention mass of each way to select, source by source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from cxlkv.bench import sources
from cxlkv.bench.quality import EXACT, Way, Weighed, mean, weigh, worst_decile
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.result import Result
from cxlkv.bench.sources import Taken
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import STAGED_TOKENS


@dataclass(frozen=True)
class Size:
    """Contexts of 16K and 64K tokens; a page more than that, so that sketches are read of both."""

    short: int = 16_384
    long: int = 65_536
    queries: int = 64
    shares: tuple[float, ...] = (0.01, 0.02, 0.05, 0.10)
    recalls: tuple[float, ...] = (0.8, 0.9, 0.95, 0.98, 0.99, 0.999)

    @property
    def ways(self) -> list[Way]:
        return [Way("digest"), *(Way("two_stage", recall) for recall in self.recalls), EXACT]

    def tokens(self, context: int) -> int:
        """1,024 pages that are not forced are there before the first query."""
        return context + 64 + self.queries


QUICK = Size(long=16_384, queries=8, shares=(0.05,), recalls=(0.9, 0.98))


def named_sources(
    size: Size, model: Path | None, text: Path | None = None
) -> dict[str, Callable[[], list[Taken]]]:
    """What the figures are of, by name; a model's passes are run when asked for."""
    short, long, queries = size.tokens(size.short), size.tokens(size.long), size.queries
    found: dict[str, Callable[[], list[Taken]]] = {
        f"demo_{thousands(size.short)}": lambda: sources.demo(short, queries),
        f"demo_{thousands(size.long)}": lambda: sources.demo(long, queries),
        f"text_{thousands(size.short)}": lambda: sources.text(short, queries),
        f"gaussian_made_up_{thousands(size.long)}": lambda: sources.gaussian(long, queries),
        f"clustered_made_up_{thousands(size.long)}": lambda: sources.clustered(long, queries),
    }
    if model is not None:
        found[model.resolve().name] = lambda: sources.folder(model, short, queries, text=text)
    return found


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def run(
    result: Result,
    size: Size = Size(),
    model: Path | None = None,
    text: Path | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, list[Weighed]]:
    """Metrics SOURCE_SHARE_percent_WAY_{bytes_share,recall,mass,mass_to_exact}; rows by source.

    Ratios are the means over heads at 5 % of the pages.
    """
    found = {}
    for source, taken in named_sources(size, model, text).items():
        progress(source)
        layers = taken()
        rows, agreement = weigh(layers, size.shares, size.ways)
        tokens = len(layers[0].keys)
        few = "" if tokens >= STAGED_TOKENS else "; two_stage reads every key of so few"
        result.notes.append(f"{source}: {tokens:,} tokens{few}")
        result.measure(f"{source}_agreement_with_torch", [agreement], "share of pages")
        result.checks[f"{source}_exact_agrees_with_torch"] = agreement > 0.99
        for row in rows:
            add(result, source, row)
        found[source] = rows
    result.notes += notes(size)
    return found


def command(options: Options, say: Say) -> Shown:
    """On each source of keys, and on the model in a folder if one is given."""
    if options.text and not options.model:
        raise BadArgumentError("--text goes with --model, which reads it")
    result, size = Result("recall"), QUICK if options.quick else Size()
    found = run(result, size, options.model, options.text, progress=say)

    def draw(path: Path) -> None:
        from cxlkv.bench import pictures

        pictures.recall(found, path)

    return Shown(result, [table(found)], draw=draw)


def add(result: Result, source: str, row: Weighed) -> None:
    name = f"{source}_{100 * row.share:g}_percent_{row.way}"
    result.measure(f"{name}_bytes_share", row.bytes_share, "share of the keys' bytes, by layer")
    result.measure(f"{name}_recall", row.recall, "share of exact's pages, by kv head")
    result.measure(f"{name}_mass", row.mass, "share of attention, by head")
    result.measure(f"{name}_mass_to_exact", row.mass_to_exact, "share of exact's, by head")
    if row.share == 0.05:
        result.ratios[f"{name}_bytes_share"] = mean(row.bytes_share)
        result.ratios[f"{name}_recall"] = mean(row.recall)
        result.ratios[f"{name}_mass_to_exact"] = mean(row.mass_to_exact)


def notes(size: Size) -> list[str]:
    return [
        f"each source: its last {size.queries} queries, decoded one after the other, all layers "
        "without a window; pages of 16 tokens; keys in bfloat16",
        "recall and mass leave out the pages that are forced in: the first, and the last two; "
        "mass is of the attention to the others, a head's sum over its queries",
        "bytes are those read to choose; K and V of the chosen pages are read after that",
        "gaussian and clustered are made up, and say little about a model's keys; the demo's model "
        "and the text's were trained for 16,384 tokens",
    ]


def table(found: dict[str, list[Weighed]]) -> Table:
    """A line for each source, budget and way."""
    made = Table(title="cxlkv bench recall: means over heads; in brackets, what nine of ten reach")
    for column in ("source", "budget", "way"):
        made.add_column(column, no_wrap=True)
    for column in ("bytes", "recall", "mass", "of exact's mass"):
        made.add_column(column, justify="right", no_wrap=True)
    for source, rows in found.items():
        for row in rows:
            made.add_row(
                source,
                f"{100 * row.share:g} %",
                str(row.way).replace("_0", " 0"),
                f"{mean(row.bytes_share):.3f}",
                *(
                    f"{mean(samples):.3f} ({worst_decile(samples):.3f})"
                    for samples in (row.recall, row.mass, row.mass_to_exact)
                ),
            )
        made.add_section()
    return made
