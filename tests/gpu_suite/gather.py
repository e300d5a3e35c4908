"""Pieces out of a pool's memory into the GPU's: kernel copy, DMA batched and in a loop, dispatcher.

The yardstick is one large copy of pinned memory in the same run. Pieces lie at random in a region
that no cache holds; a sample takes another choice of them than the one before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.arrays import memory_of
from cxlkv.gpu.copier import Copier
from cxlkv.gpu.mapping import Mapping
from cxlkv.kernels.copies import copy_fragments
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool

from .case import ROUNDS, Progress, Timer
from .suite import link

BREAK_EVEN_BYTES, BREAK_EVEN_COUNT = 28 << 10, 16  # as published for kernel copies
BELUGA_US = 211.0  # for FRAGMENTS: 16 sparse tokens of a model of 32 billion parameters
FRAGMENT_BYTES, FRAGMENTS = 20 << 10, 128
NAMES = {4096: "4k", 65536: "64k"}  # 16 tokens of one head, and of 16: the pieces that we wanted
SWEPT = (656, 1152, *NAMES)
POISON = 0xA5
CHECKED = 128


@dataclass(frozen=True)
class Size:
    """The pieces that matter come first: rows of 656 and 1152 bytes are those of MLA."""

    pieces: tuple[int, ...] = (
        *(4096, 65536, FRAGMENT_BYTES, 656, 1152),
        *(256, 2048, 8192, 16384, 28672, 32768, 131072, 262144),
    )
    counts: tuple[int, ...] = (16, 128, 1024, 16384)
    programs: tuple[int, ...] = (4, 8, 12, 16, 24, 48, 132)
    source_bytes: int = 2 << 30
    target_bytes: int = 1 << 30
    choices: int = 4
    rounds: int = ROUNDS


TINY = Size(
    pieces=(4096, 65536, 656, 1152),
    counts=(16, 24),
    programs=(2,),
    source_bytes=4 << 20,
    target_bytes=3 << 20,
    choices=1,
    rounds=1,
)


@dataclass
class Choice:
    """Which pieces, where they come from and go to: tables of the device, and of the host."""

    slots: Tensor
    source_at: Tensor
    target_at: Tensor
    sources: Tensor
    targets: Tensor
    sizes: npt.NDArray[np.int64]


class Memory:
    """The memory of a pool, full of random bytes, mapped for the device, and room for it there."""

    def __init__(self, size: Size, device: torch.device, stack: ExitStack):
        self.size, self.device = size, device
        layout = KVLayout(layers=1, kv_heads=8, head_dim=128)
        capacity = size.source_bytes + (64 << 20)
        pool = stack.enter_context(CXLPool.create("anonymous:", layout=layout, capacity=capacity))
        self.mapping = stack.enter_context(Mapping(pool, device))
        # Its last bytes are pages that nobody has: what is in them is nobody's.
        self.source = self.mapping.tensor[-size.source_bytes :]
        self.target = torch.empty(size.target_bytes, dtype=torch.uint8, device=device)
        step = min(size.source_bytes, 256 << 20)
        random = torch.Generator(device).manual_seed(11)
        for first in range(0, size.source_bytes, step):
            part = self.source[first : first + step]
            bits = torch.empty(part.numel(), dtype=torch.uint8, device=device)
            part.copy_(bits.random_(0, 256, generator=random))

    def choose(self, piece: int, count: int, seed: int) -> Choice:
        slots = self.size.source_bytes // piece
        drawn = np.random.default_rng(seed).choice(slots, count, replace=False).astype(np.int64)
        source = memory_of(self.source, "source") + drawn * piece
        target = memory_of(self.target, "target") + np.arange(count, dtype=np.int64) * piece
        return Choice(
            torch.from_numpy(drawn),
            torch.from_numpy(source).to(self.device),
            torch.from_numpy(target).to(self.device),
            torch.from_numpy(source),
            torch.from_numpy(target),
            np.full(count, piece, np.int64),
        )

    def right(self, choice: Choice, piece: int) -> bool:
        """Whether the target holds pieces of this choice, CHECKED of them looked at, and nothing
        behind them."""
        count = len(choice.slots)
        some = torch.linspace(0, count - 1, min(count, CHECKED)).long()
        rows = self.source[: self.size.source_bytes // piece * piece].view(-1, piece)
        got = self.target[: count * piece].view(count, piece)[some.to(self.device)].cpu()
        behind = self.target[count * piece : count * piece + 64]
        same = bool((got == rows[choice.slots[some]]).all())
        return same and bool((behind == POISON).all())


def run(progress: Progress, device: torch.device, size: Size) -> None:
    """Metrics h2d in bytes/s and <method>_<bytes>_x<count> in us; ratios of speeds, in the least
    favourable case of each."""
    with ExitStack() as stack:
        run_in(progress, Timer(device, size.rounds), Memory(size, device, stack))


def run_in(progress: Progress, timer: Timer, memory: Memory) -> None:
    size, result = memory.size, progress.result
    h2d = bandwidth(progress, timer, memory)
    methods = methods_of(memory)
    result.notes.append(
        f"pieces at random in {size.source_bytes >> 20} MiB of a pool's memory; a time is the "
        "device's, from the first copy to the last; kernel: its tables are on the device, upload: "
        "they come from the host, as those of the dispatcher do; loop: one in Python; "
        "kernel_below_break_even_to_dma is the least of pieces below "
        f"{BREAK_EVEN_BYTES >> 10} KiB and {BREAK_EVEN_COUNT} and more of them, "
        "dispatcher_to_better (of upload, batch and loop) the least of all"
    )
    for piece, count in itertools.product(size.pieces, size.counts):
        if piece * count <= size.target_bytes and progress.left(f"{count} pieces of {piece} bytes"):
            measure(progress, timer, memory, methods, (piece, count))
            gathered(progress, h2d, piece, count)
    if progress.left("128 fragments"):
        fragments(progress, timer, memory, methods)
    if progress.left("numbers of programs"):
        sweep(progress, timer, memory)
    progress.save(f"{len(size.pieces)} sizes of pieces")


def bandwidth(progress: Progress, timer: Timer, memory: Memory) -> float:
    """Bytes/s of one large copy of pinned memory to the device; of the pool's, both ways, too."""
    size = min(memory.size.source_bytes, memory.size.target_bytes)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=timer.stream is not None)
    pinned.copy_(memory.source[:size])
    source, target = memory.source[:size], memory.target[:size]
    timed = timer(
        {
            "h2d": lambda: target.copy_(pinned, non_blocking=True),
            "h2d_pool": lambda: target.copy_(source, non_blocking=True),
            "d2h_pool": lambda: source.copy_(target, non_blocking=True),
        }
    )
    speed = progress.result.speeds(timed, size, unit="bytes/s")["h2d"]
    if timer.stream is not None:
        found = link()
        generation, width = (found.get(f"pcie.link.{n}.current", "?") for n in ("gen", "width"))
        progress.result.notes.append(
            f"the link behind these copies: PCIe generation {generation}, {width} lanes"
        )
    progress.save("one large copy", f"{speed / 1e9:.1f} GB/s")
    return speed


