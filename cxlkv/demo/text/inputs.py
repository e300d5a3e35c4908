"""What the demo on a text reads: a model's folder and the text. Nothing comes from a network.

What is wrong with either is one line that names it, whatever transformers made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from cxlkv.errors import BadArgumentError, UnsupportedError

CHARACTERS_OF_A_TOKEN = 64
"""No tokenizer packs more than this into its tokens, taken over a whole text."""
WEIGHTS = ("*.safetensors", "*.bin")
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of the model in a folder; BadArgumentError where there is none."""
    if folder.is_file():
        raise BadArgumentError(f"{folder} is a file: give the folder that the model lies in")
    if not folder.is_dir():
        # A name of the hub is a folder and a name, as the path of a model often is as well.
        name = (
            folder if len(folder.parts) == 2 and not folder.is_absolute() else "ORGANISATION/NAME"
        )
        raise BadArgumentError(
            f"there is no folder {folder}, and the demo downloads nothing: where there is a "
            f"network, run: hf download {name} --local-dir FOLDER; then give --model FOLDER"
        )
    if not (folder / "config.json").is_file():
        raise BadArgumentError(
            f"{folder} has no config.json: give the folder that save_pretrained() or "
            "hf download --local-dir filled"
        )
    with _as_one_line(f"{folder}: the config cannot be read"):
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    assert isinstance(config, PreTrainedConfig)
    config.name_or_path = folder.resolve().name  # the pool keeps it: no path of this machine
    return config


def read_text(path: Path, tokens: int) -> str:
    """The text's beginning, long enough for that many tokens; BadArgumentError if it is no text."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(tokens * CHARACTERS_OF_A_TOKEN)
    except UnicodeDecodeError as error:
        raise BadArgumentError(
            f"{path} is no UTF-8 text ({error.reason}): if it is a text of another encoding, run: "
            "iconv -f ENCODING -t UTF-8"
        ) from error
    if "\0" in text:
        raise BadArgumentError(f"{path} is no text: it has zero bytes")
    return text


def read_tokens(folder: Path, text: str, vocabulary_size: int) -> Tensor:
    """The token ids of `text` by the folder's tokenizer, as it begins a text: int64 [tokens]."""
    remedy = "save it beside the model, with tokenizer.save_pretrained()"
    with quiet(), _as_one_line(f"{folder}: no tokenizer can be read; {remedy}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        ids = tokenizer(text)["input_ids"]
    # Where its files are absent, transformers may make an empty tokenizer and not say so.
    if text.strip() and set(ids) <= set(tokenizer.all_special_ids):
        raise BadArgumentError(f"{folder}: no tokenizer that knows a word of the text; {remedy}")
    tokens = torch.tensor(ids, dtype=torch.int64)
    if len(tokens) and int(tokens.max()) >= vocabulary_size:
        raise BadArgumentError(
            f"{folder}: the tokenizer gave token {int(tokens.max())}, the model has "
            f"{vocabulary_size}: the tokenizer is of another model"
        )
    return tokens


def read_model(folder: Path) -> PreTrainedModel:
    """The model on the CPU, in the dtype that it is stored in, ready to be asked."""
    with quiet(), _as_one_line(f"{folder}: the model cannot be read"):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True, **LOCAL
        )
    model, found = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := sorted(found["missing_keys"]):
        raise BadArgumentError(
            f"{folder}: the weights lack {missing[0]}, which a {type(model).__name__} has: it "
            "holds a model for another task, or a part of one"
        )
    model.config.name_or_path = folder.resolve().name
    return model


def weights_bytes(folder: Path) -> int:
    """Size of the files that the weights are in; of two formats, the one that is loaded."""
    sizes = [[path.stat().st_size for path in folder.glob(pattern)] for pattern in WEIGHTS]
    return next((sum(some) for some in sizes if some), 0)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports; what matters is raised as an error."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _as_one_line(what: str) -> Iterator[None]:
    """Whatever a damaged or foreign folder makes the libraries raise: they do not say what."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedError(f"{what}: it needs code of its own, which is not run") from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadArgumentError(f"{what} ({type(error).__name__}: {reason})") from error
