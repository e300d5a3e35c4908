"""How much of a pool's memory is mapped by huge pages, by the kernel's own account."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from cxlkv import _core
from cxlkv.errors import BadArgumentError, CXLKVError, MemoryShortError
from cxlkv.layout import format_bytes

HUGE = ("never", "try", "require")
SMALLEST = 2 << 20
LOOKS_MAX = 512
_FIELDS = ("ShmemPmdMapped", "FilePmdMapped", "AnonHugePages")


def check_huge(huge: object) -> None:
    if huge not in HUGE:
        raise BadArgumentError(f"huge is {huge!r}: one of {', '.join(HUGE)}")


def mapped(address: int, size: int, smaps: Path = Path("/proc/self/smaps")) -> dict[str, int]:
    """KiB of each kind in the mappings of these addresses, and of a page of the largest kind."""
    found: dict[str, int] = {}
    within = False
    for line in smaps.read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(area[1], 16) < address + size and int(area[2], 16) > address
        elif within and (field := re.match(r"(\w+): +([0-9]+) kB", line)):
            sums = int(field[2]) + found.get(field[1], 0)
            largest = max(int(field[2]), found.get(field[1], 0))
            found[field[1]] = largest if field[1] == "KernelPageSize" else sums
    return found


def huge_bytes(kib: dict[str, int]) -> int:
    """Bytes in huge pages of what mapped() found; memory that this process has not touched yet is
    not in it."""
    if kib.get("KernelPageSize", 4) << 10 >= SMALLEST:  # hugetlbfs, a device
        return max(kib.get(name, 0) for name in ("Size", "Rss")) << 10
    return max(kib.get(name, 0) for name in _FIELDS) << 10


def page_kind(pool: _core.Handle) -> str:
    """What backs the pool: "hugetlb", "devdax", "fsdax"; "thp" where at least half of what this
    process has touched lies in huge pages that the kernel made, else "4KiB"."""
    kind = _core.pool_page_kind(pool)
    if kind == "4KiB":
        with suppress(OSError):  # no smaps here
            kib = mapped(*_core.pool_memory(pool))
            huge = huge_bytes(kib)
            kind = "thp" if huge and 2 * huge >= kib["Rss"] << 10 else kind
    return kind


def look(pool: _core.Handle) -> tuple[int, int]:
    """(bytes in huge pages, bytes looked at) of a pool that was just opened: touches a page of each
    2 MiB, of LOOKS_MAX of them at most, as the kernel tells only of what was touched."""
    address, size = _core.pool_memory(pool)
    units = -(-size // SMALLEST)
    step = -(-units // LOOKS_MAX)
    try:
        for unit in range(0, units, step):
            _core.pool_prefault(pool, unit * SMALLEST, 1, False)
        huge = huge_bytes(mapped(address, size))
    except (CXLKVError, OSError):  # an older kernel, no smaps here
        return 0, 0
    looked_at = min(size, -(-units // step) * SMALLEST)
    return min(looked_at, huge), looked_at


def require(name: str, address: int, size: int) -> None:
    """Raises MemoryShortError unless all of the memory, which was touched, is in huge pages, but
    for the end that fills none."""
    found, wanted = huge_bytes(mapped(address, size)), size // SMALLEST * SMALLEST
    if found < wanted:
        count = -(-size // SMALLEST)
        raise MemoryShortError(
            f"{name}: huge pages hold {format_bytes(found)} of {format_bytes(wanted)}, and "
            "huge='require' wants all. Let the kernel make whole ones (sudo sysctl "
            f"vm.compact_memory=1), reserve them (sudo sysctl vm.nr_hugepages={count}) and make "
            "the pool anew, on a hugetlbfs mount or as anonymous memory; or write huge='try'"
        )
