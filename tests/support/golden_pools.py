"""What the golden pools hold, one set for each version of the format, and how a set is made.

    python -m tests.support.golden_pools

writes tests/golden/NAME-VERSION.xz, VERSION being the format of the build that runs; files of
earlier versions stay as the builds of their time made them, and are never made again. What a pool
holds follows from its name alone, so whoever opens one can tell whether it is right.
"""

from __future__ import annotations

import lzma
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cxlkv import CXLPool, KVLayout, LayerGroup, ObjectPool
from cxlkv.pool import Pool
from cxlkv.sequence import Sequence
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import VERSIONS, RecordShape

FOLDER = Path(__file__).parents[1] / "golden"
CAPACITY = "4MiB"
# Two groups, so that there are two parts; a part of the second is behind its window.
LAYOUT = KVLayout.of(
    [
        LayerGroup(layers=2, kv_heads=2, head_dim=64, dtype="float32"),
        LayerGroup(layers=1, kv_heads=2, head_dim=64, dtype="float32", window=40),
    ],
    [0, 1, 0],
    model_id="golden",
)
TOKENS = 5 * 16
OBJECTS = KVLayout.objects("64KiB")
OBJECT_BYTES = {"short": 1, "half": 32768, "whole": 65536}
MEMBER_BYTES = 6 << 20
NAMES = ("prefixes", "objects", "shared", "striped", "killed")


def members(path: Path) -> list[Path]:
    """The files of a pool at `path`."""
    return [path.with_suffix(f".{part}") for part in "ab"] if path.stem == "striped" else [path]


def packed_file(name: str, version: int, part: Path) -> Path:
    return FOLDER / f"{name}-{version}{part.suffix.removesuffix('.pool')}.xz"


def where(path: Path) -> str:
    """Path as CXLPool.open() takes it."""
    parts = members(path)
    return str(path) if len(parts) == 1 else "dax:" + "+".join(map(str, parts))


def ids_of(name: str) -> npt.NDArray[np.int64]:
    return np.arange(TOKENS, dtype=np.int64) + 1000 * len(name) + ord(name[0])


