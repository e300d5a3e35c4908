"""Rows that came back from where they were kept encoded, beside what kept.py says of them."""

from __future__ import annotations

import numpy as np
import torch

from cxlkv.arrays import Floats

from . import kept

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""To a number of the dtype, relative."""


def check_kept(got: torch.Tensor, given: torch.Tensor, encoding: str) -> None:
    """Each number of rows [..., dim] is what is kept of it, in the rows' dtype. What codes stand
    for is turned back in float32, in which a channel has an error of its row's length."""
    rows: Floats = given.float().numpy()
    wanted = kept.kept(rows, encoding)
    length = np.linalg.norm(wanted, axis=-1, keepdims=True)
    turned = 0 if encoding == "fp8_e4m3" else 1e-6 * length
    most = np.abs(wanted) * ROUNDING[got.dtype] + turned + 1e-30
    away = np.abs(got.double().numpy() - wanted)
    assert (away <= most).all(), float((away / most).max())
