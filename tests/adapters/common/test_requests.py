"""PoolRequests pass the suite of adapters, in pools of several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, LayerGroup
from cxlkv.adapters.common.keys import block_keys, namespace
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.arrays import Doubles, Floats
from cxlkv.errors import CorruptError
from cxlkv.prefix import prefix_keys
from cxlkv.tiers import Tiers

from ...support.adapters import AdapterSuite, damage


class PoolDriver:
    """K and V of a token follow from all ids up to it, as in a model."""

    page_size: ClassVar[int] = 16

    def __init__(self, pool: CXLPool, tiers: Tiers | None = None) -> None:
        self.adapter = PoolRequests(pool, tiers)

    @staticmethod
    def layout() -> KVLayout:
        return KVLayout(layers=2, kv_heads=2, head_dim=16, page_tokens=16, dtype="float32")

    def give(self, request: str, ids: list[int]) -> None:
        sequence = self.adapter.sequence(request)
        for layer in range(self.layout().layers):
            rows = made(ids, layer)[sequence.tokens(layer) :]
            sequence.append(layer, rows, -rows)

    def attends(self, request: str, ids: list[int]) -> Doubles:
        sequence = self.adapter.sequence(request)
        assert len(sequence) == len(ids)
        parts = []
        for layer, window in enumerate(self.layout().windows):
            out, lse = sequence.attend(layer, np.ones((4, 16), np.float32))
            parts += [np.asarray(out).ravel(), np.asarray(lse).ravel()]
            if window is None:
                k, v = (np.asarray(piece) for piece in sequence.fetch(layer))
                parts += [k.ravel(), v.ravel()]
                assert np.array_equal(k[0].reshape(-1, 16)[: len(ids)], made(ids, layer)[:, 0])
        return np.concatenate(parts).astype(np.float64)

    def query(self) -> object:
        return np.ones((4, 16), np.float32)


def made(ids: list[int], layer: int) -> Floats:
    number, numbers = 1 + layer, []
    for token in ids:
        number = (number * 1103515245 + token * 12345 + 7) % 2147483647
        numbers.append(number)
    places = np.arange(1, 33).reshape(2, 16)
    return np.sin(np.array(numbers)[:, None, None] % 10007 * places / 7).astype(np.float32)


class LongBlocks(PoolDriver):
    """An engine's block is two pages."""

    page_size = 32


class Windows(PoolDriver):
    """Layers with a window, which give pages back."""

    @staticmethod
    def layout() -> KVLayout:
        shape = {"layers": 1, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
        groups = [LayerGroup(**shape, window=24), LayerGroup(**shape)]  # type: ignore[arg-type]
        return KVLayout.of(groups, page_tokens=16)


class TestPoolRequests(AdapterSuite):
    driver = PoolDriver


class TestLongBlocks(AdapterSuite):
    driver = LongBlocks


class TestWindows(AdapterSuite):
    driver = Windows


def test_other_text_behind_a_truncate_is_stored() -> None:
    with CXLPool.create("anonymous:", layout=PoolDriver.layout(), capacity="8MiB") as pool:
        engine = PoolDriver(pool)
        engine.adapter.load("one", None, 0)
        first, second = [5] * 64, [5] * 20 + [6] * 44
        space = namespace({})
        keys = [block_keys(list(prefix_keys(ids, 16)), 16, space) for ids in (first, second)]
        engine.give("one", first)
        assert engine.adapter.store("one", keys[0]) == 4
        engine.adapter.truncate("one", 20)
        engine.give("one", second)
        assert engine.adapter.store("one", keys[1]) == 3
        assert engine.adapter.forget(keys[0]) == 4
        assert engine.adapter.forget(keys[0]) == 0
        engine.adapter.release("one")
        assert pool.admin.check()["clean"]


def test_who_verifies_on_the_way_mends_then(tmp_path: Path) -> None:
    path, ids = tmp_path / "pool", [3] * 64
    keys = prefix_keys(ids, 16)
    with CXLPool.create(path, layout=PoolDriver.layout(), capacity="8MiB") as pool:
        engine = PoolDriver(pool)
        engine.adapter.load("one", None, 0)
        engine.give("one", ids)
        engine.adapter.store("one", keys)
        damage(path, keys, block=1, kind="keys")
        with CXLPool.open(path) as other, pool.match(keys) as hit:
            requests = PoolRequests(other)
            assert requests.load("two", hit.handle, 64, keys, verify=False) == 64
            with pytest.raises(CorruptError):
                requests.sequence("two").fetch(0)
            assert requests.mend(keys) == [1]
            assert requests.match(keys).tokens == 16
