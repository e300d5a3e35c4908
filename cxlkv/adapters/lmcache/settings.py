"""Settings in LMCache's extra_config: cxlkv.where, cxlkv.capacity, cxlkv.salt.

And what of LMCache's own configuration and versions we do not serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cxlkv.adapters.common.settings import ObjectSettings, read
from cxlkv.adapters.common.versions import Versions
from cxlkv.errors import BadArgumentError, UnsupportedError

PREFIX = "cxlkv"
VERSIONS = Versions("LMCache", (0, 5), (0, 6), "storage plugins")

MEMORY = "LocalCPUBackend"
"""The name under which LMCache looks for its allocator."""


def read_settings(extra: Mapping[str, object]) -> ObjectSettings:
    """Read our keys of extra_config; raises BadArgumentError, which names the key."""
    mine = {name: value for name, value in extra.items() if name.lower().startswith(PREFIX)}
    return read(ObjectSettings, mine, "extra_config", prefix=f"{PREFIX}.")


def check_served(config: object) -> None:
    """Raises UnsupportedError for features of LMCache that would lose something in a pool."""
    if getattr(config, "enable_blending", False):
        raise UnsupportedError(
            "cxlkv: enable_blending keeps positions beside each chunk, which a pool does not "
            "store: leave it out"
        )
    if getattr(config, "enable_pd", False):
        raise UnsupportedError(
            "cxlkv: enable_pd moves chunks between engines by itself and drops them once they are "
            "read: leave it out"
        )


def check_memory(plugins: Sequence[str], encoding: str) -> None:
    """Where LMCache has no memory of its own, the plugin is asked for it by this name.

    Raises BadArgumentError: LMCache would end at a KeyError that says nothing. Raises
    UnsupportedError for chunks that are encoded: what is decoded wants memory of LMCache's.
    """
    if encoding != "none":
        raise UnsupportedError(
            f"cxlkv: {PREFIX}.encoding: {encoding} decodes chunks to memory of LMCache's own, and "
            "max_local_cpu_size is 0: give it some, and the plugin another name than "
            f"{MEMORY}, or leave the encoding out"
        )
    if MEMORY not in plugins:
        raise BadArgumentError(
            f"cxlkv: max_local_cpu_size is 0, so the plugin is LMCache's memory, and LMCache looks "
            f"for that under the name {MEMORY}: write storage_plugins: [{MEMORY}], and in "
            f"extra_config storage_plugin.{MEMORY}.module_path and .class_name"
        )
