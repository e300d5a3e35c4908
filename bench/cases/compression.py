"""Records made smaller for the cold tier: how many bytes it saves, and how fast, beside memcpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import publish, read_records
from cxlkv.bench.result import Result
from cxlkv.errors import UnsupportedError
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool
from cxlkv.tiers.cold_file import RecordShape
from cxlkv.tiers.compress import Codec

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


@dataclass(frozen=True)
class Size:
    """Pages of 64 tokens of trained models' caches; batches of `batch_bytes`."""

    tokens: int = 4096
    page_tokens: int = 64
    batch_bytes: int = 32 << 20
    rounds: int = 7


def run(result: Result, size: Size = Size()) -> None:
    """Metrics SOURCE_DTYPE_{share,pack,unpack} and memcpy of the same records; ratios of shares,
    and of the speeds to memcpy's. Noise is of random bytes, the worst case."""
    try:
        Codec("zstd", 2, 2).close()
    except UnsupportedError as error:
        result.notes.append(f"packing: not measured, {error}")
        return
    for name, layers in named_sources(size).items():
        for dtype in DTYPES:
            measure(result, f"{name}_{dtype}", *records_of(layers, dtype, size), size)
    noise = np.random.default_rng(1).integers(0, 256, (64, 1 << 18), np.uint8)
    measure(result, "noise", noise, RecordShape(1 << 18, 0, "", 2), size)
    result.notes.append(
        f"packing: records of the caches of the demo's model and the text's behind {size.tokens} "
        f"tokens, {size.page_tokens} a page, with digests, sketches and checksums"
    )


Layers = list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], ...]]


def named_sources(size: Size) -> dict[str, Layers]:
    """K and V of each layer."""
    from cxlkv.bench import sources

    return {
        name: [(one.keys.contiguous().numpy(), one.values.contiguous().numpy()) for one in layers]
        for name, layers in (
            ("text", sources.text(size.tokens, 1)),
            ("demo", sources.demo(size.tokens, 1)),
        )
    }


def records_of(layers: Layers, dtype: str, size: Size) -> tuple[Bytes, RecordShape]:
    """Records as a pool gives them to other tiers."""
    tokens, heads, channels = layers[0][0].shape
    layout = KVLayout(
        layers=len(layers),
        kv_heads=heads,
        head_dim=channels,
        page_tokens=size.page_tokens,
        dtype=dtype,
    )
    capacity = 2 * layout.token_bytes * tokens + (64 << 20)
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity, threads=1) as pool:
        sequence = pool.sequence()
        for layer, (keys, values) in enumerate(layers):
            sequence.append(layer, keys.astype(DTYPES[dtype]), values.astype(DTYPES[dtype]))
        return read_records(pool, publish(pool, sequence)), RecordShape.of(pool)


def measure(result: Result, name: str, records: Bytes, shape: RecordShape, size: Size) -> None:
    repeat = -(-size.batch_bytes // records.nbytes)
    given = [record for _ in range(repeat) for record in records]
    out = np.empty((len(given), shape.bytes), np.uint8)
    codec = Codec("zstd", shape.bytes, shape.element_bytes)
    packed = codec.pack(given)
    pairs = list(zip(packed, out, strict=True))
    source = np.stack(given)
    functions: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(out, source),
        "pack": lambda: codec.pack(given),
        "unpack": lambda: codec.unpack(pairs),
    }
    samples = interleave(functions, size.rounds)
    right = all(codec.unpack(pairs)) and np.array_equal(out, source)
    codec.close()
    result.checks[f"{name}_comes_back_the_same"] = right
    share = sum(one.nbytes for one in packed) / source.nbytes
    result.measure(f"{name}_share", [share], "of the bytes")
    speed = result.speeds(samples, source.nbytes, f"{name}_{{}}")
    result.ratios[f"{name}_share"] = share
    result.ratios[f"{name}_pack_to_memcpy"] = speed["pack"] / speed["memcpy"]
    result.ratios[f"{name}_unpack_to_memcpy"] = speed["unpack"] / speed["memcpy"]
