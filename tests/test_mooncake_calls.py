"""Mooncake's own tests of its store, against a pool of objects behind Mooncake's calls; and what
these tests leave out. CXLKV_MOONCAKE names the folder mooncake-wheel/tests of a checkout."""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import mooncake_store
from .support.mooncake_store import ABSENT_KEY, LEASED, NO_SPACE, MooncakeDistributedStore

FOLDER = os.environ.get("CXLKV_MOONCAKE")
NO_LOCAL_BUFFER = "test_zero_local_buffer_size"
"""Wants a put to fail where the client has no buffer to copy through: a pool needs none."""


class Results(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, str] = {}

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        ended = self.errors + self.failures + self.skipped
        wrong = [said for one, said in ended if one is test]
        self.said[test.id().rpartition(".")[2]] = "".join(wrong)


def results(path: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """By test, what went wrong, or nothing."""
    for name, module in mooncake_store.modules().items():
        patch.setitem(sys.modules, name, module)
    patch.setenv("DEFAULT_KV_LEASE_TTL", "50")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = unittest.TestLoader().loadTestsFromModule(module)
    found = Results()
    tests.run(found)
    return found.said


@pytest.mark.skipif(FOLDER is None, reason="CXLKV_MOONCAKE names no folder with Mooncake's tests")
@pytest.mark.parametrize(
    ("file", "count"),
    [("test_distributed_object_store", 16), ("test_distributed_object_store_cxl", 11)],
)
def test_mooncakes_tests_pass(file: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(Path(str(FOLDER)) / f"{file}.py", monkeypatch)
    failed = {name: said for name, said in found.items() if said}
    print(f"{file}: {len(found) - len(failed)} of {len(found)} pass")
    for name, said in failed.items():
        print(name, said)
    assert len(found) == count
    assert list(failed) == [NO_LOCAL_BUFFER]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeDistributedStore]:
    """Its leases end with it."""
    monkeypatch.setenv("DEFAULT_KV_LEASE_TTL", "600000")
    made = MooncakeDistributedStore()
    assert made.setup("localhost", "", "64MiB", 0, "tcp", "", "") == 0
    yield made
    made.close()


def test_what_was_got_is_not_removed(store: MooncakeDistributedStore) -> None:
    for key in "abc":
        assert store.put(key, key.encode() * 300_000) == 0
    assert store.get("a") == b"a" * 300_000
    assert (store.remove("a"), store.remove("b"), store.remove("b")) == (LEASED, 0, ABSENT_KEY)
    assert store.remove_all() == 1
    assert store.batch_is_exist(["a", "b", "c"]) == [1, 0, 0]


def test_another_object_is_put_in_place_of_one(store: MooncakeDistributedStore) -> None:
    assert store.put("a", b"one") == store.put("a", b"another") == 0
    assert store.get("a") == b"one"
    assert store.upsert("a", b"another") == 0
    assert store.get("a") == b"another"


def test_a_full_store_says_so(store: MooncakeDistributedStore) -> None:
    size, total = 10 << 20, store.pool.stats()["pages_total"]
    codes = [store.put(str(number), bytes(size)) for number in range(8)]
    fits = total // (size // store.pool.layout.page_tokens)
    assert codes == [0] * fits + [NO_SPACE] * (8 - fits)
