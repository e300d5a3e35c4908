"""Small files of weights, and a byte of one changed without a trace in its size and time."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np

TENSOR_BYTES = 64 << 10


def safetensors(path: Path, count: int = 3) -> Path:
    """A file of some tensors."""
    header = {
        f"t{i}": {
            "dtype": "U8",
            "shape": [TENSOR_BYTES],
            "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    data = np.random.default_rng(0).integers(0, 256, count * TENSOR_BYTES, np.uint8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data.tobytes())
    return path


def gguf(path: Path, words: int = 10) -> Path:
    """A file of two tensors, with a vocabulary before them."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = text("general.alignment") + struct.pack("<II", 4, 64)
    pairs += text("tokens") + struct.pack("<IIQ", 9, 8, words)
    pairs += b"".join(text(f"word{i}") for i in range(words))
    pairs += text("scores") + struct.pack("<IIQ", 9, 6, 4) + bytes(16)
    tensors = b"".join(
        text(f"t{i}") + struct.pack("<IQQIQ", 2, 256, 256, 24, i * TENSOR_BYTES) for i in range(2)
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 3) + pairs + tensors
    padding = bytes(-len(header) % 64)
    data = np.random.default_rng(0).integers(0, 256, 2 * TENSOR_BYTES, np.uint8).tobytes()
    path.write_bytes(header + padding + data)
    return path


def change(path: Path, offset: int) -> None:
    """One byte of a file, whose size and modification time stay: as an image is built anew."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        (old,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
