"""SGLang: its hierarchical cache keeps pages in a pool of objects. docs/adapters.md tells how.

--enable-hierarchical-cache --hicache-storage-backend dynamic
--hicache-storage-backend-extra-config '{"backend_name": "cxlkv", "interface_v1": 1,
    "module_path": "cxlkv.adapters.sglang", "class_name": "CXLHiCache"}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlkv.adapters.sglang.storage import CXLHiCache

__all__ = ["CXLHiCache"]


def __getattr__(name: str) -> object:
    """The class when SGLang asks for it: it is one of SGLang's own."""
    if name != "CXLHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cxlkv.adapters.sglang.storage import CXLHiCache

    return CXLHiCache
