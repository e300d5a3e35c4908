"""Records that are kept smaller: the same to the last bit, or a miss; what is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlkv import CXLPool, KVLayout
from cxlkv.arrays import Bytes
from cxlkv.errors import BadArgumentError, GeometryError, UnsupportedError
from cxlkv.tiers import Tiers
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import BLOCK_BYTES, SLOT_HEADER_BYTES, RecordShape
from cxlkv.tiers.compress import Codec

from ..support.cold_storer import mixed, name
from ..support.damaging import change_byte, poke
from ..test_records import grown
from . import test_cold
from .test_cold import SLOT, ColdModel, checked, names, read
from .test_cold import path as path

zstandard = pytest.importorskip(
    "zstandard", reason="zstandard is not installed: pip install 'cxlkv[compress]'"
)

SHAPE = RecordShape(20000, 7, "a layout", element_bytes=2)
RAW_SLOTS = 5  # of a record that is kept as it is: 4032 bytes in each slot


def record(number: int) -> Bytes:
    return mixed(number, SHAPE.bytes)


def records(*numbers: int) -> Bytes:
    return np.stack([record(n) for n in numbers])


def opened(path: Path, slots: int = 40, fsync: str = "none") -> ColdTier:
    space = BLOCK_BYTES + slots * SLOT
    return ColdTier(path, shape=SHAPE, capacity=space, fsync=fsync, compress="zstd")


def load(tier: ColdTier, *numbers: int) -> list[bool]:
    return test_cold.load(tier, *numbers, record=record)


def place(path: Path, tier: ColdTier, number: int) -> list[int]:
    """Where the slots of a record begin in the file."""
    return [BLOCK_BYTES + slot * SLOT for slot in tier._index[name(number).tobytes()].slots]


@pytest.fixture
def tier(path: Path) -> Iterator[ColdTier]:
    with checked(opened(path)) as made:
        yield made


# ---- the codec ----


@given(
    element_bytes=st.sampled_from([1, 2, 4]),
    elements=st.integers(1, 3000),
    count=st.integers(1, 9),
    values=st.integers(1, 256),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_every_record_comes_back(
    element_bytes: int, elements: int, count: int, values: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    given_records = rng.integers(0, values, (count, elements * element_bytes), np.uint8)
    codec = Codec("zstd", elements * element_bytes, element_bytes)
    try:
        packed = codec.pack(list(given_records))
        out = np.full_like(given_records, 0xA5)
        assert codec.unpack(list(zip(packed, out, strict=True))) == [True] * count
    finally:
        codec.close()
    np.testing.assert_array_equal(out, given_records)


def test_the_bytes_of_a_packed_record() -> None:
    """docs/explanation/cold-tier.md has them."""
    codec = Codec("zstd", SHAPE.bytes, 2)
    (packed,) = codec.pack([record(3)])
    codec.close()
    np.testing.assert_array_equal(packed[:10000], record(3)[::2])
    tops = zstandard.ZstdDecompressor().decompress(packed[10000:].tobytes())
    assert tops == record(3)[1::2].tobytes()
    assert len(packed) < 0.75 * SHAPE.bytes


def test_what_is_no_packed_record_is_told(seed: int) -> None:
    """Cut, of another size, or changed in some way that zstd sees; never an exception."""
    codec = Codec("zstd", SHAPE.bytes, 2)
    (packed,) = codec.pack([record(3)])
    out = np.zeros(SHAPE.bytes, np.uint8)
    lower = packed[:10000]
    for frame in (
        b"",
        b"noise" * 50,
        packed[10000:-5].tobytes(),
        zstandard.compress(bytes(9999)),
        zstandard.compress(bytes(1 << 20)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10000)),
        b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 7 + b"\x0f" + bytes(10),  # says 2**60 bytes
    ):
        stored = np.concatenate([lower, np.frombuffer(frame, np.uint8)])
        assert codec.unpack([(stored, out)]) == [False]
        assert not out.any()
    rng = random.Random(seed)
    for _ in range(300):
        stored = packed.copy()
        stored[rng.randrange(10000, len(stored))] ^= 1 << rng.randrange(8)
        assert codec.unpack([(stored, out)]) in ([True], [False])
    codec.close()


def test_without_the_library_the_remedy_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'cxlkv\[compress\]'"):
        opened(path)
    assert not path.exists()


def test_wrong_arguments_are_named(path: Path) -> None:
    with pytest.raises(BadArgumentError, match="compress='lz4': zstd, or None"):
        ColdTier(path, shape=SHAPE, capacity="1MiB", compress="lz4")
    with pytest.raises(BadArgumentError, match="101 bytes of 2 each"):
        ColdTier(path, shape=RecordShape(101, 7, "", 2), capacity="1MiB", compress="zstd")
    assert not path.exists()


# ---- stories ----


def test_more_records_than_fit_as_they_are(path: Path) -> None:
    with checked(opened(path, slots=8 * RAW_SLOTS)) as tier:
        numbers = [3 * n for n in range(10)]
        assert tier.store(names(*numbers), records(*numbers)).all()
        stats = tier.stats()
        assert (stats["records"], stats["slots_stored"], stats["packed"]) == (10, 40, 10)
        assert stats["packed_bytes_saved"] == 10 * SLOT
        assert stats["bytes_written"] == 40 * SLOT
        assert stats["pack_us"] > 0
        assert load(tier, *numbers) == [True] * 10
        assert tier.stats()["unpack_us"] > 0
        assert tier.store(names(1), records(1)).all()  # three slots: 0 makes room
        assert load(tier, 0, 1, 3) == [False, True, True]
        assert tier.stats()["slots_free"] == 1
    with checked(opened(path, slots=8 * RAW_SLOTS)) as tier:
        assert load(tier, 0, 1, 3, 27) == [False, True, True, True]
        assert tier.check(deep=True) == []


def test_what_cannot_be_made_smaller_is_kept_as_it_is(path: Path, tier: ColdTier) -> None:
    assert tier.store(names(2, 5, 1), records(2, 5, 1)).all()
    stats = tier.stats()
    assert (stats["slots_stored"], stats["packed"]) == (2 * RAW_SLOTS + 3, 1)
    begins = place(path, tier, 2)
    data = path.read_bytes()
    parts = [data[at + SLOT_HEADER_BYTES : at + SLOT] for at in begins]
    assert b"".join(parts)[: SHAPE.bytes] == record(2).tobytes()
    heads = [np.frombuffer(data[at + 48 : at + 56], np.uint16).tolist() for at in begins]
    assert heads == [[4032, 0, i, 4 - i] for i in range(4)] + [[3872, 0, 4, 0]]
    assert load(tier, 5, 1, 2) == [True] * 3


def test_a_large_record_that_does_not_fit_makes_no_hole(path: Path) -> None:
    with checked(opened(path, slots=7)) as tier:
        assert tier.store(names(1, 3), records(1, 3)).tolist() == [True, True]  # 3 and 4 slots
        with read(tier, 1):
            assert tier.store(names(2), records(2)).tolist() == [False]
        assert load(tier, 1, 2, 3) == [True, False, False]
        assert tier.stats()["slots_free"] == 4
    with checked(opened(path, slots=7)) as tier:
        assert load(tier, 1, 2, 3) == [True, False, False]


def test_tiers_keep_what_had_to_go_packed(path: Path, rng: np.random.Generator) -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=128, page_tokens=16)
    with (
        CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool,
        Tiers(pool, cold=path, cold_capacity="32MiB", compress="zstd") as tiers,
    ):
        ids = list(range(320))
        sequence = grown(pool, rng, len(ids))
        pool.publish_prefix(sequence, ids)
        sequence.release()
        assert tiers.reclaim(pool.stats()["pages_total"]) == 20
        assert tiers.stats()["cold_packed"] == 20
        with tiers.match_prefix(ids) as hit:
            assert hit.tokens == 320
        assert tiers.stats()["promoted_pages"] == 20


def test_nothing_to_compress_is_named(pool: CXLPool) -> None:
    with pytest.raises(BadArgumentError, match="compress= goes with cold="):
        Tiers(pool, compress="zstd")


# ---- the file ----


def test_files_made_otherwise_are_named(path: Path) -> None:
    space = BLOCK_BYTES + 40 * SLOT
    opened(path).close()
    with pytest.raises(GeometryError, match=r"made with compress='zstd', asked for was .*None"):
        ColdTier(path, shape=SHAPE, capacity=space)
    other = path.with_name("b.cold")
    ColdTier(other, shape=SHAPE, capacity=space).close()
    with pytest.raises(GeometryError, match=r"made with compress=None, asked for was .*'zstd'"):
        opened(other)


def test_every_part_that_is_damaged_is_a_miss(path: Path, seed: int) -> None:
    """Each header's bits, some of each part's bytes; by an open tier, and after an opening."""
    rng = random.Random(seed)
    for number in (2, 3):
        with opened(path) as tier:
            tier.store(names(2, 3), records(2, 3))
            size, begins = tier._index[name(number).tobytes()].size, place(path, tier, number)
            for i, begin in enumerate(begins):
                last = SLOT_HEADER_BYTES + min(4032, size - 4032 * i)
                for _ in range(30):
                    at = rng.randrange(SLOT_HEADER_BYTES if rng.random() < 0.5 else last)
                    change_byte(path, begin + at, rng.randrange(8))
                    assert load(tier, number, 5 - number) == [False, True]
                    assert tier.store(names(number), records(number)).all()
                    assert place(path, tier, number) == begins
        for begin in begins:
            change_byte(path, begin + 100)
            with checked(opened(path)) as tier:
                assert load(tier, number, 5 - number) == [False, True]
                assert tier.store(names(number), records(number)).all()


def test_parts_of_two_records_of_one_name_are_not_mixed(path: Path) -> None:
    """Each part is whole and names the record; but they were not stored together."""
    with opened(path, slots=8) as tier:
        tier.store(names(3), records(3))
        begins = place(path, tier, 3)
        old = path.read_bytes()
        tier.drop(names(3))
        tier.store(names(3), records(6))
        assert place(path, tier, 3) == begins
        poke(path, begins[1], old[begins[1] : begins[1] + SLOT])
        assert tier.load(names(3), np.zeros((1, SHAPE.bytes), np.uint8)).tolist() == [False]
        assert tier.stats()["corrupt"] == 1
    for begin in begins:
        with path.open("r+b") as file:  # as if the store had been torn
            file.write(old)
            file.seek(begin)
            file.write(bytes(SLOT))
        with checked(opened(path, slots=8)) as tier:
            assert tier.stats()["records"] == 0


# ---- a model ----


class PackedModel(ColdModel):
    """Records of three, four and five slots in a file of eleven."""

    slots = 11
    record_bytes = SHAPE.bytes
    open = staticmethod(opened)
    record = staticmethod(record)

    def cost(self, number: int) -> int:
        stored = SHAPE.bytes // 2 + len(zstandard.compress(record(number)[1::2].tobytes(), 1))
        return min(RAW_SLOTS, -(-stored // (SLOT - SLOT_HEADER_BYTES)))


TestPackedModel = PackedModel.TestCase
TestPackedModel.settings = settings(max_examples=60, stateful_step_count=25)
