"""Engines of tests/sglang/test_hosts.py: SGLang's cache controller, its threads and host pools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

tests = sys.modules["tests"] = ModuleType("tests")  # a package of others may have this name, too
tests.__path__ = [str(Path(__file__).resolve().parent.parent)]

from tests.sglang.hicache import Engine, page_bytes  # noqa: E402
from tests.support.engine_hosts import PAGES  # noqa: E402
from tests.support.nursery import Settings, serve  # noqa: E402
from tests.support.stores import payload  # noqa: E402
from tests.support.touching import at_touch  # noqa: E402

# isort: split
import torch  # noqa: E402

from cxlkv import ObjectPool  # noqa: E402
from cxlkv.arrays import Bytes  # noqa: E402

CALLS = {"save": "batch_set_v1", "load": "batch_get_v1"}


class Life:
    def __init__(self, settings: Settings):
        given = dict(settings)
        where, form = str(given.pop("where")), str(given.pop("form"))
        self.engine = Engine(where, form, **given)  # type: ignore[arg-type]
        self.store = self.engine.backend.store

    @property
    def pool(self) -> ObjectPool:
        found: ObjectPool = self.store.cache().pool
        return found

    def text(self, number: int) -> list[int]:
        tokens = PAGES * self.engine.page_tokens
        return list(range(number * tokens, (number + 1) * tokens))

    def payloads(self, number: int) -> dict[str, list[Bytes]]:
        return {
            name: [payload(f"{name} {number}", page_bytes(host), page) for page in range(PAGES)]
            for name, host in self.engine.hosts.items()
        }

    def save(self, text: int) -> int:
        before = self.engine.backend.counting.counts["stored_pages"]
        self.engine.save(self.text(text), self.payloads(text))
        stored: int = self.engine.backend.counting.counts["stored_pages"] - before
        return stored // len(self.engine.hosts)

    def load(self, text: int) -> tuple[int, bool]:
        tokens, found = self.engine.fetch(self.text(text))
        wanted = self.payloads(text)
        same = [
            np.array_equal(*pages)
            for name, some in found.items()
            for pages in zip(some, wanted[name], strict=False)
        ]
        return tokens // self.engine.page_tokens, all(same)

    def mark(self, where: str, call: Callable[[], object]) -> None:
        """In the copy of the middle page, in the core."""
        backend, name = self.engine.backend, CALLS[where]
        before = getattr(backend, name)

        def marked(keys: list[str], indices: torch.Tensor, extra: object = None) -> list[bool]:
            setattr(backend, name, before)
            memory = self.store._parts["kv"].memory.buffers(len(keys), indices)
            middle = len(memory.addresses) // 2
            at_touch(int(memory.addresses[middle]), int(memory.sizes[middle]), call)
            done: list[bool] = before(keys, indices, extra)
            return done

        setattr(backend, name, marked)

    def failures(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self.engine.backend.counting.failures
        return found

    def close(self) -> None:
        self.engine.close()


if __name__ == "__main__":
    serve(Life)
