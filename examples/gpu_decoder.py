"""A decode step with the keys scored next to the data, and attention on a GPU where there is one.

    python examples/gpu_decoder.py

Needs: pip install 'cxlkv[gpu]'. Without CUDA the same object does all of it on the CPU.
"""

import time

import torch

from cxlkv import CXLPool, KVLayout
from cxlkv.gpu.decode import Decoder

REQUESTS, TOKENS, STEPS, Q_HEADS = 4, 4096, 8, 32

device = "cuda" if torch.cuda.is_available() else "cpu"
layout = KVLayout(layers=4, kv_heads=8, head_dim=128, page_tokens=16, dtype="bfloat16")
generator = torch.Generator().manual_seed(0)


def rows(*shape: int) -> torch.Tensor:
    """Stands for what a model's layer gives."""
    return torch.randn(*shape, layout.head_dim, generator=generator).bfloat16()


with CXLPool.create("anonymous:", layout=layout, capacity="512MiB") as pool:
    decoder = Decoder(
        pool,
        requests=REQUESTS,
        q_heads=Q_HEADS,
        budget=0.05,
        pages_max=TOKENS // layout.page_tokens + 1,
        device=device,
        hot_pages=64 if device == "cuda" else 0,  # room on the GPU for pages that come again
    )
    prompt = rows(TOKENS, layout.kv_heads)
    for _ in range(REQUESTS):
        seq = pool.sequence()
        for layer in range(layout.layers):
            seq.append(layer, prompt, prompt)
        decoder.add(seq)

    q = rows(REQUESTS, 1, Q_HEADS).to(device)
    k = v = rows(REQUESTS, 1, layout.kv_heads).to(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        decoder.begin()
        for layer in range(layout.layers):
            out = decoder.layer(layer, q, k, v)
        decoder.end()  # waits, and raises what went wrong
    each = 1e3 * (time.perf_counter() - began) / STEPS
    scored = decoder.stats.bytes_scored / STEPS / 1e6
    print(f"{REQUESTS} requests of {TOKENS:,} tokens, {layout.layers} layers, device {out.device}")
    print(f"{each:.1f} ms a step; {scored:.1f} MB of keys scored to choose 5 % of the pages")
    if decoder.fallback:
        print(f"attention is on the CPU: {decoder.fallback}")
    decoder.close()
