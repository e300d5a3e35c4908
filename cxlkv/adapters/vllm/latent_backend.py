"""vLLM's attention over latents in the pool; while it is off, the stock classes of MLA run.

Every row of a step goes through the engine's absorbed path, as its own decode rows do: queries of
latents, whose values are the first channels of what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import (
    AttentionImplBase,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.kv_cache_interface import AttentionSpec

from cxlkv.adapters.vllm.attention_backend import (
    PoolBuilder,
    PoolMetadata,
    built,
    config_of_layers,
    in_pool,
    spec_of,
)
from cxlkv.adapters.vllm.pool_attention import PoolAttention, Rows, Scores
from cxlkv.adapters.vllm.pools import ENGINES_FORM, WITHOUT_US
from cxlkv.arrays import positive_float32
from cxlkv.errors import UnsupportedError


@dataclass
class LatentMetadata(PoolMetadata):
    """What the engine's layer asks for: all rows are decode rows."""

    prefill: None = None
    num_prefills: int = 0

    @property
    def num_decodes(self) -> int:
        return len(self.request_rows)

    @property
    def num_decode_tokens(self) -> int:
        return self.num_actual_tokens

    @property
    def decode(self) -> list[int]:
        return self.lengths


class LatentBuilder(PoolBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> LatentMetadata:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return LatentMetadata(**vars(made))


class LatentImpl(MLAAttentionImpl[LatentMetadata]):
    """One layer's attention. Raises UnsupportedError for what the pool cannot compute."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *,
        kv_lora_rank: int,
        kv_cache_dtype: str = "auto",
        sliding_window: int | None = None,
        indexer: object | None = None,
        **others: object,
    ):
        refused = {
            f"{kv_cache_dtype} caches": kv_cache_dtype != "auto",
            "windows": sliding_window is not None,
            "indexers": indexer is not None,
        }
        found = [name for name, there in refused.items() if there]
        if found:
            remedy = ENGINES_FORM if found == ["indexers"] else WITHOUT_US
            raise UnsupportedError(
                f"cxlkv: attention to latents in the pool has no {' and no '.join(found)}: {remedy}"
            )
        self.num_heads, self.head_size, self.kv_lora_rank = num_heads, head_size, kv_lora_rank
        self.num_kv_heads, self.sliding_window = 1, None
        self.scale = positive_float32(scale, "scale")
        self._scores = Scores(self.scale)
        self._latents: torch.Tensor | None = None  # of the step, until its queries come

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Keep the step's rows for forward_mqa(); slots are of request rows, which hold nothing.
        skip_scale: vLLM has it from 0.33 on."""
        self._latents = torch.cat([kv_c_normed[:, None], k_pe], dim=2)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, dim=2) if isinstance(q, tuple) else q
        out = query.new_zeros((*query.shape[:2], self.kv_lora_rank))
        latents, self._latents = self._latents, None
        if latents is None or not has_kv_transfer_group():  # the engine warms up
            return out, None
        worker: PoolAttention = get_kv_transfer_group().worker
        found = attn_metadata
        step = worker.step(found.request_rows, found.starts, found.lengths)
        rows = Rows(query, latents[: len(query)], None, out)
        step.attend(worker.layers[str(layer.layer_name)], rows, self._scores)
        return out, None


class _Latents(MLACommonBackend):
    """Hands out our classes where the engine's settings ask for them."""

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImplBase]:
        config = built(get_current_vllm_config_or_none())
        return LatentImpl if in_pool(config) else super().get_impl_cls()

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        return LatentBuilder if in_pool(config_of_layers()) else super().get_builder_cls()

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec_of(super().customize_spec(spec))


class CpuLatentBackend(_Latents, CPUMLABackend):
    """In place of CPU_MLA."""


class AmxLatentBackend(_Latents, AMXMLABackend):
    """In place of AMX_MLA."""
