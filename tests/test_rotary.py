"""Rotary embeddings: the turning itself, and that pools keep what a layout says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, Rotary
from cxlkv._core import crc32c
from cxlkv.errors import BadArgumentError, CorruptError, GeometryError

from .support.texts import SMALL

TABLE = 2176  # docs/reference/memory-layout.md
ROTARY = Rotary.of(500_000, 6)
GROUP = LayerGroup(layers=1, kv_heads=2, head_dim=8, rotary=ROTARY)
OTHER = replace(GROUP, window=64, rotary=Rotary((1.0, 0.5, 0.25, 0.125), neighbours=True))


@pytest.mark.parametrize("rotary", [ROTARY, OTHER.rotary], ids=["halves", "neighbours"])
def test_pairs_turn_as_complex_numbers_do(rotary: Rotary, seed: int) -> None:
    print(f"seed {seed}")
    keys = np.random.default_rng(seed).standard_normal((2, 50, 9)).astype(np.float32)
    positions = np.arange(50) * 131
    turned = rotary.rotate(keys, positions)
    first, second = rotary.pairs
    angles = np.exp(1j * positions[:, None] * np.array(rotary.frequencies))
    wanted = (keys[..., first] + 1j * keys[..., second]) * angles
    np.testing.assert_allclose(turned[..., first] + 1j * turned[..., second], wanted, atol=1e-5)
    assert np.array_equal(turned[..., rotary.channels :], keys[..., rotary.channels :])
    np.testing.assert_allclose(rotary.unrotate(turned, positions), keys, atol=1e-5)


def test_a_pool_keeps_what_its_layout_says(path: Path) -> None:
    layout = KVLayout.of([GROUP, OTHER])
    CXLPool.create(path, layout=layout, capacity="4MiB").close()
    with CXLPool.open(path) as pool:
        assert [pool.layout.rotary_of(n) for n in (0, 1)] == [GROUP.rotary, OTHER.rotary]
        replaced = pool.layout.encoded("int8")
        assert replaced.rotary_of(1) == OTHER.rotary


def test_layouts_that_differ_in_it_alone_are_equal(path: Path) -> None:
    """Names of pools, keys and records are what they were before pools knew of it."""
    plain = replace(GROUP, rotary=None)
    assert plain == GROUP
    assert repr(plain) == repr(GROUP)
    with CXLPool.create(path, layout=KVLayout.of([plain]), capacity="4MiB") as pool:
        described = pool.records.shape
    path.unlink()
    with CXLPool.create(path, layout=KVLayout.of([GROUP]), capacity="4MiB") as pool:
        assert pool.records.shape == described
    CXLPool.open(path, layout=KVLayout.of([plain])).close()


@pytest.mark.parametrize("at", [0, 40, 68, 1092])
def test_a_table_that_was_changed_is_refused(path: Path, at: int) -> None:
    CXLPool.create(path, layout=KVLayout.of([GROUP]), capacity="4MiB").close()
    with path.open("r+b") as file:
        file.seek(TABLE + at)
        before = file.read(1)
        file.seek(TABLE + at)
        file.write(bytes([before[0] ^ 0x40]))
    with pytest.raises(CorruptError, match="rotary embedding is wrong"):
        CXLPool.open(path)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (4, (5).to_bytes(4, "little"), "group 0 turns 5 pairs of 8 channels"),
        (4, (2**31).to_bytes(4, "little"), "group 0 turns 2147483648 pairs"),
        (8, (1).to_bytes(4, "little"), "group 1 turns 1 pairs"),
        (0, (1 << 16).to_bytes(4, "little"), "a rotary embedding of 3 pairs"),
        (68, np.float32(np.inf).tobytes(), "a rotary frequency is not finite"),
    ],
)
def test_numbers_of_a_table_are_checked_whatever_its_crc_says(
    path: Path, at: int, value: bytes, said: str
) -> None:
    CXLPool.create(path, layout=KVLayout.of([GROUP]), capacity="4MiB").close()
    with path.open("r+b") as file:
        file.seek(TABLE)
        table = bytearray(file.read(1092))
        table[at : at + 4] = value
        file.seek(TABLE)
        file.write(table + crc32c(bytes(table)).to_bytes(4, "little"))
    with pytest.raises(GeometryError, match=said):
        CXLPool.open(path)


def test_what_is_no_rotary_embedding_is_refused() -> None:
    for frequencies in ((), (float("nan"),), (1.0,) * 257):
        with pytest.raises(BadArgumentError, match="1 to 256 finite numbers"):
            Rotary(frequencies)
    with pytest.raises(BadArgumentError, match="channels are an even number"):
        Rotary.of(10_000, 7)
    with pytest.raises(BadArgumentError, match="no more channels than they have, 8"):
        replace(GROUP, rotary=Rotary.of(10_000, 10))
    many = replace(GROUP, head_dim=512, value_head_dim=512, rotary=Rotary.of(1e4, 512))
    with pytest.raises(BadArgumentError, match="of 512 pairs of channels in all groups"):
        KVLayout.of([many, replace(many, window=64)])
    with pytest.raises(BadArgumentError, match=r"wanted are \[\.\.\., tokens, dim\] of 6 channels"):
        ROTARY.rotate(np.zeros((3, 4), np.float32), [0, 1, 2])


def test_a_method_that_needs_it_says_so() -> None:
    pytest.importorskip("numba", reason="numba compiles scorers")
    with CXLPool.create("anonymous:", layout=SMALL, capacity="4MiB") as pool:
        sequence = pool.sequence()
        rows = np.ones((40, SMALL.kv_heads, SMALL.head_dim), np.float32)
        for layer in range(SMALL.layers):
            sequence.append(layer, rows, rows)
        with pytest.raises(
            BadArgumentError, match=r"does not say of layer 0: create it with layou"
        ):
            pool.calibrate("low_rank", sequence)
        queries = np.ones((SMALL.layers, 41, SMALL.kv_heads, SMALL.head_dim), np.float32)
        with pytest.raises(BadArgumentError, match="wanted are those of the last of 40 tokens"):
            pool.calibrate("loki", sequence, queries)
        q = np.ones((SMALL.kv_heads, SMALL.head_dim), np.float32)
        with pytest.raises(BadArgumentError, match="learns from keys first"):
            sequence.select(0, q, Budget(pages=2), method="low_rank")
