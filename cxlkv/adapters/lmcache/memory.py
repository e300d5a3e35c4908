"""LMCache memory objects whose tensors are the pool's memory, and their allocator.

One that lies in several slots has no memory in one piece: it is held alike, and read by a copy.

An object is written, published in place, or read where it lies. It is held, by a reservation or a
lease of the pool, from then on until LMCache counts no reference and no pin: so nothing reuses or
evicts its memory meanwhile, and when this process dies the pool takes it back.

One lock is for all: LMCache gives objects back under their own lock, which therefore is this one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import torch
from lmcache.utils import CacheEngineKey, get_size_bytes
from lmcache.v1.memory_management import (
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryObj,
)

from cxlkv.adapters.common.object_cache import ObjectCache
from cxlkv.adapters.lmcache import form
from cxlkv.adapters.lmcache.encoded import Forms, stored_bytes
from cxlkv.adapters.lmcache.form import Form
from cxlkv.errors import CXLKVError
from cxlkv.machine import lifetime
from cxlkv.objects import Lease, Reserved
from cxlkv.prefix import PageKeys

AUDIT_EVERY = 64
"""One of so many published objects that are given back is verified again."""
NO_MEMORY = np.empty(0, np.uint8)
WAIT_S = 1.0
"""Longest wait for memory to be given back, where LMCache wants to wait."""
LOOK_S = 0.05
"""Other processes give back without telling."""


class PoolObject(TensorMemoryObj):
    """place: of the lease or reservation that holds it. key: that it is found by; None: nobody
    finds it yet, and it may be written. Its form follows its payload. memory: none of an object in
    several slots."""

    def __init__(
        self,
        held: Lease | Reserved,
        place: int,
        about: MemoryObjMetadata,
        allocator: PoolAllocator,
        key: PageKeys | None = None,
    ):
        self.held, self.place, self.key = held, place, key
        self.pin_name: CacheEngineKey | None = None
        self.memory = np.asarray(_Bytes(held, place)) if about.address else NO_MEMORY
        with torch.inference_mode(False):
            payload = torch.from_numpy(self.memory[: about.phy_size])
        super().__init__(payload, about, allocator)
        self.lock = allocator.lock

    def seal(self, key: PageKeys) -> bool:
        """Publish it where it lies; whether it is new. Its bytes must not change from now on."""
        allocator = self.parent_allocator
        size = self.get_size()
        described = form.encode(form_of(self), size)
        if size + len(described) != len(self.memory):
            allocator.cache.counting.failed("unsupported", f"{size} bytes of {len(self.memory)}")
            return False
        self.memory[size:] = np.frombuffer(described, np.uint8)
        self.key = key
        return bool(allocator.cache.publish(self.held, self.place, key))


class _Bytes:
    """The memory of a lease or reservation, for numpy: an array of it keeps that alive. Torch knows
    no read-only memory."""

    def __init__(self, held: Lease | Reserved, place: int):
        self.held = held
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (int(held.sizes[place]),),
            "data": (int(held.addresses[place]), False),
        }


def form_of(given: MemoryObj) -> Form:
    dtypes = tuple(str(one).removeprefix("torch.") for one in given.get_dtypes())
    shapes = tuple(tuple(shape) for shape in given.get_shapes())
    return Form(given.meta.fmt.name, dtypes, shapes)


def about_of(
    found: Form, payload_bytes: int, address: int, forms: Forms = ()
) -> MemoryObjMetadata | None:
    """Describe an object to be read as LMCache does; None when it does not know such a one. forms:
    those of its groups, if they are encoded."""
    dtypes = [getattr(torch, name, None) for name in found.dtypes]
    shapes = [torch.Size(shape) for shape in found.shapes]
    known = all(isinstance(dtype, torch.dtype) for dtype in dtypes)
    if not known or found.fmt not in MemoryFormat.__members__:
        return None
    wanted = stored_bytes(found, forms) if forms else get_size_bytes(shapes, dtypes)
    if wanted != payload_bytes:
        return None
    fmt = MemoryFormat[found.fmt]
    return MemoryObjMetadata(
        shapes[0], dtypes[0], address, payload_bytes, 0, 0, fmt, shapes=shapes, dtypes=dtypes
    )


class PoolAllocator(MemoryAllocatorInterface):
    """fits: whether an object of a form is what LMCache wants to read. audit: is asked to verify an
    object soon, and must not wait. forms: in which chunks are stored; where there are some, what is
    read has the encoded bytes, and is for our own use."""

    def __init__(
        self,
        cache: ObjectCache,
        fits: Callable[[Form], bool],
        audit: Callable[[PageKeys], None],
        forms: Callable[[], Forms] = tuple,
    ):
        self.cache, self.lock = cache, threading.RLock()
        self.pinned: dict[CacheEngineKey, PoolObject] = {}
        self.out = 0  # objects that LMCache has
        self._fits, self._audit, self._forms = fits, audit, forms
        self._given_back = threading.Condition(self.lock)
        self._freed = 0
        self._sealed_freed = count(1)
        cache.let_go = self.unpin_everything
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        # Its objects have the lock, too, so it stays the same one: as threading does with its own.
        self.lock._at_fork_reinit()  # type: ignore[attr-defined, unused-ignore]
        self._given_back = threading.Condition(self.lock)

    # ---- to be written ----

    def allocate(
        self,
        shapes: torch.Size | list[torch.Size],
        dtypes: torch.dtype | list[torch.dtype],
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        allocator_type: str | None = None,
    ) -> PoolObject | None:
        """Allocate an object; None when the pool is full of what is held."""
        found = self.batched_allocate(shapes, dtypes, 1, fmt)
        return found[0] if found else None

    def batched_allocate(
        self,
        shapes: torch.Size | list[torch.Size],
        dtypes: torch.dtype | list[torch.dtype],
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        allocator_type: str | None = None,
        evict: bool = True,
        wait: bool = False,
    ) -> list[PoolObject] | None:
        """All of them or None. evict: what nobody holds may go. wait: up to WAIT_S, for LMCache to
        give something back."""
        groups, kinds = self._adapt_shapes_and_dtypes(shapes, dtypes)
        payload = get_size_bytes(groups, kinds)
        sizes = [payload + form.bytes_of(len(groups))] * batch_size
        reserved = self._reserve(sizes, evict, time.monotonic() + WAIT_S if wait else 0)
        if reserved is None:
            return None
        made = []
        for place in range(batch_size):
            address = int(reserved.addresses[place])
            about = MemoryObjMetadata(
                groups[0], kinds[0], address, payload, 1, 0, fmt, shapes=groups, dtypes=kinds
            )
            made.append(PoolObject(reserved, place, about, self))
        with self.lock:
            self.out += len(made)
        return made

    def _reserve(self, sizes: list[int], evict: bool, until_s: float) -> Reserved | None:
        if not sizes or sizes[0] <= 0:
            return None
        while True:
            before = self._freed
            reserved = self.cache.reserve(sizes, evict)
            left_s = until_s - time.monotonic()
            if reserved is not None:
                return reserved
            if not self.cache.keeps():
                return None
            if left_s <= 0 or max(sizes) > self.cache.object_bytes:
                break
            with self.lock:
                if self._freed == before:
                    self._given_back.wait(min(left_s, LOOK_S))
        if evict and max(sizes) <= self.cache.object_bytes:
            self.cache.counting.failed("full", f"{len(sizes)} objects wanted", len(sizes))
        return None

    # ---- to be read ----

    def read(self, keys: Sequence[CacheEngineKey], packed: PageKeys) -> list[PoolObject | None]:
        """Read objects, with a reference each; None: a miss."""
        if self.pinned and not self.cache.keeps():
            return [None] * len(keys)
        with self.lock:
            found = [self.pinned.get(key) for key in keys]
            for one in found:
                if one is not None:
                    one.meta.ref_count += 1
        missing = [index for index, one in enumerate(found) if one is None]
        if missing:
            fresh = self._lease(PageKeys(packed.packed[missing], packed.page_tokens))
            for index, one in zip(missing, fresh, strict=True):
                if one is not None:
                    one.meta.ref_count = 1
                found[index] = one
        return found

    def _lease(self, keys: PageKeys) -> list[PoolObject | None]:
        """Objects without a reference, for the caller to count one, or to free."""
        lease = self.cache.lease(keys) if len(keys) else None
        if lease is None:
            return [None] * len(keys)
        ends: Sequence[memoryview | None] = (
            lease.views
            if self.cache.pool.layout.object_limit is None
            else self.cache.ends(keys, lease.sizes, form.bytes_of(form.GROUPS_MAX))
        )
        found = [
            self._leased(lease, place, keys[place : place + 1], end)
            for place, end in enumerate(ends)
        ]
        with self.lock:
            self.out += sum(one is not None for one in found)
        return found

    def _leased(
        self, lease: Lease, place: int, key: PageKeys, end: memoryview | None
    ) -> PoolObject | None:
        """end: the object's last bytes."""
        size = int(lease.sizes[place])
        if size < 0 or end is None:
            return None
        described = form.decode(end, size)
        if described and self._fits(described[0]):
            about = about_of(*described, int(lease.addresses[place]), self._forms())
            if about:
                return PoolObject(lease, place, about, self, key)
        lease.release_one(place)
        self.cache.counting.failed("mismatch", described[0] if described else "no form at all")
        self.cache.forget(key)  # so that a right one can be stored
        return None

    # ---- pins ----

    def pin(self, keys: Sequence[CacheEngineKey], packed: PageKeys) -> int:
        """Pin those from the first on that are there; how many. Each is held until it is unpinned
        as often, or LMCache's own timeout for pins does it."""
        with self.lock:
            missing = [index for index, key in enumerate(keys) if key not in self.pinned]
        fresh = self._lease(PageKeys(packed.packed[missing], packed.page_tokens))
        leased = dict(zip(missing, fresh, strict=True))
        with self.lock:
            pinned = 0
            for index, key in enumerate(keys):
                found = self.pinned.get(key) or leased.pop(index, None)
                if found is None:
                    break
                self.pinned[key], found.pin_name = found, key
                found.pin()
                pinned += 1
            for left in leased.values():
                if left is not None:
                    self.free(left)
        return pinned

    def unpin(self, key: CacheEngineKey) -> bool:
        with self.lock:
            found = self.pinned.get(key)
            if found is None or not found.is_pinned:
                return False
            return bool(found.unpin())

    def unpin_all(self, keys: Sequence[CacheEngineKey]) -> None:
        for key in keys:
            while self.unpin(key):
                pass

    def unpin_everything(self) -> None:
        self.unpin_all(list(self.pinned))

    # ---- given back ----

    def free(self, memory_obj: MemoryObj, allocator_type: str | None = None) -> None:
        """LMCache counts no reference any more."""
        assert isinstance(memory_obj, PoolObject)
        with self.lock:
            if not memory_obj.is_valid():
                return
            memory_obj.invalidate()
            self.out -= 1
            if memory_obj.pin_name and self.pinned.get(memory_obj.pin_name) is memory_obj:
                del self.pinned[memory_obj.pin_name]
            try:
                memory_obj.held.release_one(memory_obj.place)
            except CXLKVError as error:
                self.cache.counting.failed("pool", error)
            self._freed += 1
            self._given_back.notify_all()
        if memory_obj.key is not None and next(self._sealed_freed) % AUDIT_EVERY == 0:
            self._audit(memory_obj.key)

    def batched_free(
        self,
        memory_objs: list[MemoryObj],
        allocator_type: str | None = None,
        update_stats: bool = True,
    ) -> None:
        for one in memory_objs:
            self.free(one)

    def memcheck(self) -> bool:
        """LMCache asks for the health of its memory."""
        try:
            return self.cache.pool.admin.check()["clean"]
        except (CXLKVError, OSError) as error:
            self.cache.counting.failed("pool", error)
            return False
