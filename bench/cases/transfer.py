"""Append and fetch against memcpy of the same bytes between the same addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Bytes, Floats, Offsets, PageIds
from cxlkv.bench import loops
from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape, pool_in_file
from cxlkv.bench.result import Result
from cxlkv.ndp.engine import Selection, same_pages
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

CALL_PAGES = 64


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """1 GiB of KV by default: 8 layers, 8 kv heads, 128 channels, 32,768 tokens of bf16."""

    rounds: int = 7


class Mapped:
    """The pool's file in a second mapping of this process: the baseline's way to the same bytes."""

    def __init__(self, pool: CXLPool, path: Path):
        self.bytes: Bytes = np.memmap(path, np.uint8, "r+")
        self.piece_bytes = pool.pages.geometry["key_piece_bytes"]
        self.heads = pool.layout.kv_heads
        self._pages = pool.pages

    def runs(self, ids: PageIds, layer: int) -> tuple[Offsets, Offsets]:
        """Where all heads' K of each of these pages begins, and V."""
        places = self._pages.places(ids, layer)
        assert places.values is not None
        return places.keys, places.values

    def pieces(self, ids: PageIds, layer: int) -> list[npt.NDArray[np.uint64]]:
        """All pieces of K and V of these pages, in the order in which fetch() writes them."""
        heads = np.arange(self.heads)[:, None] * self.piece_bytes
        return [(heads + run).ravel().astype(np.uint64) for run in self.runs(ids, layer)]


def run(result: Result, size: Size = Size(), threads: int = 1) -> None:
    """Metrics append_*, fetch_*, memcpy_* in GB/s of K and V; CRC off and on, and append without
    sketches, which are made when a page is complete."""
    result.notes.append(
        f"transfer: {size.layout.token_bytes * size.tokens >> 20} MiB of K and V, {CALL_PAGES} "
        "pages a call, prefaulted, one thread"
    )
    capacity = int(size.layout.token_bytes * size.tokens * 1.2) + (256 << 20)
    for name in ("plain", "crc", "no_sketches"):
        with pool_in_file(
            size.layout,
            capacity,
            checksum=name == "crc",
            sketch=name != "no_sketches",
            threads=threads,
        ) as (pool, path):
            measure_append(result, pool, path, size, name)
            if name != "no_sketches":
                fetches = Fetches(pool, path, size, CALL_PAGES)
                fetches.measure(result, f"fetch_{name}", f"memcpy_fetch_{name}", size.rounds)


def append_all(pool: CXLPool, size: Shape, k: Floats, v: Floats) -> Sequence:
    """A sequence of all tokens, CALL_PAGES pages a call, layer after layer."""
    sequence = pool.sequence()
    step = CALL_PAGES * size.page_tokens
    for first in range(0, size.tokens, step):
        for layer in range(size.layers):
            sequence.append(layer, k[first : first + step], v[first : first + step])
    return sequence


def measure_append(result: Result, pool: CXLPool, path: Path, size: Size, name: str) -> None:
    k, v = size.noise(1), size.noise(2)
    sequence = append_all(pool, size, k, v)
    ids = sequence.pages
    result.checks[f"append_{name}_right"] = holds(sequence, size, k, v)
    sequence.release()
    mapped = Mapped(pool, path)
    moves = list(append_moves(mapped, size, ids, k, v))

    def memcpy() -> None:
        for destination, start, count in moves:
            ctypes.memmove(destination, start, count)

    def append() -> None:
        append_all(pool, size, k, v).release()

    total = pool.layout.token_bytes * size.tokens
    samples = interleave({"memcpy_append": memcpy, "append": append}, size.rounds)
    speed = result.speeds(samples, total, f"{{}}_{name}")
    result.ratios[f"append_{name}_to_memcpy"] = speed["append"] / speed["memcpy_append"]


def holds(sequence: Sequence, size: Size, k: Floats, v: Floats) -> bool:
    """Every layer, read back, is what was appended."""
    for layer in range(size.layers):
        got = sequence.fetch(layer)
        for pages, wanted in zip(got, (k, v), strict=True):
            rows = np.asarray(pages).reshape(size.kv_heads, -1, size.head_dim)
            if not np.array_equal(rows.swapaxes(0, 1).view(np.uint16), wanted.view(np.uint16)):
                return False
    return True


