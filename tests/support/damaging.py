"""Bytes of a pool's file that are changed behind its back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from cxlkv import CXLPool, ObjectPool
from cxlkv.prefix import PageKeys


def poke(path: str | Path, at: int, data: bytes | bytearray, size: int = 0) -> bytes:
    """Writes into a file; returns what stood there, as many bytes or `size`."""
    with open(path, "r+b", buffering=0) as file:
        before = os.pread(file.fileno(), size or len(data), at)
        os.pwrite(file.fileno(), data, at)
    return before


def change_byte(path: str | Path, at: int, bit: int = 6) -> None:
    """Another byte than was there."""
    poke(path, at, bytes([poke(path, at, b"", 1)[0] ^ 1 << bit]))


def damage_piece(pool: CXLPool, page: int, layer: int, kind: str = "values") -> None:
    """A byte of the keys or values of a page's first head."""
    places = pool.pages.places(np.array([page], np.uint32), layer)
    offsets = places.keys if kind == "keys" else places.values
    assert offsets is not None
    assert pool.path is not None
    change_byte(pool.path, int(offsets[0]) + 5)


def damage_object(pool: ObjectPool, key: PageKeys) -> None:
    """A byte in the middle of the object of one key."""
    with pool.lease(key) as lease:
        address, size = int(lease.addresses[0]), int(lease.sizes[0])
    assert address, "there is no such object"
    assert pool.path is not None
    change_byte(pool.path, address - pool.pages.memory()[0] + size // 2)
