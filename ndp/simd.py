"""The C core's NDP backend selects, fetches and attends over a batch's pages where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np

from cxlkv import _core
from cxlkv.arrays import (
    BYTES,
    NUMPY_DTYPES,
    Array,
    Starts,
    View,
    address_of,
    empty_like_kind,
    softcap_of,
    target,
)
from cxlkv.errors import BadArgumentError
from cxlkv.layout import DTYPE_BYTES, DTYPES, STORED, KVLayout
from cxlkv.ndp import tuning
from cxlkv.ndp.engine import (
    METHODS_TAKEN,
    PERS,
    UNIONS,
    Asked,
    Budget,
    Decoded,
    Selection,
    Stages,
    errors_of,
    least_error,
    uniform,
    with_axis,
)

FLOAT32 = DTYPES.index("float32")
GUESS_PAGES = 4096  # the longest lists for which there is memory before the core asks for it


def check_queries(layout: KVLayout, queries: View, rows: int) -> None:
    """Raises BadArgumentError unless they are [rows, q_heads, head_dim]."""
    shape = queries.shape
    if len(shape) != 3 or shape[0] != rows or shape[2] != layout.head_dim:
        raise BadArgumentError(
            f"q has shape {shape}, wanted [{rows} rows, q_heads, {layout.head_dim}]"
        )
    if shape[1] == 0 or shape[1] % layout.kv_heads:
        raise BadArgumentError(
            f"{shape[1]} query heads are no multiple of {layout.kv_heads} kv heads"
        )


def select(
    batch: _core.Handle, layout: KVLayout, asked: Asked, list_pages: int = 0, lone: bool = False
) -> Selection:
    """Score the pages of a batch's sequences and choose; one call into the core.

    The result has room for lists of `list_pages` pages, or more as the budgets suggest; when lists
    turn out longer, the core says how long before it scores anything, and the call is made once
    more. lone: the result is of the first list, without an axis for lists.
    """
    queries, starts, heads = asked.queries, asked.starts, layout.kv_heads
    rows = int(starts[-1])
    check_queries(layout, queries, rows)
    by = _criterion(asked, False)
    lists = rows if by.per == "query" else len(starts) - 1
    counts = np.empty((lists, heads), np.int32)
    k = max(list_pages, by.pages)
    while True:
        pages = np.empty(lists * heads * k, np.int32)
        scores = np.empty(lists * heads * k, np.float32)
        of = (batch, asked.layer, queries, starts, by.core, asked.scale)
        code, k, done = _core.batch_select(*of, pages, scores, counts)
        if code != _core.E_ROOM:
            break
    used = lists * heads * k
    shape, taken = (heads, k) if lone else (lists, heads, k), METHODS_TAKEN[done.method]
    return Selection(
        pages=pages[:used].reshape(shape),
        scores=scores[:used].reshape(shape),
        counts=counts[0] if lone else counts,
        bytes_scored=done.bytes_scored,
        bytes_fetched=done.bytes_fetched,
        per=by.per,
        starts=starts,
        stages=_stages(done) if taken == "two_stage" else None,
        method=asked.method if taken == "scorer" else taken,
    )


class _By(NamedTuple):
    """What is asked for, as the core takes it; per what a list is; how long it may get."""

    core: _core.Criterion
    per: str
    pages: int


def _criterion(asked: Asked, decodes: bool) -> _By:
    """decodes: nothing is scored in a layer that attends to all pages."""
    recall = asked.recall
    if type(recall) is not float:
        errors_of(recall)  # raises for what is no number
    rate = asked.read_rate or tuning.current().read_rate
    method = "scorer" if asked.scorer else asked.method
    of = (asked.budgets, asked.layer, method, asked.scorer, float(recall), rate, decodes)
    return _criterion_of(*of)


@lru_cache(maxsize=1024)  # layers, and lengths of a step's budgets, come again with each step
def _criterion_of(
    budgets: tuple[Budget, ...],
    layer: int,
    method: str,
    scorer: int,
    recall: float,
    read_rate: float,
    decodes: bool,
) -> _By:
    first = uniform(budgets)
    criteria = _core.Criteria(
        method=METHODS_TAKEN.index(method),
        union=UNIONS.index(first.union),
        per=PERS.index(first.per),
        refresh=min(map(attrgetter("refresh"), budgets)),
        scorer=scorer,
        errors=errors_of(recall),
        read_rate=read_rate,
    )
    rows = [b.decode_row(layer) if decodes else b.row(layer) for b in budgets]
    pages = (b.pages_at_most(64 if b.pages is None else GUESS_PAGES, layer) for b in budgets)
    return _By(_core.criterion(rows, criteria), first.per, max(pages))


def _stages(done: _core.Scored) -> Stages:
    """Stages in a cxlkv_scored."""
    keys = done.bytes_scored - done.bytes_sketched
    return Stages(done.lists_staged, done.mean_error, done.tokens_scored, done.bytes_sketched, keys)


def cheapest(batch: _core.Handle, layout: KVLayout, asked: Asked) -> str:
    """The method that "auto" comes to where chosen pages are then attended to, or "all"."""
    check_queries(layout, asked.queries, int(asked.starts[-1]))
    by = _criterion(asked, True).core
    code = _core.batch_cheapest(batch, asked.layer, asked.queries, asked.starts, by, asked.scale)
    return METHODS_TAKEN[code]


class Decoding:
    """A decode as the core takes it: append, choose pages and attend to them in one call.

    Made of one layer's arrays, it serves all layers of a step whose arrays have the same forms and
    whose budgets say the same. others: all that was asked beside layer and addresses; None: it is
    of one layer.
    """

    def __init__(
        self,
        layout: KVLayout,
        asked: Asked,
        new: tuple[View, View | None],
        rewind: int,
        softcap: float,
    ):
        """new: k and v."""
        got = asked.queries
        check_queries(layout, got, int(asked.starts[-1]))
        by = None
        if any(budget.chooses(asked.layer) for budget in asked.budgets):
            by = _criterion(asked, True).core
        self._shape, self._dtype = (*got.shape[:2], layout.value_head_dim), got.dtype
        self._asked = asked.method
        least = least_error(asked.budgets)
        self._arguments = _core.DecodeArguments(
            (got, *new), asked.starts, rewind, by, asked.scale, softcap, least
        )
        self.others: tuple[object, ...] | None = None

    def decode(
        self,
        batch: _core.Handle,
        layer: int,
        arrays: tuple[object, object, object | None],
        out: object | None,
    ) -> Decoded:
        """arrays: q, k, v. They and out have the forms of those it was made of."""
        queries = arrays[0]
        lse = empty_like_kind(queries, self._shape[:2], FLOAT32)
        made = out if out is not None else empty_like_kind(queries, self._shape, self._dtype)
        named = zip(arrays, "qkv", strict=True)
        addresses = [address_of(each, name) for each, name in named if each is not None]
        places = address_of(made, "out"), address_of(lse, "lse")
        done = self._arguments.call(batch, layer, addresses, *places)
        found = done.found
        taken = METHODS_TAKEN[found.method]
        return Decoded(
            out=cast(Array, made),
            lse=lse,
            bytes_scored=found.bytes_scored,
            bytes_read=done.bytes_attended,
            method=self._asked if taken == "scorer" else taken,
            stages=_stages(found) if taken == "two_stage" else None,
        )

    def check_output(self, out: object) -> None:
        """Raises BadArgumentError where the result cannot be written there."""
        _writable(out, "out", self._dtype, self._shape)


def picked_pages(picked: Selection, layout: KVLayout, lone: bool = False) -> _core.Picked:
    """The pages of a selection as the core takes them; raises BadArgumentError for those of another
    layout. lone: of one list, which may lack its axis."""
    pages = picked.pages[None] if lone and picked.pages.ndim == 2 else picked.pages
    shape = pages.shape
    if len(shape) != 3 or shape[1] != layout.kv_heads:
        raise BadArgumentError(f"picked.pages has shape {shape}, wanted [.., {layout.kv_heads}, k]")
    return _core.Picked(np.ascontiguousarray(pages, np.int32), PERS.index(picked.per))


def _picked_more(picked: Selection, layout: KVLayout, pages: _core.Picked) -> _core.Picked:
    """With what a selection has besides pages."""
    lists, heads, k = pages.pages.shape
    weights, rows = picked.log_weights, picked.rows
    if weights is not None:
        weights = np.ascontiguousarray(weights, np.float32)
        tokens = layout.page_tokens
        if weights.shape not in ((lists, heads, k, tokens), (lists, heads, k, 1)):
            raise BadArgumentError(
                f"picked.log_weights has shape {weights.shape}, wanted "
                f"{(lists, heads, k, tokens)} or {(lists, heads, k, 1)}"
            )
    if rows is None:
        return pages._replace(weights=weights)
    arrays = [np.ascontiguousarray(each, np.float32) for each in (rows.k, rows.v, rows.log_counts)]
    n = arrays[2].shape[-1] if arrays[2].ndim else 0
    dims = ((layout.head_dim,), (layout.value_head_dim,), ())
    for name, array, dim in zip(("k", "v", "log_counts"), arrays, dims, strict=True):
        if array.shape != (lists, heads, n, *dim):
            wanted = (lists, heads, n, *dim)
            raise BadArgumentError(f"picked.rows.{name} has shape {array.shape}, wanted {wanted}")
    return pages._replace(weights=weights, rows=tuple(arrays))


def fetch(
    batch: _core.Handle,
    layout: KVLayout,
    layer: int,
    picked: Selection | None,
    count: int,
    pages_guess: int,
    out: tuple[Array, Array] | None,
    decoded: bool = True,
) -> tuple[Array, Array]:
    """Copy chosen pages, or all, to (k, v) [lists, kv_heads, k, page_tokens, dim]; what is encoded
    as it is kept, uint8 [lists, kv_heads, k, piece_bytes], unless decoded."""
    lists, k, starts = count, pages_guess, None
    rows = None if picked is None else picked_pages(picked, layout)
    if picked is not None:
        lists, _, k = picked.pages.shape
        starts = np.ascontiguousarray(picked.starts, np.int32)
        if starts.shape != (count + 1,):
            raise BadArgumentError(
                f"the selection is of {len(starts) - 1} sequences, the batch has {count}"
            )
    forms = [_fetched(layout, keys, decoded) for keys in (True, False)]
    while True:
        shapes = [(lists, layout.kv_heads, k, *form.shape) for form in forms]
        made = out
        if made is None:
            made = (forms[0].made(shapes[0]), forms[1].made(shapes[1]))
        keys, values = (forms[i].room(made[i], f"out[{i}]", shapes[i]) for i in range(2))
        code, needed = _core.batch_fetch(batch, layer, rows, starts, keys, values, not decoded)
        if code == _core.E_ROOM or needed != k:
            if out is not None:
                raise BadArgumentError(f"out holds {k} pages a sequence, {needed} are wanted")
            k = needed
            continue
        return made


@dataclass(frozen=True)
class _Fetched:
    """Keys or values of a page and head, as fetch() gives them: rows of this dtype code, or None
    for bytes.
    """

    shape: tuple[int, ...]
    code: int | None

    def made(self, shape: tuple[int, ...]) -> Array:
        return cast(
            Array, np.empty(shape, np.uint8 if self.code is None else NUMPY_DTYPES[self.code])
        )

    def room(self, array: object, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """(address, bytes) of the caller's array; raises BadArgumentError."""
        return _writable(array, name, BYTES if self.code is None else self.code, shape)


