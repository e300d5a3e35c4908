"""The pool by itself: keys and values go in, a query chooses its pages, attention reads only those.

    python examples/quickstart.py

Needs: numpy. Random keys stand for a model's; three of them are like the query, as where a text
has what is asked for.
"""

import numpy as np

from cxlkv import CXLPool, KVLayout

TOKENS, Q_HEADS = 32_768, 32
ASKED_FOR = (5_000, 17_321, 30_002)

layout = KVLayout(layers=2, kv_heads=8, head_dim=128, page_tokens=16, dtype="float16")
numbers = np.random.default_rng(0)
wanted = numbers.standard_normal((layout.kv_heads, layout.head_dim)).astype(np.float16)
query = np.repeat(wanted, Q_HEADS // layout.kv_heads, axis=0)

# "/dev/shm/my.pool" instead of "anonymous:" is a pool that other processes can open.
with CXLPool.create("anonymous:", layout=layout, capacity="512MiB") as pool:
    seq = pool.sequence()
    for layer in range(layout.layers):
        shape = (TOKENS, layout.kv_heads, layout.head_dim)
        keys, values = (numbers.standard_normal(shape).astype(np.float16) for _ in range(2))
        keys[list(ASKED_FOR)] = 2 * wanted
        seq.append(layer, keys, values)
    print(f"The pool has {len(seq):,} tokens, in each layer {seq.page_count(0):,} pages.")

    picked = seq.select(0, query, 0.05)  # 5 % of the pages for each kv head
    out, _ = seq.attend(0, query, picked)
    full, _ = seq.attend(0, query)  # all pages

    there = {token // layout.page_tokens for token in ASKED_FOR}
    found = [len(there & set(pages.tolist())) for pages in picked.pages]
    error = np.linalg.norm(np.float32(out) - full) / np.linalg.norm(np.float32(full))
    read = picked.bytes_scored + picked.bytes_fetched
    whole = TOKENS * layout.token_bytes // layout.layers
    print(
        f"Each of {layout.kv_heads} kv heads chose {picked.pages.shape[1]} pages ({picked.method})."
    )
    print(f"Of the {len(there)} pages that are like the query they found {found}.")
    print(f"Read: {read / 1e6:.0f} MB instead of {whole / 1e6:.0f}.", end=" ")
    print(f"The output is {100 * error:.1f} % off attention to all pages.")
