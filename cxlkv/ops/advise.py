"""`cxlkv advise` says whether a tier pays on this machine for a model, and from which length on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cxlkv.emulation.link import marked
from cxlkv.errors import (
    BadArgumentError,
    CXLKVError,
    GeometryError,
    NotAPoolError,
    PoolMissingError,
    UnsupportedError,
)
from cxlkv.layout import KVLayout, differences, parse_share
from cxlkv.machine.costs import Costs, Decision, Prefill, Verdict, format_seconds
from cxlkv.machine.sizes import parse_tokens
from cxlkv.machine.state import write_whole
from cxlkv.ndp.engine import SHARE
from cxlkv.ndp.tuning import current
from cxlkv.ops.console import LayoutText
from cxlkv.ops.models import layout_of_text
from cxlkv.ops.top import plain
from cxlkv.pool import Pool

if TYPE_CHECKING:
    from cxlkv.bench.result import Result

TOKENS = (1024, 4096, 16384, 65536)
DECODE_TOKENS = 128  # after each hit
QUERIES_A_HEAD = 4
DISK = Path("/var/tmp")
DOUBTS_SHOWN = 3
Share = Annotated[
    str, typer.Option(help="Of the pages that a step attends to, whichever way is taken: 5%.")
]
Speeds = Annotated[
    list[str] | None,
    typer.Option(
        help="Your engine's, measured on whole prompts: 9000, or 9000@4096 for prompts of 4096 "
        "tokens. Two of different lengths say how much attention adds."
    ),
]
ColdFile = Annotated[
    Path | None,
    typer.Option(
        help="Where a cold file is or will be: its disk is measured, 64 MiB written; /var/tmp if "
        "not given."
    ),
]


def advise(
    pool: Annotated[
        Path | None, typer.Option(help="A pool: its layout, and far is measured in its memory.")
    ] = None,
    layout: LayoutText = None,
    encoding: Annotated[
        str,
        typer.Option(
            help="What they are kept as: int8, int4, fp8_e4m3, progressive; or of each: int8,int4."
        ),
    ] = "none",
    tokens: Annotated[
        list[str] | None, typer.Option(help="Length of a cached prefix, 32K; again for more.")
    ] = None,
    share: Share = f"{SHARE}",
    prefill_tokens_per_s: Speeds = None,
    cold: ColdFile = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here.")
    ] = None,
) -> None:
    """Say whether reading cached keys and values beats computing them again, tier by tier.

    Measures memory, a disk and a GPU's link, or takes what `cxlkv tune` kept. The prefill speed is
    your engine's; without it the answer is the speed up to which a tier pays. Each way is charged
    with the same decode steps. The last line is the advice.
    """
    from cxlkv.bench.cli import check_files, wide_console

    check_files(json_file)
    config = Path(layout) if layout is not None and Path(layout).is_file() else None
    stored = layout_of(pool, layout, encoding)
    speed = prefill_of(prefill_tokens_per_s or [])
    part = parse_share(share, "a --share of the pages")
    console = wide_console()
    sources: list[str] = []
    with console.status("measuring ..."):
        costs = measured(stored, pool or pool_of(config, stored), cold, sources)
        costs = with_gpu(costs, sources)
    costs = replace(costs, prefill=speed)
    lengths = sorted({parse_tokens(length) for length in tokens or TOKENS})
    answer = Answer.of(stored, costs, lengths, DECODE_TOKENS, part, sources)
    show(answer, console)
    if json_file is not None:
        write(answer, json_file)
        console.print(f"written: {json_file}", soft_wrap=True)


# ---- what is asked ----


def layout_of(pool: Path | None, layout: str | None, encoding: str = "none") -> KVLayout:
    """From exactly one of the two sources."""
    if pool is not None and layout is None:
        if encoding != "none":
            raise BadArgumentError("--encoding: --pool says that; leave it out")
        with Pool.open(pool) as opened:
            return opened.layout
    if layout is None or pool is not None:
        raise BadArgumentError("give one of --pool and --layout")
    found = layout_of_text(layout)
    return found if encoding == "none" else found.encoded(encoding)


def pool_of(config: Path | None, layout: KVLayout) -> Path | None:
    """The pool that the configuration describes, if it is there; none is made."""
    from cxlkv.config import read_config

    where = "anonymous:" if config is None else read_config(config)[0].where
    if where == "anonymous:":
        return None
    try:
        with Pool.open(where) as opened:
            there = opened.layout
    except (PoolMissingError, NotAPoolError):
        return None  # not made yet: from_config() will, or says what is in the way
    if there != layout:
        raise GeometryError(
            f"{where} is another pool than {config} describes: "
            f"{'; '.join(differences(there, layout))}"
        )
    return Path(where)


def prefill_of(speeds: Sequence[str]) -> Prefill | None:
    """None when nothing is known; nothing is made up."""
    return Prefill.measured([_point(speed) for speed in speeds]) if speeds else None


def _point(text: str) -> tuple[float, float]:
    """9000@4096 as (9000, 4096)."""
    speed, at, context = text.partition("@")
    try:
        return float(speed), float(context) if at else 0.0
    except ValueError:
        raise BadArgumentError(
            f"--prefill-tokens-per-s {text}: a speed is wanted, like 9000, or 9000@4096 for "
            "prompts of 4096 tokens"
        ) from None


def measured(
    layout: KVLayout,
    pool: Path | None,
    cold: Path | None,
    sources: list[str],
) -> Costs:
    """What `cxlkv tune` kept; memory and a disk are measured now where it kept nothing, and what is
    named. Adds to `sources` what figures do not say of themselves."""
    from cxlkv.bench.calibrate import rates
    from cxlkv.bench.cli import load_warning
    from cxlkv.bench.result import Result, check_clock

    check_clock("advise")
    result, warning = Result("advise"), load_warning()
    kept = current().costs
    if kept is None or pool is not None or result.emulated:
        cold_kept = None if kept is None else kept.cold
        kept = replace(rates.run(result, layout, pool=pool, group=QUERIES_A_HEAD), cold=cold_kept)
        sources.extend(filter(None, [result.late_text()]))
    else:
        sources.append("what was measured by `cxlkv tune` was taken; it measures anew")
    if kept.cold is None or cold is not None:
        try:
            kept = replace(kept, cold=rates.file(result, layout, cold or DISK))
        except CXLKVError as error:
            if cold is not None:
                raise
            sources.append(f"cold was not measured: {error}; --cold PATH measures another disk")
    if result.metrics:  # else nothing was measured now
        sources += doubts_of(result, warning)
    return kept


def doubts_of(result: Result, warning: str) -> Iterator[str]:
    """What makes figures doubtful that were measured now: other programs, and their own samples."""
    if warning:
        yield warning.removeprefix("warning: ")
    doubts = result.doubts()
    yield from [*result.notes, *doubts[:DOUBTS_SHOWN]]
    if len(doubts) > DOUBTS_SHOWN:
        yield f"{len(doubts) - DOUBTS_SHOWN} more figures are noisy: measure on a quiet machine"


def with_gpu(costs: Costs, sources: list[str]) -> Costs:
    """With the link to this machine's GPU, which decodes then; as they are where there is none."""
    from cxlkv.bench.calibrate import links
    from cxlkv.bench.result import Result

    result = Result("advise", over_links=False)
    try:
        gpu = links.run(result)
    except UnsupportedError as error:
        sources.append(
            f"no link to a GPU: {error}, so fetch ends in this host's memory, where the engine "
            "decodes"
        )
        return costs
    sources += doubts_of(result, "")
    how = f"measured by copies from pinned memory to {gpu.name}"
    decodes = f"a GPU decodes at {_rate(gpu.bytes_per_s)}, measured on {gpu.name}"
    sources.append(f"link: {_rate(gpu.link_bytes_per_s)}, {how}; {decodes}")
    return replace(
        costs,
        link_bytes_per_s=gpu.link_bytes_per_s,
        engine_score_bytes_per_s=gpu.bytes_per_s,
        engine_attend_bytes_per_s=gpu.bytes_per_s,
        engine_step_latency_s=0.0,
    )


