"""Bad input: each item is refused by its own exception, whose text names the cause and what helps,
and nothing else is harmed by it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, Sequence, _core, errors, object_keys
from cxlkv.arrays import Floats
from cxlkv.emulation import faults
from cxlkv.machine import regions
from cxlkv.machine.topology import probe
from cxlkv.ops.cli import app
from cxlkv.prefix import prefix_keys

from .support import texts
from .support.damaging import change_byte, poke
from .support.processes import Child
from .support.texts import SMALL, append, grown, numbers, publish, verify

CAPACITY = "3MiB"
IDS, OTHER_IDS = range(10), range(30, 40)


def rows(tokens: int) -> Floats:
    return numbers(range(tokens), 0, 0)


@pytest.fixture
def on_file(path: Path) -> Iterator[CXLPool]:
    with CXLPool.create(path, layout=SMALL, capacity=CAPACITY, threads=1) as made:
        yield made


@pytest.fixture
def closed_file(path: Path) -> Path:
    """A pool with two published pages and nobody who uses it."""
    with CXLPool.create(path, layout=SMALL, capacity=CAPACITY) as made:
        publish(made, range(8))
    return path


def geometry(pool: CXLPool) -> dict[str, int]:
    return pool.pages.geometry


# ---- files that are no pool, or not the right one, or not a whole one ----


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 4096, b"PK\3\4" * 4096])
def test_a_file_that_is_no_pool(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(errors.NotAPoolError, match="is not a cxlkv pool"):
        CXLPool.open(path)
    with pytest.raises(errors.NotAPoolError):
        CXLPool.remove(path)
    with pytest.raises(errors.PoolExistsError, match="not overwritten unless force=True"):
        CXLPool.create(path, layout=SMALL, capacity=CAPACITY)
    assert path.read_bytes() == content


def test_a_folder_and_a_fifo_are_no_pools(tmp_path: Path) -> None:
    with pytest.raises(errors.CXLKVError, match="is a folder: write a file in it"):
        CXLPool.open(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(errors.NotAPoolError, match="neither a regular file nor a dax"):
        CXLPool.open(tmp_path / "fifo")
    for force in (False, True):
        with pytest.raises(errors.PoolExistsError):
            CXLPool.create(tmp_path / "fifo", layout=SMALL, capacity=CAPACITY, force=force)


def test_nothing_there(path: Path) -> None:
    with pytest.raises(errors.PoolMissingError, match="No such file"):
        CXLPool.open(path)
    with pytest.raises(FileNotFoundError):
        CXLPool.remove(path)


def test_another_version(closed_file: Path) -> None:
    poke(closed_file, 8, struct.pack("<I", 1))
    with pytest.raises(errors.VersionError, match=r"version 1, this build reads 6.*create it anew"):
        CXLPool.open(closed_file)
    CXLPool.remove(closed_file)


def test_another_layout_than_expected(closed_file: Path) -> None:
    expected = KVLayout(layers=3, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
    with pytest.raises(errors.GeometryError, match="another pool than the layout given: layout"):
        CXLPool.open(closed_file, layout=expected)
    CXLPool.open(closed_file, layout=SMALL).close()


def test_hostile_numbers_with_a_right_crc(closed_file: Path) -> None:
    """Offsets are derived from the layout again; what does not follow is refused, not believed."""
    block = bytearray(closed_file.read_bytes()[:4096])
    with CXLPool.open(closed_file) as pool:
        region = struct.pack("<Q", geometry(pool)["region_bytes"])
    at = block.index(region)
    block[at : at + 8] = struct.pack("<Q", 1 << 62)
    for end in range(4, 4096 - 4, 4):  # the CRC is the word that covers all before it
        if struct.pack("<I", _core.crc32c(closed_file.read_bytes()[:end])) == block[end : end + 4]:
            block[end : end + 4] = struct.pack("<I", _core.crc32c(bytes(block[:end])))
            break
    with closed_file.open("r+b") as file:
        file.write(block)
    with pytest.raises(errors.GeometryError, match="do not follow from its layout"):
        CXLPool.open(closed_file)


@pytest.mark.parametrize("part", [0.001, 0.5, 0.999])
def test_a_truncated_file(closed_file: Path, part: float) -> None:
    faults.truncated(closed_file, part)
    with pytest.raises(errors.TruncatedError, match=r"truncated: .* bytes of .*create it anew"):
        CXLPool.open(closed_file)
    CXLPool.remove(closed_file)


def test_a_file_truncated_under_a_pool(on_file: CXLPool, path: Path) -> None:
    """SIGBUS becomes an error of the operation that met it; other sequences and the pool go on."""
    hurt, tail_only = grown(on_file, IDS), grown(on_file, OTHER_IDS[:3])
    faults.poison(path, geometry(on_file)["extents_offset"])
    with pytest.raises(errors.PoisonError, match=r"bus error .*pages were retired.*recompute"):
        hurt.fetch(0)
    assert on_file.stats()["pages_retired"] > 0
    verify(tail_only, OTHER_IDS[:3])
    hurt.release()
    assert on_file.stats()["pages_held"] == 0


def test_a_tail_published_out_of_a_page_that_is_gone(on_file: CXLPool, path: Path) -> None:
    """Its tokens lie in a full page, of which the tail would be a copy."""
    hurt = grown(on_file, range(8))
    faults.poison(path, geometry(on_file)["extents_offset"])
    with pytest.raises(errors.PoisonError, match="bus error"):
        on_file.publish_prefix(hurt, [1, 2, 3], tail=True)
    hurt.release()
    assert on_file.stats()["pages_held"] == on_file.stats()["pages_published"] == 0


# ---- flipped bits ----


@pytest.mark.parametrize("offset", [12, 40, 100, 400, 600, 960])
def test_a_flipped_bit_in_the_superblock(closed_file: Path, offset: int) -> None:
    change_byte(closed_file, offset, bit=3)
    with pytest.raises(errors.CorruptError, match=r"superblock's CRC is wrong.*create it anew"):
        CXLPool.open(closed_file)
    change_byte(closed_file, offset, bit=3)
    CXLPool.open(closed_file).close()


def test_a_flipped_bit_in_a_descriptor(on_file: CXLPool, path: Path) -> None:
    sequence = grown(on_file, IDS)
    handle, page = sequence.handle, int(sequence.pages[0])
    change_byte(path, geometry(on_file)["descriptors_offset"] + 64 * page + 24)
    with pytest.raises(errors.CorruptError, match=rf"descriptor of page {page} is damaged"):
        on_file.adopt(handle)
    report = on_file.admin.check()
    assert report["problem_count"] == 1
    assert f"page {page}" in report["problems"][0]


def test_a_flipped_bit_in_a_published_descriptor_is_a_miss(closed_file: Path) -> None:
    """Fails closed: the damaged page is set aside, never found, and given to nobody."""
    with CXLPool.open(closed_file) as pool:
        first = geometry(pool)["descriptors_offset"]
    change_byte(closed_file, first + 20)
    with CXLPool.open(closed_file) as pool:
        assert pool.match_prefix(list(range(8))).tokens == 0
        stats = pool.stats()
        assert (stats["pages_quarantined"], stats["pages_published_only"]) == (1, 1)


def test_a_flipped_bit_in_a_record_header(on_file: CXLPool, path: Path) -> None:
    sequence, other = grown(on_file, IDS), grown(on_file, OTHER_IDS)
    handle, page, where = sequence.handle, int(sequence.pages[1]), geometry(on_file)
    slots = where["slab_slots"]
    extent = where["extents_offset"] + page // slots * where["extent_bytes"]
    change_byte(path, extent + page % slots * 64 + 8)
    with pytest.raises(errors.CorruptError, match=rf"header of page {page}.*recompute"):
        sequence.fetch(0)
    with pytest.raises(errors.CorruptError):
        on_file.adopt(handle)
    verify(other, OTHER_IDS)


@pytest.mark.parametrize("kind", ["digest", "sketch", "K", "V"])
def test_a_flipped_bit_in_a_piece(on_file: CXLPool, path: Path, kind: str) -> None:
    sequence, other = grown(on_file, IDS), grown(on_file, OTHER_IDS)
    page, where = int(sequence.pages[1]), geometry(on_file)
    slots, heads, layer = where["slab_slots"], SMALL.kv_heads, 1
    start = where["extents_offset"] + page // slots * where["extent_bytes"]
    start += where["layers_offset"] + layer * where["layer_bytes"]
    slabs = {"digest": "", "sketch": "sketches_offset", "K": "keys_offset", "V": "values_offset"}
    pieces = {"digest": "digest", "sketch": "sketch", "K": "key", "V": "value"}
    slab, piece = where.get(slabs[kind], 0), where[f"{pieces[kind]}_piece_bytes"]
    change_byte(path, start + slab + page % slots * heads * piece + 5)

    report = on_file.admin.check(deep=True)
    assert report["problem_count"] == 1
    assert f"page {page}, layer 1, kv head 0: the CRC of its {kind} is wrong" in str(report)
    with CXLPool.open(path, threads=1) as fresh:  # it has not verified the page before
        read = fresh.adopt(sequence.handle)
        text = rf"page {page}, layer 1, kv head 0: the CRC of its {kind} is wrong.*recompute"
        q = np.ones((4, 8), np.float32)
        for use in (
            lambda: read.select(1, q, top_k=3),
            lambda: read.select(1, q, top_k=3, method="digest"),
            lambda: read.attend(1, q),
        ):
            with pytest.raises(errors.CorruptError, match=text):
                use()
        read.fetch(0)  # the other layer is whole
    if kind in "KV":
        with pytest.raises(errors.CorruptError, match=f"the CRC of its {kind} is wrong"):
            sequence.fetch(1)
        assert on_file.stats()["corrupt_pieces"] > 0
    verify(other, OTHER_IDS)


# ---- places and capacities ----


@pytest.mark.parametrize("where", ["dax:/dev/dax99.9", "dax:dax99.9", "cxl:region0"])
def test_regions_that_are_not_here_are_refused_by_name(where: str) -> None:
    said = rf"{where}: .*(not built yet; use|is no device, nor a file)"
    with pytest.raises(errors.UnsupportedError, match=said):
        CXLPool.create(where, layout=SMALL, capacity=CAPACITY)
    with pytest.raises(NotImplementedError):
        CXLPool.open(where)


@pytest.mark.parametrize("where", ["tape:0", "s3:bucket", "anonymous", "", "/dev/shm/", "x\0y"])
def test_places_that_are_none(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.BadArgumentError, match=r"unknown region|not a path|: write |folder"):
        CXLPool.create(where, layout=SMALL, capacity=CAPACITY)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(errors.BadArgumentError, match=r"folder .* does not exist"):
        CXLPool.create("/dev/shm/no/such/folder.pool", layout=SMALL, capacity=CAPACITY)


def test_an_anonymous_pool_cannot_be_opened_or_removed() -> None:
    for use in (CXLPool.open, CXLPool.remove):
        with pytest.raises(errors.BadArgumentError, match="anonymous pool"):
            use("anonymous:")


@pytest.mark.parametrize("capacity", ["", "many", "2G", "-1", -1, 1.5, True, None])
def test_capacities_that_are_none(capacity: object) -> None:
    with pytest.raises(errors.BadArgumentError):
        CXLPool.create("anonymous:", layout=SMALL, capacity=capacity)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [0, 1, 4096, 2 << 20])
def test_a_capacity_that_holds_no_page(path: Path, capacity: int) -> None:
    with pytest.raises(errors.GeometryError, match=r"holds no page.*Ask for \d+ MiB or more"):
        CXLPool.create(path, layout=SMALL, capacity=capacity)
    assert not path.exists()


def test_more_than_the_memory(path: Path) -> None:
    for where in ("anonymous:", path):
        with pytest.raises(errors.MemoryShortError, match="Ask for less"):
            CXLPool.create(where, layout=SMALL, capacity="900TiB")
    assert not path.exists()


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        ({"available_bytes": 2 << 20}, "3 MiB wanted, 2 MiB of memory avail"),
        (
            {"cgroup_limit_bytes": 8 << 20, "cgroup_usage_bytes": 6 << 20},
            r"cgroup may use 8 MiB.*raise the container",
        ),
    ],
)
def test_more_than_is_available_or_than_the_cgroup_may_use(
    monkeypatch: pytest.MonkeyPatch, path: Path, memory: dict[str, int], text: str
) -> None:
    real = probe()
    less = replace(real, memory=replace(real.memory, **memory))
    monkeypatch.setattr(regions, "probe", lambda: less)
    for where in ("anonymous:", path):
        with pytest.raises(errors.MemoryShortError, match=text):
            CXLPool.create(where, layout=SMALL, capacity=CAPACITY)


def test_more_than_the_file_system_has(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    real = os.statvfs("/dev/shm")
    small = os.statvfs_result((*real[:2], (1 << 20) // real.f_frsize, 0, 0, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(errors.MemoryShortError, match=r"file system has 0 B free.*--shm-size"):
        CXLPool.create(path, layout=SMALL, capacity=CAPACITY)
    assert not path.exists()


CREATE = """
import sys
from cxlkv import CXLPool, KVLayout
from cxlkv.errors import PoolExistsError
layout = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
for round in range(int(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        CXLPool.create(f"{sys.argv[1]}.{round}", layout=layout, capacity="3MiB", threads=1).close()
        print("won", flush=True)
    except PoolExistsError as error:
        assert "is a pool already, or a part of one, and stays as it is" in str(error)
        print("lost", flush=True)
"""


def test_two_processes_create_one_pool(path: Path) -> None:
    """Exactly one wins, each time; the pool is whole, and no draft of the loser stays behind."""
    rounds = 20
    with Child("-c", CREATE, path, rounds) as one, Child("-c", CREATE, path, rounds) as two:
        for number in range(rounds):
            assert one.hear() == two.hear() == "ready"
            one.tell("go")
            two.tell("go")
            assert sorted((one.hear(), two.hear())) == ["lost", "won"]
            place = Path(f"{path}.{number}")
            with CXLPool.open(place) as pool:
                assert pool.admin.check(deep=True)["clean"]
            CXLPool.remove(place)
        one.end()
        two.end()
    assert list(path.parent.glob(f"{path.name}*")) == []


def test_a_pool_is_overwritten_by_its_own_word_only(closed_file: Path) -> None:
    """Not by --force, which is for what is no pool; nor is that overwritten by --replace."""
    create = partial(CXLPool.create, closed_file, layout=SMALL, capacity=CAPACITY)
    kept = closed_file.read_bytes()
    with pytest.raises(
        errors.PoolExistsError, match=r"is a pool already.*cxlkv pool remove.*replace=True"
    ):
        create(force=True)
    shape = ["--layout", "{layers: 2, kv_heads: 2, head_dim: 8}", "--capacity", "3MiB"]
    refused = CliRunner().invoke(app, ["pool", "create", str(closed_file), *shape, "--force"])
    assert isinstance(refused.exception, errors.PoolExistsError)
    assert closed_file.read_bytes() == kept
    with CXLPool.open(closed_file) as used, pytest.raises(errors.BusyError, match="is in use"):
        create(replace=True)
    assert used.path == str(closed_file)
    with create(replace=True) as pool:
        assert pool.stats()["pages_free"] == pool.stats()["pages_total"]
        with pytest.raises(errors.BusyError, match="close it in the other processes"):
            CXLPool.remove(closed_file)
    done = CliRunner().invoke(app, ["pool", "create", str(closed_file), *shape, "--replace"])
    assert done.exit_code == 0
    closed_file.write_bytes(b"letters")
    with pytest.raises(errors.PoolExistsError, match="not overwritten unless force=True"):
        create(replace=True)
    create(force=True).close()


# ---- arrays, layers, order ----


Change = Callable[[Sequence], object]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.append(0, rows(2).astype(np.float64), rows(2)), "k has dtype float64: use"),
        (lambda s: s.append(0, rows(2).astype(np.float16), rows(2)), "k is float16, the pool sto"),
        (lambda s: s.append(0, rows(2), rows(2).astype(np.int32)), "v has dtype int32"),
        (lambda s: s.append(0, rows(2)[:, :1], rows(2)), r"k has shape \(2, 1, 8\), wanted"),
        (lambda s: s.append(0, rows(2)[:, :, :7], rows(2)), r"k has shape \(2, 2, 7\)"),
        (lambda s: s.append(0, rows(2), rows(3)), r"v has shape \(3, 2, 8\), wanted \(2, 2, 8\)"),
        (lambda s: s.append(0, rows(2)[0], rows(2)[0]), r"k has shape \(2, 8\)"),
        (lambda s: s.append(0, [[1.0]], rows(2)), "k is a list: give a numpy array"),
        (lambda s: s.append(0, None, None), "k is a NoneType"),
        (lambda s: s.append(2, rows(2), rows(2)), "layer 2: the pool has 2"),
        (lambda s: s.append(-1, rows(2), rows(2)), "layer -1"),
        (lambda s: s.append(1 << 40, rows(2), rows(2)), f"layer {1 << 40}"),
        (lambda s: s.tokens(2), "layer 2: the pool has 2"),
        (lambda s: s.fetch(9), "layer 9: the pool has 2"),
        (lambda s: s.fetch(-3), "layer -3"),
        (lambda s: s.select(0, rows(1)[:, :1], top_k=1), "1 query heads are no multiple of 2"),
        (lambda s: s.select(5, rows(1), top_k=1), "layer 5"),
        (lambda s: s.select(0, rows(11), top_k=1), "fewer than its 11 query rows"),
        (lambda s: s.select(0, rows(1), top_k=0), "0 pages: a whole number, at least 1"),
        (lambda s: s.truncate(11), "truncate to 11 tokens: the sequence has 10"),
        (lambda s: s.truncate(-1), "truncate to -1"),
        (lambda s: s.truncate(1 << 70), "truncate to"),
    ],
)
def test_wrong_arguments(pool: CXLPool, change: Change, text: str) -> None:
    sequence = grown(pool, IDS)
    with pytest.raises(errors.BadArgumentError, match=text):
        change(sequence)
    verify(sequence, IDS)


def test_wrong_starts(pool: CXLPool) -> None:
    batch = pool.batch([grown(pool, IDS), grown(pool, IDS)])
    for starts, text in (
        ([0, 2], "starts has shape"),
        ([1, 1, 2], "must begin with 0"),
        ([0, 3, 2], "must not fall"),
        ([0, 1, 3], "k has shape"),
        ([0, -1, 2], "must not fall"),
        ([0, 1, 2, 2], "starts has shape"),
        ([0.0, 1.5, 2.0], "whole numbers below"),  # not rounded
        ([0, 2**40, 2], "whole numbers below"),
        ([False, True, True], "whole numbers below"),
    ):
        with pytest.raises(errors.BadArgumentError, match=text):
            batch.append(0, rows(2), rows(2), starts)
    for sequence in batch.sequences:
        verify(sequence, IDS)


def test_layers_out_of_order(pool: CXLPool) -> None:
    sequence = pool.sequence()
    with pytest.raises(errors.OrderError, match="append layers in order, 0 first"):
        sequence.append(1, rows(2), rows(2))
    sequence.append(0, rows(2), rows(2))
    sequence.append(1, rows(1), rows(1))
    with pytest.raises(errors.OrderError):
        sequence.append(1, rows(2), rows(2))
    for use in (sequence.fork, lambda: sequence.handle):
        with pytest.raises(errors.UnevenError, match="layers have different lengths"):
            use()
    assert (sequence.tokens(0), sequence.tokens(1)) == (2, 1)


def test_batches_that_are_none(pool: CXLPool) -> None:
    sequence = grown(pool, IDS)
    with pytest.raises(errors.BadArgumentError, match="at least one sequence"):
        pool.batch([])
    with pytest.raises(errors.BadArgumentError, match="in the batch twice: fork it instead"):
        pool.batch([sequence, grown(pool, IDS), sequence])
    with (
        CXLPool.create("anonymous:", layout=SMALL, capacity=CAPACITY) as other,
        pytest.raises(errors.BadArgumentError, match="sequence 1 of the batch is of another"),
    ):
        pool.batch([sequence, other.sequence()])
    with pytest.raises(errors.BadArgumentError, match="2 budgets for 1 sequences"):
        pool.batch([sequence]).select(0, rows(1), [0, 1], [Budget(pages=1)] * 2)
    with pytest.raises(errors.BadArgumentError, match="append their keys first"):
        pool.batch([sequence, pool.sequence()]).attend(0, rows(1), [0, 0, 1])


def test_a_selection_of_another_batch_or_layout(pool: CXLPool) -> None:
    """Its starts would be read beyond their end, its pages taken for another head's."""
    sequence = grown(pool, IDS)
    picked = sequence.select(0, rows(1), top_k=2)
    pair = pool.batch([sequence, grown(pool, IDS)])
    with pytest.raises(errors.BadArgumentError, match="is of 1 sequences, the batch has 2"):
        pair.fetch(0, picked)
    single = replace(picked, pages=picked.pages[:, :1])
    with pytest.raises(errors.BadArgumentError, match=r"wanted \[.., 2, k\]"):
        sequence.fetch(0, single)
    with pytest.raises(errors.BadArgumentError, match=r"wanted \[.., 2, k\]"):
        sequence.attend(0, rows(1), single)


def test_numbers_that_are_none(pool: CXLPool) -> None:
    """NaN and infinity are stored as they are, and seen: a NaN key is selected, never hidden."""
    sequence = pool.sequence()
    k = rows(16)
    k[5, 0, 3], k[9, 0, 0], k[13, 1, 1] = np.nan, np.inf, -np.inf
    for layer in range(2):
        sequence.append(layer, k, k)
    assert np.array_equal(texts.rows(sequence, 0, 0), k, equal_nan=True)
    picked = sequence.select(0, np.ones((2, 8), np.float32), Budget(pages=1, sinks=0, recent=0))
    assert picked.pages[0, 0] == 1
    out, _ = sequence.attend(0, np.ones((2, 8), np.float32))
    assert np.isnan(np.asarray(out)[0]).any()
    assert pool.admin.check(deep=True)["clean"]


# ---- after the end ----


def test_use_after_release(pool: CXLPool) -> None:
    sequence, kept = grown(pool, IDS), grown(pool, OTHER_IDS)
    batch = pool.batch([sequence, kept])
    sequence.release()
    sequence.release()
    for use in (
        lambda: len(sequence),
        lambda: sequence.append(0, rows(1), rows(1)),
        lambda: sequence.fetch(0),
        lambda: sequence.select(0, rows(1), top_k=1),
        lambda: sequence.attend(0, rows(1)),
        lambda: sequence.fork(),
        lambda: sequence.truncate(0),
        lambda: sequence.handle,
        lambda: sequence.pages,
        lambda: pool.publish_prefix(sequence, list(range(8))),
        lambda: batch.fetch(0),
        lambda: batch.append(0, rows(2), rows(2), [0, 1, 2]),
    ):
        with pytest.raises(errors.ReleasedError, match=r"was released: begin or adopt another"):
            use()
    verify(kept, OTHER_IDS)


def test_use_after_close(path: Path) -> None:
    pool = CXLPool.create(path, layout=SMALL, capacity=CAPACITY)
    sequence = grown(pool, IDS)
    batch, handle = pool.batch([sequence]), sequence.handle
    pool.publish_prefix(sequence, list(range(8)))
    hit = pool.match_prefix(list(range(8)))
    pool.close()
    pool.close()
    for use in (
        pool.sequence,
        pool.stats,
        pool.admin.check,
        lambda: pool.pages.alloc(1),
        pool.hotness.counts,
        pool.hotness.advance,
        pool.hotness.published,
        lambda: pool.set_threads(2),
        lambda: pool.adopt(handle),
        lambda: pool.match_prefix([1] * 8),
        lambda: pool.forget([b"x"]),
        lambda: pool.publish(sequence, [b"x"], 4),
        lambda: len(sequence),
        lambda: sequence.fetch(0),
        lambda: sequence.attend(0, rows(1)),
        lambda: sequence.select(0, rows(1), top_k=1),
        lambda: sequence.truncate(0),
        lambda: sequence.append(0, rows(1), rows(1)),
        lambda: sequence.fork(),
        lambda: batch.append(0, rows(1), rows(1), [0, 1]),
        lambda: hit.sequence(),
    ):
        with pytest.raises(errors.ClosedError, match="the pool is closed: open it again"):
            use()
    sequence.release()
    hit.release()
    with CXLPool.open(path) as again:
        assert again.stats()["pages_published_only"] == 2


# ---- handles ----


def test_stale_handles(pool: CXLPool) -> None:
    sequence = grown(pool, IDS)
    handle = sequence.handle
    sequence.release()
    with pytest.raises(errors.StaleError, match=r"was freed .*must keep its sequence or hit"):
        pool.adopt(handle)
    grown(pool, OTHER_IDS)  # the same pages, of another generation
    with pytest.raises(LookupError):
        pool.adopt(handle)
    assert pool.stats()["stale_handles"] == 2


def test_a_handle_of_a_tail_that_was_truncated_since(pool: CXLPool) -> None:
    """The tail came to the same length again, with other tokens: never the old ones."""
    sequence = grown(pool, IDS)
    old = sequence.handle
    sequence.truncate(9)
    append(sequence, [77])
    verify(pool.adopt(sequence.handle), [*IDS[:9], 77])
    with pytest.raises(errors.StaleError):
        pool.adopt(old)


def test_garbage_handles(pool: CXLPool) -> None:
    sequence = grown(pool, IDS)
    good = sequence.handle
    free = pool.stats()["pages_free"]
    garbage = [b"", b"x", bytes(44), os.urandom(80), good[:-1], good + b"\0"]
    for at in range(len(good)):
        garbage.append(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
    for handle in garbage:
        with pytest.raises(errors.StaleError, match="no handle"):
            pool.adopt(handle)
    newer = good[:4] + struct.pack("<I", 3) + good[8:-4]
    with pytest.raises(errors.StaleError, match=r"version 3, this build reads 2: .*same release"):
        pool.adopt(newer + struct.pack("<I", _core.crc32c(newer)))
    assert pool.stats()["pages_free"] == free
    verify(pool.adopt(good), IDS)
    for thing in ("text", None, 7):
        with pytest.raises(errors.BadArgumentError, match="a handle is bytes"):
            pool.adopt(thing)  # type: ignore[arg-type]


def test_forged_handles(pool: CXLPool) -> None:
    """Right magic, identity and CRC; the pages and lengths are lies."""
    sequence = grown(pool, IDS)
    good = bytearray(sequence.handle[:-4])
    count = struct.unpack_from("<I", good, 32)[0]
    assert count == 3
    page = 40 + 8 * count

    def sealed(change: Callable[[bytearray], None]) -> bytes:
        forged = bytearray(good)
        change(forged)
        return bytes(forged) + struct.pack("<I", _core.crc32c(bytes(forged)))

    free = pool.stats()["pages_free"]
    for offset, format, value in (
        (page, "<I", 0xFFFFFFFF),  # a page that is not there
        (page, "<I", pool.stats()["pages_total"] - 1),  # one that is free
        (40, "<Q", 99),  # another generation
        (24, "<Q", 11),  # more tokens than the last page has
        (24, "<Q", 1 << 63),
        (24, "<Q", 0),
        (36, "<I", 8),  # another page size
    ):
        handle = sealed(lambda h: struct.pack_into(format, h, offset, value))  # noqa: B023
        with pytest.raises(errors.StaleError):
            pool.adopt(handle)
    assert pool.stats()["pages_free"] == free
    verify(sequence, IDS)


def test_a_lease_that_has_ended(pool: CXLPool) -> None:
    pool.publish_prefix(grown(pool, IDS), list(range(8)))
    hit = pool.match_prefix(list(range(8)), lease_s=1e-9)
    with pytest.raises(errors.StaleError, match="lease of this hit has ended: match again"):
        hit.sequence()
    for lease in (0, -1, float("nan"), float("inf"), 1e10):
        with pytest.raises(errors.BadArgumentError, match="lease"):
            pool.match_prefix(list(range(8)), lease_s=lease)


def test_keys_that_are_none(pool: CXLPool) -> None:
    sequence = grown(pool, IDS)
    with pytest.raises(errors.BadArgumentError, match="a key is bytes, not str"):
        pool.publish(sequence, ["a"], 4)  # type: ignore[list-item]
    with pytest.raises(errors.BadArgumentError, match="3 keys of 4 tokens, the sequence has 10"):
        pool.publish(sequence, [b"a", b"b", b"c"], 4)
    for tokens in (0, -1):
        with pytest.raises(errors.BadArgumentError, match=f"{tokens} tokens a key"):
            pool.publish(sequence, [b"a"], tokens)
    assert pool.match([]).tokens == 0
    assert pool.publish(sequence, [], 4) == 0


# ---- full ----


def test_a_full_pool(pool: CXLPool) -> None:
    """Nothing is half written, the others go on, and what is let go can be used again."""
    kept, growing = grown(pool, IDS), grown(pool, OTHER_IDS)
    total = pool.stats()["pages_total"]
    rest = pool.pages.alloc(pool.stats()["pages_free"] - 1)
    text = r"pool is full: .*1 of \d+ free.*Release or truncate.*Nothing was written"
    for use in (
        lambda: growing.append(0, rows(9), rows(9)),
        lambda: pool.batch([growing, kept]).append(0, rows(4), rows(4), [0, 2, 4]),
        lambda: pool.pages.alloc(2),
        lambda: pool.pages.alloc(total + 1),
        lambda: pool.pages.alloc(1 << 50),
    ):
        with pytest.raises(errors.PoolFullError, match=text):
            use()
        assert pool.stats()["pages_free"] == 1
        verify(growing, OTHER_IDS)
        verify(kept, IDS)
    _ = growing.handle  # takes the last page for the tail's copy
    with pytest.raises(MemoryError):
        _ = kept.handle
    append(kept, [60])  # the tail has room without a page
    kept.truncate(10)
    pool.pages.free(rest)
    growing.append(0, rows(9), rows(9))
    verify(kept, IDS)


def test_pages_that_are_not_ours_to_free(pool: CXLPool) -> None:
    sequence = grown(pool, IDS)
    assert pool.pages.alloc(0).tolist() == []
    pages = pool.pages.alloc(3)
    free = pool.stats()["pages_free"]
    foreign = [int(pages[1]), int(sequence.pages[0])]
    for wrong in (sequence.pages, foreign, [int(pages[0])] * 2, [int(pages[0]), 1 << 31]):
        with pytest.raises(
            errors.BadArgumentError, match=r"was not taken by alloc\(\).*Nothing was changed"
        ):
            pool.pages.free(np.array(wrong, np.uint32))
    with pytest.raises(errors.BadArgumentError):
        pool.pages.alloc(-1)
    assert pool.stats()["pages_free"] == free
    pool.pages.free(pages)
    with pytest.raises(errors.BadArgumentError):
        pool.pages.free(pages)
    verify(sequence, IDS)


# ---- layouts ----


GROUP = LayerGroup(layers=2, kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([GROUP, replace(GROUP, k_encoding="int8")], "k_encoding=none and int8: all groups of a"),
        ([replace(GROUP, layers=1)] * 17, "17 groups of 17 layers: a pool stores up to 16"),
        ([replace(GROUP, kind="state")], "kind='state': a model's states are"),
    ],
)
def test_layouts_that_come_later(groups: list[LayerGroup], text: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=text):
        CXLPool.create("anonymous:", layout=KVLayout.of(groups), capacity=CAPACITY)


def test_a_layout_beyond_the_formats_limits() -> None:
    with pytest.raises(errors.BadArgumentError, match="layers is 5000: outside 1 to 1024"):
        KVLayout(layers=5000, kv_heads=2, head_dim=8)
    layout = KVLayout(layers=2, kv_heads=2, head_dim=5000)
    with pytest.raises(errors.GeometryError, match="head_dim is 5000, outside 1 to 4096"):
        CXLPool.create("anonymous:", layout=layout, capacity=CAPACITY)


T = TypeVar("T")


def other(value: object) -> T:  # type: ignore[type-var]
    """For the type checker it is what is wanted."""
    return cast("T", value)


# What is of another kind than the call wants, and what the error says that would help.
OTHER_KINDS: dict[str, tuple[Callable[[CXLPool, Sequence], object], str]] = {
    "salt as text": (lambda pool, _: pool.match_prefix([1], salt=other("a")), "salt=b'a'"),
    "empty salt as text": (lambda *_: prefix_keys([1], 4, salt=other("")), "salt is bytes"),
    "salt of objects": (lambda *_: object_keys(["k"], salt=other(None)), "salt is bytes"),
    "a number for keys": (lambda pool, _: pool.match(other(7)), "keys are a list"),
    "no names": (lambda *_: object_keys(other(None)), "keys are a list"),
    "pages for a budget": (lambda _, one: one.select(0, rows(1)[0], 64), "pages=64"),
    "text for budgets": (
        lambda pool, one: pool.batch([one]).select(0, rows(1), [0, 1], other(["few"])),
        "write it like 0.05",
    ),
    "no sequence to publish": (
        lambda pool, _: pool.publish_prefix(other(b"h"), [1]),
        "sequence is",
    ),
    "one sequence for a batch": (lambda pool, one: pool.batch(other(one)), "a list of"),
    "handles for a batch": (lambda pool, _: pool.batch(other([b"h"])), "of sequences"),
    "a mapping for a layout": (
        lambda *_: CXLPool.create("anonymous:", layout=other({}), capacity=CAPACITY),
        "a KVLayout",
    ),
    "bytes for a path": (lambda *_: CXLPool.open(other(b"/dev/shm/a")), "path as text"),
}


@pytest.mark.parametrize("what", OTHER_KINDS)
def test_another_kind_of_thing_is_named_with_what_helps(pool: CXLPool, what: str) -> None:
    """Once these ended in a TypeError or an AttributeError of the inside."""
    call, helps = OTHER_KINDS[what]
    with pytest.raises(errors.BadArgumentError, match=helps):
        call(pool, grown(pool, IDS))
