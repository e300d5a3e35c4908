"""Where kernels are tested: in Triton's interpreter, and on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from cxlkv.kernels.runtime import INTERPRETED


@pytest.fixture(
    params=[
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                not INTERPRETED, reason="the kernels are compiled here, for the GPU"
            ),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """ "cpu" with the interpreter, or "cuda"."""
    found = torch.device(request.param)
    if found.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return found
