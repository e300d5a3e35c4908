"""SGLang's caches as several hosts of one pool pass the suite of all engines that can be."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ..support.engine_hosts import HostsSuite
from ..support.engine_hosts import nursery as nursery
from . import imports  # noqa: F401  (it says why these tests are skipped where SGLang is not)

PROGRAM = Path(__file__).with_name("life.py")


class TestHosts(HostsSuite):
    program: ClassVar[Path] = PROGRAM
    form: ClassVar[str] = "mha"
