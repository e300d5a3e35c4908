"""The thread that saves what a device has copied to host memory, by itself."""

from __future__ import annotations

import pytest

from cxlkv.errors import MemoryShortError
from cxlkv.gpu import streams

torch = pytest.importorskip("torch", reason="the engine's blocks are torch's")

from cxlkv.adapters.vllm.saving import Ring  # noqa: E402  it needs torch


def test_a_host_that_gives_no_pinned_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*given: object, **how: object) -> object:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(streams, "pinned", short)
    with pytest.raises(MemoryShortError, match=r"no 4096 bytes of pinned memory .*batched-tokens"):
        Ring(4096, torch.device("cpu"))
