"""Pools with an encoding as files and among others: damaged, of another build, refused, shared,
in tiers. What they keep and compute is in test_encodings.py."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, _core
from cxlkv.errors import (
    BadArgumentError,
    CorruptError,
    CXLKVError,
    GeometryError,
    UnsupportedError,
    VersionError,
)
from cxlkv.prefix import prefix_keys
from cxlkv.stats import inspect
from cxlkv.tiers import Tiers

from .conftest import audit
from .support.command import run
from .support.damaging import change_byte
from .support.sharing import shared
from .test_encodings import ENCODED, FP8, PAIRS, drawn, layout_of, pool_of, seen
from .test_records import names_of_keys, read_all
from .test_upgrade import FEATURES_OFFSET, rewrite

K_ENCODING_OFFSET, V_ENCODING_OFFSET = 2080, 2084
INCOMPATIBLE_OFFSET = FEATURES_OFFSET + 16
PAGE = 20
IDS = range(3 * PAGE + 7)


def small(pair: tuple[str, str]) -> KVLayout:
    return layout_of(pair, dim=24, value_dim=40, page_tokens=PAGE, layers=2)


def write(pool: CXLPool, seed: int = 1) -> None:
    """A text whose rows follow from the seed, published with its tail."""
    sequence = pool.sequence()
    for layer in range(pool.layout.layers):
        sequence.append(layer, *drawn(np.random.default_rng(seed + layer), pool.layout, len(IDS)))
    pool.publish_prefix(sequence, [seed, *IDS[1:]], tail=True)
    sequence.release()


def read(pool: CXLPool, seed: int = 1) -> list[bytes]:
    """What all questions to the text are answered with; empty: it is not there."""
    q = np.random.default_rng(seed).standard_normal((2, 4, 24), np.float32)
    with pool.match_prefix([seed, *IDS[1:], 7]) as hit:
        if not hit:
            return []
        assert hit.tokens == len(IDS)
        sequence = hit.sequence()
        found = seen(sequence, q)
        sequence.release()
    return found


# ---- damage ----


def place_of(pool: CXLPool, page: int, kind: str) -> int:
    """The byte in the file at which a kind's piece of the last head, layer 1, begins."""
    g = _core.pool_geometry(pool._handle)
    extent, slot = divmod(page, g["slab_slots"])
    at = g["extents_offset"] + extent * g["extent_bytes"] + g["layers_offset"] + g["layer_bytes"]
    stride = g[f"{kind}_piece_bytes"]
    first = (
        0 if kind == "digest" else g["sketches_offset" if kind == "sketch" else f"{kind}s_offset"]
    )
    return at + first + (2 * slot + 1) * stride


