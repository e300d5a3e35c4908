"""Refuses a transformers that is missing or too old before anything of it is imported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from cxlkv.errors import UnsupportedError

FIRST = (5, 10)  # as in pyproject.toml
REMEDY = "install it with pip install 'cxlkv[transformers]'"


def check() -> None:
    wanted = ".".join(map(str, FIRST))
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise UnsupportedError(f"transformers {wanted} or later is needed: {REMEDY}") from None
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers < FIRST:
        raise UnsupportedError(
            f"transformers {found} is too old, {wanted} or later is needed, whose caches let an "
            f"attention function keep the keys: {REMEDY}"
        )


check()
