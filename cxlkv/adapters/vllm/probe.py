"""A worker tries at its start whether the engine's blocks lie as this adapter reads them.

The engine itself writes known keys and values into free blocks of each layer. They must lie where
BlockMemory says, and come back from the pool as they were, or as its codes have them. So an engine
that orders its cache in another way is refused, and never served with wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, cast

import torch

from cxlkv.adapters.vllm.groups import BlockGroup, unit_of
from cxlkv.adapters.vllm.loading import BlockMemory, Link
from cxlkv.errors import PoolFullError, UnsupportedError
from cxlkv.layout import FP8, KVLayout
from cxlkv.pool import CXLPool

Tensor = torch.Tensor
NUMBERS = ((1.0, 2.0), (3.0, 4.0))  # of keys and of values, in even heads and in odd ones
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Implementation(Protocol):
    def do_kv_cache_update(self, *given: object) -> None: ...


class Attention(Protocol):
    """The engine's layer. kv_cache: of an indexer, which has nothing else of these; the last three:
    of MLA alone."""

    impl: Implementation
    kv_cache: Tensor
    kv_lora_rank: int
    kv_cache_dtype: str
    _k_scale: Tensor


class Probe:
    """One for a worker, before any request comes. caches: the engine's own tensors of its layers,
    memory: as they are read here, in the same order; dtype: of keys that the engine computes.
    link: to memory of a device."""

    def __init__(
        self,
        layers: Mapping[str, Attention],
        caches: Mapping[str, Tensor],
        memory: Mapping[str, BlockMemory],
        groups: Sequence[BlockGroup],
        dtype: torch.dtype,
        link: Link | None = None,
    ):
        self._layers, self._caches, self._memory = layers, caches, list(memory.items())
        self._link = link
        self._groups, self._unit, self._dtype = groups, unit_of(groups), dtype

    def run(self, *pools: CXLPool) -> None:
        """pools: that share the heads. Raises UnsupportedError with the layer's name."""
        if any(own.keys.shape[0] < self._tried(own).stop for _, own in self._memory):
            return
        sequences = [pool.sequence() for pool in pools]
        try:
            with suppress(PoolFullError):
                batches = [pool.batch([one]) for pool, one in zip(pools, sequences, strict=True)]
                for number, (name, own) in enumerate(self._memory):
                    self._write(name, own)
                    self._check(name, own)
                    blocks = range(1, 1 + self._count(own))
                    for batch, part in zip(batches, own.shares(len(pools)), strict=True):
                        starts = [0, len(blocks)]
                        part.append(batch, number, blocks, starts)
                for number, (name, own) in enumerate(self._memory):
                    count = self._count(own)
                    others = range(1 + count, 1 + 2 * count)
                    if self._link is not None:
                        self._link.begin_loads(self._link.mark())
                    for batch, part in zip(batches, own.shares(len(pools)), strict=True):
                        part.fetch(batch, number, others, [0, count], [0])
                    if self._link is not None:
                        self._link.end_loads()
                    cache = self._caches[name]
                    moved = cache[self._unit_of(own, 1)].clone()
                    self._write(name, own)
                    if not _is_same(moved, cache[self._unit_of(own)], pools[0].layout):
                        raise refusal(name, "the pool gives back another block than it was given")
        finally:
            for sequence in sequences:
                sequence.release()
            for name, own in self._memory:
                self._caches[name][self._tried(own)].zero_()

    def _count(self, own: BlockMemory) -> int:
        """Blocks of a unit."""
        return self._unit // self._groups[own.group].block_tokens

    def _unit_of(self, own: BlockMemory, place: int = 0) -> slice[int, int]:
        """The blocks of the first unit that is tried, or of the one behind it, as kernels count."""
        count = self._count(own) * own.ratio
        return slice(own.ratio + place * count, own.ratio + (place + 1) * count)

    def _tried(self, own: BlockMemory) -> slice[int, int]:
        """These, and a block before and behind them."""
        return slice(0, self._unit_of(own, 1).stop + own.ratio)

    def _write(self, name: str, own: BlockMemory) -> None:
        """The engine writes the unit's blocks, from block 1 on, and nothing else."""
        cache, layer, size = self._caches[name], self._layers[name], own.tokens
        cache[self._tried(own)].zero_()
        if self._is_indexer(name, own):
            mine = self._indexed(name, own)
            mine.copy_(_bytes(mine))
            return
        heads = torch.arange(own.keys.shape[1]) % 2
        rows = [torch.tensor(of)[heads].to(self._dtype) for of in NUMBERS]
        shape = (self._unit, len(heads), own.keys.shape[3])
        key, value = (
            row.to(cache.device)[None, :, None].expand(shape).contiguous() for row in rows
        )
        slots = torch.arange(size, size + self._unit, dtype=torch.int64, device=cache.device)
        if own.values is not None:
            layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
            return
        latent, rope = key[:, 0, : layer.kv_lora_rank], value[..., layer.kv_lora_rank :]
        how = (layer.kv_cache_dtype, layer._k_scale)
        layer.impl.do_kv_cache_update(latent, rope, cache[:, 0], slots, *how)

    def _is_indexer(self, name: str, own: BlockMemory) -> bool:
        return own.values is None and self._caches[name].dtype == torch.uint8

    def _indexed(self, name: str, own: BlockMemory) -> Tensor:
        """The unit's blocks as an indexer has them, [blocks, tokens, bytes] of its kernels. These
        run on GPUs alone, so it is not tried here how a block has its keys and scales."""
        kept, size = self._layers[name].kv_cache, own.tokens
        return kept[size // kept.shape[1] :][: self._unit // kept.shape[1]]

    def _check(self, name: str, own: BlockMemory) -> None:
        unit, cache = self._unit_of(own), self._caches[name]
        found = list[Tensor]()
        if self._is_indexer(name, own):
            mine = cast("Tensor", own.keys)[unit].contiguous().view(torch.uint8)
            if not torch.equal(mine.flatten(), _bytes(self._indexed(name, own)).flatten()):
                raise refusal(name, "an indexer's bytes of a block are not where they were")
        for part in self._parts(name, own):
            mine = part[unit].contiguous()
            if mine.numel():
                found.append(torch.unique(mine.view(_WHOLE[mine.element_size()])))
        numbers = [int(one[0]) for one in found]
        if any(len(one) != 1 for one in found) or len({0, *numbers}) != 1 + len(numbers):
            raise refusal(name, "keys and values of a block are not where they were")
        if cache[: own.ratio].any() or cache[unit.stop : self._tried(own).stop].any():
            raise refusal(name, "a block has other memory than its own")

    def _parts(self, name: str, own: BlockMemory) -> Iterator[Tensor]:
        """Where one of the numbers is: K and V in even and in odd heads, or of latents the two
        parts of a row."""
        if self._is_indexer(name, own):
            return
        if own.values is None:
            rank = self._layers[name].kv_lora_rank
            yield from cast("Tensor", own.keys).tensor_split([rank], dim=3)
            return
        for memory in (own.keys, own.values):
            yield from (cast("Tensor", memory)[:, odd::2] for odd in range(2))


def _bytes(blocks: Tensor) -> Tensor:
    """Numbers that tell each place in these blocks, and none of which is 0."""
    made = torch.Generator().manual_seed(blocks.numel())
    return torch.randint(1, 256, blocks.shape, generator=made).byte().to(blocks.device)


def _is_same(moved: Tensor, written: Tensor, layout: KVLayout) -> bool:
    """By every bit; of codes as near as they are, which is far nearer than NUMBERS are apart."""
    if {layout.k_encoding, layout.v_encoding} <= {"none", FP8}:
        return torch.equal(moved, written)
    return torch.allclose(moved.float(), written.float(), rtol=0.15, atol=0)


def refusal(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"cxlkv: {name}: {what}: this vLLM lays out its cache in a way that is not served. Use the "
        "release that docs/engines/vllm.md names"
    )
