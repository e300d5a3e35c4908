"""Keys of LMCache's chunks: its own key, and everything else that makes the bytes.

    key = H(space, (model, world size, rank, chunk hash, dtype, tags, layer))

space is keys.namespace() of words_of(). LMCache's own text of a key is not used: it joins parts
by signs that may be in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from cxlkv.adapters.common.identity import folder_of, model_words
from cxlkv.adapters.common.keys import namespace
from cxlkv.errors import BadArgumentError
from cxlkv.pages import PRIORITY_MAX

PRIORITY = "lmcache.cxlkv.priority"
"""Key of a priority in a request's kv_transfer_params; LMCache hands on what begins so, and it is
in no key."""


class Key(Protocol):
    """What is read of LMCache's CacheEngineKey; a LayerCacheEngineKey has a layer_id, too."""

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: object
    dtype: object
    tags: tuple[tuple[str, object], ...] | None


def name_of(key: Key) -> str:
    """Text in which no two keys agree that differ in anything."""
    layer = getattr(key, "layer_id", None)
    where = (key.model_name, key.world_size, key.worker_id)
    return repr((*where, key.chunk_hash, str(key.dtype), key.tags, layer))


def priority_of(key: Key) -> int:
    """The priority that the key's request has asked for; 0: none. Raises BadArgumentError."""
    said: Mapping[str, object] = getattr(key, "request_configs", None) or {}
    value = said.get(PRIORITY, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= PRIORITY_MAX:
        raise BadArgumentError(f"{PRIORITY} is {value!r}: a whole number from 0 to {PRIORITY_MAX}")
    return value


def words_of(
    metadata: object, config: object, version: str, encoding: str = "none", identity: str = ""
) -> dict[str, object]:
    """Everything that makes a chunk what it is, but what LMCache's key says, and the salt.

    LMCache does not say which revision it loaded, so a hub's name with several revisions in the
    cache identifies no weights.
    """
    model = str(_of(metadata, "model_name"))
    words = model_words(model, identity=identity)
    if not identity and not os.path.exists(model) and _snapshots(model) > 1:
        words["weights"] = None
    return {
        "engine": "lmcache",
        "version": ".".join(version.split(".")[:2]),
        **words,
        "kv_shape": [int(str(one)) for one in _shape(metadata)],
        "dtype": str(_of(metadata, "kv_dtype")),
        "mla": bool(_of(metadata, "use_mla")),
        "chunk_size": _of(config, "chunk_size"),
        "layerwise": bool(_of(config, "use_layerwise")),
        "hash": _of(config, "pre_caching_hash_algorithm"),
        "encoding": encoding,
    }


def _snapshots(model: str) -> int:
    folder = folder_of(model)
    return 0 if folder is None else len(list(folder.parent.iterdir()))


def file_name(words: dict[str, object]) -> str:
    """File name of the pool that all ranks and engines of one model share in a folder."""
    return f"cxlkv-lmcache-{namespace({'name': 'pool', **words}).hex()[:16]}.pool"


def _of(value: object, name: str) -> object:
    return getattr(value, name)


def _shape(metadata: object) -> Iterable[object]:
    shape = _of(metadata, "kv_shape")
    assert isinstance(shape, tuple)
    return shape
