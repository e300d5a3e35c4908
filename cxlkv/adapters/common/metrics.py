"""A store's counters for its engine, and one log line for each kind of failure."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from cxlkv import forking
from cxlkv.pool import Pool

log = logging.getLogger("cxlkv")


class Counting:
    """counts: names of what add() counts; kinds: of failures, each with what it means and what
    mends it. Any thread may count."""

    def __init__(self, counts: Iterable[str], kinds: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._kinds = kinds
        self.counts: Counter[str] = Counter(dict.fromkeys(counts, 0))
        self.failures: Counter[str] = Counter(dict.fromkeys(kinds, 0))
        forking.watch(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)

    def failed(self, kind: str, detail: object = "", count: int = 1) -> None:
        """The first of each kind is a line in the log."""
        with self._lock:
            is_first = self.failures[kind] == 0
            self.failures[kind] += count
        if is_first:
            said = f": {detail}" if str(detail) else ""
            log.warning("cxlkv: %s%s (said once; counted as %s)", self._kinds[kind], said, kind)

    def look(self, pool: Pool) -> None:
        """The pool has been used: for who shows how full it is."""
