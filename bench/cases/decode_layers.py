"""Layers of a pool that no cache holds when their turn comes, over emulated links, too; and what
they are held against: how fast this machine reads memory, and how fast it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from cxlkv import _core
from cxlkv.bench import loops, streams
from cxlkv.bench.cases import ndp_rivals
from cxlkv.bench.cases.ndp_rivals import agreement
from cxlkv.bench.loops import Stream
from cxlkv.bench.measure import Samples, interleave_reported
from cxlkv.bench.pools import Shape
from cxlkv.bench.result import Result
from cxlkv.emulation.link import Link, emulate
from cxlkv.emulation.profiles import OURS, read
from cxlkv.ndp.engine import Budget, Decoded, Selection
from cxlkv.pool import CXLPool, Pool

Walk = Callable[[], float]
"""Does something to each layer in turn; returns seconds a layer."""
READ_S, MULTIPLY_S = 8e-3, 2e-3
"""How long memory is read, and multiplied, for one sample."""


@dataclass(frozen=True, kw_only=True)
class Decoding(Shape):
    """A step: a token of each of `sequences`, which have `tokens` before it."""

    sequences: int = 1

    def walked(self, walk_bytes: int) -> Decoding:
        """With as many layers as have so many bytes of keys: more than caches hold."""
        return replace(self, layers=-(-walk_bytes // self.key_bytes))

    @property
    def key_bytes(self) -> int:
        """Bytes of one layer's keys."""
        return self.sequences * self.tokens * self.layout.token_bytes // self.layers // 2

    @property
    def products(self) -> int:
        """Multiplications of one layer's queries and keys; those of weights and values are as
        many.
        """
        return self.sequences * self.tokens * self.kv_heads * self.group * self.head_dim


