"""Hit tokens for each state checkpoint of a trace of chats, by where checkpoints are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from cxlkv.adapters.common.checkpoints import positions
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.replay.case import requests_of
from cxlkv.bench.replay.tails import NAME_TOKENS, end_of, parents
from cxlkv.bench.replay.traces import Request
from cxlkv.bench.result import Result

BLOCK = 16
WAYS = ("blocks", "prompts", "ours")
"""At every block of 16 tokens; at the ends of prompts; where texts parted, as
adapters.common.checkpoints says, and at the ends of turns, instead of their prompts'."""


@dataclass
class Counts:
    """Of one way: tokens that were hit, and checkpoints that were stored."""

    hit: int = 0
    stored: int = 0
    blocks: set[int] = field(default_factory=set)  # names behind which one lies
    ends: dict[int, list[int]] = field(default_factory=dict)  # by request, within its text


def command(options: Options, say: Say) -> Shown:
    requests = requests_of(options)
    result = Result("checkpoints")
    result.notes.append(f"trace: {Path(options.trace or '').name}, {len(requests)} requests")
    run(result, requests, say)
    return Shown(result)


def run(result: Result, requests: Sequence[Request], say: Say = lambda name: None) -> None:
    """By way: hit, tokens; stored, checkpoints. Ratios: tokens for each checkpoint over those of
    blocks and of prompts, and hit over what blocks hit. Raises BadArgumentError for a trace without
    lengths."""
    before = parents(requests)
    found: dict[str, Counts] = {}
    for way in WAYS:
        say(f"checkpoints: {way}")
        found[way] = replay(requests, before, way)
        result.measure(f"hit_{way}", [found[way].hit], "tokens")
        result.measure(f"stored_{way}", [found[way].stored], "checkpoints")
    ours = found["ours"]
    for way in ("blocks", "prompts"):
        other = found[way]
        worth = ours.hit * max(other.stored, 1) / max(ours.stored * other.hit, 1)
        result.ratios[f"tokens_a_checkpoint_over_{way}"] = worth
        result.ratios[f"hit_over_{way}"] = ours.hit / max(other.hit, 1)
    result.checks["blocks_hit_most"] = found["blocks"].hit >= ours.hit
    result.notes += [
        "nothing is evicted: tokens for each checkpoint, and so for each byte of states",
        "which text a request goes on from is taken as in the case tails",
    ]


def replay(requests: Sequence[Request], before: Sequence[int], way: str) -> Counts:
    counts, seen = Counts(), set[int]()
    for number, (request, parent) in enumerate(zip(requests, before, strict=True)):
        names = request.pages[: (request.tokens - 1) // NAME_TOKENS]
        known = len(list(takewhile(seen.__contains__, names))) * NAME_TOKENS
        if parent >= 0:
            known = max(known, end_of(requests[parent]) // BLOCK * BLOCK)
        hit = _hit(counts, names, parent, request.tokens - 1)
        if way == "blocks":
            hit = known
            counts.stored += (end_of(request) - known) // BLOCK
        else:
            taken = [request.tokens - 1]
            if way == "ours":
                taken = [*positions(request.tokens, hit, known)[:-1], end_of(request)]
            _store(counts, number, names, taken)
        counts.hit += hit
        seen.update(request.pages[: request.tokens // NAME_TOKENS])
    return counts


def _hit(counts: Counts, names: Sequence[int], parent: int, most: int) -> int:
    """Tokens up to the last checkpoint."""
    there = [place for place, name in enumerate(names, 1) if name in counts.blocks]
    ends = [end for end in counts.ends.get(parent, ()) if end <= most]
    return max([place * NAME_TOKENS for place in there] + ends, default=0)


def _store(counts: Counts, number: int, names: Sequence[int], taken: Sequence[int]) -> None:
    """Those at the end of a named block serve all texts that have it, others the next turns."""
    places = [one // NAME_TOKENS for one in taken if one % NAME_TOKENS == 0]
    new = {names[place - 1] for place in places if 0 < place <= len(names)} - counts.blocks
    counts.ends[number] = [
        one for one in taken if one % NAME_TOKENS or one // NAME_TOKENS > len(names)
    ]
    counts.blocks |= new
    counts.stored += len(new) + len(counts.ends[number])
