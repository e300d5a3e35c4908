"""Says what a transformers model is now: all that makes its keys and values what they are.

    identity = Identity(model)        # reads all bytes of the weights
    identity.now()                    # takes milliseconds, and reads again only what has changed

requests.py makes of its words, by common/keys.py, the 16 bytes under which pages are found.

A tensor counts as unchanged where it lies where it lay, torch's count of in-place changes
(`Tensor._version`) is the same, and so are 2 KiB of its bytes from 32 places. So a change is not
seen that passes by that count (`.data`, numpy views, memory written by other code) and leaves these
bytes as they were.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cxlkv.adapters.transformers.layouts import config_words
from cxlkv.adapters.transformers.modules import Walk

PIECES, PIECE_BYTES = 32, 64
"""How many pieces of a tensor are looked at each time, and their size."""


@dataclass(frozen=True)
class Found:
    """What a look at a model saw.

    words: of all that makes keys and values. ropes: modules whose frequencies the length decides
    (ropes.py). doubts: why nobody must find pages of this model, if so. far: names of weights that
    are not in memory, of which only the shape is in the words.
    """

    words: dict[str, object]
    ropes: Sequence[torch.nn.Module] = ()
    doubts: Sequence[str] = ()
    far: Sequence[str] = ()


class Identity:
    """Identity of one model. weights: what names them, else all their bytes are read; sampled=True:
    else 2 KiB of each tensor stand for them."""

    def __init__(
        self, model: torch.nn.Module, weights: object = None, *, sampled: bool = False
    ) -> None:
        self._model, self._weights, self._sampled = model, weights, sampled
        self._walk, self._found = Walk(), Found({})
        self._told: tuple[dict[str, object], list[_State]] = {}, []
        self._digests: dict[int, _Digest] = {}
        self.now()

    @torch.no_grad()
    def now(self) -> Found:
        told = self._look()
        if told == self._told and self._walk.still():
            return self._found
        self._walk = walk = Walk()
        walk.model(self._model)
        words, states = self._told = self._look()
        samples = None  # where hooks bring weights into memory only while they are used
        if not walk.far:
            samples = hashlib.sha256(b"".join(state.sample for state in states)).hexdigest()
        modules = hashlib.sha256("\n".join(walk.lines).encode()).hexdigest()
        weights = self._weights
        if weights is None and not self._sampled:
            weights = self._all_bytes(walk.tensors, states)
        words = {**words, "modules": modules, "sample": samples, "weights": weights}
        self._found = Found(words, walk.ropes, walk.doubts, walk.far)
        return self._found

    def _look(self) -> tuple[dict[str, object], list[_State]]:
        """Words that are found at once, and the states of the tensors that the last walk saw."""
        device = getattr(self._model, "device", torch.device("cpu")).type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        words: dict[str, object] = {
            "config": config_words(self._model),
            "dtype": str(getattr(self._model, "dtype", None)),
            "autocast": str(torch.get_autocast_dtype(device)) if autocast else None,
        }
        return words, _states([tensor for _, tensor in self._walk.tensors])

    def _all_bytes(self, tensors: list[tuple[str, Tensor]], states: list[_State]) -> str:
        """A hash of all bytes. Reads those that may have changed, on as many CPUs as there are."""
        kept, self._digests = self._digests, {}
        unread: dict[int, Tensor] = {}
        for (_, tensor), state in zip(tensors, states, strict=True):
            known = kept.get(id(tensor))
            if known is None or known.of() is not tensor or known.state != state:
                known = _Digest(weakref.ref(tensor), state, b"")
                unread[id(tensor)] = tensor
            self._digests[id(tensor)] = known
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for place, digest in zip(unread, threads.map(_digest, unread.values()), strict=True):
                self._digests[place].bytes = digest
        found = hashlib.sha256()
        for name, tensor in tensors:
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(self._digests[id(tensor)].bytes)
        return found.hexdigest()


class _State(NamedTuple):
    """State of a tensor; another one once it has changed."""

    place: int
    version: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    sample: bytes


@dataclass
class _Digest:
    of: weakref.ref[Tensor]
    state: _State
    bytes: bytes


def _digest(weight: Tensor) -> bytes:
    flat = weight.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()


def _states(tensors: list[Tensor]) -> list[_State]:
    return [
        _State(
            tensor.data_ptr(),
            0 if tensor.is_inference() else tensor._version,
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            sample,
        )
        for tensor, sample in zip(tensors, _samples(tensors), strict=True)
    ]


def _samples(tensors: list[Tensor]) -> list[bytes]:
    """Copy bytes of up to PIECES places of each tensor, from each device at once."""
    pieces = [_sample(tensor) for tensor in tensors]
    found = [b""] * len(tensors)
    for like in {(piece.device, piece.ndim) for piece in pieces}:
        places = [at for at, piece in enumerate(pieces) if (piece.device, piece.ndim) == like]
        joined = torch.cat([pieces[at] for at in places]).cpu().numpy().tobytes()
        end = 0
        for at in places:
            start, end = end, end + pieces[at].numel()
            found[at] = joined[start:end]
    return found


def _sample(tensor: Tensor) -> Tensor:
    """Bytes [PIECES, PIECE_BYTES], the tensor's last ones among them, or [all bytes] of a small
    one."""
    if not tensor.is_contiguous():
        tensor = tensor[:: -(-len(tensor) // 4)].contiguous()  # copies four rows at most
    if not tensor.ndim:
        tensor = tensor[None]
    data = tensor.view(torch.uint8)
    count, first = data.numel(), data.storage_offset()
    step = count // PIECES
    if step <= PIECE_BYTES:
        return data.reshape(-1)
    first += count - (PIECES - 1) * step - PIECE_BYTES
    return data.as_strided((PIECES, PIECE_BYTES), (step, 1), first)
