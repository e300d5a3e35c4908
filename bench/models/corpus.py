"""Text that every machine has: the sources of Python's own library.

The byte-level model learned from nine tenths of these files; it is judged on the others. Which
bytes these are depends on the version of Python.
"""

from __future__ import annotations

import sysconfig
import zlib
from functools import cache
from pathlib import Path

# Tests are not installed everywhere, and the others are tables rather than text.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
LEFT_OUT |= {"pydoc_data", "__pycache__"}
HELD_OUT_ONE_IN = 10


@cache
def held_out_text() -> bytes:
    """The files that no training saw, one behind the other in the order of their names: about a
    million bytes. OSError where the sources are not installed."""
    folder, found = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        # By its name alone, so that it is the same file in every version.
        is_held_out = zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0
        if is_held_out and LEFT_OUT.isdisjoint(name.parts):
            found += path.read_bytes() + b"\n"
    if not found:
        raise OSError(f"{folder} has too few Python sources: install those of your Python")
    return bytes(found)
