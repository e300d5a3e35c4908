"""Sparse decode attention on the GPU: beside the memory that it reads, and beside torch's over all.

K and V of all lists lie in GPU memory, in bf16 and as codes; a list is one sequence in decoding,
with one query row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from cxlkv.arrays import memory_of
from cxlkv.bench.result import short
from cxlkv.kernels.attend import CODE_BITS, attend
from cxlkv.kernels.reference_codes import CodeForm, decode

from .case import ROUNDS, Progress, Timer

LONG_BYTES = 256 << 20  # reading less, a launch takes long enough to be seen
TOLERANCE = 0.02  # relative, in the Frobenius norm, of bf16


@dataclass(frozen=True)
class Size:
    """Llama 3 8B's attention, in bf16; contexts in tokens, shares of their pages."""

    contexts: tuple[int, ...] = (8192, 16384, 32768, 65536, 131072)
    lists: tuple[int, ...] = (1, 16)
    shares: tuple[float, ...] = (0.05, 0.10, 1.0)
    encodings: tuple[str, ...] = ("int8", "int4")
    encoded_shares: tuple[float, ...] = (0.10, 1.0)
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_tokens: int = 16
    yardstick_bytes: int = 4 << 30
    rounds: int = ROUNDS


TINY = Size(
    contexts=(64, 96),
    lists=(2,),
    shares=(0.5, 1.0),
    encoded_shares=(0.5, 1.0),
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    yardstick_bytes=1 << 12,
    rounds=1,
)


class Lists:
    """Sequences of one length; a piece is 16 tokens of one head, wherever the table says."""

    def __init__(self, size: Size, count: int, tokens: int, device: torch.device):
        self.size = size
        random = torch.Generator(device).manual_seed(tokens + count)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.bfloat16, device=device)

        # Of such queries some keys matter more than others: a mean of all values is nearly 0.
        self.q = 2 * draw(count, 1, size.q_heads, size.head_dim)
        self.k, self.v = (draw(count, size.kv_heads, tokens, size.head_dim) for _ in range(2))

    def choose(self, share: float) -> Tensor:
        """So many pages of each head, drawn anew, in any order: lists, kv_heads, pages; int32."""
        count, heads, tokens, _ = self.k.shape
        pages = tokens // self.size.page_tokens
        drawn = torch.rand(count, heads, pages, device=self.k.device).argsort(dim=-1)
        return drawn[..., : max(1, math.ceil(share * pages))].to(torch.int32).contiguous()

    def addresses(self, of: Tensor, pages: Tensor) -> Tensor:
        """Addresses of the pieces of these pages, in K or V."""
        count, heads, tokens, dim = of.shape
        row = dim * of.element_size()
        first = torch.arange(count * heads, device=of.device).view(count, heads, 1)
        found = memory_of(of, "of") + first * (tokens * row)
        return (found + pages.to(torch.int64) * (self.size.page_tokens * row)).contiguous()

    def bytes_of(self, pages: Tensor) -> int:
        """K and V that attention to these pages reads."""
        piece = self.size.page_tokens * self.size.head_dim * self.k.element_size()
        return 2 * pages.numel() * piece

    def sparse(self, pages: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Attention to these pages, the tables made beforehand."""
        count, _, tokens, _ = self.k.shape
        positions = torch.full((count, 1), tokens - 1, dtype=torch.int64, device=self.k.device)
        return partial(
            attend,
            self.q,
            self.addresses(self.k, pages),
            self.addresses(self.v, pages),
            pages,
            positions,
            page_tokens=self.size.page_tokens,
        )

    def reference(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """The first list's result in float32: out [q_heads, head_dim] and log-sum-exp [q_heads]."""
        size = self.size
        group = size.q_heads // size.kv_heads
        tokens = pages[0].long()[..., None] * size.page_tokens + torch.arange(
            size.page_tokens, device=pages.device
        )
        index = tokens.flatten(1)[..., None].expand(-1, -1, size.head_dim)
        k, v = (of[0].gather(1, index).float() for of in (self.k, self.v))
        q = self.q[0, 0].float().view(size.kv_heads, group, size.head_dim)
        scores = q @ k.transpose(1, 2) / math.sqrt(size.head_dim)
        out = torch.softmax(scores, -1) @ v
        return out.reshape(size.q_heads, -1), scores.logsumexp(-1).reshape(-1)

    def rivals(self) -> dict[str, Callable[[], Tensor]]:
        """torch's attention over all K and V, in the forms that it can be asked for."""
        size = self.size
        count, _, _, dim = self.k.shape
        group = size.q_heads // size.kv_heads
        q = self.q.view(count, size.q_heads, 1, dim)
        grouped = self.q.view(count, size.kv_heads, group, dim)
        sdpa = functional.scaled_dot_product_attention
        forms: dict[str, Callable[[], Tensor]] = {
            "sdpa_gqa": lambda: sdpa(q, self.k, self.v, enable_gqa=True),
            "sdpa_grouped": lambda: sdpa(grouped, self.k, self.v),
        }
        if self.room(2 * group * self.k.nbytes):
            k, v = (of.repeat_interleave(group, dim=1) for of in (self.k, self.v))
            forms["sdpa_expanded"] = lambda: sdpa(q, k, v)
        return forms

    def room(self, wanted: int) -> bool:
        if self.k.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.k.device)
        return wanted < free // 2


