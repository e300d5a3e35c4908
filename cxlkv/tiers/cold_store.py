"""The contract of a store below the pool, and which store `cold=` means."""

from __future__ import annotations

import os
from typing import Protocol

from cxlkv.arrays import Bytes, Mask
from cxlkv.errors import BadArgumentError, GeometryError
from cxlkv.tiers.cold_file import RecordShape
from cxlkv.tiers.cold_mooncake import MooncakeTier, is_mooncake
from cxlkv.tiers.cold_shared import SharedColdTier


class ColdStore(Protocol):
    """A dictionary from names (rows of 16 bytes) to records (rows of shape.bytes), of many at once.

    What is loaded is what was stored under that name, whole, or a miss; whatever fails is counted
    in stats() and said in why_off, never raised. Any thread may call.
    """

    @property
    def shape(self) -> RecordShape: ...

    @property
    def why_off(self) -> str:
        """Why nothing is stored at the moment; empty while all is well."""

    def contains(self, names: Bytes, sure: bool = False) -> Mask:
        """Which names it has. sure: as store() would find them."""

    def store(self, names: Bytes, records: Bytes, parents: Bytes | None = None) -> Mask:
        """Which of the records it has now; one that it had is not written again."""

    def load(self, names: Bytes, out: Bytes) -> Mask:
        """Which rows of out were filled; of the others none has bytes of a record."""

    def drop(self, names: Bytes) -> Mask:
        """Removes records; which were there."""

    def clear(self) -> bool:
        """Removes all records; False: it cannot."""

    def stats(self) -> dict[str, int]: ...

    def moved_bytes(self) -> tuple[int, int]:
        """Read and written by this process so far; of a file, 0 where another process has it."""

    def close(self) -> None: ...


def open_cold(
    cold: str | os.PathLike[str] | ColdStore,
    shape: RecordShape,
    capacity: str | int | None,
    fsync: str,
    compress: str | None,
) -> ColdStore:
    """A file; a Mooncake store for mooncake://HOST:PORT, lent `capacity`; or what is given.

    Raises BadArgumentError, GeometryError for a store of another layout, what both raise.
    """
    if isinstance(cold, (str, os.PathLike)):
        if not is_mooncake(cold):
            if capacity is None:
                raise BadArgumentError("cold= and cold_capacity= go together")
            return SharedColdTier(
                cold, shape=shape, capacity=capacity, fsync=fsync, compress=compress
            )
        if compress is not None:
            raise BadArgumentError("compress= goes with a file, not with mooncake://")
        return MooncakeTier(str(cold), shape=shape, lend=capacity or 0)
    if capacity is not None or compress is not None:
        raise BadArgumentError("cold_capacity= and compress= go with the path of a file")
    if (cold.shape.bytes, cold.shape.layout) != (shape.bytes, shape.layout):
        raise GeometryError(
            f"cold= keeps records of another pool layout: {cold.shape.apart(shape)}"
        )
    return cold
