"""More prompts than the pool holds: what has no room goes to a file, and comes back as a hit.

    python examples/tiers.py

Needs: numpy, and 128 MiB in the folder for temporary files.
"""

import time
from tempfile import TemporaryDirectory

import numpy as np

from cxlkv import CXLPool, KVLayout, Tiers

PROMPTS, TOKENS = 24, 1024

layout = KVLayout(layers=4, kv_heads=4, head_dim=64, page_tokens=16, dtype="float16")
numbers = np.random.default_rng(0)
prompts = numbers.integers(0, 32_000, (PROMPTS, TOKENS))  # token ids

with (
    TemporaryDirectory() as folder,
    CXLPool.create("anonymous:", layout=layout, capacity="48MiB") as pool,
    Tiers(pool, cold=f"{folder}/kv.cold", cold_capacity="128MiB") as tiers,
):
    for ids in prompts:
        seq = pool.sequence()
        for layer in range(layout.layers):
            shape = (TOKENS, layout.kv_heads, layout.head_dim)
            keys, values = (numbers.standard_normal(shape).astype(np.float16) for _ in range(2))
            seq.append(layer, keys, values)  # a full pool makes room first
        pool.publish_prefix(seq, ids)
        seq.release()
    size = TOKENS * layout.token_bytes >> 20
    print(f"stored {PROMPTS} prompts of {TOKENS:,} tokens, {size} MiB each, in a pool of 48 MiB")

    found = 0
    for ids in prompts:
        with pool.match_prefix(ids) as hit:
            found += hit.tokens
    print(f"in the pool alone are {found:,} of their {prompts.size:,} tokens")

    found, began = 0, time.perf_counter()
    for ids in prompts:
        with tiers.match_prefix(ids) as hit:  # brings back what is only in the file
            found += hit.tokens
            seq = hit.sequence()  # to go on from: append, select, attend
            seq.release()
    each = 1000 * (time.perf_counter() - began) / PROMPTS
    print(f"with the file {found:,} are found, {each:.1f} ms a prompt")

    counts = tiers.stats()
    went, came = counts["demoted_pages"], counts["promoted_pages"]
    print(f"pages that went to the file: {went:.0f}, that came back: {came:.0f}")
