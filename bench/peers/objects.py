"""This project's store door as a contender: objects put, got, read by ranges and leased by key."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from cxlkv import _core
from cxlkv.layout import KVLayout
from cxlkv.objects import Buffers, ObjectPool, object_keys

from .serving import UNIT_BYTES, Bytes, Objects, Store, Wanted, mapped, must


class Door:
    """A pool in a file in shared memory. Its memory is in place after the first put."""

    def __init__(self, given: Objects, payload: Bytes, out: Bytes, checksum: bool) -> None:
        self.given, self.payload, self.out = given, payload, out
        self.path = Path(given.folder) / f"objects-{'crc' if checksum else 'no-crc'}"
        self.pool = ObjectPool.create(
            self.path,
            layout=KVLayout.objects(given.object_bytes),
            capacity=given.bytes * 5 // 4 + (64 << 20),
            checksum=checksum,
            threads=given.threads,
        )
        self.names = [f"object-{index}" for index in range(given.count)]
        self.keys = object_keys(self.names)
        self.first_s = self.put(given.calls())
        self.pool.admin.prefault()

    def _asked(self, calls: list[list[int]], memory: Bytes) -> list[tuple[list[str], Buffers]]:
        """What the calls take, made before the clock starts."""
        size = self.given.object_bytes
        addresses = memory.ctypes.data + np.arange(self.given.count) * size
        return [
            ([self.names[i] for i in call], Buffers(addresses[call], np.full(len(call), size)))
            for call in calls
        ]

    def put(self, calls: list[list[int]]) -> float:
        self.pool.forget(self.keys)
        asked = self._asked(calls, self.payload)
        began = time.perf_counter()
        new = [self.pool.put_batch(*call) for call in asked]
        seconds = time.perf_counter() - began
        must(all(one.all() for one in new), "put_batch: some were there already")
        return seconds

    def get(self, calls: list[list[int]]) -> float:
        asked = self._asked(calls, self.out)
        began = time.perf_counter()
        sizes = [self.pool.get_batch_into(*call) for call in asked]
        seconds = time.perf_counter() - began
        wrong = [one for one in np.concatenate(sizes).tolist() if one != self.given.object_bytes]
        must(not wrong, f"get_batch_into gave {wrong[:8]}")
        return seconds

    def ranges(self, wanted: Wanted) -> tuple[float, int]:
        """In one call. The list that it takes is made before the clock starts."""
        units = [(page, layer) for layer, pages in enumerate(wanted) for page in pages]
        ranges = np.full((len(units), 4), UNIT_BYTES, np.int64)
        ranges[:, :2] = np.array(units) * (1, UNIT_BYTES)
        ranges[:, 3] = np.arange(len(units)) * UNIT_BYTES
        began = time.perf_counter()
        sizes = self.pool.get_ranges(self.names, ranges, self.out)
        seconds = time.perf_counter() - began
        must(bool((sizes == UNIT_BYTES).all()), f"get_ranges gave {sizes[:8]}")
        return seconds, len(units) * UNIT_BYTES

    def lease(self, calls: list[list[int]]) -> float:
        """Seconds to take and to give back; copying leased objects is not measured."""
        seconds, size = 0.0, self.given.object_bytes
        for call in calls:
            names = [self.names[index] for index in call]
            began = time.perf_counter()
            lease = self.pool.lease(names)
            seconds += time.perf_counter() - began
            for index, view in zip(call, lease.views, strict=True):
                must(view is not None, f"lease: {index} is not there")
                self.out[index * size : (index + 1) * size] = np.asarray(view)
            del view
            began = time.perf_counter()
            lease.release()
            seconds += time.perf_counter() - began
        return seconds

    def close(self) -> None:
        self.pool.close()
        self.path.unlink()


class StoreDoor(Store):
    """In files in shared memory: crc, which is the default; no_crc; both as many objects a call as
    everybody. single: without CRC, one a call."""

    version = _core.version()
    forms: ClassVar = {
        "crc": ("first", "put", "get", "ranges", "lease"),
        "no_crc": ("first", "put", "get", "ranges", "lease"),
        "single": ("put", "get", "lease"),
    }

    def open_objects(self, given: Objects) -> None:
        self.given = given
        payload = mapped(given.payload)
        out = np.asarray(mapped(given.out, writable=True))
        plain = Door(given, payload, out, checksum=False)
        self.doors = {
            "crc": Door(given, payload, out, checksum=True),
            "no_crc": plain,
            "single": plain,
        }

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[float, int]:
        door = self.doors[form]
        if case == "first":
            return door.first_s, self.given.bytes
        if case == "ranges":
            return door.ranges(wanted)
        order = None if case == "put" else self.given.order()
        calls = self.given.calls(order)
        if form == "single":
            calls = [[index] for call in calls for index in call]
        do = {"put": door.put, "get": door.get, "lease": door.lease}[case]
        return do(calls), self.given.bytes

    def close(self) -> None:
        for door in dict.fromkeys(self.__dict__.pop("doors", {}).values()):
            door.close()


PEER = StoreDoor
