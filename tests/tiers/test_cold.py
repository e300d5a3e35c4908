"""The cold tier: what was stored is there or a miss, whoever dies, whatever happens to the file."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import stat
import subprocess
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.arrays import Bytes, Mask
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    ClosedError,
    ColdError,
    CorruptError,
    DiskFullError,
    GeometryError,
    NotAColdFileError,
    TruncatedError,
    VersionError,
)
from cxlkv.prefix import prefix_keys
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import BLOCK_BYTES, SLOT_HEADER_BYTES, RecordShape
from cxlkv.tiers.cold_store import ColdStore

from ..support.cold_storer import mixed, name, noise
from ..support.damaging import change_byte, poke
from ..support.forking import child_beside
from ..support.lengths import nightly
from ..support.processes import Child
from ..support.threads import run_all
from ..test_records import held, names_of_keys, read_all

SHAPE = RecordShape(1000, 7, "a layout")
SLOT = 4096


def capacity(slots: int) -> int:
    return BLOCK_BYTES + slots * SLOT


def names(*numbers: int) -> Bytes:
    return np.stack([name(n) for n in numbers]) if numbers else np.zeros((0, 16), np.uint8)


def record(number: int) -> Bytes:
    return noise(number, SHAPE.bytes)


def records(*numbers: int) -> Bytes:
    return np.stack([record(n) for n in numbers])


def opened(path: Path, slots: int = 8, fsync: str = "none") -> ColdTier:
    return ColdTier(path, shape=SHAPE, capacity=capacity(slots), fsync=fsync)


def store(tier: ColdTier, *numbers: int) -> list[bool]:
    return list(tier.store(names(*numbers), records(*numbers)).tolist())


def load(tier: ColdStore, *numbers: int, record: Callable[[int], Bytes] = record) -> list[bool]:
    """Which there are; their bytes are right, the others untouched or zeros."""
    out = np.full((len(numbers), tier.shape.bytes), 0xA5, np.uint8)
    found = tier.load(names(*numbers), out)
    for row, number in enumerate(numbers):
        if found[row]:
            np.testing.assert_array_equal(out[row], record(number))
        else:
            assert not out[row].any() or (out[row] == 0xA5).all()
    return list(found.tolist())


def numbers_in(tier: ColdTier) -> list[int]:
    return [int.from_bytes(row.tobytes(), "little") for row in tier.names()[0]]


def forge(path: Path, at: int, slot: bytes, offset: int, text: bytes) -> None:
    """A slot, changed at an offset of its header, with a right CRC."""
    changed = bytearray(slot)
    changed[offset : offset + len(text)] = text
    changed[60:64] = _core.crc32c(bytes(changed[:60])).to_bytes(4, "little")
    poke(path, at, changed)


def slot_at(path: Path, number: int) -> tuple[int, bytes]:
    """Where the file has a record, and the slot's bytes."""
    at = slot_of(path, number)
    return at, path.read_bytes()[at : at + SLOT]


