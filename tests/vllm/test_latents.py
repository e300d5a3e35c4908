"""MLA's latents in both forms: tokens, hits, kills, and ranks of unlike numbers on one pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv import CXLPool

from ..support.damaging import damage_piece
from .conftest import MakeEngine
from .engines import FORMS
from .forked import Nursery
from .test_metrics import failures, metrics
from .test_prefixes import check, folder_in, pool_in
from .test_windows import NEW_TOKENS, PROMPT_TOKENS, die_in, prompts, served
from .tiny_models import tiny

BLOCK_TOKENS = 16  # of vLLM's MLA on CPUs
PARTS = {  # pages of a block
    ("gpt-oss", "engine"): 2,  # one for each group of layers
    ("Llama", "device"): 2,  # of 16 tokens
}
CACHED = [(tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPT_TOKENS]


@pytest.mark.parametrize("form", ["engine", "pool"])
@pytest.mark.parametrize("kind", ["DeepSeek-V2", "DeepSeek-V3"])
def test_tokens_are_those_of_stock_vllm_whatever_becomes_of_engines(
    kind: str, form: str, nursery: Nursery, pools_folder: Path
) -> None:
    """Engines are killed in the middle of a save and of a load; the next one finds what is there,
    and computes the rest, also what is damaged."""
    folder, extra = folder_in(pools_folder)
    extra["attention"], given = FORMS[form]
    settings = {**given, "model": str(tiny(kind, pools_folder / "model"))}
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
    with pool_in(folder) as pool:
        for page in range(16):
            damage_piece(pool, page, 1, "keys")
    third.forget()
    assert served(third, prompts(1))[0] == wanted
    assert "the CRC of its K is wrong" in third.log.read_text()
    with pool_in(folder) as pool:  # pages that were not read since are still damaged
        pool.admin.check(deep=True, repair=True)
    third.forget()
    assert served(third, prompts(2))[0] == later
    third.end()
    assert check(folder)["pages_held"] == 0


@pytest.mark.parametrize(
    ("kind", "form", "block_tokens", "heads"),
    [
        ("DeepSeek-V2", "engine", 16, None),
        ("DeepSeek-V2", "pool", 16, None),
        ("Llama", "engine", 32, 1),
        ("Llama", "device", 32, 1),
        ("Qwen3", "engine", 32, 2),
        ("gpt-oss", "engine", 32, 4),
    ],
)
def test_engines_of_two_ranks_and_of_one_share_pages(
    kind: str,
    form: str,
    block_tokens: int,
    heads: int | None,
    make_engine: MakeEngine,
    tmp_path: Path,
) -> None:
    """Which are those of one rank, whoever saves: with latents, where all ranks have the only kv
    head, and where the heads are dealt out among two pools. One rank gives the tokens of stock
    vLLM, as other tests show."""
    folder, extra = folder_in(tmp_path)
    extra["attention"], of_form = FORMS[form]
    shards = 1 if heads in (None, 1) else 2
    if shards > 1:
        extra["shards"] = shards
    changes = {} if heads is None else {"num_key_value_heads": heads}
    model = str(tiny(kind, tmp_path / "model", **changes))
    hit = [(tokens - 1) // block_tokens * block_tokens for tokens in PROMPT_TOKENS]
    ends = [(tokens + NEW_TOKENS - 1) // block_tokens for tokens in PROMPT_TOKENS]
    given = {**of_form, "model": model}
    ranks = {**given, "tensor_parallel_size": 2, "disable_log_stats": False}
    one = make_engine(extra, **given)  # type: ignore[arg-type]
    two = make_engine(extra, processes=True, **ranks)  # type: ignore[arg-type]
    first = one.generate(prompts(1), NEW_TOKENS)
    found, second = (two.generate(prompts(seed), NEW_TOKENS) for seed in (1, 2))
    again = one.generate(prompts(2), NEW_TOKENS)
    assert (found["tokens"], again["tokens"]) == (first["tokens"], second["tokens"])
    assert (first["cached"], second["cached"]) == ([0, 0, 0], [0, 0, 0])
    assert (found["cached"], again["cached"]) == (hit, hit)
    assert failures(metrics(two, lambda found: bool(found["vllm:cxlkv_hit_tokens"]))) == 0
    one.end()
    two.end()
    paths = list(folder.glob("*.pool"))
    assert len(paths) == shards
    for path in paths:
        with CXLPool.open(path, threads=1) as pool:
            report, stats, layout = pool.admin.check(deep=True), pool.stats(), pool.layout
        assert report["clean"], report["problems"]
        assert layout.of_layer(0).kv_heads * shards == (heads or 1)
        assert stats["pages_published"] == 2 * sum(ends) * PARTS.get((kind, form), 1)
        assert stats["pages_total"] - stats["pages_free"] == stats["pages_published"]
