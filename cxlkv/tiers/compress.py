"""Compresses records at rest: zstd of the top byte of each element, the other bytes as they are.

The top bytes hold the exponents, of which few differ; the others are nearly noise, so that every
compressor's time on them is lost (docs/decisions/0019). A record that is kept smaller:

    the lower bytes of all elements, in order        record bytes - record bytes / element bytes
    one zstd frame of all top bytes                  the rest

zstandard is imported only when somebody asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.machine import lifetime

COMPRESS = ("zstd",)
LEVEL = 1
"""Higher ones take up to six times as long for one or two percent."""
THREADS_MAX = 16

Given = TypeVar("Given")
Made = TypeVar("Made")


class Codec:
    """Packs and unpacks records of `record_bytes`, many at once, each of several threads some.

    element_bytes: of K and V; 1 where they are not known: then all bytes are compressed. Raises
    BadArgumentError for another `compress` than "zstd", UnsupportedError where zstandard is not
    installed.
    """

    def __init__(self, compress: str, record_bytes: int, element_bytes: int):
        if compress not in COMPRESS:
            raise BadArgumentError(f"compress={compress!r}: {' or '.join(COMPRESS)}, or None")
        if record_bytes % element_bytes:
            raise BadArgumentError(f"records of {record_bytes} bytes of {element_bytes} each")
        try:
            import zstandard
        except ImportError as error:
            raise UnsupportedError(
                "compress='zstd' needs the package zstandard: pip install 'cxlkv[compress]'"
            ) from error
        self._zstd = zstandard
        self._bytes, self._element = record_bytes, element_bytes
        self._tops = record_bytes // element_bytes
        self._lower = record_bytes - self._tops
        self._parts = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self.reset_after_fork()
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        """The threads are the parent's; these begin when there is something to share."""
        self._threads = ThreadPoolExecutor(self._parts, thread_name_prefix="cxlkv-zstd")

    def pack(self, records: Sequence[Bytes]) -> list[Bytes]:
        """Pack each record; its packed form may be longer than the record."""
        return self._share(self._pack_some, records)

    def unpack(self, packed: Sequence[tuple[Bytes, Bytes]]) -> list[bool]:
        """Pairs of what pack() made and the record's place; False: it is not what pack() makes."""
        return self._share(self._unpack_some, packed)

    def _share(
        self, work: Callable[[Sequence[Given]], list[Made]], items: Sequence[Given]
    ) -> list[Made]:
        """Neighbours go to one thread, so that small records cost no hand-over each."""
        step = -(-len(items) // self._parts)
        if step == len(items):
            return work(items)
        some = [items[first : first + step] for first in range(0, len(items), step)]
        return [made for part in self._threads.map(work, some) for made in part]

    def _pack_some(self, records: Sequence[Bytes]) -> list[Bytes]:
        compressor = self._zstd.ZstdCompressor(level=LEVEL)
        made = []
        for record in records:
            frame: bytes = compressor.compress(self._top_bytes(record).data)
            packed = np.empty(self._lower + len(frame), np.uint8)
            self._lower_bytes(record, packed[: self._lower])
            packed[self._lower :] = np.frombuffer(frame, np.uint8)
            made.append(packed)
        return made

    def _top_bytes(self, record: Bytes) -> Bytes:
        if self._element == 2:
            return (record.view(np.uint16) >> 8).astype(np.uint8)
        return np.ascontiguousarray(record[self._element - 1 :: self._element])

    def _lower_bytes(self, record: Bytes, out: Bytes) -> None:
        if self._element == 2:
            np.copyto(out, record.view(np.uint16), casting="unsafe")  # its low byte
        elif self._element > 1:
            rest = record.reshape(-1, self._element)[:, :-1]
            out.reshape(-1, self._element - 1)[:] = rest

    def _unpack_some(self, packed: Sequence[tuple[Bytes, Bytes]]) -> list[bool]:
        decompressor = self._zstd.ZstdDecompressor()
        right = []
        for stored, out in packed:
            try:
                tops = self._tops_of(decompressor, stored[self._lower :])
            except self._zstd.ZstdError:
                right.append(False)
                continue
            right.append(len(tops) == self._tops)
            if right[-1]:
                self._join(tops, stored[: self._lower], out)
        return right

    def _tops_of(self, decompressor: object, frame: Bytes) -> Bytes:
        """Empty where the frame says another size: nothing is made so large."""
        if self._zstd.frame_content_size(frame.data) != self._tops:
            return np.empty(0, np.uint8)
        assert isinstance(decompressor, self._zstd.ZstdDecompressor)
        made: bytes = decompressor.decompress(frame.data)
        return np.frombuffer(made, np.uint8)

    def _join(self, tops: Bytes, lower: Bytes, out: Bytes) -> None:
        if self._element == 2:
            words = out.view(np.uint16)
            np.copyto(words, tops)
            words <<= 8
            words |= lower
        else:
            rows = out.reshape(-1, self._element)
            rows[:, -1] = tops
            if self._element > 1:
                rows[:, :-1] = lower.reshape(-1, self._element - 1)

    def close(self) -> None:
        self._threads.shutdown()
