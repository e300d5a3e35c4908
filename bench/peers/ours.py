"""This project's pool as a contender: pages, and whole records."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.bench.pools import publish, read_records
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import same_pages
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

from .serving import UNIT_BYTES, Bytes, Objects, Store, Wanted, mapped, must

PAGE_TOKENS, KV_HEADS, HEAD_DIM = 16, 8, 128
RECORD_HEADER_BYTES = 64
MEMORY = "anonymous:"
UNIT = (2, PAGE_TOKENS, KV_HEADS, HEAD_DIM)  # K, then V
Elements = npt.NDArray[np.uint16]  # numpy's own types have no bfloat16


class Pages:
    """Objects as pages of one sequence: append stores them layer by layer, fetch reads them."""

    def __init__(self, given: Objects, out: Bytes, where: str, checksum: bool) -> None:
        self.given, self.out, self.where = given, out, where
        layout = KVLayout(
            layers=given.layers, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_tokens=PAGE_TOKENS
        )
        self.pool = CXLPool.create(
            Path(where),
            layout=layout,
            capacity=given.bytes * 5 // 4 + (64 << 20),
            checksum=checksum,
            sketch=False,
            threads=given.threads,
        )
        self.sequence: Sequence | None = None
        self.published: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]] | None = None

    def units(self, payload: Bytes) -> Elements:
        """[kv, layers, tokens, kv_heads, head_dim]: each layer's keys in a row, as a model has
        them."""
        given = self.given
        rows = payload[: given.bytes].view(np.uint16).reshape(given.count, given.layers, *UNIT)
        shape = (2, given.layers, given.count * PAGE_TOKENS, KV_HEADS, HEAD_DIM)
        return np.ascontiguousarray(rows.transpose(2, 1, 0, 3, 4, 5)).reshape(shape)

    def empty(self) -> None:
        if self.sequence is not None:
            self.sequence.release()
            self.sequence = None
        if self.published is not None:
            kept = self.pool.records.forget(*self.published, True).any()
            must(not kept, "pages that nobody holds were not forgotten")
            self.published = None

    def append(self, units: Elements) -> float:
        self.empty()
        step = self.given.call_objects * PAGE_TOKENS
        rows = units.view(ml_dtypes.bfloat16)
        began = time.perf_counter()
        self.sequence = self.pool.sequence()
        for first in range(0, self.given.count * PAGE_TOKENS, step):
            for layer in range(self.given.layers):
                k, v = rows[:, layer, first : first + step]
                self.sequence.append(layer, k, v)
        return time.perf_counter() - began

    def fetch(self, calls: list[tuple[int, list[int]]]) -> float:
        """(layer, pages) of each call; `out` gets K and V of a call one behind the other, by
        head."""
        if self.sequence is None:
            raise RuntimeError("nothing was put")
        batch, asked, at = self.pool.batch([self.sequence]), [], 0
        for layer, pages in calls:
            half = len(pages) * UNIT_BYTES // 2
            shape = (1, KV_HEADS, len(pages), PAGE_TOKENS, HEAD_DIM)
            k, v = (
                self.out[start : start + half].view(ml_dtypes.bfloat16).reshape(shape)
                for start in (at, at + half)
            )
            asked.append((layer, same_pages(pages, KV_HEADS), (k, v)))
            at += 2 * half
        began = time.perf_counter()
        for layer, picked, places in asked:
            batch.fetch(layer, picked, out=places)
        return time.perf_counter() - began

    def close(self) -> None:
        self.empty()
        self.pool.close()
        if self.where != MEMORY:
            Path(self.where).unlink()


class Ours(Store):
    """In files in shared memory: pages with the CRC of each piece, which is the default, and
    without; records, which are whole pages with digest and CRCs, found by their 128-bit names. In
    memory of the process: pages. Bytes are those of K and V alone."""

    version = _core.version()
    forms: ClassVar = {
        "pages": ("put", "get", "ranges"),
        "pages_no_crc": ("put", "get", "ranges"),
        "memory_no_crc": ("put", "get", "ranges"),
        "records": ("put", "get"),
    }

    def open_objects(self, given: Objects) -> None:
        self.given = given
        self.out = np.asarray(mapped(given.out, writable=True))
        file = f"{given.folder}/ours"
        self.pools = {
            "pages": Pages(given, self.out, file, checksum=True),
            "pages_no_crc": Pages(given, self.out, f"{file}-without-crc", checksum=False),
            "memory_no_crc": Pages(given, self.out, MEMORY, checksum=False),
        }
        pages = self.pools["pages"]
        self.units = pages.units(mapped(given.payload))
        pages.append(self.units)
        assert pages.sequence is not None
        self.names = publish(pages.pool, pages.sequence)
        pages.sequence = None
        pages.published = pages.pool.records.find(self.names)
        self.records = read_records(pages.pool, self.names)
        self.record_bytes = self.records.shape[1]
        pages.empty()

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[float, int]:
        if form == "records":
            pages = self.pools["pages"]
            seconds = self._write(pages) if case == "put" else self._read(pages)
            return seconds, self.given.bytes
        pages = self.pools[form]
        if case == "put":
            return pages.append(self.units), self.given.bytes
        if case == "ranges":
            chosen = [(layer, list(few)) for layer, few in enumerate(wanted)]
            return pages.fetch(chosen), self._arrange(chosen, in_turn=True)
        order = self.given.calls(self.given.order())
        calls = [(layer, call) for call in order for layer in range(self.given.layers)]
        return pages.fetch(calls), self._arrange(calls, in_turn=False)

    def _write(self, pages: Pages) -> float:
        pages.empty()
        handle, step = pages.pool._handle, self.given.call_objects
        began = time.perf_counter()
        for first in range(0, self.given.count, step):
            _core.records_write(handle, self.records[first : first + step])
        seconds = time.perf_counter() - began
        pages.published = _core.find_pages(handle, self.names)
        return seconds

    def _read(self, pages: Pages) -> float:
        handle, order, size = pages.pool._handle, self.given.order(), self.record_bytes
        rows = self.out[: self.given.count * size].reshape(self.given.count, size)
        names, step = np.ascontiguousarray(self.names[order]), self.given.call_objects
        began = time.perf_counter()
        for first in range(0, self.given.count, step):
            found = _core.find_pages(handle, names[first : first + step])
            _core.records_read(handle, *found, rows[first : first + step])
        seconds = time.perf_counter() - began
        self._unpack(rows.copy(), order, pages)
        return seconds

    def _unpack(self, rows: Bytes, order: npt.NDArray[np.int64], pages: Pages) -> None:
        """K and V of the records that were read, to where everybody's are looked for."""
        geometry = pages.pool.pages.geometry
        digest = KV_HEADS * geometry["digest_piece_bytes"]
        first = RECORD_HEADER_BYTES + geometry["checksum_bytes"]
        layers = rows[:, first : first + self.given.layers * (digest + UNIT_BYTES)]
        layers = layers.reshape(self.given.count, self.given.layers, digest + UNIT_BYTES)
        shape = (self.given.count, self.given.layers, 2, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
        pieces = np.ascontiguousarray(layers[:, :, digest:]).view(np.uint16).reshape(shape)
        units = self.out[: self.given.bytes].view(np.uint16)
        units.reshape(self.given.count, self.given.layers, *UNIT)[order] = pieces.swapaxes(3, 4)

    def _arrange(self, calls: list[tuple[int, list[int]]], in_turn: bool) -> int:
        """What calls of fetch left in `out`, [kv, kv_heads, pages, tokens, head_dim] of each, unit
        by unit: in turn, or where the page and the layer have their place. Returns the bytes."""
        got, at, words = self.out.copy().view(np.uint16), 0, UNIT_BYTES // 2
        units = self.out[: len(self.out) // UNIT_BYTES * UNIT_BYTES].view(np.uint16)
        units = units.reshape(-1, *UNIT)
        for layer, pages in calls:
            end = at + len(pages)
            piece = got[at * words : end * words]
            piece = piece.reshape(2, KV_HEADS, len(pages), PAGE_TOKENS, HEAD_DIM)
            places = np.arange(at, end) if in_turn else np.array(pages) * self.given.layers + layer
            units[places] = piece.transpose(2, 0, 3, 1, 4)
            at = end
        return at * UNIT_BYTES

    def close(self) -> None:
        for pages in self.__dict__.pop("pools", {}).values():
            pages.close()
        for name in ("records", "units", "out"):
            self.__dict__.pop(name, None)


PEER = Ours
