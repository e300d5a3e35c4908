"""A CUDA graph's stand-in on host tensors: what a pass did is noted, and done again on its tensors.

Noted are torch's operations, the calls of this project's kernels and the questions to the mailbox.
No Python of a model or a cache runs in a replay, so a number that it had counted stays as it was.
What a stream cannot capture, a read by the host among it, fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from types import FunctionType
from typing import Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cxlkv.gpu.mailbox import Mailbox
from cxlkv.kernels import runtime

READS = {
    *("item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose", "unique"),
    *("__bool__", "__int__", "__float__", "__index__"),
}
SYNCHRONISES = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "_unique2",
}


class Function(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> object: ...


def tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [one for part in value for one in tensors(part)] if isinstance(value, (tuple, list)) else []
    )


class HostGraph:
    """As cxlkv.adapters.transformers.graph.Graph."""

    def __init__(self, device: torch.device):
        self._again: list[Callable[[], None]] = []
        self._inside = False  # a call that is noted as a whole

    def capture(self, work: Callable[[], object]) -> None:
        with ExitStack() as stack:
            for owner, name, function in kernels():
                stack.enter_context(patch.object(owner, name, self._noting(function)))
            stack.enter_context(_Reads(self))
            stack.enter_context(_Operations(self))
            work()

    def replay(self) -> None:
        assert self._again, "a graph without work"
        for again in self._again:
            again()

    def _noting(self, function: Function) -> Function:
        @wraps(function)
        def noted(*args: object, **kwargs: object) -> object:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            try:
                made = function(*args, **kwargs)
            finally:
                self._inside = False
            self.note(partial(function, *args, **kwargs), made)
            return made

        return noted

    def note(self, call: Callable[[], object], made: object) -> None:
        def again() -> None:
            for old, new in zip(tensors(made), tensors(call()), strict=True):
                if new is not old:
                    old.copy_(new)

        self._again.append(again)


def kernels() -> Iterator[tuple[object, str, Function]]:
    """Where calls of kernels are made: launches in the interpreter, else what has references."""
    yield from ((Mailbox, name, vars(Mailbox)[name]) for name in ("ask", "await_answer"))
    if runtime.INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        yield GridExecutor, "__call__", GridExecutor.__call__
        return
    for name, module in [*sys.modules.items()]:
        if not name.startswith(("cxlkv.gpu.", "cxlkv.kernels.")):
            continue
        for word, function in [*vars(module).items()]:
            of = getattr(function, "__module__", "")
            front = of.startswith("cxlkv.kernels.") and of != runtime.__name__
            if front and isinstance(function, FunctionType) and "reference" not in of:
                yield module, word, function


class _Reads(TorchFunctionMode):
    """Fails where Python looks at a tensor's numbers."""

    def __init__(self, graph: HostGraph):
        super().__init__()
        self._graph = graph

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = kwargs or {}
        home = "cpu" in [one for one in (*args, *given.values()) if isinstance(one, str)]
        if not self._graph._inside and (home or getattr(func, "__name__", "") in READS):
            raise RuntimeError(f"captured: the host reads a tensor by {func}")
        return func(*args, **given)


class _Operations(TorchDispatchMode):
    """Notes all operations but views."""

    def __init__(self, graph: HostGraph):
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        assert callable(func)
        given = kwargs or {}
        made = func(*args, **given)
        if self._graph._inside:
            return made
        schema = func._schema  # type: ignore[attr-defined]
        if schema.name.partition("::")[2] in SYNCHRONISES:
            raise RuntimeError(f"captured: {schema.name} waits for the device")
        aliases = [one.alias_info for one in schema.returns]
        if not aliases or not all(one is not None and not one.is_write for one in aliases):
            self._graph.note(partial(func, *args, **given), made)
        return made
