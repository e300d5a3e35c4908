"""Makes up cold files and messages on the wire, and has the real readers read them.

    python -m tests.fuzz_readers {cold,wire} --seconds 60 [--seed N] [--save FOLDER]

Every input follows from the seed and its number; both are printed. What a reader says no to, it
must say by a CXLKVError, or answer as a refusal: anything else is a finding, whose input is saved
as crash-SEED-NUMBER. An input that reaches lines of the reader which none reached before is changed
further. The saved inputs of tests/fuzz are read again by tests/test_fuzz.py.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol, cast

import numpy as np

from cxlkv import CXLPool, KVLayout
from cxlkv._core import crc32c
from cxlkv.arrays import Floats
from cxlkv.errors import CXLKVError, PeerError
from cxlkv.ndp.engine import METHODS
from cxlkv.tiers import cold, cold_file
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import BLOCK_BYTES, FILE_HEADER, SLOT_HEADER, RecordShape
from cxlkv.transport import server
from cxlkv.transport.server import _Session
from cxlkv.transport.wire import Header, Wire

SAVED = Path(__file__).parent / "fuzz"
SHAPE = RecordShape(1000, 7, "fuzz")
KEPT_MAX = 200

Read = Callable[[bytes], None]
Line = tuple[str, int]


class ColdReader:
    """A small cold file, whose CRCs are set right where the input's last byte is odd."""

    files = (cold.__file__, cold_file.__file__)

    def __init__(self, folder: Path):
        self.path = folder / "fuzz.cold"
        with self.tier() as tier:
            names = np.repeat(np.arange(1, 4, dtype=np.uint8)[:, None], 16, axis=1)
            tier.store(names, np.repeat(names[:, :1], 1000, axis=1))
            self._names = names
            self._slot_bytes = tier.stats()["slot_bytes"]
        self.seeds = [self.path.read_bytes()]

    def tier(self) -> ColdTier:
        return ColdTier(self.path, shape=SHAPE, capacity="64KiB")

    def read(self, data: bytes) -> None:
        content = bytearray(data)
        if content and content[-1] & 1:
            self._seal(content)
        self.path.write_bytes(content)
        with suppress(CXLKVError), self.tier() as tier:
            tier.check(deep=True)
            tier.load(self._names, np.zeros((3, 1000), np.uint8))
            tier.store(self._names + 9, np.ones((3, 1000), np.uint8))

    def _seal(self, content: bytearray) -> None:
        starts = range(BLOCK_BYTES, len(content), self._slot_bytes)
        for at, size in ((0, FILE_HEADER.itemsize), *((at, SLOT_HEADER.itemsize) for at in starts)):
            if at + size <= len(content):
                crc = crc32c(bytes(content[at : at + size - 4]))
                content[at + size - 4 : at + size] = struct.pack("<I", crc)


class Talk:
    """In place of a connection: gives the messages one after the other, and takes the answers."""

    def __init__(self, data: bytes):
        self._left = data

    def receive(self) -> tuple[dict[str, object], bytearray]:
        if len(self._left) < 4:
            raise PeerError("the end")
        header_bytes, body_bytes = struct.unpack_from("<HH", self._left)
        header = self._left[4 : 4 + header_bytes]
        body = self._left[4 + header_bytes : 4 + header_bytes + body_bytes]
        self._left = self._left[4 + header_bytes + body_bytes :]
        try:
            found = json.loads(header.decode())
        except (ValueError, RecursionError):
            return {}, bytearray(body)
        return found if isinstance(found, dict) else {}, bytearray(body)

    def send(self, header: object, deadline: object, body: bytes = b"") -> None:
        json.dumps(header)
        memoryview(body)

    def local_host(self) -> str:
        return "127.0.0.1"

    def close(self) -> None:
        pass


def requests(names: bytes, handle: bytes, query: Floats) -> list[tuple[Header, bytes]]:
    """All that a client of `cxlkv serve` may ask, well formed."""
    heads = query.shape[1]
    select = {"op": "select", "hit": 1, "layer": 0, "rows": 1, "heads": heads, "dtype": "float32"}
    select |= {"pages": 1, "share": None, "mass": None, "sinks": 0, "recent": 0}
    select |= {"union": "head", "per": "query", "method": "exact", "scale": None, "recall": 0.9}
    return [
        ({"op": "loopback"}, b""),
        ({"op": "match", "lease_s": 1.0, "strict": False, "single": True}, names),
        (select, query.tobytes()),
        ({"op": "adopt"}, handle),
        ({"op": "lacks"}, names),
        ({"op": "records"}, names),
        ({"op": "read"}, np.array([[4096, 64]]).tobytes()),
        ({"op": "write", "at": 0}, b"record"),
        ({"op": "publish", "records": 1}, names[:16]),
        ({"op": "release", "hit": 1}, b""),
    ]


