"""The SGLang storage backend keeps pages of its hierarchical cache in a pool.

docs/engines/sglang.md explains it.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "cxlkv", "interface_v1": 1,
        "module_path": "cxlkv.adapters.sglang", "class_name": "CXLHiCache",
        "hicache_storage_pass_prefix_keys": true}'

`storage` is the class that SGLang calls, and alone imports SGLang. It asks `store`, which has an
object cache for each of SGLang's host pools: `host` says where their pages lie, `names` what
makes their bytes what they are, `weights` whether the engine has other weights by now. `settings`
reads what the user wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlkv.adapters.sglang.storage import CXLHiCache

__all__ = ["CXLHiCache"]


def __getattr__(name: str) -> object:
    """The class when SGLang asks for it: it is one of SGLang's own.

    Raises ImportError, which says what is missing.
    """
    if name != "CXLHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from cxlkv.adapters.sglang.storage import CXLHiCache
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error}: SGLang loads cxlkv's store for it, so install cxlkv where sglang is"
        ) from error
    return CXLHiCache
