"""Threads of a test: several works at one time, whose first error is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


def run_all(works: Iterable[Callable[[], object]]) -> None:
    """Each in a thread of its own; raises the first error, when all have ended."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
