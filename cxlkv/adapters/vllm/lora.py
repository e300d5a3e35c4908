"""Names what an engine's LoRA adapters are, as a pool outlives the engine and its names of them.

vLLM loads an adapter, by lora_int_id, when a request or add_lora() first names it, and again in
each step of a request that says load_inplace, after remove_lora(), or where it had no room for it
meanwhile. It tells connectors nothing of it. So this file reads an adapter's files when the engine
does. Where they have changed without that, vLLM may have the old weights or the new ones: until it
is asked to load them anew, nothing is found for the adapter, and nothing stored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cxlkv.adapters.common.identity import folder_of, model_words
from cxlkv.adapters.common.keys import namespace, unshared

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from cxlkv.adapters.vllm.scheduler import Scheduling

log = logging.getLogger("cxlkv")

Times = tuple[tuple[str, int, int, int], ...]


class Adapter(Protocol):
    """What is read of vLLM's LoRARequest."""

    lora_int_id: int
    lora_path: str
    load_inplace: bool


@dataclass(frozen=True)
class _Loaded:
    """What the engine has of an id. times: of the files when they were read; is_known: whether the
    engine has what was in them; is_gone: it has nothing any more, and loads them when asked."""

    path: str
    times: Times
    space: bytes
    is_known: bool = True
    is_gone: bool = False


class Adapters:
    """The adapters of one engine, by id."""

    def __init__(self) -> None:
        self._loaded: dict[int, _Loaded] = {}
        # By path: the space of the last request, and paths that had several. The engine's own
        # prefix cache knows an adapter by its name and path.
        self._cached: dict[str, bytes] = {}
        self._mixed: set[str] = set()

    def __len__(self) -> int:
        return len(self._loaded)

    def is_loading(self, adapter: Adapter) -> bool:
        """Whether the engine reads its files in the next step that has a request with it."""
        found = self._loaded.get(adapter.lora_int_id)
        return found is None or adapter.load_inplace or found.is_gone or not found.times

    def space_of(self, adapter: Adapter) -> tuple[bytes, bool]:
        """(its namespace, whether the engine has, or may have, another adapter than before)."""
        before = self._loaded.get(adapter.lora_int_id)
        now = self._loaded[adapter.lora_int_id] = self._look(adapter, before)
        space = now.space if now.is_known else unshared(now.space)
        if self._cached.setdefault(now.path, space) != space:
            self._cached[now.path] = space
            self._mixed.add(now.path)
        was = before and (before.space, before.is_known)
        return space, was not in (None, (now.space, now.is_known))

    def _look(self, adapter: Adapter, before: _Loaded | None) -> _Loaded:
        path, is_loading = os.path.expanduser(adapter.lora_path), self.is_loading(adapter)
        times = _times(path)
        if before is not None:
            same = (before.path, before.times) == (path, times)
            if before.is_known and same:
                return replace(before, is_gone=False)
            if not before.is_known and not is_loading:
                return before
        space = _read(path)
        if is_loading or before is None or before.space == space:
            return _Loaded(path, times, space)
        log.warning(
            "cxlkv: the adapter %s has changed on disk, and the engine may have either: nothing is "
            "found or stored for it until it is loaded with load_inplace",
            path,
        )
        return replace(before, path=path, is_known=False)

    def may_save(self, adapter: Adapter, local: int) -> bool:
        """Whether a request's K and V are its adapter's; the engine had `local` tokens of it."""
        found = self._loaded[adapter.lora_int_id]
        return found.is_known and not (local and found.path in self._mixed)

    def removed(self, number: int) -> None:
        """The engine has nothing of this id any more."""
        if number in self._loaded:
            self._loaded[number] = replace(self._loaded[number], is_gone=True)

    def forgotten(self) -> None:
        """The engine's own prefix cache was reset."""
        self._cached.clear()
        self._mixed.clear()


def _read(path: str) -> bytes:
    words = model_words(path)
    space = namespace({"adapter": words})
    if words["weights"] is not None:
        return space
    log.warning(
        "cxlkv: the adapter %s has no .safetensors that say what it is: its pages are shared with "
        "no other engine",
        path,
    )
    return unshared(space)


def _times(path: str) -> Times:
    """Names, bytes and both times of an adapter's files."""
    folder = folder_of(path) or Path(path)
    files: list[Path] = []
    with suppress(OSError):  # no folder
        files = sorted(folder.iterdir())
    found = []
    for file in files:
        with suppress(OSError):  # it has gone since, or is a link to nothing
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)


# ---- what an engine loads beside its requests ----


def watch_loads() -> None:
    """Tell connectors of vLLM's add_lora() and remove_lora(), once they are done."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore.add_lora, "__wrapped__"):
        return
    add, remove = EngineCore.add_lora, EngineCore.remove_lora

    @wraps(add)
    def add_lora(core: EngineCore, lora_request: Adapter) -> object:
        done = add(core, lora_request)
        for one in _schedulings(core):
            one.adapter_loaded(lora_request)
        return done

    @wraps(remove)
    def remove_lora(core: EngineCore, lora_id: int) -> object:
        done = remove(core, lora_id)
        for one in _schedulings(core):
            one.adapter_removed(lora_id)
        return done

    EngineCore.add_lora, EngineCore.remove_lora = add_lora, remove_lora


def _schedulings(core: EngineCore) -> Iterator[Scheduling]:
    connector = core.scheduler.get_kv_connector()
    for one in getattr(connector, "sub_connectors", [connector]):
        found = getattr(one, "scheduling", None)
        if found is not None:
            yield found
