"""vLLM with a pool for its prefixes: the tokens are those of stock vLLM, whatever happens."""

from __future__ import annotations

from pathlib import Path
from random import Random
from subprocess import TimeoutExpired

import numpy as np
import pytest

from cxlkv import CXLPool

from ..support.damaging import damage_piece
from .conftest import MakeEngine
from .engines import BLOCK_TOKENS, FORMS, VOCABULARY_SIZE, Engine

PROMPT_TOKENS = (300, 96, 97, 31)
CACHED = [288, 64, 96, 0]  # whole blocks before the last token


def prompts(seed: int = 1) -> list[list[int]]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(0, VOCABULARY_SIZE, tokens).tolist() for tokens in PROMPT_TOKENS]


def storm_prompts(count: int = 64) -> list[list[int]]:
    """Some begin alike."""
    numbers = np.random.default_rng(2)
    shared = numbers.integers(0, VOCABULARY_SIZE, 128).tolist()
    found = []
    for _ in range(count):
        own = numbers.integers(0, VOCABULARY_SIZE, numbers.integers(20, 200)).tolist()
        found.append(shared[: numbers.choice([0, 32, 64, 128])] + own)
    return found


def pool_in(folder: Path) -> CXLPool:
    (path,) = folder.glob("*.pool")
    return CXLPool.open(path, threads=1)


def check(folder: Path) -> dict[str, int]:
    """Nothing is wrong in the pool; its counts."""
    with pool_in(folder) as pool:
        report = pool.admin.check(deep=True)
        assert report["clean"], report["problems"]
        return pool.stats()


def end(folder: Path, *engines: Engine) -> None:
    """Nothing is held then, and nothing is wrong."""
    for engine in engines:
        engine.end()
    assert check(folder)["pages_held"] == 0


def damage(folder: Path, page: int, layer: int) -> None:
    with pool_in(folder) as pool:
        damage_piece(pool, page, layer)


