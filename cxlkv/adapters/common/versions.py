"""Versions of an engine that an adapter was tested with; others are refused by their range."""

from __future__ import annotations

import re
from typing import NamedTuple

from cxlkv.errors import UnsupportedError


class Versions(NamedTuple):
    """engine: as it calls itself; its package has the same name in small letters. From `first` on,
    below `end`. interface: what of it changes between versions."""

    engine: str
    first: tuple[int, ...]
    end: tuple[int, ...]
    interface: str

    def __str__(self) -> str:
        first, end = (".".join(map(str, numbers)) for numbers in (self.first, self.end))
        return f"{self.engine.lower()}>={first},<{end}"

    def check(self, version: str) -> tuple[int, ...]:
        """The numbers of a version; raises UnsupportedError for one that this was not tested
        with."""
        numbers = re.match(r"\d+(\.\d+)*", version)
        found = tuple(map(int, numbers[0].split("."))) if numbers else ()
        if not self.first <= found < self.end:
            raise UnsupportedError(
                f"{self.engine} {version}: this release of cxlkv was tested with {self}, and "
                f"{self.interface} change between versions. Install one of these, or another cxlkv"
            )
        return found