# ---- what is answered ----


@dataclass(frozen=True)
class Row:
    """One length of prefix in one tier; decision: None without a prefill speed. decode_s: of the
    engine, behind fetch or recompute; attend_s: of the same steps in place."""

    verdict: Verdict
    decode_s: float
    attend_s: float
    decision: Decision | None


@dataclass(frozen=True)
class Answer:
    """All that is shown, and written."""

    layout: KVLayout
    costs: Costs
    decode_tokens: int
    share: float
    rows: Sequence[Row]
    notes: Sequence[str]
    advice: str

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        costs: Costs,
        lengths: Sequence[int],
        decode_tokens: int,
        share: float,
        sources: Sequence[str] = (),
    ) -> Answer:
        rows = []
        for tokens in lengths:
            for tier in costs.tiers:
                decision = None
                if costs.prefill is not None:
                    decision = costs.decide(
                        layout,
                        tokens=tokens,
                        cached_tokens=tokens,
                        tier=tier,
                        decode_tokens=decode_tokens,
                        share=share,
                    )
                attend_s = costs.attend_seconds(layout, tokens, tier, decode_tokens, share)
                decode_s = costs.decode_seconds(layout, tokens, decode_tokens, share)
                verdict = costs.verdict(layout, tier, tokens)
                rows.append(Row(verdict, float(decode_s), float(attend_s), decision))
        notes = [*sources, *_notes(costs)]
        if layout.is_encoded:
            kept = f"{layout.stored_token_bytes:,} of {layout.token_bytes:,} bytes a token"
            notes.insert(0, f"K and V are kept as {layout.encoding}: {kept} are read in the pool")
        return cls(layout, costs, decode_tokens, share, rows, notes, advice_of(rows, share))


