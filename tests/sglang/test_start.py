"""CXLHiCache as SGLang's factory makes it: what it refuses, and what makes its keys others."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv.errors import BadArgumentError, UnsupportedError

from .drivers import made
from .hicache import (
    ALONE,
    PAGE_TOKENS,
    device_pool,
    host_pool,
    in_place,
    page_bytes,
    read_pages,
    write_pages,
)

# isort: split
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from cxlkv import ObjectPool
from cxlkv.adapters.sglang import storage

from ..support.stores import payload

KEYS = [f"{number:064x}" for number in range(4)]


@pytest.fixture
def ours(folder: str) -> dict[str, object]:
    """Settings: one pool for whatever has objects of one size."""
    return {"where": f"{folder}one.pool", "capacity": "8MiB"}


def host(kind: str = "mha", layout: str = "page_first") -> HostKVCache:
    with in_place(ALONE):
        return host_pool(kind, layout, device_pool(kind, PAGE_TOKENS), PAGE_TOKENS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"were": "/dev/shm"}, "did you mean where"),
        ({"capacity": 1.5}, "text like 2GiB"),
        ({"capacity": "8G"}, "8G"),
        ({"where": "anonymous:"}, "several processes that must find the pool"),
    ],
)
def test_mistakes_in_settings_end_the_start(
    ours: dict[str, object], given: dict[str, object], said: str
) -> None:
    with pytest.raises(BadArgumentError, match=said):
        made(host(), {**ours, **given})


def test_another_release_is_refused(
    ours: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "version", lambda name: "0.6.1")
    with pytest.raises(UnsupportedError, match=r"SGLang 0\.6\.1: .*sglang>=0\.5\.23,<0\.6"):
        made(host(), ours)


def test_a_layout_without_addresses_is_refused(ours: dict[str, object]) -> None:
    pages = host()
    pages.layout = "of another release"
    with pytest.raises(UnsupportedError, match=r"of another release.*page_first may mend it"):
        made(pages, ours)


def test_ranks_that_share_tokens_are_refused(ours: dict[str, object]) -> None:
    words = {"tp_size": 2, "dcp_size": 2, "logical_page_size": 2 * PAGE_TOKENS}
    with pytest.raises(UnsupportedError, match="decode context parallel"):
        made(host("mla"), ours, is_mla_model=True, **words)


def test_arguments_of_the_server_make_other_keys(
    ours: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of fp8 have pages of one size and dtype; a served name says nothing of weights."""
    given: list[dict[str, str]] = [
        {"model_path": "some/model"},
        {"model_path": "other/model"},
        {"model_path": "some/model", "revision": "b" * 40},
        {"model_path": "some/model", "quantization": "awq"},
        {"model_path": "some/model", "kv_cache_dtype": "fp8_e4m3"},
        {"model_path": "some/model", "kv_cache_dtype": "fp8_e5m2"},
    ]
    engines, pages = [], host()
    for words in given:
        monkeypatch.setattr(get_context(), "_server_args", ServerArgs(**words))
        engines.append(made(pages, ours, model_name="served"))
    indices = pages.alloc(len(KEYS) * PAGE_TOKENS)
    for engine in engines:
        assert engine.batch_exists(KEYS) == 0
        assert all(engine.batch_set_v1(KEYS, indices))
        assert engine.batch_exists(KEYS) == len(KEYS)
    assert engines[0].store.cache().pool.stats()["pages_published"] == len(KEYS) * len(engines)
    for engine in engines:
        engine.close()


def test_split_heads_are_two_objects(ours: dict[str, object]) -> None:
    """Engines of more ranks store half of the heads each."""
    pages = host(layout="page_head")
    size = page_bytes(pages)
    engine = made(pages, ours, tp_lcm_size=2, should_split_heads=True)
    indices = pages.alloc(len(KEYS) * PAGE_TOKENS)
    payloads = [payload(key, size) for key in KEYS]
    write_pages(pages, indices, payloads)
    assert all(engine.batch_set_v1(KEYS, indices))
    with ObjectPool.open(str(ours["where"])) as pool:
        assert pool.layout.object_bytes == size // 2
        assert pool.stats()["pages_published"] == 2 * len(KEYS)
    write_pages(pages, indices, payloads[::-1])
    assert all(engine.batch_get_v1(KEYS, indices))
    for found, wanted in zip(read_pages(pages, indices), payloads, strict=True):
        assert (found == wanted).all()
    cache = engine.store.cache()
    cache.pool.forget(cache.keys([f"{KEYS[2]}.1"]))
    assert engine.batch_exists(KEYS) == 2, "of the third page one half is missing"
    assert engine.batch_get_v1(KEYS, indices) == [True, True, False, True]
    engine.close()


def test_clear_takes_all_pages_away(ours: dict[str, object], folder: str) -> None:
    pages = host()
    engine = made(pages, ours)
    indices = pages.alloc(len(KEYS) * PAGE_TOKENS)
    assert all(engine.batch_set_v1(KEYS, indices))
    engine.clear()
    assert engine.batch_exists(KEYS) == 0
    assert all(engine.batch_set_v1(KEYS, indices))
    engine.close()
    assert engine.batch_exists(KEYS) == 0
    assert not any(engine.batch_get_v1(KEYS, indices))
    assert [path.name for path in Path(folder).glob("*")] == ["one.pool"]
