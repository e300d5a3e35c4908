"""Says in words what a figure of a benchmark is, by its name and its unit."""

from __future__ import annotations

import re

from cxlkv.bench.registry import CASES
from cxlkv.bench.result import lower_is_better

# Of a case's figures, the first that fits; {1} is what the first brackets hold.
WORDS: dict[str, dict[str, str]] = {
    "latency": {
        r"idle_(.+)_ns": "a load that waits for the one before it, in {1}, nothing else running",
        r"loaded_(\d)r(\d)w_.+_ns": "a load, while other threads do {1}:{2} reads and writes",
        r"loaded_full_ns": "a load, while other threads read as fast as they go",
        r"loaded_(.+)_each_ns": "a load, while other threads read, {1} GB/s each at most",
        r"loaded_.+_speed": "what the other threads move meanwhile",
        r"node(\d+)_from_node(\d+)_ns": "a load in memory of node {1} from CPUs of node {2}",
        r"loaded_cost_to_idle": "how much longer a load takes under full load than alone",
    },
    "bandwidth": {
        r"read_node(\d+)_from_node(\d+)": "CPUs of node {2} read memory of node {1}",
        r"read_(\d+)t": "reads by {1} threads",
        r"write_(\d+)t": "plain stores by {1} threads",
        r"write_past_(\d+)t": "stores past the cache by {1} threads",
        r"mixed_(\d+)t": "two reads to a plain store, by {1} threads",
        r"mixed_past_(\d+)t": "two reads to a store past the cache, by {1} threads",
        r"(.+)_(\d+)t_to_1t": "{1} of {2} threads over that of one",
    },
    "pages": {
        r"alloc_free_(\d+)_ns": "a page taken and given back, {1} in a call",
        r"alloc_free_many_to_one": "one page a call over many a call",
    },
    "copy": {
        r"copy_past_(private|shm)_(.+)": "copies past the cache, blocks of {2}, {1} memory",
        r"copy_(private|shm)_(.+)": "plain copies, blocks of {2}, {1} memory",
        r"copy_past_to_copy_(private|shm)_(.+)": "past the cache over plain, {1}, {2}",
    },
    "gather": {
        r"memcpy_(.+)": "a loop of memcpy over the same pieces of {1}, to compare with",
        r"fetch_(.+)_to_memcpy": "fetch over that loop, pieces of {1}",
        r"fetch_(.+)": "scattered pieces of {1}, fetched from the pool",
    },
    "coherence": {
        r"(publish|acquire)(.*)_p99_us": "99 of 100 calls of {1}{2} are faster",
        r"bare_(.+)_us": "{1} where caches see each other, to compare with",
        r"publish_crc(.*)_us": "publish pages, CRCs computed{1}",
        r"publish(.*)_us": "publish pages{1}",
        r"acquire_crc(.*)_us": "find and pin what another host published, CRCs verified{1}",
        r"acquire(.*)_us": "find and pin what another host published{1}",
        r"unpin(.*)_us": "give it back{1}",
        r"(.+)_cost": "{1} with software coherence over without",
        r"(.+)_s_per_100k": "{1} of a pool with 100,000 pages",
        r"rpc_round_trip(.*)_us": "a message to another process and back",
        r"visible(.*)_us": "from publishing to when another host sees it",
    },
}
UNITS = {"bytes": "a size", "ratio": "a ratio", "": "a count"}
HEADLINES = {
    "latency": (r"idle_.+_ns", r"loaded_full_ns"),
    "bandwidth": (r"read_\d+t", r"write_past_\d+t", r"mixed_\d+t"),
}
"""What a summary says first; of several that fit, the last."""


def of_part(part: str) -> str:
    """What a case measures; "" where the part is none."""
    case = CASES.get(part)
    return case.about() if case is not None else ""


def of_figure(part: str, name: str, unit: str) -> str:
    for pattern, text in WORDS.get(part, {}).items():
        if found := re.fullmatch(pattern, name):
            groups = [_in_words(group) for group in found.groups()]
            return text.format("", *groups).replace(" 1 threads", " 1 thread")
    if unit == "ratio":
        return _of_ratio(name)
    tail = "99 of 100 take less; " if "p99" in name else ""
    lower = lower_is_better(unit)
    if lower is None:
        return tail + UNITS.get(unit, f"in {unit}")
    return tail + ("a time, lower is better" if lower else "a rate, higher is better")


def _in_words(name: str) -> str:
    return name.replace("_", " ").replace(" kib", " KiB").replace(" mib", " MiB")


def _of_ratio(name: str) -> str:
    words = _in_words(name)
    if name.endswith("_cost"):
        return f"{words.removesuffix(' cost')} over without: lower is better"
    if "_cost" in name:
        return f"{words}: lower is better"
    if "speedup" in name:
        return f"{words}: how many times as fast"
    first, between, second = words.partition(" to ")
    return f"{first} over {second}" if between else f"{words}, a ratio"


def of_unit(unit: str) -> str:
    """Which way is good."""
    if unit == "ratio":
        return "Ratios: the line stands at 1, where both sides are equal."
    lower = lower_is_better(unit)
    if lower is None:
        return f"In {unit}." if unit else "Counts."
    return f"In {unit}: {'lower' if lower else 'higher'} is better."
