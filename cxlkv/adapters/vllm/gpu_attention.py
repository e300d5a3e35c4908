"""vLLM's attention backend CUSTOM on CUDA: attention in the pool for an engine on a GPU.

Chosen by --attention-backend CUSTOM, and only good for an engine whose settings ask for attention
in the pool; what it does in a layer is in gpu_step.py.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from cxlkv.adapters.vllm import attention
from cxlkv.adapters.vllm.attention import PoolBuilder, PoolImpl
from cxlkv.errors import UnsupportedError


class GpuPoolBackend(AttentionBackend):
    """K and V go to the pool, so the engine's cache is never written."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        attention.built(get_current_vllm_config_or_none())
        return PoolImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return GpuPoolBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return attention.spec_of(spec)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the host must know whose rows are whose

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Why not; the engine prints it when it refuses to start."""
        if attention.in_pool(get_current_vllm_config_or_none()):
            return None
        return (
            "CUSTOM is cxlkv's attention in the pool, which needs --kv-transfer-config with "
            'kv_connector CXLConnector and "attention": "pool" in kv_connector_extra_config; '
            "leave --attention-backend away for the engine's own attention"
        )


class GpuPoolBuilder(PoolBuilder):
    """Request rows and lengths come from the device in one copy; the host waits for it once a step.

    What the host does in each layer cannot be in a CUDA graph: the engine captures the pieces
    between attention layers, which it calls PIECEWISE, or none.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.parallel_config.use_ubatching:
            raise UnsupportedError(
                "attention in the pool goes through a step once: start the engine without "
                "--enable-dbo and --ubatch-size"
            )

    def _request_rows_and_lengths(self, common: CommonAttentionMetadata) -> list[list[int]]:
        count = common.num_reqs
        both = [common.block_table_tensor[:count, 0], common.seq_lens[:count]]
        found: list[list[int]] = torch.stack([one.to(torch.int64) for one in both]).tolist()
        return found
