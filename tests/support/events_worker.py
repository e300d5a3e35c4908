"""A small engine in a process of its own, which says after each line what it tells routers.

Lines are JSON: {"do": WHAT, "name": of a request, "ids": of its tokens}. WHAT: "serve", "step",
"end", "look" (a second passes), "reset", "forgotten" (its router has lost all).
"""

from __future__ import annotations

import json
import sys
from typing import TypedDict

from cxlkv.adapters.vllm.events import Events, Stored

from .paged_engine import TOKENS, Engine


class Asked(TypedDict):
    do: str
    name: str
    ids: list[int]


class Said(TypedDict):
    """space: of its keys now; cached: tokens of the request that came from the pool."""

    events: list[dict[str, object]]
    space: str
    cached: int


def event(change: object) -> dict[str, object]:
    """Event as the connector makes it; hashes are text here, for JSON."""
    assert hasattr(change, "hashes")
    tier = {"medium": "CPU", "locality": "LOCAL", "group_idx": 0}
    hashes = [one.hex() for one in change.hashes]
    if not isinstance(change, Stored):
        return {"type": "BlockRemoved", "block_hashes": hashes, **tier}
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if change.parent is None else change.parent.hex(),
        "token_ids": change.token_ids,
        "block_size": TOKENS,
        "kv_cache_spec_kind": "full_attention",
        **tier,
    }


def main() -> None:
    engine, now_s = Engine(sys.argv[1:], blocks=1024), [0.0]
    scheduling = engine.scheduling
    pools, failures = scheduling.pools, scheduling.failures
    scheduling.events = Events(pools, failures, TOKENS, clock=lambda: now_s[0])
    print("ready", flush=True)
    for line in sys.stdin:
        asked: Asked = json.loads(line)
        act, name = asked["do"], asked["name"]
        if act == "serve":
            engine.serve(name, asked["ids"])
        elif act == "step":
            engine.step()
        elif act == "end":
            engine.end(name)
        elif act == "reset":
            scheduling.reset()
        elif act == "forgotten":
            scheduling.forgotten()
            engine.step()  # the workers say that their weights are the same
        else:
            now_s[0] += 2
        said = Said(
            events=[event(change) for change in scheduling.changes()],
            space=scheduling.space.hex(),
            cached=engine.cached.get(name, 0),
        )
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
