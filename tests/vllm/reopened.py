"""A worker cannot go on at first in a pool that is open again: prints what it tells and has then.

What lacks memory: the tiers of the form in the engine, the device's part of the one in the pool.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from vllm.config import VllmConfig

from cxlkv import CXLPool, KVLayout
from cxlkv.adapters.common import pools
from cxlkv.adapters.common.reopening import Reopening
from cxlkv.adapters.vllm import connector as subject
from cxlkv.adapters.vllm.connector import CXLConnector, StepMessage
from cxlkv.adapters.vllm.engine_attention import EngineAttention
from cxlkv.adapters.vllm.groups import BlockGroup
from cxlkv.adapters.vllm.loaded import LoadedWeights
from cxlkv.adapters.vllm.messages import Message
from cxlkv.adapters.vllm.pool_attention import PoolAttention
from cxlkv.adapters.vllm.settings import read_settings
from cxlkv.errors import GpuMemoryError, MemoryShortError

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=8, dtype="float32")


class Short:
    """Lacks memory at first."""

    def __init__(self, error: Exception):
        self.error: Exception | None = error

    def reopened(self, pool: CXLPool) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        pass

    def counts(self) -> dict[str, int]:
        return {}


def pool_of() -> CXLPool:
    return CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1)


def engines_form(pool: CXLPool, short: Short) -> EngineAttention:
    make = pools.open_tiers

    def made(pool: CXLPool, *given: object, **how: object) -> object:
        short.reopened(pool)
        return make(pool, *given, **how)  # type: ignore[arg-type]

    vars(subject)["open_tiers"] = made
    return EngineAttention(pool, {}, read_settings({"where": "/x/"}), groups=[BlockGroup(8)])


def pools_form(pool: CXLPool, short: Short) -> PoolAttention:
    return PoolAttention(pool, ["a"], block_tokens=8, steps=short)  # type: ignore[arg-type]


def tried(worker: EngineAttention | PoolAttention, short: Short, again: CXLPool) -> None:
    made = object.__new__(CXLConnector)
    reopening = Reopening(worker.pool, pool_of, 1.0)
    made._workers, made._reopening = [worker], [reopening]
    made.settings, made._in_pool = read_settings({"where": "/x/"}), False
    made._quotas, made.looking, made._connector_metadata = {}, {}, None
    made._vllm_config = VllmConfig()
    made._specs = []
    made._loaded = cast("LoadedWeights", SimpleNamespace(hear=lambda *given: None))
    ranks = SimpleNamespace(own=[0], pools=1, count=1)
    CXLConnector._ranks = ranks  # type: ignore[assignment]
    worker.pool.close()
    reopening._opened = reopening._pool = again
    for turn in range(5):
        made.bind_connector_metadata(StepMessage(Message()))
        has = worker.pool is again and worker.tiers.pool is again
        print(turn, has and short.error is None, dict(worker.requests.failures()))
        if turn in (1, 2):
            reopening._offer()  # as a look does
        if turn == 2:
            short.error = None
    worker.close()
    again.close()


def main() -> None:
    for form, error in (
        (engines_form, MemoryShortError("the host has too little")),
        (pools_form, GpuMemoryError("the device has too little")),
    ):
        short = Short(error)
        tried(form(pool_of(), short), short, pool_of())


if __name__ == "__main__":
    main()
