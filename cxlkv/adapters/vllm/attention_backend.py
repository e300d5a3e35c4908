"""vLLM's attention over the pool; on CPU, while it is off, the stock classes run.

PoolBackend is registered in place of CPU_ATTN, so every CPU engine with the plugin sees it. It
hands out vLLM's own classes unless the engine's kv_transfer_config asks for attention in the pool.
GpuPoolBackend is CUSTOM on CUDA, chosen by --attention-backend CUSTOM, and only good for an engine
that asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from cxlkv.adapters.vllm.blocks import request_row_spec
from cxlkv.adapters.vllm.plugin import NAME
from cxlkv.adapters.vllm.pool_attention import PoolAttention, Rows, Scores
from cxlkv.adapters.vllm.pools import ENGINES_FORM, FP8_CACHES, WITHOUT_US
from cxlkv.adapters.vllm.settings import attends_in_pool, read_settings
from cxlkv.arrays import positive_float32, softcap_of
from cxlkv.errors import UnsupportedError

if TYPE_CHECKING:
    from cxlkv.adapters.vllm.pool_attention import Ints

_built: VllmConfig | None = None
"""Config of the engine whose layers were built last: vLLM asks for their cache specs without saying
whose they are, right after it built them."""


def in_pool(config: VllmConfig | None) -> bool:
    """Whether this engine's K and V live in the pool."""
    transfer = None if config is None else config.kv_transfer_config
    if transfer is None or transfer.kv_connector != NAME:
        return False
    return attends_in_pool(transfer.kv_connector_extra_config or {})


def built(config: VllmConfig | None) -> VllmConfig | None:
    """Layers of this engine are being built."""
    global _built
    _built = config
    return config


def spec_of(spec: AttentionSpec) -> AttentionSpec:
    """What a layer keeps in the engine: a request row where K and V are in the pool, or its own."""
    config = config_of_layers()
    return request_row_spec(spec, config) if config is not None and in_pool(config) else spec


def config_of_layers() -> VllmConfig | None:
    """Of the engine that asks for classes or specs now."""
    return get_current_vllm_config_or_none() or _built


class PoolBackend(CPUAttentionBackend):
    """The backend of CPU engines; see above."""

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        config = built(get_current_vllm_config_or_none())
        return PoolImpl if in_pool(config) else CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return PoolBuilder if in_pool(config_of_layers()) else CPUAttentionMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec_of(super().customize_spec(spec))


@dataclass
class PoolMetadata:
    """Whose rows are where in a step. captures: it is of a graph, and of no step."""

    num_actual_tokens: int
    request_rows: list[int]
    starts: Ints
    lengths: list[int]
    captures: bool = False


class PoolBuilder(AttentionMetadataBuilder[PoolMetadata]):
    """Takes what is needed from the engine's; it runs before the step's message is there."""

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

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PoolMetadata:
        common = common_attn_metadata
        request_rows, lengths = self._request_rows_and_lengths(common)
        return PoolMetadata(
            num_actual_tokens=common.num_actual_tokens,
            request_rows=request_rows,
            starts=common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int32),
            lengths=lengths,
        )

    def _request_rows_and_lengths(self, common: CommonAttentionMetadata) -> list[list[int]]:
        count = common.num_reqs
        return [common.block_table_tensor[:count, 0].tolist(), common.seq_lens[:count].tolist()]


class PoolImpl(AttentionImpl[PoolMetadata]):
    """One layer's attention. Raises UnsupportedError for what the pool cannot compute."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: object,
    ):
        refused = {
            "ALiBi": alibi_slopes is not None,
            f"{kv_cache_dtype} caches": kv_cache_dtype not in ("auto", *FP8_CACHES),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            ", ".join(others): bool(others),
        }
        found = [name for name, there in refused.items() if there]
        if found:
            remedy = ENGINES_FORM if attn_type == AttentionType.DECODER else WITHOUT_US
            raise UnsupportedError(
                f"cxlkv: attention in the pool has no {' and no '.join(found)}: {remedy}"
            )
        self.num_heads, self.head_size = num_heads, head_size
        self.scale = positive_float32(scale, "scale")
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window
        softcap = softcap_of(logits_soft_cap)
        self.scores = Scores(self.scale, softcap, sliding_window, sinks)
        self._shares = kv_sharing_target_layer_name

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PoolMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("attention in the pool has no quantized output")
        if attn_metadata is None:  # the engine warms up
            return output
        if not has_kv_transfer_group():  # so it does on a GPU, with request rows that nobody has
            return output.zero_()
        worker: PoolAttention = get_kv_transfer_group().worker
        found = attn_metadata
        place = worker.layers[self._shares or str(layer.layer_name)]
        rows = Rows(query, key, value, output)
        if found.captures:
            worker.replayed(place, rows, self.scores)
            return output
        step = worker.step(found.request_rows, found.starts, found.lengths)
        step.attend(place, rows, self.scores, self._shares is not None)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Nothing: slots are of request rows, which hold nothing; forward() keeps K and V."""


class GpuPoolBackend(AttentionBackend):
    """K and V go to the pool, so the engine's cache is never written."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        built(get_current_vllm_config_or_none())
        return PoolImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return GpuPoolBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec_of(spec)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
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
        if in_pool(get_current_vllm_config_or_none()):
            return None
        return (
            "CUSTOM is cxlkv's attention in the pool, which needs --kv-transfer-config with "
            'kv_connector CXLConnector and "attention": "pool" in kv_connector_extra_config; '
            "leave out --attention-backend for the engine's own attention"
        )


class GpuPoolBuilder(PoolBuilder):
    """Request rows and lengths come from the device in one copy; the host waits for it once a step.

    Where the device chooses pages, layers of steps in which each request has one token may be a
    CUDA graph; else the engine captures the pieces between attention layers, which it calls
    PIECEWISE, or none: "auto" counts as the host's, as the engine asks before that is known.
    """

    _worker: PoolAttention | None = None
    """Kept here, as the engine hides its connector while it replays a graph on dummy rows."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if read_settings(extra).index == "device" and vllm_config.speculative_config is None:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PoolMetadata:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if has_kv_transfer_group():
            worker: PoolAttention = get_kv_transfer_group().worker
            worker.plan(made.request_rows, made.starts, made.lengths)
        return made

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PoolMetadata:
        made = super().build(0, common_attn_metadata)
        if has_kv_transfer_group():
            self._worker = get_kv_transfer_group().worker
        if self._worker is not None:
            self._worker.capture()
        return replace(made, captures=True)

    def _request_rows_and_lengths(self, common: CommonAttentionMetadata) -> list[list[int]]:
        count = common.num_reqs
        both = [common.block_table_tensor[:count, 0], common.seq_lens[:count]]
        found: list[list[int]] = torch.stack([one.to(torch.int64) for one in both]).tolist()
        return found
