"""Two hosts on one pool in shared memory whose caches do not see each other, as over CXL.

    python examples/hosts.py

Needs: numpy. On two machines the place is the device that both have, such as "/dev/dax0.0"; here
two processes play them, on a file in /dev/shm. Lines are flushed and fetched anew all the same.
"""

import subprocess
import sys
import time
from tempfile import TemporaryDirectory

import numpy as np

from cxlkv import CXLPool, KVLayout

TOKENS = 8192
layout = KVLayout(layers=4, kv_heads=4, head_dim=64, page_tokens=16, dtype="float16")
prompt = np.arange(TOKENS)  # token ids


def compute(path: str) -> None:
    """Host 0 has K and V of the prompt, publishes them, and stays, as an engine does."""
    how = {"capacity": "64MiB", "sharing": "software", "hosts": 4}
    with CXLPool.create(path, layout=layout, host=0, **how) as pool:
        seq, numbers = pool.sequence(), np.random.default_rng(0)
        for layer in range(layout.layers):
            shape = (TOKENS, layout.kv_heads, layout.head_dim)
            seq.append(layer, *(numbers.standard_normal((2, *shape)).astype(np.float16)))
        print(f"host 0 published {pool.publish_prefix(seq, prompt)} pages", flush=True)
        subprocess.run([sys.executable, __file__, path], check=True)  # host 1
        print(f"host 0 goes on; all is in order: {pool.admin.check(deep=True)['clean']}")


def use(path: str) -> None:
    """Host 1 finds them by the token ids, and reads them where they lie."""
    with CXLPool.open(path, host=1) as pool:
        began = time.perf_counter()
        with pool.match_prefix(prompt) as hit:
            took = 1e3 * (time.perf_counter() - began)
            print(f"host 1 found {hit.tokens:,} of {TOKENS:,} tokens in {took:.1f} ms")
            query = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float16)
            seq = hit.sequence()
            picked = seq.select(0, query, 0.15)
            out, lse = seq.attend(0, query, picked)
            print(
                f"host 1 attended to {picked.pages.shape[1]} of {seq.page_count(0)} pages:", end=" "
            )
            print(f"output {out.shape}, log-sum-exp {lse.shape}")
            seq.release()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        use(sys.argv[1])
    else:
        with TemporaryDirectory(dir="/dev/shm") as folder:
            compute(f"{folder}/shared.pool")
            CXLPool.remove(f"{folder}/shared.pool")
