"""What a user writes for LMCache's plugin, and what is refused by name, without LMCache."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from cxlkv.adapters.lmcache.settings import check_memory, check_served, read_settings
from cxlkv.errors import BadArgumentError, UnsupportedError


def test_settings_of_others_are_left_alone() -> None:
    assert read_settings({"storage_plugin.cxlkv.class_name": "CXLStorage"}) == read_settings({})
    for wrong in ("cxlkv_where", "CXLKV.where"):
        with pytest.raises(BadArgumentError, match=r"did you mean cxlkv\.where"):
            read_settings({wrong: "/mnt/"})


def test_what_would_lose_something_is_refused() -> None:
    check_served(SimpleNamespace(enable_blending=False, enable_pd=False))
    with pytest.raises(UnsupportedError, match="enable_blending"):
        check_served(SimpleNamespace(enable_blending=True))
    with pytest.raises(UnsupportedError, match="enable_pd"):
        check_served(SimpleNamespace(enable_pd=True))


def test_the_name_that_lmcache_looks_for_is_told() -> None:
    check_memory(["LocalCPUBackend"], "none")
    with pytest.raises(BadArgumentError, match=r"storage_plugins: \[LocalCPUBackend\]"):
        check_memory(["cxlkv"], "none")


def test_the_package_is_there_without_lmcache() -> None:
    module = importlib.import_module("cxlkv.adapters.lmcache")
    with pytest.raises(AttributeError, match="no attribute 'CXLStorge'"):
        _ = module.CXLStorge
    if importlib.util.find_spec("lmcache") is None:
        with pytest.raises(ModuleNotFoundError, match="lmcache"):
            _ = module.CXLStorage
