"""Compares the methods of our classes with those of vLLM's that they override, and looks for what
else we use of it where its blocks are on a device; says what parts.

To look at another vLLM, which need not be built for CPUs:

    pip download --no-deps -d /tmp vllm==0.33.0
    unzip -q /tmp/vllm-0.33.0-*.whl '*.py' '*/METADATA' -d /tmp/next
    sed -i 's/^Version: .*/&+cpu/' /tmp/next/vllm-*/METADATA
    PYTHONPATH=/tmp/next build/vllm/env/bin/python tests/vllm/interface.py
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from itertools import chain
from math import prod
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group, kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as specs
from vllm.v1 import outputs
from vllm.v1.attention import backend
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.mla import amx_mla, cpu_mla
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched import output
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from cxlkv.adapters.vllm.attention_backend import GpuPoolBackend, GpuPoolBuilder, PoolBackend
from cxlkv.adapters.vllm.blocks import RequestRowManager
from cxlkv.adapters.vllm.connector import CXLConnector
from cxlkv.adapters.vllm.latent_backend import (
    AmxLatentBackend,
    CpuLatentBackend,
    LatentBuilder,
    LatentImpl,
)
from cxlkv.adapters.vllm.metrics import CXLMetrics, CXLStats, Reporting

PAIRS: list[tuple[type, tuple[type, ...]]] = [
    (CXLConnector, (base.KVConnectorBase_V1, base.SupportsHMA)),
    (Reporting, (base.KVConnectorBase_V1,)),
    (CXLStats, (metrics.KVConnectorStats,)),
    (CXLMetrics, (metrics.KVConnectorPromMetrics,)),
    (PoolBackend, (cpu_attn.CPUAttentionBackend,)),
    (GpuPoolBackend, (backend.AttentionBackend,)),
    (GpuPoolBuilder, (backend.AttentionMetadataBuilder,)),
    (CpuLatentBackend, (cpu_mla.CPUMLABackend,)),
    (AmxLatentBackend, (amx_mla.AMXMLABackend,)),
    (LatentBuilder, (backend.AttentionMetadataBuilder,)),
    (LatentImpl, (cpu_mla.CPUMLAImpl, backend.MLAAttentionImpl)),
    (RequestRowManager, (SingleTypeKVCacheManager,)),
]
OF_SPECS = "block_size num_kv_heads head_size head_size_v dtype state_content_bytes "
NAMES: list[tuple[object, str]] = [
    (VllmConfig, "max_concurrent_batches scheduler_config parallel_config cache_config"),
    (SchedulerConfig, "max_num_batched_tokens async_scheduling"),
    (ParallelConfig, "rank use_ubatching tensor_parallel_size pipeline_parallel_size"),
    (CacheConfig, "cache_dtype prefix_caching_hash_algo use_replayssm"),
    (ModelConfig, "dtype max_model_len get_total_num_kv_heads"),
    (current_platform, "is_cuda is_cpu device_name"),
    (specs.KVCacheConfig, "kv_cache_groups hash_block_size"),
    (specs.KVCacheGroupSpec, "layer_names kv_cache_spec"),
    (specs.UniformTypeKVCacheSpecs, "kv_cache_specs"),
    (specs.FullAttentionSpec, OF_SPECS),
    (specs.SlidingWindowSpec, OF_SPECS + "sliding_window"),
    (specs.ChunkedLocalAttentionSpec, OF_SPECS + "attention_chunk_size"),
    (specs.MLAAttentionSpec, OF_SPECS + "cache_role is_index_group_leader alignment"),
    (specs.MLAAttentionSpec, "model_version tokens_per_state cache_dtype_str"),
    (BlockPool(4, True, 16), "evict_blocks cached_block_hash_to_block"),
    (kv_cache_utils.KVCacheBlockCopy, "dst_block_id"),
    (output.SchedulerOutput, "num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs"),
    (output.SchedulerOutput, "finished_req_ids preempted_req_ids kv_connector_block_state"),
    (output.SchedulerOutput, "has_sync_kv_loads new_block_ids_to_zero kv_cache_block_copies"),
    (output.NewRequestData, "req_id block_ids num_computed_tokens"),
    (output.CachedRequestData, "req_ids new_block_ids num_computed_tokens resumed_req_ids"),
    (outputs.KVConnectorOutput, "invalid_block_ids kv_connector_worker_meta"),
    (base.KVConnectorTransferResults, "failed_recving finished_recving"),
]
"""What we read of vLLM's objects, or call."""
WRITES = {
    "flash_attn": ["layer", "key", "value", "kv_cache", "slot_mapping"],
    "flashinfer": ["layer", "key", "value", "kv_cache", "slot_mapping"],
    "triton_attn": ["layer", "key", "value", "kv_cache", "slot_mapping"],
}
"""Backends of GPUs, and what do_kv_cache_update() takes; the probe of the blocks calls it."""
STEP = ["bind", "forward", "start_load_kv", "wait_for_save", "transfers", "errors", "report"]
"""The connector's calls of a step, which has no load that it waits for."""
NEXT = [("skip_scale", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
"""Parameters of ours that vLLM has from 0.33 on."""
STOCK = {CpuLatentBackend: cpu_mla.CPUMLABackend, AmxLatentBackend: amx_mla.AMXMLABackend}


def parameters(method: object) -> list[tuple[str, object]]:
    """Names and kinds; a parameter that catches the rest is none."""
    given = inspect.signature(method).parameters.values()  # type: ignore[arg-type]
    return [(one.name, one.kind) for one in given if one.kind != one.VAR_KEYWORD]


def lacking() -> Iterator[str]:
    for of, names in NAMES:
        known = {one.name for one in fields(of)} if is_dataclass(of) else set[str]()
        kind = of if isinstance(of, type) else type(of)
        yield from (
            f"{kind.__name__} has no {name}"
            for name in names.split()
            if name not in known and not hasattr(of, name)
        )


def written_otherwise() -> Iterator[str]:
    """Read, not imported: some of them need packages that only GPUs have."""
    spec = find_spec("vllm.v1.attention.backends")
    assert spec is not None
    assert spec.submodule_search_locations
    for name, wanted in WRITES.items():
        text = Path(spec.submodule_search_locations[0], f"{name}.py").read_text()
        found = [
            [one.arg for one in node.args.args[1:]]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.name == "do_kv_cache_update"
        ]
        if not found or any(one != wanted for one in found):
            yield f"{name}: do_kv_cache_update{found}, not {wanted}"


def laid_out_otherwise() -> Iterator[str]:
    """Blocks are [blocks, heads, tokens, K and V] in each layout, with K and V side by side."""
    spec = specs.FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=4, dtype=torch.float32)
    sizes = {"L": 2, "B": 3, "H": 2, "N": 8, "C": 2 * 4 * 4}
    for layout in KVCacheLayout:
        _, *layer = layout.name.partition("L")
        _, *block = layout.name.partition("B")
        tensor = specs.KVCacheTensor(
            size=prod(sizes.values()),
            layers=["one", "two"],
            layer_stride=prod(sizes[one] for one in layer[1]),
            block_stride=prod(sizes[one] for one in block[1]),
        )
        group = specs.KVCacheGroupSpec(layer_names=["one", "two"], kv_cache_spec=spec)
        config = specs.KVCacheConfig(
            num_blocks=3, kv_cache_tensors=[tensor], kv_cache_groups=[group]
        )
        found = allocate_kv_cache(config, torch.device("cpu"), layout)
        shapes = {(tuple(one.shape), one.stride(3), one.dtype) for one in found.values()}
        if list(found) != ["one", "two"] or shapes != {((3, 2, 8, 8), 1, torch.float32)}:
            yield f"{layout.name}: blocks are {shapes}"


class Calls(CXLConnector):
    """Notes those of a step."""

    def __init__(self, calls: list[str]):
        self._calls, self._connector_metadata = calls, None

    def __getattribute__(self, name: str) -> object:
        named = {
            "bind_connector_metadata": "bind",
            "start_load_kv": "start_load_kv",
            "wait_for_save": "wait_for_save",
            "get_transfer_results": "transfers",
            "get_block_ids_with_load_errors": "errors",
            "build_connector_worker_meta": "report",
        }
        if name not in named:
            return super().__getattribute__(name)
        calls = self._calls

        def call(*_: object, **__: object) -> base.KVConnectorTransferResults:
            calls.append(named[name])
            return base.KVConnectorTransferResults()

        return call

    def get_kv_connector_stats(self) -> None:
        return None


def steps() -> Iterator[list[str]]:
    """Of both runners: the calls of a step, and of one that waits for its load."""
    config = VllmConfig()
    for waits in (False, True):
        step = output.SchedulerOutput.make_empty()
        step.has_sync_kv_loads = waits
        step.kv_connector_metadata = base.KVConnectorMetadata()
        calls = list[str]()
        kv_transfer_state._KV_CONNECTOR_AGENT = Calls(calls)
        with (
            set_forward_context(None, config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(step),
        ):
            calls.append("forward")
        yield calls
        calls = list[str]()
        runner = object.__new__(ActiveKVConnector)
        runner.__dict__.update(
            vllm_config=config, kv_connector=Calls(calls), _pending_load_kwargs=None
        )
        runner._disabled = False
        runner.pre_forward(step)
        calls.append("forward")
        runner.finish_forward()
        runner.post_forward(set())
        yield calls


def out_of_order() -> Iterator[str]:
    waiting = ["bind", "start_load_kv", "forward", *STEP[3:]]
    for place, calls in enumerate(steps()):
        wanted = STEP if place < 2 else waiting
        if calls != wanted:
            yield f"runner V{1 + place % 2}: {calls}, not {wanted}"


def planned_late() -> Iterator[str]:
    """Both runners build what our builders hear of a step before its message."""
    for runner, built, bound in (
        (V1Runner, "self._build_attention_metadata(", "self.maybe_get_kv_connector_output("),
        (V2Runner, ".prepare_attn(", "self.kv_connector.pre_forward("),
    ):
        text = inspect.getsource(runner.execute_model)
        if not 0 < text.find(built) < text.find(bound):
            yield f"{runner.__module__}: {built} is not called before {bound}"


def replayed_unheard() -> Iterator[str]:
    """The second runner hides the connector during dummy runs, which may replay a graph."""
    captures = list[bool]()
    worker = SimpleNamespace(capture=lambda: captures.append(has_kv_transfer_group()))
    common = SimpleNamespace(
        num_reqs=1,
        num_actual_tokens=1,
        query_start_loc_cpu=torch.tensor([0, 1]),
        block_table_tensor=torch.zeros(1, 1),
        seq_lens=torch.ones(1),
    )
    builder = object.__new__(GpuPoolBuilder)
    for connector in (SimpleNamespace(worker=worker), None):
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
        builder.build_for_cudagraph_capture(common)
    if captures != [True, False]:
        yield f"GpuPoolBuilder: {captures} of the dummy runs with and without us are told"


def captured_otherwise() -> Iterator[str]:
    """Layers are in graphs where the device chooses: else vLLM makes PIECEWISE of any mode."""
    for index in ("auto", "host", "device"):
        asked: dict[str, object] = {"where": "/x/", "attention": "pool", "index": index}
        if CXLConnector.requires_piecewise_for_cudagraph(asked) == (index == "device"):
            yield f"CXLConnector.requires_piecewise_for_cudagraph() of index {index}"


def main() -> None:
    compared = 0
    for ours, theirs in PAIRS:
        for name, method in vars(ours).items():
            plain = inspect.isfunction(method) or isinstance(method, (staticmethod, classmethod))
            found = [getattr(one, name) for one in theirs if hasattr(one, name)]
            if not plain or name.startswith("_") or not found:
                continue
            wanted, has = parameters(found[0]), parameters(getattr(ours, name))
            if wanted != has[: len(wanted)] or any(one not in NEXT for one in has[len(wanted) :]):
                print(f"{ours.__name__}.{name}: {has} here, {wanted} in the engine")
            compared += 1
    for ours, stock in STOCK.items():  # without settings that ask for attention in the pool
        for name in ("get_impl_cls", "get_builder_cls", "get_name", "get_supported_head_sizes"):
            if getattr(ours, name)() != getattr(stock, name)():
                print(f"{ours.__name__}.{name}() is not that of the engine")
    for ours, _ in PAIRS:
        if inspect.isabstract(ours):
            print(f"{ours.__name__} lacks methods that are abstract in the engine")
    looks = lacking(), written_otherwise(), laid_out_otherwise(), out_of_order(), planned_late()
    for one in chain(*looks, replayed_unheard(), captured_otherwise()):
        print(one)
    print("compared" if compared > 30 else f"only {compared} methods compared")


if __name__ == "__main__":
    main()
