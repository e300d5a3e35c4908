"""Counters of LMCache's chunks, and what each kind of failure means."""

from __future__ import annotations

PREFIX = "lmcache:cxlkv_"
"""Prefix of our metrics beside LMCache's own."""

COUNTS = {
    "asked_objects": "Objects that LMCache wanted to read; with layerwise, one for each layer",
    "hit_objects": "Of them, those that the pool had whole",
    "read_bytes": "Bytes in the pool of the objects that were read",
    "stored_objects": "Objects that are new in the pool",
    "stored_bytes": "Bytes in the pool of the objects that are new there",
    "copied_objects": "Of both, those that were copied to or from memory of LMCache's own",
}
"""What is counted, by name, with what it means."""

KINDS = {
    "corrupt": "an object is damaged: it is computed again, and a good one stored in its place",
    "mismatch": "an object has another shape, dtype or format than LMCache wants: it is computed "
    "again, and a right one stored in its place",
    "changed": "LMCache wrote to memory that was published: the object is forgotten",
    "full": "the pool has no room for more, and nothing in it can go: give a larger "
    "cxlkv.capacity, or let fewer requests run at once",
    "large": "an object is larger than the pool's pages are, which the first engine chose: remove "
    "the pool (cxlkv pool remove), or give another cxlkv.where",
    "memory": "LMCache's own memory has no room for an object that is decoded, which is a miss: "
    "give a larger max_local_cpu_size",
    "unsupported": "an object is not one of plain tensors in the host's memory, and is not stored",
    "bad_options": "what a request asked for makes no sense, and is passed over",
    "quota": "the tenant may have no more, and what it has is in use, so objects are not stored: "
    "give a larger cxlkv.quota",
    "host": "this host was declared off, or another machine has its number: objects are misses, "
    "and not stored, until the pool is open again",
    "weights": "the engine's weights have changed, and LMCache hears of no reset of its cache: "
    "objects are misses, and not stored, until the engine starts anew",
    "pool": "the pool cannot be used: what was asked for is a miss",
}
"""Failures, each with what it means."""
