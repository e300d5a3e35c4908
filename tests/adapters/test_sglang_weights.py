"""Weights that a running SGLang loads anew: which pages are found and stored then.

Host pools are arrays here, and the model a few layers of torch; SGLang's own are in tests/sglang.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cxlkv.adapters.common import loaded
from cxlkv.adapters.sglang.store import MAIN
from cxlkv.adapters.sglang.weights import UPDATER, updaters

from ..support.reloaded import Model, model_of
from .test_sglang_settings import Config
from .test_sglang_store import KEYS, Engine, Host, indices
from .test_sglang_store import where as where

PAGES = 4


class Pool(Host):
    """What SGLang's scheduler calls of it, too."""

    def alloc(self, need_size: int) -> torch.Tensor:
        return torch.arange(need_size)

    def clear(self) -> None:
        self.memory[:] = 0


class Served:
    """A rank, and the model in its process."""

    def __init__(self, where: str, config: Config | None = None):
        self.model: Model = model_of("sglang")
        self.host = Pool()
        self.engine = Engine(where, {MAIN: self.host}, config)
        self.engine.weights.hear(self.host)

    def find(self) -> int:
        return self.engine.store.leading(KEYS[:PAGES])

    def save(self, seed: int) -> int:
        """Pages that were stored, of K and V of the weights of this number."""
        self.host.alloc(PAGES)
        self.host.fill(seed, PAGES)
        return int(self.engine.store.store(MAIN, KEYS[:PAGES], indices(PAGES)).sum())

    def load(self, seed: int) -> int:
        """Pages that were loaded, and are right."""
        self.host.alloc(PAGES)
        self.host.memory[:] = 0
        good = self.engine.store.load(MAIN, KEYS[:PAGES], indices(PAGES))
        found = self.host.memory.copy()
        self.host.fill(seed, PAGES)
        assert not good.any() or (found == self.host.memory).all()
        return int(good.sum())


@pytest.fixture
def served(where: str) -> Iterator[Served]:
    found = Served(where)
    yield found
    found.engine.weights.end()


def test_after_a_flush_other_weights_have_pages_of_their_own(served: Served, where: str) -> None:
    assert served.save(1) == PAGES
    served.model.load(1)
    served.host.clear()
    assert (served.find(), served.load(1)) == (0, 0)
    assert served.save(2) == PAGES
    assert (served.find(), served.load(2)) == (PAGES, PAGES)
    served.model.load(0)
    served.host.clear()
    assert served.load(1) == PAGES, "those of the start are found again"
    fresh = Engine(where, {MAIN: Pool()})
    assert fresh.store.leading(KEYS[:PAGES]) == PAGES
    assert not served.engine.counting.failures.total()


@pytest.mark.parametrize("how", ["load", "write"])
def test_without_a_flush_nothing_is_found_or_stored(
    served: Served, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trainer writes without load_weights() is seen after a second without loads and
    stores."""
    served.save(1)
    getattr(served.model, how)(1)
    if how == "write":
        monkeypatch.setattr(loaded, "IDLE_S", -1.0)
        served.host.alloc(PAGES)
    assert served.find() == 0
    assert served.save(2) == 0
    assert served.engine.counting.failures["weights"] == 2 * PAGES
    served.host.clear()
    assert (served.find(), served.save(2)) == (0, PAGES)


def test_a_flush_without_other_weights_loses_nothing(served: Served) -> None:
    served.save(1)
    served.host.clear()
    assert served.load(1) == PAGES
    served.model.load(0)
    served.host.clear()
    assert served.load(1) == PAGES


def test_of_several_ranks_one_whose_part_stayed_has_other_keys_too(where: str) -> None:
    """Its K and V come from the others' weights as well. Else engines of the start would find them
    beside the others' pages."""
    ranks = [Served(where, Config(tp_rank=rank, tp_size=2)) for rank in range(2)]
    assert [one.save(1) for one in ranks] == [PAGES, PAGES]
    for number, one in enumerate(ranks):
        one.model.load(number)
        one.host.clear()
    assert [one.find() for one in ranks] == [0, 0]
    assert [one.save(2) for one in ranks] == [PAGES, PAGES]
    assert [one.load(2) for one in ranks] == [PAGES, PAGES]
    fresh = [Engine(where, {MAIN: Pool()}, Config(tp_rank=rank, tp_size=2)) for rank in range(2)]
    assert [one.store.leading(KEYS[:PAGES]) for one in fresh] == [PAGES, PAGES]


def test_weights_that_are_taken_away_are_not_read(served: Served) -> None:
    """They may not be in memory. The next flush says that what is cached is of what is there."""
    served.save(1)
    updater = type(UPDATER, (), {})()
    updater.offload_tags = {"weights", "kv_cache"}
    assert updater in updaters()
    served.model.embedding.weight = torch.nn.Parameter(torch.empty(0, device="meta"))
    served.host.clear()
    assert (served.find(), served.save(2)) == (0, 0)
    updater.offload_tags.clear()
    served.model.embedding.weight = torch.nn.Parameter(torch.zeros(64, 32))
    assert served.find() == 0
    served.host.clear()
    assert served.find() == PAGES


def test_its_calls_are_the_host_pools_own_again(served: Served) -> None:
    assert "clear" in vars(served.host)
    served.engine.weights.end()
    assert not {"alloc", "clear"} & vars(served.host).keys()