Method = Callable[[Choice, int], object]


def methods_of(memory: Memory) -> dict[str, Method]:
    """What copies a choice, by name; DMA where there is a driver."""
    copier, device, driver = Copier(memory.mapping), memory.device, memory.mapping.driver

    def upload(choice: Choice, piece: int) -> None:
        tables = torch.stack([choice.sources, choice.targets])
        if device.type == "cuda":
            tables = tables.pin_memory().to(device, non_blocking=True)
        copy_fragments(tables[0], tables[1], piece)

    methods: dict[str, Method] = {
        "kernel": lambda choice, piece: copy_fragments(choice.source_at, choice.target_at, piece),
        "upload": upload,
        "dispatcher": lambda c, piece: copier.copy(c.sources, c.targets, piece).wait(),
    }
    if driver is None:
        return methods
    ways = {"loop": driver.copy}
    if driver.has_batched_copies:
        ways["batch"] = driver.copy_batch

    def dma(way: str) -> Method:
        def copy(choice: Choice, piece: int) -> None:
            stream = int(torch.cuda.current_stream(device).cuda_stream)
            ways[way](choice.targets.numpy(), choice.sources.numpy(), choice.sizes, stream)

        return copy

    return methods | {way: dma(way) for way in ways}


def turns(choices: list[Choice], method: Method, piece: int) -> Callable[[], object]:
    """The method on one choice after the other."""
    rest: Iterator[Choice] = itertools.cycle(choices)
    return lambda: method(next(rest), piece)