def size_of(pool: CXLPool, kind: str) -> int:
    """Bytes of a piece that count: what follows fills it up to a line."""
    tokens, bits = 32, {"int8": 8, "int4": 4, "progressive": 8}
    rows = {"key": (24, pool.layout.k_encoding), "value": (40, pool.layout.v_encoding)}
    if kind == "digest":
        return 2 * 24
    if kind == "sketch":
        return _core.pool_geometry(pool._handle)["sketch_piece_bytes"]
    if rows[kind][1] == FP8:
        return PAGE * rows[kind][0]
    channels, encoding = 32, pool.layout.k_encoding
    if kind == "value":
        channels, encoding = 48, pool.layout.v_encoding
    size = tokens * (channels * bits[encoding] // 8 + 2) + (4 if kind == "key" else 0)
    if encoding != "progressive":
        return size
    lower = tokens * channels // 2  # from a line on, behind the upper plane and the scales
    return -(-(size - lower) // 64) * 64 + lower


@pytest.mark.parametrize("kind", ["key", "value", "digest", "sketch"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_byte_of_a_piece_is_held_against_its_checksum(
    pair: tuple[str, str], kind: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codes, scales, and the digest's own scale, the last bytes of keys that are not in planes."""
    with pool_of(small(pair), 400, path=path, sketch=True) as pool:
        write(pool)
        with pool.match_prefix([1, *IDS[1:]]) as hit:
            page = int(hit.sequence().pages[1])
        first, size = place_of(pool, page, kind), size_of(pool, kind)
    assert run(capsys, "pool", "check", "--deep", path).code == 0
    for offset in (0, size // 2, size - 5, size - 1):
        change_byte(path, first + offset)
        said = run(capsys, "pool", "check", "--deep", path)
        assert said.code == 1, offset
        assert f"page {page}, layer 1, kv head 1" in said.out
        with CXLPool.open(path, threads=1) as pool, pool.match_prefix([1, *IDS[1:]]) as hit:
            sequence = hit.sequence()
            q = np.ones((2, 24), np.float32)
            sequence.attend(0, q)
            methods = ("exact", "digest", "two_stage", "attention")
            for method in methods:
                with pytest.raises(CorruptError, match=f"page {page}, layer 1, kv head 1"):
                    sequence.select(1, q, Budget(pages=2), method=method)
            with pytest.raises(CorruptError):
                sequence.attend(1, q)
            if kind in ("key", "value"):
                with pytest.raises(CorruptError):
                    sequence.fetch(1)
        change_byte(path, first + offset)
    assert run(capsys, "pool", "check", "--deep", path).code == 0


# ---- other builds ----


@pytest.fixture
def closed_file(path: Path) -> Path:
    with pool_of(small(("int8", "int4")), 400, path=path) as pool:
        write(pool)
    return path


def opened(path: Path) -> CXLPool:
    return CXLPool.open(path, threads=1)


@pytest.mark.parametrize("pair", ENCODED, ids="-".join)
def test_a_pool_is_opened_as_it_was_made(pair: tuple[str, str], path: Path) -> None:
    layout = small(pair)
    with pool_of(layout, 400, path=path) as pool:
        write(pool)
        before = read(pool)
    with opened(path) as pool:
        assert pool.layout == layout
        assert read(pool) == before
        audit(pool)


@pytest.mark.parametrize(
    ("at", "value", "error", "text"),
    [
        (K_ENCODING_OFFSET, 99, GeometryError, "encoding code 99 of keys, 2 of values: unknown"),
        (V_ENCODING_OFFSET, 2**31, GeometryError, "encoding code 1 of keys, 2147483648 of values"),
        (K_ENCODING_OFFSET, 2, GeometryError, "its offsets do not follow from its layout"),
        (V_ENCODING_OFFSET, 0, GeometryError, "its offsets do not follow from its layout"),
        (INCOMPATIBLE_OFFSET, 0, GeometryError, "has an encoding without the feature"),
        (INCOMPATIBLE_OFFSET, 3, GeometryError, "the feature without states"),
        (V_ENCODING_OFFSET + 4, 1, GeometryError, "has states without the feature"),
        (INCOMPATIBLE_OFFSET, 5, GeometryError, "has objects of several pages"),
        (INCOMPATIBLE_OFFSET, 9, GeometryError, "shapes of groups are given where they differ"),
        (INCOMPATIBLE_OFFSET, 17, VersionError, "feature 4 of the incompatible ones"),
    ],
)
def test_a_superblock_that_says_something_else(
    at: int, value: int, error: type[CXLKVError], text: str, closed_file: Path
) -> None:
    before = closed_file.read_bytes()
    rewrite(closed_file, at, struct.pack("<I", value))
    changed = closed_file.read_bytes()
    with pytest.raises(error, match=text):
        opened(closed_file)
    assert text in inspect(str(closed_file)).detail
    assert closed_file.read_bytes() == changed, "nothing is written to it"
    closed_file.write_bytes(before)
    with opened(closed_file) as pool:
        assert read(pool)


def test_a_pool_without_an_encoding_has_no_feature(path: Path) -> None:
    with pool_of(small(("none", "none")), 400, path=path) as pool:
        write(pool)
    block = path.read_bytes()[:4096]
    assert not any(block[INCOMPATIBLE_OFFSET : V_ENCODING_OFFSET + 4])
    rewrite(path, INCOMPATIBLE_OFFSET, struct.pack("<Q", 1))
    rewrite(path, K_ENCODING_OFFSET, struct.pack("<I", 1))
    with pytest.raises(GeometryError, match="its offsets do not follow"):
        opened(path)


# ---- what is refused ----


def test_layouts_that_are_refused() -> None:
    for pair in (("int3", "int8"), ("int8", "INT4")):
        with pytest.raises(BadArgumentError, match="one of none, int8, int4"):
            layout_of(pair)
    with pytest.raises(BadArgumentError, match="leave out k_encoding"):
        LayerGroup(
            layers=1, kv_heads=1, head_dim=64, value_head_dim=32, values="key_prefix",
            k_encoding="int8",
        )  # fmt: skip
    groups = [
        LayerGroup(layers=1, kv_heads=1, head_dim=16, k_encoding=name) for name in ("int8", "int4")
    ]
    with pytest.raises(UnsupportedError, match="k_encoding"):
        pool_of(KVLayout.of(groups, page_tokens=4))
    with pytest.raises(GeometryError, match="up to 1024"):
        pool_of(layout_of(("none", "int8"), dim=1040, value_dim=16))


def test_records_of_another_encoding_are_refused() -> None:
    """No pool takes them, not even one whose pieces are as long."""
    layouts = [*map(small, ENCODED), small(("none", "none"))]
    crcs = set[int]()
    with pool_of(layouts[0], 400) as source:
        write(source)
        keys = prefix_keys([1, *IDS[1:]], PAGE, tail=True)
        records = read_all(source, names_of_keys(source, keys))
        assert len(records) == 4
        for layout in layouts:
            with pool_of(layout, 400) as pool:
                crcs.add(pool.records.shape[1])
                if layout is layouts[0]:
                    assert not pool.records.write(records).any()
                    assert read(pool) == read(source)
                else:
                    wide = np.zeros((4, pool.records.shape[0]), np.uint8)
                    width = min(wide.shape[1], records.shape[1])
                    wide[:, :width] = records[:, :width]
                    assert pool.records.write(wide).all()
                    assert read(pool) == []
                audit(pool)
        audit(source)
    assert len(crcs) == len(layouts)


# ---- tiers, and hosts ----


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_what_went_to_the_cold_tier_comes_back_to_the_bit(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    with pool_of(small(pair), 400) as pool:
        write(pool)
        before = read(pool)
        with Tiers(pool, cold=tmp_path / "cold", cold_capacity="4MiB") as tiers:
            assert tiers.reclaim(pool.stats()["pages_total"]) == 4
            assert read(pool) == []
            with tiers.match_prefix([1, *IDS[1:], 7]) as hit:
                assert hit.tokens == len(IDS)
            assert read(pool) == before
        audit(pool)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_hosts_read_each_others_texts(pair: tuple[str, str], path: Path) -> None:
    """Over memory that no hardware keeps coherent; the tail, too, and a handle's."""
    layout = small(pair)
    with shared(path, layout, sketch=True) as one, CXLPool.open(path, host=1, threads=1) as other:
        write(one, 1)
        write(other, 2)
        for seed in (1, 2):
            found = read(one, seed)
            assert found
            assert read(other, seed) == found
        with one.match_prefix([2, *IDS[1:], 7]) as hit:
            mine = hit.sequence()
        more = drawn(np.random.default_rng(5), layout, 30)
        for layer in range(2):
            mine.append(layer, *more)
        taken = other.adopt(mine.handle)
        q = np.ones((2, 24), np.float32)
        assert seen(taken, q) == seen(mine, q)
        mine.release()
        taken.release()
        audit(one)
        audit(other)
    CXLPool.remove(path)
