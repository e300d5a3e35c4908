"""Settings under "cxlkv" in SGLang's --hicache-storage-backend-extra-config."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from cxlkv.adapters.common.settings import ObjectSettings, read
from cxlkv.adapters.common.versions import Versions
from cxlkv.errors import BadArgumentError

log = logging.getLogger("cxlkv")

EXTRA = "--hicache-storage-backend-extra-config"
TESTED = (0, 5, 23)
VERSIONS = Versions("SGLang", TESTED, (0, 6), "storage backends")
"""Versions later than TESTED are taken with a warning."""


def read_settings(extra_config: Mapping[str, object] | None) -> ObjectSettings:
    """Read our keys of SGLang's mapping. Raises BadArgumentError, which names the key."""
    extra = extra_config or {}
    for name in ObjectSettings.model_fields:
        if name in extra:
            raise BadArgumentError(
                f'{EXTRA}: {name!r} is one of ours: write it as "cxlkv": {{"{name}": ...}}'
            )
    place, given = f"{EXTRA}: cxlkv", extra.get("cxlkv", {})
    if not isinstance(given, Mapping):
        raise BadArgumentError(f"{place} is {given!r}: keys and values are wanted")
    return read(ObjectSettings, given, place)


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
