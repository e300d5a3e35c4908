"""Small engines with paged blocks on the pools of one folder, which are whole at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from cxlkv import CXLPool
from cxlkv.adapters.vllm.settings import Settings

from ..conftest import audit
from .paged_engine import SPACE, Engine, Grouping, layout_of, make_pool


def use_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels of Grouping.reads: an interpreter works in one thread at a time."""
    for name in ("checks", "sources"):
        module = pytest.importorskip(f"cxlkv.kernels.{name}")
        monkeypatch.setattr(module, "runs_triton", lambda device: False)


class Engines:
    """Engines on one folder's pools of two ranks; an engine of one rank uses the first.

    settings: of each engine, beside those that a call gives.
    """

    def __init__(
        self,
        folder: Path,
        capacity: str,
        blocks: int,
        settings: Mapping[str, object],
        grouping: Grouping | None = None,
    ):
        self.paths = [str(folder / f"{rank}.pool") for rank in range(2)]
        self.grouping = grouping or Grouping()
        for rank, path in enumerate(self.paths):
            make_pool(path, layout_of(rank, self.grouping), capacity)
        self.made: list[Engine] = []
        self._blocks, self._settings = blocks, settings

    def __call__(
        self,
        ranks: int = 1,
        blocks: int | None = None,
        *,
        shares: bool = False,
        space: bytes = SPACE,
        copies: int = 1,
        **given: object,
    ) -> Engine:
        settings = Settings.model_validate({"deadline_s": 20, **self._settings, **given})
        blocks = blocks or self._blocks
        paths = self.paths[:ranks]
        own = (self.grouping, copies)
        self.made.append(Engine(paths, settings, blocks, shares, space, None, *own))
        return self.made[-1]

    def close(self, engine: Engine) -> None:
        """Before its test ends."""
        engine.close()
        assert len(engine.free) == engine.blocks
        self.made.remove(engine)

    def published(self, rank: int = 0) -> int:
        with CXLPool.open(self.paths[rank], threads=1) as pool:
            return pool.stats()["pages_published"]


@contextmanager
def engines_in(
    folder: Path,
    capacity: str = "8MiB",
    blocks: int = 64,
    grouping: Grouping | None = None,
    **settings: object,
) -> Iterator[Engines]:
    """At the end all engines are closed, nothing is held, and the pools are whole."""
    engines = Engines(folder, capacity, blocks, settings, grouping)
    yield engines
    for engine in list(engines.made):
        engines.close(engine)
    for path in filter(os.path.exists, engines.paths):
        with CXLPool.open(path, threads=1) as pool:
            audit(pool)
            assert pool.stats()["pages_held"] == 0
