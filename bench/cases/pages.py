"""Taking and giving back pages, metadata only, from Python; and a fork with one token more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape
from cxlkv.bench.result import Result
from cxlkv.pool import CXLPool


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """The layers and heads of an 8B model (36, 8, 128, bf16). A sample takes and gives back about
    `pages` pages; 32 children of 8,192 tokens, for each of fork_page_tokens."""

    layers: int = 36
    capacity: int = 3 << 30
    counts: tuple[int, ...] = (1, 16, 64, 512)
    pages: int = 20000
    rounds: int = 21
    fork_page_tokens: tuple[int, ...] = (16, 64)
    tokens: int = 8192
    forks: int = 32
    repeat: int = 16
    fork_rounds: int = 15


QUICK = Size(layers=8, capacity=768 << 20, pages=8000, rounds=9, fork_page_tokens=())


def run(result: Result, size: Size = Size()) -> None:
    """alloc_free_N_ns: nanoseconds a page where a call takes N of them, and then frees them;
    fork_one_token and page_copy, us a sequence."""
    measure_pages(result, size)
    for page_tokens in size.fork_page_tokens:
        layout = replace(size, page_tokens=page_tokens).layout
        capacity = int(layout.token_bytes * size.tokens * 1.3) + (64 << 20)
        with CXLPool.create("anonymous:", layout=layout, capacity=capacity, threads=1) as pool:
            for filled in (0, 1):
                measure_fork(result, pool, size, filled)


def measure_pages(result: Result, size: Size) -> None:
    with CXLPool.create(
        "anonymous:", layout=size.layout, capacity=size.capacity, threads=1
    ) as pool:
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


def measure_fork(result: Result, pool: CXLPool, size: Size, filled: int) -> None:
    """`forks` children, one token appended to each in every layer, against copies of one page's
    K and V in every layer. `filled` tokens of the open page are shared: those are copied, too.

    A copy is of another page each time, from memory to memory; forks are made `repeat` times in a
    row in one batch, as beams are, so that the core's own memory is warm."""
    k = size.noise(5, size.tokens + filled)
    parent = pool.sequence()
    for layer in range(size.layers):
        parent.append(layer, k, k)
    page_bytes = pool.layout.token_bytes * pool.layout.page_tokens
    pages = max(64, (256 << 20) // page_bytes)
    memory = np.zeros((2, pages, page_bytes), np.uint8)
    memory += 1  # prefaults
    one = k[: size.forks]
    starts = np.arange(size.forks + 1, dtype=np.int32)
    name = f"{pool.layout.page_tokens}_token_pages_{filled}_filled"
    copied, forked, single = [], [], []
    turn = 0
    for _ in range(size.fork_rounds + 1):
        began = time.perf_counter()
        for _ in range(size.forks):
            memory[1, turn % pages] = memory[0, turn % pages]
            turn += 1
        copied.append((time.perf_counter() - began) / size.forks)
        fork_s = append_s = 0.0
        for _ in range(size.repeat):
            began = time.perf_counter()
            children = [parent.fork() for _ in range(size.forks)]
            fork_s += time.perf_counter() - began
            batch = pool.batch(children)
            began = time.perf_counter()
            for layer in range(size.layers):
                batch.append(layer, one, one, starts)
            append_s += time.perf_counter() - began
            longer = all(len(child) == len(parent) + 1 for child in children)
            result.checks[f"fork_adds_one_token_{name}"] = longer
            for child in children:
                child.release()
        calls = size.forks * size.repeat
        single.append(fork_s / calls)
        forked.append((fork_s + append_s) / calls)
    samples = {"fork": single[1:], "page_copy": copied[1:], "fork_one_token": forked[1:]}
    median = result.times(samples, "us", f"{{}}_{name}")
    cost = median["fork_one_token"] / median["page_copy"]
    result.ratios[f"fork_one_token_cost_to_page_copy_{name}"] = cost
    result.ratios[f"fork_one_token_bytes_to_page_copy_{name}"] = (
        filled + 1
    ) / pool.layout.page_tokens
    parent.release()
