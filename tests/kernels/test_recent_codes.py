"""Fresh rows in a ring of codes, held to what a pool makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import recent as subject
from cxlkv.kernels.recent import append_codes
from cxlkv.kernels.reference_codes import CodeForm

from ..support import kept
from ..support.encodings import Form
from .test_attend import BROKEN
from .test_attend_codes import places, scales_of

HEADS, SLOTS = 2, 2
# Requests at different places; -1: no row. Rows of a step share bytes of values in 4 bits.
STEPS = [
    [[0, 1, 2], [14, 15, 16], [-1, -1, -1]],
    [[3, 4, -1], [17, 18, 19], [7, -1, -1]],
    [[4, 5, 6], [20, 21, 22], [-1, 8, 9]],
]
BOTH = pytest.mark.parametrize("bits", [8, 4])
EACH = pytest.mark.parametrize("values", [False, True], ids=["keys", "values"])


def drawn(rng: torch.Generator, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[3 requests, 3 steps, HEADS, dim]: of all sizes, with some zeros, huge ones and NaN."""
    rows = torch.randn((3, 3, HEADS, dim), generator=rng)
    rows *= torch.exp(4 * torch.randn((3, 3, HEADS, 1), generator=rng))
    rows[0, 1, 0] = 0
    rows[1, 2, 1, dim // 2] = torch.inf
    rows[1, 0, 0, 0] = torch.nan
    rows[0, 2, 1] = 2e38 if dtype != torch.float16 else 6e4
    return rows.to(dtype)


def codes_of(pieces: torch.Tensor, form: CodeForm, page_tokens: int) -> torch.Tensor:
    """[..., page_tokens, dim], the scales as one more channel."""
    own = Form(form.bits, form.dim, form.values)
    byte, bit = places(own, page_tokens)
    codes = pieces[..., byte].float() // 2**bit % 2**form.bits
    scales = scales_of(pieces, own, page_tokens)[..., :page_tokens, None].float()
    return torch.cat([codes, scales], -1)


def check(
    device: torch.device, form: CodeForm, page_tokens: int, dtype: torch.dtype, seed: int
) -> None:
    """After each step every token of the ring is what it was, or what was appended there last."""
    rng = torch.Generator().manual_seed(seed)
    shape = (3, HEADS, SLOTS, form.piece_bytes(page_tokens))
    ring = torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng)
    wanted, ring = codes_of(ring, form, page_tokens), ring.to(device)
    for positions in STEPS:
        rows = drawn(rng, form.dim, dtype)
        at = torch.tensor(positions, device=device)
        append_codes(rows.to(device), ring, at, form, page_tokens)
        codes, scales = kept.codes(rows.float().numpy(), f"int{form.bits}")
        made = torch.from_numpy(np.concatenate([codes, scales[..., None]], -1))
        for request, row in np.argwhere(np.array(positions) >= 0):
            slot, token = divmod(positions[request][row], page_tokens)
            wanted[request, :, slot % SLOTS, token] = made[request, row]
        found = codes_of(ring.cpu(), form, page_tokens)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@BROKEN
@BOTH
@EACH
@pytest.mark.parametrize(
    ("dim", "page_tokens", "dtype"),
    [(128, 16, torch.bfloat16), (80, 20, torch.float32), (3, 4, torch.float16)],
    ids=["bf16", "fp32", "fp16"],
)
def test_codes_are_those_of_a_pool(
    bits: int,
    values: bool,
    dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    check(device, CodeForm(bits, dim, values), page_tokens, dtype, seed)


@BOTH
@EACH
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_so_are_those_of_the_reference(
    bits: int, values: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(subject, "runs_triton", lambda device: False)
    for dim, page_tokens in ((80, 20), (24, 4)):
        form = CodeForm(bits, dim, values)
        check(torch.device("cpu"), form, page_tokens, torch.bfloat16, seed)


def test_others_are_refused() -> None:
    form = CodeForm(8, 16, False)
    rows = torch.zeros(1, 1, 2, 16)
    ring = torch.zeros(1, 2, 2, form.piece_bytes(16), dtype=torch.uint8)
    positions = torch.zeros(1, 1, dtype=torch.int64)
    append_codes(rows, ring, positions, form, 16)
    for wrong in (
        (rows, ring.int(), positions),
        (rows, ring[..., :64].contiguous(), positions),
        (rows[..., :8], ring, positions),
        (rows, ring, positions.int()),
        (rows, ring.transpose(1, 2), positions),
    ):
        with pytest.raises(BadArgumentError):
            append_codes(*wrong, form, 16)
