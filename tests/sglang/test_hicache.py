"""CXLHiCache by SGLang's factory, over SGLang's own host memory, in both layouts, GQA and MLA."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlkv.errors import BadArgumentError, UnsupportedError

from ..stores import StoreSuite, check
from .engines import Engine, FlatEngine, created, hashes, indices, mha_memory, mla_memory

KINDS = [
    ("mha", "layer_first"),
    ("mha", "page_first"),
    ("mha", "page_first_direct"),
    ("mla", "layer_first"),
    ("mla", "page_first"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pools"
    made.mkdir()
    return made


class TestPages(StoreSuite):
    @pytest.fixture(params=KINDS, ids="-".join)
    def driver(self, request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
        engine = Engine(folder, *request.param)
        yield engine
        engine.close()


class TestFlatPages(StoreSuite):
    @pytest.fixture(params=[KINDS[0], KINDS[1]], ids="-".join)
    def driver(self, request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
        engine = FlatEngine(folder, *request.param)
        yield engine
        engine.close()


def rank(folder: Path, number: int, said: object) -> None:
    engine = Engine(folder, "mha", "page_first", {"tp_rank": number, "tp_size": 2})
    stored = engine.store([10 * number + 1, 5])
    said.put((number, stored, engine.leading([10 * number + 1, 5])))  # type: ignore[attr-defined]
    engine.close()


def test_ranks_have_a_shard_each_in_one_pool(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [context.Process(target=rank, args=(folder, number, said)) for number in range(2)]
    for one in ranks:
        one.start()
    assert sorted(said.get(timeout=120) for _ in ranks) == [(0, True, 2), (1, True, 2)]
    for one in ranks:
        one.join(60)
    assert check(folder)["pages_published"] == 4
    first = Engine(folder, "mha", "page_first", {"tp_rank": 0, "tp_size": 2})
    assert [first.leading([block]) for block in (1, 5, 11)] == [1, 1, 0]
    assert first.load([1, 5, 11]) == [True, True, False]
    first.close()


def test_mla_ranks_share_their_pages_and_one_stores_them(folder: Path) -> None:
    ranks = [
        Engine(folder, "mla", "page_first", {"tp_rank": number, "tp_size": 2})
        for number in range(2)
    ]
    assert ranks[1].store([1, 2]), "said to be stored, as the other rank does it"
    assert ranks[1].leading([1, 2]) == 0
    assert ranks[0].store([1, 2])
    assert ranks[1].load([1, 2]) == [True, True]
    for one in ranks:
        one.close()
    assert check(folder)["pages_published"] == 2


def test_another_model_dtype_or_salt_is_a_miss(folder: Path) -> None:
    path = {"where": str(folder / "one.pool"), "capacity": "3MiB"}
    memory = mha_memory("page_first")
    first = created(memory, path)
    assert first.batch_set_v1(hashes([1]), indices(1)) == [True]
    assert first.batch_exists(hashes([1])) == 1
    for words, extra in (
        ({"model_name": "another/model"}, {}),
        ({"pp_rank": 1, "pp_size": 2}, {}),
        ({"tp_size": 2}, {}),
        ({}, {"salt": "tenant"}),
    ):
        other = created(memory, {**path, **extra}, **words)
        assert other.batch_exists(hashes([1])) == 0
        other.close()
    import torch

    third = created(mha_memory("page_first", torch.float16), path)
    assert third.batch_exists(hashes([1])) == 0, "as many bytes, and others"
    third.close()
    first.close()


def test_split_heads_are_found_by_engines_of_more_ranks(folder: Path) -> None:
    words = {"tp_lcm_size": 2, "should_split_heads": True}
    path = {"where": str(folder / "one.pool"), "capacity": "3MiB"}
    one = created(mha_memory("page_head", heads=2), path, **words)
    assert one.batch_set_v1(hashes([1]), indices(1)) == [True]
    assert one.batch_exists(hashes([1, 2])) == 1
    assert one.batch_get_v1(hashes([1]), indices(1)) == [True]
    one.close()
    assert check(folder)["pages_published"] == 2


def keep_storing(folder: Path, began: object) -> None:
    engine = Engine(folder, "mha", "layer_first")
    block = 0
    while True:
        engine.store([block, block + 1, block + 2])
        began.set()  # type: ignore[attr-defined]
        block += 3


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_engine_leaves_nothing(folder: Path, seed: int) -> None:
    context = multiprocessing.get_context("spawn")
    began = context.Event()
    process = context.Process(target=keep_storing, args=(folder, began))
    process.start()
    assert began.wait(120)
    process.join(0.05 * seed)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    engine = Engine(folder, "mha", "layer_first")
    assert engine.store([100_000])
    assert all(engine.load(range(engine.leading(range(3)))))
    assert engine.load([100_000]) == [True]
    engine.close()
    check(folder)


def test_what_goes_wrong_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cxlkv"):
        engine = Engine(folder, "mha", "page_first")
        assert "made" in caplog.text
        assert "room for" in caplog.text
        for _ in range(3):
            assert not engine.cache.batch_set(hashes([1]), ["no tensor"])
        assert engine.failures() == 3
        assert caplog.text.count("a tensor of") == 1
        engine.close()
        assert engine.cache.batch_exists(hashes([1])) == 0
        assert engine.cache.batch_get_v1(hashes([1]), indices(1)) == [False]


def test_more_than_the_pool_has_is_refused_and_counted(folder: Path) -> None:
    engine = FlatEngine(folder, "mha", "page_first")
    assert not engine.store(range(2 * engine.room))
    assert engine.cache.failures == {"full": 1}
    assert engine.store([1, 2])
    assert engine.load([2, 1]) == [True, True]
    engine.close()


def test_clear_forgets_all(folder: Path) -> None:
    engine = Engine(folder, "mha", "page_first")
    assert engine.store([1, 2, 3])
    engine.cache.clear()
    assert engine.leading([1]) == 0
    assert engine.store([1])
    engine.close()
    assert check(folder)["pages_published"] == 1


def test_a_pool_whose_file_is_removed_serves_on(folder: Path) -> None:
    engine = Engine(folder, "mha", "page_first")
    assert engine.store([1])
    (path,) = folder.glob("*.pool")
    path.unlink()
    assert engine.load([1]) == [True]
    assert engine.store([2])
    engine.close()


def test_what_cannot_be_served_is_refused_at_the_start(folder: Path) -> None:
    memory = mha_memory("page_first")
    for extra, words in (
        ({"were": "/dev/shm"}, "did you mean where"),
        ({"capacity": 1.5}, "text like 8GiB"),
        ({"capacity": "8G"}, "8G"),
        ({"salt": 5}, "text is wanted"),
        ({"where": "anonymous:"}, "memory without a name"),
    ):
        with pytest.raises(BadArgumentError, match=words):
            created(memory, {"where": f"{folder}/", **extra})
    backend = created(memory, {"where": f"{folder}/", "capacity": "3MiB"})
    with pytest.raises(UnsupportedError, match="mamba"):
        backend.register_mem_host_pool_v2(memory, "mamba")
    backend.close()
    memory = mla_memory("page_first")
    memory.layout = "of another release"
    with pytest.raises(UnsupportedError, match="of another release"):
        created(memory, {"where": f"{folder}/"}, is_mla_model=True)
