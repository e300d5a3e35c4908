"""Finding a prompt of 131,072 tokens: hashing included, all of it published or nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cxlkv.bench.measure import interleave_reported, seconds_of
from cxlkv.bench.result import Result
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool
from cxlkv.prefix import prefix_keys

TOKENS = 131_072
PAGE_TOKENS = (512, 16)
ROUNDS = 21


def run(result: Result, tokens: int = TOKENS, rounds: int = ROUNDS) -> None:
    """Metrics match_128k_512_ms and match_128k_16_ms: match_prefix() of what is all published.

    With _miss_ms instead of _ms, of a prompt of which nothing is; _tail_ms, of one that a page that
    is not full ends; _keys_ms, hashing alone. Records are small; index, descriptors and headers are
    as they always are. Token ids are an array: a list of ints takes milliseconds to become one.
    """
    for page_tokens in PAGE_TOKENS:
        name = f"match_128k_{page_tokens}"
        layout = KVLayout(
            layers=1, kv_heads=1, head_dim=8, page_tokens=page_tokens, dtype="float32"
        )
        pages = tokens // page_tokens + 1
        capacity = (8 << 20) + 2 * pages * (page_tokens * 64 + 2048)
        with CXLPool.create("anonymous:", layout=layout, capacity=capacity, threads=1) as pool:
            calls, found = prepare(pool, tokens)
            samples = interleave_reported(calls, rounds)
        result.times(samples, "ms", f"{name}{{}}_ms")
        for kind, (wanted, got) in found.items():
            result.checks[f"{name}{kind}_finds_what_is_there"] = got == {wanted}


def prepare(
    pool: CXLPool, tokens: int
) -> tuple[dict[str, Callable[[], float]], dict[str, tuple[int, set[int]]]]:
    """What is timed, by what its metric is named after; how many tokens each is to find, and the
    numbers that it found."""
    rng = np.random.default_rng(23)
    page_tokens = pool.layout.page_tokens
    published, unknown = (rng.integers(0, 128_256, tokens) for _ in range(2))
    half = page_tokens // 2
    ending = np.concatenate([published[:-half], unknown[:half]])
    rows = np.zeros((tokens, 1, 8), np.float32)
    sequence = pool.sequence()
    sequence.append(0, rows, rows)
    pool.publish_prefix(sequence, published)
    pool.publish_prefix(sequence, published[:-half], tail=True)
    found = {
        "": (tokens, set[int]()),
        "_miss": (0, set[int]()),
        "_tail": (tokens - half, set[int]()),
    }

    def match(ids: npt.NDArray[np.int64], kind: str) -> float:
        began = time.perf_counter()
        hit = pool.match_prefix(ids)
        seconds = time.perf_counter() - began
        found[kind][1].add(hit.tokens)
        hit.release()
        return seconds

    calls = {
        "": lambda: match(published, ""),
        "_miss": lambda: match(unknown, "_miss"),
        "_tail": lambda: match(ending, "_tail"),
        "_keys": lambda: seconds_of(lambda: prefix_keys(published, page_tokens)),
    }
    return calls, found