def slot_of(path: Path, number: int) -> int:
    """Where the file has a record, by its bytes."""
    data = path.read_bytes()
    for slot in range((len(data) - BLOCK_BYTES) // SLOT):
        at = BLOCK_BYTES + slot * SLOT
        if data[at : at + 4] == b"CKVS" and data[at + 16 : at + 32] == name(number).tobytes():
            return at
    raise AssertionError(f"record {number} is not in the file")


@contextmanager
def checked(tier: ColdTier) -> Iterator[ColdTier]:
    """Closed at the end, when nothing may be wrong with it."""
    with tier:
        yield tier
        assert tier.check() == []
        stats = tier.stats()
        parts = stats["slots_free"] + stats["slots_stored"] + stats["slots_reserved"]
        assert parts == stats["slots_total"]
        assert stats["slots_reserved"] == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.cold"


@pytest.fixture
def tier(path: Path) -> Iterator[ColdTier]:
    with checked(opened(path)) as made:
        yield made


# ---- stories ----


PACKED = {"fsync": "none", "compress": "zstd"}


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        ("float16", {"fsync": "none"}),
        ("float16", {"fsync": "batch"}),
        *((dtype, PACKED) for dtype in ("bfloat16", "float16", "float32")),
    ],
)
def test_a_pools_records_survive_in_a_file(
    path: Path, dtype: str, how: dict[str, str], rng: np.random.Generator
) -> None:
    """Plain or packed, in another pool, and by another opening of the file."""
    if how is PACKED:
        pytest.importorskip("zstandard")
    layout = KVLayout(layers=2, kv_heads=2, head_dim=128, page_tokens=16, dtype=dtype)
    ids = list(range(200))

    def both() -> tuple[CXLPool, ColdTier]:
        pool = CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1)
        shape = RecordShape.of(pool)
        assert shape.element_bytes == (4 if dtype == "float32" else 2)
        return pool, ColdTier(path, shape=shape, capacity="4MiB", **how)

    pool, cold = both()
    with pool, checked(cold), held(pool, rng, len(ids)) as sequence:
        pool.publish_prefix(sequence, ids)
        keys = names_of_keys(pool, prefix_keys(ids, 16))
        taken = read_all(pool, keys)
        parents = np.concatenate([np.zeros((1, 16), np.uint8), keys[:-1]])
        assert cold.store(keys, taken, parents).all()
        assert cold.stats()["packed"] == (len(keys) if how is PACKED else 0)
        assert (cold.stats()["packed_bytes_saved"] > 0) == (how is PACKED)
    pool, cold = both()
    with pool, checked(cold):
        for got, wanted in zip(cold.names(), (keys, parents), strict=True):
            np.testing.assert_array_equal(got, wanted)
        out = np.zeros_like(taken)
        assert cold.load(keys, out).all()
        np.testing.assert_array_equal(out, taken)
        assert not pool.records.write(out).any()
        assert pool.match_prefix(ids).tokens == 192


@contextmanager
def read(tier: ColdTier, *numbers: int) -> Iterator[None]:
    """While another thread loads these records."""
    heads = [tier._index[name(number).tobytes()].slots[0] for number in numbers]
    tier._readers[heads] += 1
    yield
    tier._readers[heads] -= 1


def test_the_least_recently_used_makes_room(path: Path) -> None:
    with checked(opened(path, slots=4)) as tier:
        assert store(tier, 1, 2, 3, 4) == [True] * 4
        assert load(tier, 1) == [True]
        assert store(tier, 2, 5) == [True] * 2  # 2 is there: used, not written
        assert load(tier, 1, 2, 3, 4, 5) == [True, True, False, True, True]
        assert tier.contains(names(4, 3)).tolist() == [True, False]  # no use
        assert tier.contains(names(4, 3, 1, 2, 5), sure=True).tolist() == [True, False] + [True] * 3
        assert numbers_in(tier) == [4, 1, 2, 5]
        with read(tier, 1, 2):
            assert store(tier, 6, 7, 8) == [True, True, False]  # 4 and 5 go; 1 and 2 may not
            assert numbers_in(tier) == [1, 2, 6, 7]
            assert tier.stats()["refused"] == 1
        with read(tier, 2):
            assert store(tier, 8) == [True]
        assert numbers_in(tier) == [2, 6, 7, 8]
        assert tier.stats()["evicted"] == 4
        assert tier.stats()["stored"] == 8


