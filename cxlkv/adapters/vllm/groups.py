"""Groups of the engine's layers: one table names the blocks of all layers of a group.

    group             blocks of a text of n tokens, when the engine computes the next ones
    full attention    0 1 2 3 4 5 6 7
    window, chunks    . . . . . 5 6 7       those before the window are other requests' by now
    states            . . . . . . . 7       each has the state behind its last token

All groups' blocks are in one pool with one kind of page. A page has as many tokens as divide all
groups' blocks; keys name units, which are whole blocks of each group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Protocol

from cxlkv.adapters.vllm.latents import are_latents, is_indexer
from cxlkv.layout import KVLayout, LayerGroup, States, dtype_name

PAGE_TOKENS_MAX = 1024
BYTE_PAIRS = "bfloat16"
"""As which a pool has an indexer's bytes: it has no numbers of one byte, and counts with none."""


@dataclass(frozen=True)
class BlockGroup:
    """window: tokens that a token sees, itself among them; None: all before it. chunked: it sees
    those of its own chunk of so many. state: layers have a state instead of K and V (states.py)."""

    block_tokens: int
    window: int | None = None
    chunked: bool = False
    state: bool = False

    def first_token(self, tokens: int) -> int:
        """The first of a text that token number `tokens` sees, or one behind it."""
        if self.state:
            return max(0, tokens - 1)
        if self.window is None:
            return 0
        if self.chunked:
            return tokens // self.window * self.window
        return max(0, tokens - self.window + 1)

    def first_block(self, tokens: int) -> int:
        """The first that the engine still has when it computes token number `tokens`."""
        return self.first_token(tokens) // self.block_tokens

    def pool_window(self, page_tokens: int) -> int | None:
        """The window of these layers in the pool, where whatever a token sees is there in whole
        blocks of the engine, as these may be packed in any way."""
        return None if self.window is None else self.window + self.block_tokens - page_tokens


def unit_of(groups: Sequence[BlockGroup]) -> int:
    """Tokens of the shortest text that is whole blocks of all groups."""
    return lcm(*(group.block_tokens for group in groups))


def page_tokens_of(groups: Sequence[BlockGroup]) -> int:
    """A share of all groups' blocks that a page may have; vLLM makes blocks as long as a state."""
    size = gcd(*(group.block_tokens for group in groups))
    return next(one for one in range(min(size, PAGE_TOKENS_MAX), 0, -1) if size % one == 0)


def are_whole(groups: Sequence[BlockGroup]) -> bool:
    """Whether the engine has all blocks of a text, in one group: then a hit may end anywhere."""
    return len(groups) == 1 and groups[0].window is None


class LayerSpec(Protocol):
    """What the engine says of a layer's K and V."""

    num_kv_heads: int
    head_size: int


def layout_of(
    layers: Iterable[tuple[int, LayerSpec]],
    groups: Sequence[BlockGroup],
    dtype: object,
    shard: tuple[int, int, int, int],
    states: States | None = None,
    split: int = 1,
) -> KVLayout:
    """The layout of a pool for these layers, in order, each with its group's number, and for states
    of others; split: so many pools share their heads. Layers of one shape and window are one group
    there, whatever groups the engine makes of them."""
    size = page_tokens_of(groups)
    made = [
        LayerGroup(
            layers=1,
            kv_heads=spec.num_kv_heads // split,
            head_dim=spec.head_size // (2 if is_indexer(spec) else 1),
            dtype=BYTE_PAIRS if is_indexer(spec) else dtype_name(dtype),
            values="key_prefix" if are_latents([spec]) else "own",
            window=groups[number].pool_window(size),
        )
        for number, spec in layers
    ]
    kinds = sorted(set(made), key=lambda one: (one.window is not None, one.window or 0, repr(one)))
    several = [replace(kind, layers=made.count(kind)) for kind in kinds]
    order = [kinds.index(one) for one in made]
    return KVLayout.of(several, order, page_tokens=size, shard=shard, states=states)