class WireReader:
    """What a peer that knows the secret may send to `cxlkv serve`."""

    files = (server.__file__,)

    def __init__(self, folder: Path):
        layout = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
        self._pool = CXLPool.create(folder / "pool", layout=layout, capacity="3MiB")
        self._keys = [b"k" * 16, b"l" * 16]
        sequence = self._pool.sequence()
        for layer in range(2):
            sequence.append(layer, *np.ones((2, 8, 2, 8), np.float32))
        self._pool.publish(sequence, self._keys, 4)
        self._handle = sequence.handle
        self._kept = sequence
        self._record_bytes = self._pool.records.shape[0]
        self.seeds = [self._talk()]

    def _talk(self) -> bytes:
        talk = b""
        query = np.ones((1, 2, 8), np.float32)
        for header, body in requests(b"".join(self._keys), self._handle, query):
            text = json.dumps(header).encode()
            talk += struct.pack("<HH", len(text), len(body)) + text + body
        return talk

    def read(self, data: bytes) -> None:
        talk = cast(Wire, Talk(data))
        session = _Session(self._pool, talk, self._record_bytes, None, METHODS)
        try:
            with suppress(PeerError):
                session.run()
        finally:
            session.close()
        assert self._pool.stats()["pages_held"] == 2, "a page was not given back"


READERS: dict[str, type[ColdReader] | type[WireReader]] = {"cold": ColdReader, "wire": WireReader}
WORDS = (b"null", b"-1", b"1e999", b"[]", b"{}", b"true", b'"x"', b"0", b"18446744073709551616")


def changed(generator: random.Random, data: bytes) -> bytes:
    """A few changes: bits, numbers, words, stretches that are moved, doubled or cut out."""
    made = bytearray(data)
    for _ in range(1 + generator.randrange(6)):
        at = generator.randrange(len(made) + 1)
        size = generator.choice((1, 1, 2, 4, 8, 8, 16, 64))
        stretch = bytes(made[at : at + size])
        choice = generator.randrange(7)
        if choice == 0 and at < len(made):
            made[at] ^= 1 << generator.randrange(8)
        elif choice == 1:
            number = generator.choice((0, 1, 0x7F, 0xFF, 1 << 31, (1 << 63) - 1, (1 << 64) - 1))
            made[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
        elif choice == 2:
            made[at : at + size] = generator.randbytes(size)
        elif choice == 3:
            made[at : at + generator.randrange(8)] = generator.choice(WORDS)
        elif choice == 4:
            del made[at : at + size]
        elif choice == 5:
            made[at:at] = stretch
        else:
            to = generator.randrange(len(made) + 1)
            made[to : to + len(stretch)] = stretch
    return bytes(made)


class Trace(Protocol):
    """A trace function, as sys.settrace() takes it."""

    def __call__(self, frame: FrameType, event: str, argument: object, /) -> Trace | None: ...


class Lines:
    """Lines of these files that run while its block runs."""

    def __init__(self, files: tuple[str, ...]):
        self._files, self.seen = files, set[Line]()

    def __enter__(self) -> Lines:
        sys.settrace(self._call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object, /) -> Trace | None:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, _: object, /) -> Trace | None:
        self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def fuzz(name: str, inputs: int, seed: int, save: Path, seconds: float = 1e9) -> int:
    """How many findings there were among so many inputs, or in that time; all are saved."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cxlkv-fuzz-") as folder:
        reader = READERS[name](Path(folder))
        kept, seen, found, number = [*reader.seeds], set[Line](), 0, 0
        end = time.monotonic() + seconds
        while number < inputs and time.monotonic() < end:
            generator = random.Random(f"{seed} {number}")
            data = changed(generator, generator.choice(kept)) if number else kept[0]
            lines = Lines(reader.files)
            try:
                with lines:
                    reader.read(data)
            except Exception as error:
                found += 1
                save.mkdir(parents=True, exist_ok=True)
                path = save / f"crash-{seed}-{number}"
                path.write_bytes(data)
                print(f"{type(error).__name__}: {error}\n  {path}", flush=True)
            if lines.seen - seen and len(kept) < KEPT_MAX:
                kept.append(data)
            seen |= lines.seen
            number += 1
    print(
        f"{name}: seed {seed}, {number} inputs, {len(seen)} lines of the reader, {found} findings"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    save = given.save or SAVED / given.reader
    return int(fuzz(given.reader, sys.maxsize, given.seed, save, given.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
