"""What a user writes for LMCache's plugin, and what is refused by name, without LMCache."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from cxlkv.adapters.lmcache.settings import (
    Settings,
    check_name,
    check_served,
    check_version,
    read_settings,
)
from cxlkv.errors import BadArgumentError, UnsupportedError


def test_nothing_written_is_the_default() -> None:
    assert read_settings({}) == Settings()
    assert read_settings({"storage_plugin.cxlkv.class_name": "CXLStorage"}) == Settings()


def test_what_is_written_is_read() -> None:
    given = {"cxlkv.where": "/mnt/", "cxlkv.capacity": "8GiB", "cxlkv.salt": "a", "dax.x": 1}
    assert read_settings(given) == Settings(where="/mnt/", capacity="8GiB", salt="a")
    assert read_settings({"cxlkv.capacity": 1 << 30}).capacity == 1 << 30
    assert read_settings({"cxlkv.capacity": "all"}).capacity == "all"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cxlkv.capcity": "8GiB"}, r"'cxlkv.capcity' is not one of .*did you mean cxlkv.capacity"),
        ({"cxlkv_where": "/mnt/"}, r"'cxlkv_where' is not one of .*did you mean cxlkv.where"),
        ({"CXLKV.salt": "a"}, "did you mean cxlkv.salt"),
        ({"cxlkv.tiers": 1}, "'cxlkv.tiers' is not one of cxlkv.where, cxlkv.capacity, cxlkv.salt"),
        ({"cxlkv.where": 3}, "cxlkv.where is 3: text is wanted"),
        ({"cxlkv.salt": None}, "cxlkv.salt is None: text is wanted"),
        ({"cxlkv.capacity": True}, "cxlkv.capacity is True: text like 8GiB"),
        ({"cxlkv.capacity": "8 apples"}, "apples"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadArgumentError, match=said):
        read_settings(given)


def test_untested_versions_are_refused_by_their_range() -> None:
    check_version("0.5.6")
    check_version("0.5.10.dev3")
    for version in ("0.4.9", "0.6.0", "1.0", "unknown"):
        with pytest.raises(UnsupportedError, match=r"LMCache .*lmcache>=0.5,<0.6"):
            check_version(version)


def test_what_would_lose_something_is_refused() -> None:
    check_served(SimpleNamespace(enable_blending=False, enable_pd=False))
    with pytest.raises(UnsupportedError, match="enable_blending"):
        check_served(SimpleNamespace(enable_blending=True))
    with pytest.raises(UnsupportedError, match="enable_pd"):
        check_served(SimpleNamespace(enable_pd=True))


def test_the_name_that_lmcache_looks_for_is_told() -> None:
    check_name(["LocalCPUBackend"])
    with pytest.raises(BadArgumentError, match=r"storage_plugins: \[LocalCPUBackend\]"):
        check_name(["cxlkv"])


def test_the_package_is_there_without_lmcache() -> None:
    module = importlib.import_module("cxlkv.adapters.lmcache")
    with pytest.raises(AttributeError, match="no attribute 'CXLStorge'"):
        _ = module.CXLStorge
    if importlib.util.find_spec("lmcache") is None:
        with pytest.raises(ModuleNotFoundError, match="lmcache"):
            _ = module.CXLStorage
