"""Where the engine keeps K and V of its layers, and in which order.

on a CPU       [blocks, heads, K of all tokens, then V], packed in the backend's way, or not
on a device    logically [blocks, heads, tokens, K and V]; strides say where that is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import vllm

from cxlkv.adapters.vllm.device_blocks import DeviceMemory, Link
from cxlkv.adapters.vllm.latents import are_latents, is_indexer
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True)
class Layers:
    """The memory of an engine's layers, by name; link: to it, where it is on a device."""

    by_name: Mapping[str, BlockMemory]
    link: Link | None = None

    def share(self, number: int, count: int) -> Layers:
        """Those of one share of the heads."""
        own = {name: layer.shares(count)[number] for name, layer in self.by_name.items()}
        return Layers(own, self.link)


ROWS = "vllm rows"
"""The packing of devices: rows of tokens, wherever these lie."""


def packing_of(vllm_config: VllmConfig, specs: Sequence[AttentionSpec]) -> str:
    """The order in which the engine keeps the numbers of a block: part of its keys' namespace."""
    from vllm.platforms import current_platform

    version = ".".join(vllm.__version__.split(".")[:2])
    if current_platform.is_cuda():
        return ROWS
    if not current_platform.is_cpu():
        raise UnsupportedError(
            f"cxlkv: vLLM on {current_platform.device_name} is not served yet, only on CUDA and CPU"
        )
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    kinds = {
        "latents"
        if are_latents([one])
        else _get_attn_isa(dtype, one.block_size, one.head_size, cache_dtype)
        for one in specs
    }
    return f"vllm {version} cpu {' '.join(sorted(kinds))}"


def in_blocks(memory: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Latents in blocks as requests have them. Where a kernel takes shorter ones, vLLM shows these,
    [blocks, 1, tokens, dim], one behind the other."""
    is_cut = memory.dim() == 4 and memory.shape[2] != spec.block_size and memory.is_contiguous()
    if not (are_latents([spec]) and is_cut) or memory[:, 0, :, 0].numel() % spec.block_size:
        return memory
    return memory.view(-1, 1, spec.block_size, memory.shape[3])


def layers_of(
    kv_caches: Mapping[str, torch.Tensor],
    specs: Mapping[str, tuple[int, AttentionSpec]],
    device: torch.device | None,
) -> Layers:
    """device: where they are; None: in memory of the host. Raises UnsupportedError."""
    if device is None:
        return Layers(host_layers(kv_caches, specs))
    link = Link(device)
    return Layers(device_layers(kv_caches, specs, link), link)


def host_layers(
    kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, tuple[int, AttentionSpec]]
) -> dict[str, BlockMemory]:
    """The memory of each layer of a CPU, by name. Layers of several groups may share memory, each
    in blocks of its own. Latents have one head, and no V."""
    found: dict[str, BlockMemory] = {}
    for name, (group, spec) in specs.items():
        memory, tokens, dim = kv_caches[name], spec.block_size, spec.head_size
        is_latent = are_latents([spec])
        wanted = (spec.num_kv_heads, tokens, dim if is_latent else 2 * dim)
        if memory.shape[1:] != wanted or memory.dtype != spec.dtype or not memory.is_cpu:
            raise UnsupportedError(
                f"cxlkv: {name} keeps K and V as {tuple(memory.shape)} of {memory.dtype} on "
                f"{memory.device}; (blocks, {', '.join(map(str, wanted))}) of {spec.dtype} on a "
                "CPU is what is served"
            )
        if is_latent:
            kept = memory.view(torch.bfloat16) if is_indexer(spec) else memory
            found[name] = BlockMemory(kept, None, group)
            continue
        halves = memory.view(-1, spec.num_kv_heads, 2 * tokens, dim)
        found[name] = BlockMemory(halves[:, :, :tokens], halves[:, :, tokens:], group)
    return found


def device_layers(
    kv_caches: Mapping[str, torch.Tensor],
    specs: Mapping[str, tuple[int, AttentionSpec]],
    link: Link,
) -> dict[str, DeviceMemory]:
    """The memory of each layer of a device, by name. The engine's kernels may have shorter blocks
    than its tables."""
    found: dict[str, DeviceMemory] = {}
    for name, (group, spec) in specs.items():
        memory, tokens, dim = kv_caches[name], spec.block_size, spec.head_size
        channels = dim if are_latents([spec]) else 2 * dim
        shape = tuple(memory.shape)
        right = len(shape) == 4 and (shape[1], shape[3]) == (spec.num_kv_heads, channels)
        right = right and shape[2] > 0 and tokens % shape[2] == 0 and memory.stride(3) == 1
        if not right or memory.dtype != spec.dtype or memory.device != link.device:
            raise UnsupportedError(
                f"cxlkv: {name} keeps K and V as {shape} of {memory.dtype} on {memory.device}; "
                f"(blocks, {spec.num_kv_heads}, {tokens} or a part of it, {channels}) of "
                f"{spec.dtype} on {link.device} is what is served"
            )
        if is_indexer(spec):
            memory, dim = memory.view(torch.bfloat16), dim // 2
        found[name] = DeviceMemory(memory, dim, tokens, group, link)
    return found
