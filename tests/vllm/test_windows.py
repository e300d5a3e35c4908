"""Full attention beside sliding windows, each with its own table of blocks, and models without."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from .engines import BLOCK_TOKENS, VOCABULARY_SIZE
from .forked import Life, Nursery, Tokens
from .test_prefixes import check, damage, folder_in, pool_in
from .tiny_models import tiny

PROMPT_TOKENS = (300, 97, 200)
NEW_TOKENS = 64
CACHED = [(tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPT_TOKENS]
CHUNK = {"max_num_batched_tokens": 128}  # windows move on while prompts are computed


def prompts(seed: int) -> list[Tokens]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(1, VOCABULARY_SIZE, tokens).tolist() for tokens in PROMPT_TOKENS]


def served(life: Life, asked: list[Tokens]) -> tuple[list[Tokens], list[int]]:
    done = life.generate(asked, NEW_TOKENS)
    return [one["tokens"] for one in done], [one["cached"] for one in done]


def die_in(where: str, life: Life, seed: int) -> None:
    """Killed with these requests, in the middle of a layer."""
    assert life.ask(do="signal", where=where, number=signal.SIGKILL)
    for number, prompt in enumerate(prompts(seed)):
        life.add(str(number), prompt, NEW_TOKENS)
    assert life.has_ended()
    life.kill()


@pytest.mark.parametrize("form", ["engine", "pool"])
@pytest.mark.parametrize(
    "kind", ["Gemma-3", "Gemma-4", "gpt-oss", "Mistral", "Llama", "Qwen3", "Qwen3-MoE"]
)
def test_tokens_are_those_of_stock_vllm_whatever_becomes_of_engines(
    kind: str, form: str, nursery: Nursery, pools_folder: Path
) -> None:
    """One is killed in the middle of a save, the next one in a load; another finds what they had
    saved, and computes the rest, also what is damaged."""
    folder, extra = folder_in(pools_folder)
    extra["attention"] = form
    settings = {**CHUNK, "model": str(tiny(kind, pools_folder / "model"))}
    stock = nursery.life(None, **settings).ready()
    wanted, later = (served(stock, prompts(seed))[0] for seed in (1, 2))
    stock.end()

    first = nursery.life(extra, **settings).ready()
    assert served(first, prompts(1)) == (wanted, [0, 0, 0])
    first.forget()
    assert served(first, prompts(1)) == (wanted, CACHED)
    die_in("save", first, 2)

    second = nursery.life(extra, **settings).ready()
    assert served(second, prompts(1)) == (wanted, CACHED)
    second.forget()
    die_in("load", second, 1)

    third = nursery.life(extra, **settings).ready()
    assert served(third, prompts(1)) == (wanted, CACHED)
    assert served(third, prompts(2))[0] == later
    for page in range(16):
        damage(folder, page, layer=1)
    third.forget()
    assert served(third, prompts(1))[0] == wanted
    assert "the CRC of its V is wrong" in third.log.read_text()
    with pool_in(folder) as pool:  # pages that were not read since are still damaged
        pool.admin.check(deep=True, repair=True)
    third.forget()
    assert served(third, prompts(2))[0] == later
    third.end()
    assert check(folder)["pages_held"] == 0