def _fetched(layout: KVLayout, keys: bool, decoded: bool) -> _Fetched:
    dim = layout.head_dim if keys else layout.value_head_dim
    encoding = layout.k_encoding if keys else layout.v_encoding
    if encoding == "progressive":
        encoding = "int8"  # in which form both planes go out
    if encoding != "none" and not decoded:
        return _Fetched((layout.piece_bytes(dim, encoding),), None)
    return _Fetched((layout.page_tokens, dim), DTYPES.index(layout.dtype))


def _fresh(like: object, shape: tuple[int, ...], dtype: int) -> tuple[Array, int]:
    """A new array of the kind of another one, and its address."""
    if type(like) is np.ndarray:
        array = np.empty(shape, NUMPY_DTYPES[dtype])
        return array, array.__array_interface__["data"][0]
    made = empty_like_kind(like, shape, dtype)
    return made, address_of(made, "out")


def _writable(array: object, name: str, dtype: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """(address, bytes) of a contiguous output array; raises BadArgumentError."""
    got = target(array, name)
    expected, contiguous = DTYPE_BYTES[STORED[dtype]], True
    for length, stride in zip(reversed(got.shape), reversed(got.strides), strict=True):
        # An axis of length 1 is never stepped along: numpy may give it any stride.
        contiguous = contiguous and (length == 1 or stride == expected or 0 in shape)
        expected *= length
    if got.shape != shape or got.dtype != dtype or not contiguous:
        raise BadArgumentError(f"{name} must be contiguous {STORED[dtype]} of shape {shape}")
    return got.address, expected


class Attended(NamedTuple):
    """out [rows, q_heads, value_head_dim], lse [rows, q_heads], bytes of K and V that were read;
    mass [rows, kv_heads, k] where it was asked for."""

    out: Array
    lse: Array
    read: int
    mass: Array | None


def attend(
    batch: _core.Handle,
    layout: KVLayout,
    layer: int,
    queries: View,
    starts: Starts,
    picked: Selection | None,
    scale: float,
    softcap: float | None,
    error: float,
    out: object | None = None,
    mass_pages: int | None = None,
    lone: bool = False,
) -> Attended:
    """softmax(q k) v over chosen pages or all. error: as of Batch.attend. mass_pages: the pages'
    shares are wanted, too; of so many pages, it is thought, if none are picked. lone: picked may be
    of one list without its axis."""
    rows, like = int(starts[-1]), queries.owner
    check_queries(layout, queries, rows)
    q_heads = queries.shape[1]
    shape = (rows, q_heads, layout.value_head_dim)
    if out is None:
        made, address = _fresh(like, shape, queries.dtype)
    else:
        made, (address, _) = cast(Array, out), _writable(out, "out", queries.dtype, shape)
    lse, lse_address = _fresh(like, (rows, q_heads), FLOAT32)
    whole = None
    if picked is not None:
        whole = picked_pages(picked, layout, lone)
        if picked.log_weights is not None or picked.rows is not None:
            whole = _picked_more(with_axis(picked), layout, whole)
    cap = 0.0 if softcap is None else softcap_of(softcap)
    of = (batch, layer, queries, starts, whole, scale, cap, float(error), address, lse_address)
    if mass_pages is None:
        read, _ = _core.batch_attend(*of)
        return Attended(made, lse, read, None)
    lists, k = rows * layout.kv_heads, mass_pages if picked is None else picked.pages.shape[-1]
    while True:
        room = max(lists * k, 1)  # an empty tensor has no address, which would ask for no mass
        mass, at = _fresh(like, (room,), FLOAT32)
        read, k = _core.batch_attend(*of, (at, room))
        if read != _core.E_ROOM:
            shares = (mass if lists * k == room else mass[: lists * k]).reshape(
                (rows, layout.kv_heads, k)
            )
            return Attended(made, lse, read, shares)
