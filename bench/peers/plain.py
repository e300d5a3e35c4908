"""What memory gives at best: numpy copies the same bytes to and from a file in shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from .serving import UNIT_BYTES, Objects, Store, Team, Wanted, mapped, serve


class Plain(Store):
    """Places are numbers of objects: there is no index, no check, and nothing is looked up."""

    version = np.__version__
    forms: ClassVar = {"copy": ("put", "get", "ranges")}

    def open_objects(self, given: Objects) -> None:
        self.given, self.team = given, Team(given.threads)
        path = Path(given.folder) / "plain"
        with path.open("wb") as file:
            file.truncate(given.bytes)
        shape = (given.count, given.object_bytes)
        self.payload = mapped(given.payload)[: given.bytes].reshape(shape)
        self.store = mapped(str(path), writable=True).reshape(shape)
        self.whole_out = mapped(given.out, writable=True)
        self.out = self.whole_out[: given.bytes].reshape(shape)

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[list[float], int]:
        if case == "ranges":
            return self._ranges(wanted)
        if case == "put":
            calls, source, to = self.given.calls(), self.payload, self.store
        else:
            calls, source, to = self.given.calls(self.given.order()), self.store, self.out

        def copy(call: list[int]) -> None:
            for index in call:
                np.copyto(to[index], source[index])

        return [self.team.each(copy, calls)], self.given.bytes

    def _ranges(self, wanted: Wanted) -> tuple[list[float], int]:
        units = self.store.reshape(self.given.count, self.given.layers, UNIT_BYTES)
        to = self.whole_out.reshape(-1, UNIT_BYTES)
        ends = np.cumsum([len(pages) for pages in wanted]).tolist()

        def take(layers: list[int]) -> None:
            for layer in layers:
                first = ends[layer] - len(wanted[layer])
                for place, page in enumerate(wanted[layer], start=first):
                    np.copyto(to[place], units[page, layer])

        seconds = self.team.each(take, [[layer] for layer in range(len(wanted))])
        return [seconds], ends[-1] * UNIT_BYTES

    def close(self) -> None:
        self.team.close()
        del self.payload, self.store, self.out, self.whole_out
        (Path(self.given.folder) / "plain").unlink()


def main() -> int:
    return serve(Plain)