def advice_of(rows: Sequence[Row], share: float) -> str:
    """What to do with the pool, and with a file below it, in one sentence."""
    tiers = {row.verdict.tier: row.verdict for row in rows}  # of the longest
    last = [row for row in rows if row.verdict.tier == ("far" if "far" in tiers else "local")]
    longest = last[-1]
    verdict, decision = longest.verdict, longest.decision
    if decision is None:
        return (
            f"use a pool if your engine prefills {verdict.tokens:,} tokens more slowly than at "
            f"{verdict.prefill_tokens_per_s:,.0f} tokens/s; measure it, and give "
            "--prefill-tokens-per-s"
        )
    took = {way: format_seconds(seconds) for way, seconds in decision.seconds.items()}
    if decision.choice == "recompute":
        return (
            f"leave the pool off: {verdict.tokens:,} tokens take {took['recompute']} to compute "
            f"again and {took['fetch']} to fetch, decoding included"
        )
    begins = min(r.verdict.pays_from or r.verdict.tokens for r in last if _is_better(r))
    what = "fetch them"
    if decision.choice == "attend":
        what = f"attend to {100 * share:g} % of their pages where they lie"
    told = (
        f"keep prefixes of {begins:,} tokens and more in a pool and {what}: {verdict.tokens:,} "
        f"tokens take {took[decision.choice]} instead of {took['recompute']} to compute again, "
        "decoding included"
    )
    if "cold" not in tiers:
        return told
    cold = tiers["cold"].pays_from
    file = "no file below it" if cold is None else f"a file below it from {cold:,} tokens on"
    return f"{told}; {file}"


def _is_better(row: Row) -> bool:
    return row.decision is not None and row.decision.choice != "recompute"


def _notes(costs: Costs) -> Iterator[str]:
    """What the figures do not say."""
    from cxlkv.bench.calibrate.rates import FORGOTTEN, LOCAL

    if costs.far is not None and costs.far.where == LOCAL:
        yield (
            "far was measured in this process's own memory, as local was: --pool PATH measures a "
            "pool's"
        )
    if costs.cold is not None and costs.cold.where.endswith(FORGOTTEN):
        yield "cold was read through the page cache: a disk may be slower than that"
    if costs.prefill is None:
        yield "no prefill speed was given, so that nothing is said about recomputing"
    elif costs.prefill.context_half == math.inf:
        yield (
            "prefill was taken as equally fast at all lengths: two speeds (9000@4096 and "
            "7000@65536), or --parameters and --q-heads, say how much attention adds"
        )


