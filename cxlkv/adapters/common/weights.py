"""Digests of weight files: their headers, and samples of each tensor.

    .safetensors    the header, and 4 KiB at the beginning, middle and end of every tensor
    .gguf           the same

Such samples miss a change that leaves the header and these 12 KiB of each tensor as they were, such
as new rows in the middle of an embedding. A digest is kept in the user's cache folder under the
file's device, inode, size, mtime and ctime, so that each file is sampled once. Formats: safetensors
(huggingface.co/docs/safetensors), GGUF versions 2 and 3 (docs/gguf.md of ggml).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from cxlkv.errors import UnsupportedError
from cxlkv.machine.state import cache_folder, write_whole

SAMPLE_BYTES = 4096
READERS = 8
"""Threads, as a disk answers many small reads at once."""
SAFETENSORS_HEADER_BYTES_MAX = 100 << 20  # the format's own limit
GGUF_HEADER_BYTES = (16 << 20, 64 << 20, 256 << 20)
"""Read as the header, in turn, until it is whole in them: a vocabulary is in it."""
KEPT_DIGESTS = 4096
SETTLED_NS = 2 * 10**9
"""A file that changed later than this may change again within a tick of its clock."""

Spans = list[tuple[int, int]]


def digests(files: Sequence[Path]) -> list[str]:
    """One of each file, in their order. Raises OSError, UnsupportedError for another format."""
    kept = _kept()
    new: dict[str, str] = {}
    found = []
    for file in files:
        status = file.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        name = ":".join(map(str, (status.st_dev, status.st_ino, status.st_size, *times)))
        digest = kept.get(name) or _sampled(file)
        if name not in kept and time.time_ns() - max(times) > SETTLED_NS:
            new[name] = digest
        found.append(digest)
    if new:
        _keep(new)
    return found


def _cache_file() -> Path:
    return cache_folder() / "weights.json"


def _kept() -> dict[str, str]:
    with suppress(OSError, ValueError):
        read = json.loads(_cache_file().read_text())
        if isinstance(read, dict):
            return {str(name): str(digest) for name, digest in read.items()}
    return {}


def _keep(new: dict[str, str]) -> None:
    """Save digests; where the folder cannot be written, files are sampled again next time."""
    with suppress(OSError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        latest = list({**_kept(), **new}.items())[-KEPT_DIGESTS:]
        write_whole(file, json.dumps(dict(latest)))


def _sampled(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            header, spans = _format_of(file)(descriptor)
        except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
            raise UnsupportedError(f"{file} is damaged: {error!r}") from error
        places = [place for span in sorted(spans) for place in _samples(*span)]
        found = hashlib.blake2b(header, digest_size=16, person=b"cxlkv.weights")
        with ThreadPoolExecutor(READERS) as readers:
            for piece in readers.map(lambda at: os.pread(descriptor, at[1], at[0]), places):
                found.update(piece)
    finally:
        os.close(descriptor)
    return found.hexdigest()


def _samples(first: int, last: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of a tensor's beginning, middle and end."""
    size = min(SAMPLE_BYTES, last - first)
    for offset in sorted({first, first + (last - first - size) // 2, last - size}):
        yield offset, size


def _format_of(file: Path) -> Callable[[int], tuple[bytes, Spans]]:
    found = {".safetensors": _safetensors, ".gguf": _gguf}.get(file.suffix)
    if found is None:
        raise UnsupportedError(f"{file}: only .safetensors and .gguf files are sampled")
    return found


def _safetensors(descriptor: int) -> tuple[bytes, Spans]:
    """The file's header, and where each tensor begins and ends."""
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= size <= SAFETENSORS_HEADER_BYTES_MAX:
        raise ValueError(f"a header of {size} bytes")
    header = os.pread(descriptor, size, 8)
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    first = 8 + size
    offsets = [one["data_offsets"] for one in tensors.values()]
    return header, [(first + int(begin), first + int(end)) for begin, end in offsets]


def _gguf(descriptor: int) -> tuple[bytes, Spans]:
    size = os.fstat(descriptor).st_size
    for most in GGUF_HEADER_BYTES:
        data = os.pread(descriptor, min(most, size), 0)
        try:
            end, offsets = _GGUFHeader(data).read()
        except (struct.error, IndexError):
            if most >= size or most == GGUF_HEADER_BYTES[-1]:
                raise
            continue
        bounds = [*sorted(end + one for one in offsets), size]
        return data[:end], list(pairwise(bounds))
    raise AssertionError("the last one returns or raises")


_GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of each kind of number; of others:"""
_GGUF_TEXT, _GGUF_ARRAY = 8, 9


class _GGUFHeader:
    """What of a GGUF file stands before the data of its tensors."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def read(self) -> tuple[int, list[int]]:
        """Where the data begins, and each tensor's offset in it. Raises struct.error, IndexError
        where the header ends behind the bytes, ValueError, KeyError where it is no header."""
        magic, version = self._take("<II")
        if magic != int.from_bytes(b"GGUF", "little") or version not in (2, 3):
            raise ValueError("it does not begin as GGUF of version 2 or 3 does")
        tensors, pairs = self._take("<QQ")
        alignment = 32
        for _ in range(pairs):
            key, (kind,) = self._text(), self._take("<I")
            if key == b"general.alignment":
                (alignment,) = struct.unpack_from("<I", self._data, self._at)
            self._skip(kind)
        offsets = [self._tensor() for _ in range(tensors)]
        return -(-self._at // alignment) * alignment, offsets

    def _take(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _text(self) -> bytes:
        (size,) = self._take("<Q")
        self._at += size
        if self._at > len(self._data):
            raise IndexError(f"a text of {size} bytes")
        return self._data[self._at - size : self._at]

    def _skip(self, kind: int) -> None:
        if kind == _GGUF_TEXT:
            self._text()
            return
        if kind != _GGUF_ARRAY:
            self._at += _GGUF_BYTES[kind]
            return
        of, count = self._take("<IQ")
        if of in _GGUF_BYTES:
            self._at += count * _GGUF_BYTES[of]
            return
        for _ in range(count):
            self._skip(of)

    def _tensor(self) -> int:
        self._text()
        (dimensions,) = self._take("<I")
        return self._take(f"<{dimensions}QIQ")[-1]
