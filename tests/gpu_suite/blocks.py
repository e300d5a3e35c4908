"""vLLM's blocks to the pool and back: a hit beside a bare copy, and a step beside a save or a load.

The worker is driven by the scheduler's messages; its blocks are tensors as vLLM lays them out. The
yardstick of a hit is one large copy of pinned memory of as many bytes, of a step the same step with
nothing beside it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

import torch

from cxlkv.adapters.vllm.messages import Message
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool

from ..support.device_worker import Worker, keys_of, worker_of
from .case import Progress, Timer

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Size:
    """Llama 3 8B. saved_tokens: that a step completes; width, products: of its matrices."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 8192
    saved_tokens: int = 2048
    width: int = 4096
    products: int = 200
    rounds: int = 9


TINY = Size(2, 2, 64, 128, 64, 32, 2, 1)


class Run:
    def __init__(self, size: Size, device: torch.device, stack: ExitStack):
        self.size, self.device, self.names = size, device, count()
        layout = KVLayout(
            layers=size.layers,
            kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            page_tokens=BLOCK_TOKENS,
            dtype="bfloat16",
        )
        self.bytes = size.tokens * layout.token_bytes
        capacity = 6 * self.bytes + (64 << 20)
        pool = stack.enter_context(CXLPool.create("anonymous:", layout=layout, capacity=capacity))
        blocks = 3 * size.tokens // BLOCK_TOKENS + 1
        self.worker: Worker = worker_of(pool, blocks, device, step_tokens=size.tokens)
        stack.callback(self.worker.attention.close)
        self.keys = keys_of(0, size.tokens // BLOCK_TOKENS)
        self.text = list(range(1, 1 + size.tokens // BLOCK_TOKENS))
        self.into = [block + len(self.text) for block in self.text]
        self.spare = [block + len(self.text) for block in self.into]
        self.pinned = torch.empty(
            self.bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        ).fill_(1)
        self.target = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        shape = (size.width, size.width)
        self.matrix = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def fill(self) -> None:
        """Put a text into the pool."""
        worker = self.worker
        worker.step(worker.begin_text("text", self.keys, self.text), self.text)
        worker.step(Message(ended=["text"]))
        worker.attention._saver.wait()

    def begin_load(self) -> str:
        """A request that waits for a hit of all tokens."""
        name = f"hit{next(self.names)}"
        self.worker.step(self.worker.begin_hit(name, self.keys, self.into, "async"))
        return name

    def end_load(self, name: str) -> None:
        while not self.worker.attention.finished():
            pass
        self.worker.step(Message(ended=[name]))

    def hit(self) -> None:
        self.end_load(self.begin_load())

    def copy(self) -> None:
        self.target.copy_(self.pinned, non_blocking=True)

    def compute(self) -> None:
        """What a step's matrices take."""
        found = self.matrix
        for _ in range(self.size.products):
            found = self.matrix @ found

    def begin_save(self) -> str:
        """A step whose blocks are on their way, of a new text."""
        name, blocks = f"save{next(self.names)}", self.spare[: self.size.saved_tokens // 16]
        keys = keys_of(int(name[4:]) + 1, len(blocks))
        self.worker.step(self.worker.begin_text(name, keys, blocks))
        self.worker.step(Message(ended=[name]))
        return name


def run(progress: Progress, device: torch.device, size: Size) -> None:
    """Metrics in seconds: hit, copy; step, step_beside_save, step_beside_load. Ratios of speeds."""
    with ExitStack() as stack:
        timer, made = Timer(device, size.rounds), Run(size, device, stack)
        made.fill()
        result = progress.result
        made.hit()
        layers = range(size.layers)
        worker = made.worker
        right = all(
            torch.equal(worker.bits(at, made.into), worker.bits(at, made.text)) for at in layers
        )
        result.checks["blocks of a hit are those that were saved"] = right
        hit = result.measure("hit", timer.whole(made.hit), "s").median
        copy = result.measure("copy", timer.whole(made.copy), "s").median
        result.ratio("hit_to_h2d", copy / hit)
        progress.save("a hit", f"{made.bytes / hit / 1e9:.1f} GB/s")
        alone, *others = (steps(timer, made, kind) for kind in ("", "save", "load"))
        step = result.measure("step", alone, "s").median
        for kind, samples in zip(("save", "load"), others, strict=True):
            beside = result.measure(f"step_beside_{kind}", samples, "s").median
            result.ratio(f"step_beside_{kind}_to_step", step / beside)
        result.notes.append(
            f"a hit of {size.tokens} tokens, {made.bytes >> 20} MiB, by the host's clock, from the "
            f"message until all is in the blocks; a step of {size.products} products of "
            f"{size.width} beside a save of {size.saved_tokens} tokens or a load of {size.tokens}"
        )
        progress.save("steps beside copies")


def steps(timer: Timer, made: Run, kind: str) -> list[float]:
    """The times of a step's matrices on the device, with that beside it."""
    found = []
    for _ in range(made.size.rounds):
        name = made.begin_load() if kind == "load" else ""
        if kind == "save":
            made.begin_save()
        found.append(timer.sample(made.compute))
        if name:
            made.end_load(name)
        made.worker.attention._saver.wait()
    return found
