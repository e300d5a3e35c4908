"""vLLM's worker for CPUs with what CUDA engines with attention in the pool use: their backend, and
steps of tensors on a device, here the host's.

Engines name it as worker_cls, so that each rank's process imports it. Whether the engine's kernels
and streams go with it takes a GPU.
"""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from cxlkv import Budget, CXLPool
from cxlkv.adapters.vllm import connector
from cxlkv.adapters.vllm.device_steps import Attends, DeviceStep, DeviceSteps, Engine
from cxlkv.adapters.vllm.settings import Settings


class Steps(DeviceSteps):
    made = 0

    def __call__(self, *given: object) -> DeviceStep:
        Steps.made += 1
        return super().__call__(*given)  # type: ignore[arg-type]


class Worker(CPUWorker):  # type: ignore[misc]
    """As it is: its name brings this module into each process."""


def steps_on(
    device: torch.device,
    pool: CXLPool,
    layers: list[Attends],
    sizes: tuple[int, int, int],
    settings: Settings,
) -> DeviceSteps:
    requests, rows, tokens_max = sizes
    first = layers[0]
    engine = Engine(device, requests, rows, first.num_heads, tokens_max, first.scores)
    how = (settings.budget or Budget(share=1.0), settings.method, settings.hot, settings.index)
    return Steps(pool, engine, *how)


vars(connector)["steps_on"] = steps_on
register_backend(
    AttentionBackendEnum.CPU_ATTN, "cxlkv.adapters.vllm.attention_backend.GpuPoolBackend"
)