class Coded:
    """Codes of as many tokens as lists have: noise, of rows of usual size."""

    def __init__(self, lists: Lists, encoding: str):
        self.lists, self.encoding = lists, encoding
        count, heads, tokens, dim = lists.k.shape
        self.forms = [CodeForm(CODE_BITS[encoding], dim, values) for values in (False, True)]
        pages = tokens // lists.size.page_tokens
        self.pieces = [self._draw((count, heads, pages), form) for form in self.forms]

    def _draw(self, shape: tuple[int, int, int], form: CodeForm) -> Tensor:
        tokens, device = self.lists.size.page_tokens, self.lists.k.device
        bytes_of = form.piece_bytes(tokens)
        pieces = torch.randint(0, 256, (*shape, bytes_of), dtype=torch.uint8, device=device)
        scale = math.sqrt(12) / (1 << form.bits)
        pieces[..., form.scales_offset(tokens) :].view(torch.float16).fill_(scale)
        return pieces

    def bytes_of(self, pages: Tensor) -> int:
        return pages.numel() * sum(pieces.shape[-1] for pieces in self.pieces)

    def sparse(self, pages: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Lists, as sparse tensors."""
        count, heads, tokens, _ = self.lists.k.shape
        positions = torch.full((count, 1), tokens - 1, device=pages.device)
        first = torch.arange(count * heads, device=pages.device).view(count, heads, 1)
        keys_at, values_at = (
            memory_of(of, "pieces") + (first * of.shape[2] + pages.to(torch.int64)) * of.shape[3]
            for of in self.pieces
        )
        return partial(
            attend,
            self.lists.q,
            keys_at,
            values_at,
            pages,
            positions,
            page_tokens=self.lists.size.page_tokens,
            encodings=(self.encoding, self.encoding),
        )

    def reference(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """The first list's result in float32: out [q_heads, head_dim] and log-sum-exp [q_heads]."""
        size, chosen = self.lists.size, pages[0, 0].long()
        k, v = (
            decode(of[0, 0][chosen], form, size.page_tokens).flatten(0, 1)
            for of, form in zip(self.pieces, self.forms, strict=True)
        )
        q = self.lists.q[0, 0, : size.q_heads // size.kv_heads].double()
        scores = q @ k.T / math.sqrt(size.head_dim)
        return (torch.softmax(scores, -1) @ v).float(), scores.logsumexp(-1).float()


def run(progress: Progress, device: torch.device, size: Size) -> None:
    """Metrics attend_<context>_<percent>_x<lists>, <encoding>_... and sdpa_..., in us, and hbm in
    bytes/s; ratios of speeds: ..._to_hbm, attend_..._to_sdpa, <encoding>_..._to_bf16."""
    result, timer = progress.result, Timer(device, size.rounds)
    hbm = memory(progress, timer, size)
    result.notes.append(
        f"{size.q_heads} query heads on {size.kv_heads} kv heads of {size.head_dim}, bf16, pages "
        f"of {size.page_tokens} tokens drawn for each head, one query row a list; bytes are those "
        f"of K and V; attend_to_hbm is the least of those that read {LONG_BYTES >> 20} MiB or more"
    )
    for count in size.lists:
        for tokens in size.contexts:
            if progress.left(f"{count} lists of {tokens} tokens"):
                measure(progress, timer, Lists(size, count, tokens, device), hbm)
                if device.type == "cuda":
                    torch.cuda.empty_cache()  # room() asks the device, not torch
    if device.type == "cuda":
        but = ", ".join(sorted(timer.uncaptured))
        result.notes.append(
            "attention is timed as a replay of a CUDA graph of one call"
            + (f", but these, which could not be captured, as calls: {but}" if but else "")
        )


def memory(progress: Progress, timer: Timer, size: Size) -> float:
    """Bytes/s of the best of three ways to go through a large buffer."""
    words = size.yardstick_bytes // 4
    buffer = torch.ones(words, dtype=torch.float32, device=timer.device)
    half = words // 2
    timed = timer(
        {
            "sum": buffer.sum,
            "amax": buffer.amax,
            "copy": lambda: buffer[:half].copy_(buffer[half : 2 * half]),
        }
    )
    best = {"hbm": min(timed.values(), key=min)}
    speed = progress.result.speeds(best, buffer.nbytes, unit="bytes/s")["hbm"]
    progress.save("memory", f"{speed / 1e9:.0f} GB/s")
    return speed


def measure(progress: Progress, timer: Timer, lists: Lists, hbm: float) -> None:
    """One number of lists, one context: our shares and torch's forms take turns."""
    result, size = progress.result, lists.size
    count, tokens = lists.k.shape[0], lists.k.shape[2]
    where = f"{short(tokens)}_x{count}"
    chosen = {f"{100 * share:g}": lists.choose(share) for share in size.shares}
    functions: dict[str, Callable[[], object]] = {}
    for percent, pages in chosen.items():
        attention = lists.sparse(pages)
        check(progress, f"attend_{percent}_{where}", attention(), lists.reference(pages))
        functions[percent] = attention
    rivals = lists.rivals()
    functions |= rivals
    timed = timer(timer.captured(functions))
    us = result.times({n: timed[n] for n in chosen}, "us", f"attend_{{}}_{where}")
    measure_codes(progress, timer, lists, chosen, hbm, where)
    best = min(result.times({n: timed[n] for n in rivals}, "us", f"{{}}_{where}").values())
    for percent, pages in chosen.items():
        name, read = f"attend_{percent}_{where}", lists.bytes_of(pages)
        to_hbm = read / (us[percent] / 1e6) / hbm
        result.ratios[f"{name}_to_hbm"] = to_hbm
        if read >= LONG_BYTES:
            result.ratios["attend_to_hbm"] = min(to_hbm, result.ratios.get("attend_to_hbm", 1e9))
        result.ratios[f"{name}_to_sdpa"] = best / us[percent]
    said = ", ".join(f"{name} {1e6 * min(seconds):.0f}" for name, seconds in timed.items())
    progress.save(f"{count} lists of {tokens} tokens", f"{said} us at best")


def measure_codes(
    progress: Progress,
    timer: Timer,
    lists: Lists,
    chosen: dict[str, Tensor],
    hbm: float,
    where: str,
) -> None:
    """Codes of as many pages, beside bf16, in turns."""
    size = lists.size
    for encoding in size.encodings:
        coded = Coded(lists, encoding)
        for share in size.encoded_shares:
            percent = f"{100 * share:g}"
            pages, name = chosen[percent], f"{encoding}_{percent}_{where}"
            attention = coded.sparse(pages)
            check(progress, name, attention(), coded.reference(pages))
            timed = timer(timer.captured({"bf16": lists.sparse(pages), encoding: attention}))
            us = progress.result.times({encoding: timed[encoding]}, "us", name)[encoding]
            ratios = progress.result.ratios
            ratios[f"{name}_to_hbm"] = coded.bytes_of(pages) / (us / 1e6) / hbm
            ratios[f"{name}_to_bf16"] = min(timed["bf16"]) / min(timed[encoding])


def check(
    progress: Progress, name: str, got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]
) -> None:
    """The first list's heads that are wanted, against float32; a NaN is no match."""
    heads = len(wanted[1])
    out, lse = got[0][0, 0, :heads].float(), got[1][0, 0, :heads].float()
    error = (out - wanted[0]).norm() / wanted[0].norm()
    apart = (lse - wanted[1]).abs().max()
    progress.result.checks[name] = bool(error < TOLERANCE) and bool(apart < TOLERANCE)
