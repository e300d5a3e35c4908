"""What we override of LMCache's interfaces is still there, and takes what LMCache gives it."""

from __future__ import annotations

import inspect

OURS = {
    *("drain", "seal", "read", "reset_after_fork"),
    *("pin", "unpin", "unpin_all", "unpin_everything"),
}
"""What our classes add."""


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


def test_we_take_what_lmcache_gives() -> None:
    from lmcache.v1 import memory_management as its
    from lmcache.v1.storage_backend import abstract_backend as backend

    from cxlkv.adapters.lmcache.memory import PoolAllocator, PoolObject
    from cxlkv.adapters.lmcache.storage import CXLStorage

    compare(CXLStorage, (backend.StoragePluginInterface, backend.AllocatorBackendInterface))
    compare(PoolAllocator, (its.MemoryAllocatorInterface,))
    compare(PoolObject, (its.TensorMemoryObj,))
