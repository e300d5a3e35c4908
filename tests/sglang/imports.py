"""SGLang's modules, imported before anything else asks for them: import this first.

All of SGLang imports its models for pictures, which take constants of torchvision. That brings a
torch for CUDA, and nothing here looks at a picture: a name stands in its place. What SGLang's
modules and theirs warn of when they are imported is no error of a test.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip(
        "SGLang is not installed here: `make test-sglang` has its own environment",
        allow_module_level=True,
    )


def without_pictures() -> None:
    """A name in the place of torchvision."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    importlib.import_module("transformers")  # it must find that there is none
    made = [ModuleType(name) for name in ("torchvision", "torchvision.transforms")]
    made.append(ModuleType("torchvision.transforms.functional"))
    for module in made:
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        module.InterpolationMode = object  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
    made[0].transforms, made[1].functional = made[1], made[2]  # type: ignore[attr-defined]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    without_pictures()
    importlib.import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
    importlib.import_module("sglang.srt.observability.metrics_collector")
