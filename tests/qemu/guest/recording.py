"""What vLLM asked of our scheduler's side and decided in its steps, request by request.

tests/vllm/record.py writes recording.json with a real engine; guests, in which no engine runs, play
it back. It has two runs of the same requests, three turns of each conversation. `served`: the pool
is empty, and later turns begin in the engine's own cache. `found`: that cache is emptied before
each turn, so that all comes from the pool.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import cast

from cxlkv.adapters.vllm.scheduler import Scheduled, Step
from cxlkv.layout import KVLayout

FILE = Path(__file__).with_name("recording.json")


@dataclass
class Matched:
    """Asked about a text of so many tokens: the engine has `local` of them, the pools had `found`
    more."""

    request: str
    tokens: int
    local: int
    found: int


@dataclass
class Allocated:
    """The request got these blocks; `external` tokens are to be loaded."""

    request: str
    blocks: list[int]
    external: int


@dataclass
class Stepped:
    """A step. tokens: of the texts of its requests, the fresh ones first."""

    fresh: list[Scheduled]
    going: list[Scheduled]
    ended: list[str]
    tokens: list[int]

    def step(self) -> Step:
        return Step(list(self.fresh), list(self.going), set(self.ended))


@dataclass
class Ended:
    """Its text is complete."""

    request: str


@dataclass
class Emptied:
    """The engine forgot its own cache."""


Event = Matched | Allocated | Stepped | Ended | Emptied
KINDS = {kind.__name__: kind for kind in (Matched, Allocated, Stepped, Ended, Emptied)}


@dataclass
class Recording:
    """texts: of each request the hashes of all blocks that it had at its end. engine_blocks: how
    many the engine had."""

    engine: str
    layout: KVLayout
    engine_blocks: int
    texts: dict[str, list[bytes]]
    served: list[Event]
    found: list[Event]

    @property
    def block_tokens(self) -> int:
        return self.layout.page_tokens


SHAPE = ("layers", "kv_heads", "head_dim", "page_tokens", "dtype")


def write(recording: Recording, path: Path = FILE) -> None:
    """A line for each hash, text and event."""
    hashes = list(dict.fromkeys(one for text in recording.texts.values() for one in text))
    number = {one: index for index, one in enumerate(hashes)}
    parts: dict[str, object] = {
        "engine": recording.engine,
        "layout": {name: getattr(recording.layout, name) for name in SHAPE},
        "engine_blocks": recording.engine_blocks,
        "hashes": [one.hex() for one in hashes],
        "texts": {name: [number[one] for one in text] for name, text in recording.texts.items()},
        "served": [_row(event) for event in recording.served],
        "found": [_row(event) for event in recording.found],
    }
    path.write_text("{\n" + ",\n".join(_lines(*part) for part in parts.items()) + "\n}\n")


def _lines(name: str, part: object) -> str:
    dense = json.JSONEncoder(separators=(",", ":"))
    if isinstance(part, list) and part:
        return f'"{name}": [\n' + ",\n".join(dense.encode(one) for one in part) + "\n]"
    return f'"{name}": {dense.encode(part)}'


def _row(event: Event) -> list[object]:
    if isinstance(event, Stepped):
        event = replace(event, fresh=_flat(event.fresh), going=_flat(event.going))
    return [type(event).__name__, *astuple(event)]


def read(path: Path = FILE) -> Recording:
    parts = json.loads(path.read_text())
    hashes = [bytes.fromhex(one) for one in parts["hashes"]]
    return Recording(
        engine=parts["engine"],
        layout=KVLayout(**parts["layout"]),
        engine_blocks=parts["engine_blocks"],
        texts={name: [hashes[one] for one in text] for name, text in parts["texts"].items()},
        served=[_event(row) for row in parts["served"]],
        found=[_event(row) for row in parts["found"]],
    )


def _event(row: Sequence[object]) -> Event:
    kind, *given = row
    event = KINDS[str(kind)](*given)  # type: ignore[arg-type]
    if isinstance(event, Stepped):
        event.fresh, event.going = _scheduled(event.fresh), _scheduled(event.going)
    return event


def _flat(rows: Sequence[Scheduled]) -> list[Scheduled]:
    """Blocks of the one group that there is."""
    return [replace(one, blocks=[*one.blocks, []][0]) for one in rows]  # type: ignore[arg-type]


def _scheduled(rows: object) -> list[Scheduled]:
    """From JSON's lists."""
    return [
        Scheduled(name, [blocks], *more)
        for name, blocks, *more in cast("list[tuple[str, list[int], int, int]]", rows)
    ]
