"""A pool that several hosts share, of which this process is one."""

from __future__ import annotations

from pathlib import Path

from cxlkv import CXLPool, KVLayout


def shared(
    path: Path | str,
    layout: KVLayout,
    capacity: str | int = "8MiB",
    hosts: int = 2,
    host: int = 0,
    sketch: bool | None = None,
) -> CXLPool:
    return CXLPool.create(
        path,
        layout=layout,
        capacity=capacity,
        sharing="software",
        hosts=hosts,
        host=host,
        sketch=sketch,
        threads=1,
    )
