"""Loops over memory that benchmarks share: known contents, sums that must come out, nodes, CPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.bench import loops
from cxlkv.bench.loops import Stream, Streamed
from cxlkv.emulation.link import charge
from cxlkv.layout import KVLayout
from cxlkv.machine.topology import NumaNode, probe
from cxlkv.pool import CXLPool

LINE_BYTES = 64
# What a stream's memory is a multiple of, so that thirds and halves are whole pages.
UNIT_BYTES = 6 * 4096
PACED_BYTES = 4096  # the clock is looked at after each block
WORDS_MODULO = 1 << 64
BORDER_BYTES = 2 << 20  # memories of a place begin on these, as huge pages do
# Of the pool that stands for a place: pages of 32 KiB, which leave little to its tables.
PLACE_LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=128, page_tokens=64)


@dataclass(frozen=True)
class Places:
    """Where memory can lie and where threads can run, nodes by number."""

    memory: tuple[NumaNode, ...]
    cpus: dict[int, tuple[int, ...]]  # of nodes that have some which this process may use

    @property
    def several(self) -> bool:
        return len(self.memory) > 1 or len(self.cpus) > 1


@contextmanager
def memories(where: str | None, sizes: Sequence[int], notes: list[str]) -> Iterator[list[Bytes]]:
    """Memory of these sizes: of this process, or of a place as CXLPool.create() takes it.

    There a pool is made, which maps the place as any pool is mapped, lends its pages, and is gone
    when the block ends. notes: gets the place's name. Raises what create() raises; a place that
    holds something is not overwritten.
    """
    if where is None:
        with ExitStack() as stack:
            yield [stack.enter_context(loops.memory_taken(size)) for size in sizes]
        return
    needs = [-(-size // BORDER_BYTES) * BORDER_BYTES for size in sizes]
    capacity = sum(needs) * 257 // 256 + 4 * BORDER_BYTES  # the tables take 1 in 512
    with CXLPool.create(
        where, layout=PLACE_LAYOUT, capacity=capacity, checksum=False, sketch=False, threads=1
    ) as pool:
        try:
            charge(pool._handle, None)  # what is timed are loads, which no link is charged for
            pool.pages.alloc(pool.stats()["pages_free"])
            found = _cut(pool, needs, sizes)
            notes.append(_note(where, pool))
            yield found
        finally:
            pool.close()
            if pool.path is not None:
                CXLPool.remove(pool.path)


def _note(where: str, pool: CXLPool) -> str:
    """The place, as far as the kernel tells what it is."""
    described = pool.describe()
    placement = cast("dict[str, dict[str, float]]", described["placement"])
    shares = placement.get("share_by_node", {}).items()
    facts = [f"pages: {described['page_kind']}", *(f"{share:.0%} node {n}" for n, share in shares)]
    return f"memory at {where} ({', '.join(facts)})"


def _cut(pool: CXLPool, needs: Sequence[int], sizes: Sequence[int]) -> list[Bytes]:
    """One behind the other, where the pool has its pages, all of which are its caller's."""
    geometry = pool.pages.geometry
    address, _ = pool.pages.memory()
    at, found = address + geometry["extents_offset"], list[Bytes]()
    assert sum(needs) <= geometry["extent_count"] * geometry["extent_bytes"]
    for need, size in zip(needs, sizes, strict=True):
        found.append(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at)))
        found[-1][:] = 0  # now the kernel has given it its pages
        at += need
    return found


def allowed_cpus() -> list[int]:
    """Those that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def places(need_bytes: int) -> Places:
    """Nodes with so much free memory: to bind memory to a fuller one would call the killer."""
    allowed = set(allowed_cpus())
    nodes = probe().nodes
    cpus = {node.node: tuple(sorted(allowed & set(node.cpus))) for node in nodes}
    return Places(
        tuple(node for node in nodes if (node.free_bytes or 0) > 2 * need_bytes),
        {node: those for node, those in cpus.items() if those},
    )


def number(memory: Bytes) -> None:
    """Word i of it becomes i."""
    words = memory.view(np.uint64)
    words[:] = np.arange(words.size, dtype=np.uint64)


def parts(memory: Bytes, count: int) -> list[Bytes]:
    """Equal parts for `count` streams."""
    each = memory.size // count // UNIT_BYTES * UNIT_BYTES
    return [memory[i * each : (i + 1) * each] for i in range(count)]


def split(kind: str, memory: Bytes, cpus: Sequence[int], pace_ns: int = 0) -> list[Stream]:
    """One on each CPU, each over a part of its own; with a pace by blocks of PACED_BYTES."""
    pace = {"block_bytes": PACED_BYTES, "pace_ns": pace_ns} if pace_ns else {}
    cut = parts(memory, len(cpus))
    return [Stream(kind, part, cpu, **pace) for part, cpu in zip(cut, cpus, strict=True)]


def ns_a_load(chased: Streamed) -> float:
    return 1e9 * chased.seconds / chased.steps


def sum_of_words(first: int, count: int) -> int:
    """first + (first + 1) + ..., as 64-bit words add up."""
    return (count * first + count * (count - 1) // 2) % WORDS_MODULO


def sum_is_right(stream: Stream, streamed: Streamed, first: int) -> bool:
    """What a stream has read is what number() wrote, whose first word there is `first`."""
    if stream.kind == "chase":
        return streamed.sum == streamed.steps % (stream.memory.size // LINE_BYTES)
    mixed = stream.kind.startswith("mixed")
    if stream.kind != "read" and not mixed:
        return streamed.sum == 0
    span = stream.memory.size // 3 * 2 if mixed else stream.memory.size
    read = streamed.moved_bytes // 3 * 2 if mixed else streamed.moved_bytes
    passes, left = divmod(read, span)
    wanted = passes * sum_of_words(first, span // 8) + sum_of_words(first, left // 8)
    return streamed.sum == wanted % WORDS_MODULO


def contents_are_right(stream: Stream, streamed: Streamed) -> bool:
    """What a stream has written is there, as far as it came; `first_word` must be new each time."""
    words = stream.memory.view(np.uint64)
    if stream.kind.startswith("copy"):
        half = words.size // 2
        done = min(streamed.moved_bytes // 8, half)
        return np.array_equal(words[half : half + done], words[:done])
    first = words.size // 3 * 2 if stream.kind.startswith("mixed") else 0
    written = streamed.moved_bytes // 8 // (3 if first else 1)
    last = min(words.size, first + written)
    wanted = np.arange(first, last, dtype=np.uint64) + np.uint64(stream.first_word)
    return np.array_equal(words[first:last], wanted)


def speed(streamed: list[Streamed]) -> float:
    """GB/s of streams that ran at once."""
    return sum(one.moved_bytes / one.seconds for one in streamed) / 1e9


def size_name(size: int) -> str:
    """For figures: 16_kib, 8_mib."""
    return f"{size >> 20}_mib" if size >> 20 else f"{size >> 10}_kib"
