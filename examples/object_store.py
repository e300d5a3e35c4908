"""A pool of whole objects under keys, for engines that move blocks and attend themselves.

    python examples/object_store.py

Needs: numpy. A process stores blocks, another one finds them, copies one, and reads one in place.
"""

import subprocess
import sys
import time
from tempfile import TemporaryDirectory

import numpy as np

from cxlkv import KVLayout, ObjectPool, object_keys

BLOCKS, BLOCK_BYTES = 64, 1 << 20
NAMES = [f"model/chunk-{number}" for number in range(BLOCKS)]


def store(path: str) -> None:
    layout = KVLayout.objects(BLOCK_BYTES)
    with ObjectPool.create(path, layout=layout, capacity="128MiB") as pool:
        blocks = [np.full(BLOCK_BYTES, number, np.uint8) for number in range(BLOCKS)]
        began = time.perf_counter()
        new = pool.put_batch(NAMES, blocks)
        speed = BLOCKS * BLOCK_BYTES / (time.perf_counter() - began) / 1e9
        print(
            f"stored {new.sum()} blocks of 1 MiB at {speed:.1f} GB/s, and closed the pool",
            flush=True,
        )


def read(path: str) -> None:
    with ObjectPool.open(path) as pool:
        sizes = pool.object_sizes([*NAMES, "model/unknown"])
        print(f"another process finds {(sizes >= 0).sum()} of {len(sizes)} names")

        copy = np.empty(BLOCK_BYTES, np.uint8)
        size = pool.get_into(NAMES[7], copy)  # verified on the way
        print(f"copied {size:,} bytes of {NAMES[7]}: all are {copy[0]}")

        with pool.lease([NAMES[9]]) as lease:  # neither forget() nor eviction takes it meanwhile
            view = lease.views[0]
            assert view is not None
            print(f"read {len(view):,} bytes of {NAMES[9]} in place: the first is {view[0]}")
        print(f"forgot {pool.forget(object_keys(NAMES))} blocks")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        read(sys.argv[1])
    else:
        with TemporaryDirectory(dir="/dev/shm") as folder:
            store(f"{folder}/blocks.pool")
            subprocess.run([sys.executable, __file__, f"{folder}/blocks.pool"], check=True)
            ObjectPool.remove(f"{folder}/blocks.pool")
