"""Keys of LMCache's chunks: whatever differs is another key, and another space is another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from cxlkv import object_keys
from cxlkv.adapters.common.keys import space_of
from cxlkv.adapters.lmcache.names import PRIORITY, file_name, name_of, priority_of, words_of
from cxlkv.errors import BadArgumentError
from cxlkv.prefix import PageKeys

from ..support.weight_files import change, safetensors


def keys_of(keys: Sequence[Key], space: bytes) -> PageKeys:
    return object_keys([name_of(key) for key in keys], salt=space)


@dataclass
class Key:
    """LMCache's own key, and how to make one."""

    model_name: str = "m"
    world_size: int = 2
    worker_id: int = 0
    chunk_hash: object = 17
    dtype: object = "torch.bfloat16"
    tags: tuple[tuple[str, object], ...] | None = None


@dataclass
class LayerKey(Key):
    layer_id: int = 0


@dataclass
class AskedKey(Key):
    request_configs: dict[str, object] | None = None


def test_a_request_says_a_priority_and_keeps_its_keys() -> None:
    asked = AskedKey(request_configs={PRIORITY: 3, "lmcache.skip_save": False})
    assert [priority_of(key) for key in (Key(), AskedKey(), asked)] == [0, 0, 3]
    assert name_of(asked) == name_of(Key())
    for wrong in (101, -1, "3", None, True):
        with pytest.raises(BadArgumentError, match=rf"{PRIORITY} is .*: a whole number from 0 to"):
            priority_of(AskedKey(request_configs={PRIORITY: wrong}))


OTHERS = [
    Key(),
    Key(model_name="m2"),
    Key(world_size=4),
    Key(worker_id=1),
    Key(chunk_hash=18),
    Key(chunk_hash=-17),
    Key(chunk_hash=b"\x11"),
    Key(dtype="torch.float16"),
    Key(tags=(("user", "a"),)),
    Key(tags=(("user", "b"),)),
    Key(tags=(("user", "a@x%b"),)),
    Key(tags=(("user", "a"), ("x", "b"))),
    LayerKey(),
    LayerKey(layer_id=1),
    # What LMCache's own text joins by @.
    Key(model_name="m@2", world_size=0),
    Key(model_name="m", tags=(("2", "0"),)),
]


def test_whatever_differs_is_another_key() -> None:
    names = [name_of(key) for key in OTHERS]
    assert len(set(names)) == len(OTHERS)
    keys = keys_of(OTHERS, b"space")
    assert not [pair for pair in combinations(keys, 2) if pair[0] == pair[1]]


def test_equal_keys_of_another_process_are_equal() -> None:
    assert keys_of([Key()], b"space") == keys_of([replace(Key(), chunk_hash=17)], b"space")
    assert keys_of([Key()], b"space") != keys_of([Key()], b"other")
    assert len(keys_of([], b"space")) == 0


METADATA = SimpleNamespace(
    model_name="m", kv_shape=(4, 2, 256, 2, 16), kv_dtype="torch.bfloat16", use_mla=False
)
CONFIG = SimpleNamespace(chunk_size=256, use_layerwise=False, pre_caching_hash_algorithm="builtin")


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        (METADATA, "model_name", "m2"),
        (METADATA, "kv_shape", (5, 2, 256, 2, 16)),
        (METADATA, "kv_shape", (4, 2, 256, 4, 8)),
        (METADATA, "kv_dtype", "torch.float16"),
        (METADATA, "use_mla", True),
        (CONFIG, "chunk_size", 128),
        (CONFIG, "use_layerwise", True),
        (CONFIG, "pre_caching_hash_algorithm", "sha256_cbor"),
    ],
)
def test_each_word_of_the_engine_makes_another_space(
    of: SimpleNamespace, name: str, value: object
) -> None:
    changed = SimpleNamespace(**{**vars(of), name: value})
    metadata, config = (changed if one is of else one for one in (METADATA, CONFIG))
    words, other = words_of(METADATA, CONFIG, "0.5.6"), words_of(metadata, config, "0.5.6")
    assert space_of(words, "") != space_of(other, "")
    assert file_name(words) != file_name(other)


def test_salt_version_and_weights_make_another_space(tmp_path: Path) -> None:
    words = words_of(METADATA, CONFIG, "0.5.6")
    assert space_of(words, "") != space_of(words, "tenant")
    assert words == words_of(METADATA, CONFIG, "0.5.7")
    assert words != words_of(METADATA, CONFIG, "0.6.0")
    weights = safetensors(tmp_path / "model.safetensors")
    local = SimpleNamespace(**{**vars(METADATA), "model_name": str(tmp_path)})
    before = words_of(local, CONFIG, "0.5.6")
    change(weights, -1)
    assert words_of(local, CONFIG, "0.5.6") != before
