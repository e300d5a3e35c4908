"""A model for each request of a client; everything else is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from cxlkv.layout import LAYERS_MAX
from cxlkv.ndp.engine import PAGES_MAX, Budget

LEASE_S_MAX = 3600.0
ROWS_MAX = 4096
BUDGET = tuple(one.name for one in fields(Budget))


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class UseLoopback(_Request):
    """Have the bytes from the pool's file, or by this connection."""

    op: Literal["loopback"]


class QueuePair(_Request):
    """One side's RDMA queue pair. psn: where its packets begin; reads: how many it has on their
    way."""

    qp: int = Field(ge=0, lt=1 << 24)
    psn: int = Field(ge=0, lt=1 << 24)
    gid: str = Field(max_length=64)
    lid: int = Field(ge=0, lt=1 << 16)
    mtu: int = Field(ge=1, le=5)
    reads: int = Field(ge=1, le=255)


class UseVerbs(QueuePair):
    """Connect a queue pair. Nothing of the client's is read or written from here, so it gives no
    key."""

    op: Literal["verbs"]


class Match(_Request):
    """Body: hashes of 16 bytes."""

    op: Literal["match"]
    lease_s: float = Field(gt=0, le=LEASE_S_MAX)
    strict: bool
    single: bool


class Adopt(_Request):
    """Body: a sequence's handle."""

    op: Literal["adopt"]


class Release(_Request):
    op: Literal["release"]
    hit: int


class Select(_Request):
    """Body: the queries [rows, heads, any]. What its words may be, Budget and select() say, in the
    words that they have for a caller of their own."""

    op: Literal["select"]
    hit: int
    layer: int
    rows: int = Field(ge=0, le=ROWS_MAX)
    heads: int = Field(ge=0, lt=1 << 16)
    dtype: str
    pages: int | None = Field(ge=1, le=PAGES_MAX)
    share: float | None
    mass: float | None
    sinks: int = Field(ge=0, le=PAGES_MAX)
    recent: int = Field(ge=0, le=PAGES_MAX)
    union: str
    per: str
    dense_layers: int = Field(default=0, ge=0)
    by_layer: dict[Annotated[int, Field(strict=False)], float] = Field(
        default={}, max_length=LAYERS_MAX
    )
    refresh: int = Field(default=1, ge=1)
    error: float = Field(default=0.0, ge=0)
    method: str
    scale: float | None
    recall: float


class Read(_Request):
    """Body: int64 [n, 2], offsets in the region and sizes; the answer has these bytes."""

    op: Literal["read"]


class Write(_Request):
    """Body: bytes for the staging area."""

    op: Literal["write"]
    at: int = Field(ge=0)


class Lacks(_Request):
    """Body: names of 16 bytes; the answer has a byte for each: 1 if no page has that name."""

    op: Literal["lacks"]


class Records(_Request):
    """Body: names of 16 bytes; the answer has a code for each, and the packed records of those of
    code 0."""

    op: Literal["records"]


class Publish(_Request):
    """The records in the staging area. Body: their parents' names; the answer has their codes."""

    op: Literal["publish"]
    records: int = Field(ge=1)


Request = Annotated[
    UseLoopback
    | UseVerbs
    | Match
    | Adopt
    | Release
    | Select
    | Read
    | Write
    | Lacks
    | Records
    | Publish,
    Field(discriminator="op"),
]
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
