"""What a decode step would cost over a CXL device's link that this machine does not have.

    python examples/emulate_device.py [astera-a1000]

Needs: numpy. Profiles are in emulation/profiles.yaml, each with its source; your own go in as
FILE.yaml:NAME. For a whole program: CXLKV_EMULATE=astera-a1000 python yours.py
"""

import sys

import numpy as np

from cxlkv import CXLPool, KVLayout
from cxlkv.emulation.link import emulate

TOKENS, Q_HEADS = 16_384, 32
profile = sys.argv[1] if len(sys.argv) > 1 else "astera-a1000"

layout = KVLayout(layers=4, kv_heads=8, head_dim=128, page_tokens=16, dtype="float16")
numbers = np.random.default_rng(0)
query = numbers.standard_normal((Q_HEADS, layout.head_dim)).astype(np.float16)
token = numbers.standard_normal((2, 1, layout.kv_heads, layout.head_dim)).astype(np.float16)

with CXLPool.create("anonymous:", layout=layout, capacity="512MiB") as pool:
    seq = pool.sequence()
    for layer in range(layout.layers):
        shape = (2, TOKENS, layout.kv_heads, layout.head_dim)
        seq.append(layer, *numbers.standard_normal(shape, np.float32).astype(np.float16))
    print(f"a step of {layout.layers} layers over {profile}, {TOKENS:,} tokens")
    for name, share in (("all pages", 1.0), ("15 % of them", 0.15), ("5 % of them", 0.05)):
        # On the virtual clock nothing waits: the seconds are the device's, whatever this host is.
        with emulate(pool, profile, mode="virtual") as link:
            for layer in range(layout.layers):
                seq.append(layer, *token)
                picked = None if share == 1 else seq.select(layer, query, share)
                seq.attend(layer, query, picked)
            moved = sum(link.bytes.values())
            print(f"  {name:>12}: {1e3 * link.seconds:6.2f} ms, {moved / 1e6:6.1f} MB")
