"""The connector hands each call of vLLM's scheduler and workers to the part that does it."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import gcd
from typing import TYPE_CHECKING, cast

import torch
import vllm
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cxlkv.adapters.common.identity import rope_kinds, warn_unshared
from cxlkv.adapters.common.keys import space_of, unshared
from cxlkv.adapters.common.metrics import Moves
from cxlkv.adapters.common.pools import open_tiers, quota_of
from cxlkv.adapters.common.reopening import LOOKS_A_LEASE, Reopening
from cxlkv.adapters.vllm import pools, states
from cxlkv.adapters.vllm.admission import Admission
from cxlkv.adapters.vllm.blocks import begin_admission, pool_layout, speculated_tokens
from cxlkv.adapters.vllm.chunks import chunks_on
from cxlkv.adapters.vllm.counting import Counting, Looking
from cxlkv.adapters.vllm.device_attention import DeviceAttention
from cxlkv.adapters.vllm.device_steps import check_device, steps_on
from cxlkv.adapters.vllm.engine_attention import EngineAttention, Share
from cxlkv.adapters.vllm.events import Removed, Stored
from cxlkv.adapters.vllm.groups import BlockGroup, are_whole, layout_of, unit_of
from cxlkv.adapters.vllm.latents import (
    are_latents,
    check_audits,
    check_encoding,
    have_indexers,
    is_indexer,
    rope_concern,
)
from cxlkv.adapters.vllm.layers import Layers, in_blocks, layers_of, packing_of
from cxlkv.adapters.vllm.loaded import LoadedWeights
from cxlkv.adapters.vllm.lora import watch_loads
from cxlkv.adapters.vllm.messages import Message, Report
from cxlkv.adapters.vllm.metrics import Reporting
from cxlkv.adapters.vllm.plugin import VERSIONS
from cxlkv.adapters.vllm.pool_attention import PoolAttention
from cxlkv.adapters.vllm.probe import Attention, Probe
from cxlkv.adapters.vllm.remote import open_remote
from cxlkv.adapters.vllm.scheduler import Scheduled, Scheduling, Step
from cxlkv.adapters.vllm.settings import (
    attends_in_pool,
    check_enclosing,
    check_loads,
    read_settings,
)
from cxlkv.adapters.vllm.state_probe import StateProbe, memory_of
from cxlkv.adapters.vllm.states import StateMemory
from cxlkv.adapters.vllm.texts import EngineRequest
from cxlkv.errors import CXLKVError
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("cxlkv")

PAGE_TOKENS = 16
"""Tokens of a page where attention is in the pool: what a budget chooses is pages."""
EVENT_TIER = {"medium": MEDIUM_CPU, "locality": "LOCAL", "group_idx": 0}
"""The tier that KV events name: host memory that this engine loads from. Routers drop a name like
"CXL", or weigh it as a GPU (docs/engines/vllm.md)."""


class StepMessage(KVConnectorMetadata):
    """A Message as the engine carries it to the workers."""

    def __init__(self, message: Message):
        self.message = message


class StepReports(KVConnectorWorkerMetadata):
    """Reports of the ranks about one step, as the engine carries them to the scheduler."""

    def __init__(self, reports: list[Report]):
        self.reports = reports

    def aggregate(self, other: StepReports) -> StepReports:
        return StepReports(self.reports + other.reports)


class CXLConnector(Reporting, KVConnectorBase_V1, SupportsHMA):
    """See the package's text. One is made in the scheduler's process, one in each worker."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        VERSIONS.check(vllm.__version__)
        self.settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.WORKER:
            self._check_enclosing()
        self._overlaps = vllm_config.max_concurrent_batches > 1
        if self._overlaps:  # vLLM does not take back what it has scheduled behind a damaged hit
            self.settings = self.settings.model_copy(update={"load": "async"})
        self._in_pool = self.settings.attention == "pool"
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        kinds = [kind_of(one) for spec in specs for one in pools.layer_specs(spec)]
        pools.check_groups(kinds, self._in_pool)
        self._specs = [one for _, one in kinds]
        if have_indexers(self._specs):  # they read before vLLM waits for the layer
            self.settings = self.settings.model_copy(update={"load": "async"})
        check_audits(self.settings.audit_hits, self._specs)
        replays = bool(vllm_config.cache_config.use_replayssm)
        states.check_states(kinds, replays, bool(self.settings.remote))
        # Of each group's first layer, which is all that vLLM's scheduler hears of.
        kinds = [kind_of(pools.layer_specs(spec)[0]) for spec in specs]
        self._groups = [pools.group_of(*kind) for kind in kinds]
        rows = [spec for kind, spec in kinds if kind != states.KIND]
        self._unit, self._spec = unit_of(self._groups), rows[0]
        packing = "rows" if self._in_pool else packing_of(vllm_config, rows)
        self._cache_dtype = str(vllm_config.cache_config.cache_dtype)
        self._encoding = pools.kept_as(self._cache_dtype, self.settings.encoding)
        check_encoding(self._encoding, self._specs)
        how = (self._encoding, self.settings.identity, self.settings.shards)
        self._words = pools.words_of(vllm_config, kinds, packing, *how)
        self._loaded: LoadedWeights | None = None  # a worker's
        self.scheduling: Scheduling | None = None
        self._own: tuple[BlockPool, object] | None = None  # and what it finds blocks in
        self._ended_in_step: list[tuple[str, tuple[list[int], ...]]] = []  # requests, their blocks
        self._workers: Sequence[EngineAttention | PoolAttention] = ()  # one for each own pool
        self._ended: Counter[str] = Counter()  # loads of requests, of how many of them
        self.moves: list[Moves] = []
        self.looking = {}
        self._quotas: dict[int, Quota | None] = {}  # a worker's, by the number of its pool
        self._admission: Admission | None = None
        self._reopening: list[Reopening[CXLPool]] = []  # of the pools that are used here
        if role == KVConnectorRole.SCHEDULER:
            self.scheduling = self._make_scheduling()
            watch_loads()
            self.counting = Counting(self._unit)

    def _check_enclosing(self) -> None:
        """Check the settings around us. Only workers can: there vLLM says which settings it runs
        with, before its scheduler is made."""
        own, engine = self._kv_transfer_config, get_current_vllm_config_or_none()
        written = None if engine is None else engine.kv_transfer_config
        if written is None or written.kv_connector == own.kv_connector:
            return
        check_enclosing(self.settings, written.kv_connector)
        if own.is_kv_consumer:
            check_loads(self.settings, written.kv_connector, written.kv_load_failure_policy)

    # ---- scheduler ----

    def _make_scheduling(self) -> Scheduling:
        config, cache = self._vllm_config, self._vllm_config.cache_config
        transfer, wanted = self._kv_transfer_config, self.settings.load_failure
        if wanted == "recompute" and transfer.kv_load_failure_policy != wanted:
            # The engine reads it after this; its default cannot be told from a "fail" that a user
            # wrote. A hit that cannot be loaded is no user's fault.
            transfer.kv_load_failure_policy = wanted
            log.info("cxlkv: kv_load_failure_policy is set to recompute")
        concerns = [pools.hash_concern(str(cache.prefix_caching_hash_algo), os.environ)]
        if are_latents(self._specs):
            concerns.append(rope_concern(rope_kinds(config.model_config.hf_text_config.to_dict())))
        for concern in filter(None, concerns):
            log.warning(concern)
        ranks = self._ranks
        paths = [
            pools.pool_path(self.settings.where, self._words, ranks, number)
            for number in range(ranks.pools)
        ]
        events = config.kv_events_config
        opened = pools.open_all(paths, self.settings)
        tiers = []
        if self._is_tiered:
            tiers = [self._tiers_to_match(pool) for pool in opened]
        self.moves = [Moves(one) for one in tiers]
        made = Scheduling(
            opened,
            self._space(),
            self.settings,
            ranks=ranks.count,
            block_tokens=self._unit,
            hash_tokens=self._kv_cache_config.hash_block_size,
            is_whole=are_whole(self._groups),
            loads=self._kv_transfer_config.is_kv_consumer,
            saves=self._kv_transfer_config.is_kv_producer,
            events=events is not None and events.enable_kv_cache_events,
            tiers=tiers,
            words=words_of,
        )
        if self._in_pool:
            self._admission = begin_admission(
                made.pools, config, self.settings.lease_s, ranks.copies
            )
            made.plan_by(self._admission.has)
        for path, pool in zip(paths, made.pools, strict=True):
            self._look_after(pool, partial(pools.open_one, path, self.settings))
        return made

    def _space(self) -> bytes:
        """The namespace of the engine's keys."""
        space = space_of(self._words, self.settings.salt)
        if pools.are_identified(self._words):
            return space
        warn_unshared(str(self._words["model"]), "kv_connector_extra_config")
        return unshared(space)

    @property
    def _is_tiered(self) -> bool:
        """Whether a match may find more than the pool has."""
        return self.settings.cold is not None or bool(self.settings.remote)

    def _tiers_to_match(self, pool: CXLPool) -> Tiers:
        heads = self._vllm_config.model_config.get_total_num_kv_heads()
        heads = 1 if are_latents(self._specs) else heads
        remote = open_remote(pool, self.settings, self._words, heads)
        return open_tiers(pool, self.settings, 1 / self._ranks.pools, moves=False, remote=remote)

    def _look_after(self, pool: CXLPool, again: Callable[[], CXLPool]) -> None:
        every_s = self.settings.lease_s / LOOKS_A_LEASE
        self._reopening.append(Reopening(pool, again, every_s, self._give))

    def _give(self) -> None:
        """Give pages to hosts that have none."""
        for worker in self._workers:
            worker.tiers.give()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not saved is computed again

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._own = (gpu_block_pool, gpu_block_pool.cached_block_hash_to_block)

    def _notice_reset(self) -> None:
        """The engine does not say when it has reset its own cache and left ours alone; but it tells
        routers AllBlocksCleared then, and they drop what they know of ours, too."""
        if self._own is not None and self._own[1] is not self._own[0].cached_block_hash_to_block:
            self.bind_gpu_block_pool(self._own[0])
            self._scheduler.forgotten()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._notice_reset()
        self._take_reopened()
        reads = not request.skip_reading_prefix_cache  # else it begins, whatever is said here
        if self._admission is not None and self._admission.waits and reads:
            return None, False  # it is asked again in the next step
        tokens, beside = self._scheduler.match(request, num_computed_tokens)
        if tokens is not None and reads:
            asked = request.num_tokens - num_computed_tokens
            self._counting.matched(request.request_id, asked, tokens)
        return tokens, beside

    def on_new_request(self, request: Request) -> None:
        self._scheduler.expect(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
        self._counting.admitted(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._take_reopened()
        message = self._scheduler.message(step_of(scheduler_output))
        new, ended = rewritten(scheduler_output, self._groups), self._ended_in_step
        lost = {name for name, blocks in ended if not new.isdisjoint(chain(*blocks))}
        message.left = [one for one in message.left if one.request not in lost]
        self._ended_in_step.clear()
        return StepMessage(message)

    def _take_reopened(self) -> None:
        """The pools that were lost and are there again; by number."""
        for number, reopening in enumerate(self._reopening):
            error = reopening.use(partial(self._match_in, number))
            if error is not None:
                self._scheduler.failures.add("match", error)

    def _match_in(self, number: int, pool: CXLPool) -> None:
        self._scheduler.reopened(number, pool, None)  # without tiers it matches in the pool alone
        if self._is_tiered:
            tiers = self._tiers_to_match(pool)
            self.moves[number] = Moves(tiers)
            self._scheduler.reopened(number, pool, tiers)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """The other form of this call, for a MultiConnector with connectors that know one group
        only."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self._scheduler.ended(request)
        self._counting.ended(request.request_id)
        self._ended_in_step.append((request.request_id, block_ids))
        return False, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._evict(connector_output.invalid_block_ids)
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, StepReports):
            self._notice_reset()
            self._scheduler.heard(reports.reports, connector_output.invalid_block_ids)
            self._counting.heard(reports.reports)

    def _evict(self, bad: set[int]) -> None:
        """vLLM takes bad blocks out of its prefix cache, and those behind them, but not of requests
        that were aborted while the step ran."""
        for blocks in chain(*(of for _, of in self._ended_in_step if bad)):
            assert self._own is not None, "bound before the first step"
            first = next((place for place, one in enumerate(blocks) if one in bad), len(blocks))
            self._own[0].evict_blocks(set(blocks[first:]))

    def reset_cache(self) -> bool:
        self._notice_reset()
        self._scheduler.reset()
        return True

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        self._notice_reset()
        return [
            BlockRemoved(block_hashes=external(change.hashes), **EVENT_TIER)
            if isinstance(change, Removed)
            else self._stored_event(change)
            for change in self._scheduler.changes()
        ]

    def _stored_event(self, change: Stored) -> BlockStored:
        request = cast("Request", change.request)
        tokens, lora = self._scheduler.block_tokens, request.lora_request
        parents = external([] if change.parent is None else [change.parent])
        return BlockStored(
            block_hashes=external(change.hashes),
            parent_block_hash=parents[0] if parents else None,
            token_ids=change.token_ids,
            block_size=tokens,
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
            extra_keys=extra_keys_of(request, change.first, len(change.hashes), tokens),
            # Pages of a block are of all its tokens, however the engine keeps them.
            kv_cache_spec_kind=KVCacheSpecKind.FULL_ATTENTION.value,
            session_id=request.session_id,
            **EVENT_TIER,
        )

    @property
    def _scheduler(self) -> Scheduling:
        assert self.scheduling is not None, "called in a worker"
        return self.scheduling

    @property
    def _counting(self) -> Counting:
        assert self.counting is not None, "called in a worker"
        return self.counting

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, object]) -> bool:
        """True where the host has its part in every layer."""
        return attends_in_pool(extra_config) and read_settings(extra_config).index != "device"

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        of_model = self._vllm_config.compilation_config.static_forward_context
        own = {name: of_model[name] for name in kv_caches}
        self._loaded = LoadedWeights(cast("Iterable[nn.Module]", own.values()), self._ranks.rank)
        specs = self._layer_specs(of_model)
        of_states = {name: specs.pop(name) for name in list(specs) if self._has_state(specs[name])}
        others = {*of_states, *(name for name, (_, spec) in specs.items() if is_indexer(spec))}
        rows = {name: layer for name, layer in own.items() if name not in others}
        pools.check_caches(rows, self._cache_dtype, self._in_pool)
        if self._in_pool:
            of_tensors = next(iter(kv_caches.values())).device
            self._workers = [self._make_pool_attention(own, of_tensors)]
            return
        device = self._device_of(kv_caches)
        whole = {name: in_blocks(kv_caches[name], spec) for name, (_, spec) in specs.items()}
        layers = [layers_of(whole, specs, device) for _ in self._ranks.own]
        memory_by_name = layers[0].by_name
        memory = memory_of(kv_caches, of_states, layers[0].link) if of_states else None
        dtype = self._vllm_config.model_config.dtype
        ranks = self._ranks
        form = memory.states if memory is not None else None
        tiers = []
        for number in ranks.own:
            of = (dtype, ranks.shard(number), form, ranks.split)
            layout = layout_of(specs.values(), self._groups, *of)
            tiers.append(self._make_tiers(number, layout.encoded(self._encoding)))
        attention, link = cast("Mapping[str, Attention]", own), layers[0].link
        probe = Probe(attention, whole, memory_by_name, self._groups, dtype, link)
        probe.run(*(one.pool for one in tiers))
        if memory is not None:  # there is one pool
            tensors = {name: of_model[name].kv_cache for name in of_states}
            state_probe = StateProbe(tensors, memory, list(memory_by_name.values()), self._groups)
            state_probe.run(tiers[0].pool)
        self._workers = [
            self._make_engine_attention(
                number, one, layers[place].share(place, ranks.split), memory
            )
            for place, (number, one) in enumerate(zip(ranks.own, tiers, strict=True))
        ]

    def _device_of(self, kv_caches: Mapping[str, torch.Tensor]) -> torch.device | None:
        """Where the engine's blocks are; None: in memory of the host."""
        device = next(iter(kv_caches.values())).device
        return None if device.type == "cpu" else device

    def _make_engine_attention(
        self,
        number: int,
        tiers: Tiers,
        layers: Layers,
        states: StateMemory | None,
    ) -> EngineAttention:
        ranks, quota = self._ranks, self._quotas[number]
        self.looking[number] = Looking(tiers, quota=quota)  # what a probe has moved is no figure
        share = Share(ranks.rank, number, ranks.count * ranks.split > 1, ranks.saves)
        most = self._vllm_config.scheduler_config.max_num_batched_tokens
        link = layers.link
        on_device = link and partial(DeviceAttention, link=link, step_tokens=most)
        return (on_device or EngineAttention)(
            tiers.pool,
            layers.by_name,
            self.settings,
            groups=self._groups,
            share=share,
            tiers=tiers,
            quota=quota,
            states=states,
            overlaps=self._overlaps,
        )

    def _has_state(self, of_layer: tuple[int, object]) -> bool:
        return self._groups[of_layer[0]].state

    def _layer_specs(self, of_model: Iterable[str]) -> dict[str, tuple[int, AttentionSpec]]:
        """The group and the spec of each layer that has a cache of its own, in the model's order:
        layers of no group use another one's."""
        found = {
            name: (number, getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name))
            for number, group in enumerate(self._kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        groups = self._kv_cache_config.kv_cache_groups
        return {
            name: (found[name][0], found[name][1] or groups[found[name][0]].kv_cache_spec)
            for name in of_model
            if name in found
        }

    @property
    def _ranks(self) -> pools.Ranks:
        rank = self._vllm_config.parallel_config.rank
        return pools.ranks_of(self._vllm_config, self._specs, rank, self.settings.shards)

    def _make_tiers(self, number: int, layout: KVLayout, sketch: bool | None = False) -> Tiers:
        """Make the tiers of the pool of this number, which is opened anew when it is lost."""
        where = pools.pool_path(self.settings.where, self._words, self._ranks, number)
        wanted = (self._ranks, self._vllm_config.model_config.max_model_len)
        again = partial(
            pools.make_or_open,
            *(where, layout, self.settings.capacity, *wanted),
            sketch=sketch,
            shared=self.settings,
        )
        pool = again()
        try:
            tiers = self._tiers_of(number, pool)
        except Exception:
            pool.close()
            raise
        self._look_after(pool, again)
        return tiers

    def _tiers_of(self, number: int, pool: CXLPool) -> Tiers:
        """The worker's, whose figures are shown from now on."""
        settings = self.settings
        tiers = open_tiers(pool, settings, 1 / self._ranks.pools, local=settings.local)
        try:
            self._show(number, tiers)
        except Exception:
            tiers.close()
            raise
        return tiers

    def _show(self, number: int, tiers: Tiers) -> None:
        settings, pool = self.settings, tiers.pool
        if number not in self._quotas:
            published_by = self._ranks.count if self._in_pool else self._ranks.pools
            self._quotas[number] = quota_of(tiers, settings, 1 / published_by)
        self.looking[number] = Looking(
            tiers, quota=self._quotas[number], device=partial(self._device_counts, number)
        )
        pool.admin.audit = settings.audit
        if settings.worker:
            pool.use_worker()

    def _device_counts(self, number: int) -> dict[str, int]:
        made = self._workers[number : number + 1]  # none before the model's layers are known
        return made[0].device_counts() if made else {}

    def _make_pool_attention(
        self, layers: Mapping[str, object], device: torch.device
    ) -> PoolAttention:
        config, ranks = self._vllm_config, self._ranks
        is_latent = are_latents(self._specs)
        page_tokens = gcd(PAGE_TOKENS, self._spec.block_size)
        names = list(self._layer_specs(layers))
        (number,) = ranks.own
        shard = ranks.shard(number)
        layout = pool_layout(config, names, page_tokens, shard).encoded(self._encoding)
        drafts = config.speculative_config is not None and config.speculative_config.method == "mtp"
        check_device(device, layout, shares=len(names) < len(layers), drafts=drafts)
        tiers = self._make_tiers(number, layout, sketch=None)
        rows = 1 + speculated_tokens(config)
        sizes = (config.scheduler_config.max_num_seqs, rows, config.model_config.max_model_len)
        implementations = [getattr(layers[name], "impl", None) for name in names]
        return PoolAttention(
            tiers.pool,
            names,
            block_tokens=self._spec.block_size,
            rank=ranks.rank,
            number=number,
            has_peers=ranks.count > 1,
            shares=ranks.copies > 1,
            decode_rows=rows,
            method=self.settings.method,
            steps=steps_on(device, tiers.pool, implementations, sizes, self.settings),
            many=None if is_latent else chunks_on(device, config.model_config.dtype),
            tiers=tiers,
            quota=self._quotas[number],
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not self._workers or not isinstance(connector_metadata, StepMessage):
            return
        own = zip(self._ranks.own, self._workers, self._reopening, strict=True)
        for number, worker, reopening in own:
            error = reopening.use(partial(self._go_on_in, number, worker))
            if error is not None:
                worker.requests.fail("save", error)
        assert self._loaded is not None, "made with the workers"
        self._loaded.hear(connector_metadata.message, self._workers)

    def _go_on_in(
        self, number: int, worker: EngineAttention | PoolAttention, pool: CXLPool
    ) -> None:
        with suppress(CXLKVError):  # of a pool that was closed
            worker.tiers.close()
        worker.reopened(pool, self._tiers_of(number, pool))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        for worker in self._workers:
            worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        for worker in self._workers:
            worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        if self._vllm_config.parallel_config.use_ubatching:
            return  # each part of the step's tokens calls; layers are saved behind all of them
        for worker in self._workers:
            worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        has_failed = sys.exc_info()[0] is not None  # vLLM ends such a step, too
        for worker in self._workers:
            if has_failed:
                worker.drop_step()
            worker.end_step()
        assert self._loaded is not None, "made with the workers"
        self._loaded.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for worker in self._workers:
            self._ended.update(worker.finished())
        whole = {name for name, count in self._ended.items() if count == len(self._workers)}
        for name in whole:
            del self._ended[name]
        return None, whole or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have failed among those that are finished, where blocks that did not arrive
        cannot be named: vLLM takes these of one group only."""
        results = super().get_transfer_results(finished_req_ids)
        for worker in self._workers:
            if isinstance(worker, EngineAttention):
                results.failed_recving |= worker.lost()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {block for worker in self._workers for block in worker.bad_blocks()}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports = [worker.report() for worker in self._workers]
        # With several each must say something, or the scheduler would count wrong.
        says = any(reports) or any(worker.has_peers for worker in self._workers)
        return StepReports(reports) if says else None

    @property
    def worker(self) -> EngineAttention | PoolAttention:
        """That of the first own pool."""
        assert self._workers, "called before register_kv_caches(), or in the scheduler"
        return self._workers[0]

    def unregister_kv_caches(self) -> None:
        """The engine takes its blocks' memory away, and runs no step until it has them again, at
        the same addresses: from vLLM 0.33 on, before it sleeps."""
        for worker in self._workers:
            if isinstance(worker, EngineAttention):
                worker.rest()

    def shutdown(self) -> None:
        for part in (*self._reopening, self.scheduling, *self._workers):
            if part is not None:
                part.close()


def external(hashes: list[bytes]) -> list[ExternalBlockHash]:
    """Hashes as events have them: bytes, or numbers if the engine's settings say so."""
    return [maybe_convert_block_hash(BlockHash(one)) for one in hashes]


def words_of(request: EngineRequest, first: int, end: int) -> bytes:
    """What is in the hash of tokens [first, end) beside their ids, if they were a block."""
    keys, _ = generate_block_hash_extra_keys(cast("Request", request), first, end, 0)
    return b"" if keys is None else repr(keys).encode()


def extra_keys_of(
    request: Request, first: int, count: int, tokens: int
) -> list[tuple[object, ...] | None] | None:
    """What is in the hashes of these blocks beside token ids: images, salt, adapter."""
    hashed, image = [], 0
    for start in range(first * tokens, (first + count) * tokens, tokens):
        keys, image = generate_block_hash_extra_keys(request, start, start + tokens, image)
        hashed.append(keys)
    told: list[tuple[object, ...] | None] | None = to_event_extra_keys(hashed)
    return told


def rewritten(output: SchedulerOutput, groups: Sequence[BlockGroup]) -> set[int]:
    """Blocks that vLLM writes to before its workers hear of the step: it zeroes some, copies some,
    and takes states on to others."""
    copied = {one.dst_block_id for one in output.kv_cache_block_copies or ()}
    new = [one.block_ids for one in output.scheduled_new_reqs]
    new += [of for of in output.scheduled_cached_reqs.new_block_ids if of is not None]
    states = [number for number, group in enumerate(groups) if group.state]
    return copied.union(
        output.new_block_ids_to_zero or (), *(of[number] for of in new for number in states)
    )


def step_of(output: SchedulerOutput) -> Step:
    """What we need of the scheduler's decision."""
    counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    step = Step(ended=set(output.finished_req_ids) | set(output.preempted_req_ids or ()))
    if output.kv_connector_block_state is not None:
        step.states = output.kv_connector_block_state.boundary_state_offloads
    for new in output.scheduled_new_reqs:
        step.fresh.append(
            Scheduled(new.req_id, new.block_ids, new.num_computed_tokens, counts[new.req_id])
        )
    for name, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        one = Scheduled(name, blocks or [], computed, counts[name])
        (step.fresh if name in cached.resumed_req_ids else step.going).append(one)
    return step


def kind_of(spec: KVCacheSpec) -> tuple[str, KVCacheSpec]:
    return type(spec).__name__, spec
