"""Select, attend and decode by shape: maps, beside what memory and arithmetic allow.

Everything is in DRAM, cold, on every CPU. A ratio is of medians of alternating runs: `exact` and
`attend` (all pages) over the lower of a streaming read and an arithmetic loop of the instructions
that they multiply with; `two_stage` over `exact`, where sketches were read; a layer's step by
`auto` over the best of all pages, exact and two_stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

from rich.table import Table

from cxlkv.bench.cases.decode_layers import (
    Decoding,
    Layers,
    Machine,
    Walk,
    all_threads,
    layers_of,
    machine,
)
from cxlkv.bench.result import Result, short
from cxlkv.bench.tables import pivot
from cxlkv.ndp.engine import Budget

METHODS = ("exact", "two_stage", "auto")
RATIOS = ("exact_to_bound", "attend_to_bound", "two_stage_to_exact", "auto_to_best")
LARGE_BYTES = 8 << 20
"""Bytes of keys in a layer: below, a call's own cost shows, so these stand apart."""


@dataclass(frozen=True)
class Size:
    """Three maps. heads: channels of a head and query heads a kv head, in bf16; dtypes: fewer of
    these in the others. contexts: pages and tokens, for 1 to 16 sequences."""

    head_dims: tuple[int, ...] = (64, 80, 96, 128, 192, 256)
    groups: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 16)
    other_dtypes: tuple[str, ...] = ("float16", "float32")
    other_groups: tuple[int, ...] = (1, 4, 5, 16)
    tokens: int = 16384
    kv_heads: int = 8
    page_tokens: tuple[int, ...] = (16, 32, 64, 128)
    contexts: tuple[int, ...] = (2048, 8192, 32768, 131072)
    sequences: tuple[int, ...] = (1, 4, 16)
    paged_heads: int = 2
    share: float = 0.05
    rounds: int = 5
    walk_bytes: int = 96 << 20  # of keys at least: three times what the caches hold here
    keys_most_bytes: int = 1 << 30  # of a layer
    region_bytes: int = 128 << 20


QUICK = Size(
    head_dims=(64, 128),
    groups=(1, 5),
    other_dtypes=("float32",),
    other_groups=(1,),
    page_tokens=(16, 64),
    contexts=(2048, 16384),
    sequences=(1, 4),
    rounds=3,
)


@dataclass(frozen=True)
class Cell:
    """One of a map; no word of its name has an underscore."""

    map: str
    row: str
    column: str
    shape: Decoding

    @property
    def name(self) -> str:
        return f"{self.map}_{self.row}_{self.column}"


def run(result: Result, size: Size = Size()) -> None:
    """Metrics exact_CELL, two_stage_CELL, attend_CELL and step_METHOD_CELL, us a layer; ratios
    exact_to_bound_CELL, attend_to_bound_CELL, two_stage_to_exact_CELL, auto_to_best_CELL, and of
    each the least and the median of all cells with 8 MiB of keys or more; the share of all cells in
    which auto is within a tenth of the best."""
    cells: list[Cell] = []
    with all_threads(), machine(size.region_bytes) as beside:
        for seed, some in enumerate(pools(size)):
            shape = some[0].shape
            if shape.key_bytes > size.keys_most_bytes:
                names = ", ".join(cell.name for cell in some)
                result.notes.append(f"decode/shapes: {names} left out, too large")
                continue
            with layers_of(shape.walked(size.walk_bytes), seed) as layers:
                for cell in some:
                    layers.ask(cell.shape.group)
                    measure(result, size, layers, cell, beside)
                    cells.append(cell)
        beside.tell(result)
    sum_up(result, cells)


def pools(size: Size) -> Iterator[list[Cell]]:
    """The cells of each pool: they differ in how many query heads a kv head has."""
    dtypes = {"bfloat16": size.groups} | dict.fromkeys(size.other_dtypes, size.other_groups)
    for (dtype, groups), dim in product(dtypes.items(), size.head_dims):
        heads = Decoding(dtype=dtype, head_dim=dim, kv_heads=size.kv_heads, tokens=size.tokens)
        which = "heads" if dtype == "bfloat16" else "dtypes"
        row = f"{dtype}-d{dim}"
        yield [Cell(which, row, f"g{group}", replace(heads, group=group)) for group in groups]
    for page, count, tokens in product(size.page_tokens, size.sequences, size.contexts):
        shape = Decoding(
            page_tokens=page, sequences=count, tokens=tokens, kv_heads=size.paged_heads
        )
        yield [Cell("contexts", f"p{page}-x{count}", short(tokens), shape)]


def measure(result: Result, size: Size, layers: Layers, cell: Cell, beside: Machine) -> None:
    """One cell of a map."""
    budget = Budget(share=size.share, sinks=0, recent=0)
    layers.check(result, budget, cell.name)
    forms: dict[str, Walk] = {
        "exact": partial(layers.select, budget, "exact"),
        "attend": layers.attend,
        "step_all": layers.decode,
    }
    staged = layers.picked(budget, "two_stage").stages
    if staged is not None and staged.lists:  # else it is exact by another name
        forms["two_stage"] = partial(layers.select, budget, "two_stage")
    for method in METHODS:
        forms[f"step_{method}"] = partial(layers.decode, budget, method)
    samples, bounds = beside.take_turns(forms, size.rounds, cell.shape.dtype)
    us = result.times(samples, "us", f"{{}}_{cell.name}")
    best = min(us[f"step_{method}"] for method in ("all", "exact", "two_stage"))
    ratios = {
        "exact_to_bound": 1e6 * bounds.score_s(cell.shape) / us["exact"],
        "attend_to_bound": 1e6 * bounds.attend_s(cell.shape) / us["attend"],
        "auto_to_best": best / us["step_auto"],
    }
    if "two_stage" in us:
        ratios["two_stage_to_exact"] = us["exact"] / us["two_stage"]
    result.ratios |= {f"{name}_{cell.name}": ratio for name, ratio in ratios.items()}


def sum_up(result: Result, cells: Sequence[Cell]) -> None:
    """The least and the median of each kind of ratio; of cells with little keys apart."""
    by_name: dict[str, list[float]] = {}
    for name, cell in product(RATIOS, cells):
        small = "" if cell.shape.key_bytes >= LARGE_BYTES else "_small"
        if f"{name}_{cell.name}" in result.ratios:
            found = by_name.setdefault(f"{name}{small}", [])
            found.append(result.ratios[f"{name}_{cell.name}"])
    for name, found in by_name.items():
        result.ratios |= {f"{name}_least": min(found), f"{name}_median": median(found)}
    within = [result.ratios[f"auto_to_best_{cell.name}"] >= 0.9 for cell in cells]
    result.measure("auto_within_tenth", [sum(within) / len(within)], "share of cells")
    result.notes.append(
        f"auto is within a tenth of the best in {sum(within)} of {len(cells)} cells"
    )


def tables(result: Result) -> list[Table]:
    return pivot("cxlkv bench decode/shapes", result.ratios, RATIOS)


def draw(result: Result, path: Path) -> None:
    from cxlkv.bench.pictures import heat_maps

    heat_maps(result, RATIOS, path)
