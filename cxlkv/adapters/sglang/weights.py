"""Tells a storage backend that SGLang may have other weights, by the calls of its host pool.

SGLang tells its storage nothing of weights that it loads anew, nor of flushes. But the thread that
loads them, the scheduler's, asks the host pool for room before each load and each store, and clears
it with each flush.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from cxlkv.adapters.common.keyed_weights import KeyedWeights
from cxlkv.adapters.common.loaded import objects
from cxlkv.adapters.sglang.names import Config

UPDATER = "SchedulerWeightUpdaterManager"
"""SGLang's class, which a server's scheduler makes once, behind its caches."""


class Updater(Protocol):
    """offload_tags: what release_memory_occupation() has taken away."""

    offload_tags: set[str]


def updaters() -> list[Updater]:
    """SGLang's own of this process; none until its server is up."""
    return cast("list[Updater]", [one for one in objects() if type(one).__name__ == UPDATER])


class HeardWeights(KeyedWeights):
    """The weights of this rank's models, the draft model's too."""

    def __init__(self, config: Config):
        self._updaters: list[Updater] = []
        ranks = config.tp_size * config.pp_size * config.attn_cp_size
        self._pool: object = None
        super().__init__(["sglang"], ranks == 1, self._are_there)

    def _are_there(self) -> bool:
        self._updaters = self._updaters or updaters()
        return not any("weights" in one.offload_tags for one in self._updaters)

    def hear(self, pool: object) -> None:
        """Hear the calls of a host pool, until end()."""
        self._pool = pool
        _tell_before(pool, "alloc", self.look)
        _tell_before(pool, "clear", self.flushed)

    def end(self) -> None:
        if self._pool is not None:
            for name in ("alloc", "clear"):
                vars(self._pool).pop(name, None)


def _tell_before(pool: object, name: str, told: Callable[[], None]) -> None:
    call = getattr(pool, name, None)
    if call is None:
        return

    def called(*args: object, **kwargs: object) -> object:
        told()
        return call(*args, **kwargs)

    setattr(pool, name, called)
