"""Where engines' pools lie: made once, found by whom they serve, refused with both layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv import CXLPool, KVLayout, ObjectPool
from cxlkv.adapters.common.pools import make_or_open
from cxlkv.errors import GeometryError

OBJECTS = KVLayout.objects("64KiB")


def test_larger_objects_will_do_for_smaller_ones(tmp_path: Path) -> None:
    path = f"{tmp_path}/a.pool"
    with make_or_open(ObjectPool, path, OBJECTS, "8MiB")[0]:
        for size in ("64KiB", "1KiB"):
            pool, made = make_or_open(ObjectPool, path, KVLayout.objects(size), None)
            with pool:
                assert (pool.layout, made) == (OBJECTS, False)
        kept = KVLayout(layers=1, kv_heads=1, head_dim=64, page_tokens=16)
        for kind, other in ((ObjectPool, KVLayout.objects("65KiB")), (CXLPool, kept)):
            with pytest.raises(GeometryError, match="wanted here"):
                make_or_open(kind, path, other, None)


def test_kept_keys_and_values_are_no_objects(tmp_path: Path) -> None:
    path = f"{tmp_path}/a.pool"
    kept = KVLayout(layers=1, kv_heads=1, head_dim=64, page_tokens=16)
    CXLPool.create(path, layout=kept, capacity="8MiB").close()
    with pytest.raises(GeometryError, match="wanted here"):
        make_or_open(ObjectPool, path, OBJECTS, None)