def of_transformers(model: Path, ids: list[int], tokens: int) -> list[int]:
    import torch
    from transformers import LlamaForCausalLM

    made = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = list(ids)
    with torch.no_grad():
        for _ in range(tokens):
            found.append(int(made(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


def folder_in(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    folder = tmp_path / "pools"
    folder.mkdir()
    return folder, {"where": f"{folder}/", "capacity": "64MiB"}


def test_second_run_comes_from_the_pool_with_the_same_tokens(
    make_engine: MakeEngine, model: Path, tmp_path: Path
) -> None:
    folder, extra = folder_in(tmp_path)
    stock, ours = make_engine(), make_engine(extra)
    wanted = stock.generate(prompts())["tokens"]
    assert wanted == [of_transformers(model, ids, 16) for ids in prompts()]
    stock.end()

    first = ours.generate(prompts())
    assert (first["tokens"], first["cached"]) == (wanted, [0, 0, 0, 0])
    ours.forget()
    second = ours.generate(prompts())
    assert (second["tokens"], second["cached"]) == (wanted, CACHED)
    assert f"made {folder}" in ours.log()
    assert "kv_load_failure_policy is set to recompute" in ours.log()

    damage(folder, page=2, layer=1)
    ours.forget()
    assert ours.generate(prompts())["tokens"] == wanted
    assert "the CRC of its V is wrong" in ours.log()
    ours.forget()
    healed = ours.generate(prompts())
    assert (healed["tokens"], healed["cached"]) == (wanted, CACHED)
    assert ours.log().count("the CRC of its V is wrong") == 1
    end(folder, ours)


def test_an_encoded_pool_keeps_prefixes_of_an_engine_in_full(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """What an engine computes itself is its own; what it finds is what the codes stand for."""
    folder, extra = folder_in(tmp_path)
    stock, ours = make_engine(), make_engine({**extra, "encoding": "int8"})
    wanted = stock.generate(prompts())["tokens"]
    stock.end()
    first = ours.generate(prompts())
    assert (first["tokens"], first["cached"]) == (wanted, [0, 0, 0, 0])
    ours.forget()
    second = ours.generate(prompts())
    ours.forget()
    third = ours.generate(prompts())
    ours.end()
    assert (second["tokens"], second["cached"]) == (third["tokens"], CACHED)
    equal = [one == other for one, other in zip(second["tokens"], wanted, strict=True)]
    assert sum(equal) >= 3  # 8 bits may turn a near tie
    with pool_in(folder) as pool:
        assert pool.layout.encoding == "int8"
    assert check(folder)["pages_held"] == 0


def test_engines_in_fp8_find_their_bytes_in_the_pool(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """A prefix that another engine computed is what this one would have in its blocks."""
    folder, extra = folder_in(tmp_path)
    stock, full = make_engine(kv_cache_dtype="fp8"), make_engine()
    one = make_engine(extra, kv_cache_dtype="fp8")
    wanted = stock.generate(prompts())["tokens"]
    assert wanted != full.generate(prompts())["tokens"], "fp8 is seen in these texts"
    full.end()
    first = one.generate(prompts())
    assert (first["tokens"], first["cached"]) == (wanted, [0, 0, 0, 0])
    one.end()
    with pool_in(folder) as pool:
        assert (pool.layout.encoding, pool.layout.dtype) == ("fp8_e4m3", "float32")
    two = make_engine({**extra, "load": "async", "tails": True}, kv_cache_dtype="fp8")
    second = two.generate(prompts())
    assert (second["tokens"], second["cached"]) == (wanted, [288, 95, 96, 0])
    longer = [ids + more for ids, more in zip(prompts(), wanted, strict=True)]
    again = two.generate(longer)
    assert sum(again["cached"]) > sum(CACHED)
    assert again["tokens"] == stock.generate(longer)["tokens"]
    damage(folder, page=2, layer=1)
    two.forget()
    assert two.generate(prompts())["tokens"] == wanted
    end(folder, two, stock)


def inside_another(extra: dict[str, object], **written: object) -> dict[str, object]:
    """kv_transfer_config with our connector inside vLLM's own MultiConnector."""
    ours = {"kv_connector": "CXLConnector", "kv_role": "kv_both"}
    connectors = [{**ours, "kv_connector_extra_config": extra}]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
        **written,
    }


def test_a_damaged_page_fails_no_request_inside_another_connector(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """It would by vLLM's default, which only the engine's own settings can change."""
    folder, extra = folder_in(tmp_path)
    extra = {**extra, "load": "async"}
    refused = make_engine(kv_transfer_config=inside_another(extra))
    said = refused.ready()
    assert said is not None
    assert 'beside "kv_connector": "MultiConnector" write' in said

    told = inside_another(extra, kv_load_failure_policy="recompute")
    ours = make_engine(kv_transfer_config=told)
    wanted = ours.generate(prompts())["tokens"]
    damage(folder, page=2, layer=1)
    ours.forget()
    assert ours.generate(prompts())["tokens"] == wanted
    assert "the CRC of its V is wrong" in ours.log()
    end(folder, ours)


def test_several_processes_load_beside_the_steps_what_another_engine_stored(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder, extra = folder_in(tmp_path)
    one = make_engine(extra)
    two = make_engine({**extra, "load": "async"}, processes=True)
    wanted = one.generate(prompts())["tokens"]
    found = two.generate(prompts())
    assert (found["tokens"], found["cached"]) == (wanted, CACHED)
    damage(folder, page=3, layer=2)
    two.forget()
    assert two.generate(prompts())["tokens"] == wanted
    assert two.log().count("the CRC of its V is wrong") == 1
    again = prompts(5)
    expected = two.generate(again)["tokens"]
    found = one.generate(again)
    assert (found["tokens"], found["cached"]) == (expected, CACHED)
    end(folder, one, two)


@pytest.mark.parametrize("form", FORMS)
def test_aborts_at_random_and_a_kill_leave_nothing(
    make_engine: MakeEngine, tmp_path: Path, seed: int, form: str
) -> None:
    folder, extra = folder_in(tmp_path)
    extra["attention"], given = FORMS[form]
    one = make_engine(extra, **given)  # type: ignore[arg-type]
    asked = storm_prompts()
    wanted = one.storm(asked, max_tokens=24, share=0.0, seed=seed)
    assert len(wanted["done"]) == 64
    one.forget()
    found = one.storm(asked, max_tokens=24, share=0.03, seed=seed)
    assert found["aborted"] > 5
    assert found["done"].items() <= wanted["done"].items()
    check(folder)
    one.forget()
    one.say(do="storm", prompts=asked, max_tokens=500, share=0.0, seed=seed)
    chance = Random(seed)
    with pool_in(folder) as pool:  # killed while it stores what it generates
        enough = pool.stats()["pages_published"] + chance.randrange(64, 256)
        while pool.stats()["pages_published"] < enough:
            assert one.process.poll() is None
        with pytest.raises(TimeoutExpired):
            one.process.wait(chance.uniform(0, 0.1))
        one.kill()
        assert pool.admin.check(deep=True)["clean"]
        assert pool.stats()["pages_held"] == 0
    two = make_engine({**extra, "load": "async"}, **given)  # type: ignore[arg-type]
    found = two.storm(asked, max_tokens=24, share=0.03, seed=seed + 1)
    assert found["done"].items() <= wanted["done"].items()
    assert two.generate([asked[0][:1], asked[0]])["cached"][1] == (len(asked[0]) - 1) // 32 * 32
    more = two.generate(asked[:8], 48, skip_reading_prefix_cache=True)["tokens"]
    longer = [ids + new[:40] for ids, new in zip(asked, more, strict=False)]
    again = two.generate(longer, 8)  # from what was stored before the kill
    assert again["tokens"] == [new[40:] for new in more]
    assert again["cached"] == [(len(ids) - 1) // 32 * 32 for ids in longer]
    end(folder, two)


@pytest.mark.parametrize("attention", ["engine", "pool"])
def test_many_requests_at_once(
    make_engine: MakeEngine, tmp_path: Path, seed: int, attention: str
) -> None:
    folder, extra = folder_in(tmp_path)
    stock = make_engine(max_num_seqs=128)
    ours = make_engine({**extra, "attention": attention}, max_num_seqs=128)
    asked = storm_prompts(512)
    wanted = stock.storm(asked, max_tokens=3, share=0.0, seed=seed)
    assert len(wanted["done"]) == 512
    for _ in range(2):
        assert ours.storm(asked, max_tokens=3, share=0.0, seed=seed) == wanted
        ours.forget()
    end(folder, ours, stock)


def test_small_pool_changes_nothing(make_engine: MakeEngine, tmp_path: Path, seed: int) -> None:
    folder, extra = folder_in(tmp_path)
    stock, ours = make_engine(), make_engine({**extra, "capacity": "8MiB"})
    wanted = stock.storm(storm_prompts(), max_tokens=24, share=0.0, seed=seed)
    stock.end()
    for _ in range(2):
        assert ours.storm(storm_prompts(), max_tokens=24, share=0.0, seed=seed) == wanted
        ours.forget()
    ours.end()
    stats = check(folder)
    assert stats["pages_held"] == 0
    assert stats["pages_free"] < stats["pages_total"] // 10


@pytest.mark.parametrize("form", ["engine", "device"])
def test_each_rank_has_its_own_shard(form: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    folder, extra = folder_in(tmp_path)
    extra["attention"], given = FORMS[form]
    ranks = {**given, "processes": True, "tensor_parallel_size": 2}
    stock, engine = make_engine(), make_engine(extra, **ranks)  # type: ignore[arg-type]
    wanted = engine.generate(prompts(), max_tokens=8)["tokens"]
    assert wanted == stock.generate(prompts(), max_tokens=8)["tokens"]
    stock.end()
    shards = sorted(folder.glob("*.pool"))
    assert [path.stem[-4:] for path in shards] == ["0of2", "1of2"]
    engine.forget()
    found = engine.generate(prompts(), max_tokens=8)
    assert (found["tokens"], found["cached"]) == (wanted, CACHED)
    hidden = shards[0].rename(folder / "hidden")  # so that damage() finds the other one
    damage(folder, page=2, layer=1)
    engine.forget()
    assert engine.generate(prompts(), max_tokens=8)["tokens"] == wanted
    assert engine.log().count("the CRC of its V is wrong") == 1
    end(folder, engine)
    hidden.rename(shards[0])


def test_an_engine_in_bf16(make_engine: MakeEngine, tmp_path: Path) -> None:
    folder, extra = folder_in(tmp_path)
    stock, ours = make_engine(dtype="bfloat16"), make_engine(extra, dtype="bfloat16")
    wanted = stock.generate(prompts())["tokens"]
    stock.end()
    assert ours.generate(prompts())["tokens"] == wanted
    ours.forget()
    second = ours.generate(prompts())
    assert (second["tokens"], second["cached"]) == (wanted, CACHED)
    end(folder, ours)


def test_layers_with_windows_are_served_by_several_ranks(
    make_engine: MakeEngine, windowed_model: Path, tmp_path: Path
) -> None:
    folder, extra = folder_in(tmp_path)
    settings = {"model": str(windowed_model), "processes": True, "tensor_parallel_size": 2}
    ours = make_engine(extra, **settings)  # type: ignore[arg-type]
    wanted = ours.generate(prompts())["tokens"]
    ours.forget()
    found = ours.generate(prompts())
    assert (found["tokens"], found["cached"]) == (wanted, CACHED)
    shards = sorted(folder.glob("*.pool"))
    hidden = shards[0].rename(folder / "hidden")  # so that damage() finds the other one
    for page in range(16):
        damage(folder, page, layer=1)
    ours.forget()
    assert ours.generate(prompts())["tokens"] == wanted
    assert "the CRC of its V is wrong" in ours.log()
    with pool_in(folder) as pool:  # pages that were not read since are still damaged
        pool.admin.check(deep=True, repair=True)
    end(folder, ours)
    hidden.rename(shards[0])


def test_what_cannot_be_served_is_said_at_the_start(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder, extra = folder_in(tmp_path)
    one = make_engine({**extra, "where": f"{folder}/one.pool"})
    one.end()
    several: list[Engine] = [
        make_engine({**extra, "were": "/dev/shm/"}),
        make_engine({**extra, "where": f"{folder}/one.pool"}, block_size=2 * BLOCK_TOKENS),
    ]
    said = [engine.ready() or "" for engine in several]
    assert ": were is not one of" in said[0]
    assert "did you mean where?" in said[0]
    assert f"{folder}/one.pool is another pool than the one wanted" in said[1]
    assert "Give a folder as where" in said[1]
