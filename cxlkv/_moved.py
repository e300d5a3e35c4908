"""Modules and methods are found by the names that they had up to 0.2, with a DeprecationWarning.

For one release: then this file goes, with the line of cxlkv/__init__.py that installs the finder,
and the base class of cxlkv/pool.py.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, cast

FOLDERS = {
    "machine": "certificate costs",
    "ops": "cli metrics",
    "tiers": "cold cold_mooncake cold_store policy prefetch",
}
MOVED = {f"cxlkv.{m}": f"cxlkv.{folder}.{m}" for folder, ms in FOLDERS.items() for m in ms.split()}
MOVED |= {
    "cxlkv.adapters.base": "cxlkv.adapters.common.requests",
    "cxlkv.near": "cxlkv.tiers.local",
    "cxlkv.tenants": "cxlkv.tiers.quota",
}
"""Old name to new: of what docs/ showed to users."""


class Moved(MetaPathFinder, InspectLoader):
    """Finds a module by its old name: the same module, not a second one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = find_spec(MOVED[fullname]) if fullname in MOVED else None
        return new and ModuleSpec(fullname, self, origin=new.origin)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(_new_name(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """The module's code, for `python -m`."""
        spec = find_spec(new := _new_name(fullname))
        return cast(InspectLoader, spec.loader).get_code(new) if spec else None

    def get_source(self, fullname: str) -> str | None:
        return None


def _new_name(old: str) -> str:
    text = f"{old} is {MOVED[old]} now; the old name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return MOVED[old]


class MovedToAdmin:
    """What pools did up to 0.2, `pool.admin` does; type checkers are not told of the old names."""

    NAMES = ("audit", "check", "fence", "hosts", "overview", "pin", "prefault", "scrub", "unpin")


if not TYPE_CHECKING:

    def moved_to_admin(name):
        def admin_of(pool):
            text = f"pool.{name} is pool.admin.{name} now; the old name goes with the next release"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            return pool.admin

        return property(
            lambda pool: getattr(admin_of(pool), name),
            lambda pool, value: setattr(admin_of(pool), name, value),
        )

    # Not by __getattr__: all attributes of a class that has one are slower.
    for name in MovedToAdmin.NAMES:
        setattr(MovedToAdmin, name, moved_to_admin(name))
