"""What a pool stores: layers, heads, dimensions, dtype, page size. Names the dtypes once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cxlkv.errors import BadArgumentError, UnsupportedError

DTYPES = ("bfloat16", "float16", "float32")  # a dtype's index is its code in the pool's format
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def dtype_name(dtype: object) -> str:
    """The name of a dtype given as text, numpy dtype or torch dtype; raises BadArgumentError."""
    given = dtype.__name__ if isinstance(dtype, type) else getattr(dtype, "name", dtype)
    name = str(given).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise BadArgumentError(f"dtype {dtype!r} is not stored: use one of {', '.join(DTYPES)}")
    return name


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of one shape.

    `values="key_prefix"` (MLA: values are the first channels of the keys), `kind="state"` and
    `window` are part of the format's words; a pool of this release refuses them by name.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None  # None: the same as head_dim
    dtype: str = "bfloat16"
    window: int | None = None
    values: str = "own"
    kind: str = "attention"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        for name in ("layers", "kv_heads", "head_dim", "value_head_dim"):
            value = getattr(self, name)
            if not _is_whole(value) or not 1 <= value < 2**31:
                raise BadArgumentError(f"{name} is {value!r}: it must be a whole number above 0")
        if self.values not in ("own", "key_prefix"):
            raise BadArgumentError(f"values={self.values!r}: 'own' or 'key_prefix'")
        if self.kind not in ("attention", "state"):
            raise BadArgumentError(f"kind={self.kind!r}: 'attention' or 'state'")


@dataclass(frozen=True, init=False)
class KVLayout:
    """Shape of the KV cache of one model shard, and the size of a page in tokens.

    shard is (tensor-parallel rank, size, pipeline rank, size). A pool serves exactly one layout.
    """

    groups: tuple[LayerGroup, ...]
    page_tokens: int
    shard: tuple[int, int, int, int]
    model_id: str = field(default="")

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
    ) -> None:
        group = LayerGroup(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            dtype=dtype_name(dtype),
        )
        self._set((group,), page_tokens, shard, model_id)

    @classmethod
    def of(
        cls,
        groups: Sequence[LayerGroup],
        *,
        page_tokens: int = 16,
        shard: tuple[int, int, int, int] = (0, 1, 0, 1),
        model_id: str = "",
    ) -> KVLayout:
        """The general form: several groups of layers, windows, shared values."""
        layout = cls.__new__(cls)
        layout._set(tuple(groups), page_tokens, shard, model_id)
        return layout

    def _set(
        self,
        groups: tuple[LayerGroup, ...],
        page_tokens: int,
        shard: tuple[int, int, int, int],
        model_id: str,
    ) -> None:
        if not groups:
            raise BadArgumentError("a layout needs at least one layer group")
        if not _is_whole(page_tokens) or not 1 <= page_tokens <= 1024:
            raise BadArgumentError(f"page_tokens is {page_tokens!r}: outside 1 to 1024")
        if [_is_whole(x) and x < 2**31 for x in shard] != [True] * 4:
            raise BadArgumentError(f"shard {shard}: (tp rank, tp size, pp rank, pp size)")
        rank, size, stage, stages = shard
        if not (0 <= rank < size and 0 <= stage < stages):
            raise BadArgumentError(f"shard {shard}: a rank must be below its size")
        if len(model_id.encode()) > 255 or "\0" in model_id:
            raise BadArgumentError("model_id is longer than 255 bytes, or has a zero byte")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "page_tokens", page_tokens)
        object.__setattr__(self, "shard", tuple(shard))
        object.__setattr__(self, "model_id", model_id)

    def single_group(self) -> LayerGroup:
        """The only group; raises UnsupportedError naming what this release does not store yet."""
        if len(self.groups) != 1:
            raise UnsupportedError(f"a pool of {len(self.groups)} layer groups is not built yet")
        group = self.groups[0]
        if group.window is not None:
            raise UnsupportedError(f"window={group.window}: sliding windows are not built yet")
        if group.values != "own":
            raise UnsupportedError(f"values={group.values!r}: shared values are not built yet")
        if group.kind != "attention":
            raise UnsupportedError(f"kind={group.kind!r}: state layers are not built yet")
        return group

    @property
    def layers(self) -> int:
        return self.single_group().layers

    @property
    def kv_heads(self) -> int:
        return self.single_group().kv_heads

    @property
    def head_dim(self) -> int:
        return self.single_group().head_dim

    @property
    def value_head_dim(self) -> int:
        dim = self.single_group().value_head_dim
        assert dim is not None
        return dim

    @property
    def dtype(self) -> str:
        return self.single_group().dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers."""
        group = self.single_group()
        dims = self.head_dim + self.value_head_dim
        return group.layers * group.kv_heads * dims * DTYPE_BYTES[group.dtype]
