"""Text that every machine has: the sources of Python's own library, split in two by file name.

Which bytes these are depends on the version of Python; `Corpus.sha256` says it in a few letters.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Tests are not installed everywhere, and the others are tables rather than text.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
LEFT_OUT |= {"pydoc_data", "__pycache__"}
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Corpus:
    """Files in the order of their names, so that a package's files follow each other."""

    training: tuple[bytes, ...]
    held_out: tuple[bytes, ...]
    """Every tenth file or so, chosen by its name alone; no training sees it."""

    @property
    def sha256(self) -> str:
        """Of both halves; the first 12 letters."""
        whole = hashlib.sha256()
        for text in (*self.training, b"\0", *self.held_out):
            whole.update(text)
        return whole.hexdigest()[:12]


@cache
def standard_library() -> Corpus:
    """The corpus of the Python that runs this; OSError where its sources are not installed."""
    folder = Path(sysconfig.get_path("stdlib"))
    halves: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if LEFT_OUT.isdisjoint(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0
            halves[held_out].append(path.read_bytes() + b"\n")
    if not all(halves):
        raise OSError(f"{folder} has too few Python sources: install those of your Python")
    return Corpus(tuple(halves[False]), tuple(halves[True]))


def held_out_text() -> bytes:
    """The files that no training sees, one behind the other: about a million bytes."""
    return b"".join(standard_library().held_out)
