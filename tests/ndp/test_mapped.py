"""A pool scanned through a plain read-only mapping: the same answers as the core's, by handle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup
from cxlkv import Sequence as PoolSequence
from cxlkv.errors import (
    BadArgumentError,
    NotAPoolError,
    StaleError,
    TruncatedError,
    UnsupportedError,
    VersionError,
)

numba = pytest.importorskip("numba", reason="numba is not installed: pip install 'cxlkv[numba]'")

from cxlkv.ndp import portable  # noqa: E402  (it cannot be imported without numba)
from cxlkv.ndp.mapped import MappedPool  # noqa: E402

Floats = npt.NDArray[np.float32]
KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
ONE = np.array([0, 1], np.int32)


def layout_of(dtype: str, values: str) -> KVLayout:
    """Layers with a window and layers without one, several to a page; 4 tokens a page."""
    shape = {"kv_heads": 3, "head_dim": 20, "value_head_dim": 12, "dtype": dtype, "values": values}
    groups = [
        LayerGroup(layers=4, window=40, **shape),  # type: ignore[arg-type]
        LayerGroup(layers=2, **shape),  # type: ignore[arg-type]
    ]
    return KVLayout.of(groups, (0, 0, 1, 0, 0, 1), page_tokens=4, model_id="mapped")


def grow(sequence: PoolSequence, layout: KVLayout, tokens: int, rng: np.random.Generator) -> None:
    kind = KINDS[layout.dtype]
    for first in range(0, tokens, 7):
        count = min(7, tokens - first)
        for layer in range(layout.layers):
            k = rng.standard_normal((count, 3, 20)).astype(kind)
            v = rng.standard_normal((count, 3, 12)).astype(kind)
            sequence.append(layer, k, v if layout.values == "own" else None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def sequence(path: Path, rng: np.random.Generator) -> Iterator[PoolSequence]:
    """90 tokens in a pool at `path`, which stays open."""
    layout = layout_of("bfloat16", "own")
    with CXLPool.create(path, layout=layout, capacity="16MiB", threads=1) as pool:
        made = pool.sequence()
        grow(made, layout, 90, rng)
        yield made


@pytest.mark.parametrize("values", ["own", "key_prefix"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("tokens", [3, 88, 301])
def test_the_mapping_gives_what_the_core_gives(
    path: Path, rng: np.random.Generator, dtype: str, values: str, tokens: int
) -> None:
    layout = layout_of(dtype, values)
    with CXLPool.create(path, layout=layout, capacity="16MiB", threads=1) as pool:
        other, sequence = pool.sequence(), pool.sequence()
        grow(other, layout, 50, rng)
        grow(sequence, layout, tokens, rng)
        mapped = MappedPool(path)
        assert mapped.layout == pool.layout
        for layer in range(layout.layers):
            query: Floats = rng.standard_normal((1, 6, 20)).astype(np.float32)
            stored = mapped.layer(sequence.handle, layer)
            assert stored.tokens == tokens
            for method in ("exact", "digest"):
                budget = Budget(pages=5, sinks=0, recent=1)
                ours = portable.select([stored], query, ONE, [budget], method=method)
                theirs = sequence.select(layer, query, budget, method=method)
                np.testing.assert_array_equal(ours.pages, theirs.pages)
                np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-4, atol=1e-5)
                assert ours.bytes_scored == theirs.bytes_scored
                assert ours.bytes_fetched == theirs.bytes_fetched
            for picked in (None, ours):
                out, lse = portable.attend([stored], query, ONE, picked=picked)
                want, want_lse = sequence.attend(layer, query, picked)
                np.testing.assert_allclose(out, np.asarray(want), rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(lse, np.asarray(want_lse), rtol=1e-4, atol=1e-5)
        mapped.still_there(sequence.handle)


def test_freed_pages_are_stale(path: Path, sequence: PoolSequence) -> None:
    handle, mapped = sequence.handle, MappedPool(path)
    mapped.layer(handle, 2)
    sequence.release()
    with pytest.raises(StaleError, match="was freed"):
        mapped.layer(handle, 2)
    with pytest.raises(StaleError, match="was freed"):
        mapped.still_there(handle)


def test_a_handle_is_not_trusted(path: Path, sequence: PoolSequence) -> None:
    handle, mapped = sequence.handle, MappedPool(path)
    for damaged in (b"", b"CKVH", handle[:-1], handle + b"0000", b"X" + handle[1:]):
        with pytest.raises(BadArgumentError):
            mapped.layer(damaged, 0)
    with pytest.raises(VersionError):
        mapped.layer(handle[:4] + b"\x09" + handle[5:], 0)
    with pytest.raises(StaleError, match="another pool"):
        mapped.layer(handle[:8] + bytes(16) + handle[24:], 0)
    with pytest.raises(BadArgumentError, match="does not have"):
        mapped.layer(handle[:-8] + b"\xff" * 4 + handle[-4:], 5)
    with pytest.raises(BadArgumentError, match="damaged"):
        mapped.layer(handle[:24] + (2**40).to_bytes(8, "little") + handle[32:], 0)
    with pytest.raises(BadArgumentError, match="layer 6"):
        mapped.layer(handle, 6)


def test_what_is_no_pool_is_refused(path: Path, sequence: PoolSequence, tmp_path: Path) -> None:
    block, other = path.read_bytes()[:4096], tmp_path / "other"
    for given, error in [
        (b"short", NotAPoolError),
        (bytes(4096), NotAPoolError),
        (block[:8] + b"\x63" + block[9:], VersionError),
        (block, TruncatedError),
        (block[:40] + b"\x02" + block[41:], UnsupportedError),  # sharing: software
    ]:
        other.write_bytes(given)
        with pytest.raises(error):
            MappedPool(other)


def test_pieces_outside_the_memory_are_refused(path: Path, sequence: PoolSequence) -> None:
    """The kernels do not look; so nothing reaches them that has not been checked."""
    stored = MappedPool(path).layer(sequence.handle, 2)
    keys, values = stored.keys, stored.values
    far = keys.starts.copy()
    far[-1] = len(stored.memory) - 3
    for changed in (
        {"keys": portable.Pieces(far, keys.strides)},
        {"keys": portable.Pieces(keys.starts[:-1], keys.strides)},
        {"keys": portable.Pieces(keys.starts, (2**40, 20))},
        {"values": portable.Pieces(values.starts - 2**40, values.strides)},
        {"memory": stored.memory[::2]},
        {"memory": stored.memory.view(np.float32)},
    ):
        with pytest.raises(BadArgumentError):
            replace(stored, **changed)


def test_arguments_that_no_kernel_could_read_are_refused(
    path: Path, sequence: PoolSequence
) -> None:
    stored = MappedPool(path).layer(sequence.handle, 2)
    query, budgets = np.zeros((1, 6, 20), np.float32), [Budget(pages=1)]
    behind = stored.keys.starts.copy()
    behind[0] = -1
    gone = replace(stored, keys=portable.Pieces(behind, stored.keys.strides))
    with pytest.raises(BadArgumentError, match="not all are there"):
        portable.select([gone], query, ONE, budgets)
    bare = replace(stored, digests=None)
    with pytest.raises(BadArgumentError, match="no digests"):
        portable.select([bare], query, ONE, budgets, method="digest")
    for shape, starts in [((1, 6, 7), ONE), ((1, 4, 20), ONE), ((2, 6, 20), ONE)]:
        with pytest.raises(BadArgumentError):
            portable.attend([stored], np.zeros(shape, np.float32), starts)
    many = np.zeros((91, 6, 20), np.float32)
    with pytest.raises(BadArgumentError, match="fewer tokens"):
        portable.select([stored], many, np.array([0, 91], np.int32), budgets)
    picked = portable.select([stored], query, ONE, budgets)
    with pytest.raises(BadArgumentError, match="the sequence has"):
        portable.attend([stored], query, ONE, picked=replace(picked, pages=picked.pages + 23))
    with pytest.raises(BadArgumentError, match=r"picked\.pages"):
        portable.attend([stored], query, ONE, picked=replace(picked, pages=picked.pages[0]))


def test_threads_change_nothing(path: Path, sequence: PoolSequence) -> None:
    stored = MappedPool(path).layer(sequence.handle, 5)
    query = np.random.default_rng(5).standard_normal((1, 6, 20)).astype(np.float32)
    before, results = numba.get_num_threads(), []
    try:
        for threads in (1, before):
            numba.set_num_threads(threads)
            picked = portable.select([stored], query, ONE, [Budget(mass=0.7)])
            results.append((picked.pages, picked.scores, *portable.attend([stored], query, ONE)))
    finally:
        numba.set_num_threads(before)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)


WITHOUT_CORE = """
import sys
sys.modules["cxlkv._native"] = None
import numpy as np
from cxlkv.ndp import portable
from cxlkv.ndp.engine import Budget
from cxlkv.ndp.mapped import MappedPool
stored = MappedPool(sys.argv[1]).layer(bytes.fromhex(sys.argv[2]), 2)
query = np.ones((1, 6, 20), np.float32)
picked = portable.select([stored], query, np.array([0, 1], np.int32), [Budget(pages=4)])
print(picked.pages.tolist())
try:
    from cxlkv import CXLPool
except ImportError as error:
    print(error)
"""


def test_a_program_without_the_core_scans(path: Path, sequence: PoolSequence) -> None:
    command = [sys.executable, "-c", WITHOUT_CORE, str(path), sequence.handle.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    pages, refused = done.stdout.splitlines()
    query = np.ones((1, 6, 20), np.float32)
    assert pages == str(sequence.select(2, query, Budget(pages=4), method="exact").pages.tolist())
    assert "_native" in refused
