"""A pool used once from end to end, and compared with numpy: is this installation whole?

`tests/try_wheel.py` runs it in a fresh environment, so it uses nothing but cxlkv and numpy.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

import cxlkv
from cxlkv import Budget, CXLPool, KVLayout, _core
from cxlkv.arrays import Halves

TOKENS, HEADS, DIM, PAGE_TOKENS = 500, 2, 64, 16


def round_trip(path: Path) -> None:
    generator = np.random.default_rng(7)
    k, v = generator.standard_normal((2, TOKENS, HEADS, DIM)).astype(np.float16)
    q = generator.standard_normal((HEADS, DIM)).astype(np.float16)
    layout = KVLayout(
        layers=1, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE_TOKENS, dtype="float16"
    )
    with CXLPool.create(str(path), layout=layout, capacity="16MiB", checksum=True) as pool:
        sequence = pool.sequence()
        sequence.append(0, k, v)
        few = sequence.select(0, q, Budget(pages=8))
        fetched_k, fetched_v = sequence.fetch(0, few)
        for head in range(HEADS):
            chosen = few.pages[head]
            np.testing.assert_array_equal(fetched_k[head], by_page(k)[chosen, :, head])
            np.testing.assert_array_equal(fetched_v[head], by_page(v)[chosen, :, head])
        got, _ = sequence.attend(0, q, sequence.select(0, q, Budget(share=1.0)))
        np.testing.assert_allclose(got, attention(q, k, v), rtol=2e-3, atol=2e-3)
        sequence.release()
        report = pool.admin.check(deep=True)
        assert report["clean"], report["problems"]
    CXLPool.remove(str(path))


def by_page(rows: Halves) -> Halves:
    """[pages, PAGE_TOKENS, HEADS, DIM]; the tokens that the last page lacks are zero."""
    missing = -TOKENS % PAGE_TOKENS
    return np.pad(rows, ((0, missing), (0, 0), (0, 0))).reshape(-1, PAGE_TOKENS, HEADS, DIM)


def attention(q: Halves, k: Halves, v: Halves) -> npt.NDArray[np.float64]:
    logits = np.einsum("hd,thd->ht", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(DIM)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(np.einsum("ht,thd->hd", weights, v.astype(np.float64)))


def main() -> None:
    home = Path(cxlkv.__file__).resolve()
    assert home.is_relative_to(sys.prefix), f"{home} is not what was installed in {sys.prefix}"
    assert _core.version() == importlib.metadata.version("cxlkv")
    with tempfile.TemporaryDirectory() as folder:
        round_trip(Path(folder) / "pool")
    print(f"round trip right: cxlkv {_core.version()}, kernels {_core.isa()}")


if __name__ == "__main__":
    main()
