"""What memory gives at best: the same bytes copied to and from a file in shared memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from cxlkv.bench import loops

from .serving import UNIT_BYTES, Bytes, Objects, Store, Wanted, mapped


class Plain(Store):
    """memcpy in C, each thread an equal part of all: there is no index, no check, and nothing is
    looked up. The objects lie shuffled in a file, so that those in a row in `out` come from
    anywhere."""

    version = np.__version__
    forms: ClassVar = {"memcpy": ("first", "put", "get", "ranges")}

    def open_objects(self, given: Objects) -> None:
        self.given, self.workers = given, ThreadPoolExecutor(given.threads)
        self.payload, self.out = mapped(given.payload), mapped(given.out, writable=True)
        self.path = Path(given.folder) / "plain"
        with self.path.open("wb") as file:
            file.truncate(given.bytes)
        self.store = np.memmap(self.path, np.uint8, "r+")  # nothing of it is touched yet
        self.object_at = given.order()
        self.place_of = np.argsort(self.object_at)
        self.first_s = self._put()

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[float, int]:
        given = self.given
        if case == "first":
            return self.first_s, given.bytes
        if case == "put":
            return self._put(), given.bytes
        if case == "get":
            seconds = self._copy(self.out, self.store, self.place_of, given.object_bytes)
            return seconds, given.bytes
        units = np.concatenate(
            [self.place_of[list(pages)] * given.layers + at for at, pages in enumerate(wanted)]
        )
        return self._copy(self.out, self.store, units, UNIT_BYTES), len(units) * UNIT_BYTES

    def _put(self) -> float:
        return self._copy(self.store, self.payload, self.object_at, self.given.object_bytes)

    def _copy(
        self, to: Bytes, memory: Bytes, pieces: npt.NDArray[np.int64], piece_bytes: int
    ) -> float:
        """Seconds to copy pieces, by their numbers, one behind the other."""
        offsets = pieces.astype(np.uint64) * piece_bytes
        gather = loops.Gather(self.workers, self.given.threads, to, memory, offsets, piece_bytes)
        return gather()

    def close(self) -> None:
        self.workers.shutdown()
        self.path.unlink()
        del self.payload, self.store, self.out


PEER = Plain
