"""cxlkv: a KV-cache pool in CXL and other far memory, with scoring near the data."""

from cxlkv.errors import CXLKVError, PoolFullError
from cxlkv.layout import KVLayout, LayerGroup
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch, Hit, Sequence

__all__ = [
    "Batch",
    "Budget",
    "CXLKVError",
    "CXLPool",
    "Hit",
    "KVLayout",
    "LayerGroup",
    "PoolFullError",
    "Selection",
    "Sequence",
]