def rows_of(name: str, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """K and V of one layer: float32 [tokens, kv_heads, head_dim]."""
    shape = (TOKENS, LAYOUT.kv_heads, LAYOUT.head_dim)
    base = ids_of(name)[:, None, None] % 97 - 48 + layer
    keys = np.broadcast_to(base + np.arange(LAYOUT.kv_heads)[:, None], shape)
    return keys.astype(np.float32), np.ascontiguousarray(-keys, np.float32)


def object_of(key: str) -> bytes:
    size = OBJECT_BYTES[key]
    return (key.encode() * (size // len(key) + 1))[:size]


def sequence_of(pool: CXLPool, name: str) -> Sequence:
    made = pool.sequence()
    for layer in range(LAYOUT.layers):
        made.append(layer, *rows_of(name, layer))
    return made


def publish(pool: CXLPool, name: str) -> None:
    made = sequence_of(pool, name)
    pool.publish_prefix(made, ids_of(name))
    made.release()


def make(path: Path) -> dict[Path, bytes]:
    """Makes the pool that `path` is named for, and returns what its files hold then."""
    name = path.stem
    if name == "objects":
        with ObjectPool.create(path, layout=OBJECTS, capacity=CAPACITY) as pool:
            assert all(pool.put(key, object_of(key)) for key in OBJECT_BYTES)
    elif name == "shared":
        made = CXLPool.create(
            path, layout=LAYOUT, capacity="12MiB", sharing="software", hosts=2, host=0
        )
        with made as pool, CXLPool.open(path, host=1) as other:
            publish(pool, name)
            publish(other, "of the other host")
    else:
        for part in members(path) if name == "striped" else ():
            part.touch()
            os.truncate(part, MEMBER_BYTES)
        with CXLPool.create(where(path), layout=LAYOUT, capacity=CAPACITY) as pool:
            publish(pool, name)
            if name == "killed":  # as its file is when the machine stops now
                held = sequence_of(pool, "not published")
                data = path.read_bytes()
                held.release()
                return {path: data}
    return {part: part.read_bytes() for part in members(path)}


def check(name: str, opened: Callable[[int | None], Pool]) -> None:
    """That the pool which `opened` opens, as a host, holds what it should, and nothing is wrong."""
    hosts = (0, 1) if name == "shared" else (None,)
    for host in hosts:
        with opened(host) as pool:
            report = pool.admin.check(deep=True)
            assert report["clean"], report
            if isinstance(pool, ObjectPool):
                for key, size in OBJECT_BYTES.items():
                    found = bytearray(size)
                    assert pool.get_into(key, found) == size
                    assert found == object_of(key)
                assert pool.get_into("absent", bytearray(1)) is None
                continue
            assert isinstance(pool, CXLPool)
            for each in (name, "of the other host") if name == "shared" else (name,):
                check_prefix(pool, each)
            publish(pool, "new text")  # and it can be written
            check_prefix(pool, "new text")


def check_prefix(pool: CXLPool, name: str) -> None:
    with pool.match_prefix(ids_of(name)) as hit:
        assert hit.tokens == TOKENS
        sequence = hit.sequence()
        query = np.ones((LAYOUT.kv_heads, LAYOUT.head_dim), np.float32)
        for layer, window in enumerate(LAYOUT.windows):
            picked = sequence.select(layer, query, top_k=TOKENS // 16)
            first = 0 if window is None else (TOKENS - window) // 16 + 1  # the one before may go
            assert set(range(first, TOKENS // 16)) <= set(picked.pages[0].tolist())
            for found, wanted in zip(
                sequence.fetch(layer, picked), rows_of(name, layer), strict=True
            ):
                for head, pages in enumerate(picked.pages.tolist()):
                    for place, page in enumerate(pages):
                        if page >= first:
                            rows = wanted[page * 16 : page * 16 + 16, head]
                            assert np.array_equal(np.asarray(found)[head, place], rows)


@contextmanager
def unpacked(name: str, version: int, folder: Path) -> Iterator[Path]:
    """The path of a pool in `folder`, as a build of its version left it."""
    path = folder / f"{name}.pool"
    for part in members(path):
        part.write_bytes(lzma.decompress(packed_file(name, version, part).read_bytes()))
    yield path
    for part in members(path):
        part.unlink(missing_ok=True)


def cold_tier(path: Path, version: int) -> ColdTier:
    """A cold file has a format of its own: its version says how records are compressed."""
    compress = next(name for name, number in VERSIONS.items() if number == version)
    return ColdTier(path, shape=RecordShape(1000, 7, "golden"), capacity="64KiB", compress=compress)


def cold_records() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Names [n, 16] and records [n, 1000]."""
    numbers = np.arange(3, dtype=np.uint8)[:, None]
    return np.repeat(numbers + 1, 16, axis=1), np.repeat(numbers + 100, 1000, axis=1)


def check_cold(path: Path, version: int) -> None:
    names, records = cold_records()
    with cold_tier(path, version) as tier:
        assert tier.check(deep=True) == []
        found = np.zeros_like(records)
        assert tier.load(names, found).all()
        assert np.array_equal(found, records)
        assert tier.store(names + 1, records).all()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cxlkv-golden-") as folder:
        for name in NAMES:
            made = make(Path(folder) / f"{name}.pool")
            whole = b"".join(made.values())
            version = whole[whole.index(b"CXLKVPOL") + 8]
            for part, data in made.items():
                file = packed_file(name, version, part)
                file.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
                print(f"{file.name}: {len(data)} bytes, {file.stat().st_size} packed")
        for version in VERSIONS.values():
            path = Path(folder) / "cold"
            with cold_tier(path, version) as tier:
                assert tier.store(*cold_records()).all()
            packed = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
            (FOLDER / f"cold-{version}.xz").write_bytes(packed)
            path.unlink()


if __name__ == "__main__":
    main()
