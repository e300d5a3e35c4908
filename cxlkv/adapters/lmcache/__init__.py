"""The LMCache storage plugin keeps chunks in a pool, where LMCache reads and writes them.

    storage_plugins: ["cxlkv"]
    extra_config:
      storage_plugin.cxlkv.module_path: cxlkv.adapters.lmcache
      storage_plugin.cxlkv.class_name: CXLStorage

`storage` is what LMCache calls. `memory` gives it objects whose tensors are the pool's memory, and
takes them back when LMCache's count of references is 0. Both use an object cache: what goes wrong
there is a miss, and counted: `metrics` says as what. `form` is what is stored behind a chunk: its
shapes, dtypes and format; `encoded` is of chunks in fewer bits; `names` is what a key is made of;
`settings` reads what the user wrote. Only `storage` and `memory` import LMCache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlkv.adapters.lmcache.storage import CXLStorage

__all__ = ["CXLStorage"]


def __getattr__(name: str) -> object:
    """The class that LMCache asks this module for; what does not need LMCache is imported without
    it."""
    if name == "CXLStorage":
        from cxlkv.adapters.lmcache.storage import CXLStorage

        return CXLStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
