"""An identity says what makes K and V what they are, beside the text: model, config and weights.

Of a model in a folder, or in the cache of Hugging Face's hub: its path or name, its descriptions
(JSON) and code, and digests of its weights (weights.py). Its config counts whole, but for what
ALLOWED names. Weights of other formats and from elsewhere (s3://) are identified by nothing here:
then a user states an `identity`, or the engine shares nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from cxlkv.adapters.common.weights import digests
from cxlkv.errors import UnsupportedError

log = logging.getLogger("cxlkv")

ALLOWED: dict[str, str] = {
    "_name_or_path": "where the config was read from",
    "transformers_version": "who wrote the file",
    "dtype": "what the file's weights have; the dtype that runs is a word of its own",
    "torch_dtype": "the same, under its older name",
    "use_cache": "whether a cache is returned, not what is in it",
    "output_attentions": "what is returned beside the logits",
    "output_hidden_states": "what is returned beside the logits",
    "bos_token_id": "which ids a text begins with; ids are in the key",
    "eos_token_id": "where generation ends",
    "pad_token_id": "what stands where attention does not look",
    "id2label": "names of a classifier's outputs",
    "label2id": "names of a classifier's outputs",
    "initializer_range": "weights before training",
}
"""Names of a config that may differ between equal K and V, each with the reason. A test varies
each of them in each family that is served, and compares K and V bit by bit."""

LENGTH = "max_position_embeddings"
LENGTH_FREE = ("default", "linear", "llama3")
"""Kinds of rope whose factors do not depend on the longest length: there LENGTH is allowed, too."""

DESCRIPTIONS = (
    "config.json",
    "params.json",
    "adapter_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""How weights, images and sounds are read. A tokenizer makes ids, and these are in the key."""


def config_words(config: Mapping[str, object]) -> dict[str, object]:
    """A config without what ALLOWED names, in its parts for text and images as well."""
    allowed = {*ALLOWED, LENGTH} if not depends_on_length(config) else set(ALLOWED)
    return {
        name: config_words(value) if isinstance(value, Mapping) and _is_config(value) else value
        for name, value in config.items()
        if name not in allowed
    }


def _is_config(value: object) -> bool:
    return isinstance(value, Mapping) and "model_type" in value


def depends_on_length(config: Mapping[str, object]) -> bool:
    """Whether the rotary embedding of a config, or of one of its parts, has other factors for
    another longest length; also where its kind is not known here."""
    return not set(rope_kinds(config)) <= set(LENGTH_FREE)


def rope_kinds(config: object) -> Iterator[str]:
    """Kinds of rotary embedding ("yarn") of a config, of its parts and of kinds of layers."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if name in ("rope_type", "type") and isinstance(value, str):
            yield value
        elif str(name).startswith("rope_") or _is_config(value) or _is_rope(value):
            yield from rope_kinds(value)


def _is_rope(value: object) -> bool:
    """One of a kind of layers, as Gemma 3 has them."""
    return isinstance(value, Mapping) and "rope_theta" in value


def folder_of(model: str, revision: str | None = None) -> Path | None:
    """Where a model's files lie: its own folder, or that of the hub's cache, if it is there."""
    if os.path.isdir(model):
        return Path(model)
    if "://" in model or os.path.exists(model):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):  # ValueError: no name that a hub has
        return None
    return Path(found).parent if isinstance(found, str) else None


def has_rope(model: str, kind: str) -> bool:
    """Whether a model whose files are here has a rotary embedding of this kind."""
    folder = folder_of(model)
    return folder is not None and kind in rope_kinds(_descriptions(folder).get("config.json"))


def model_words(
    model: str, revision: str | None = None, identity: str | None = None
) -> dict[str, object]:
    """Identify a model or an adapter by its files as they are now; "weights" is None where nothing
    names them.

    model: a folder, a hub's name, or a GGUF file. identity: what the user states instead of it.
    """
    folder = folder_of(model, revision)
    found: dict[str, object] = {
        "model": os.path.realpath(model) if os.path.exists(model) else model,
        "revision": revision,
        "weights": {"identity": identity} if identity else None,
    }
    if folder is not None:
        found["descriptions"] = _descriptions(folder)
    if not identity:
        with suppress(OSError, UnsupportedError):
            files = [Path(model)] if folder is None else _weight_files(folder)
            found["weights"] = (
                dict(zip([one.name for one in files], digests(files), strict=True)) or None
            )
    return found


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))


def _descriptions(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in DESCRIPTIONS:
        with suppress(OSError, ValueError):
            read = json.loads((folder / name).read_bytes())
            found[name] = config_words(read) if isinstance(read, Mapping) else read
    for path in sorted(folder.glob("*.py")):
        found[path.name] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return found


def warn_unshared(model: str, where: str) -> None:
    """Warn once that nothing identifies the weights of an engine. where: `identity` is written
    there."""
    log.warning(
        "cxlkv: nothing says which weights %s has: they are no .safetensors or .gguf files in a "
        "folder or in the hub's cache. So pages are shared with no other engine, and not found "
        "after a restart. Where you know which they are, write their name as identity in %s",
        model,
        where,
    )
