"""Compares the methods of our classes with those of vLLM's that they override; says what parts."""

from __future__ import annotations

import inspect

from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.v1.attention import backend
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.mla import amx_mla, cpu_mla
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

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
STOCK = {CpuLatentBackend: cpu_mla.CPUMLABackend, AmxLatentBackend: amx_mla.AMXMLABackend}


def parameters(method: object) -> list[tuple[str, object]]:
    """Names and kinds; a parameter that catches the rest is none."""
    given = inspect.signature(method).parameters.values()  # type: ignore[arg-type]
    return [(one.name, one.kind) for one in given if one.kind != one.VAR_KEYWORD]


def main() -> None:
    compared = 0
    for ours, theirs in PAIRS:
        for name, method in vars(ours).items():
            plain = inspect.isfunction(method) or isinstance(method, (staticmethod, classmethod))
            found = [getattr(one, name) for one in theirs if hasattr(one, name)]
            if not plain or name.startswith("_") or not found:
                continue
            wanted, has = parameters(found[0]), parameters(getattr(ours, name))
            if wanted != has:
                print(f"{ours.__name__}.{name}: {has} here, {wanted} in the engine")
            compared += 1
    for ours, stock in STOCK.items():  # without settings that ask for attention in the pool
        for name in ("get_impl_cls", "get_builder_cls", "get_name", "get_supported_head_sizes"):
            if getattr(ours, name)() != getattr(stock, name)():
                print(f"{ours.__name__}.{name}() is not that of the engine")
    for ours, _ in PAIRS:
        if inspect.isabstract(ours):
            print(f"{ours.__name__} lacks methods that are abstract in the engine")
    print("compared" if compared > 30 else f"only {compared} methods compared")


if __name__ == "__main__":
    main()
