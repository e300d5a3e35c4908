"""Inside vLLM's MultiConnector, beside its ExampleConnector: hits, saves, damage and resets are as
alone, whichever comes first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ..support.damaging import damage_piece
from .conftest import MakeEngine
from .engines import Engine
from .test_prefixes import CACHED, end, folder_in, pool_in, prompts

THEIRS = [288, 64, 0, 0]
"""What the other one has of each prompt: of 97 tokens it saves 96, and looks for 64."""


def company(extra: dict[str, object], files: Path, order: str) -> dict[str, object]:
    """kv_transfer_config of both."""
    both: list[dict[str, object]] = [
        {
            "kv_connector": "CXLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"load": "async", **extra},
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(files)},
        },
    ]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": both if order == "first" else both[::-1]},
    }


def figure(engine: Engine, name: str) -> float:
    return float(str(engine.ask(do="metrics")[f"vllm:cxlkv_{name}"]))


def damage(folder: Path, page: int) -> None:
    with pool_in(folder) as pool:
        damage_piece(pool, page, layer=1)


@pytest.mark.parametrize("order", ["first", "second"])
def test_all_is_as_alone(make_engine: MakeEngine, tmp_path: Path, order: str) -> None:
    folder, extra = folder_in(tmp_path)
    files = tmp_path / "files"
    files.mkdir()
    told = company(extra, files, order)
    stock = make_engine()
    ours = make_engine(kv_transfer_config=told, disable_log_stats=False)
    wanted = stock.generate(prompts())["tokens"]
    stock.end()

    def serve(cached: list[int]) -> None:
        ours.forget()
        found = ours.generate(prompts())
        assert (found["tokens"], found["cached"]) == (wanted, cached)

    serve([0, 0, 0, 0])  # both save
    assert figure(ours, "saved_tokens") >= sum(CACHED)
    serve(CACHED)  # what the first one lacks the second has
    hits = sum(CACHED) if order == "first" else CACHED[2]
    assert figure(ours, "hit_tokens") == figure(ours, "loaded_tokens") == hits

    shutil.rmtree(files)
    files.mkdir()
    damage(folder, page=2)
    ours.forget()
    assert ours.generate(prompts())["tokens"] == wanted  # ours alone has it, with a bad page
    assert ours.log().count("the CRC of its V is wrong") == 1
    serve(CACHED)  # healed, and saved by the other again
    assert figure(ours, "failures corrupt") == 1

    ours.forget(connector=True)  # of which the other one takes no notice
    serve(THEIRS)
    shutil.rmtree(files)
    files.mkdir()
    serve(CACHED)  # saved again, from blocks that the other had loaded

    with pool_in(folder) as pool:  # ours hears of each request's end
        keep = {"kv_transfer_params": {"cxlkv": {"ttl_s": 600}}}
        for asked, pages in ({}, 0), (keep, 9 + 3 + 3 + 1):
            ours.generate(prompts(), extra_args=asked)
            ours.generate([[1, 2, 3]], max_tokens=1)  # workers hear with the next step
            assert pool.stats()["pages_held"] == pages
    end(folder, ours)


def test_attention_in_the_pool_wants_to_be_alone(make_engine: MakeEngine, tmp_path: Path) -> None:
    _, extra = folder_in(tmp_path)
    told = company({**extra, "attention": "pool"}, tmp_path, "first")
    said = make_engine(kv_transfer_config=told).ready() or ""
    assert '"attention": "pool" inside MultiConnector' in said
