"""Taking and giving back pages, metadata only, from Python; and a fork with one token more."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cxlkv.bench.measure import interleave
from cxlkv.bench.result import Result
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool

CALL_PAGES = 64


@dataclass(frozen=True)
class Size:
    """The layers and heads of an 8B model (36, 8, 128, bf16); 32 children of 8,192 tokens."""

    layers: int = 36
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 8192
    forks: int = 32
    repeat: int = 16
    rounds: int = 15


def run(result: Result, size: Size = Size()) -> None:
    """alloc_free_ns a page; fork_one_token_us and page_copy_us a sequence, for two page sizes."""
    for page_tokens in (16, 64):
        layout = KVLayout(
            layers=size.layers,
            kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            page_tokens=page_tokens,
        )
        capacity = int(layout.token_bytes * size.tokens * 1.3) + (64 << 20)
        with CXLPool.create("anonymous:", layout=layout, capacity=capacity, threads=1) as pool:
            if page_tokens == 16:
                measure_pages(result, pool, size)
            for filled in (0, 1):
                measure_fork(result, pool, size, filled)


def measure_pages(result: Result, pool: CXLPool, size: Size) -> None:
    def alloc_free() -> None:
        pool.pages.free(pool.pages.alloc(CALL_PAGES))

    seconds = interleave({"pair": alloc_free}, size.rounds, repeat=100)["pair"]
    result.measure("alloc_free", [s / CALL_PAGES * 1e9 for s in seconds], "ns/page")
    result.checks["alloc_free_leaves_all_free"] = (
        pool.stats()["pages_free"] == pool.stats()["pages_total"]
    )


def measure_fork(result: Result, pool: CXLPool, size: Size, filled: int) -> None:
    """`forks` children, one token appended to each in every layer, against copies of one page's
    K and V in every layer. `filled` tokens of the open page are shared: those are copied, too.

    A copy is of another page each time, from memory to memory; forks are made `repeat` times in a
    row in one batch, as beams are, so that the core's own memory is warm."""
    rng = np.random.default_rng(5)
    shape = (size.tokens + filled, size.kv_heads, size.head_dim)
    k = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
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
    for _ in range(size.rounds + 1):
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
    result.measure(f"fork_{name}", [s * 1e6 for s in single[1:]], "us")
    copy = result.measure(f"page_copy_{name}", [s * 1e6 for s in copied[1:]], "us")
    fork = result.measure(f"fork_one_token_{name}", [s * 1e6 for s in forked[1:]], "us")
    result.ratios[f"fork_one_token_cost_to_page_copy_{name}"] = fork.median / copy.median
    result.ratios[f"fork_one_token_bytes_to_page_copy_{name}"] = (
        filled + 1
    ) / pool.layout.page_tokens
    parent.release()
