"""Layer groups: what windows save, what a windowed layer costs to attend to, and rows of MLA."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cxlkv.bench.cases import ndp_rivals
from cxlkv.bench.measure import interleave
from cxlkv.bench.result import Result
from cxlkv.layout import KVLayout, LayerGroup
from cxlkv.pool import CXLPool

# Layers with a window, window, layers without, and how they alternate: every n-th sees all.
MODELS = {
    "gemma3_12b": (40, 1024, 8, 6),
    "gemma3_27b": (52, 1024, 10, 6),
    "gpt_oss_20b": (12, 128, 12, 2),
}


LATENT, ROPE = 512, 64
"""Channels of DeepSeek's row."""


@dataclass(frozen=True)
class Size:
    """32,768 tokens of prompt and 256 of decoding; a row of DeepSeek's for 128 query heads."""

    prompt: int = 32768
    decode: int = 256
    heads: int = 128
    rounds: int = 9
    settle_s: float = 0.25


def run(result: Result, size: Size = Size()) -> None:
    """Pages and times with and without windows; attention to latents in GB/s of stored rows."""
    for model, (windowed, window, full, every) in MODELS.items():
        held = {
            limit: pages_held(result, model, size, (windowed, limit, full, every))
            for limit in (window, None)
        }
        result.ratios[f"{model}_held_to_no_windows"] = held[window] / held[None]
    measure_window(result, size)
    measure_latent(result, size)


def pages_held(
    result: Result, model: str, size: Size, shape: tuple[int, int | None, int, int]
) -> float:
    """Layers x pages that one sequence holds, prompt and decoding done; one channel a head, as
    the number of pages does not depend on it."""
    windowed, window, full, every = shape
    groups = [
        LayerGroup(layers=windowed, kv_heads=1, head_dim=16, window=window),
        LayerGroup(layers=full, kv_heads=1, head_dim=16),
    ]
    order = alternating(windowed, full, every)
    layout = KVLayout.of(groups, order)
    tokens = size.prompt + size.decode
    capacity = int(layout.token_bytes * tokens * 1.5) + (64 << 20)
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity, threads=1) as pool:
        sequence = pool.sequence()
        rows = torch.zeros(size.prompt, 1, 16, dtype=torch.bfloat16)
        for layer in range(layout.layers):
            sequence.append(layer, rows, rows, rewind=128)
        for _ in range(size.decode):
            for layer in range(layout.layers):
                sequence.append(layer, rows[:1], rows[:1], rewind=128)
        stats, geometry = pool.stats(), pool.pages.geometry
        rounded_up = geometry["part_count"] * geometry["record_layers"]
        pages = float(stats["pages_held"] * geometry["record_layers"])
        name = f"{model}_{'windows' if window else 'no_windows'}"
        result.measure(f"{name}_held", [pages], "pages of one layer")
        result.measure(f"{name}_rounded_up", [rounded_up - layout.layers], "layers")
        result.checks[f"{name}_none_missing"] = len(sequence) == tokens
        return pages


def alternating(windowed: int, full: int, every: int) -> list[int]:
    """Group of each layer: every n-th of the second group, while there are any."""
    order: list[int] = []
    for layer in range(windowed + full):
        sees_all = layer % every == every - 1 and order.count(1) < full
        order.append(1 if sees_all or order.count(0) == windowed else 0)
    return order


def measure_window(result: Result, size: Size) -> None:
    """One query token over a window of 1,024 tokens and over the whole prompt: 8 heads of 128."""
    group = LayerGroup(layers=1, kv_heads=8, head_dim=128)
    windowed = LayerGroup(layers=1, kv_heads=8, head_dim=128, window=1024)
    layout = KVLayout.of([windowed, group])
    capacity = int(layout.token_bytes * size.prompt * 1.4) + (64 << 20)
    generator = torch.Generator().manual_seed(3)
    k = torch.randn(size.prompt, 8, 128, generator=generator).bfloat16()
    query = torch.randn(32, 128, generator=generator).bfloat16()
    with CXLPool.create(
        "anonymous:", layout=layout, capacity=capacity, checksum=False, threads=1
    ) as pool:
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, k, k, rewind=128)
        out, _ = sequence.attend(0, query)
        near = k[-1024:].permute(1, 0, 2)
        wanted = ndp_rivals.sdpa(query.view(1, 8, -1, 128), near, near).view_as(query)
        difference = (torch.as_tensor(out) - wanted).abs().max().item()
        result.checks["window_agrees_with_torch"] = difference < 0.02
        samples = interleave(
            {
                "window": lambda: sequence.attend(0, query),
                "all_tokens": lambda: sequence.attend(1, query),
            },
            size.rounds,
        )
    median = result.times(samples, "us", "attend_{}")
    result.ratios["attend_window_cost_to_all_tokens"] = median["window"] / median["all_tokens"]
    result.ratios["window_tokens_to_all_tokens"] = min(1.0, 1024 / size.prompt)


def measure_latent(result: Result, size: Size) -> None:
    """Attention of one token's heads to latents where they lie, against torch on one tensor."""
    dim = LATENT + ROPE
    group = LayerGroup(
        layers=1, kv_heads=1, head_dim=dim, value_head_dim=LATENT, values="key_prefix"
    )
    layout = KVLayout.of([group])
    capacity = int(layout.token_bytes * size.prompt * 1.4) + (64 << 20)
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(size.prompt, 1, dim, generator=generator).bfloat16()
    query = (torch.randn(size.heads, dim, generator=generator) * 0.3).bfloat16()
    scale = dim**-0.5
    before = torch.get_num_threads()
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity, checksum=False) as pool:
        sequence = pool.sequence()
        sequence.append(0, rows, None)

        def with_torch() -> torch.Tensor:
            logits = (query @ rows[:, 0].T).float() * scale
            return torch.softmax(logits, dim=-1).bfloat16() @ rows[:, 0, :LATENT]

        difference = (torch.as_tensor(sequence.attend(0, query)[0]) - with_torch()).abs().max()
        result.checks["latent_agrees_with_torch"] = difference.item() < 0.02
        for count in (1, 2):
            pool.set_threads(count)
            torch.set_num_threads(count)
            samples = interleave(
                {"attend": lambda: sequence.attend(0, query), "torch": with_torch},
                size.rounds,
                settle_s=size.settle_s,
            )
            speed = result.speeds(samples, size.prompt * dim * 2, f"latent_{{}}_{count}_threads")
            ratio = speed["attend"] / speed["torch"]
            result.ratios[f"latent_attend_to_torch_{count}_threads"] = ratio
    torch.set_num_threads(before)
    expanded = size.heads * (128 + 64 + 128)  # DeepSeek-V3: keys of 192, values of 128
    result.ratios["latent_bytes_to_expanded"] = dim / expanded
