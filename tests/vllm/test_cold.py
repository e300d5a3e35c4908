"""vLLM with a cold file below a small pool: four times the pool is found again, by this engine, one
beside it, and one that starts with an empty pool; the tokens are those of stock vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .conftest import MakeEngine
from .engines import BLOCK_TOKENS, VOCABULARY_SIZE, Engine
from .test_prefixes import end, folder_in

COUNT, TOKENS = 48, 300
CACHED = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


def prompts() -> list[list[int]]:
    numbers = np.random.default_rng(5)
    return [numbers.integers(0, VOCABULARY_SIZE, TOKENS).tolist() for _ in range(COUNT)]


def served(engine: Engine) -> tuple[list[list[int]], list[int]]:
    """Four at a time: tokens, and how many came from the pool and its file."""
    tokens: list[list[int]] = []
    cached: list[int] = []
    for first in range(0, COUNT, 4):
        found = engine.generate(prompts()[first : first + 4], max_tokens=8)
        tokens += found["tokens"]
        cached += found["cached"]
    engine.forget()
    return tokens, cached


@pytest.mark.parametrize("attention", ["engine", "pool"])
def test_four_times_the_pool_is_found_again(
    make_engine: MakeEngine, tmp_path: Path, attention: str
) -> None:
    folder, extra = folder_in(tmp_path)
    cold = {"cold": f"{tmp_path}/cold/", "cold_capacity": "64MiB"}
    extra = {**extra, **cold, "capacity": "8MiB", "attention": attention, "deadline_s": 60}
    stock = make_engine()
    wanted = served(stock)[0]
    stock.end()

    first = make_engine(extra)
    assert served(first) == (wanted, [0] * COUNT)
    assert served(first) == (wanted, [CACHED] * COUNT)
    beside = make_engine(extra)
    assert served(beside) == (wanted, [CACHED] * COUNT)
    first.kill()  # one of them had the file
    assert served(beside) == (wanted, [CACHED] * COUNT)
    end(folder, beside)

    (pool,) = folder.glob("*.pool")
    pool.unlink()  # as after a restart of the machine
    again = make_engine(extra)
    tokens, cached = served(again)
    assert tokens == wanted
    assert sum(cached) >= (COUNT - 14) * CACHED, "what was in the pool alone went with it"
    end(folder, again)
