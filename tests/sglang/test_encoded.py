"""Pages that the pool keeps encoded, under SGLang's own cache controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv.errors import UnsupportedError

from ..support.kept_rows import check_kept
from .hicache import Engine, page_bytes
from .test_controller import text

# isort: split
import torch

DIM = 128
PAGES = 6


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("encoding", ["int8", "int4", "fp8_e4m3"])
def test_a_restarted_engine_loads_what_was_kept(tmp_path: Path, layout: str, encoding: str) -> None:
    """All numbers of each page, wherever the layout has them."""
    where = f"{tmp_path}/"
    first = Engine(where, "mha", layout, encoding=encoding, capacity="64MiB")
    ids = text(first, PAGES)
    chance = torch.Generator().manual_seed(1)
    rows = [
        3 * torch.randn(page_bytes(first.host) // 2 // DIM, DIM, generator=chance)
        for _ in range(PAGES)
    ]
    given = [one.to(torch.bfloat16) for one in rows]
    payloads = [one.view(torch.uint8).reshape(-1).numpy() for one in given]
    assert first.save(ids, {"kv": payloads}) == len(ids)
    stored = first.backend.counting.counts["stored_bytes"]
    assert stored < (0.6 if encoding != "int4" else 0.35) * sum(one.nbytes for one in payloads)
    first.close()
    second = Engine(where, "mha", layout, encoding=encoding, capacity="64MiB")
    tokens, found = second.fetch(ids + text(second, 2, seed=1))
    assert tokens == len(ids)
    for was, now in zip(given, found["kv"], strict=True):
        check_kept(torch.from_numpy(now).view(torch.bfloat16).view(-1, DIM), was, encoding)
    assert sum(second.backend.counting.failures.values()) == 0
    second.close()
    third = Engine(where, "mha", layout, capacity="64MiB")
    assert third.fetch(ids)[0] == 0
    third.close()
    assert len(list(tmp_path.glob("*.pool"))) == 2


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_latent_rows_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=r"MLATokenToKVPoolHost\) has no rows of K and V"):
        Engine(f"{tmp_path}/", kind, encoding="int8")
