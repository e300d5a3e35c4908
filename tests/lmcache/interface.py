"""Compares the methods of our classes with those of LMCache's that they override."""

from __future__ import annotations

import inspect
import warnings

warnings.simplefilter("ignore")

from lmcache.v1.memory_management import (  # noqa: E402
    MemoryAllocatorInterface,
    TensorMemoryObj,
)
from lmcache.v1.storage_backend.abstract_backend import (  # noqa: E402
    AllocatorBackendInterface,
    StoragePluginInterface,
)

from cxlkv.adapters.lmcache import CXLStorage  # noqa: E402
from cxlkv.adapters.lmcache.memory import PoolAllocator, PoolObject  # noqa: E402

PAIRS: list[tuple[type, tuple[type, ...]]] = [
    (CXLStorage, (StoragePluginInterface, AllocatorBackendInterface)),
    (PoolAllocator, (MemoryAllocatorInterface,)),
    (PoolObject, (TensorMemoryObj,)),
]
OURS = {"drain", "seal", "read", "pin", "unpin", "unpin_all"}  # of PoolAllocator, what it adds


def names_of(method: object) -> list[str]:
    assert callable(method)
    return list(inspect.signature(method).parameters)


def compare(ours: type, theirs: tuple[type, ...]) -> None:
    """Each method takes at least what theirs does, in the same order and by the same names."""
    for name, method in vars(ours).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        base = next((getattr(one, name) for one in theirs if hasattr(one, name)), None)
        if base is None:
            assert name in OURS, f"{ours.__name__}.{name} overrides nothing"
            continue
        wanted, given = names_of(base), names_of(method)
        assert given[: len(wanted)] == wanted, f"{ours.__name__}.{name}: {given}, not {wanted}"
        assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(base), name
    assert not inspect.isabstract(ours)


for ours, theirs in PAIRS:
    compare(ours, theirs)
print("compared")
