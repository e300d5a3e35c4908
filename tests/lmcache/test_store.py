"""LMCache's plugin passes the suite of all stores, as its memory, and behind memory of its own."""

from __future__ import annotations

from ..support.stores import StoreSuite
from .drivers import MemoryDriver, TierDriver


class TestMemory(StoreSuite):
    driver = MemoryDriver


class TestTier(StoreSuite):
    driver = TierDriver