def show(answer: Answer, console: Console) -> None:
    """Two tables, then for each tier what they mean; each says what is emulated."""
    label = answer.costs.emulated
    console.print(costs_table(answer.costs))
    console.print(rows_table(answer))
    for tier in answer.costs.tiers:
        for verdict in telling([row.verdict for row in answer.rows if row.verdict.tier == tier]):
            sentences = [verdict.sentence, *filter(None, [writing(verdict)])]
            line = marked("; ".join(sentences), label)
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    for note in answer.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
    advice = marked(f"advice: {answer.advice}", label)
    console.print(Text(advice, style="bold"), soft_wrap=True)


def telling(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The longest; before it the shortest, where that one has another answer."""
    if verdicts[0].pays == verdicts[-1].pays:
        return [verdicts[-1]]
    return [verdicts[0], verdicts[-1]]


def writing(verdict: Verdict) -> str:
    """How much of what is written must be read again; "" where that is not known."""
    reads = verdict.reads_per_write
    if reads is None:
        return ""
    least = f"at least {100 * reads:.2g} % of what is written is read back"
    if reads > 1:
        least = f"what is written is read back {reads:.3g} times or more"
    return f"writing to it pays when {least}"


def costs_table(costs: Costs) -> Table:
    made = Table("tier", "read", "an operation", "write", "measured", title="What things cost here")
    for name in costs.tiers:
        tier = costs.tier(name)
        write = tier.write_bytes_per_s
        where = marked(plain(tier.where), None if name == "cold" else costs.emulated)
        made.add_row(
            name,
            _rate(tier.bytes_per_s),
            format_seconds(tier.latency_s) if tier.latency_s else "too short to tell",
            "" if write is None else _rate(write),
            Text(where, overflow="fold"),
        )
    if costs.score_bytes_per_s is not None and costs.attend_bytes_per_s is not None:
        made.caption = (
            f"near the data: select {_rate(costs.score_bytes_per_s)} of keys, attend "
            f"{_rate(costs.attend_bytes_per_s)} of keys and values, "
            f"{format_seconds(costs.step_latency_s)} a layer"
        )
        made.caption = marked(made.caption, costs.emulated)
    return made


def rows_table(answer: Answer) -> Table:
    known = answer.costs.prefill is not None
    last = ("recompute", "choice") if known else ("pays below, tokens/s of prefill",)
    made = Table(
        title=marked(
            f"A prefix, then {answer.decode_tokens} tokens decoded with {100 * answer.share:g} % "
            "of pages",
            answer.costs.emulated,
        )
    )
    for column in ("tokens", "tier", "fetch", "attend", *last):
        made.add_column(column, justify="left" if column in ("tier", "choice") else "right")
    for row in answer.rows:
        verdict = row.verdict
        fetch_s = verdict.read_s + row.decode_s
        cells = [f"{verdict.tokens:,}", verdict.tier, format_seconds(fetch_s)]
        cells.append(format_seconds(row.attend_s) if row.attend_s < math.inf else "")
        if row.decision is None or verdict.recompute_s is None:
            cells.append(f"{verdict.prefill_tokens_per_s:,.0f}")
        else:
            recompute_s = verdict.recompute_s + row.decode_s
            cells += [format_seconds(recompute_s), row.decision.choice]
        made.add_row(*cells)
    return made


def _rate(bytes_per_s: float) -> str:
    rate = bytes_per_s / 1e9
    return f"{rate:,.0f} GB/s" if rate >= 1000 else f"{rate:.3g} GB/s"


def write(answer: Answer, path: Path) -> None:
    """All figures as JSON, in seconds, bytes and tokens; null for what is not known."""
    from cxlkv.bench.result import commit, machine

    rows = []
    for row in answer.rows:
        decision = row.decision
        rows.append(
            {
                **asdict(row.verdict),
                "decode_s": row.decode_s,
                "attend_s": row.attend_s,
                "choice": None if decision is None else decision.choice,
                "reason": None if decision is None else decision.reason,
            }
        )
    emulated = answer.costs.emulated or None
    found = {"machine": machine(), "commit": commit(), "emulated": emulated, **asdict(answer)}
    found["rows"] = rows
    write_whole(path, json.dumps(_finite(found), indent=2, allow_nan=False) + "\n")


def _finite(value: object) -> object:
    """The same with None for infinite numbers, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