class Layers:
    """A pool whose layers all hold the same noise, K and V alike, in pages of their own."""

    def __init__(self, shape: Decoding, pool: CXLPool, seed: int) -> None:
        self.shape, self.pool = shape, pool
        self.generator = torch.Generator().manual_seed(seed)
        self.keys = self.noise(shape.tokens, shape.kv_heads)
        self.values = self.keys.flip(0)  # as good as other noise, and sooner made
        self.sequences = [pool.sequence() for _ in range(shape.sequences)]
        self.batch = pool.batch(self.sequences)
        for layer in range(shape.layers):
            for sequence in self.sequences:
                sequence.append(layer, self.keys, self.values)
        self.starts = np.arange(shape.sequences + 1, dtype=np.int32)
        self.new = self.noise(shape.sequences, shape.kv_heads)
        self.ask(shape.group)

    def ask(self, group: int) -> None:
        """Other queries, of so many heads to a kv head."""
        self.queries = self.noise(self.shape.sequences, self.shape.kv_heads * group)

    def noise(self, rows: int, heads: int) -> Tensor:
        shape = (rows, heads, self.shape.head_dim)
        found = torch.randn(shape, generator=self.generator)
        return found.to(getattr(torch, self.shape.dtype))

    def walk(self, call: Callable[[int], object]) -> float:
        """Seconds a layer."""
        began = perf_counter()
        for layer in range(self.shape.layers):
            call(layer)
        return (perf_counter() - began) / self.shape.layers

    def select(self, budget: Budget, method: str) -> float:
        return self.walk(lambda n: self.batch.select(n, self.queries, self.starts, budget, method))

    def attend(self, error: float = 0.0) -> float:
        return self.walk(lambda n: self.batch.attend(n, self.queries, self.starts, error=error))

    def append(self, tokens: int) -> float:
        """Seconds for so many tokens of one layer, in whole pages."""
        sequence = self.pool.sequence()
        began = perf_counter()
        sequence.append(0, self.keys[:tokens], self.values[:tokens])
        took = perf_counter() - began
        sequence.release()
        return took

    def decode(self, budget: Budget | None = None, method: str = "auto") -> float:
        """By one call a layer. The tokens are taken back, which is not measured."""
        took = self.walk(lambda n: self._decoded(n, budget, method))
        self._take_back()
        return took

    def read_share(self, budget: Budget, method: str) -> float:
        """Share of all bytes of K and V that a layer's step reads to choose and to attend."""
        found = self._decoded(0, budget, method)
        self._take_back()
        return (found.bytes_scored + found.bytes_read) / (2 * self.shape.key_bytes)

    def _decoded(self, layer: int, budget: Budget | None, method: str) -> Decoded:
        new = self.new
        return self.batch.decode(layer, self.queries, new, new, self.starts, budget, method)

    def _take_back(self) -> None:
        for sequence in self.sequences:
            sequence.truncate(self.shape.tokens)

    def picked(self, budget: Budget, method: str) -> Selection:
        return self.batch.select(0, self.queries, self.starts, budget, method)

    def check(self, result: Result, budget: Budget, name: str) -> None:
        """Whether "exact" chooses torch's pages and attention is torch's, for the first sequence,
        two_stage nearly the same pages. The budget forces no pages."""
        shape = self.shape
        first = self.queries[0].float().view(shape.kv_heads, -1, shape.head_dim)
        keys, values = (one.transpose(0, 1).float() for one in (self.keys, self.values))
        exact, staged = (self.picked(budget, method).pages[0] for method in ("exact", "two_stage"))
        theirs = ndp_rivals.keys_first(keys, first, shape.page_tokens, exact.shape[-1])
        missed = exact.size * (1 - agreement(staged, exact))
        wanted = ndp_rivals.sdpa(first[None], keys, values).flatten()
        result.checks |= {
            f"exact_agrees_with_torch_{name}": agreement(exact, theirs.numpy()) > 0.99,
            f"two_stage_agrees_with_exact_{name}": missed <= max(2.5, 0.07 * exact.size),
            f"attend_agrees_with_torch_{name}": difference(self.attended()[0], wanted) < 0.01,
        }

    def attended(self) -> Tensor:
        """Attention to all of the first layer: [sequences, q_heads, head_dim]."""
        return torch.as_tensor(self.batch.attend(0, self.queries, self.starts)[0])


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, of two outputs in the same order."""
    return float((one.float().flatten() - other.float().flatten()).abs().max())


@contextmanager
def layers_of(
    shape: Decoding,
    seed: int,
    *,
    encoding: str = "none",
    threads: int | None = None,
    more_tokens: int = 0,
) -> Iterator[Layers]:
    """In memory, in huge pages where there are such as an engine's pool is, without CRCs, with
    sketches where nothing is encoded; by as many threads as there are CPUs. more_tokens: beside
    those of the sequences."""
    layout = shape.layout.encoded(encoding)
    # Digests and sketches are up to 0.16 of the keys and values; a page more for each sequence.
    tokens = shape.sequences * (shape.tokens + shape.page_tokens) + more_tokens
    capacity = int(layout.stored_token_bytes * tokens * 1.3) + (64 << 20)
    with CXLPool.create(
        "anonymous:",
        layout=layout,
        capacity=capacity,
        checksum=False,
        sketch=encoding == "none",
        huge="try",
        threads=threads,
    ) as pool:
        yield Layers(shape, pool, seed)


@contextmanager
def all_threads() -> Iterator[int]:
    """torch computes on every CPU that this process may use, as pools do; how many these are."""
    before, count = torch.get_num_threads(), len(streams.allowed_cpus())
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Bounds:
    """Bytes a second of a streaming read, products a second of keys by queries and of values by
    weights: no kernel is faster than these let it be."""

    read: float
    keys: float
    values: float

    def score_s(self, shape: Decoding) -> float:
        """The least time of a layer's scores."""
        return max(shape.key_bytes / self.read, shape.products / self.keys)

    def attend_s(self, shape: Decoding) -> float:
        """The least time of attention to all of a layer."""
        multiplying = shape.products / self.keys + shape.products / self.values
        return max(2 * shape.key_bytes / self.read, multiplying)


