"""A process that stores records in a cold file until it is killed, and says what is stored."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import RecordShape


def name(number: int) -> Bytes:
    return np.frombuffer(number.to_bytes(16, "little"), np.uint8)


def noise(number: int, size: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def mixed(number: int, size: int) -> Bytes:
    """Bytes of three kinds: numbers near 0, of which each has one exponent of a few; one byte;
    noise.
    """
    if number % 3 == 0:
        values = np.random.default_rng(number).standard_normal(size // 2, np.float32)
        return values.astype(ml_dtypes.bfloat16).view(np.uint8)
    return np.full(size, number % 256, np.uint8) if number % 3 == 1 else noise(number, size)


def main(path: str, fsync: str, compress: str, *numbers: str) -> None:
    size, capacity, first, batch = map(int, numbers)
    shape = RecordShape(size, 7, "", element_bytes=2 if compress else 1)
    record = mixed if compress else noise
    with ColdTier(
        path, shape=shape, capacity=capacity, fsync=fsync, compress=compress or None
    ) as tier:
        while True:
            some = range(first, first + batch)
            given = np.stack([record(n, size) for n in some])
            print("begin", first, flush=True)
            assert tier.store(np.stack([name(n) for n in some]), given).all()
            print("done", first, flush=True)
            first += batch


if __name__ == "__main__":
    main(*sys.argv[1:])
