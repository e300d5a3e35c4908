"""What a pool ends before it closes: the last registered first, once, and not kept after that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from cxlkv import CXLPool, KVLayout, Tiers
from cxlkv.machine.lifetime import BeforeClose
from cxlkv.machine.prefault import Background
from cxlkv.transport import Server

from .support.waiting import until

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=32)


def tiers(pool: CXLPool) -> object:
    with Tiers(pool) as made:
        made.start()
    return made


def server(pool: CXLPool) -> object:
    with Server(pool, ("127.0.0.1", 0), b"x" * 32) as made:
        return made


def mapping(pool: CXLPool) -> object:
    gpu = pytest.importorskip("cxlkv.gpu.mapping", reason="torch is not installed")
    with gpu.Mapping(pool, "cpu") as made:
        return made


def write_through(pool: CXLPool) -> object:
    gpu = pytest.importorskip("cxlkv.gpu.write", reason="torch is not installed")
    return gpu.WriteThrough(pool)


def prefault(pool: CXLPool) -> object:
    made = Background(pool._handle)
    pool.before_close(made.end)
    return made


@pytest.mark.parametrize("make", [tiers, server, mapping, write_through, prefault])
def test_what_has_ended_is_not_kept(make: Callable[[CXLPool], object]) -> None:
    def are_gone() -> bool:
        gc.collect()
        return all(each() is None for each in made)

    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="8MiB", threads=1) as pool:
        made = [weakref.ref(make(pool)) for _ in range(5)]
        until(are_gone)
        assert not pool.before_close._calls


class Lent:
    def __init__(self, ended: list[str], name: str):
        self.ended, self.name = ended, name

    def end(self) -> None:
        self.ended.append(self.name)
        if self.name == "fails":
            raise OSError("of a device")


def test_the_last_is_ended_first_and_each_once() -> None:
    ended: list[str] = []
    before_close = BeforeClose()
    one, two, fails = (Lent(ended, name) for name in ("one", "two", "fails"))
    before_close(Lent(ended, "dropped").end)
    for end in (one.end, two.end, fails.end):
        before_close(end)
    before_close(lambda: ended.append("a function"))
    with pytest.raises(OSError, match="of a device"):
        before_close.run()
    assert ended == ["a function", "fails"]
    before_close.run()
    before_close.run()
    assert ended == ["a function", "fails", "two", "one"]
