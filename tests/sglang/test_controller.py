"""CXLHiCache under SGLang's own cache controller: its threads hash, ask, load and store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .hicache import Engine, Payload, page_bytes

KINDS = [
    ("mha", "page_first"),
    ("mha", "layer_first"),
    ("mha", "page_first_direct"),
    ("mha", "page_head"),
    ("mla", "page_first"),
    ("mla", "layer_first"),
    ("mla", "page_first_direct"),
]


def text(engine: Engine, pages: int, seed: int = 0) -> list[int]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, pages * engine.page_tokens)
    return [int(one) for one in tokens]


def payloads(engine: Engine, pages: int, seed: int = 0) -> dict[str, list[Payload]]:
    """Pages for each of the engine's host pools."""
    chance = np.random.default_rng(seed)
    return {
        name: [chance.integers(0, 256, page_bytes(host), np.uint8) for _ in range(pages)]
        for name, host in engine.hosts.items()
    }


def same(found: dict[str, list[Payload]], wanted: dict[str, list[Payload]], pages: int) -> None:
    assert set(found) == set(wanted)
    for name, some in found.items():
        assert len(some) == pages
        for one, right in zip(some, wanted[name], strict=False):
            assert np.array_equal(one, right), name


@pytest.mark.parametrize(("kind", "layout"), KINDS)
@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_restarted_engine_loads_what_was_stored(
    tmp_path: Path, kind: str, layout: str, zero_copy: bool
) -> None:
    first = Engine(f"{tmp_path}/", kind, layout, zero_copy=zero_copy)
    ids, pages = text(first, 6), payloads(first, 6)
    assert first.fetch(ids) == (0, {name: [] for name in first.hosts})
    assert first.save(ids, pages) == len(ids)
    first.close()
    second = Engine(f"{tmp_path}/", kind, layout, zero_copy=zero_copy)
    tokens, found = second.fetch(ids + text(second, 2, seed=1))
    assert tokens == len(ids)
    same(found, pages, 6)
    tokens, found = second.fetch(ids[: 3 * second.page_tokens] + text(second, 2, seed=1))
    assert tokens == 3 * second.page_tokens
    same(found, pages, 3)
    second.close()
