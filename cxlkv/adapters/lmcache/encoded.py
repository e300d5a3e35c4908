"""Chunks that the pool keeps encoded: each of LMCache's groups is rows of a token's heads, of K and
V alike.

A stored payload is the groups, encoded, one behind the other; the form behind it tells the shapes
that LMCache knows. So such chunks are copied on their way, and LMCache needs memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cxlkv.adapters.lmcache.form import Form
from cxlkv.arrays import Bytes, memory_of
from cxlkv.errors import UnsupportedError
from cxlkv.layout import DTYPE_BYTES, DTYPES
from cxlkv.objects import Buffers, RowForm

if TYPE_CHECKING:
    import torch

Forms = tuple[RowForm, ...]


def row_forms(metadata: object, encoding: str) -> Forms:
    """The row forms of each of LMCache's groups; none without an encoding. metadata: an
    LMCacheMetadata.

    Raises UnsupportedError for what are no rows of K and V of heads, or in fewer bits already.
    """
    if encoding == "none":
        return ()
    written = f"cxlkv: cxlkv.encoding: {encoding}"
    manager = getattr(metadata, "kv_layer_groups_manager", None)
    groups = getattr(manager, "kernel_groups", None) or ()
    shape = getattr(metadata, "kv_shape", None)
    assert isinstance(shape, tuple)
    kinds = [
        (group.shape_desc.kv_size, group.shape_desc.hs, group.dtype, group.recurrent_state)
        for group in groups
    ] or [(shape[1], shape[4], getattr(metadata, "kv_dtype", None), False)]
    made = []
    for parts, dim, dtype, is_state in kinds:
        name = str(dtype).removeprefix("torch.")
        if getattr(metadata, "use_mla", False) or parts != 2 or is_state:
            raise UnsupportedError(
                f"{written}, and this model keeps more, or less, than K and V of each head (MLA, "
                "states): leave it out"
            )
        if name not in DTYPES:
            raise UnsupportedError(
                f"{written}, and the engine keeps its cache as {name}, in fewer bits already: "
                "leave one of both out"
            )
        made.append(RowForm(encoding, name, int(dim)))
    return tuple(made)


def group_bytes(found: Form) -> list[int]:
    """Bytes of each group as LMCache has it."""
    sizes = [DTYPE_BYTES.get(dtype, 0) for dtype in found.dtypes]
    return [size * math.prod(shape) for size, shape in zip(sizes, found.shapes, strict=True)]


def stored_bytes(found: Form, forms: Forms) -> int:
    """Bytes of the payload in the pool. Raises BadArgumentError for what is no whole number of
    rows."""
    sizes = zip(forms, group_bytes(found), strict=True)
    return sum(form.stored_bytes(size) for form, size in sizes)


def buffers_of(
    payloads: Sequence[torch.Tensor],
    found: Sequence[Form],
    feet: Sequence[Bytes],
    forms: Forms,
) -> Buffers:
    """Memory of chunks, of each the payload, of the form that was found, and what is behind it: all
    of them stay the caller's."""
    addresses, sizes, starts = [], [], [0]
    for payload, one, foot in zip(payloads, found, feet, strict=True):
        at = memory_of(payload, "payload")
        for size in group_bytes(one) if forms else [payload.nbytes]:
            addresses.append(at)
            sizes.append(size)
            at += size
        addresses.append(foot.ctypes.data)
        sizes.append(foot.nbytes)
        starts.append(len(addresses))
    return Buffers(addresses, sizes, starts, forms)
