"""A layout says what a pool stores: layers, heads, dimensions, dtype, page size, rotary angles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice
from math import prod
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError, UnsupportedError, shown
from cxlkv.numbers import FLOAT32_MAX, array_of, is_real, is_whole

DTYPES = ("bfloat16", "float16", "float32")  # a dtype's index is its code in the pool's format
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
STORED = (*DTYPES, "uint8")  # likewise; the last one is of objects only
GROUPS_MAX = 16
LAYERS_MAX = 1024
VALUES = ("own", "key_prefix", "object")  # likewise
LINE_BYTES = 64
CODE_TOKENS = 16  # of a block of codes, and the channels of its lines
FP8 = "fp8_e4m3"
ENCODINGS = ("none", "int8", "int4", FP8, "progressive")  # likewise
OBJECT_BYTES_MAX = 1 << 30
OBJECT_PAGES_MAX = 1 << 16
STATE_BYTES_MAX = 1 << 36
_STATE_DTYPES = {**DTYPE_BYTES, "float64": 8, "int64": 8, "int32": 4, "int8": 1, "bool": 1}
CODE_BITS = {"int8": 8, "int4": 4, "progressive": 8}
PAIRS_MAX = 256
"""Most pairs of channels that a layer turns; of all groups of a layout together, too."""
Floats = npt.NDArray[np.float32]
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def dtype_name(dtype: object) -> str:
    """The name of a dtype given as text, numpy dtype or torch dtype; raises BadArgumentError."""
    given = dtype.__name__ if isinstance(dtype, type) else getattr(dtype, "name", dtype)
    name = str(given).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise BadArgumentError(f"dtype {dtype!r} is not stored: use one of {', '.join(DTYPES)}")
    return name


def encodings_of(text: str) -> tuple[str, str]:
    """The encodings of keys and of values in "int8" (both) or "int8,int4"; raises
    BadArgumentError."""
    names = [name.strip() for name in str(text).split(",")]
    if not 1 <= len(names) <= 2 or any(name not in ENCODINGS for name in names):
        raise BadArgumentError(
            f"encoding {text!r}: one of {', '.join(ENCODINGS)} for keys and values, or two, of "
            "keys and of values: int8,int4"
        )
    return names[0], names[-1]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) of a layer's keys and queries.

    frequencies: of each pair of channels, the radians by which it turns from one token to the
    next, float32. The pairs are of a head's first 2n channels; the others are not turned.
    neighbours: pair i is channels 2i and 2i + 1 (GLM, Cohere); else i and n + i (Llama). A factor
    on all keys, such as YaRN's, is not part of it.
    """

    frequencies: tuple[float, ...]
    neighbours: bool = False

    def __post_init__(self) -> None:
        some: object = self.frequencies
        given = tuple(islice(some, PAIRS_MAX + 1)) if isinstance(some, Iterable) else ()
        finite = all(is_real(each, -FLOAT32_MAX, FLOAT32_MAX) for each in given)
        if not 1 <= len(given) <= PAIRS_MAX or not finite:
            raise BadArgumentError(
                f"frequencies of a rotary embedding: 1 to {PAIRS_MAX} finite numbers, radians a "
                f"token, not {self.frequencies!r:.60}"
            )
        rounded = tuple(float(np.float32(each)) for each in given)
        object.__setattr__(self, "frequencies", rounded)

    @classmethod
    def of(cls, theta: float, channels: int, *, neighbours: bool = False) -> Rotary:
        """Pair i of `channels` turns by theta ** (-2i / channels). Raises BadArgumentError."""
        right = is_real(theta, 1e-30) and is_whole(channels, 2, 2 * PAIRS_MAX)
        if not right or channels % 2:
            raise BadArgumentError(
                f"a rotary embedding of theta {theta!r:.40} and {channels!r:.40} channels: theta "
                f"is above 0, channels are an even number up to {2 * PAIRS_MAX}"
            )
        return cls(
            tuple(float(theta) ** (-i / channels) for i in range(0, channels, 2)), neighbours
        )

    @property
    def channels(self) -> int:
        """How many are turned."""
        return 2 * len(self.frequencies)

    @property
    def summary(self) -> str:
        """A few words for people."""
        how = "neighbours" if self.neighbours else "halves"
        first, last = self.frequencies[0], self.frequencies[-1]
        return f"{self.channels} channels, {how}, {first:.3g} to {last:.3g} radians a token"

    @property
    def pairs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first and the second channel of each pair."""
        n = len(self.frequencies)
        numbers = np.arange(n)
        return (2 * numbers, 2 * numbers + 1) if self.neighbours else (numbers, n + numbers)

    def rotate(self, x: Floats, positions: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
        """A copy of keys or queries [..., tokens, dim], turned to their positions [tokens]."""
        return self._turned(x, _places(positions))

    def unrotate(self, x: Floats, positions: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
        """A copy of keys or queries [..., tokens, dim] as they were before the rotation."""
        return self._turned(x, -_places(positions))

    def _turned(self, x: Floats, turns: npt.NDArray[np.float64]) -> Floats:
        given = np.asarray(x, np.float32)
        if given.ndim < 2 or given.shape[-1] < self.channels or turns.shape != given.shape[-2:-1]:
            raise BadArgumentError(
                f"keys or queries {given.shape} at positions {turns.shape}: wanted are [..., "
                f"tokens, dim] of {self.channels} channels or more, and [tokens]"
            )
        angles = turns[:, None] * np.array(self.frequencies)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = self.pairs
        turned, one, other = given.copy(), given[..., first], given[..., second]
        turned[..., first] = one * cos - other * sin
        turned[..., second] = other * cos + one * sin
        return turned


def _places(positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    given = array_of(positions, "positions")
    if given.dtype.kind not in "iuf" or not np.isfinite(given).all():
        raise BadArgumentError(f"positions {positions!r:.60}: numbers of tokens are wanted")
    return given.astype(np.float64)


_SHAPE = ("kv_heads", "head_dim", "value_head_dim", "dtype", "values")
_ENCODED = ("k_encoding", "v_encoding")  # what all groups of a pool have in common


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of one shape.

    window: the token at position p sees tokens p - window + 1 to p; None: all before it.
    values="key_prefix": values are the first value_head_dim channels of the keys, stored once; MLA
    (arXiv 2405.04434) is one head of 576 whose first 512 are the values. kind="state" is part of
    the format's words; a pool of this release refuses it by name.

    k_encoding, v_encoding: what keys and values are kept as, one of ENCODINGS: "none", as the model
    made them; "int8", "int4": rotated, in 8 or 4 bits a channel, with a float16 scale for each
    token and head (docs/decisions/0034-encodings.md); "progressive": 8 bits in two planes of 4, of
    which a reader takes as many as it needs (docs/decisions/0035-progressive.md); "fp8_e4m3":
    float8_e4m3fn, a byte a channel and no scale, to the bit as vLLM's CPU backend stores it. dtype
    is what append() takes and fetch() gives.

    rotary: how the model turned the keys that it appends, which some methods ask; None: not at
    all, or not known. Layouts that differ in it alone are equal: what is stored does not depend on
    it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None  # None: the same as head_dim
    dtype: str = "bfloat16"
    window: int | None = None
    values: str = "own"
    kind: str = "attention"
    k_encoding: str = "none"
    v_encoding: str = "none"
    rotary: Rotary | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.values, self.dtype) != ("object", "uint8"):
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        for name in ("layers", "kv_heads", "head_dim", "value_head_dim"):
            value = getattr(self, name)
            if not is_whole(value, 1, 2**31 - 1):
                raise BadArgumentError(f"{name} is {value!r}: it must be a whole number above 0")
        if self.layers > LAYERS_MAX:
            raise BadArgumentError(f"layers is {self.layers}: outside 1 to {LAYERS_MAX}")
        if self.window is not None and not is_whole(self.window, 1, 2**31 - 1):
            raise BadArgumentError(f"window is {self.window!r}: tokens, above 0, or None")
        if self.values not in VALUES:
            raise BadArgumentError(f"values={self.values!r}: 'own' or 'key_prefix'")
        if self.values == "object" and self.dtype != "uint8":
            raise BadArgumentError("values='object' is of pools of objects: KVLayout.objects()")
        if self.values == "key_prefix" and (self.value_head_dim or 0) > self.head_dim:
            raise BadArgumentError(
                f"value_head_dim={self.value_head_dim}: values that are a prefix of keys of "
                f"{self.head_dim} channels have no more"
            )
        for name in ("k_encoding", "v_encoding"):
            if getattr(self, name) not in ENCODINGS:
                raise BadArgumentError(
                    f"{name}={getattr(self, name)!r}: one of {', '.join(ENCODINGS)}"
                )
        if self.values != "own" and (self.k_encoding, self.v_encoding) != ("none", "none"):
            raise BadArgumentError(
                f"values={self.values!r} with an encoding: keys and values are encoded where both "
                "are stored; leave out k_encoding and v_encoding"
            )
        if self.rotary is not None:
            self._check_rotary(self.rotary)
        if self.kind not in ("attention", "state"):
            raise BadArgumentError(f"kind={self.kind!r}: 'attention' or 'state'")

    def _check_rotary(self, rotary: Rotary) -> None:
        if self.values != "own" or rotary.channels > self.head_dim:
            raise BadArgumentError(
                f"a rotary embedding of {rotary.channels} channels: it is of keys of their own "
                f"(values='own'), and of no more channels than they have, {self.head_dim}"
            )

    def __repr__(self) -> str:
        """Leaves out encodings and rotary embeddings that are not there: names of pools and keys
        are made of this text, and stay what they were before there were any."""
        shown = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        if (self.k_encoding, self.v_encoding) == ("none", "none"):
            del shown["k_encoding"], shown["v_encoding"]
        words = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({words})"

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, in all layers of the group, as the model makes them."""
        own = (self.value_head_dim or 0) if self.values == "own" else 0
        return self.layers * self.kv_heads * (self.head_dim + own) * DTYPE_BYTES[self.dtype]

    @property
    def stored_token_bytes(self) -> int:
        """The same as they are kept: codes with their scales, where they are encoded."""
        if self.values != "own":
            return self.stored_key_bytes
        values = _row_bytes(self.value_head_dim or 0, self.v_encoding, self.dtype)
        return self.stored_key_bytes + self.layers * self.kv_heads * values

    @property
    def stored_key_bytes(self) -> int:
        """Bytes of the keys among them."""
        keys = _row_bytes(self.head_dim, self.k_encoding, self.dtype)
        return self.layers * self.kv_heads * keys


