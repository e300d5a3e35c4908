"""Engines of tests/lmcache/test_hosts.py: LMCache's engine over K and V of the host."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import ModuleType

warnings.simplefilter("ignore")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # else it tells its makers
os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"
tests = sys.modules["tests"] = ModuleType("tests")  # a package of others may have this name, too
tests.__path__ = [str(Path(__file__).resolve().parent.parent)]

from tests.lmcache import engines  # noqa: E402
from tests.lmcache.engines import CHUNK  # noqa: E402
from tests.support.engine_hosts import PAGES  # noqa: E402
from tests.support.nursery import Settings, serve  # noqa: E402

# isort: split
import torch  # noqa: E402

from cxlkv import ObjectPool  # noqa: E402

TOKENS = PAGES * CHUNK


class Life:
    def __init__(self, settings: Settings):
        given = dict(settings)
        where, form, capacity = (str(given.pop(one)) for one in ("where", "form", "capacity"))
        ours = {f"cxlkv.{name}": value for name, value in given.items()}
        config = engines.config_of(where, form=form, capacity=capacity, extra_config=ours)
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(dir=os.path.dirname(where))
        self.engine, self.form = engines.make_engine(config, engines.metadata_of()), form

    @property
    def pool(self) -> ObjectPool:
        return self.engine.storage.pool

    def save(self, text: int) -> int:
        counts = self.engine.storage.counting.counts
        before = counts["stored_objects"]
        self.engine.fill(text)
        self.engine.store(engines.text(text, TOKENS))
        return counts["stored_objects"] - before

    def load(self, text: int) -> tuple[int, bool]:
        if self.form == "tier":  # else it has it in memory of its own
            self.engine.engine.clear(locations=["LocalCPUBackend"])
        was, tokens = self.engine.fill(text), engines.text(text, TOKENS)
        self.engine.clear()
        found = self.engine.retrieve(tokens)
        slots = self.engine.slots(tokens)[:found]
        same = [
            torch.equal(before[:, slots], now[:, slots])
            for before, now in zip(was, self.engine.kept, strict=True)
        ]
        return found // CHUNK, all(same)

    def mark(self, where: str, call: Callable[[], object]) -> None:
        """Before the middle chunk: in place, before LMCache's connector writes or reads it; of
        copies, before it is published, and before LMCache's own memory gets it."""
        storage, connector = self.engine.storage, self.engine.engine.gpu_connector
        if self.form == "memory":
            in_call(connector, "from_gpu" if where == "save" else "to_gpu", call)
        elif where == "save":
            in_call(storage.cache, "publish", call)
        else:
            in_call(storage, "_brought_near", call)

    def failures(self) -> Mapping[str, int]:
        return self.engine.storage.counting.failures

    def close(self) -> None:
        self.engine.close()


def in_call(of: object, name: str, call: Callable[[], object]) -> None:
    """Before the method is called for the middle one of a text's chunks."""
    before, calls = getattr(of, name), count()

    def marked(*given: object, **words: object) -> object:
        if next(calls) == PAGES // 2:
            setattr(of, name, before)
            call()
        return before(*given, **words)

    setattr(of, name, marked)


if __name__ == "__main__":
    serve(Life)
