"""The suite of all stores, with SGLang's factory, configuration and host pools."""

from __future__ import annotations

from ..support.stores import StoreBasics, StoreSuite
from .drivers import CopiesDriver, HiCacheDriver, LatentDriver


class TestHiCache(StoreSuite):
    driver = HiCacheDriver


class TestLatent(StoreBasics):
    driver = LatentDriver


class TestCopies(StoreBasics):
    driver = CopiesDriver
