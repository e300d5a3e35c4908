"""Counts the bytes of an array that a scorer's function reads: run as Python, on an array that
marks what is taken of it. What a method says it reads is held against it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt


class Watched(np.ndarray[Any, Any]):
    """An array that marks the bytes that are read of it and of its views. A write marks nothing;
    what is made of it is no longer watched. `np.asarray()` and C code escape."""

    first: int
    marks: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Watched:
        found = np.ascontiguousarray(array).view(cls)
        found.first = address(found)
        found.marks = np.zeros(found.nbytes, np.bool_)
        return found

    @property
    def bytes_read(self) -> int:
        """Each once, however often it was read."""
        return int(np.count_nonzero(self.marks))

    def __array_finalize__(self, base: object) -> None:
        if isinstance(base, Watched):
            self.first, self.marks = base.first, base.marks

    def __getitem__(self, key: Any) -> Any:
        plain = self.view(np.ndarray)
        found = plain[key]
        if not isinstance(found, np.ndarray) and isinstance(key, tuple):
            # One element, without an array of all places.
            steps = zip(key, self.shape, self.strides, strict=True)
            at = address(self) - self.first + sum(i % n * step for i, n, step in steps)
            self.marks[at : at + self.itemsize] = True
            return found
        if isinstance(found, np.ndarray) and np.may_share_memory(found, plain):
            return super().__getitem__(key)
        mark(self, places(plain)[key])
        return found

    def read(self) -> npt.NDArray[Any]:
        """All of it."""
        plain = self.view(np.ndarray)
        mark(self, places(plain))
        return plain

    def astype(self, *given: Any, **more: Any) -> Any:
        return self.read().astype(*given, **more)

    def copy(self, *given: Any, **more: Any) -> Any:
        return self.read().copy(*given, **more)

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **more: Any) -> Any:
        return getattr(ufunc, method)(*map(taken, given), **more)

    def __array_function__(self, function: Any, types: Any, given: Any, more: Any) -> Any:
        return function(*map(taken, given), **{name: taken(each) for name, each in more.items()})


def taken(given: Any) -> Any:
    """Plain arrays of the same numbers, which counts as reading them."""
    if isinstance(given, Watched):
        return given.read()
    return type(given)(map(taken, given)) if type(given) in (list, tuple) else given


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def places(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Address of each element."""
    found = np.array(address(array), np.int64)
    for size, stride in zip(array.shape, array.strides, strict=True):
        found = found[..., None] + np.arange(size) * stride
    return found


def mark(of: Watched, addresses: npt.NDArray[np.int64] | np.int64) -> None:
    of.marks[np.asarray(addresses)[..., None] - of.first + np.arange(of.itemsize)] = True


def as_python(function: Any, known: dict[int, Any] | None = None) -> Callable[..., Any]:
    """A function as numba was given it, and so those that it calls by their names."""
    plain, known = getattr(function, "py_func", function), {} if known is None else known
    if id(plain) in known or not isinstance(plain, FunctionType):
        found: Callable[..., Any] = known.get(id(plain), plain)
        return found
    names = dict(plain.__globals__)
    made = FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    known[id(plain)] = made
    for name in plain.__code__.co_names:
        if hasattr(names.get(name), "py_func"):
            names[name] = as_python(names[name], known)
    return made