def append_moves(
    mapped: Mapped,
    size: Size,
    ids: PageIds,
    k: Floats,
    v: Floats,
) -> list[tuple[int, int, int]]:
    """(destination, source, bytes) as flat copies: neighbouring slots as one."""
    base = mapped.bytes.ctypes.data
    page_bytes = mapped.heads * mapped.piece_bytes
    moves: list[tuple[int, int, int]] = []
    for first in range(0, len(ids), CALL_PAGES):
        for layer in range(size.layers):
            runs = mapped.runs(ids[first : first + CALL_PAGES], layer)
            for array, places in zip((k, v), runs, strict=True):
                start = len(moves)
                for index, place in enumerate(places.tolist(), first):
                    to, at = base + place, array.ctypes.data + index * page_bytes
                    if len(moves) > start and sum(moves[-1][::2]) == to:
                        moves[-1] = (*moves[-1][:2], moves[-1][2] + page_bytes)
                    else:
                        moves.append((to, at, page_bytes))
    return moves


class Fetches:
    """Calls that fetch so many pages each of a whole sequence, in random order."""

    def __init__(self, pool: CXLPool, path: Path, size: Shape, pages: int):
        self.sequence = append_all(pool, size, size.noise(1), size.noise(2))
        self.batch, self.mapped = pool.batch([self.sequence]), Mapped(pool, path)
        shape = (1, size.kv_heads, pages, size.page_tokens, size.head_dim)
        self.out = (np.empty(shape, ml_dtypes.bfloat16), np.empty(shape, ml_dtypes.bfloat16))
        self.flat: list[Bytes] = [array.view(np.uint8).reshape(-1) for array in self.out]
        ids = self.sequence.pages
        order = np.random.default_rng(3).permutation(len(ids))
        # The pages of each call, and where their pieces of K and of V lie.
        self.calls: list[tuple[int, Selection, list[npt.NDArray[np.uint64]]]] = []
        for first in range(0, len(ids) - pages + 1, pages):
            chosen = np.sort(order[first : first + pages]).astype(np.int32)
            picked = same_pages(chosen, size.kv_heads)
            for layer in range(size.layers):
                self.calls.append((layer, picked, self.mapped.pieces(ids[chosen], layer)))

    @property
    def bytes(self) -> int:
        return len(self.calls) * sum(array.size for array in self.flat)

    def fetch(self, call: int) -> None:
        layer, picked, _ = self.calls[call]
        self.batch.fetch(layer, picked, out=self.out)

    def each(self, one: Callable[[int], None]) -> Callable[[], None]:
        def loop() -> None:
            for call in range(len(self.calls)):
                one(call)

        return loop

    def memcpy(self, call: int) -> None:
        """The same pieces by a loop in C, from the second mapping."""
        for offsets, to in zip(self.calls[call][2], self.flat, strict=True):
            loops.memory_gather_s(to, self.mapped.bytes, offsets, self.mapped.piece_bytes)

    def measure(self, result: Result, fetch: str, memcpy: str, rounds: int) -> None:
        """Metrics of both names in GB/s, check and ratio of the first; lets go of the sequence."""
        result.checks[f"{fetch}_right"] = self.same()
        functions = {memcpy: self.each(self.memcpy), fetch: self.each(self.fetch)}
        speed = result.speeds(interleave(functions, rounds), self.bytes)
        result.ratios[f"{fetch}_to_memcpy"] = speed[fetch] / speed[memcpy]
        self.sequence.release()

    def same(self) -> bool:
        """Whether the first and the last call fetch what memcpy brings."""
        for call in (0, len(self.calls) - 1):
            self.fetch(call)
            got = [array.copy() for array in self.flat]
            for array in self.flat:
                array[:] = 0
            self.memcpy(call)
            if not all(np.array_equal(a, b) for a, b in zip(got, self.flat, strict=True)):
                return False
        return True
