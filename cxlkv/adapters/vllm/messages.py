"""Plain data that vLLM's scheduler and workers exchange in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cxlkv.ndp.engine import Budget
from cxlkv.prefix import HASH_BYTES, PageKeys

KEY_BYTES = HASH_BYTES


def unpacked(keys: bytes, block_tokens: int) -> PageKeys:
    """Keys of blocks, as they travel: joined."""
    rows = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
    return PageKeys(rows, block_tokens)


FAR, COLD = TIERS = ("far", "cold")
"""Where hits come from: the pool alone, or what is below it, too."""


@dataclass(frozen=True)
class Options:
    """What a request asked for. budget: pages that a decode step may attend to; None is all. tier:
    from how far down its hit may come. ttl_s: so long its prefix stays in the pool after its end;
    0: what was kept of it before is let go, None: that stays for its time. priority: of what the
    pool has of its text when it ends, as pool.admin.prioritize() takes it; 0: as it is.
    """

    budget: Budget | None = None
    save: bool = True
    tier: str = COLD
    ttl_s: float | None = None
    priority: int = 0

    @property
    def selected(self) -> bool:
        """Whether decode steps attend to chosen pages only."""
        return self.budget is not None


@dataclass
class Started:
    """A request that the workers have not seen, or not since it was preempted.

    blocks: of the engine, by group (groups.py), in the order of the text; keys: KEY_BYTES for each
    complete unit of the text that is known so far, joined. handles: of the hit in each shard's
    pool (None: no hit) of `tokens` tokens; `local` of them the engine had itself, the last
    `brought` the scheduler brought back from below the pool. tail: the key of the hit's last block,
    where it is not a whole one. In this step the tokens from `computed` on are computed,
    `scheduled` of them; 0 while the hit is loaded beside the steps (asynchronously), and then the
    request comes again as Continued.
    elsewhere: another connector of the engine loads tokens before these. audit: the pool has the
    block behind the hit, which is to be compared with what the engine computes. trace: the headers
    that came with the request, of a hit.
    """

    request: str
    blocks: list[list[int]]
    keys: bytes = b""
    handles: list[bytes] | None = None
    tokens: int = 0
    brought: int = 0
    local: int = 0
    tail: bytes = b""
    computed: int = 0
    scheduled: int = 0
    elsewhere: bool = False
    audit: bool = False
    trace: dict[str, str] | None = None
    options: Options = field(default_factory=Options)

    def brought_keys(self, block_tokens: int) -> PageKeys:
        """Keys of blocks that the scheduler brought back."""
        keys = unpacked(self.keys, block_tokens)
        return keys[(self.tokens - self.brought) // block_tokens : self.tokens // block_tokens]


@dataclass
class Continued:
    """A request that goes on: blocks and keys are those that are new since the last message."""

    request: str
    blocks: list[list[int]]
    keys: bytes
    computed: int
    scheduled: int


@dataclass(frozen=True)
class Left:
    """What a request that has ended leaves in the engine's blocks, to be saved before these are
    written to again: whole ones, whose `keys` the workers were not told yet, and behind them the
    tail of a text of `tokens` tokens, under a key of its own (b"": there is none)."""

    request: str
    tokens: int
    keys: bytes = b""
    tail: bytes = b""


@dataclass
class Message:
    """One step. ended (finished, aborted, preempted) is to be heard first, and before it what is
    left: a request that was preempted may start again in the same step. loaded: hits that all
    ranks have loaded whole, and another connector's. unshared: requests of which no more is saved.
    broken: those whose rows of the last step some rank could not compute. weights: of which keys
    and hits are, a state of LoadedWeights for each rank; none: those of the start. look: whether
    weights are to be looked at. withdrawn: namespaces that the workers are to mark in their
    pools. states: of requests, those that are in the engine's blocks when the step has ended, as
    offered() has them."""

    started: list[Started] = field(default_factory=list)
    continued: list[Continued] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    unshared: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    weights: tuple[bytes, ...] = ()
    look: bool = False
    withdrawn: list[bytes] = field(default_factory=list)
    states: dict[str, list[tuple[int, dict[int, int]]]] = field(default_factory=dict)


def offered(entries: Iterable[tuple[int, int, int]], unit: int) -> list[tuple[int, dict[int, int]]]:
    """What vLLM offers of a request's states in a step, (group, block, tokens): by tokens, that end
    a unit, the block of each group with the state behind them when the step has ended."""
    found: dict[int, dict[int, int]] = {}
    for group, block, tokens in entries:
        if tokens % unit == 0:
            found.setdefault(tokens, {})[group] = block
    return sorted(found.items())


@dataclass(frozen=True)
class Span:
    """Blocks [first, last) of a request's text."""

    request: str
    first: int
    last: int


@dataclass
class Report:
    """What a worker did in a step: requests that it heard had ended, whose pages it has let go of;
    those whose hits it has loaded whole, or has not; those that another connector loaded in it;
    those whose rows attention in the pool could not compute;
    blocks that its pool has now, and tokens of tails by request; how many hits it has audited;
    failures by kind, as PoolRequests counts them; the state of its weights by rank, where it was
    asked or is another than the message's; whether it saves, or leaves that to another rank that
    has the same."""

    ended: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    stored: list[Span] = field(default_factory=list)
    tails: dict[str, int] = field(default_factory=dict)
    audited: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    weights: dict[int, bytes] = field(default_factory=dict)
    saves: bool = True

    def __bool__(self) -> bool:
        return self != Report()
