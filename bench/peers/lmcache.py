"""LMCache's DaxBackend on a file in shared memory instead of a device: whole chunks in slots."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from .serving import Bytes, Objects, Store, Team, Wanted, mapped, must

Pairs = tuple[list[object], list[object]]
"""Keys and LMCache's own kind of buffers of a call's objects."""
SLAB_BYTES = 4 << 20  # small enough to stay in a cache: its own default of 256 MiB is slower


class Places:
    """Stands for LMCache's allocator of what it reads: gives out the places in `out`, so that its
    copies end where everybody's do. `upcoming` says which ones the next call reads."""

    def __init__(self, objects: list[object], object_bytes: int) -> None:
        self.objects, self.object_bytes = objects, object_bytes
        self.upcoming: list[int] = []

    def get_full_chunk_size_bytes(self) -> int:
        return self.object_bytes

    def allocate(self, shape: object, dtype: object, fmt: object) -> object:
        return self.objects[self.upcoming.pop(0)]

    def batched_allocate(
        self, shape: object, dtype: object, count: int, fmt: object
    ) -> list[object]:
        taken, self.upcoming = self.upcoming[:count], self.upcoming[count:]
        return [self.objects[index] for index in taken]


class LMCache(Store):
    """backend: DaxBackend, which copies twice on the way back. core: the DaxCore that it and the
    multi-process adapter stand on, with copies straight to the caller's buffers."""

    forms: ClassVar = {
        "backend": ("first", "put", "get"),
        "core": ("first", "put", "get"),
    }

    def __init__(self) -> None:
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
        self.version = metadata.version("lmcache")
        self.torch = importlib.import_module("torch")
        self.memory = importlib.import_module("lmcache.v1.memory_management")
        self.utils = importlib.import_module("lmcache.utils")
        self.core_module = importlib.import_module("lmcache.v1.storage_backend.dax.core")
        name = "lmcache.v1.storage_backend.plugins.dax_backend"
        self.backend_module = importlib.import_module(name)

    def open_objects(self, given: Objects) -> None:
        self.given, self.team = given, Team(given.threads)
        # torch takes writable buffers only.
        self.payload, self.out = mapped(given.payload, writable=True), mapped(given.out, True)
        self.sources, self.targets = self._objects(self.payload), self._objects(self.out)
        dtype = self.torch.uint8
        self.keys = [self.utils.CacheEngineKey("m", 1, 0, i, dtype) for i in range(given.count)]
        arena = -(-given.bytes * 9 // 8 >> 21) << 21
        self.paths = [Path(given.folder) / name for name in ("dax-backend", "dax-core")]
        for path in self.paths:
            with path.open("wb") as file:
                file.truncate(arena)
        self.core = self.core_module.DaxCore(
            device_path=str(self.paths[1]),
            max_dax_size_bytes=arena,
            slot_bytes=given.object_bytes,
        )
        extra = {
            "dax.device_path": str(self.paths[0]),
            "dax.max_dax_size": arena / (1 << 30),
            "dax.restore_workers": given.threads,
            "dax.restore_max_regions": given.threads,
            "dax.retrieve_staging_slab_bytes": given.threads * max(SLAB_BYTES, given.object_bytes),
        }
        self.places = Places(self.targets, given.object_bytes)
        self.backend = self.backend_module.DaxBackend(
            config=SimpleNamespace(extra_config=extra),
            metadata=SimpleNamespace(world_size=1, get_num_groups=lambda: 1),
            local_cpu_backend=self.places,
        )
        self.puts = {"backend": self._put_backend, "core": self._put_core}
        self.sent = [self._pairs(call, self.sources) for call in given.calls()]
        self.first_s = {form: self.team.each(put, self.sent) for form, put in self.puts.items()}

    def _objects(self, array: Bytes) -> list[object]:
        """LMCache's own kind of buffer over each object's bytes."""
        size, count = self.given.object_bytes, self.given.count
        rows = self.torch.frombuffer(array.data, dtype=self.torch.uint8, count=size * count)
        found: list[object] = []
        for index, row in enumerate(rows.view(count, size)):
            shape, dtype = self.torch.Size([size]), self.torch.uint8
            about = self.memory.MemoryObjMetadata(
                shape=shape,
                dtype=dtype,
                shapes=[shape],
                dtypes=[dtype],
                address=index * size,
                phy_size=size,
                ref_count=1,
                fmt=self.memory.MemoryFormat.BINARY,
            )
            found.append(self.memory.TensorMemoryObj(row, about, None))
        return found

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[float, int]:
        if case == "first":
            return self.first_s[form], self.given.bytes
        if case == "put":
            (self.core if form == "core" else self.backend._core).delete_many(self.keys, force=True)
            return self.team.each(self.puts[form], self.sent), self.given.bytes
        calls = self.given.calls(self.given.order())
        if form == "core":
            read = [self._pairs(call, self.targets) for call in calls]
            return self.team.each(self._get_core, read), self.given.bytes
        # It has threads of its own (dax.restore_workers), and takes one call after the other.
        alone = Team(1)
        return alone.each(self._get_backend, calls), self.given.bytes

    def _put_backend(self, call: Pairs) -> None:
        self.backend.batched_submit_put_task(*call)

    def _put_core(self, call: Pairs) -> None:
        must(all(self.core.put_many(*call)), "put_many did not do it for all objects")

    def _get_core(self, call: Pairs) -> None:
        must(all(self.core.load_many_into(*call)), "load_many did not do it for all objects")

    def _get_backend(self, call: list[int]) -> None:
        self.places.upcoming = list(call)
        found = self.backend.batched_get_blocking([self.keys[index] for index in call])
        must(
            all(one is not None for one in found),
            "batched_get_blocking did not do it for all objects",
        )

    def _pairs(self, call: list[int], objects: list[object]) -> Pairs:
        return [self.keys[index] for index in call], [objects[index] for index in call]

    def close(self) -> None:
        self.team.close()
        self.backend.close()
        self.core.close()
        self.sources, self.targets, self.sent, self.places = [], [], [], Places([], 0)
        del self.payload, self.out
        for path in self.paths:
            path.unlink()


PEER = LMCache