def measure(
    progress: Progress,
    timer: Timer,
    memory: Memory,
    methods: dict[str, Method],
    shape: tuple[int, int],
) -> None:
    """All methods on pieces of one size and number, each first seen to be right."""
    result, (piece, count) = progress.result, shape
    choices = [memory.choose(piece, count, seed) for seed in range(memory.size.choices)]
    for name, method in methods.items():
        memory.target.fill_(POISON)
        timer.wait()
        with timer.here():
            method(choices[0], piece)
        timer.wait()
        result.checks[f"{name}_{piece}_x{count}"] = memory.right(choices[0], piece)
    timed = timer({n: turns(choices, m, piece) for n, m in methods.items()})
    us = result.times(timed, "us", f"{{}}_{piece}_x{count}")
    dma = [us[name] for name in ("batch", "loop") if name in us]
    least(progress, "dispatcher_to_better", min([us["upload"], *dma]) / us["dispatcher"])
    if dma and piece < BREAK_EVEN_BYTES and count >= BREAK_EVEN_COUNT:
        least(progress, "kernel_below_break_even_to_dma", min(dma) / us["kernel"])
    speeds = ", ".join(f"{name} {piece * count / t / 1e3:.1f}" for name, t in us.items())
    progress.save(f"{count} pieces of {piece} bytes", f"{speeds} GB/s")


def least(progress: Progress, name: str, value: float) -> None:
    ratios = progress.result.ratios
    ratios[name] = min(value, ratios.get(name, value))


def gathered(progress: Progress, h2d: float, piece: int, count: int) -> None:
    """How much of the link our pages use: of the largest number of them, which comes last."""
    if piece in NAMES:
        result = progress.result
        for method, name in (("dispatcher", "gather"), ("kernel", "kernel")):
            metric = result.metrics.get(f"{method}_{piece}_x{count}")
            if metric is not None:
                speed = piece * count / (metric.median / 1e6)
                result.ratios[f"{name}_{NAMES[piece]}_to_h2d"] = speed / h2d


def fragments(progress: Progress, timer: Timer, memory: Memory, methods: dict[str, Method]) -> None:
    """Beluga's case: until all fragments are there, as the host sees it."""
    seeds = range(memory.size.choices)
    choices = [memory.choose(FRAGMENT_BYTES, FRAGMENTS, seed) for seed in seeds]
    for name in methods:
        seconds = timer.whole(turns(choices, methods[name], FRAGMENT_BYTES))
        which = "fragments_128" if name == "dispatcher" else f"fragments_128_{name}"
        metric = progress.result.measure(which, [1e6 * s for s in seconds], "us")
        if name == "dispatcher":
            progress.result.ratios["fragments_128_to_beluga"] = BELUGA_US / metric.median
    progress.save("128 fragments of 20 KB")


def sweep(progress: Progress, timer: Timer, memory: Memory) -> None:
    """What the kernel copy's number of programs does: metrics programs_<number>_<bytes>, in us."""
    for piece in (piece for piece in memory.size.pieces if piece in SWEPT):
        count = min(memory.size.target_bytes // piece, max(memory.size.counts))
        choice = memory.choose(piece, count, 0)
        functions = {
            str(number): partial(
                copy_fragments, choice.source_at, choice.target_at, piece, programs=number
            )
            for number in memory.size.programs
        }
        timed = timer(functions)
        progress.result.times(timed, "us", f"programs_{{}}_{piece}_x{count}")
