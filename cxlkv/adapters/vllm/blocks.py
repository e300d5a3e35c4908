"""The engine's blocks while K and V live in the pool: one for each request.

Such a block, a request row, holds next to nothing. Its number, the only one in a request's row of
the block table, tells the backend which request a row is. So the engine's own KV space bounds how
many requests run at once, and the pool bounds their tokens: admission and preemption go by its
room (`admission`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from vllm.config import VllmConfig
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backend import AttentionImplBase
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from cxlkv.adapters.common.rotary import rotary_of
from cxlkv.adapters.vllm.admission import Admission
from cxlkv.adapters.vllm.latents import check_latents, have_indexers
from cxlkv.adapters.vllm.pools import DRAFTERS, ENGINES_FORM, WITHOUT_US, check_kinds
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import KVLayout, LayerGroup, dtype_name
from cxlkv.pool import CXLPool

admissions: dict[str, Admission] = {}
"""What each engine's scheduler knows of its pools. The connector enters it, managers look here."""


class Implementation(Protocol):
    num_kv_heads: int
    head_size: int
    sliding_window: int | None


class Layer(Protocol):
    """The engine's layer, with our implementation."""

    impl: Implementation
    head_size_v: int


@dataclass(frozen=True, kw_only=True)
class RequestRowSpec(AttentionSpec):  # type: ignore[explicit-any]
    """One block a request, however long it is; the same for all layers, windows or not."""

    engine: str

    @property
    def prefix_cacheable(self) -> bool:
        return False  # hits come from the pool, through the connector

    def max_memory_usage_bytes(self, vllm_config: object) -> int:
        del vllm_config
        size: int = self.page_size_bytes
        return size


def request_row_spec(spec: AttentionSpec, config: VllmConfig) -> RequestRowSpec:
    """What an attention layer keeps in the engine instead of the blocks of `spec`.

    A request row has one number a token, the least that the engine makes, and the heads of the
    model's first layer, so that all layers are one group. The engine asks next how much memory
    there is for blocks: for as many as requests may run, and the null block. Raises
    UnsupportedError for layers, or a model beside them, that the pool does not serve.
    """
    remedy = ENGINES_FORM if have_indexers([spec]) else WITHOUT_US
    check_latents([(type(spec).__name__, spec)], remedy, in_pool=True)
    check_kinds([type(spec).__name__] + ["MambaSpec"] * config.model_config.is_hybrid, in_pool=True)
    of_model = cast("dict[str, Layer]", config.compilation_config.static_forward_context).values()
    first = next(
        one for one in of_model if isinstance(getattr(one, "impl", None), AttentionImplBase)
    )
    request_row = RequestRowSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=first.impl.num_kv_heads,
        head_size=first.impl.head_size,
        head_size_v=spec.head_size_v if _latent_dim(first) else first.head_size_v,
        dtype=spec.dtype,
        num_head_slots=1,
        state_content_bytes=get_dtype_size(spec.dtype),
        engine=config.kv_transfer_config.engine_id,
    )
    layers = config.model_config.get_num_layers(config.parallel_config)
    request_rows = config.scheduler_config.max_num_seqs + 1
    config.cache_config.kv_cache_memory_bytes = request_rows * layers * request_row.page_size_bytes
    return request_row


class RequestRowManager(SingleTypeKVCacheManager):
    """Gives a request its row when the pool has room for its tokens; there are no local hits."""

    kv_cache_spec: RequestRowSpec
    block_pool: BlockPool

    @property
    def _admission(self) -> Admission:
        found = admissions.get(self.kv_cache_spec.engine)
        if found is None:
            raise BadArgumentError(
                "attention in the pool, but no CXLConnector in the scheduler's process: start the "
                "engine with kv_connector CXLConnector, alone"
            )
        return found

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        if not self._admission.fits(request_id, total_computed_tokens, num_tokens):
            return int(self.block_pool.num_gpu_blocks) + 1  # more than there are: wait, or preempt
        return 0 if self.req_to_blocks.get(request_id) else 1

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        self._give_request_row(request_id)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        self._admission.take(request_id)
        return self._give_request_row(request_id)

    def _give_request_row(self, request_id: str) -> list[KVCacheBlock]:
        taken = self.req_to_blocks[request_id]
        if taken:
            return []
        taken.extend(self.block_pool.get_new_blocks(1))
        return list(taken)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._admission.give_back(request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    def new_step_starts(self) -> None:
        self._admission.begin()

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0


def begin_admission(
    pools: Sequence[CXLPool], config: VllmConfig, lease_s: float, copies: int
) -> Admission:
    """Let this engine's scheduler plan by its pools. Raises UnsupportedError, MemoryShortError."""
    if config.scheduler_config.async_scheduling:
        raise UnsupportedError(
            "attention in the pool: the next step is planned when the one before has ended, so "
            "start the engine with --no-async-scheduling"
        )
    admission = Admission(pools, lease_s, copies)
    admission.check(config.model_config.max_model_len)
    admissions[config.kv_transfer_config.engine_id] = admission
    return admission


def speculated_tokens(config: VllmConfig) -> int:
    """Tokens that a step of one request may speculate; raises UnsupportedError for drafters that
    have K and V, and go through their layers in other rows than the target's."""
    speculative = config.speculative_config
    if speculative is None:
        return 0
    count = int(speculative.num_speculative_tokens)
    goes_along = count == 1 and not speculative.disable_padded_drafter_batch
    if speculative.method not in DRAFTERS and not (speculative.method == "mtp" and goes_along):
        raise UnsupportedError(
            f"cxlkv: attention in the pool has no speculation of {count} tokens by "
            f"{speculative.method!r}, but by {', '.join(DRAFTERS)}, and by mtp of 1 token: "
            f"{ENGINES_FORM}"
        )
    return count


def pool_layout(
    config: VllmConfig, names: Sequence[str], page_tokens: int, shard: tuple[int, int, int, int]
) -> KVLayout:
    """The layout of this rank's layers with K and V of their own; layers that are alike are a
    group."""
    layers = config.compilation_config.static_forward_context
    found = [_group_of(config, layers[name]) for name in names]
    kinds = sorted(set(found), key=lambda one: (one.window is not None, one.window or 0, repr(one)))
    groups = [replace(kind, layers=found.count(kind)) for kind in kinds]
    order = [kinds.index(one) for one in found]
    return KVLayout.of(groups, order, page_tokens=page_tokens, shard=shard)


def _group_of(config: VllmConfig, layer: Layer) -> LayerGroup:
    """The group of one layer that is like this one."""
    impl, text, latent = layer.impl, config.model_config.hf_text_config, _latent_dim(layer)
    value_dim, windowed = latent or layer.head_size_v, impl.sliding_window is not None
    own_values = not latent and value_dim == impl.head_size
    return LayerGroup(
        layers=1,
        kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        value_head_dim=value_dim,
        dtype=dtype_name(config.model_config.dtype),
        values="key_prefix" if latent else "own",
        window=impl.sliding_window,
        rotary=rotary_of(text, impl.head_size, windowed) if own_values else None,
    )


def _attends(layer: object) -> bool:
    return isinstance(getattr(layer, "impl", None), AttentionImplBase)


def _latent_dim(layer: Layer) -> int:
    """Channels of values in the latents of MLA; 0: it has keys and values."""
    return int(getattr(layer, "kv_lora_rank", 0))


# Here and not in the plugin: what unpickles a RequestRowSpec knows its manager.
KVCacheSpecRegistry._ensure_registered()  # else ours alone would count as all of them
KVCacheSpecRegistry.register(RequestRowSpec, RequestRowManager, RequestRowSpec)
