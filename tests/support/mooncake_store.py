"""Mooncake's Python store over a pool of objects: the classes and codes of `mooncake.store`, for
Mooncake's own tests. What a pool has no word for is done here: leases that end by themselves, a
host's name, the options of replicas."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import c_ubyte
from enum import Enum, auto
from types import ModuleType

from cxlkv import Buffers, KVLayout, ObjectPool
from cxlkv.errors import BadArgumentError, PoolFullError
from cxlkv.layout import parse_bytes
from cxlkv.objects import HELD, Lease

NO_SPACE, INVALID, ABSENT_KEY, LEASED = -200, -600, -704, -706  # Mooncake's codes
LAYOUT = KVLayout.objects("64MiB", slot="256KiB")
PORTS = (12300, 14300)


class SoftPinAction(Enum):
    PRESERVE = auto()
    ENABLE = auto()
    DISABLE = auto()


class ReplicateConfig:
    """Replicas and segments are none of a pool's: they are kept, and that is all."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.preferred_segment = ""
        self.soft_pin_action = SoftPinAction.PRESERVE
        self._ttl_ms: int | None = None

    @property
    def soft_pin_ttl_ms(self) -> int | None:
        return self._ttl_ms

    @soft_pin_ttl_ms.setter
    def soft_pin_ttl_ms(self, given: int | None) -> None:
        if given is not None and not 0 <= given < 1 << 64:
            raise TypeError(f"{given} ms")
        self._ttl_ms = given

    def __str__(self) -> str:
        return f"{self.replica_num} replicas, {self.soft_pin_action.name}"


class BufferHandle(bytes):
    def size(self) -> int:
        return len(self)


