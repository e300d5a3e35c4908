"""Checks that the C core and these Python files are of one build: they share structs, so a mixture
would not fail but read the wrong bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ABI = 28
"""CXLKV_ABI of native/include/cxlkv_abi.h as these files know it; counted up together."""


def check(core: object, name: str = "cxlkv._native") -> None:
    """Raises ImportError for a core, cffi's `lib`, of another number, and says what to do."""
    declared = getattr(core, "CXLKV_ABI", None)
    compiled = core.cxlkv_abi() if hasattr(core, "cxlkv_abi") else None
    if (declared, compiled) == (ABI, ABI):
        return
    found = " and ".join(str(n or "none") for n in dict.fromkeys((declared, compiled)))
    raise ImportError(
        f"{name} was built for interface {found}, these Python files want {ABI}: they are "
        "of two versions of cxlkv. Build it again: make setup in a checkout, else "
        "pip install --force-reinstall cxlkv"
    )


@contextmanager
def finding_the_core() -> Iterator[None]:
    """Raises ImportError with the remedy where the Python files lie without the compiled module."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "_cffi_backend":
            raise ImportError(
                f"cxlkv needs cffi, which is not there: {sys.executable} -m pip install 'cffi>=2.0'"
            ) from error
        if error.name != "cxlkv._native":
            raise
        raise ImportError(
            f"{Path(__file__).parents[1]} is source code without its C core. Where cxlkv is "
            "installed, run Python from another folder; in a checkout, build it: make setup"
        ) from error
