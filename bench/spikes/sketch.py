"""Spike for docs/decisions/0011: bits of a sketch, and what is read after it, against recall.

    python bench/spikes/sketch.py > docs/decisions/data/0011-sketch.json

i.i.d. Gaussian keys and queries (the hardest case), pages of 16 tokens, the best 5 % of the pages.
Sketches of 1, 2 and 4 bits a channel; after them either the keys of whole pages are read, the best
m times as many as wanted, or those of single tokens, c for each wanted page.
"""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.reference import turned

Floats = npt.NDArray[np.float64]
TOKENS, PAGE, SHARE, SEED, QUERIES = 131_072, 16, 0.05, 0, 8
CLIPS = {1: 1.6, 2: 2.0, 4: 2.8}  # of the root mean square: near the best for a normal channel


def sketched(keys: Floats, bits: int) -> Floats:
    """What the codes stand for, with a scale a token that is right along the key."""
    levels = 2**bits
    step = CLIPS[bits] * 2 / levels * np.sqrt((keys**2).mean(-1, keepdims=True))
    codes = np.clip(np.floor(keys / step + levels / 2), 0, levels - 1) - (levels - 1) / 2
    scales = (keys**2).sum(-1, keepdims=True) / (keys * codes).sum(-1, keepdims=True)
    return np.asarray(codes * scales, np.float64)


def main() -> None:
    random = np.random.default_rng(SEED)
    pages = TOKENS // PAGE
    wanted = int(SHARE * pages)
    rows = []
    for dim in (32, 128):
        keys = random.standard_normal((TOKENS, dim))
        queries = random.standard_normal((QUERIES, dim))
        true = queries @ keys.T
        best = np.argsort(-true.reshape(QUERIES, pages, PAGE).max(-1), 1)[:, :wanted]
        for bits in CLIPS:
            guess = turned(queries) @ sketched(turned(keys), bits).T
            scan = bits / 16 + 2 / dim  # a scale of 32 bits beside dim bf16 channels
            for kind, factor in [("pages", m) for m in (1, 1.5, 2, 3)] + [
                ("tokens", c) for c in (4, 6, 8, 10, 16)
            ]:
                found = []
                for i in range(QUERIES):
                    scores = np.full(TOKENS, -np.inf)
                    if kind == "tokens":
                        read = np.argpartition(-guess[i], int(factor * wanted))
                        read = read[: int(factor * wanted)]
                    else:
                        by_page = guess[i].reshape(pages, PAGE).max(-1)
                        chosen = np.argsort(-by_page)[: int(factor * wanted)]
                        read = (chosen[:, None] * PAGE + np.arange(PAGE)).ravel()
                    scores[read] = true[i][read]
                    got = np.argsort(-scores.reshape(pages, PAGE).max(-1))[:wanted]
                    found.append(np.isin(best[i], got).mean())
                after = factor * SHARE * (1 if kind == "pages" else 1 / PAGE)
                rows.append(
                    {
                        "head_dim": dim,
                        "bits": bits,
                        "then": kind,
                        "times": factor,
                        "recall": round(float(np.mean(found)), 4),
                        "share_of_bytes": round(scan + after, 4),
                    }
                )
    print(json.dumps({"seed": SEED, "tokens": TOKENS, "share": SHARE, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
