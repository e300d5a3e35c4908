"""python rank.py FOLDER KIND RANK RANKS MEETING: one of an engine's ranks, in a process.

It stores a text, and an engine after it loads that; pages follow from the rank, but where they are
the same on all. Says as JSON what was stored and loaded, and whether that was right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

tests = sys.modules["tests"] = ModuleType("tests")  # a package of others may have this name, too
tests.__path__ = [str(Path(__file__).resolve().parent.parent)]

from tests.sglang.hicache import Engine, Place, page_bytes  # noqa: E402

# isort: split
import torch.distributed as dist  # noqa: E402

PAGES = 6


def main() -> None:
    folder, kind, rank, ranks, meeting = sys.argv[1:]
    place = Place(int(rank), int(ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=place.rank, world_size=place.ranks
    )
    engine = Engine(folder, kind, place=place)
    text = list(range(PAGES * engine.page_tokens))
    chance = np.random.default_rng(place.rank if kind == "mha" else 0)
    pages = [chance.integers(0, 256, page_bytes(engine.host), np.uint8) for _ in range(PAGES)]
    said: dict[str, object] = {"saved": engine.save(text, {"kv": pages}) // engine.page_tokens}
    engine.close()
    dist.barrier()
    engine = Engine(folder, kind, place=place)
    said["published"] = engine.backend.store.cache().pool.stats()["pages_published"]
    for name in ("fetched", "after"):
        tokens, found = engine.fetch(text)
        said[name] = tokens // engine.page_tokens
        same = zip(found["kv"], pages, strict=False)
        said[f"{name} right"] = all(np.array_equal(*two) for two in same)
        if place.rank == 1:  # its own page 4 goes: all ranks must agree on 4
            cache = engine.backend.store.cache()
            number = 1 if kind == "mha" else 0
            cache.pool.forget(cache.keys([f"{engine.hashes(text)[4]}.{number}"]))
        dist.barrier()
    said["failures"] = sum(engine.backend.counting.failures.values())
    engine.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
