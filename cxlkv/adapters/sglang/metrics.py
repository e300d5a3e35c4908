"""Counters of SGLang's pages, and what each kind of failure means."""

from __future__ import annotations

PREFIX = "sglang:cxlkv_"
"""Prefix of our metrics beside SGLang's own."""

COUNTS = {
    "asked_pages": "Pages that the engine asked for, whether they are there",
    "hit_pages": "Of them, those that were there, from the first on",
    "loaded_pages": "Pages copied from the pool to the engine",
    "loaded_bytes": "Bytes copied from the pool to the engine",
    "stored_pages": "Pages that are new in the pool",
    "stored_bytes": "Bytes that are new in the pool",
}
"""What is counted, by name, with what it means; side pools' pages, too."""

KINDS = {
    "corrupt": "a page in the pool is damaged: it is computed again, and stored again",
    "mismatch": "a page in the pool has another size than the engine's: it is computed again, and "
    "stored again",
    "full": "the pool has no room, and nothing in it can go, so pages are not stored: give a "
    "larger capacity",
    "quota": "the tenant may have no more, and what it has is in use, so pages are not stored: "
    "give a larger quota",
    "host": "this host was declared off, or another machine has its number: pages are misses, and "
    "not stored, until the pool is open again",
    "weights": "the engine's weights have changed, and its cache was not flushed since: pages are "
    "misses, and not stored, until /flush_cache",
    "pool": "the pool could not be used, so this was a miss, or was not stored",
}
"""Failures, each with what it means."""
