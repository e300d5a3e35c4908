"""The states of recurrent and convolution layers: which ones a model has, and a row's as bytes.

transformers keeps them in its own layers of a Cache, tensors of [rows, ...]. A checkpoint is a copy
of one row's, in the order of the layers, each tensor on a line of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModel, DynamicCache, PreTrainedConfig, cache_utils

from cxlkv.adapters.common.audits import STATE_NOISE, offset
from cxlkv.adapters.common.shapes import STATE_KINDS, check_supported, kinds_of
from cxlkv.errors import BadArgumentError, GeometryError, UnsupportedError
from cxlkv.layout import LINE_BYTES, States

Bytes = npt.NDArray[np.uint8]
StateLayer = cache_utils.LinearAttentionLayer
KINDS = ("conv_states", "recurrent_states")

ONE_AT_A_TIME = ("jamba", "zamba")
"""Models whose scan begins anew in a pass of several tokens behind cached ones."""
ELSEWHERE = {
    "minimax": "keeps its states in a MiniMaxCache and takes no other cache",
    "recurrent_gemma": "keeps its states in its modules, where no cache sees them",
    "rwkv": "has no attention, and its states are in no cache",
    "xlstm": "has no attention, and its states are in no Cache of transformers",
    "inkling_text": "attends with position biases",
    "inkling2_text": "attends with position biases",
}
"""Why models with states are refused."""


@dataclass(frozen=True)
class StateTensor:
    """One of a layer's states; shape: of one row."""

    layer: int
    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"layer {self.layer}: {self.kind} {self.number}"

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {_word(self.dtype)}"


