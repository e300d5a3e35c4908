"""Traces of requests: read from a file in Mooncake's format, or generated, of four known shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from cxlkv.errors import BadArgumentError

PAGES_MAX = 1 << 20
"""Pages of one request: more is a broken line, not a prompt."""


@dataclass(frozen=True)
class Request:
    """Names of a prompt's pages in order, chained: equal names have equal prefixes. tokens: of the
    prompt, answer: of what came of it; 0: not known."""

    time_s: float
    pages: Sequence[int]
    tokens: int = 0
    answer: int = 0


def read(path: Path) -> list[Request]:
    """Requests of a file with a JSON object a line: {"timestamp": ms, "hash_ids": [...], ...}.

    The format is that of Mooncake's traces (kvcache-ai/Mooncake, FAST'25 release). Raises
    BadArgumentError with the line that is not as it should be: also when time runs backwards, or
    one name follows two others, so that names are no chained hashes.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgumentError(f"{path}: cannot be read as a trace: {error}") from None
    requests: list[Request] = []
    before: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = parse(line)
            follow(request.pages, before)
            if requests and request.time_s < requests[-1].time_s:
                raise ValueError("its timestamp is before that of the line above")
        except (ValueError, TypeError, KeyError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise BadArgumentError(f"{path}, line {number}: {what}") from None
        requests.append(request)
    if not requests:
        raise BadArgumentError(f"{path}: no request in it")
    return requests


def parse(line: str) -> Request:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    time_ms, pages = fields["timestamp"], fields["hash_ids"]
    if (
        isinstance(time_ms, bool)
        or not isinstance(time_ms, (int, float))
        or not 0 <= time_ms < 1e15
    ):
        raise ValueError(f"timestamp {time_ms!r}: milliseconds, 0 or more")
    if not isinstance(pages, list) or len(pages) > PAGES_MAX:
        raise ValueError("hash_ids is not a list of page names")
    for page in pages:
        if isinstance(page, bool) or not isinstance(page, int) or not 0 <= page < 1 << 64:
            raise ValueError(f"page name {page!r}: a whole number below 2**64")
    if len(set(pages)) < len(pages):
        raise ValueError("a page name twice in one prompt")
    lengths = [fields.get(name, 0) for name in ("input_length", "output_length")]
    if not all(type(length) is int and 0 <= length < 1 << 32 for length in lengths):
        raise ValueError(f"input_length, output_length {lengths}: whole numbers, 0 or more")
    return Request(time_ms / 1000, pages, *lengths)


def follow(pages: Sequence[int], before: dict[int, int]) -> None:
    """Each name has one predecessor, -1 when it begins a prompt."""
    last = -1
    for page in pages:
        if before.setdefault(page, last) != last:
            raise ValueError(
                f"page {page} follows {last}, and elsewhere {before[page]}: the names "
                "are no chained hashes"
            )
        last = page


def distinct(requests: Sequence[Request]) -> int:
    return len({page for request in requests for page in request.pages})


def documents(chosen: Sequence[int], pages: int, every_s: float) -> list[Request]:
    """One request for each chosen document, of so many pages each."""
    return [
        Request(every_s * i, range(document * pages, (document + 1) * pages))
        for i, document in enumerate(chosen)
    ]


def loops(seed: int, requests: int = 20_000) -> list[Request]:
    """1,500 documents, again and again in the same order."""
    shift = int(np.random.default_rng(seed).integers(1500))
    return documents([(i + shift) % 1500 for i in range(requests)], 12, 0.3)


def zipf(seed: int, requests: int = 20_000) -> list[Request]:
    """4,000 documents of unequal fame, asked for independently."""
    random = np.random.default_rng(seed)
    fame = 1 / np.arange(1, 4001) ** 0.9
    chosen = random.permutation(4000)[random.choice(4000, requests, p=fame / fame.sum())]
    return documents(chosen.tolist(), 12, 0.3)


def scans(seed: int, requests: int = 20_000) -> list[Request]:
    """1,200 documents of unequal fame; now and then some hundred in a row that never come back."""
    random = np.random.default_rng(seed)
    fame = 1 / np.arange(1, 1201) ** 0.8
    chosen: list[int] = []
    fresh = 1200
    while len(chosen) < requests:
        if random.random() < 0.01:
            burst = int(random.integers(50, 300))
            chosen += range(fresh, fresh + burst)
            fresh += burst
        chosen.append(int(random.choice(1200, p=fame / fame.sum())))
    return documents(chosen[:requests], 12, 0.3)


def agents(seed: int, requests: int = 12_000) -> list[Request]:
    """Some sixty agents of twenty kinds at a time: each has its kind's instructions, then its own
    steps, one a request; now and then one starts another from where it is."""
    random = np.random.default_rng(seed)
    fame = 1 / np.arange(1, 21)
    fresh, made = 10_000, []
    live: list[tuple[list[int], int]] = []  # pages so far, steps to go
    for i in range(requests):
        if len(live) < 60 or random.random() < 0.12:
            kind = int(random.choice(20, p=fame / fame.sum()))
            own = int(random.integers(2, 10))
            pages = [*range(100 * kind, 100 * kind + 6), *range(fresh, fresh + own)]
            which = len(live)
            live.append((pages, int(random.integers(3, 30))))
        else:
            which = max(0, len(live) - int(random.geometric(0.03)))
            own = int(random.integers(1, 4))
            pages, steps = live[which]
            pages = [*pages, *range(fresh, fresh + own)]
            live[which] = (pages, steps)
            if random.random() < 0.1:
                live.append((pages, int(random.integers(2, 8))))
        fresh += own
        made.append(Request(0.3 * i, pages))
        pages, steps = live[which]
        live[which] = (pages, steps - 1)
        if steps <= 1:
            del live[which]
    return made


class Family(Protocol):
    """Traces that differ in their seed and number of requests."""

    def __call__(self, seed: int, requests: int = ...) -> list[Request]: ...


FAMILIES: dict[str, Family] = {
    "loops": loops,
    "zipf": zipf,
    "scans": scans,
    "agents": agents,
}
