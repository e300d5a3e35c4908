"""What it takes to take pages and give them back, metadata only, from Python, by pages a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cxlkv.bench.measure import interleave
from cxlkv.bench.result import Result
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool


@dataclass(frozen=True)
class Size:
    """An 8B model's pages (36 layers); a sample takes and gives back about `pages` of them."""

    layers: int = 36
    capacity: int = 3 << 30
    counts: tuple[int, ...] = (1, 16, 64, 512)
    pages: int = 20000
    rounds: int = 21


QUICK = Size(layers=8, capacity=768 << 20, pages=8000, rounds=9)


def run(result: Result, size: Size = Size()) -> None:
    """alloc_free_N_ns: nanoseconds a page where a call takes N of them, and then frees them."""
    layout = KVLayout(layers=size.layers, kv_heads=8, head_dim=128)
    with CXLPool.create("anonymous:", layout=layout, capacity=size.capacity, threads=1) as pool:
        distinct = pool.pages.alloc(size.counts[-1])
        result.checks["pages_are_distinct"] = len(set(distinct.tolist())) == size.counts[-1]
        pool.pages.free(distinct)

        def taking(count: int) -> Callable[[], None]:
            def repeat() -> None:
                for _ in range(max(1, size.pages // count)):
                    pool.pages.free(pool.pages.alloc(count))

            return repeat

        functions = {str(count): taking(count) for count in size.counts}
        for count, seconds in interleave(functions, size.rounds).items():
            pages = max(1, size.pages // int(count)) * int(count)
            result.measure(f"alloc_free_{count}_ns", [s / pages * 1e9 for s in seconds], "ns/page")
        stats = pool.stats()
        result.checks["all_pages_are_free_again"] = stats["pages_free"] == stats["pages_total"]
    one, many = (result.metrics[f"alloc_free_{n}_ns"].median for n in (1, size.counts[-1]))
    result.ratios["alloc_free_many_to_one"] = one / many
