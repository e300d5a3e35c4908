"""LMCache's engines as several hosts of one pool pass the suite of all engines that can be."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ..support.engine_hosts import HostsSuite
from ..support.engine_hosts import nursery as nursery

PROGRAM = Path(__file__).with_name("life.py")


class TestMemory(HostsSuite):
    program: ClassVar[Path] = PROGRAM
    form: ClassVar[str] = "memory"
    in_place: ClassVar[bool] = True


class TestTier(HostsSuite):
    program: ClassVar[Path] = PROGRAM
    form: ClassVar[str] = "tier"