class Machine:
    """What memory and arithmetic give, on every CPU: sampled between the forms that are held
    against them."""

    def __init__(self, reading: Sequence[Stream]) -> None:
        self.reading = reading
        self.matrix = torch.ones(512, 512)
        self.found: dict[str, list[float]] = {}  # bytes or products a second, by turns

    def read(self) -> float:
        """Bytes a second of the streaming read; after it no cache holds anything else."""
        return 1e9 * streams.speed(loops.memory_run(self.reading, READ_S))

    def multiply(self, dtype: str) -> float:
        """Products a second of keys of a dtype by queries; "float32": of values of any."""
        return loops.products_per_s(_core.isa(), dtype, len(self.reading), MULTIPLY_S)

    def take_turns(
        self, forms: Mapping[str, Walk], rounds: int, dtype: str
    ) -> tuple[Samples, Bounds]:
        """Seconds a layer of each form, each behind a streaming read, and what bounds them."""
        read: list[float] = []

        def behind_a_read(form: Walk) -> Walk:
            def run() -> float:
                read.append(self.read())
                # In use a layer's matrices come before, and OpenMP's threads are awake.
                torch.mm(self.matrix, self.matrix)
                return form()

            return run

        turns = {name: behind_a_read(form) for name, form in forms.items()}
        # A read ends what the OpenMP team of the form before still looks out for.
        turns |= {
            "keys": behind_a_read(lambda: self.multiply(dtype)),
            "values": behind_a_read(lambda: self.multiply("float32")),
        }
        samples = interleave_reported(turns, rounds)
        bounds = Bounds(median(read), median(samples.pop("keys")), median(samples.pop("values")))
        found = {"read": bounds.read, dtype: bounds.keys, "float32": bounds.values}
        for name, rate in found.items():
            self.found.setdefault(name, []).append(rate)
        return samples, bounds

    def tell(self, result: Result) -> None:
        """A sample for each of the turns."""
        for name, rates in self.found.items():
            if name == "read":
                result.measure("stream", [rate / 1e9 for rate in rates], "GB/s")
            else:
                result.measure(f"products_{name}", [rate / 1e9 for rate in rates], "G/s")


@contextmanager
def machine(region_bytes: int) -> Iterator[Machine]:
    """Whose streaming read goes over so much memory."""
    with loops.memory_taken(region_bytes // streams.UNIT_BYTES * streams.UNIT_BYTES) as memory:
        streams.number(memory)
        yield Machine(streams.split("read", memory, streams.allowed_cpus()))


# ---- over emulated links ----

DEVICES = tuple(read(OURS))
"""All that the project knows."""


def over_links(
    result: Result,
    pool: Pool,
    forms: Mapping[str, Walk],
    point: str,
    *,
    parts: int,
    parts_of_step: int = 1,
    rounds: int = 3,
    devices: Sequence[str] = DEVICES,
) -> None:
    """FORM_POINT in ms a step, FORM_clock_POINT by the device's clock, late_POINT: the share of
    operations in which the host was slower than the device, so that the time is its own. point: a
    name with {} for the device. A walk goes through so many parts, and returns seconds for one."""
    for device in devices:
        name = point.format(device)
        with emulate(pool, device) as link:
            samples = interleave_reported(forms, rounds)
        late, count = link.counts()
        result.measure(f"late_{name}", [late / count], "share of operations", link.label)
        with emulate(pool, device, mode="virtual") as clock:
            clocked = {f"{form}_clock": [clock_s(clock, forms[form]) / parts] for form in forms}
        for some, label in ((samples, link.label), (clocked, clock.label)):
            steps = {form: [parts_of_step * s for s in found] for form, found in some.items()}
            result.times(steps, "ms/step", f"{{}}_{name}", label)


def clock_s(link: Link, form: Walk) -> float:
    """What a form takes by the clock of a link in mode "virtual"."""
    before = link.seconds
    form()
    return link.seconds - before
