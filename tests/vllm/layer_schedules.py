"""schedules.py with the layers of models for which vLLM has no kernels on CPUs.

vLLM's own classes make the model, tiny: its layers say which caches they want, vLLM plans,
allocates and binds these, and only the numbers in them come from the text. Three things are as on
a GPU: sparse attention is not refused, nor prefixes of MLA, and kernels of MLA have blocks of 64.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import (
    AttentionGroup,
    allocate_kv_cache,
    bind_kv_cache_to_layers,
    map_kv_caches_to_kernel_blocks,
    prepare_kernel_block_sizes,
)

from cxlkv import CXLPool
from cxlkv.adapters.vllm.device_attention import DeviceAttention
from cxlkv.adapters.vllm.engine_attention import EngineAttention
from cxlkv.adapters.vllm.latent_backend import CpuLatentBackend
from cxlkv.adapters.vllm.layers import in_blocks, layers_of
from cxlkv.sequence import Hit
from tests.support.damaging import damage_piece

from .device_schedules import DeviceRows, DeviceWorker
from .schedules import WRONG, Case, Engine, Runner, States, Text, answer, run

KERNEL_TOKENS = 64
POISON = 0xA5
SHAPE: dict[str, object] = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "max_position_embeddings": 4096, "rope_theta": 10000.0},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6},
}
LATENT: dict[str, object] = {
    **{"kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 64, "hidden_act": "silu"},
}
DSA: dict[str, object] = {
    **{**SHAPE, **LATENT, "q_lora_rank": 32, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    **{"norm_topk_prob": True, "attention_bias": False},
    # The third layer sees what the second one's indexer chose.
    **{"index_topk": 64, "index_n_heads": 4, "index_head_dim": 128, "index_topk_freq": 2},
}
MODELS: dict[str, dict[str, object]] = {
    "Jamba": {
        **{**SHAPE, "model_type": "jamba", "architectures": ["JambaForCausalLM"]},
        **{"num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 1},
        **{"num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 1},
        "mamba_dt_rank": 8,
    },
    "Kimi-Linear": {
        **{**SHAPE, **LATENT, "model_type": "kimi_linear", "q_lora_rank": None, "head_dim": 32},
        **{"architectures": ["KimiLinearForCausalLM"], "mla_use_nope": True, "num_experts": None},
        "linear_attn_config": {
            **{"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4},
            **{"head_dim": 32, "short_conv_kernel_size": 4},
        },
    },
    "DeepSeek-V3.2": {
        **DSA,
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
    },
    "GLM-5": {**DSA, "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]},
}

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]


class LayerCase(Case):
    """block: tokens of the engine's blocks, at least. silent: vLLM calls the connector around no
    layer, as with Kimi-Linear and DeepSeek-V3.2 on GPUs. device: the worker has its blocks for
    those of a device."""

    block: int
    silent: bool
    device: bool


class GpuBlocks(CpuLatentBackend):
    """Of MLA: the blocks of FlashMLA's kernels, and of an indexer's."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        return [KERNEL_TOKENS]


# ---- a text's bytes in a layer ----


