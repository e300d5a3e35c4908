"""SGLang without the parts that need torchvision, of which there is no build for CPUs."""

from __future__ import annotations

import importlib.util
import sys
import types

# Models with images, which SGLang's configs import for their names; nothing here is of them.
MODULES = (
    "sglang.srt.multimodal.internvl_utils",
    "sglang.srt.configs.deepseek_ocr",
    "sglang.srt.configs.deepseekvl2",
    "sglang.srt.configs.unlimited_ocr",
)


def leave_out() -> None:
    """In this process, before SGLang's configs are imported."""
    if importlib.util.find_spec("torchvision") is None:
        for name in MODULES:
            sys.modules.setdefault(name, _Module(name))


class _Empty(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})
