"""Names what an engine's LoRA adapters are, as a pool outlives the engine and its names of them.

vLLM loads an adapter when a request first names it, by lora_int_id, and again where a request says
load_inplace. It tells connectors neither. So this file reads an adapter's files when its id first
comes, and again with load_inplace. If the files change without it, vLLM may run the old weights or
the new ones, and the adapter's pages are shared with no other engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from cxlkv.adapters.common.identity import folder_of, model_words
from cxlkv.adapters.common.keys import namespace, unshared

log = logging.getLogger("cxlkv")

Times = tuple[tuple[str, int, int, int], ...]


class Adapter(Protocol):
    """What is read of vLLM's LoRARequest."""

    lora_int_id: int
    lora_path: str
    load_inplace: bool


@dataclass
class _Loaded:
    path: str
    times: Times
    space: bytes


class Adapters:
    """Those of one engine, by id."""

    def __init__(self) -> None:
        self._loaded: dict[int, _Loaded] = {}

    def space_of(self, request: object) -> tuple[bytes, bool]:
        """(its namespace, whether that is another than it was for this id)."""
        adapter = cast("Adapter", request)
        path, times = adapter.lora_path, _times(adapter.lora_path)
        before = self._loaded.get(adapter.lora_int_id)
        if before is not None and (before.path, before.times) == (path, times):
            return before.space, False
        words = model_words(path)
        space = namespace({"adapter": words})
        is_known = before is None or getattr(adapter, "load_inplace", False)
        if words["weights"] is None or not is_known:
            log.warning(
                "cxlkv: the adapter %s %s: its pages are shared with no other engine",
                path,
                "has changed on disk, and the engine may have either"
                if words["weights"]
                else "has no .safetensors that say what it is",
            )
            space = unshared(space)
        self._loaded[adapter.lora_int_id] = _Loaded(path, times, space)
        return space, before is not None


def _times(path: str) -> Times:
    """Of an adapter's files: names, bytes and both times."""
    folder = folder_of(path) or Path(path)
    found = []
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        status = file.stat()
        found.append((file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)
