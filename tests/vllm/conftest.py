"""What the tests with vLLM share: a tiny model, prompts, engines that end with their test."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from cxlkv import CXLPool

from .engines import VOCABULARY_SIZE, Engine
from .forked import Nursery
from .servers import Servers
from .tiny_models import tiny


@pytest.fixture(autouse=True, scope="session")
def vllm_is_there() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: `make test-vllm` has an environment of its own")


@pytest.fixture(scope="module")
def nursery(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Engines of any models."""
    folder = tmp_path_factory.mktemp("lives")
    with Nursery(folder / "none", folder) as made:
        yield made


@pytest.fixture(scope="session")
def model(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("Llama", tmp_path_factory.mktemp("model"))


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
    return tiny("Gemma-3", tmp_path_factory.mktemp("windowed"))


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
