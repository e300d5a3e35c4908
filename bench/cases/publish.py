"""Publishing and acquiring records in memory that hosts share, and how soon another sees them."""

from __future__ import annotations

from cxlkv.bench import loops
from cxlkv.bench.cases import coherence
from cxlkv.bench.result import Result

Size = coherence.Size
FULL = Size()
QUICK = Size(
    record_bytes=(16384,),
    memory_bytes=64 << 20,
    rounds=9,
    calls=400,
    call_rounds=7,
    pool_bytes=16 << 20,
    pool_rounds=5,
)


def run(result: Result, size: Size = FULL) -> None:
    """What `coherence` says of records, of two threads and of pools; without its table."""
    memory = coherence.at_page(size.memory_bytes)
    result.notes.append(f"publish: lines are written back by {loops.flush_name()}")
    for record_bytes in size.record_bytes:
        coherence.measure_records(result, memory, record_bytes, size)
    coherence.measure_pairs(result, size)
    coherence.measure_pools(result, size)
