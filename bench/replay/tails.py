"""What tails save on a trace of chats: tokens of hits with and without them, by block size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.replay.case import requests_of
from cxlkv.bench.replay.traces import Request
from cxlkv.bench.result import Result
from cxlkv.errors import BadArgumentError

NAME_TOKENS = 512
"""That a name of a trace stands for."""
BLOCKS = (16, 128)
SHARES = {"unlimited": None, "a quarter": 0.25}
"""Shares of all texts' pages that fit into the pool."""


def command(options: Options, say: Say) -> Shown:
    requests = requests_of(options)
    result = Result("tails")
    result.notes.append(f"trace: {Path(options.trace or '').name}, {len(requests)} requests")
    run(result, requests, say)
    return Shown(result)


def run(result: Result, requests: Sequence[Request], say: Say = lambda name: None) -> None:
    """By block and pool: hit, tokens without tails; gain, tokens more with them; tails, requests
    that one was found for. Ratios: gain, of the tokens hit; less, of those that next turns compute
    without tails. Raises BadArgumentError for a trace without lengths."""
    before = parents(requests)
    turns = sum(one >= 0 for one in before)
    result.measure("turns", [turns], "requests")
    for block in BLOCKS:
        capacity = replay(requests, before, block, None, tails=False).pages
        for name, share in SHARES.items():
            room = None if share is None else int(share * capacity)
            at = f"{block}_{name.replace(' ', '_')}"
            say(f"blocks of {block}: {name}")
            without = replay(requests, before, block, room, tails=False)
            found = replay(requests, before, block, room, tails=True)
            gain = found.hit - without.hit
            result.measure(f"hit_{at}", [without.hit], "tokens")
            result.measure(f"gain_{at}", [gain], "tokens")
            result.measure(f"tails_{at}", [found.by_tails], "requests")
            least = found.by_tails if room is None else -without.hit
            result.checks[f"gain_{at}_is_what_tails_can"] = least <= gain <= block * found.by_tails
            result.ratios[f"gain_{at}"] = gain / max(without.hit, 1)
            result.ratios[f"less_{at}"] = gain / max(without.computed, 1)
    result.notes += [
        f"{turns} requests are taken for next turns: the trace names blocks of {NAME_TOKENS} "
        "tokens only. One that begins with the last whole block that an earlier request brought, "
        "and is longer than that one with its answer, is taken to go on behind that answer",
        "what is shared below a named block is not known otherwise, and no hit here",
        "the least recently used page goes first, of a text the last; a tail takes a page",
    ]


def parents(requests: Sequence[Request]) -> list[int]:
    """For each request: the one whose text it continues, or -1."""
    if not any(request.tokens for request in requests):
        raise BadArgumentError("tails needs a trace of a file, with input_length, output_length")
    found: list[int] = []
    last: dict[int, int] = {}  # by the last whole block of its prompt, if it was new with it
    seen: set[int] = set()
    for number, request in enumerate(requests):
        whole = request.pages[: request.tokens // NAME_TOKENS]
        parent = next((last[name] for name in reversed(whole) if name in last), -1)
        if parent >= 0 and end_of(requests[parent]) >= request.tokens:
            parent = -1
        found.append(parent)
        if whole and (whole[-1] not in seen or (parent >= 0 and last.get(whole[-1]) == parent)):
            last[whole[-1]] = number
        seen.update(whole)
    return found


def end_of(request: Request) -> int:
    """Tokens of prompt and answer that have K and V: all but the last."""
    return request.tokens + max(request.answer, 1) - 1


@dataclass
class Counts:
    """hit: tokens; computed: of prompts of next turns; pages: that the texts have; by_tails:
    requests that were hit by one."""

    hit: int = 0
    computed: int = 0
    pages: int = 0
    by_tails: int = 0


@dataclass
class Texts:
    """Names of the pages of prompts with their answers, in blocks of so many tokens."""

    block: int
    count: int = 0
    of: list[list[int]] = field(default_factory=list)
    named: dict[int, list[int]] = field(default_factory=dict)

    def add(self, request: Request, parent: int) -> list[int]:
        """A page that the text before has is that one; else of a named block's, or a new one."""
        known = self.of[parent] if parent >= 0 else []
        per, found = NAME_TOKENS // self.block, list[int]()
        for name in request.pages[: request.tokens // NAME_TOKENS]:
            if name not in self.named:
                self.named[name] = self._more(known, len(found), len(found) + per)
            found += self.named[name]
        found += self._more(known, len(found), end_of(request) // self.block)
        self.of.append(found)
        return found

    def _more(self, known: list[int], first: int, end: int) -> list[int]:
        some = known[first:end]
        made = range(self.count, self.count + max(0, end - first - len(some)))
        self.count += len(made)
        return [*some, *made]


def replay(
    requests: Sequence[Request],
    before: Sequence[int],
    block: int,
    capacity: int | None,
    *,
    tails: bool,
) -> Counts:
    """capacity: in pages; None: no end."""
    texts, counts = Texts(block), Counts()
    there: OrderedDict[int, None] = OrderedDict()  # a tail by -1 - its request's number
    for number, (request, parent) in enumerate(zip(requests, before, strict=True)):
        pages = texts.add(request, parent)
        most = (request.tokens - 1) // block
        hits = sum(1 for _ in takewhile(there.__contains__, pages[:most]))
        hit, used = hits * block, list[int]()
        # A prompt is longer than the text before it: its last token is left to the engine.
        if parent >= 0 and -1 - parent in there and hits == end_of(requests[parent]) // block:
            hit, used = end_of(requests[parent]), [-1 - parent]
            counts.by_tails += 1
        counts.hit += hit
        counts.computed += (request.tokens - hit) * (parent >= 0)
        if tails and end_of(request) % block:
            used.append(-1 - number)
        for page in [*used, *reversed(pages)]:
            there[page] = None
            there.move_to_end(page)
        while capacity is not None and len(there) > capacity:
            there.popitem(last=False)
    counts.pages = texts.count
    return counts
