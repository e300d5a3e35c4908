"""How much of a pool's memory is mapped by huge pages, by the kernel's own account."""

from __future__ import annotations

import re
from pathlib import Path

from cxlkv.errors import BadArgumentError, MemoryShortError
from cxlkv.layout import format_bytes

HUGE = ("never", "try", "require")
SMALLEST = 2 << 20
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
    """Of what mapped() found; memory that this process has not touched yet is not in it."""
    if kib.get("KernelPageSize", 4) << 10 >= SMALLEST:  # hugetlbfs, a device
        return max(kib.get(name, 0) for name in ("Size", "Rss")) << 10
    return max(kib.get(name, 0) for name in _FIELDS) << 10


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
