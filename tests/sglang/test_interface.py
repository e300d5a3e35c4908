"""What we override and read of SGLang's classes is still there, and takes what SGLang gives it."""

from __future__ import annotations

import inspect
from dataclasses import fields

from . import imports  # noqa: F401

# isort: split
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs

from cxlkv.adapters.sglang import CXLHiCache
from cxlkv.adapters.sglang.names import OF_THE_SERVER, Config

READ_OF_THE_SERVER = {
    "context_length",
    "model_path",
    "random_seed",
    "speculative_draft_model_path",
}


def names_of(method: object) -> list[str]:
    assert callable(method)
    return list(inspect.signature(method).parameters)


def test_our_methods_take_what_sglang_gives() -> None:
    """At least what its own do, in the same order and by the same names."""
    for name, method in vars(CXLHiCache).items():
        if name.startswith("_") or not inspect.isfunction(method) or name == "close":
            continue  # its controller calls close() where there is one
        wanted, given = names_of(getattr(HiCacheStorage, name)), names_of(method)
        assert given[: len(wanted)] == wanted, name
    assert not inspect.isabstract(CXLHiCache)


def test_all_of_its_methods_are_ours() -> None:
    """One that SGLang adds has to be looked at: its default could answer wrongly for us."""
    its = {name for name, method in vars(HiCacheStorage).items() if inspect.isfunction(method)}
    assert its - set(vars(CXLHiCache)) == set()


def test_what_keys_are_made_of_is_there() -> None:
    """A word that SGLang renamed would be "None" for all engines, and their keys the same."""
    given = {one.name for one in fields(HiCacheStorageConfig)}
    assert set(Config.__annotations__) <= given
    assert set(OF_THE_SERVER) | READ_OF_THE_SERVER <= set(ServerArgs.__struct_fields__)