def bytes_of(states: States, layer: int, size: int) -> Bytes:
    """[token, byte]"""
    odd = np.random.default_rng(layer).integers(1, 2**62, -(-size // 8), np.uint64) * 2 + 1
    mixed = (states ^ (states >> np.uint64(29)))[:, None] * odd.astype(np.uint64)[None]
    return (mixed ^ (mixed >> np.uint64(32))).view(np.uint8)[:, :size]


class Memory(Protocol):
    """A layer's. size: bytes of a token, or of a state."""

    size: int

    def read(self, blocks: Places, places: Places) -> Bytes: ...
    def write(self, blocks: Places, places: Places, rows: Bytes) -> None: ...


class Rows:
    """K and V, or latents: [blocks of a kernel, heads, tokens, dim]."""

    def __init__(self, memory: torch.Tensor, block: int):
        self._bytes = memory.view(torch.uint8).numpy()
        self._block, self._tokens = block, memory.shape[2]
        self.size = self._bytes.shape[1] * self._bytes.shape[3]

    def _where(self, blocks: Places, places: Places) -> tuple[Places, Places]:
        slots = blocks * self._block + places
        return slots // self._tokens, slots % self._tokens

    def read(self, blocks: Places, places: Places) -> Bytes:
        block, token = self._where(blocks, places)
        return self._bytes[block, :, token].reshape(len(blocks), -1)

    def write(self, blocks: Places, places: Places, rows: Bytes) -> None:
        block, token = self._where(blocks, places)
        self._bytes[block, :, token] = rows.reshape(len(blocks), self._bytes.shape[1], -1)


class IndexerRows(Rows):
    """As indexer_k_quant_and_cache() has a block: all keys, and behind them their scales."""

    KEY, SCALE = 128, 4

    def __init__(self, memory: torch.Tensor, block: int):
        super().__init__(memory[:, None], block)
        assert self.size == self.KEY + self.SCALE
        flat = self._bytes.reshape(len(self._bytes), -1)
        assert np.shares_memory(flat, self._bytes)
        keys, scales = np.split(flat, [self._tokens * self.KEY], axis=1)
        self._parts = [keys.reshape(len(flat), -1, self.KEY), scales.reshape(len(flat), -1, 4)]

    def read(self, blocks: Places, places: Places) -> Bytes:
        where = self._where(blocks, places)
        return np.concatenate([part[where] for part in self._parts], axis=1)

    def write(self, blocks: Places, places: Places, rows: Bytes) -> None:
        where = self._where(blocks, places)
        for part, of in zip(self._parts, np.split(rows, [self.KEY], axis=1), strict=True):
            part[where] = of


class StateRows:
    """The tensors that a layer with states has, [blocks, ...] each: one state a block."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._parts = [one.view(torch.uint8).numpy() for one in tensors]
        sizes = [int(np.prod(part.shape[1:])) for part in self._parts]
        self._ends, self.size = np.cumsum(sizes).tolist(), sum(sizes)

    def read(self, blocks: Places, places: Places) -> Bytes:
        return np.concatenate(
            [part[blocks].reshape(len(blocks), -1) for part in self._parts], axis=1
        )

    def write(self, blocks: Places, places: Places, rows: Bytes) -> None:
        for part, (first, end) in zip(self._parts, pairwise([0, *self._ends]), strict=True):
            part[blocks] = rows[:, first:end].reshape(len(blocks), *part.shape[1:])


class BoundLayer(Protocol):
    kv_cache: torch.Tensor | tuple[torch.Tensor, ...]

    def get_attn_backend(self) -> type: ...


def memory_of(layer: BoundLayer, block: int) -> Memory:
    """Through what vLLM has bound to the layer, which its kernels write to."""
    bound = layer.kv_cache
    if isinstance(bound, tuple):
        return StateRows(bound)
    if bound.dtype == torch.uint8:
        return IndexerRows(bound, block)
    return Rows(bound if bound.dim() == 4 else bound[:, None], block)


# ---- the worker's side ----


class LayerRunner(Runner):
    def __init__(self, config: VllmConfig, made: KVCacheConfig, case: LayerCase):
        self._layers = cast(
            "dict[str, BoundLayer]", config.compilation_config.static_forward_context
        )
        self.block = made.kv_cache_groups[0].kv_cache_spec.block_size
        found = specs_by_layer(made)
        self._specs = {name: found[name] for name in self._layers if name in found}
        self._states = {name for name, spec in self._specs.items() if isinstance(spec, MambaSpec)}
        self._memory: dict[str, Memory] = {}
        self._before: dict[tuple[str, int], bool] = {}  # that the step's states were right
        self._cache_config = config.cache_config
        super().__init__(config, made, dict.fromkeys(self._specs, 0))
        quiet = [name for name in self._specs if name in self._states or "k_cache" in name]
        self.silent = set(self._specs if case["silent"] else quiet)

    def allocated(self) -> dict[str, torch.Tensor]:
        groups = [
            [
                AttentionGroup(self._layers[name].get_attn_backend(), [name], spec, number)
                for name in group.layer_names
                for spec in [self._specs[name]]
            ]
            for number, group in enumerate(self.config.kv_cache_groups)
        ]
        sizes = prepare_kernel_block_sizes(self.config, groups)
        layout = self._cache_config.get_resolved_kv_cache_layout()
        found = allocate_kv_cache(self.config, torch.device("cpu"), layout, sizes)
        flat = [one for of in groups for one in of]
        for one in flat:
            if issubclass(one.backend, CPUAttentionBackend):  # others' want a GPU
                one.create_metadata_builders(self.vllm_config, torch.device("cpu"))
        bind_kv_cache_to_layers(map_kv_caches_to_kernel_blocks(found, flat), self._layers)
        self._memory = {name: memory_of(self._layers[name], self.block) for name in self._specs}
        return cast("dict[str, torch.Tensor]", found)

    def poison(self, group: int, blocks: list[int]) -> None:
        for name in self.config.kv_cache_groups[group].layer_names if blocks else ():
            memory, tokens = self._memory[name], 1 if name in self._states else self.block
            which = np.repeat(np.array(blocks, np.int64), tokens)
            places = np.tile(np.arange(tokens), len(blocks))
            memory.write(which, places, np.full((len(which), memory.size), POISON, np.uint8))

    def _seen(self, request: str, layer: int, computed: int) -> tuple[int, Places, Places]:
        """The first token whose bytes a step behind `computed` tokens reads, and where they are."""
        first = max(0, computed - 1) if self.layers[layer] in self._states else 0
        return first, *self._slots(self.requests[request], layer, first, computed)

    def _is_right(self, request: str, layer: int, computed: int) -> bool:
        """A step reads a state before it writes the next one in its place."""
        known = self._before.pop((request, layer), None)
        return self._has_right(request, layer, computed) if known is None else known

    def _has_right(self, request: str, layer: int, computed: int) -> bool:
        if not computed:
            return True
        first, *where = self._seen(request, layer, computed)
        memory = self._memory[self.layers[layer]]
        right = bytes_of(self.requests[request].text.upto(first, computed), layer, memory.size)
        self.counts["rows compared"] += len(right)
        self.counts["states compared"] += self.layers[layer] in self._states
        return np.array_equal(memory.read(*where), right)

    def _write(self, request: str, layer: int, first: int, end: int, is_wrong: bool) -> None:
        name = self.layers[layer]
        if name in self._states:
            self._before[request, layer] = self._has_right(request, layer, first)
            first = end - 1
        states = self.requests[request].text.upto(first, end)
        memory = self._memory[name]
        rows = bytes_of(states ^ WRONG if is_wrong else states, layer, memory.size)
        memory.write(*self._slots(self.requests[request], layer, first, end), rows)


class DeviceLayerRunner(LayerRunner):
    worker = DeviceWorker

    def allocated(self) -> dict[str, torch.Tensor]:
        found = super().allocated()
        for layer in self._layers.values():
            if isinstance(layer, Attention):  # kernels of CPUs have K and V in another order
                layer.impl = DeviceRows()
        return found


def specs_by_layer(made: KVCacheConfig) -> dict[str, KVCacheSpec]:
    found: dict[str, KVCacheSpec] = {}
    for group in made.kv_cache_groups:
        of = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        found.update(of or dict.fromkeys(group.layer_names, group.kv_cache_spec))
    return found


# ---- the scheduler's side ----


def be_like_a_gpu() -> None:
    kind = type(current_platform)
    usual = kind.get_attn_backend_cls

    def chosen(selected: object, attn_selector_config: object, **more: object) -> str:
        if getattr(attn_selector_config, "use_mla", False):
            return f"{GpuBlocks.__module__}.{GpuBlocks.__qualname__}"
        return str(usual(selected, attn_selector_config, **more))

    kind.get_attn_backend_cls = staticmethod(chosen)
    torch.cpu._is_amx_tile_supported = lambda: True  # else no prefixes of MLA
    vars(torch.cuda)["Stream"] = type("Stream", (), {})  # Kimi-Linear's layers have one
    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"


@cache
def begin() -> None:
    """Once in a process: the groups of its one rank."""
    with tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}x", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)


@dataclass
class LayerEngine(Engine):
    case: LayerCase

    @property
    def scale(self) -> int:  # type: ignore[override]
        return max(1, self.runner.block // 16)

    def configured(self) -> VllmConfig:
        case = self.case
        folder = Path(case["folder"]) / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[case["model"]]))
        made = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            load_format="dummy",
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=30 * case["block"],
            max_num_batched_tokens=512,
            max_num_seqs=6,
            block_size=case["block"],
            num_gpu_blocks_override=case["blocks"],
            kv_transfer_config={
                "kv_connector": "CXLConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    **{"where": case["folder"] + "/", "capacity": "64MiB"},
                    **case["settings"],
                },
            },
        ).create_engine_config()
        made.scheduler_config.async_scheduling = case["asynchronous"]
        return made

    def layers(self) -> dict[str, KVCacheSpec]:
        begin()
        with set_default_torch_dtype(torch.bfloat16):
            self.model = initialize_model(self.vllm_config)
        current_platform.update_block_size_for_backend(self.vllm_config)
        return cast("dict[str, KVCacheSpec]", get_kv_cache_spec(self.vllm_config))

    def runner_of(self, made: KVCacheConfig) -> Runner:
        kind = DeviceLayerRunner if self.case["device"] else LayerRunner
        return kind(self.vllm_config, made, self.case)

    def settle(self) -> None:
        for worker in self.runner.connector._workers:
            if isinstance(worker, DeviceAttention):
                worker._saver.wait()

    def damage(self, pool: CXLPool, page: int) -> None:
        damage_piece(pool, page, self.random.randrange(pool.layout.layers), "keys")

    def check_hit(self, pool: CXLPool, hit: Hit, text: Text, name: str) -> None:
        """All layers' blocks, and the checkpoint behind them, which has each layer's states from a
        multiple of 64 bytes on."""
        runner = cast(LayerRunner, self.runner)
        worker = runner.connector.worker
        assert isinstance(worker, EngineAttention)
        sequence, count = pool.adopt(hit.handle), hit.tokens // runner.block
        where = np.divmod(np.arange(hit.tokens), runner.block)
        for number, layer in enumerate(worker._layers):
            given, spec = runner.caches[layer], runner._specs[layer]
            blocks = count * (len(given) // runner.config.num_blocks)
            memory = torch.zeros((blocks, *given.shape[1:]), dtype=given.dtype)
            device = torch.device("cpu") if self.case["device"] else None
            shown = layers_of({layer: in_blocks(memory, spec)}, {layer: (0, spec)}, device)
            batch = pool.batch([sequence])
            shown.by_name[layer].fetch(batch, number, range(count), [0, count], [0])
            kind = IndexerRows if memory.dtype == torch.uint8 else Rows
            rows = kind(memory[:, 0] if kind is IndexerRows else memory, runner.block)
            states = text.upto(0, hit.tokens)
            right = bytes_of(states, runner.layers.index(layer), rows.size)
            assert np.array_equal(rows.read(*where), right), (name, layer)
        sequence.release()
        if runner._states:
            found, end = hit.read_states(), 0
            last = text.upto(hit.tokens - 1, hit.tokens)
            for layer in (one for one in runner.layers if one in runner._states):
                size = runner._memory[layer].size
                right = bytes_of(last, runner.layers.index(layer), size)
                assert np.array_equal(found[end : end + size], right[0]), (name, layer)
                end += -(-size // 64) * 64
            assert end == len(found)


if __name__ == "__main__":
    be_like_a_gpu()
    answer(lambda case: run(case, LayerEngine))
