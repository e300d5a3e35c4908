"""The C core's NDP backend selects, fetches and attends over a batch's pages where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

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
    view,
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
)

ROOM_PAGES = 4096  # the longest lists for which room is made before the core has asked for it


def check_queries(layout: KVLayout, queries: object, rows: int) -> View:
    """`queries` [rows, q_heads, head_dim] as a View; raises BadArgumentError."""
    got = view(queries, "q")
    if len(got.shape) != 3 or got.shape[0] != rows or got.shape[2] != layout.head_dim:
        raise BadArgumentError(
            f"q has shape {got.shape}, wanted [{rows} rows, q_heads, {layout.head_dim}]"
        )
    if got.shape[1] == 0 or got.shape[1] % layout.kv_heads:
        raise BadArgumentError(
            f"{got.shape[1]} query heads are no multiple of {layout.kv_heads} kv heads"
        )
    return got


def select(
    batch: _core.Handle,
    layout: KVLayout,
    asked: Asked,
    room: int = 0,
) -> Selection:
    """Score the pages of a batch's sequences and choose; one call into the core.

    The result has room for lists of `room` pages, or more as the budgets suggest; when lists turn
    out longer, the core says how long before it scores anything, and the call is made once more.
    """
    rows, budgets = int(asked.starts[-1]), asked.budgets
    got = check_queries(layout, asked.queries, rows)
    first = uniform(budgets)
    codes, numbers = _words(asked, first)
    lists = rows if first.per == "query" else len(asked.starts) - 1
    heads = layout.kv_heads
    array = _core.budgets([b.row(asked.layer) for b in budgets])
    counts = np.empty((lists, heads), np.int32)
    guess = (b.pages_at_most(64 if b.pages is None else ROOM_PAGES, asked.layer) for b in budgets)
    k = max(room, *guess)
    while True:
        pages = np.empty(lists * heads * k, np.int32)
        scores = np.empty(lists * heads * k, np.float32)
        code, k, done = _core.batch_select(
            batch,
            asked.layer,
            got,
            asked.starts,
            array,
            codes,
            numbers,
            pages,
            scores,
            counts,
        )
        if code != _core.E_ROOM:
            break
    used, shape, taken = lists * heads * k, (lists, heads, k), METHODS_TAKEN[done.method]
    return Selection(
        pages=pages[:used].reshape(shape),
        scores=scores[:used].reshape(shape),
        counts=counts,
        bytes_scored=done.bytes_scored,
        bytes_fetched=done.bytes_fetched,
        per=first.per,
        starts=asked.starts,
        stages=Stages(*_core.stages(done)) if taken == "two_stage" else None,
        method=asked.method if taken == "scorer" else taken,
    )


def _words(
    asked: Asked, first: Budget
) -> tuple[tuple[int, int, int, int, int], tuple[float, float, float]]:
    """(method, union, per, refresh, scorer) by their numbers, and (scale, errors, read_rate), as
    the core takes them."""
    refresh = min(map(attrgetter("refresh"), asked.budgets))
    method = METHODS_TAKEN.index("scorer" if asked.scorer else asked.method)
    codes = method, UNIONS.index(first.union), PERS.index(first.per), refresh, asked.scorer
    rate = asked.read_rate or tuning.current().read_rate
    return codes, (asked.scale, errors_of(asked.recall), rate)


def cheapest(batch: _core.Handle, layout: KVLayout, asked: Asked) -> str:
    """The method that "auto" comes to where chosen pages are then attended to, or "all"."""
    got = check_queries(layout, asked.queries, int(asked.starts[-1]))
    array = _core.budgets([b.decode_row(asked.layer) for b in asked.budgets])
    words = _words(asked, uniform(asked.budgets))
    code = _core.batch_cheapest(batch, asked.layer, got, asked.starts, array, *words)
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
        got = check_queries(layout, asked.queries, int(asked.starts[-1]))
        array, codes, numbers = None, (0, 0, 0, 1, 0), (asked.scale, 0.0, 0.0)
        if any(budget.chooses(asked.layer) for budget in asked.budgets):
            array = _core.budgets([b.decode_row(asked.layer) for b in asked.budgets])
            codes, numbers = _words(asked, uniform(asked.budgets))
        values = (numbers[0], softcap, least_error(asked.budgets), *numbers[1:])
        views, starts = (got, *new), asked.starts
        self._shape, self._dtype = (*got.shape[:2], layout.value_head_dim), got.dtype
        self._asked = asked.method
        self._arguments = _core.DecodeArguments(views, starts, rewind, array, codes, values)
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
        lse = empty_like_kind(queries, self._shape[:2], DTYPES.index("float32"))
        made = out if out is not None else empty_like_kind(queries, self._shape, self._dtype)
        named = zip(arrays, "qkv", strict=True)
        addresses = [address_of(each, name) for each, name in named if each is not None]
        places = address_of(made, "out"), address_of(lse, "lse")
        done = self._arguments.call(batch, layer, addresses, *places)
        taken = METHODS_TAKEN[done.method]
        return Decoded(
            out=cast(Array, made),
            lse=lse,
            bytes_scored=done.bytes_scored,
            bytes_read=done.bytes_attended,
            method=self._asked if taken == "scorer" else taken,
            stages=Stages(*_core.stages(done)) if taken == "two_stage" else None,
        )

    def check_output(self, out: object) -> None:
        """Raises BadArgumentError where the result cannot be written there."""
        _writable(out, "out", self._dtype, self._shape)


def picked_rows(
    picked: Selection | None, layout: KVLayout
) -> tuple[npt.NDArray[np.int32], int] | None:
    """A selection as the core takes it; raises BadArgumentError for one of another layout."""
    if picked is None:
        return None
    shape = picked.pages.shape
    if len(shape) != 3 or shape[1] != layout.kv_heads:
        raise BadArgumentError(f"picked.pages has shape {shape}, wanted [.., {layout.kv_heads}, k]")
    return np.ascontiguousarray(picked.pages, np.int32), PERS.index(picked.per)


def picked_more(picked: Selection, layout: KVLayout) -> _core.More:
    """What a selection has besides pages, as the core takes it; raises BadArgumentError."""
    lists, heads, k = picked.pages.shape
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
        return _core.More(weights, None)
    arrays = [np.ascontiguousarray(each, np.float32) for each in (rows.k, rows.v, rows.log_counts)]
    n = arrays[2].shape[-1] if arrays[2].ndim else 0
    dims = ((layout.head_dim,), (layout.value_head_dim,), ())
    for name, array, dim in zip(("k", "v", "log_counts"), arrays, dims, strict=True):
        if array.shape != (lists, heads, n, *dim):
            wanted = (lists, heads, n, *dim)
            raise BadArgumentError(f"picked.rows.{name} has shape {array.shape}, wanted {wanted}")
    return _core.More(weights, (arrays[0], arrays[1], arrays[2]))


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
    rows = picked_rows(picked, layout)
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
    """Of a page's keys or values of a head, as fetch() gives them: rows of this dtype code, or None
    for bytes."""

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


def _output(
    given: object | None, like: object, shape: tuple[int, ...], dtype: int
) -> tuple[Array, int]:
    """The caller's array, or a new one like `like`, and its address."""
    if given is not None:
        return cast(Array, given), _writable(given, "out", dtype, shape)[0]
    made = empty_like_kind(like, shape, dtype)
    return made, view(made, "out").address


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
    queries: object,
    starts: Starts,
    picked: Selection | None,
    scale: float,
    softcap: float | None,
    error: float,
    out: object | None = None,
    mass_room: int | None = None,
) -> Attended:
    """softmax(q k) v over chosen pages or all. error: as of Batch.attend. mass_room: the pages'
    shares are wanted, too; of so many pages, it is thought, if none are picked."""
    rows = int(starts[-1])
    got = check_queries(layout, queries, rows)
    queries = got.owner
    made, address = _output(out, queries, (rows, got.shape[1], layout.value_head_dim), got.dtype)
    lse = empty_like_kind(queries, (rows, got.shape[1]), DTYPES.index("float32"))
    given = (picked_rows(picked, layout), scale, softcap_of(softcap), float(error), address)
    more = None if picked is None or picked.is_plain else picked_more(picked, layout)
    lse_view = view(lse, "lse")
    if mass_room is None:
        read, _ = _core.batch_attend(batch, layer, got, starts, *given, lse_view, None, more)
        return Attended(made, lse, read, None)
    lists, k = rows * layout.kv_heads, mass_room if picked is None else picked.pages.shape[-1]
    while True:
        room = max(lists * k, 1)  # an empty tensor has no address, which would ask for no mass
        mass = empty_like_kind(queries, (room,), DTYPES.index("float32"))
        at = (address_of(mass, "mass"), room)
        read, k = _core.batch_attend(batch, layer, got, starts, *given, lse_view, at, more)
        if read != _core.E_ROOM:
            shares = (mass if lists * k == room else mass[: lists * k]).reshape(
                (rows, layout.kv_heads, k)
            )
            return Attended(made, lse, read, shares)
