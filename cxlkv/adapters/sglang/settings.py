"""Settings under "cxlkv" in SGLang's --hicache-storage-backend-extra-config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields

from cxlkv.adapters.common.settings import PoolSettings, read, refuse_remote
from cxlkv.adapters.common.versions import Versions
from cxlkv.errors import BadArgumentError

log = logging.getLogger("cxlkv")

EXTRA = "--hicache-storage-backend-extra-config"
TESTED = (0, 5, 23)
VERSIONS = Versions("SGLang", TESTED, (0, 6), "storage backends")
"""Later ones than TESTED are taken with a warning."""


def read_settings(extra_config: Mapping[str, object] | None) -> PoolSettings:
    """Of SGLang's mapping the part that is ours. Raises BadArgumentError, which names the key."""
    extra = extra_config or {}
    for one in fields(PoolSettings):
        if one.name in extra:
            raise BadArgumentError(
                f'{EXTRA}: {one.name!r} is one of ours: write it as "cxlkv": {{"{one.name}": ...}}'
            )
    place, given = f"{EXTRA}: cxlkv", extra.get("cxlkv", {})
    if not isinstance(given, Mapping):
        raise BadArgumentError(f"{place} is {given!r}: keys and values are wanted")
    found = read(PoolSettings, given, place)
    refuse_remote(found, place)
    return found


def is_zero_copy(extra_config: Mapping[str, object] | None) -> bool:
    """Whether SGLang will give addresses of its pages, not copies of them."""
    found = bool((extra_config or {}).get("interface_v1", 0))
    if not found:
        log.warning('cxlkv: without "interface_v1": 1 in %s each page is copied once more', EXTRA)
    return found


def check_version(version: str) -> None:
    """Raises UnsupportedError for an SGLang that is older, or newer by a minor version."""
    if VERSIONS.check(version) != TESTED:
        tested = ".".join(map(str, TESTED))
        log.warning("cxlkv: tested with sglang %s, this is %s", tested, version)