def test_what_is_being_loaded_is_not_overwritten(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checked(opened(path, slots=2)) as tier:
        store(tier, 1, 2)
        begun, may_go = threading.Event(), threading.Event()
        read = tier._file.read

        def slow(*arguments: object) -> list[bool]:
            begun.set()
            assert may_go.wait(60)
            return read(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(tier._file, "read", slow)
        outcome: list[bool] = []
        loader = threading.Thread(target=lambda: outcome.extend(load(tier, 1)))
        loader.start()
        assert begun.wait(60)
        assert store(tier, 3, 4) == [True, False]  # in the place of 2; 1 is not to be had
        may_go.set()
        loader.join()
        assert outcome == [True]
        assert store(tier, 4) == [True]


def test_wrong_arguments_are_named(tier: ColdTier, path: Path) -> None:
    with pytest.raises(BadArgumentError, match="parents of shape"):
        tier.store(names(1), records(1), np.zeros((2, 16), np.uint8))
    with pytest.raises(BadArgumentError, match="without gaps"):
        tier.load(names(1, 2), np.zeros((4, 1000), np.uint8)[::2])
    fixed = np.zeros((1, 1000), np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(BadArgumentError, match="written"):
        tier.load(names(1), fixed)
    with pytest.raises(BadArgumentError, match="fsync"):
        opened(path.with_name("b"), fsync="always")
    with pytest.raises(GeometryError, match="0 slots"):
        ColdTier(path.with_name("b"), shape=SHAPE, capacity=4096)
    assert not path.with_name("b").exists()


def test_a_closed_tier_says_so(path: Path) -> None:
    tier = opened(path)
    tier.close()
    tier.close()
    for call in (tier.stats, tier.names, tier.check, lambda: tier.contains(names(1))):
        with pytest.raises(ClosedError, match=str(path)):
            call()


# ---- the file ----


def test_the_bytes_of_the_file(path: Path) -> None:
    """docs/explanation/cold-tier.md has them."""
    with opened(path, slots=3) as tier:
        tier.store(names(5), records(5), names(4))
    data = path.read_bytes()
    assert len(data) == 4096 + 3 * 4096
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    head = np.frombuffer(data[:48], np.uint8)
    assert data[:8] == b"CXLKVCLD"
    assert head[8:16].view(np.uint32).tolist() == [1, 2]
    assert head[16:40].view(np.uint64).tolist() == [1000, 4096, 3]
    assert head[40:44].view(np.uint32).tolist() == [7]
    assert data[48:57] == b"a layout\0"
    assert int.from_bytes(data[508:512], "little") == _core.crc32c(data[:508])
    assert not any(data[512:4096])
    slot = data[4096:8192]
    assert slot[:4] == b"CKVS"
    numbers = np.frombuffer(slot, np.uint8)
    assert numbers[4:8].view(np.uint32)[0] == 0
    assert numbers[8:16].view(np.uint64)[0] == 1
    assert slot[16:32] == name(5).tobytes()
    assert slot[32:48] == name(4).tobytes()
    assert numbers[48:56].view(np.uint64)[0] == 1000
    assert numbers[56:60].view(np.uint32)[0] == _core.crc32c(slot[64:1064])
    assert numbers[60:64].view(np.uint32)[0] == _core.crc32c(slot[:60])
    assert slot[64:1064] == record(5).tobytes()
    assert not any(slot[1064:])
    assert not any(data[8192:])


@pytest.mark.parametrize("text", [b"x", b"something else" * 1000, b"CXLKVCLD", b"\0" * 10000])
def test_another_file_is_left_alone(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    with pytest.raises(NotAColdFileError, match="give another path"):
        opened(path)
    assert path.read_bytes() == text


def test_folders_and_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAColdFileError, match="folder"):
        opened(tmp_path)
    with pytest.raises(NotAColdFileError, match="no plain file"):
        opened(Path("/dev/null"))
    with pytest.raises(ColdError, match="folder is missing"):
        opened(tmp_path / "missing" / "a.cold")


def rewrite(path: Path, offset: int, text: bytes) -> None:
    """Bytes of the header, with a right CRC."""
    poke(path, offset, text)
    poke(path, 508, _core.crc32c(path.read_bytes()[:508]).to_bytes(4, "little"))


def test_files_that_do_not_fit_are_named(path: Path) -> None:
    opened(path).close()
    wanted = capacity(8)
    with pytest.raises(GeometryError, match=r"another pool layout: .*a layout.*other"):
        ColdTier(path, shape=RecordShape(1000, 8, "other"), capacity=wanted)
    with pytest.raises(GeometryError, match="another pool layout"):
        ColdTier(path, shape=RecordShape(1001, 7), capacity=wanted)
    with pytest.raises(GeometryError, match="8 slots of 4096 bytes, asked for were 9"):
        opened(path, slots=9)
    change_byte(path, 33)
    with pytest.raises(CorruptError, match="Remove the file"):
        opened(path)
    change_byte(path, 33)
    rewrite(path, 8, b"\x03")
    with pytest.raises(VersionError, match="format version 3, this build reads 1 and 2"):
        opened(path)
    rewrite(path, 8, b"\x01")
    os.truncate(path, capacity(8) - 1)
    with pytest.raises(TruncatedError, match=f"{capacity(8) - 1} bytes of {capacity(8)}"):
        opened(path)


def test_a_creation_that_was_killed_is_done_again(path: Path) -> None:
    path.touch()
    with checked(opened(path)) as tier:
        store(tier, 1)
    rewrite(path, 12, b"\x01")
    os.truncate(path, 6000)
    with checked(opened(path, slots=5)) as tier:  # whatever it was to be
        assert numbers_in(tier) == []
        assert store(tier, 2) == [True]
    with checked(opened(path, slots=5)) as tier:
        assert load(tier, 2) == [True]


def test_every_flipped_bit_of_a_slot_is_a_miss(path: Path, seed: int) -> None:
    """Each bit of the header, some of the record; found at an opening, and by an open tier."""
    rng = random.Random(seed)
    bits = [*range(SLOT_HEADER_BYTES * 8)]
    bits += [SLOT_HEADER_BYTES * 8 + rng.randrange(SHAPE.bytes * 8) for _ in range(100)]
    with opened(path, slots=2) as tier:
        store(tier, 1, 2)
        at = slot_of(path, 1)
        for bit in bits:
            change_byte(path, at + bit // 8, bit % 8)
            before = tier.stats()["corrupt"]
            assert load(tier, 1, 2) == [False, True]
            assert tier.stats()["corrupt"] == before + 1
            assert tier.stats()["slots_free"] == 1
            assert store(tier, 1) == [True]
            assert slot_of(path, 1) == at
            assert load(tier, 1) == [True]
    for bit in bits[:: 1 + len(bits) // 60]:
        change_byte(path, at + bit // 8, bit % 8)
        with checked(opened(path, slots=2)) as tier:
            assert load(tier, 1, 2) == [False, True]
            assert store(tier, 1) == [True]


def test_a_deep_check_finds_what_was_changed(path: Path) -> None:
    with opened(path) as tier:
        store(tier, 1, 2, 3)
        change_byte(path, slot_of(path, 2) + 900)
        assert tier.check() == []
        (problem,) = tier.check(deep=True)
        assert name(2).tobytes().hex() in problem
        assert tier.check(deep=True) == []
        assert numbers_in(tier) == [1, 3]


def test_a_sequence_number_that_nobody_reaches_is_no_record(path: Path) -> None:
    """Its CRC is right: the next record's number must not be one more."""
    with opened(path) as tier:
        store(tier, 1, 2)
    forge(path, *slot_at(path, 1), 8, b"\xff" * 8)
    with checked(opened(path)) as tier:
        assert store(tier, 3) == [True]
        assert load(tier, 1, 2, 3) == [False, True, True]


def test_of_two_slots_with_one_name_the_newer_counts(path: Path) -> None:
    with opened(path) as tier:
        store(tier, 1)
        _, old = slot_at(path, 1)
        tier.drop(names(1))
        store(tier, 2, 3)
        tier.drop(names(2))
        assert slot_of(path, 3) == BLOCK_BYTES + SLOT
        tier.store(names(1), records(9))
        assert slot_of(path, 1) == BLOCK_BYTES
    forge(path, BLOCK_BYTES + 5 * SLOT, old, 4, b"\5")  # as if it had lain in slot 5
    out = np.zeros((1, SHAPE.bytes), np.uint8)
    for _ in range(2):
        with checked(opened(path)) as tier:
            assert tier.load(names(1), out).all()
            np.testing.assert_array_equal(out[0], record(9))
            assert tier.stats()["slots_stored"] == 2
    with opened(path) as tier:
        tier.drop(names(1))
    with opened(path) as tier:  # the older one does not come back
        assert numbers_in(tier) == [3]


def test_a_slot_that_lies_elsewhere_is_free(path: Path) -> None:
    with opened(path) as tier:
        store(tier, 1)
    poke(path, BLOCK_BYTES + SLOT, slot_at(path, 1)[1])
    with checked(opened(path)) as tier:
        assert tier.stats()["slots_stored"] == 1
        assert load(tier, 1) == [True]


def test_another_record_in_a_slot_is_a_miss(path: Path) -> None:
    """Whole, and as if it belonged there: but it is not the one that was asked for."""
    with checked(opened(path)) as tier:
        store(tier, 1, 2)
        forge(path, BLOCK_BYTES, slot_at(path, 2)[1], 4, b"\0")
        assert load(tier, 1, 2) == [False, True]


def test_a_file_that_is_cut_while_open(path: Path) -> None:
    with checked(opened(path)) as tier:
        assert store(tier, *range(8)) == [True] * 8
        os.truncate(path, BLOCK_BYTES + 3 * SLOT + 100)
        assert load(tier, *range(8)) == [True] * 3 + [False] * 5
        assert store(tier, *range(8)) == [True] * 8  # the file grows again
        assert load(tier, *range(8)) == [True] * 8
        os.truncate(path, 0)
        assert load(tier, *range(8)) == [False] * 8
        assert tier.stats()["slots_free"] == 8


def test_a_file_that_is_removed_while_open(path: Path) -> None:
    with opened(path) as tier:
        store(tier, 1)
        path.unlink()
        assert load(tier, 1) == [True]
        assert store(tier, 2) == [True]
        assert any("was removed" in problem for problem in tier.check())
        with checked(opened(path)) as other:  # another file
            assert load(other, 1) == [False]
        assert load(tier, 1, 2) == [True, True]


# ---- one process at a time ----

HOLDER = """
import sys
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import RecordShape
with ColdTier(sys.argv[1], shape=RecordShape(1000, 7), capacity=int(sys.argv[2])):
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_a_second_process_is_told_who_has_the_file(path: Path) -> None:
    with Child("-c", HOLDER, path, capacity(8)) as holder:
        assert holder.hear() == "open"
        with pytest.raises(BusyError, match=f"in use by process {holder.pid}"):
            opened(path)
        holder.end()
    opened(path).close()


def test_in_the_same_process_too(tier: ColdTier, path: Path) -> None:
    with pytest.raises(BusyError, match=f"process {os.getpid()}"):
        opened(path)
    assert store(tier, 1) == [True]


def test_a_forked_child_finds_it_closed(path: Path) -> None:
    """And does not keep the file locked when the parent is done with it."""
    tier = opened(path)
    descriptor = tier._file.fd

    def child() -> None:
        with pytest.raises(ClosedError):
            tier.stats()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

    with child_beside(child):
        assert store(tier, 1) == [True]
        tier.close()
        opened(path).close()


# ---- disks that are full, or fail ----


def failing(number: int) -> object:
    """In place of a call of the operating system."""

    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Files of this process may be no longer: what a full disk looks like, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_the_file(path: Path) -> None:
    with file_limit(capacity(4)), pytest.raises(DiskFullError, match=r"36 KiB wanted.*ulimit -f"):
        opened(path)
    assert not path.exists()


@pytest.mark.parametrize("fsync", ["none", "batch"])
def test_a_disk_that_gets_full_ends_writing_only(
    path: Path, fsync: str, caplog: pytest.LogCaptureFixture
) -> None:
    with checked(opened(path, fsync=fsync)) as tier:
        assert store(tier, 0, 1, 2) == [True] * 3
        os.truncate(path, BLOCK_BYTES + 4 * SLOT)
        with file_limit(BLOCK_BYTES + 4 * SLOT), caplog.at_level(logging.WARNING, "cxlkv"):
            outcome = store(tier, 3, 4, 5)
            assert not any(outcome[1:])
            assert store(tier, 6) == [False]
        assert [line.message.count("ulimit -f") for line in caplog.records] == [1]
        assert "ulimit -f" in tier.why_off
        assert tier.stats()["writes_off"] == 1
        assert store(tier, 7, 0) == [False, True]
        assert load(tier, 0, 1, 2, 4, 5, 6, 7) == [True] * 3 + [False] * 4
        assert tier.drop(names(0)).all()
    os.truncate(path, capacity(8))  # the cut file is given its length back
    with checked(opened(path)) as tier:
        assert load(tier, 0, 1, 2) == [False, True, True]
        assert store(tier, 6) == [True]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_at_the_sync(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known to be on the disk is not stored."""

    with checked(opened(path, fsync="batch")) as tier:
        store(tier, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing(number))
            assert store(tier, 2, 3) == [False, False]
        assert os.strerror(number) in tier.why_off
        assert load(tier, 1, 2) == [True, False]


def test_what_cannot_be_erased_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next opening would find what was dropped for good."""

    with checked(opened(path)) as tier:
        store(tier, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing(errno.EIO))
            assert tier.drop(names(1)).all()
            assert load(tier, 1, 2) == [False, True]
            assert any("1 slots" in line and path.name in line for line in tier.check())
        assert tier.stats()["erase_failures"] >= 2
        assert store(tier, 3) == [False]
    with checked(opened(path)) as tier:
        assert load(tier, 1, 2) == [False, True]


def test_a_true_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        pytest.skip(f"mount cannot be run: {error}")
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        path = folder / "a.cold"
        with pytest.raises(DiskFullError, match="64 KiB free"):
            opened(path, slots=20)
        assert list(folder.iterdir()) == []
        with checked(opened(path, slots=8)) as tier:
            assert store(tier, 0, 1) == [True] * 2
            os.truncate(path, BLOCK_BYTES + 2 * SLOT)
            with pytest.raises(OSError, match="No space"):
                (folder / "ballast").write_bytes(bytes(1 << 20))
            assert store(tier, 2, 3) == [False, False]
            assert "full" in tier.why_off
            assert load(tier, 0, 1) == [True] * 2
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=60)


def test_a_file_that_this_user_may_not_write(path: Path) -> None:
    opened(path).close()
    path.chmod(0o400)
    if os.access(path, os.W_OK):
        pytest.skip("this user may write whatever the mode says (root)")
    with pytest.raises(ColdError, match="change owner or mode"):
        opened(path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_permission_that_is_refused_names_the_remedy(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", failing(number))
    with pytest.raises(ColdError, match="choose another path"):
        opened(path)


# ---- killed ----


@dataclass
class Storing:
    """How a process stores: `stays` of its records are there, whatever a batch makes room for."""

    compress: str
    record: Callable[[int, int], Bytes]
    size: int
    slots: int
    batch: int
    stays: int


AS_THEY_ARE = Storing("", noise, 50000, slots=24 * 13, batch=5, stays=19)  # of 13 slots each
IN_PARTS = Storing("zstd", mixed, 20000, slots=60, batch=6, stays=6)  # a batch takes 24


@pytest.mark.parametrize(
    ("fsync", "rounds"),
    [("none", 4), ("batch", 4), nightly("none", 100), nightly("batch", 100)],
)
@pytest.mark.parametrize("how", [AS_THEY_ARE, IN_PARTS], ids=["as they are", "packed"])
def test_a_process_killed_while_it_stores(
    path: Path, how: Storing, fsync: str, rounds: int, seed: int
) -> None:
    """What store() had returned is there, but for what the batch in flight makes room for."""
    if how.compress:
        pytest.importorskip("zstandard")
    rng = random.Random(seed)
    shape = RecordShape(how.size, 7, "", element_bytes=2 if how.compress else 1)
    space = BLOCK_BYTES + how.slots * SLOT
    there: list[int] = []  # by when they were stored
    torn = first = 0
    for _ in range(rounds):
        words = [path, fsync, how.compress, how.size, space, first, how.batch]
        with Child("-m", "tests.support.cold_storer", *words) as storer:
            lines = [storer.hear() + "\n" for _ in range(1 + 2 * rng.randrange(8))]
            for _ in range(rng.randrange(40000)):  # somewhere in the store that has begun
                pass
            storer.popen.kill()
            lines += storer.pipes[1].readlines()
        told = [line.split() for line in lines if line.endswith("\n")]
        begun = [int(number) for word, number in told if word == "begin"]
        done = [int(number) for word, number in told if word == "done"]
        there += [number for start in done for number in range(start, start + how.batch)]
        first = begun[-1] + how.batch
        with ColdTier(
            path, shape=shape, capacity=space, fsync=fsync, compress=how.compress or None
        ) as tier:
            asked = list(range(max(0, first - 200), first))
            out = np.zeros((len(asked), how.size), np.uint8)
            found = tier.load(names(*asked), out)
            torn += tier.stats()["corrupt"]
            for row, number in enumerate(asked):
                if found[row]:
                    np.testing.assert_array_equal(out[row], how.record(number, how.size))
                else:
                    gone = number in there[-how.stays :]
                    assert not gone, f"{number} was stored and is gone"
            assert tier.check(deep=True) == []
        there = [number for row, number in enumerate(asked) if found[row]]
    print(f"{torn} torn records in {rounds} rounds, seed {seed}")


# ---- threads ----


def test_threads_share_a_tier(path: Path, seed: int) -> None:
    """Each stores, loads and drops the same names: what is loaded is always right."""
    with checked(opened(path, slots=6)) as tier:

        def work(own_seed: int) -> None:
            rng = random.Random(own_seed)
            for _ in range(150):
                some = [rng.randrange(12) for _ in range(rng.randrange(1, 5))]
                (store, load, lambda t, *n: t.drop(names(*n)))[rng.randrange(3)](tier, *some)

        run_all(partial(work, seed + i) for i in range(4))
        assert tier.stats()["corrupt"] == 0
        assert tier.check(deep=True) == []


# ---- a model ----


@dataclass
class Kept:
    """A record, as the model knows it."""

    content: int
    right: bool = True
    looked_at: bool = True
    stored: int = 0


NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=6)


class ColdModel(RuleBasedStateMachine):
    """A tier of 5 slots beside a dictionary in the order of use."""

    slots = 5
    record_bytes = SHAPE.bytes
    open = staticmethod(opened)
    record = staticmethod(record)

    def cost(self, number: int) -> int:
        """Slots that the record takes."""
        return 1

    def free(self) -> int:
        return self.slots - sum(map(self.cost, self.model))

    @initialize(fsync=st.sampled_from(["none", "batch"]))
    def begin(self, fsync: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path, self.fsync = Path(self.folder.name) / "a.cold", fsync
        self.model: OrderedDict[int, Kept] = OrderedDict()
        self.clock = 0
        self.tier = self.open(self.path, self.slots, self.fsync)

    def look(self, numbers: list[int]) -> None:
        for number in numbers:
            kept = self.model.get(number)
            if kept and kept.right:
                kept.looked_at = True
            elif kept:
                del self.model[number]

    @rule(numbers=NUMBERS)
    def store(self, numbers: list[int]) -> None:
        doubtful = [n for n in numbers if n in self.model and not self.model[n].looked_at]
        self.look(doubtful)
        new = [n for n in dict.fromkeys(numbers) if n not in self.model]
        for number in numbers:
            if number in self.model:
                self.model.move_to_end(number)
        needed = sum(map(self.cost, new))
        for number in [n for n in self.model if n not in numbers]:
            if needed > self.free():
                del self.model[number]
        for number in new:
            if self.cost(number) > self.free():
                break
            self.clock += 1
            self.model[number] = Kept(number, stored=self.clock)
        got = self.tier.store(names(*numbers), np.stack([self.record(n) for n in numbers]))
        assert got.tolist() == [n in self.model for n in numbers]

    @rule(numbers=NUMBERS)
    def load(self, numbers: list[int]) -> None:
        wanted = [n in self.model and self.model[n].right for n in numbers]
        for number in numbers:
            if number in self.model:
                self.model.move_to_end(number)
        self.look(numbers)
        out = np.full((len(numbers), self.record_bytes), 0xA5, np.uint8)
        assert self.tier.load(names(*numbers), out).tolist() == wanted
        for row, number in zip(out, numbers, strict=True):
            if number in self.model:
                np.testing.assert_array_equal(row, self.record(number))
            else:
                assert not row.any() or (row == 0xA5).all()

    @rule(numbers=NUMBERS)
    def drop(self, numbers: list[int]) -> None:
        got = self.tier.drop(names(*numbers))
        assert got.tolist() == [n in self.model for n in numbers]
        for number in numbers:
            self.model.pop(number, None)

    @rule(number=st.integers(0, 11), where=st.floats(0, 1, exclude_max=True))
    def damage(self, number: int, where: float) -> None:
        if number in self.model and self.model[number].right:
            place = self.tier._index[name(number).tobytes()]
            slot, at = divmod(int(where * place.size), self.tier._file.payload_bytes)
            offset = BLOCK_BYTES + place.slots[slot] * SLOT
            change_byte(self.path, offset + SLOT_HEADER_BYTES + at)
            self.model[number].right = False

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.open(self.path, self.slots, self.fsync)
        self.model = OrderedDict(sorted(self.model.items(), key=lambda item: item[1].stored))
        for kept in self.model.values():
            kept.looked_at = False

    @invariant()
    def the_same(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert numbers_in(self.tier) == list(self.model)
        everything: Mask = self.tier.contains(names(*range(12)))
        assert everything.tolist() == [n in self.model for n in range(12)]
        stats = self.tier.stats()
        assert stats["records"] == len(self.model)
        assert stats["slots_free"] == self.free() == self.slots - stats["slots_stored"]
        assert self.tier.check() == []

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            self.folder.cleanup()


TestColdModel = ColdModel.TestCase
TestColdModel.settings = settings(max_examples=60, stateful_step_count=25)
