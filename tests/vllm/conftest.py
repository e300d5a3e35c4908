"""What the tests with vLLM share: a tiny model, prompts, engines that end with their test."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from cxlkv import CXLPool

from .engines import LAYERS, VOCABULARY_SIZE, Engine
from .servers import Servers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPE: dict[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": 4096,
}


@pytest.fixture(autouse=True, scope="session")
def vllm_is_there() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: `make test-vllm` has an environment of its own")


def saved(made: PreTrainedModel, folder: Path) -> Path:
    """Random weights, and not small ones: logits would hardly depend on keys and values."""
    import torch

    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.12)
    made.save_pretrained(folder)
    return folder


def random_llama(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig.from_dict(SHAPE)
    return saved(LlamaForCausalLM(config), folder)


@pytest.fixture(scope="session")
def model(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def spoken(model: Path) -> Path:
    """The tiny model with a tokenizer, which a server wants."""
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(VOCABULARY_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(f"{model}/tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="session")
def windowed_model(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma-3: every other layer sees the last 64 tokens only."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    windows = {
        **{"num_hidden_layers": 4, "max_position_embeddings": 2048, "sliding_window": 64},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = Gemma3TextConfig.from_dict({**SHAPE, **windows})
    return saved(Gemma3ForCausalLM(config), tmp_path_factory.mktemp("windowed"))


class MakeEngine(Protocol):
    def __call__(
        self,
        extra: dict[str, object] | None = ...,
        *,
        processes: bool = ...,
        environment: dict[str, str] | None = ...,
        **settings: object,
    ) -> Engine: ...


@pytest.fixture
def pools_folder(tmp_path: Path) -> Iterator[Path]:
    """Where engines have their pools. With each goes the state of this host, which killed engines
    leave, and those that end without closing it."""
    yield tmp_path
    for pool in tmp_path.rglob("*.pool"):
        CXLPool.remove(pool)


@pytest.fixture
def make_engine(model: Path, pools_folder: Path) -> Iterator[MakeEngine]:
    """Begins an engine; ready() waits for it, so that several may start at once."""
    with ExitStack() as ending:
        made: list[Engine] = []

        def make(
            extra: dict[str, object] | None = None,
            *,
            processes: bool = False,
            environment: dict[str, str] | None = None,
            **settings: object,
        ) -> Engine:
            log = pools_folder / f"engine{len(made)}.log"
            given = {"model": str(model), **settings}
            engine = Engine(log, extra, processes=processes, environment=environment, **given)
            made.append(engine)
            ending.callback(engine.kill)
            return engine

        yield make


@pytest.fixture
def servers(spoken: Path, pools_folder: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(spoken, pools_folder, stack)
