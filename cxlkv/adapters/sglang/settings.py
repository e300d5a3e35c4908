"""Settings under "cxlkv" in SGLang's --hicache-storage-backend-extra-config."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from cxlkv.adapters.common.settings import check_names, read_capacity, read_place, read_text
from cxlkv.errors import BadArgumentError, UnsupportedError

log = logging.getLogger("cxlkv")

WHERE = "/dev/shm/"
EXTRA = "--hicache-storage-backend-extra-config"
PLACE = f"{EXTRA}: cxlkv"

TESTED = (0, 5, 23)
BELOW = (0, 6, 0)
"""The version that the tests ran with. Later ones below BELOW are taken, with a warning."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """where: a folder, in which each model gets a file of its own, or the path of one pool, as
    CXLPool.create takes it; all ranks and engines on a machine share it. capacity: of what an
    engine's ranks store together, if it is to be made; None: a share of the memory that this
    container may use. salt: keeps tenants apart.
    """

    where: str = WHERE
    capacity: str | int | None = None
    salt: str = ""


def read_settings(extra_config: Mapping[str, object] | None) -> Settings:
    """Of SGLang's mapping the part that is ours. Raises BadArgumentError, which names the key."""
    extra = extra_config or {}
    known = [one.name for one in fields(Settings)]
    for name in known:
        if name in extra:
            raise BadArgumentError(
                f'{EXTRA}: {name!r} is one of ours: write it as "cxlkv": {{"{name}": ...}}'
            )
    given = extra.get("cxlkv", {})
    if not isinstance(given, Mapping):
        raise BadArgumentError(f"{PLACE} is {given!r}: keys and values are wanted")
    check_names(given, known, PLACE)
    default = Settings()
    return Settings(
        where=read_place(given, default.where, PLACE),
        capacity=read_capacity(given, PLACE),
        salt=read_text(given, "salt", default.salt, PLACE),
    )


def is_zero_copy(extra_config: Mapping[str, object] | None) -> bool:
    """Whether SGLang will give addresses of its pages, not copies of them."""
    found = bool((extra_config or {}).get("interface_v1", 0))
    if not found:
        log.warning('cxlkv: without "interface_v1": 1 in %s each page is copied once more', EXTRA)
    return found


def check_version(version: str) -> None:
    """Raises UnsupportedError for an SGLang that is older, or newer by a minor version."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    found = tuple(int(part) for part in numbers.groups()) if numbers else ()
    tested = ".".join(map(str, TESTED))
    if not TESTED <= found < BELOW:
        raise UnsupportedError(
            f"sglang {version}: this adapter was tested with {tested}, and storage backends change "
            f"between versions. Install sglang>={tested},<{'.'.join(map(str, BELOW[:2]))}, or "
            "another cxlkv"
        )
    if found != TESTED:
        log.warning("cxlkv: tested with sglang %s, this is %s", tested, version)
