"""Where the pages of a guest's pools lie, as the kernel says it: not by the pool's own account."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

NODES = Path("/sys/devices/system/node")
WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")


def pages_by_node(*names: str) -> Counter[int]:
    """Pages of this process's mappings of files of these names, or without one, by node."""
    found: Counter[int] = Counter()
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if any(name in line for name in ("/memfd:cxlkv-pool", *names)):
            for node, pages in re.findall(r" N(\d+)=(\d+)", line):
                found[int(node)] += int(pages)
    return found


def flags_of(name: str) -> set[str]:
    """The kernel's flags (VmFlags) of the first mapping of a file called `name`."""
    smaps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"{re.escape(name)}\n(?:.*\n)*?VmFlags: (.*)", smaps)
    return set(found[1].split()) if found else set()
