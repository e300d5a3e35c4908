"""Times what attention in the pool takes outside the core, in an engine that runs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

import cxlkv._core.batch as binding
from cxlkv.adapters.vllm.attention import PoolImpl


class _Library:
    """The core's functions, one of them another."""

    def __init__(self, library: object, name: str, function: object):
        self._library = library
        setattr(self, name, function)

    def __getattr__(self, name: str) -> object:
        found = getattr(self._library, name)
        setattr(self, name, found)  # looked up once
        return found


class Outside:
    """Of layers that decode: seconds of our attention, less those of Batch.decode in the core."""

    def __init__(self) -> None:
        self._all = self._core = 0.0
        self._layers = 0
        forward = PoolImpl.forward

        def count_core(seconds: float) -> None:
            self._core += seconds
            self._layers += 1

        def count_all(seconds: float) -> None:
            self._all += seconds

        library = binding.lib  # type: ignore[attr-defined]  # the core's, by no name of this module
        decode = timed(library.cxlkv_batch_decode, count_core)
        binding.lib = _Library(  # type: ignore[attr-defined]
            library, "cxlkv_batch_decode", decode
        )
        PoolImpl.forward = timed(forward, count_all)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Count from now on."""
        self._all, self._core, self._layers = 0.0, 0.0, 0

    @property
    def us(self) -> float:
        """Microseconds a layer; 0 where none decoded."""
        return 1e6 * (self._all - self._core) / self._layers if self._layers else 0.0


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def timed(
    function: Callable[Arguments, Result], count: Callable[[float], None]
) -> Callable[Arguments, Result]:
    def call(*arguments: Arguments.args, **words: Arguments.kwargs) -> Result:
        began = perf_counter()
        try:
            return function(*arguments, **words)
        finally:
            count(perf_counter() - began)

    return call
