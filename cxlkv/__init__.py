"""cxlkv: a KV-cache pool in CXL and other far memory, with scoring near the data."""

from importlib import import_module
from typing import TYPE_CHECKING

from cxlkv.errors import CXLKVError, PoolFullError
from cxlkv.layout import KVLayout, LayerGroup, Rotary, States
from cxlkv.ndp.engine import Budget, Selection, VirtualRows
from cxlkv.refusals import no_attribute

if TYPE_CHECKING:
    __version__: str
    from cxlkv.objects import Buffers, ObjectPool, RowForm, object_keys
    from cxlkv.pool import CXLPool
    from cxlkv.sequence import Batch, Hit, Sequence
    from cxlkv.tiers import Tiers

__all__ = [
    "Batch",
    "Budget",
    "Buffers",
    "CXLKVError",
    "CXLPool",
    "Hit",
    "KVLayout",
    "LayerGroup",
    "ObjectPool",
    "PoolFullError",
    "Rotary",
    "RowForm",
    "Selection",
    "Sequence",
    "States",
    "Tiers",
    "VirtualRows",
    "object_keys",
]

# What needs the C core is imported when it is asked for: the rest works where it is not built.
_OF_THE_CORE = {
    "CXLPool": "pool",
    "Batch": "sequence",
    "Buffers": "objects",
    "Hit": "sequence",
    "ObjectPool": "objects",
    "RowForm": "objects",
    "Sequence": "sequence",
    "Tiers": "tiers",
    "object_keys": "objects",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("cxlkv._core").version()
    if name not in _OF_THE_CORE:
        no_attribute("cxlkv", name)
    return getattr(import_module(f"cxlkv.{_OF_THE_CORE[name]}"), name)
