"""Where the pages of a guest's pools lie, as the kernel says it, and where new ones come from."""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from pathlib import Path

NODES = Path("/sys/devices/system/node")
WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")
SET_MEMPOLICY = 238  # x86-64
DEFAULT, BIND, WEIGHTED_INTERLEAVE = 0, 2, 6


def set_policy(mode: int, nodes: tuple[int, ...] = ()) -> None:
    """Where new pages of this process come from; raises OSError."""
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(SET_MEMPOLICY, mode, ctypes.byref(mask), ctypes.c_ulong(64)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"set_mempolicy({mode}, {nodes}): {os.strerror(error)}")


def pages_by_node(name: str = "cxlkv-pool") -> Counter[int]:
    """Pages of this process's mappings of files called `name`, by node: of 4 KiB, or larger."""
    found: Counter[int] = Counter()
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if name in line:
            for node, pages in re.findall(r" N(\d+)=(\d+)", line):
                found[int(node)] += int(pages)
    return found


def flags_of(name: str) -> set[str]:
    """The kernel's flags (VmFlags) of the first mapping of a file called `name`."""
    smaps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"{re.escape(name)}\n(?:.*\n)*?VmFlags: (.*)", smaps)
    return set(found[1].split()) if found else set()
