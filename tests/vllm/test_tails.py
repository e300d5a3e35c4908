"""What a request has beyond its last whole block is there for the next turn, to the token."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np

from .conftest import MakeEngine
from .engines import BLOCK_TOKENS, VOCABULARY_SIZE, Engine, Generated
from .test_prefixes import end, folder_in

TURNS = ((50, 13), (1, 20), (7, 40), (31, 1), (33, 30), (2, 5))
"""Tokens that a user says, and that are answered."""


def answered(engine: Engine, prompt: list[int], tokens: int, salt: str) -> tuple[list[int], int]:
    """What is generated, and how much of the prompt the pool had."""
    asked = {"prompts": [prompt], "max_tokens": tokens, "more": {}, "salt": salt}
    found = cast(Generated, engine.ask(do="generate", **asked))
    # Workers hear of its end with the next step.
    engine.generate([[1, 2, 3]], max_tokens=1)
    return found["tokens"][0], found["cached"][0]


def test_each_turn_begins_where_the_last_one_ended(make_engine: MakeEngine, tmp_path: Path) -> None:
    """In the same engine, whose own cache has the whole blocks, and in another one in turn; who
    says another salt finds nothing."""
    folder, extra = folder_in(tmp_path)
    extra = {**extra, "tails": True}
    stock = make_engine()
    ours = [make_engine({**extra, "load": load}) for load in ("sync", "async")]
    numbers, said = np.random.default_rng(5), list[int]()
    for turn, (new, tokens) in enumerate(TURNS):
        prompt = said + numbers.integers(0, VOCABULARY_SIZE, new).tolist()
        (wanted,) = stock.generate([prompt], max_tokens=tokens)["tokens"]
        there = max(0, len(said) - 1)
        for engine in ours[:: 1 if turn % 2 else -1]:
            ids, cached = answered(engine, prompt, tokens, "one")
            assert (ids, cached) == (wanted, there), turn
            # Saved by now; its end lies behind the prompt, unless it is all that was computed.
            whole = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
            there = min(len(prompt) - 1, max(there, whole if tokens > 1 else len(prompt)))
        said = prompt + wanted
    assert answered(ours[0], said, 1, "two")[1] == 0
    for engine in ours:
        assert "CRC" not in engine.log()
    end(folder, *ours)
