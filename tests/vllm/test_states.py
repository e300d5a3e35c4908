"""Models with recurrent states: K and V, and the states where vLLM keeps some (mode "align")."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ..support.damaging import damage_piece
from .conftest import MakeEngine
from .engines import VOCABULARY_SIZE
from .forked import Life, Nursery, Tokens
from .test_prefixes import check, folder_in, pool_in, storm_prompts
from .tiny_models import HYBRIDS, lacks, tiny

PROMPT_TOKENS = (500, 170, 350)
NEW_TOKENS = 64


def prompts(seed: int) -> list[Tokens]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(1, VOCABULARY_SIZE, tokens).tolist() for tokens in PROMPT_TOKENS]


def served(life: Life, asked: list[Tokens]) -> tuple[list[Tokens], list[int]]:
    """One after the other: what runs beside a request may turn a near tie in bfloat16."""
    done = [life.generate([one], NEW_TOKENS)[0] for one in asked]
    return [one["tokens"] for one in done], [one["cached"] for one in done]


def damage_states(folder: Path) -> None:
    with pool_in(folder) as pool:
        rows = pool.hotness.published().rows
        pages = rows["page"][rows["part"] == pool.pages.geometry["part_count"]]  # behind K and V
        assert len(pages)
        for page, kind in product(pages.tolist(), ("keys", "values")):
            damage_piece(pool, page, 0, kind)  # of which a short state has the first alone


@pytest.mark.parametrize("kind", HYBRIDS)
def test_tokens_are_those_of_stock_vllm_whatever_becomes_of_engines(
    kind: str, nursery: Nursery, pools_folder: Path
) -> None:
    """Engines are killed between K and V and their states, and in a load; others find what was
    saved, and compute the rest, also what is damaged."""
    if lacks(kind):
        pytest.skip(f"{kind} wants {lacks(kind)}, which is not installed here")
    folder, extra = folder_in(pools_folder)
    block, given = HYBRIDS[kind]
    settings = {**given, "model": str(tiny(kind, pools_folder / "model"))}
    cached = [(tokens - 1) // block * block for tokens in PROMPT_TOKENS]
    stock = nursery.life(None, **settings).ready()
    wanted, later = (served(stock, prompts(seed))[0] for seed in (1, 2))
    warm, hits = served(stock, prompts(1))
    assert hits == cached
    stock.end()

    first = nursery.life(extra, **settings).ready()
    assert served(first, prompts(1)) == (wanted, [0, 0, 0])
    first.forget()
    assert served(first, prompts(1)) == (warm, cached)
    assert first.ask(do="signal", where="states", number=signal.SIGKILL)
    first.add("0", prompts(2)[0], NEW_TOKENS)
    assert first.has_ended()
    first.kill()

    second = nursery.life(extra, **settings).ready()
    assert served(second, prompts(2)) == (later, [0, 0, 0])
    assert second.ask(do="signal", where="load", number=signal.SIGKILL)
    second.add("0", prompts(1)[0], NEW_TOKENS)
    assert second.has_ended()
    second.kill()

    third = nursery.life(extra, **settings).ready()
    assert served(third, prompts(1)) == (warm, cached)
    damage_states(folder)
    third.forget()
    assert served(third, prompts(1))[0] == wanted
    assert "CRC" in third.log.read_text()
    third.forget()
    assert served(third, prompts(1)) == (warm, cached)
    third.end()
    with pool_in(folder) as pool:  # checkpoints that were not read since are still damaged
        pool.admin.check(deep=True, repair=True)
    assert check(folder)["pages_held"] == 0


def test_ranks_have_states_of_their_own(make_engine: MakeEngine, pools_folder: Path) -> None:
    """Of a hit, one rank's are damaged: all ranks compute it."""
    folder, extra = folder_in(pools_folder)
    kind = "Falcon-H1"
    block, given = HYBRIDS[kind]
    given = {**given, "model": str(tiny(kind, pools_folder / "model"))}
    settings = {**given, "processes": True, "tensor_parallel_size": 2}
    stock = make_engine(None, **settings)  # type: ignore[arg-type]
    ours = make_engine(extra, **settings)  # type: ignore[arg-type]
    asked = prompts(1)[:1]
    cached = [(PROMPT_TOKENS[0] - 1) // block * block]
    found = [stock.generate(asked, NEW_TOKENS) for _ in range(2)]
    stock.end()
    wanted, warm = (one["tokens"] for one in found)
    assert ours.generate(asked, NEW_TOKENS)["tokens"] == wanted
    for _ in range(2):
        ours.forget()
        again = ours.generate(asked, NEW_TOKENS)
        assert (again["tokens"], again["cached"]) == (warm, cached)
    shards = sorted(folder.glob("*.pool"))
    hidden = shards[0].rename(pools_folder / "hidden")  # so that the other one is damaged
    damage_states(folder)
    ours.forget()
    assert ours.generate(asked, NEW_TOKENS)["tokens"] == wanted
    assert "the CRC of its" in ours.log()
    hidden.rename(shards[0])
    ours.end()


def test_aborts_preemptions_and_a_kill_leave_nothing(
    make_engine: MakeEngine, pools_folder: Path, seed: int
) -> None:
    """Many at once that begin alike, and too few blocks for those that run."""
    folder, extra = folder_in(pools_folder)
    _, given = HYBRIDS["Falcon-H1"]
    model = {"model": str(tiny("Falcon-H1", pools_folder / "model")), "max_num_seqs": 8}
    settings = {**given, **model, "num_gpu_blocks_override": 24}
    stock = make_engine(None, **settings)  # type: ignore[arg-type]
    one = make_engine(extra, **settings)  # type: ignore[arg-type]
    asked = storm_prompts(32)
    wanted = stock.storm(asked, max_tokens=24, share=0.0, seed=seed)
    stock.end()
    for share in (0.02, 0.0):
        found = one.storm(asked, max_tokens=24, share=share, seed=seed)
        assert found["done"].items() <= wanted["done"].items()
        one.forget()
    assert len(found["done"]) == 32
    one.say(do="storm", prompts=storm_prompts(64)[32:], max_tokens=200, share=0.0, seed=seed)
    with pool_in(folder) as pool:  # killed while it stores what it generates
        before = pool.stats()["pages_published"]
        while pool.stats()["pages_published"] < before + 16:
            assert one.process.poll() is None
        one.kill()
        assert pool.admin.check(deep=True)["clean"]
        assert pool.stats()["pages_held"] == 0
    two = make_engine(extra, **settings)  # type: ignore[arg-type]
    found = two.storm(asked, max_tokens=24, share=0.0, seed=seed)
    assert found["done"] == wanted["done"]
    two.end()
    assert check(folder)["pages_held"] == 0
