"""SGLang's own loading of weights into a model that serves: which pages are found behind it.

The model has SGLang's attention; its updater loads tensors into it, and the cache controller is
flushed as its radix cache does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from cxlkv.arrays import Bytes

from ..support.weight_files import safetensors
from .hicache import Engine, page_bytes

# isort: split
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.model_executor.model_runner_components import weight_updater
from torch import nn

from cxlkv.adapters.sglang.weights import UPDATER

PAGES = 6
NAME = "embedding.weight"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        nn.init.zeros_(self.embedding.weight)
        self.attention = RadixAttention(2, 16, 0.25, 2, 0)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class Served:
    """An engine with a model, of which K and V of a text are made here."""

    def __init__(self, folder: str, **extra: str):
        self.model = Model()
        self.engine = Engine(folder, **extra)  # type: ignore[arg-type]
        self.text = list(range(PAGES * self.engine.page_tokens))

    def update(self, number: float, how: str | None) -> None:
        """Call update_weights_from_tensor; how: its load_format."""
        named = [(NAME, torch.full((64, 32), number))]
        if how == "direct":
            weight_updater._model_load_weights_direct(self.model, named)
        else:
            self.model.load_weights(named)

    def flush(self) -> None:
        self.engine.controller.reset()
        self.engine.controller.mem_pool_host.clear()

    def payloads(self) -> list[Bytes]:
        made = np.random.default_rng(int(self.model.embedding.weight[0, 0]))
        return [made.integers(0, 256, page_bytes(self.engine.host), np.uint8) for _ in range(PAGES)]

    def save(self) -> int:
        """Pages that SGLang stored."""
        return self.engine.save(self.text, {"kv": self.payloads()}) // self.engine.page_tokens

    def fetch(self) -> int:
        """Pages that it found; they are those of the weights that it has."""
        tokens, found = self.engine.fetch(self.text)
        for page, wanted in zip(found["kv"], self.payloads(), strict=False):
            assert np.array_equal(page, wanted)
        return tokens // self.engine.page_tokens


class MakeServed(Protocol):
    def __call__(self, **extra: str) -> Served: ...


@pytest.fixture
def serve(folder: str) -> Iterator[MakeServed]:
    with ExitStack() as ending:

        def make(**extra: str) -> Served:
            made = Served(folder, **extra)
            ending.callback(made.engine.close)
            return made

        yield make


@pytest.mark.parametrize("how", [None, "direct"])
def test_weights_that_a_running_engine_loads_anew(serve: MakeServed, how: str | None) -> None:
    served = serve()
    assert (served.save(), served.fetch()) == (PAGES, PAGES)
    served.update(1, how)
    served.flush()
    assert served.fetch() == 0
    assert (served.save(), served.fetch()) == (PAGES, PAGES)
    fresh = serve()
    assert fresh.fetch() == PAGES, "those of the start"
    served.update(0, how)
    served.flush()
    assert served.fetch() == PAGES
    assert not served.engine.backend.counting.failures.total()


def test_weights_without_a_flush(serve: MakeServed) -> None:
    """SGLang's own cache may have K and V of both."""
    served = serve()
    served.save()
    served.update(1, None)
    assert (served.fetch(), served.save()) == (0, 0)
    assert served.engine.backend.counting.failures["weights"] == 2 * PAGES
    served.flush()
    assert (served.fetch(), served.save(), served.fetch()) == (0, PAGES, PAGES)


def test_a_backend_that_is_attached_later_shares_nothing_unless_told(
    serve: MakeServed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows what the server has loaded since its start."""
    (tmp_path / "model").mkdir()
    safetensors(tmp_path / "model/model.safetensors")
    model = str(tmp_path / "model")
    first = serve(model=model, identity="")
    assert (first.save(), serve(model=model, identity="").fetch()) == (PAGES, PAGES)
    updater = type(UPDATER, (), {})()
    updater.offload_tags = set()
    late = serve(model=model, identity="")
    assert "may have loaded other weights" in caplog.text
    assert (late.fetch(), late.save(), late.fetch()) == (0, PAGES, PAGES)
    named = serve(model=model, identity="mine")
    named.save()
    assert serve(model=model, identity="mine").fetch() == PAGES


def source(module: str) -> str:
    """Source of a module of SGLang's that needs more than is installed here."""
    found = find_spec(module)
    assert found
    assert found.origin
    return Path(found.origin).read_text()


def test_sglang_still_tells_what_we_hear() -> None:
    assert "self.cache_controller.mem_pool_host.clear()" in source(
        "sglang.srt.mem_cache.unified_radix_cache"
    )
    for method in ("alloc_prefetch_host_buffers", "write"):
        assert "mem_pool_host.alloc(" in inspect.getsource(getattr(HiCacheController, method))
    updater = source("sglang.srt.managers.scheduler_components.weight_updater")
    assert f"class {UPDATER}:" in updater
    assert "self.offload_tags.add(tag)" in updater
    assert 'GPU_MEMORY_TYPE_WEIGHTS = "weights"' in source("sglang.srt.constants")
    assert "self.get_model().load_weights(" in inspect.getsource(weight_updater)
