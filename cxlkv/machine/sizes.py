"""Sizes a pool before it is made: the capacity for so many tokens, and the tokens of a capacity.

The core is asked what geometry a pool would have, by the code that makes pools, so that what is
said here is what create() does.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from cxlkv import _core
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout
from cxlkv.numbers import is_whole

CAPACITY_STEP_BYTES = 1 << 20  # capacities are told in whole MiB
CHECKPOINTS = 2  # of a request: the one that it goes on from, and the one that it leaves
REWIND_TOKENS = 128  # what a window keeps beside itself, to be rewound: adapters.transformers
_TOKENS = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([kKmMgG]?)i?\s*", re.ASCII)
_MULTIPLES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Plan:
    """A pool of `layout` and of `capacity_bytes`, as create() would make it."""

    layout: KVLayout
    capacity_bytes: int
    geometry: dict[str, int]

    @property
    def pages(self) -> int:
        return self.geometry["page_count"]

    @property
    def state_pages(self) -> int:
        """Of a state checkpoint; 0: the layout has no states."""
        return _core.planned_state_pages(self.layout, self.geometry)

    @property
    def record_bytes(self) -> int:
        """Bytes of a page: keys, values, digests, sketches, checksums, headers."""
        return self.geometry["record_bytes"]

    def tokens(self, requests: int = 1) -> int:
        """The most tokens that each of so many requests may have at once."""
        return tokens_in(self.layout, self.geometry, requests)


def plan(
    layout: KVLayout,
    capacity_bytes: int,
    *,
    checksum: bool = True,
    sketch: bool | None = None,
    sharing: tuple[int, int, int] = (0, 0, 1),
) -> Plan:
    """What a pool of this capacity holds; sharing: (kind, durable, hosts) as create() parses it;
    sketch: as create() takes it.

    Raises GeometryError for a capacity that holds no page.
    """
    found = _core.pool_plan(layout, checksum, layout.sketches(sketch), sharing, capacity_bytes)
    return Plan(layout, capacity_bytes, found)


def plan_for(
    layout: KVLayout,
    tokens: int,
    requests: int = 1,
    *,
    checksum: bool = True,
    sketch: bool | None = None,
    sharing: tuple[int, int, int] = (0, 0, 1),
) -> Plan:
    """The smallest pool, in whole MiB, for `requests` requests of so many tokens each."""
    if layout.object_bytes is not None:
        raise BadArgumentError("a pool of objects holds no tokens: give its capacity")
    if not is_whole(tokens, 1) or not is_whole(requests, 1):
        raise BadArgumentError(f"{tokens} tokens of {requests} requests: 1 or more of each")

    def at(steps: int) -> Plan | None:
        size = steps * CAPACITY_STEP_BYTES
        try:
            made = plan(layout, size, checksum=checksum, sketch=sketch, sharing=sharing)
        except ValueError:  # no page fits
            return None
        return made if made.pages >= pages_for(layout, made.geometry, tokens, requests) else None

    least, most = 0, 1
    while (found := at(most)) is None:
        least, most = most, most * 2
        if most * CAPACITY_STEP_BYTES >= 1 << 62:
            raise BadArgumentError(f"{tokens} tokens of {requests} requests: more than any pool")
    while most - least > 1:
        middle = (least + most) // 2
        smaller = at(middle)
        if smaller is None:
            least = middle
        else:
            most, found = middle, smaller
    return found


def pages_for(layout: KVLayout, geometry: dict[str, int], tokens: int, requests: int = 1) -> int:
    """Pages that so many requests of so many tokens hold at once.

    Layers with a window give back what lies behind it; what they keep is the window, what may be
    rewound, and the pages in which both begin and end. Of a model with states each has CHECKPOINTS.
    """
    states = _checkpoint_pages(layout, geometry)
    windows = _windows_of_parts(layout, geometry)
    return requests * (states + _text_pages(layout, windows, tokens))


def _checkpoint_pages(layout: KVLayout, geometry: dict[str, int]) -> int:
    """Of a request: each checkpoint, and the copy of the tail before it in each part."""
    states = _core.planned_state_pages(layout, geometry)
    return CHECKPOINTS * (states + geometry["part_count"]) if states else 0


def _text_pages(layout: KVLayout, windows: Collection[int | None], tokens: int) -> int:
    return sum(
        -(-seen // layout.page_tokens) + (seen < tokens)
        for window in windows
        for seen in [tokens if window is None else min(tokens, window + REWIND_TOKENS)]
    )


def tokens_in(layout: KVLayout, geometry: dict[str, int], requests: int = 1) -> int:
    """The most tokens that each of `requests` requests may have in a pool; 0: of objects."""
    if layout.object_bytes is not None:
        return 0
    least, most = 0, geometry["page_count"] * layout.page_tokens + 1
    states, windows = _checkpoint_pages(layout, geometry), _windows_of_parts(layout, geometry)
    while most - least > 1:
        middle = (least + most) // 2
        needed = requests * (states + _text_pages(layout, windows, middle))
        if needed <= geometry["page_count"]:
            least = middle
        else:
            most = middle
    return least


def _windows_of_parts(layout: KVLayout, geometry: dict[str, int]) -> Collection[int | None]:
    """A part's layers share a page, and have one window."""
    if len(layout.groups) == 1:
        return (layout.groups[0].window,)
    places = _core.layer_places(layout, geometry)
    return {one.part: layout.windows[layer] for layer, one in enumerate(places)}.values()


# ---- numbers of tokens ----


def parse_tokens(text: str | int) -> int:
    """Parse "1M", "128K", "32k" or "5000": K is 1024, M is 1024 K and G 1024 M, as for contexts."""
    match = _TOKENS.fullmatch(str(text))
    count = Fraction(match[1]) * _MULTIPLES[match[2].lower()] if match else Fraction(0)
    if count.denominator != 1 or count < 1:
        raise BadArgumentError(f"{text!r} is not a number of tokens: write it like 5000, 32K or 1M")
    return int(count)
