"""A pool of another machine: what the own pool does not have comes over TCP, verified.

    python examples/remote_pool.py

Needs: numpy. The other machine is a process here, that runs `cxlkv serve`, and the network is
loopback. With RDMA: rdma://HOST:PORT?device=mlx5_0.
"""

import secrets
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cxlkv import CXLPool, KVLayout, Tiers

TOKENS = 4096
layout = KVLayout(layers=8, kv_heads=4, head_dim=64, page_tokens=16, dtype="float16")
prompt = np.arange(TOKENS)  # token ids

with TemporaryDirectory(dir="/dev/shm") as folder:
    there, secret = f"{folder}/there.pool", Path(folder, "secret")
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))  # the same file on both machines
    with CXLPool.create(there, layout=layout, capacity="96MiB") as pool:
        seq, numbers = pool.sequence(), np.random.default_rng(0)
        for layer in range(layout.layers):
            shape = (TOKENS, layout.kv_heads, layout.head_dim)
            seq.append(layer, *numbers.standard_normal((2, *shape)).astype(np.float16))
        print(f"there: {pool.publish_prefix(seq, prompt)} pages published")

    words = [Path(sys.executable).with_name("cxlkv"), "serve", there]  # the command `cxlkv serve`
    words += ["--listen", "127.0.0.1:0", "--secret", secret]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[-1]  # "serves PATH on HOST:PORT"
    try:
        with (
            CXLPool.create("anonymous:", layout=layout, capacity="96MiB") as pool,
            Tiers(pool, remote=f"tcp://{address}", remote_secret=secret) as tiers,
        ):
            for time_asked in ("first", "second"):
                began = time.perf_counter()
                with tiers.match_prefix(prompt) as hit:
                    took = 1e3 * (time.perf_counter() - began)
                    print(f"here, the {time_asked} time: {hit.tokens:,} tokens in {took:.1f} ms")
            counts = tiers.stats()
            print(f"pulled: {counts['remote_pages']:.0f} pages, ", end="")
            print(f"{counts['remote_bytes'] / 1e6:.1f} MB")
    finally:
        server.terminate()
        server.wait()
    CXLPool.remove(there)
