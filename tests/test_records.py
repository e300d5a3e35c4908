"""Whole records out of the pool and into another one: the same bytes, the same hits, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, PoolFullError, Sequence, _core
from cxlkv.arrays import NUMPY_DTYPES, Bytes
from cxlkv.bench import loops
from cxlkv.errors import BadArgumentError
from cxlkv.layout import DTYPES
from cxlkv.prefix import PageKeys, key_hashes, prefix_keys

from .conftest import MakePool, audit
from .support.damaging import change_byte
from .support.lengths import matrix
from .support.processes import Child

PAGE = 4
HEADER = 64  # bytes of a record's header
Source = tuple[CXLPool, PageKeys, Bytes]  # 5 published pages, their keys and records
OTHER_LAYOUT = 44  # where a header has the CRC of the pool's layout


def group(layers: int, window: int | None = None, **more: object) -> LayerGroup:
    given = {"kv_heads": 2, "head_dim": 12, "dtype": "float32", **more}
    return LayerGroup(layers=layers, window=window, **given)  # type: ignore[arg-type]


def layout_of(*groups: LayerGroup, order: list[int] | None = None) -> KVLayout:
    return KVLayout.of(list(groups), order, page_tokens=PAGE)


LAYOUTS = {
    "float32": layout_of(group(2)),
    "float16": layout_of(group(2, dtype="float16", value_head_dim=5)),
    "bfloat16": layout_of(group(3, dtype="bfloat16", head_dim=64)),
    "gemma": layout_of(group(6, 10), group(2), order=[0, 0, 0, 1, 0, 0, 0, 1]),
    "parts of unequal length": layout_of(group(5, 9), group(3)),
    "codes": layout_of(
        group(2, value_head_dim=5, k_encoding="int8", v_encoding="int4"),
        group(2, 10, value_head_dim=5, k_encoding="int8", v_encoding="int4"),
    ),
    "codes of keys": layout_of(group(2, dtype="bfloat16", head_dim=64, k_encoding="int4")),
    "codes of values": layout_of(group(2, dtype="float16", v_encoding="int8")),
    "fp8": layout_of(
        group(2, value_head_dim=5, k_encoding="fp8_e4m3", v_encoding="fp8_e4m3"),
        group(2, 10, value_head_dim=5, k_encoding="fp8_e4m3", v_encoding="fp8_e4m3"),
    ),
    "planes": layout_of(
        group(2, value_head_dim=5, k_encoding="progressive", v_encoding="progressive"),
        group(2, 10, value_head_dim=5, k_encoding="progressive", v_encoding="progressive"),
    ),
    "keys in planes": layout_of(
        group(2, dtype="bfloat16", head_dim=64, k_encoding="progressive", v_encoding="int4")
    ),
    "keys in fp8": layout_of(group(2, dtype="bfloat16", head_dim=64, k_encoding="fp8_e4m3")),
    "latent": layout_of(group(2, kv_heads=1, values="key_prefix", value_head_dim=8)),
    "encoded": layout_of(group(2, dtype="bfloat16", k_encoding="int8", v_encoding="int4")),
    "unlike groups": layout_of(
        group(3, 10), group(2, kv_heads=1, head_dim=20, dtype="float16", values="key_prefix")
    ),
}


def pool_of(
    layout: KVLayout, *, checksum: bool = True, sketch: bool = True, capacity: str = "4MiB"
) -> CXLPool:
    return CXLPool.create(
        "anonymous:",
        layout=layout,
        capacity=capacity,
        checksum=checksum,
        sketch=sketch,
        threads=2,
    )


def grown(pool: CXLPool, rng: np.random.Generator, tokens: int) -> Sequence:
    sequence = pool.sequence()
    extend(sequence, pool.layout, rng, tokens)
    return sequence


@contextmanager
def held(pool: CXLPool, rng: np.random.Generator, tokens: int) -> Iterator[Sequence]:
    sequence = grown(pool, rng, tokens)
    yield sequence
    sequence.release()


def extend(sequence: Sequence, layout: KVLayout, rng: np.random.Generator, tokens: int) -> None:
    for layer in range(layout.layers):
        own = layout.of_layer(layer)
        dtype = NUMPY_DTYPES[DTYPES.index(own.dtype)]
        k = rng.standard_normal((tokens, own.kv_heads, own.head_dim)).astype(dtype)
        v = rng.standard_normal((tokens, own.kv_heads, own.value_head_dim)).astype(dtype)
        sequence.append(layer, k, None if own.values == "key_prefix" else v)


def names_of_keys(pool: CXLPool, keys: Iterable[bytes], places: int = 1) -> Bytes:
    return pool.records.names(key_hashes(keys), places).reshape(-1, 16)


def read_all(pool: CXLPool, names: Bytes) -> Bytes:
    """The records of those names that are published."""
    pages, generations = pool.records.find(names)
    there = pages != _core.NO_PAGE
    out = np.full((int(there.sum()), pool.records.shape[0]), 0xA5, np.uint8)
    codes = pool.records.read(pages[there], generations[there], out)
    assert not codes.any()
    np.testing.assert_array_equal(_core.names_of(out), names[there])
    return out


def seen(pool: CXLPool, sequence: Sequence) -> list[object]:
    """What select, fetch and attend say of each layer, as bytes; a token behind what was found."""
    found: list[object] = []
    rng = np.random.default_rng(7)
    extend(sequence, pool.layout, rng, 1)
    for layer in range(pool.layout.layers):
        own = pool.layout.of_layer(layer)
        queries = rng.standard_normal((2 * own.kv_heads, own.head_dim)).astype(np.float32)
        for method in ("exact", "digest", "two_stage") if pool.sketch else ("exact", "digest"):
            chosen = sequence.select(layer, queries, Budget(pages=2), method=method)
            found += [chosen.pages.tobytes(), np.asarray(chosen.scores).tobytes()]
        for rows in (*sequence.fetch(layer, chosen), *sequence.attend(layer, queries, chosen)):
            found.append(np.asarray(rows).tobytes())
    return found


@pytest.fixture
def published(rng: np.random.Generator) -> Iterator[Source]:
    """A small pool, for which all is whole at the end."""
    with pool_of(LAYOUTS["float32"]) as pool:
        ids = list(range(5 * PAGE))
        with held(pool, rng, len(ids)) as sequence:
            pool.publish_prefix(sequence, ids)
        keys = prefix_keys(ids, PAGE)
        yield pool, keys, read_all(pool, names_of_keys(pool, keys))
        audit(pool)


# ---- there and back ----


@matrix(name=LAYOUTS, checksum=[True, False], sketch=[True, False])
def test_another_pool_finds_the_same(
    name: str, checksum: bool, sketch: bool, rng: np.random.Generator
) -> None:
    layout = LAYOUTS[name]
    ids = list(range(9 * PAGE + 1))
    with (
        pool_of(layout, checksum=checksum, sketch=sketch) as source,
        pool_of(layout, checksum=not checksum, sketch=sketch) as other,
        pool_of(layout, checksum=checksum, sketch=sketch) as target,
    ):
        sequence = grown(source, rng, len(ids))
        assert source.publish_prefix(sequence, ids) > 0
        names = names_of_keys(source, prefix_keys(ids, PAGE))
        records = read_all(source, names)
        assert len(records) == source.stats()["pages_published"]
        for pool in (other, target):  # a record is the same with and without checksums
            assert not pool.records.write(records).any()
            assert pool.stats()["pages_published"] == len(records)
            assert pool.stats()["pages_held"] == 0
            with source.match_prefix(ids) as wanted, pool.match_prefix(ids) as got:
                assert got.tokens == wanted.tokens == 9 * PAGE
                expected = seen(source, wanted.sequence())
                assert seen(pool, got.sequence()) == expected
            np.testing.assert_array_equal(read_all(pool, names), records)
            audit(pool)
        sequence.release()
        audit(source)


def test_keys_of_several_pages_have_several_places(rng: np.random.Generator) -> None:
    keys = [b"a", b"b"]
    with pool_of(LAYOUTS["gemma"]) as pool:
        parts = pool.pages.geometry["part_count"]
        with held(pool, rng, 6 * PAGE) as sequence:
            pool.publish(sequence, keys, 3 * PAGE)
            names = pool.records.names(key_hashes(keys), 4)
            assert names.shape == (2, 4, parts, 16)
            pages, _ = pool.records.find(names.reshape(-1, 16))
            there = (pages != _core.NO_PAGE).reshape(2, 4, parts)
            full = there.any(axis=1).all(axis=0)  # parts that see all tokens, or enough of them
            assert full.all()
            assert not there[:, 3].any()
            assert there.sum() == pool.stats()["pages_published"]
            known = set(sequence.pages.tolist())
            assert {int(page) for page in pages[pages != _core.NO_PAGE]} <= known
        audit(pool)


def test_what_is_published_already_takes_no_page(published: Source) -> None:
    pool, keys, records = published
    free = pool.stats()["pages_free"]
    codes = pool.records.write(records)
    assert codes.tolist() == [_core.RECORD_PRESENT] * 5
    assert pool.stats()["pages_free"] == free
    assert pool.forget(keys[3:]) == 2
    codes = pool.records.write(records[[3, 3, 0, 4, 3]])
    there = _core.RECORD_PRESENT
    assert codes.tolist() == [0, there, there, 0, there]  # of equal ones the first
    assert pool.stats()["pages_free"] == free
    assert pool.match(keys).tokens == 5 * PAGE
    ballast = pool.pages.alloc(free)
    assert (pool.records.write(records) == there).all()  # nothing is wanted
    pool.pages.free(ballast)


def test_a_full_pool_takes_all_records_or_none(published: Source) -> None:
    pool, keys, records = published
    pool.forget(keys)
    total = pool.stats()["pages_free"]
    ballast = pool.pages.alloc(total - 4)
    with pytest.raises(PoolFullError):
        pool.records.write(records)
    assert pool.stats()["pages_free"] == 4
    assert pool.stats()["pages_published"] == 0
    assert not pool.records.write(records[:4]).any()
    assert pool.match(keys).tokens == 4 * PAGE
    pool.pages.free(ballast)


def test_pages_that_are_gone_are_not_read(published: Source, rng: np.random.Generator) -> None:
    pool, keys, records = published
    pages, generations = pool.records.find(names_of_keys(pool, keys))
    out = np.full_like(records, 0xA5)
    pool.forget(keys[1:2])
    wrong = np.array([generations[0], generations[1], generations[2] + 1, 9, 0], np.uint64)
    asked = np.array([*pages[:3], 2**32 - 1, 10**6], np.uint32)
    codes = pool.records.read(asked, wrong, out)
    assert codes.tolist() == [0] + [_core.E_STALE] * 4
    np.testing.assert_array_equal(out[0], records[0])
    assert not out[1:, :HEADER].any()  # no record: they cannot be written by mistake
    assert pool.records.write(out).tolist()[1:] == [_core.E_CORRUPT] * 4
    with held(pool, rng, 2 * PAGE) as sequence:  # held, and not published
        entries = np.frombuffer(sequence.handle[44:-4], "<u8,<u4")  # one part
        now = (entries["f1"].copy(), entries["f0"].copy())
        codes = pool.records.read(*now, np.zeros_like(records[:2]))
        assert codes.tolist() == [_core.E_STALE] * 2


def test_wrong_arrays_are_named(published: Source) -> None:
    pool, _, records = published
    for wrong in (records[:, :-1], records[::2], records.astype("i1"), records[0]):
        with pytest.raises(BadArgumentError, match="wanted, without gaps"):
            pool.records.write(wrong)
    with pytest.raises(BadArgumentError, match="generations"):
        _core.records_read(
            pool._handle, np.zeros(5, np.uint32), np.zeros(4, np.uint64), records.copy()
        )
    assert len(pool.records.write(records[:0])) == 0


# ---- hostile bytes ----


def test_a_flipped_bit_is_never_published(published: Source, seed: int) -> None:
    """Each bit of the header, and random ones of the rest."""
    pool, keys, records = published
    pool.forget(keys)
    free = pool.stats()["pages_free"]

    def refused(bit: int, record: int) -> int:
        hurt = records[record : record + 1].copy()
        hurt[0, bit // 8] ^= 1 << bit % 8
        code = int(pool.records.write(hurt)[0])
        assert code < 0, f"bit {bit} of record {record}"
        return code

    for bit in range(HEADER * 8):
        assert refused(bit, 0) == _core.E_CORRUPT

    @given(st.integers(0, records.shape[1] * 8 - 1), st.integers(0, 4))
    def anywhere(bit: int, record: int) -> None:
        assert refused(bit, record) == _core.E_CORRUPT

    anywhere()
    stats = pool.stats()
    assert stats["pages_free"] == free
    assert stats["pages_published"] == 0
    codes = pool.records.write(records)  # nor did it leave anything behind
    assert not codes.any()


def test_what_a_part_does_not_have_is_zero(rng: np.random.Generator) -> None:
    """Three parts of 3, 2 and 3 layers: the record of the second ends with zeros, or is none."""
    with pool_of(LAYOUTS["parts of unequal length"]) as pool:
        with held(pool, rng, PAGE) as sequence:
            pool.publish(sequence, [b"key"], PAGE)
        records = read_all(pool, names_of_keys(pool, [b"key"]))
        pool.forget([b"key"])
        parts = records[:, 40:44].copy().view(np.uint32)[:, 0].tolist()
        assert parts == [0, 1, 2]
        rest = records.shape[1] // 4
        assert not records[1, -rest:].any()
        for place in (1, rest // 2, rest):
            hurt = records.copy()
            hurt[1, -place] = 1
            codes = pool.records.write(hurt)
            assert codes.tolist()[1] == _core.E_CORRUPT
        assert pool.records.write(records).tolist()[1] == 0
        audit(pool)


def with_header(record: Bytes, offset: int, value: int, width: int = 4) -> Bytes:
    """A lie with a right CRC."""
    made = record.copy()
    made[offset : offset + width] = np.frombuffer(value.to_bytes(width, "little"), np.uint8)
    made[60:64] = np.frombuffer(_core.crc32c(made[:60]).to_bytes(4, "little"), np.uint8)
    return made


@pytest.mark.parametrize("value", [1, 2, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize(
    ("offset", "width"),
    [(0, 4), (4, 4), (8, 8), (16, 16), (32, 4), (36, 4), (40, 4), (44, 4), (48, 4), (52, 8)],
    ids="magic version bytes hash tokens ordinal part layout table reserved".split(),
)
def test_headers_that_lie_hurt_nobody(
    published: Source, offset: int, width: int, value: int
) -> None:
    """The CRC is right. With another hash, ordinal or length it is another record, found there or
    nowhere."""
    pool, keys, records = published
    pool.forget(keys)
    if offset == 4 and value == 1:
        return  # the true version
    made = with_header(records[1], offset, value, width)[None]
    code = int(pool.records.write(made)[0])
    harmless = offset == 16 or (offset == 36 and value <= 0x7FFFFFFF)
    harmless |= offset == 32 and value <= PAGE  # a page that is not full
    assert (code == 0) == harmless
    if offset == OTHER_LAYOUT or offset == 8:
        assert code == _core.E_GEOMETRY
    codes = pool.records.write(records)
    assert ((codes == 0) | (codes == _core.RECORD_PRESENT)).all()
    with pool.match(keys) as hit:
        assert hit.tokens in (PAGE, 5 * PAGE)
    audit(pool)


def test_a_record_without_a_name_is_refused(published: Source) -> None:
    pool, keys, records = published
    pool.forget(keys)
    made = with_header(records[0], 16, 0, 16)[None]
    assert pool.records.write(made)[0] == _core.E_CORRUPT


@given(st.data())
def test_random_bytes_are_no_record(data: st.DataObject) -> None:
    with pool_of(LAYOUTS["latent"]) as pool:
        bytes_each = pool.records.shape[0]
        text = data.draw(st.binary(min_size=bytes_each, max_size=bytes_each))
        given = np.frombuffer(text, np.uint8)[None]
        assert pool.records.write(given)[0] == _core.E_CORRUPT
        assert pool.stats()["pages_published"] == 0


@pytest.mark.parametrize(
    "other",
    [
        layout_of(group(2, 7)),  # a window
        KVLayout.of([group(2)], page_tokens=PAGE, model_id="another model"),
        KVLayout.of([group(2)], page_tokens=PAGE, shard=(1, 2, 0, 1)),
    ],
    ids=["window", "model", "shard"],
)
def test_records_of_another_layout_are_refused(published: Source, other: KVLayout) -> None:
    _, _, records = published
    with pool_of(other) as pool:
        if pool.records.shape[0] == records.shape[1]:
            codes = pool.records.write(records)
            assert codes.tolist() == [_core.E_GEOMETRY] * 5
        assert pool.stats()["pages_published"] == 0


def test_a_damaged_page_is_not_read_out(tmp_path: Path, rng: np.random.Generator) -> None:
    layout = LAYOUTS["float32"]
    path = tmp_path / "a.pool"
    ids = list(range(3 * PAGE))
    with CXLPool.create(path, layout=layout, capacity="4MiB", threads=2) as pool:
        with held(pool, rng, len(ids)) as sequence:
            pool.publish_prefix(sequence, ids)
            middle = int(sequence.pages[1])
        geometry = pool.pages.geometry
        extent, slot = divmod(middle, geometry["slab_slots"])
        at = geometry["extents_offset"] + extent * geometry["extent_bytes"]
        at += geometry["layers_offset"] + geometry["keys_offset"]
        at += slot * layout.kv_heads * geometry["key_piece_bytes"] + 5
        change_byte(path, at)
        names = names_of_keys(pool, prefix_keys(ids, PAGE))
        found = pool.records.find(names)
        out = np.full((3, pool.records.shape[0]), 0xA5, np.uint8)
        codes = pool.records.read(*found, out)
        assert codes.tolist() == [0, _core.E_CORRUPT, 0]
        assert not out[1, :HEADER].any()
        assert pool.stats()["pages_held"] == 0


# ---- pages that may go ----


def test_held_pages_are_not_forgotten(published: Source) -> None:
    pool, keys, _ = published
    found = pool.records.find(names_of_keys(pool, keys))
    with pool.match(keys[:2]) as hit:
        codes = pool.records.forget(*found, True)
        assert codes.tolist() == [_core.E_BUSY] * 2 + [0] * 3
        assert pool.match(keys).tokens == 2 * PAGE
        again = pool.records.forget(*found, False)
        assert again.tolist() == [_core.PAGE_HELD] * 2 + [_core.E_STALE] * 3
        assert pool.match(keys).tokens == 0
        assert len(hit.sequence()) == 2 * PAGE  # it has them still
    assert pool.stats()["pages_free"] == pool.stats()["pages_total"]


def test_another_generation_is_not_forgotten(published: Source) -> None:
    pool, keys, _ = published
    pages, generations = pool.records.find(names_of_keys(pool, keys))
    codes = pool.records.forget(pages, generations + 1, True)
    assert codes.tolist() == [_core.E_STALE] * 5
    pages[3] = 2**31
    codes = pool.records.forget(pages[[3, 0, 0]], generations[[3, 0, 0]], True)
    assert codes.tolist() == [_core.E_STALE, 0, _core.E_STALE]
    assert pool.stats()["pages_published"] == 4


@pytest.mark.skipif(loops.flush_name() == "none", reason="this CPU cannot flush lines")
def test_a_record_that_one_host_writes_is_found_by_another(
    rng: np.random.Generator, shm_path: Path
) -> None:
    """A host reads out and forgets its own pages only; it writes to pages of its own."""
    layout, ids = LAYOUTS["gemma"], list(range(6 * PAGE))
    shared = {"layout": layout, "capacity": "16MiB", "sharing": "software", "hosts": 2}
    with (
        CXLPool.create(shm_path, host=0, threads=1, **shared) as first,  # type: ignore[arg-type]
        CXLPool.open(shm_path, host=1, threads=1) as second,
    ):
        with held(first, rng, len(ids)) as sequence:
            first.publish_prefix(sequence, ids)
        names = names_of_keys(first, prefix_keys(ids, PAGE))
        records = read_all(first, names)
        with second.match_prefix(ids) as hit:
            wanted = seen(second, hit.sequence())
        theirs = second.records.find(names)
        there = theirs[0] != _core.NO_PAGE
        codes = second.records.read(theirs[0][there], theirs[1][there], records * 0)
        assert (codes == _core.E_STALE).all()
        codes = second.records.forget(theirs[0][there], theirs[1][there], True)
        assert (codes == _core.E_STALE).all()
        assert (second.records.write(records) == _core.RECORD_PRESENT).all()
        own = first.records.find(names)
        assert not first.records.forget(own[0][there], own[1][there], True).any()
        assert second.match_prefix(ids).tokens == 0
        assert not second.records.write(records).any()
        with first.match_prefix(ids) as hit:
            assert hit.tokens == len(ids)
            assert seen(first, hit.sequence()) == wanted


RACER = """
import sys
import numpy as np
from cxlkv import CXLPool, _core
path, records, seed = sys.argv[1], np.load(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(seed)
with CXLPool.open(path) as pool:
    names = _core.names_of(records)
    out = np.zeros_like(records)
    print("ready", flush=True)
    sys.stdin.readline()
    wrote = freed = 0
    for turn in range(300):
        some = rng.permutation(len(records))[: 1 + turn % len(records)]
        codes = pool.records.write(records[some])
        assert set(codes.tolist()) <= {0, _core.RECORD_PRESENT}, codes
        wrote += int((codes == 0).sum())
        pages, generations = pool.records.find(names)
        codes = pool.records.read(pages, generations, out)
        assert set(codes.tolist()) <= {0, _core.E_STALE}, codes
        assert (out[codes == 0] == records[codes == 0]).all()
        order = rng.permutation(len(pages))[:2]
        codes = pool.records.forget(pages[order], generations[order], True)
        assert set(codes.tolist()) <= {0, _core.E_STALE, _core.E_BUSY}, codes
        freed += int((codes == 0).sum())
    print(wrote, freed, flush=True)
"""


def test_two_processes_race(published: Source, tmp_path: Path, seed: int) -> None:
    """Both write, read and forget the same records: what is read is always right, and each page
    that was published was freed once, or is there."""
    source, _, records = published
    np.save(tmp_path / "records.npy", records)
    path = str(tmp_path / "race.pool")
    with CXLPool.create(path, layout=source.layout, capacity="4MiB", threads=1) as pool:
        words = ["-c", RACER, path, tmp_path / "records.npy"]
        with Child(*words, seed) as one, Child(*words, seed + 1) as two:
            assert one.hear() == two.hear() == "ready"
            one.tell("go")
            two.tell("go")
            outcomes = [racer.end().split() for racer in (one, two)]
        wrote = sum(int(outcome[0]) for outcome in outcomes)
        freed = sum(int(outcome[1]) for outcome in outcomes)
        assert wrote - freed == pool.stats()["pages_published"]
        assert wrote > len(records)
        audit(pool)


def test_a_small_record_by_hand(make_pool: MakePool) -> None:
    """The bytes, as docs/reference/memory-layout.md has them."""
    pool = make_pool(page_tokens=4, head_dim=8, kv_heads=2)
    k = np.arange(64, dtype=np.float32).reshape(4, 2, 8)
    sequence = pool.sequence()
    sequence.append(0, k, -k)
    pool.publish(sequence, [b"key"], 4)
    sequence.release()
    record = read_all(pool, names_of_keys(pool, [b"key"]))[0]
    words = record[:64].view(np.uint32)
    assert record[:4].tobytes() == b"CKVP"
    assert words[1] == 1
    assert record[8:16].view(np.uint64)[0] == len(record) == pool.records.shape[0]
    assert words[8:12].tolist() == [4, 0, 0, pool.records.shape[1]]
    table = record[64:128]
    assert words[12] == _core.crc32c(table)
    assert words[15] == _core.crc32c(record[:60])
    at, crcs = 128, table.view(np.uint32).reshape(-1, 2, 4)  # rows of [head][kind]
    sizes = (2 * 8 * 4, 16 * 4 + 16 * 4, 4 * 8 * 4, 4 * 8 * 4)
    for kind, size in enumerate(sizes):
        for head in range(2):
            piece = record[at : at + size]
            at += size
            assert crcs[0, head, kind] == _core.crc32c(piece)
            if kind >= 2:
                sign = (1, -1)[kind - 2]
                np.testing.assert_array_equal(
                    piece.view(np.float32).reshape(4, 8), sign * k[:, head]
                )
    assert len(record) == -(-at // 64) * 64
    assert not record[at:].any()