@dataclass(frozen=True)
class States:
    """What the recurrent and convolution layers of a model keep of one text, in one checkpoint.

    bytes: of all tensors of all such layers. digest: a CRC-32 of their names, shapes and dtypes, so
    that a pool refuses the states of another model.
    """

    bytes: int
    digest: int

    def __post_init__(self) -> None:
        if not is_whole(self.bytes, 1, STATE_BYTES_MAX) or not is_whole(self.digest, 0, 2**32 - 1):
            raise BadArgumentError(
                f"states of {self.bytes!r:.40} bytes, digest {self.digest!r:.40}: bytes are 1 to "
                f"{STATE_BYTES_MAX}, a digest has 32 bits"
            )

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Sequence[int], str]]) -> States:
        """tensors: name, shape and dtype of each, as a checkpoint has them one behind the other,
        each from a multiple of 64 bytes on."""
        try:
            rows = [(str(name), tuple(shape), dtype) for name, shape, dtype in tensors]
        except (TypeError, ValueError) as error:
            raise BadArgumentError(
                f"{tensors!r:.80}: the name, shape and dtype of each state are wanted"
            ) from error
        sizes = list[int]()
        for name, shape, dtype in rows:
            if dtype not in _STATE_DTYPES or not all(is_whole(each, 1) for each in shape):
                raise BadArgumentError(
                    f"state {name:.60}: no tensor is {dtype!r:.20} {shape!r:.60}"
                )
            sizes.append(prod(map(int, shape)) * _STATE_DTYPES[dtype])
        rows = [(name, tuple(map(int, shape)), dtype) for name, shape, dtype in rows]
        total = sum(-(-size // LINE_BYTES) * LINE_BYTES for size in sizes)
        return cls(total, crc32(repr(rows).encode()))


@dataclass(frozen=True, init=False)
class KVLayout:
    """Shape of the KV cache of one model shard, and the size of a page in tokens.

    order: for each layer of the model, the index of its group. shard is (tensor-parallel rank,
    size, pipeline rank, size). states: of layers that are not among these, in checkpoints. A pool
    serves exactly one layout.
    """

    groups: tuple[LayerGroup, ...]
    order: tuple[int, ...]
    page_tokens: int
    shard: tuple[int, int, int, int]
    model_id: str = field(default="")
    states: States | None = field(default=None)
    object_limit: int | None = field(default=None)  # the most of an object in several pages

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        page_tokens: int = 16,
        dtype: object = "bfloat16",
        shard: tuple[int, int, int, int] = (0, 1, 0, 1),
        model_id: str = "",
        k_encoding: str = "none",
        v_encoding: str = "none",
        rotary: Rotary | None = None,
        states: States | None = None,
    ) -> None:
        group = LayerGroup(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            dtype=dtype_name(dtype),
            k_encoding=k_encoding,
            v_encoding=v_encoding,
            rotary=rotary,
        )
        self._set((group,), (0,) * layers, page_tokens, shard, model_id, states)

    @classmethod
    def of(
        cls,
        groups: Sequence[LayerGroup],
        order: Sequence[int] | None = None,
        *,
        page_tokens: int = 16,
        shard: tuple[int, int, int, int] = (0, 1, 0, 1),
        model_id: str = "",
        states: States | None = None,
    ) -> KVLayout:
        """The general form: groups of layers, windows, values that are a prefix of the keys.

        order[l] is the group of the model's layer l; without it the groups stand one after the
        other. Gemma-3: LayerGroup(layers=5, window=512, ...) and LayerGroup(layers=1, ...), order
        (0, 0, 0, 0, 0, 1). Groups may differ in everything but their encodings. An indexer's keys,
        which no query attends to, are a group with values="key_prefix".
        """
        if order is None:
            order = [index for index, group in enumerate(groups) for _ in range(group.layers)]
        layout = cls.__new__(cls)
        given: object = order
        if not isinstance(given, Iterable):
            raise BadArgumentError(f"order={given!r:.40}: the group of each layer, such as (0, 1)")
        layout._set(tuple(groups), tuple(order), page_tokens, shard, model_id, states)
        return layout

    @classmethod
    def objects(
        cls,
        object_bytes: str | int,
        *,
        slot: str | int | None = None,
        shard: tuple[int, int, int, int] = (0, 1, 0, 1),
        model_id: str = "",
    ) -> KVLayout:
        """The layout of a pool that stores objects, each up to object_bytes (text like "2MiB"), by
        their keys.

        Such a pool is used by put(), get_into() and lease(), for engines that move whole blocks; it
        has no sequences. A page is a slot. Without `slot` each object has one, of object_bytes, in
        one piece; with it as many of this size as its bytes need, anywhere in the pool.
        """
        size = parse_bytes(object_bytes)
        if not 1 <= size <= OBJECT_BYTES_MAX:
            raise BadArgumentError(f"objects of {size} bytes: outside 1 to {OBJECT_BYTES_MAX}")
        page = size if slot is None else parse_bytes(slot)
        if not 1 <= page <= size or -(-size // page) > min(OBJECT_PAGES_MAX, page):
            raise BadArgumentError(
                f"objects of {size} bytes in slots of {page}: a slot is no larger than the largest "
                f"object, which has up to {OBJECT_PAGES_MAX} slots, and no more than a slot has "
                "bytes"
            )
        group = LayerGroup(layers=1, kv_heads=1, head_dim=1, dtype="uint8", values="object")
        layout = cls.__new__(cls)
        layout._set((group,), (0,), page, shard, model_id, None)
        object.__setattr__(layout, "object_limit", size if page < size else None)
        return layout

    def _set(
        self,
        groups: tuple[LayerGroup, ...],
        order: tuple[int, ...],
        page_tokens: int,
        shard: tuple[int, int, int, int],
        model_id: str,
        states: States | None,
    ) -> None:
        if not groups:
            raise BadArgumentError("a layout needs at least one layer group")
        if not all(is_whole(index, 0, len(groups) - 1) for index in order):
            raise BadArgumentError(f"order {order!r:.60}: indices of {len(groups)} groups, from 0")
        if [order.count(index) for index in range(len(groups))] != [g.layers for g in groups] or (
            len(order) != sum(g.layers for g in groups)
        ):
            raise BadArgumentError(
                f"order {order}: it names each group's index once for each of its layers, "
                f"{[group.layers for group in groups]}"
            )
        most = OBJECT_BYTES_MAX if groups[0].values == "object" else 1024
        if not is_whole(page_tokens, 1, most):
            raise BadArgumentError(f"page_tokens is {page_tokens!r}: outside 1 to {most}")
        given: object = shard
        each = [is_whole(x, 0, 2**31 - 1) for x in given] if isinstance(given, Iterable) else []
        if each != [True] * 4:
            raise BadArgumentError(f"shard {shard}: (tp rank, tp size, pp rank, pp size)")
        rank, size, stage, stages = shard
        if not (0 <= rank < size and 0 <= stage < stages):
            raise BadArgumentError(f"shard {shard}: a rank must be below its size")
        if len(model_id.encode()) > 255 or "\0" in model_id:
            raise BadArgumentError("model_id is longer than 255 bytes, or has a zero byte")
        pairs = sum(len(group.rotary.frequencies) for group in groups if group.rotary)
        if pairs > PAIRS_MAX:
            raise BadArgumentError(
                f"rotary embeddings of {pairs} pairs of channels in all groups: {PAIRS_MAX} at most"
            )
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "page_tokens", page_tokens)
        object.__setattr__(self, "shard", tuple(shard))
        object.__setattr__(self, "model_id", model_id)
        if states is not None and not isinstance(states, States):
            raise BadArgumentError(f"states={states!r:.40}: a States, or None")
        object.__setattr__(self, "states", states)
        object.__setattr__(self, "object_limit", None)

    def __repr__(self) -> str:
        """Leaves out states and a limit that are not there."""
        optional = ("states", "object_limit")
        shown = [f.name for f in fields(self) if f.name not in optional or getattr(self, f.name)]
        words = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__name__}({words})"

    def check_stored(self) -> None:
        """Raises UnsupportedError for what no pool stores yet."""
        first = self.groups[0]
        for group in self.groups:
            if group.kind != "attention":
                raise UnsupportedError(
                    f"kind={group.kind!r}: a model's states are KVLayout(states=), not layers"
                )
            if "object" in (group.values, first.values) and len(self.groups) > 1:
                raise UnsupportedError("a pool of objects has no other layers")
            for name in _ENCODED:
                if getattr(group, name) != getattr(first, name):
                    raise UnsupportedError(
                        f"layer groups with {name}={getattr(first, name)} and "
                        f"{getattr(group, name)}: all groups of a pool have one encoding"
                    )
        if len(self.groups) > GROUPS_MAX or len(self.order) > LAYERS_MAX:
            raise UnsupportedError(
                f"{len(self.groups)} groups of {len(self.order)} layers: a pool stores up to "
                f"{GROUPS_MAX} of up to {LAYERS_MAX}"
            )

    @cached_property
    def has_shapes(self) -> bool:
        """Whether its groups differ in more than their windows."""
        first = [getattr(self.groups[0], name) for name in _SHAPE]
        return any([getattr(group, name) for name in _SHAPE] != first for group in self.groups)

    @cached_property
    def shape(self) -> LayerGroup:
        """The shape that all layers have. Raises UnsupportedError where they differ: then
        of_layer() has each."""
        self.check_stored()
        if self.has_shapes:
            shapes = ", ".join(
                f"{group.kv_heads} x {group.head_dim} {group.dtype}" for group in self.groups
            )
            raise UnsupportedError(
                f"layers of unlike shapes, {shapes}: this works with one shape of all layers only"
            )
        return self.groups[0]

    @cached_property
    def _of_groups(self) -> tuple[KVLayout, ...]:
        made = list[KVLayout]()
        for group in self.groups:
            one = KVLayout.__new__(KVLayout)
            one.__dict__.update({f.name: getattr(self, f.name) for f in fields(self)}, shape=group)
            made.append(one)
        return tuple(made)

    def of_layer(self, layer: int) -> KVLayout:
        """The same layout, whose kv_heads, head_dim, value_head_dim, dtype and values are those of
        one layer."""
        if not is_whole(layer, 0, len(self.order) - 1):
            raise BadArgumentError(f"layer {layer!r}: the layout has {len(self.order)}")
        return self._of_groups[self.order[layer]] if self.has_shapes else self

    @cached_property
    def layers(self) -> int:
        return len(self.order)

    @cached_property
    def kv_heads(self) -> int:
        return self.shape.kv_heads

    @cached_property
    def head_dim(self) -> int:
        return self.shape.head_dim

    @cached_property
    def value_head_dim(self) -> int:
        return self.shape.value_head_dim or self.head_dim

    @cached_property
    def dtype(self) -> str:
        return self.shape.dtype

    @cached_property
    def values(self) -> str:
        return self.shape.values

    @cached_property
    def k_encoding(self) -> str:
        return self.groups[0].k_encoding

    @cached_property
    def v_encoding(self) -> str:
        return self.groups[0].v_encoding

    @cached_property
    def is_encoded(self) -> bool:
        return (self.k_encoding, self.v_encoding) != ("none", "none")

    @cached_property
    def encoding(self) -> str:
        """The encoding of keys and values in one word, "int8"; in two where they differ,
        "int8,int4"."""
        both = (self.k_encoding, self.v_encoding)
        return ",".join(dict.fromkeys(both))

    def encoded(self, encoding: str) -> KVLayout:
        """The same layout with keys and values kept as `encoding` says: "int8", "int8,int4"."""
        if self.groups[0].values == "object":
            raise BadArgumentError(
                f"encoding {encoding!r}: of keys and values; a pool of objects keeps them as they "
                "come"
            )
        k, v = encodings_of(encoding)
        groups = [replace(group, k_encoding=k, v_encoding=v) for group in self.groups]
        return KVLayout.of(
            groups,
            self.order,
            page_tokens=self.page_tokens,
            shard=self.shard,
            model_id=self.model_id,
            states=self.states,
        )

    def sketches(self, wanted: bool | None) -> bool:
        """Whether a pool of it has sketches. None: where keys are as the model made them, as codes
        are few bytes beside them already."""
        if self.groups[0].values == "object":
            return False
        as_made = all(group.k_encoding == "none" for group in self.groups)
        return as_made if wanted is None else wanted

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer of the model, None where it sees all tokens."""
        return tuple(self.groups[index].window for index in self.order)

    def rotary_of(self, layer: int) -> Rotary | None:
        """How the model turned a layer's keys; None: not at all, or not known."""
        if not is_whole(layer, 0, len(self.order) - 1):
            raise BadArgumentError(f"layer {layer!r}: the layout has {len(self.order)}")
        return self.groups[self.order[layer]].rotary

    @cached_property
    def object_bytes(self) -> int | None:
        """The most bytes of an object in a pool of objects; None where K and V are stored."""
        return self.object_limit or self.page_tokens if self.groups[0].values == "object" else None

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers, as the model makes them."""
        return sum(group.token_bytes for group in self.groups)

    @cached_property
    def stored_token_bytes(self) -> int:
        """The same as they are kept: codes with their scales, where they are encoded."""
        return sum(group.stored_token_bytes for group in self.groups)

    @cached_property
    def stored_layer_bytes(self) -> int:
        """As stored_token_bytes, of one layer: of_layer() where they differ."""
        return self.shape.stored_token_bytes // self.shape.layers

    @cached_property
    def stored_key_bytes(self) -> int:
        """Bytes of the keys among them."""
        return sum(group.stored_key_bytes for group in self.groups)

    def piece_bytes(self, channels: int, encoding: str, more_bytes: int = 0) -> int:
        """Bytes of one head's tokens in a page: as the model made them, or whole blocks of codes.

        more_bytes: behind the rows, or the scales of codes; a digest's scale. Raises
        BadArgumentError.
        """
        if not is_whole(channels, 1) or not is_whole(more_bytes):
            raise BadArgumentError(f"pieces of {channels!r:.40} channels and {more_bytes!r:.40}")
        row = _row_bytes(channels, encoding, self.dtype)
        if encoding not in CODE_BITS:
            return self.page_tokens * row + more_bytes
        tokens = -(-self.page_tokens // CODE_TOKENS) * CODE_TOKENS
        if encoding != "progressive":
            return tokens * row + more_bytes
        lower = tokens * (_row_bytes(channels, "int4", self.dtype) - 2)  # begins on a line
        upper = tokens * row + more_bytes - lower
        return -(-upper // LINE_BYTES) * LINE_BYTES + lower

    @property
    def summary(self) -> str:
        """A few words for people."""
        if self.object_bytes is not None:
            slots = f" in slots of {format_bytes(self.page_tokens)}" if self.object_limit else ""
            return f"objects of up to {format_bytes(self.object_bytes)}{slots}"
        windows = ", some with a window" if any(self.windows) else ""
        shapes = dict.fromkeys(
            f"{each.kv_heads} kv heads x {each.head_dim} {each.dtype}" for each in self.groups
        )
        heads = " and ".join(shapes)
        kept = ""
        if self.is_encoded:
            kept = f", keys in {self.k_encoding}, values in {self.v_encoding}"
        states = f", states of {format_bytes(self.states.bytes)}" if self.states else ""
        return (
            f"{self.layers} layers of {heads}{kept}{windows}, {self.page_tokens} tokens a page"
            f"{states}"
        )


def _row_bytes(channels: int, encoding: str, dtype: str) -> int:
    """Bytes of one token and head: codes of a multiple of 16 channels, and a float16 scale."""
    if encoding not in CODE_BITS:
        return channels * (1 if encoding == FP8 else DTYPE_BYTES[dtype])
    return -(-channels // CODE_TOKENS) * CODE_TOKENS * CODE_BITS[encoding] // 8 + 2


def differences(there: KVLayout, wanted: KVLayout) -> Iterator[str]:
    """Tells what makes a pool of the one layout another than one of `wanted`, field by field.

    `wanted` need not have a rotary embedding: then any will do.
    """
    pairs: list[tuple[str, KVLayout | LayerGroup, KVLayout | LayerGroup]]
    pairs = [("layout", there, wanted)]
    if _stored(there) != _stored(wanted):
        yield f"layout is of {_stored(there)} there, of {_stored(wanted)} wanted"
        return
    if len(there.groups) == len(wanted.groups):
        groups = enumerate(zip(there.groups, wanted.groups, strict=True))
        several = len(there.groups) > 1
        pairs += [(f"layer_groups[{i}]" if several else "layout", *two) for i, two in groups]
    elif there.groups != wanted.groups:
        yield f"layout has {len(there.groups)} layer groups there, {len(wanted.groups)} wanted"
    for name, mine, yours in pairs:
        for one in fields(mine):
            old, new = getattr(mine, one.name), getattr(yours, one.name)
            told = one.name == "groups" or (one.name == "order" and there.groups != wanted.groups)
            told |= one.name == "value_head_dim" and (old, new) == (mine.head_dim, yours.head_dim)
            if old != new and not told and (one.compare or new is not None):
                yield f"{name}.{one.name} is {shown(old)} there, {shown(new)} wanted"


def _stored(layout: KVLayout) -> str:
    if layout.object_bytes is None:
        return "K and V"
    slots = f" in slots of {format_bytes(layout.page_tokens)}" if layout.object_limit else ""
    return f"objects up to {format_bytes(layout.object_bytes)}{slots}"


# ---- shares and sizes ----

_SHARE = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE]-\d+)?)\s*(%?)\s*", re.ASCII)


def parse_share(share: float | str, what: str = "a share") -> float:
    """The part of a whole in `share`, above 0 and up to 1: 0.05, or text such as "5%" or "0.05".

    The text "1" is refused: one means all by it, another 1 %. what: the name of it for the
    message. Raises BadArgumentError.
    """
    given: object = share
    part = 0.0
    if isinstance(given, str) and (match := _SHARE.fullmatch(given)):
        is_bare = match[1].isdigit() and not match[2]
        part = 0.0 if is_bare else float(match[1]) / (100 if match[2] else 1)
    elif is_real(given, 0, 1):
        part = float(given)
    if not 0 < part <= 1:
        raise no_share(given, what)
    return part


def no_share(given: object, what: str) -> BadArgumentError:
    return BadArgumentError(
        f"{shown(given)} is not {what}: write it like 0.05 or 5%; all is 1.0 or 100%, a "
        "hundredth 0.01 or 1%"
    )


_UNIT_BYTES = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_bytes(size: str | int) -> int:
    """The number of bytes in `size`: a whole number, or text such as "2GiB", "512 MiB", "1.5gib".

    A bare "G" is refused, as half of the world means 10**9 by it and the other half 2**30.
    Raises BadArgumentError for anything that is not a whole number of bytes, 0 or more.
    """
    if not isinstance(size, str):
        if is_whole(size):
            return int(size)
        if is_whole(size, -(2**63)):
            raise BadArgumentError(f"a size cannot be negative: {size}")
        wrong = "is not a size: give bytes as a number below 2**63, or text like 2GiB"
        raise BadArgumentError(f"{size!r:.40} {wrong}")
    match = _SIZE.fullmatch(size)
    unit_bytes = _UNIT_BYTES.get(match[2].lower() or "b") if match else None
    if match is None or unit_bytes is None:
        raise BadArgumentError(f"{size!r} is not a size: write it like 512MiB, 2GiB or 4096")
    count = Fraction(match[1]) * unit_bytes
    if count.denominator != 1:
        raise BadArgumentError(f"{size!r} is not a whole number of bytes")
    return parse_bytes(int(count))


def format_bytes(size_bytes: int) -> str:
    """`size_bytes` for a person, with up to four digits in the largest binary unit that fits."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
