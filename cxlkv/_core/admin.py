"""The binding of what operators do: look at pools from outside, check, fence, remove them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from cxlkv._core.base import Handle, check, checked, numbers_of
from cxlkv._core.pool import layout_from
from cxlkv._native import ffi, lib
from cxlkv.layout import KVLayout

GC_KINDS = ("half-made", "orphan", "idle")  # by the core's number
PROCESSES_MAX = 128
HOSTS_MAX = 64


pool_remove: Callable[[bytes], int] = checked(lib.cxlkv_pool_remove)
pool_upgrade: Callable[[bytes], int] = checked(lib.cxlkv_pool_upgrade)  # the format that it had
pool_fence: Callable[[Handle, int, bool], int] = checked(lib.cxlkv_pool_fence)


def pool_hosts(pool: Handle) -> list[dict[str, int]]:
    rows = ffi.new("cxlkv_host_row[]", HOSTS_MAX)
    count = check(lib.cxlkv_pool_hosts(pool, rows, HOSTS_MAX))
    return [numbers_of(rows[i]) for i in range(count)]


def pool_check(pool: Handle, deep: bool, repair: bool) -> tuple[int, list[str]]:
    """How many problems there are, and their texts as far as 64 KiB hold them; before them what was
    repaired, in lines that say so."""
    size = 1 << 16
    text = ffi.new("char[]", size)
    flags = (lib.CXLKV_CHECK_DEEP if deep else 0) | (lib.CXLKV_CHECK_REPAIR if repair else 0)
    count = check(lib.cxlkv_pool_check(pool, flags, text, size))
    return count, ffi.string(text).decode(errors="replace").splitlines()


class Overview(NamedTuple):
    """A cxlkv_overview with its rows: (numbers, counters) of each process."""

    numbers: dict[str, int]
    identity: str
    layout: KVLayout
    geometry: dict[str, int]
    totals: dict[str, int]
    processes: list[tuple[dict[str, int], dict[str, int]]]


def _overview(fill: Callable[[Any, Any, int], int]) -> Overview:
    got = ffi.new("cxlkv_overview *")
    rows = ffi.new("cxlkv_process[]", PROCESSES_MAX)
    count = min(check(fill(got, rows, PROCESSES_MAX)), PROCESSES_MAX)
    return Overview(
        numbers=numbers_of(got.pages, "pages_") | numbers_of(got[0]),
        identity=bytes(ffi.buffer(got.identity)).hex(),
        layout=layout_from(got.layout),
        geometry=numbers_of(got.geometry),
        totals=numbers_of(got.totals),
        processes=[(numbers_of(rows[i]), numbers_of(rows[i].counters)) for i in range(count)],
    )


def pool_processes(pool: Handle) -> Overview:
    return _overview(lambda got, rows, count: lib.cxlkv_inspect(pool, ffi.NULL, got, rows, count))


def inspect(path: str) -> Overview:
    """The same of a pool that is not opened: reads only."""
    name = os.fsencode(path)
    return _overview(lambda got, rows, count: lib.cxlkv_inspect(ffi.NULL, name, got, rows, count))


class StripedPart(NamedTuple):
    """A device or file as part `number` of the `parts` of a striped pool, `identity` in hex."""

    number: int
    parts: int
    identity: str


def striped_part(path: str) -> StripedPart:
    """Raises NotAPoolError where it is none."""
    got = ffi.new("cxlkv_stripe *")
    check(lib.cxlkv_stripe_inspect(os.fsencode(path), got))
    return StripedPart(got.index, got.count, bytes(ffi.buffer(got.identity)).hex())


def gc(path: str, kind: str, idle_s: float, removes: bool) -> bool:
    """True when the file is provably nobody's; it is removed then, if `removes`."""
    code = lib.cxlkv_gc(os.fsencode(path), GC_KINDS.index(kind), idle_s, int(removes))
    return check(code) == 1
