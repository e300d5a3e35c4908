"""Objects of LMCache for tests of the plugin: keys, values, put and got as its managers do."""

from __future__ import annotations

from functools import cache

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj

from cxlkv.adapters.lmcache.storage import CXLStorage

from .engines import CHUNK, DIM, HEADS, LAYERS

SHAPE = torch.Size([2, LAYERS, CHUNK, HEADS * DIM])
DTYPE = torch.bfloat16


def key(number: int, model: str = "m") -> CacheEngineKey:
    return CacheEngineKey(model, 1, 0, number, DTYPE)


@cache
def value(seed: int, shape: torch.Size = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def room(storage: CXLStorage, shape: torch.Size = SHAPE) -> MemoryObj:
    """Memory to be written."""
    made = storage.allocate(shape, DTYPE, busy_loop=False)
    assert made is not None
    return made


def written(storage: CXLStorage, seed: int, shape: torch.Size = SHAPE) -> MemoryObj:
    made = room(storage, shape)
    made.tensor.copy_(value(seed, shape))
    return made


def put(storage: CXLStorage, *numbers: int) -> None:
    """Put as LMCache's storage manager does: it gives its reference back after the call."""
    objects = [written(storage, number) for number in numbers]
    storage.batched_submit_put_task([key(number) for number in numbers], objects)
    for one in objects:
        one.ref_count_down()
    storage.drain()


def lent(storage: CXLStorage, number: int) -> MemoryObj:
    """With a reference; it must be there."""
    found = storage.get_blocking(key(number))
    assert found is not None
    return found


def got(storage: CXLStorage, number: int) -> torch.Tensor | None:
    """A copy; None: a miss."""
    found = storage.get_blocking(key(number))
    if found is None:
        return None
    copy: torch.Tensor = found.tensor.clone()
    found.ref_count_down()
    return copy


def is_right(storage: CXLStorage, number: int) -> bool:
    """There, and every byte as it was put."""
    found = got(storage, number)
    return found is not None and torch.equal(found, value(number))


def foreign(seed: int, slack: int = 0) -> TensorMemoryObj:
    """In memory of somebody else, who may have more of it than the object has."""
    size = SHAPE.numel() * DTYPE.itemsize
    raw = torch.zeros(size + slack, dtype=torch.uint8)
    about = MemoryObjMetadata(
        SHAPE, DTYPE, 0, size, 1, 0, MemoryFormat.KV_2LTD, shapes=[SHAPE], dtypes=[DTYPE]
    )
    made = TensorMemoryObj(raw, about, None)
    made.tensor.copy_(value(seed))
    return made
