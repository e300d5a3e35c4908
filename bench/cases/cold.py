"""Whole records out of and into the pool beside memcpy; the cold tier beside a plain file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cxlkv import _core
from cxlkv.arrays import Bytes
from cxlkv.bench.measure import interleave_reported, seconds_of
from cxlkv.bench.pools import Shape, pool_in_file, publish, read_records
from cxlkv.bench.result import Result
from cxlkv.pool import CXLPool
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import RecordShape


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """8 layers, 8 kv heads, 128 channels, bf16: records of 0.6 MB, 64 of them a call."""

    call_records: int = 64
    calls: int = 8
    rounds: int = 7


def run(result: Result, size: Size = Size(), threads: int = 1) -> None:
    """Metrics records_* and memcpy_* in GB/s, cold_* and file_* in MB/s; the cold file and the
    plain one lie in the folder for temporary files."""
    count = size.call_records * size.calls
    capacity = int(size.layout.token_bytes * size.page_tokens * count * 1.3) + (64 << 20)
    with pool_in_file(size.layout, capacity, threads=threads) as (pool, path):
        names = publish_all(pool, size)
        records = read_records(pool, names)
        measure_records(result, pool, path.with_name("plain"), names, records, size)
        shape = RecordShape.of(pool)
    with tempfile.TemporaryDirectory() as cold:
        measure_cold(result, Path(cold), shape, names, records, size)


def publish_all(pool: CXLPool, size: Size) -> Bytes:
    """Fills pages with noise, publishes them, and returns their names."""
    noise = size.noise(1, size.call_records * size.calls * size.page_tokens)
    sequence = pool.sequence()
    for layer in range(size.layers):
        sequence.append(layer, noise, noise)
    return publish(pool, sequence)


def timed(
    function: Callable[[slice[int, int, None]], object], turns: list[slice[int, int, None]]
) -> Callable[[], float]:
    """Seconds of `function` over all calls' parts, one after the other."""

    return lambda: seconds_of(lambda: [function(turn) for turn in turns])


def turns_of(size: Size) -> list[slice[int, int, None]]:
    step = size.call_records
    return [slice(first, first + step) for first in range(0, step * size.calls, step)]


def measure_records(
    result: Result, pool: CXLPool, plain: Path, names: Bytes, records: Bytes, size: Size
) -> None:
    """memcpy is of as many bytes, between the same kinds of memory."""
    handle, turns = pool._handle, turns_of(size)
    far: Bytes = np.memmap(plain, np.uint8, "w+", shape=records.shape)
    far[:] = records
    near = np.zeros_like(records[turns[0]])
    pages, generations = _core.find_pages(handle, names)

    def forget() -> None:
        found = _core.find_pages(handle, names)
        if _core.forget_pages(handle, *found, True).any():
            raise RuntimeError("pages that nobody holds were not forgotten")

    def read(turn: slice[int, int, None]) -> None:
        _core.records_read(handle, pages[turn], generations[turn], near)

    def write() -> float:
        nonlocal pages, generations
        forget()
        seconds = timed(lambda turn: _core.records_write(handle, records[turn]), turns)()
        pages, generations = _core.find_pages(handle, names)
        return seconds

    functions = {
        "memcpy_read": timed(lambda turn: np.copyto(near, far[turn]), turns),
        "records_read": timed(read, turns),
        "memcpy_write": timed(lambda turn: np.copyto(far[turn], records[turn]), turns),
        "records_write": write,
        "crc": timed(lambda turn: _core.crc32c(records[turn].reshape(-1)), turns),
    }
    samples = interleave_reported(functions, size.rounds)
    speed = result.speeds(samples, records.nbytes)
    result.checks["records_come_back_the_same"] = np.array_equal(read_records(pool, names), records)
    result.ratios["read_to_memcpy"] = speed["records_read"] / speed["memcpy_read"]
    result.ratios["write_to_memcpy"] = speed["records_write"] / speed["memcpy_write"]
    result.ratios["read_time_in_crc"] = speed["records_read"] / speed["crc"]
    result.ratios["write_time_in_crc"] = speed["records_write"] / speed["crc"]


def measure_cold(
    result: Result, folder: Path, shape: RecordShape, names: Bytes, records: Bytes, size: Size
) -> None:
    """A plain file is written by one call and synced, and read by one call, as many records each;
    what is read was dropped from the page cache before."""
    turns = turns_of(size)
    out = np.zeros_like(records[turns[0]])
    capacity = (len(records) + 1) * (shape.bytes + 8192)
    file = os.open(folder / "plain", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(file, 0, records.nbytes)
    with ColdTier(folder / "a.cold", shape=shape, capacity=capacity) as tier:

        def file_write(turn: slice[int, int, None]) -> None:
            os.pwrite(file, records[turn].reshape(-1).data, turn.start * shape.bytes)
            os.fdatasync(file)

        def cold(function: Callable[[slice[int, int, None]], object]) -> Callable[[], float]:
            def after_forgetting() -> float:
                for descriptor in (file, tier._file.fd):
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                return timed(function, turns)()

            return after_forgetting

        def cold_store() -> float:
            tier.drop(names)
            return timed(lambda turn: tier.store(names[turn], records[turn]), turns)()

        functions = {
            "file_write": timed(file_write, turns),
            "cold_store": cold_store,
            "file_read": cold(
                lambda turn: os.preadv(file, [out.reshape(-1).data], turn.start * shape.bytes)
            ),
            "cold_load": cold(lambda turn: tier.load(names[turn], out)),
        }
        samples = interleave_reported(functions, size.rounds)
        speed = result.speeds(samples, records.nbytes, unit="MB/s")
        found = tier.load(names[turns[-1]], out)
        result.checks["the_cold_tier_gives_back_the_same"] = bool(
            found.all() and np.array_equal(out, records[turns[-1]])
        )
    os.close(file)
    result.ratios["cold_store_to_file"] = speed["cold_store"] / speed["file_write"]
    result.ratios["cold_load_to_file"] = speed["cold_load"] / speed["file_read"]
    result.notes.append(
        f"cold: {records.nbytes >> 20} MiB in records of {shape.bytes} bytes, "
        f"{size.call_records} a call; files synced after each call, in {folder.parent}"
    )