class MooncakeDistributedStore:
    """A pool of this process, from setup() to close()."""

    pool: ObjectPool

    def setup(self, local: str | dict[str, str], *given: object) -> int:
        """Addresses of servers, protocols and devices are none of a pool's, and no bytes go through
        a local buffer."""
        size = local["global_segment_size"] if isinstance(local, dict) else given[1]
        name = local["local_hostname"] if isinstance(local, dict) else local
        try:
            capacity = parse_bytes(size)  # type: ignore[arg-type]
        except BadArgumentError:
            return INVALID
        self.pool = ObjectPool.create("anonymous:", layout=LAYOUT, capacity=capacity)
        self._hostname = f"{name}:{random.randint(*PORTS)}"
        self._lease_s = int(os.environ["DEFAULT_KV_LEASE_TTL"]) / 1000
        self._registered: dict[int, int] = {}
        self._leases: dict[str, tuple[float, Lease]] = {}
        self._lock = threading.Lock()
        return 0

    def get_hostname(self) -> str:
        return self._hostname

    def close(self) -> int:
        if hasattr(self, "pool"):
            self._release(lambda until_s: True)
            self.pool.close()
        return 0

    # ---- memory ----

    def register_buffer(self, address: int, size: int) -> int:
        self._registered[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0 if self._registered.pop(address, None) is not None else INVALID

    # ---- put ----

    def put(self, key: str, value: bytes, config: ReplicateConfig | None = None) -> int:
        return self._put([key], [value], config)

    def upsert(self, key: str, value: bytes, config: ReplicateConfig | None = None) -> int:
        return self._put([key], [value], config, replace=True)

    def put_from(self, key: str, address: int, size: int) -> int:
        return self._put([key], Buffers([address], [size]))

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        if not len(keys) == len(addresses) == len(sizes):
            return [INVALID] * len(keys)
        return [self._put(keys, Buffers(addresses, sizes))] * len(keys)

    def _put(
        self,
        keys: list[str],
        buffers: Buffers | Sequence[object],
        config: ReplicateConfig | None = None,
        replace: bool = False,
    ) -> int:
        config = config or ReplicateConfig()
        enables = config.soft_pin_action is SoftPinAction.ENABLE
        if config.soft_pin_ttl_ms is not None and not enables:
            return INVALID
        try:
            self.pool.put_batch(keys, buffers, replace=replace)
        except PoolFullError:
            return NO_SPACE
        if enables:
            self.pool.admin.pin(keys)
        elif config.soft_pin_action is SoftPinAction.DISABLE:
            self.pool.admin.unpin(keys)
        return 0

    # ---- find and get ----

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(size >= 0) for size in self.pool.object_sizes(keys).tolist()]

    def get_size(self, key: str) -> int:
        size = int(self.pool.object_sizes([key])[0])
        return size if size >= 0 else ABSENT_KEY

    def get(self, key: str) -> bytes:
        return self.batch_get_buffer([key])[0] or b""

    def batch_get_buffer(self, keys: list[str]) -> list[BufferHandle | None]:
        sizes = [self._leased(key) for key in keys]
        out = [bytearray(max(size, 0)) for size in sizes]
        got = self.pool.get_batch_into(keys, out).tolist()
        return [
            BufferHandle(value) if size == len(value) else None
            for size, value in zip(got, out, strict=True)
        ]

    def get_into(self, key: str, address: int, size: int) -> int:
        return self.batch_get_into([key], [address], [size])[0]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        if not len(keys) == len(addresses) == len(sizes):
            return [INVALID] * len(keys)
        there = [self._leased(key) for key in keys]
        if any(size > most for size, most in zip(there, sizes, strict=True)):
            return [INVALID] * len(keys)
        got = self.pool.get_batch_into(keys, Buffers(addresses, sizes)).tolist()
        return [size if size >= 0 else ABSENT_KEY for size in got]

    def get_into_ranges(
        self,
        addresses: list[int],
        keys: list[list[str]],
        targets: list[list[list[int]]],
        offsets: list[list[list[int]]],
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        """Of each buffer and key: bytes that were copied, or a code, for each range."""
        return [
            [self._ranges(address, key, *ranges) for key, *ranges in zip(*one, strict=True)]
            for address, *one in zip(addresses, keys, targets, offsets, sizes, strict=True)
        ]

    def _ranges(self, address: int, key: str, *ranges: list[int]) -> list[int]:
        if len({len(one) for one in ranges}) > 1:
            return [INVALID] * max(map(len, ranges))
        rows = [(0, at, size, to) for to, at, size in zip(*ranges, strict=True)]
        out = (c_ubyte * self._registered[address]).from_address(address)
        self._leased(key)
        try:
            got = self.pool.get_ranges([key], rows, out).tolist()
        except BadArgumentError:
            return [INVALID] * len(rows)
        return [size if size >= 0 else ABSENT_KEY for size in got]

    # ---- leases, and what they keep ----

    def remove(self, key: str) -> int:
        now = time.monotonic()
        self._release(lambda until_s: until_s <= now)
        code = int(self.pool.admin.remove_objects([key])[0])
        return LEASED if code == HELD else ABSENT_KEY if code else 0

    def remove_all(self) -> int:
        now = time.monotonic()
        self._release(lambda until_s: until_s <= now)
        return self.pool.admin.remove_all()

    def _leased(self, key: str) -> int:
        """The object's size. It cannot be removed until this get's lease ends."""
        lease = self.pool.lease([key])
        with self._lock:
            until_s = time.monotonic() + self._lease_s
            _, before = self._leases.pop(key, (0, lease))
            self._leases[key] = until_s, lease
        if before is not lease:
            before.release()
        return int(lease.sizes[0])

    def _release(self, is_over: Callable[[float], bool]) -> None:
        with self._lock:
            for key in [key for key, (until_s, _) in self._leases.items() if is_over(until_s)]:
                self._leases.pop(key)[1].release()


def modules() -> dict[str, ModuleType]:
    """`mooncake` and `mooncake.store`, by name."""
    package, store = ModuleType("mooncake"), ModuleType("mooncake.store")
    for one in (MooncakeDistributedStore, ReplicateConfig, SoftPinAction):
        setattr(store, one.__name__, one)
    vars(package)["store"] = store
    return {"mooncake": package, "mooncake.store": store}
