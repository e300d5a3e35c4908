"""What memory gives at best: the same bytes copied to and from a file in shared memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from cxlkv.bench import loops

from .serving import UNIT_BYTES, Bytes, Objects, Store, Team, Wanted, mapped


class Memcpy:
    """memcpy in C, each thread an equal part of all. The objects lie shuffled in a file, so that
    those in a row in `out` come from anywhere."""

    def __init__(self, given: Objects, payload: Bytes, out: Bytes) -> None:
        self.given, self.payload, self.out = given, payload, out
        self.workers = ThreadPoolExecutor(given.threads)
        self.path = Path(given.folder) / "plain-memcpy"
        with self.path.open("wb") as file:
            file.truncate(given.bytes)
        self.store = np.memmap(self.path, np.uint8, "r+")  # nothing of it is touched yet
        self.object_at = given.order()
        self.place_of = np.argsort(self.object_at)
        self.first_s = self.put()

    def put(self) -> float:
        return self._copy(self.store, self.payload, self.object_at, self.given.object_bytes)

    def get(self) -> float:
        return self._copy(self.out, self.store, self.place_of, self.given.object_bytes)

    def ranges(self, wanted: Wanted) -> float:
        layers = self.given.layers
        units = [self.place_of[list(pages)] * layers + at for at, pages in enumerate(wanted)]
        return self._copy(self.out, self.store, np.concatenate(units), UNIT_BYTES)

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


class Plain(Store):
    """Places are numbers of objects: there is no index, no check, and nothing is looked up.

    copy: by numpy, object by object; memcpy: in C.
    """

    version = np.__version__
    forms: ClassVar = {
        "copy": ("put", "get", "ranges"),
        "memcpy": ("first", "put", "get", "ranges"),
    }

    def open_objects(self, given: Objects) -> None:
        self.given, self.team = given, Team(given.threads)
        path = Path(given.folder) / "plain"
        with path.open("wb") as file:
            file.truncate(given.bytes)
        shape = (given.count, given.object_bytes)
        payload = mapped(given.payload)[: given.bytes]
        self.payload = payload.reshape(shape)
        self.store = mapped(str(path), writable=True).reshape(shape)
        self.whole_out = mapped(given.out, writable=True)
        self.out = self.whole_out[: given.bytes].reshape(shape)
        self.memcpy = Memcpy(given, payload, self.whole_out)

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[float, int]:
        moved = sum(map(len, wanted)) * UNIT_BYTES if case == "ranges" else self.given.bytes
        if case == "first":
            return self.memcpy.first_s, moved
        if case == "ranges":
            ranges = self.memcpy.ranges if form == "memcpy" else self._ranges
            return ranges(wanted), moved
        if form == "memcpy":
            return self.memcpy.put() if case == "put" else self.memcpy.get(), moved
        if case == "put":
            calls, source, to = self.given.calls(), self.payload, self.store
        else:
            calls, source, to = self.given.calls(self.given.order()), self.store, self.out

        def copy(call: list[int]) -> None:
            for index in call:
                np.copyto(to[index], source[index])

        return self.team.each(copy, calls), moved

    def _ranges(self, wanted: Wanted) -> float:
        units = self.store.reshape(self.given.count, self.given.layers, UNIT_BYTES)
        to = self.whole_out.reshape(-1, UNIT_BYTES)
        ends = np.cumsum([len(pages) for pages in wanted]).tolist()

        def take(layers: list[int]) -> None:
            for layer in layers:
                first = ends[layer] - len(wanted[layer])
                for place, page in enumerate(wanted[layer], start=first):
                    np.copyto(to[place], units[page, layer])

        return self.team.each(take, [[layer] for layer in range(len(wanted))])

    def close(self) -> None:
        self.team.close()
        self.memcpy.close()
        del self.memcpy, self.payload, self.store, self.out, self.whole_out
        (Path(self.given.folder) / "plain").unlink()


PEER = Plain
