"""Scores pages on the device by the summaries that it has of them, and takes the best.

A page's summary is what a method keeps of its keys, in the order of the pool's own pieces:

    digest    least and largest of each channel, in the pool's dtype: a bound of q.k
    mean_std  mean and standard deviation of each channel, bfloat16: q.mean + |q|.std
    sketch    2 bits a channel and a scale a token: the best estimate of q.k

score() gives each page the best over a request's rows and the query heads of a kv head; choose()
takes the best pages of each list by a threshold that is found on the device. Neither waits for the
device or allocates, so a CUDA graph may hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_index
from cxlkv.kernels.encode import LINE_BYTES, sketch_bytes
from cxlkv.kernels.runtime import check_tensor, current, one_device, runs_triton

FORMS = ("digest", "mean_std", "sketch")


@dataclass(frozen=True)
class Form:
    """How pages are summarised. dtype: of what is stored of a channel, but for sketches."""

    name: str
    page_tokens: int
    dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes(self) -> int:
        """Of a page of a head, whole lines."""
        if self.name == "sketch":
            return sketch_bytes(self.page_tokens, self.dim)
        return -(-2 * self.dim * self.dtype.itemsize // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True)
class Scratch:
    """What score() keeps of queries for sketches: codes int8 [rows, dim in 16s], their factors and
    offsets, float32 [2, rows]; rows: of all requests and query heads."""

    codes: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, form: Form, rows: int, device: torch.device) -> Scratch:
        dim = -(-form.dim // 16) * 16 if form.name == "sketch" else 1
        return cls(
            torch.zeros((rows, dim), dtype=torch.int8, device=device),
            torch.zeros((2, rows), device=device),
        )


class Scoring(NamedTuple):
    """A call of score(), which checks and explains it."""

    form: Form
    summaries: torch.Tensor
    slots: torch.Tensor
    q: torch.Tensor
    positions: torch.Tensor
    out: torch.Tensor
    scale: float

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q.shape[2] // self.out.shape[1]


class Choosing(NamedTuple):
    """A call of choose(), likewise."""

    scores: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    sinks: int
    wanted: torch.Tensor
    out: torch.Tensor


def score(
    form: Form,
    summaries: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    scratch: Scratch,
) -> torch.Tensor:
    """out, float32 [requests, kv_heads, pages_max]: -inf where there is no summary, NaN where a
    score is one.

    summaries: uint8 [slots, kv_heads, form.bytes]. slots: int32 [requests, pages_max], where each
    page's summary is, -1: nowhere. q: [requests, rows, q_heads, dim]. positions: int64 [requests,
    rows], negative for rows that are none. Raises BadArgumentError.
    """
    requests, pages = slots.shape
    if q.ndim != 4 or q.shape[0] != requests or q.shape[3] != form.dim or not q.is_contiguous():
        raise BadArgumentError(
            f"q is {tuple(q.shape)}: contiguous [{requests}, rows, q_heads, {form.dim}] wanted"
        )
    heads = summaries.shape[1]
    if q.shape[2] % heads:
        raise BadArgumentError(f"{q.shape[2]} query heads are none for {heads} kv heads")
    check_tensor("slots", slots, torch.int32, (requests, pages))
    check_tensor("summaries", summaries, torch.uint8, (len(summaries), heads, form.bytes))
    check_tensor("positions", positions, torch.int64, (requests, q.shape[1]))
    check_tensor("out", out, torch.float32, (requests, heads, pages))
    device = one_device(summaries=summaries, slots=slots, q=q, positions=positions, out=out)
    call = Scoring(form, summaries, slots, q, positions, out, scale)
    if not runs_triton(device):
        reference_index.score(call)
        return out
    from cxlkv.kernels import index_triton as kernels

    with current(device):
        kernels.score(call, scratch)
    return out


def choose(
    scores: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    sinks: int,
    wanted: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """out, int32 [requests, kv_heads, k]: pages of [first, last), -1 padded, ascending: the first
    `sinks` of them, and the best of the others, `wanted` together. Of equal scores the lower page;
    NaN is above all.

    scores: float32 [requests, kv_heads, pages_max]. first, last, wanted: int32 [requests]. Raises
    BadArgumentError.
    """
    requests, heads, pages = scores.shape
    for name, tensor in (("first", first), ("last", last), ("wanted", wanted)):
        check_tensor(name, tensor, torch.int32, (requests,))
    check_tensor("scores", scores, torch.float32, (requests, heads, pages))
    check_tensor("out", out, torch.int32, (requests, heads, out.shape[2]))
    device = one_device(scores=scores, first=first, last=last, wanted=wanted, out=out)
    call = Choosing(scores, first, last, min(sinks, pages), wanted, out)
    if not runs_triton(device):
        reference_index.choose(call)
        return out
    from cxlkv.kernels import index_triton as kernels

    with current(device):
        kernels.choose(call)
    return out
