"""A worker near the memory that is a thread of the test, so that what it knows can be looked at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from cxlkv import CXLPool, _core
from cxlkv.ndp import worker


@contextlib.contextmanager
def serving(
    pool: CXLPool,
    methods: list[str],
    request_bytes: int = 1 << 20,
    response_bytes: int = 1 << 20,
) -> Iterator[worker.Choosers]:
    """A worker that is a thread of this process, with a pool of its own."""
    assert pool.path
    with CXLPool.open(pool.path, threads=1) as own:
        choose = worker.Choosers(own._handle, own.layout, methods)
        sizes = (4, request_bytes, response_bytes, "coherent")
        handle, over = _core.worker_make(own._handle, *sizes), threading.Event()

        def serve() -> None:
            while not over.is_set():
                _core.worker_serve(handle, 0.02)
                choose.answer(handle)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield choose
        finally:
            pool.use_worker("none")
            over.set()
            thread.join()
            _core.worker_destroy(handle)