class StateForm(tuple[StateTensor, ...]):
    """All states of one row of a model."""

    @cached_property
    def states(self) -> States:
        return States.of([(one.name, one.shape, _word(one.dtype)) for one in self])

    @cached_property
    def _starts(self) -> list[int]:
        lines = (-(-one.size // LINE_BYTES) * LINE_BYTES for one in self)
        return list(accumulate(lines, initial=0))[:-1]

    @property
    def is_recurrent(self) -> bool:
        """Whether states hold all tokens so far; else only the last ones, so that they can be taken
        back."""
        return any(one.kind == "recurrent_states" for one in self)

    def tensors(self, layers: Mapping[int, StateLayer]) -> list[Tensor]:
        """The states [rows, ...] as they are. Raises GeometryError for states of other shapes or
        dtypes than these."""
        found = list(form_of_layers(layers))
        if tuple(one for one, _ in found) != self:
            wanted, got = map(str, self), (str(one) for one, _ in found)
            odd = next(((a, b) for a, b in zip(wanted, got, strict=False) if a != b), None)
            text = (
                f"{odd[1]}, the pool is laid out for {odd[0]}" if odd else "another number of them"
            )
            raise GeometryError(f"the model keeps other states than layout_of() saw: {text}")
        return [tensor for _, tensor in found]

    def pack(self, tensors: Sequence[Tensor], row: int) -> Bytes:
        """One row's states as uint8 [states.bytes]."""
        out = np.zeros(self.states.bytes, np.uint8)
        for one, start, tensor in zip(self, self._starts, tensors, strict=True):
            flat = tensor[row].detach().to("cpu").reshape(-1).view(torch.uint8)
            out[start : start + one.size] = flat.numpy()
        return out

    def unpack(self, rows: Sequence[Bytes | None], device: torch.device) -> list[Tensor]:
        """States [rows, ...] of checkpoints, zeros for None. Raises BadArgumentError."""
        for row in rows:
            if row is not None and (row.dtype != np.uint8 or row.shape != (self.states.bytes,)):
                raise BadArgumentError(
                    f"states are uint8 [{self.states.bytes}] of each row, not {row.dtype} "
                    f"{list(row.shape)}: pass what hit.read_states() gave"
                )
        made = []
        for one, start in zip(self, self._starts, strict=True):
            tensor = torch.zeros((len(rows), *one.shape), dtype=one.dtype)
            for given, place in zip(rows, tensor, strict=True):
                if given is not None:
                    piece = torch.from_numpy(given[start : start + one.size].copy())
                    place.copy_(piece.view(one.dtype).view(one.shape))
            made.append(tensor.to(device))
        return made

    def difference(self, found: Bytes, own: Bytes) -> str:
        """What differs by more than noise between two rows' states, by the median of a
        convolution's tokens and of a recurrent state's heads; empty where nothing does."""
        pairs = self.unpack((found, own), torch.device("cpu"))
        for one, pair in zip(self, pairs, strict=True):
            rows = pair.float().movedim(-1, 1) if one.kind == "conv_states" else pair.float()
            off = offset(*rows.reshape(2, rows.shape[1], -1).numpy())
            if off > STATE_NOISE:
                return f"{one.name} is off by {off:.2g} of its length"
        return ""

    def put(self, layers: Mapping[int, StateLayer], tensors: Sequence[Tensor]) -> None:
        """Have the layers go on from copies of these states [rows, ...]."""
        for layer in layers.values():
            StateLayer.__init__(layer, layer.number_of_states)
        for one, tensor in zip(self, tensors, strict=True):
            layer = layers[one.layer]
            if one.kind == "conv_states":
                layer.lazy_initialization(conv_states=tensor, state_idx=one.number)
            else:
                layer.lazy_initialization(recurrent_states=tensor, state_idx=one.number)
            getattr(layer, one.kind)[one.number].copy_(tensor)
            layer.has_previous_state[one.number] = True


def form_of_layers(layers: Mapping[int, StateLayer]) -> Iterator[tuple[StateTensor, Tensor]]:
    """Each state tensor [rows, ...] of a cache's layers, by their index in the model."""
    for index, layer in layers.items():
        for kind in KINDS:
            for number, tensor in getattr(layer, kind).items():
                if tensor is not None:
                    if kind == "conv_states" and layer.record_past:
                        tensor = tensor[..., -(layer.conv_kernel_size[number] or 0) :]
                    shape = tuple(tensor.shape[1:])
                    yield StateTensor(index, kind, number, shape, tensor.dtype), tensor


def state_layers(layers: Iterable[object]) -> dict[int, StateLayer]:
    """Those of a cache's layers that have states, by their index in the model."""
    return {index: one for index, one in enumerate(layers) if isinstance(one, StateLayer)}


def form_of(config: PreTrainedConfig, dtype: torch.dtype) -> StateForm | None:
    """What a model of this config and dtype keeps; None: no layer has a state.

    The model itself says it: one token runs through one without weights. Raises UnsupportedError,
    with the reason, for models whose states no cache has.
    """
    why = ELSEWHERE.get(config.model_type)
    if why is not None:
        raise UnsupportedError(f"{config.model_type} {why}: no pool can serve it")
    if not any(kind in STATE_KINDS for kind in kinds_of(config)):
        return None
    if not hasattr(cache_utils.Cache, "get_conv_state"):
        raise UnsupportedError(
            f"{config.model_type} has layers with states, which this transformers hands out in no "
            "way that a cache can follow: install a later release, such as 5.23"
        )
    check_supported(config, with_states=True)
    try:
        found = _form_of(_Config(config.to_json_string(use_diff=False), config), dtype)
    except Exception as error:
        raise UnsupportedError(
            f"{config.model_type}: layers with states, which fail with transformers' own cache "
            f"({type(error).__name__}: {error}): no pool can serve it"
        ) from error
    if not found:
        raise UnsupportedError(
            f"{config.model_type} has layers of {', '.join(sorted({*kinds_of(config)}))}, but puts "
            "no states into a cache: no pool can serve it"
        )
    return found


@dataclass(frozen=True)
class _Config:
    """Equal to those that say the same."""

    text: str
    config: PreTrainedConfig = field(compare=False)


@lru_cache(maxsize=16)
def _form_of(of: _Config, dtype: torch.dtype) -> StateForm:
    config = deepcopy(of.config)
    cache, given = DynamicCache(config=config), {"dtype": dtype, "attn_implementation": "eager"}
    with torch.device("meta"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        model = AutoModel.from_config(config, **given)  # type: ignore[no-untyped-call]
        model.train(False)
        model.set_experts_implementation("batched_mm")  # the host looks at no choice of experts
        model(torch.zeros((1, 1), dtype=torch.int64), past_key_values=cache, use_cache=True)
    return StateForm(one for one, _ in form_of_layers(state_layers(cache.layers)))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
