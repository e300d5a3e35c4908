"""What a server may answer: a model for each header, and how long its body is; else PeerError.

The client trusts no number of a server: none decides how much it allocates, or where it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cxlkv import errors
from cxlkv.arrays import Codes, Names, RecordBytes
from cxlkv.errors import CXLKVError, PeerError
from cxlkv.layout import LAYERS_MAX
from cxlkv.ndp.engine import Selection, Stages
from cxlkv.pages import CORRUPT, STALE, names_of
from cxlkv.transport.far import Shape
from cxlkv.transport.wire import CODE_BYTES, Header

PAGE_BYTES = 12  # of a hit's page: its id and its generation

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Kind = TypeVar("Kind", bound=BaseModel)
Made = TypeVar("Made")
Reader = Callable[[Header, bytearray], Made]
"""Turns an answer's header and body into the call's result; raises PeerError."""


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Nothing(_Answer):
    """The body says all, or there is nothing to say."""


class Refused(_Answer):
    """What the server raised."""

    error: Annotated[str, Field(max_length=100)]
    text: Annotated[str, Field(max_length=4096)]


class Place(_Answer):
    """The file of the server's pool, if it has one; known by its place and its machine's boot."""

    path: Annotated[str, Field(max_length=4096)] | None
    file: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    boot: Annotated[str, Field(max_length=100)] = ""


class Held(_Answer):
    """A hit's number, 0: none. Body: uint32 ids and uint64 generations of pages, part after
    part."""

    hit: Count
    tokens: Count
    parts: Annotated[list[Count], Field(max_length=LAYERS_MAX)]


class _Stages(_Answer):
    lists: Count
    error: float
    tokens: Count
    bytes_sketched: Count
    bytes_keys: Count


class Selected(_Answer):
    """Body: pages and scores of this shape, and counts of the first two axes."""

    shape: Annotated[list[Count], Field(min_length=3, max_length=3)]
    bytes_scored: Count
    bytes_fetched: Count
    per: Literal["query", "sequence"]
    stages: _Stages | None


def checked(kind: type[Kind], header: Header) -> Kind:
    """The header, if it is of this kind."""
    try:
        return kind.model_validate(header)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise PeerError(
            f"the server's answer makes no sense: {place}: {first['msg']}. It is no cxlkv, or "
            "another release: install the same one on both machines"
        ) from error


def _wrong(what: str) -> PeerError:
    return PeerError(f"the server's answer makes no sense: {what}. It is damaged, or no cxlkv")


def told(header: Header) -> CXLKVError:
    """What the server raised: its error if it is one of ours, as it would be here."""
    said = checked(Refused, header)
    kind = getattr(errors, said.error, None)
    if isinstance(kind, type) and issubclass(kind, CXLKVError):
        return kind(f"{said.text} (at the server)")
    return PeerError(f"the server failed: {said.error}: {said.text}")


def body_of(size: int, header: Header, body: bytearray) -> bytearray:
    """Read a body of so many bytes, and no words."""
    checked(Nothing, header)
    if len(body) != size:
        raise _wrong(f"{len(body)} bytes came, {size} were asked for")
    return body


def nothing(header: Header, body: bytearray) -> None:
    body_of(0, header, body)


def place(header: Header, body: bytearray) -> Place:
    return checked(Place, header)


def flags(count: int, header: Header, body: bytearray) -> npt.NDArray[np.bool_]:
    """One a byte, 0 or 1."""
    found = np.frombuffer(body_of(count, header, body), np.uint8)
    if (found > 1).any():
        raise _wrong(f"{found.max()} is neither yes nor no")
    return found.view(np.bool_)


def codes(count: int, header: Header, body: bytearray) -> Codes:
    return np.frombuffer(body_of(4 * count, header, body), np.int32)


def records(
    names: Names, record_bytes: int, header: Header, body: bytearray
) -> tuple[RecordBytes, Codes]:
    """Records of these names, zeros where the code is not 0: CORRUPT, also of one of another name,
    or STALE."""
    checked(Nothing, header)
    end = CODE_BYTES * len(names)
    found = np.frombuffer(body[:end], np.int32)
    there = np.flatnonzero(found == 0)
    if len(found) != len(names) or len(body) != end + len(there) * record_bytes:
        raise _wrong(f"{len(body)} bytes for {len(names)} records")
    out = np.zeros((len(names), record_bytes), np.uint8)
    out[there] = np.frombuffer(body, np.uint8, offset=end).reshape(-1, record_bytes)
    codes = np.where((found == 0) | (found == CORRUPT), found, STALE)
    codes[there[(names_of(out[there]) != names[there]).any(axis=1)]] = CORRUPT
    return out, codes


def held(shape: Shape, tokens_max: int, header: Header, body: bytearray) -> tuple[Held, bytearray]:
    """Read a hit in a pool of this shape, of so many tokens at most."""
    found = checked(Held, header)
    pages_max = -(-found.tokens // shape.page_tokens)
    parts = len(shape.part_layers) if found.hit else 0
    if found.tokens > (tokens_max if found.hit else 0):
        raise _wrong(f"{found.tokens} tokens of {tokens_max} that were asked for")
    texts = found.parts[:-1] if shape.state_pages else found.parts
    right = texts == found.parts or found.parts[-1:] in ([], [0], [shape.state_pages])
    if len(found.parts) != parts or max(texts, default=0) > pages_max or not right:
        raise _wrong(f"parts of {found.parts[:8]} pages for {found.tokens} tokens")
    count = sum(found.parts)
    if len(body) != PAGE_BYTES * count:
        raise _wrong(f"{len(body)} bytes for {count} pages")
    pages = np.frombuffer(body, np.uint32, count)
    if count and pages.max() >= shape.geometry["page_count"]:
        raise _wrong(f"page {pages.max()} of {shape.geometry['page_count']}")
    return found, body


def selection(
    rows: int, per: str, heads: int, pages_max: int, header: Header, body: bytearray
) -> Selection:
    """Read the selection of so many queries and kv heads, of a sequence of so many pages."""
    found = checked(Selected, header)
    lists, k = rows if per == "query" else 1, found.shape[2]
    if found.per != per or found.shape[:2] != [lists, heads] or k > pages_max:
        raise _wrong(f"lists {found.shape} per {found.per} for {rows} rows of {heads} heads")
    entries = lists * heads * k
    if len(body) != 8 * entries + 4 * lists * heads:
        raise _wrong(f"{len(body)} bytes for lists of {found.shape}")
    pages = np.frombuffer(body, np.int32, entries).reshape(found.shape)
    counts = np.frombuffer(body, np.int32, offset=8 * entries).reshape(lists, heads)
    for name, array, first, last in (("page", pages, -1, pages_max - 1), ("count", counts, 0, k)):
        if ((array < first) | (array > last)).any():
            raise _wrong(f"a {name} outside of {first} to {last}")
    return Selection(
        pages=pages,
        scores=np.frombuffer(body, np.float32, entries, 4 * entries).reshape(found.shape),
        counts=counts,
        bytes_scored=found.bytes_scored,
        bytes_fetched=found.bytes_fetched,
        per=per,
        starts=np.array([0, rows], np.int32),
        stages=None if found.stages is None else Stages(**found.stages.model_dump()),
    )
