"""Settings in LMCache's extra_config: cxlkv.where, cxlkv.capacity, cxlkv.salt.

And what of LMCache's own configuration and version we do not serve.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches

from cxlkv.config import parse_bytes
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.machine.regions import ALL

PREFIX = "cxlkv"
TESTED = ((0, 5), (0, 6))
"""Versions that the tests ran with: from the first, below the second."""

MEMORY = "LocalCPUBackend"
"""The name under which LMCache looks for who gives it memory."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """where: a folder (a name for each model is made in it), or the path of one pool, as
    CXLPool.create takes it. capacity: of the pool that all ranks share; None: a share of the memory
    that this container may use. salt: keeps tenants apart.
    """

    where: str = "/dev/shm/"
    capacity: str | int | None = None
    salt: str = ""


def read_settings(extra: Mapping[str, object]) -> Settings:
    """Of what extra_config has of ours; raises BadArgumentError, which names the key."""
    known = [f"{PREFIX}.{one.name}" for one in fields(Settings)]
    mine = {name: value for name, value in extra.items() if name.lower().startswith(PREFIX)}
    for name in mine:
        if name not in known:
            close = get_close_matches(name.lower(), known, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise BadArgumentError(
                f"extra_config: {name!r} is not one of {', '.join(known)}{meant}"
            )
    for name in (f"{PREFIX}.where", f"{PREFIX}.salt"):
        if not isinstance(mine.get(name, ""), str):
            raise BadArgumentError(f"extra_config: {name} is {mine[name]!r}: text is wanted")
    capacity = mine.get(f"{PREFIX}.capacity")
    if isinstance(capacity, bool) or not isinstance(capacity, (int, str, type(None))):
        raise BadArgumentError(
            f"extra_config: {PREFIX}.capacity is {capacity!r}: text like 8GiB is wanted"
        )
    if capacity is not None and capacity != ALL:
        parse_bytes(capacity)
    default = Settings()
    return Settings(
        where=str(mine.get(f"{PREFIX}.where", default.where)),
        capacity=capacity,
        salt=str(mine.get(f"{PREFIX}.salt", default.salt)),
    )


def check_version(version: str) -> None:
    """Raises UnsupportedError for an LMCache that nobody has tested this with."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not TESTED[0] <= (int(found[1]), int(found[2])) < TESTED[1]:
        (major, minor), (end, ended) = TESTED
        raise UnsupportedError(
            f"LMCache {version}: this release of cxlkv was tested with "
            f"lmcache>={major}.{minor},<{end}.{ended}, and storage plugins change between "
            "versions. Install one of these, or another cxlkv"
        )


def check_served(config: object) -> None:
    """Raises UnsupportedError for features of LMCache that would lose something in a pool."""
    if getattr(config, "enable_blending", False):
        raise UnsupportedError(
            "cxlkv: enable_blending keeps positions beside each chunk, which a pool does not "
            "store: leave it away"
        )
    if getattr(config, "enable_pd", False):
        raise UnsupportedError(
            "cxlkv: enable_pd moves chunks between engines by itself and drops them once they are "
            "read: leave it away"
        )


def check_name(plugins: Sequence[str]) -> None:
    """Where LMCache has no memory of its own, the plugin is asked for it by this name.

    Raises BadArgumentError: LMCache would end at a KeyError that says nothing.
    """
    if MEMORY not in plugins:
        raise BadArgumentError(
            f"cxlkv: max_local_cpu_size is 0, so the plugin is LMCache's memory, and LMCache looks "
            f"for that under the name {MEMORY}: write storage_plugins: [{MEMORY}], and in "
            f"extra_config storage_plugin.{MEMORY}.module_path and .class_name"
        )
