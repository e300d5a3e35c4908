"""The trailer behind a chunk's bytes: format, dtypes and shapes of its groups.

    payload | for each group: dtype (16), dims (6 x 4)
            | magic (8), format (16), groups (4), dims (4), payload's bytes (8)

It stands at the end, so that the payload begins where the object does, which is aligned. Numbers
are little-endian; texts end with zeros. dims: how many of the first group; the others' unused ones
are 0.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cxlkv.errors import BadArgumentError

MAGIC = b"cxlkvlm1"
DIMS_MAX = 6
GROUPS_MAX = 64
_GROUP = struct.Struct(f"<16s{DIMS_MAX}I")
_FOOT = struct.Struct("<8s16sIIQ")

Shape = tuple[int, ...]


class Form(NamedTuple):
    """fmt: the name of LMCache's MemoryFormat; dtypes: names as torch has them, of each group."""

    fmt: str
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]


def bytes_of(groups: int) -> int:
    """Bytes of the form of so many groups."""
    return groups * _GROUP.size + _FOOT.size


def encode(form: Form, payload_bytes: int) -> bytes:
    """Raises BadArgumentError for what there is no room for."""
    texts = (form.fmt, *form.dtypes)
    counts = {len(shape) for shape in form.shapes}
    fits = (
        1 <= len(form.shapes) <= GROUPS_MAX
        and len(counts) == 1
        and max(counts) <= DIMS_MAX
        and all(len(text.encode()) <= 16 for text in texts)
        and all(0 <= one < 1 << 32 for shape in form.shapes for one in shape)
    )
    if not fits:
        raise BadArgumentError(f"{form}: at most {GROUPS_MAX} groups of {DIMS_MAX} dims are stored")
    dims = counts.pop()
    groups = [
        _GROUP.pack(dtype.encode(), *shape, *(0,) * (DIMS_MAX - dims))
        for dtype, shape in zip(form.dtypes, form.shapes, strict=True)
    ]
    foot = _FOOT.pack(MAGIC, form.fmt.encode(), len(groups), dims, payload_bytes)
    return b"".join(groups) + foot


def decode(end: memoryview, size: int) -> tuple[Form, int] | None:
    """The form of an object of this size, of its last bytes, and its payload's bytes; None when it
    is not one of ours."""
    if len(end) < _FOOT.size:
        return None
    magic, fmt, count, dims, payload = _FOOT.unpack(end[-_FOOT.size :])
    if magic != MAGIC or not 1 <= count <= GROUPS_MAX or not 1 <= dims <= DIMS_MAX:
        return None
    if payload + bytes_of(count) != size or bytes_of(count) > len(end):
        return None
    dtypes, shapes = [], []
    for dtype, *sizes in _GROUP.iter_unpack(end[-bytes_of(count) : -_FOOT.size]):
        dtypes.append(_text(dtype))
        shapes.append(tuple(sizes[:dims]))
    return Form(_text(fmt), tuple(dtypes), tuple(shapes)), payload


def _text(stored: bytes) -> str:
    return stored.rstrip(b"\0").decode("ascii", "replace")
