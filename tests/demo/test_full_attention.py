"""What full attention leaves: a divergence without nan, keys and values that a pool holds alike."""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers import DynamicCache

from cxlkv import CXLPool, KVLayout
from cxlkv.demo.full_attention import append_cache, divergence_from, keys_and_values


def test_the_divergence_of_rows_is_that_of_each() -> None:
    full = torch.log(torch.tensor([0.5, 0.25, 0.25, 0.0]))
    rows = torch.log(torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]]))
    found = divergence_from(full, rows)
    assert found.tolist() == [0.0, float(divergence_from(full, rows[1]))]
    assert math.isclose(found[1], 0.5 * math.log(2), rel_tol=1e-6)
    assert divergence_from(rows[1], full) == math.inf


def test_a_pool_gets_the_first_tokens_of_a_cache() -> None:
    cache = DynamicCache()
    made = [torch.randn(2, 1, 2, 9, 8) for _ in range(3)]
    for index, (keys, values) in enumerate(made):
        cache.update(keys, values, index)
    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype="float32", page_tokens=4)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        for length in (6, None):
            sequence = pool.sequence()
            append_cache(sequence, cache, length)
            tokens = length or 9
            assert len(sequence) == tokens
            for index, held in enumerate(keys_and_values(cache)):
                for stored, wanted in zip(sequence.fetch(index), held, strict=True):
                    pages = np.asarray(stored).reshape(2, -1, 8)
                    assert (pages[:, :tokens] == wanted[:, :tokens].numpy()).all()
            sequence.release()
