"""A sequence: the pages and the open tail of one request."""

from __future__ import annotations

from functools import partial
from typing import Literal, cast, overload

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv._core import reclaim
from cxlkv.arrays import (
    Array,
    Starts,
    View,
    target,
    view,
)
from cxlkv.errors import (
    BadArgumentError,
    CXLKVError,
    state_of,
)
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.ndp.engine import (
    RECALL,
    Budget,
    BudgetLike,
    Selection,
    budget_of,
    with_axis,
)
from cxlkv.numbers import is_whole
from cxlkv.sequence.batch import Member
from cxlkv.sequence.checks import layer_of

PagePlaces = _core.Places


class Sequence(Member):
    """The pages and the open tail of one request. From pool.sequence(), fork() or pool.adopt().

    A method here is a Batch's of one sequence with the leading axis dropped.
    """

    def __repr__(self) -> str:
        try:
            tokens, first = len(self), self.tokens(0)
        except CXLKVError as error:
            return f"<Sequence: {state_of(error)}>"
        ahead = f", {first:,} in layer 0: a step is half done" if first != tokens else ""
        return f"<Sequence: {size_text(tokens, self._layout)}{ahead}>"

    @property
    def pages(self) -> npt.NDArray[np.uint32]:
        """Ids in the pool of the complete pages; of all groups of layers, one after the other."""
        return _core.sequence_pages(self._handle)

    def places(self, layer: int, first: int = 0) -> PagePlaces:
        """Where the pages from `first` on lie that are complete in the layer."""
        if not is_whole(first, 0, 2**32 - 1):
            raise BadArgumentError(f"first={first!r}: pages are counted from 0")
        return _core.sequence_places(self._handle, layer_of(layer), first)

    def state_places(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Pages of a hit's state checkpoint, and their generations; none where it has none."""
        return _core.state_places(self._handle, _core.state_pages(self._pool))

    def append(
        self, layer: int, k: object, v: object | None = None, rewind: int | None = None
    ) -> None:
        """Append k [tokens, kv_heads, head_dim] and v to one layer; see Batch.append."""
        batch = self._batch if self._batch is not None else self._own()
        keys = batch._view(k, "k")
        starts = np.array((0, keys.shape[0] if keys.shape else 0), np.int32)
        values = None if v is None else batch._view(v, "v")
        batch._append(layer, keys, values, starts, rewind)

    def attach(
        self,
        pages: npt.ArrayLike,
        checksums: npt.ArrayLike | None = None,
        *,
        rewind: int | None = None,
        verify: bool = False,
    ) -> None:
        """Go on with pages that somebody else has written; see Batch.attach."""
        count = np.shape(pages)[-1] if np.ndim(pages) else 0
        self._own().attach(pages, [0, count], checksums, rewind=rewind, verify=verify)

    def select(
        self,
        layer: int,
        q: object,
        budget: BudgetLike | None = None,
        *,
        top_k: int | None = None,
        method: str = "auto",
        scale: float | None = None,
        recall: float = RECALL,
    ) -> Selection:
        """Choose pages; q [q_heads, head_dim] gives pages [kv_heads, k], several rows [rows, ...].

        0.05 is short for Budget(share=0.05), top_k=n for Budget(pages=n); without both it is
        Budget().
        """
        batch = self._batch if self._batch is not None else self._own()
        chosen = budget if top_k is None else None
        if not isinstance(chosen, Budget):
            chosen = one_budget(budget, top_k)
        rows, single, starts = query_rows(q)
        lone = single or chosen.per != "query"
        return batch._select(layer, rows, starts, (chosen,), method, scale, recall, lone)

    def fetch(
        self,
        layer: int,
        picked: Selection | None = None,
        out: tuple[Array, Array] | None = None,
        *,
        decoded: bool = True,
    ) -> tuple[Array, Array]:
        """(k, v) of chosen pages, or of all, each [kv_heads, k, page_tokens, dim]; several query
        rows keep their axis in front. decoded: as of Batch.fetch."""
        dropped = picked is None or picked.pages.ndim == 2
        if out is not None and dropped:
            k, v = (cast(Array, target(out[i], f"out[{i}]").owner) for i in range(2))
            out = (k[None], v[None])
        lists = None if picked is None else with_axis(picked)
        k, v = self._own().fetch(layer, lists, out, decoded=decoded)
        return (k[0], v[0]) if dropped else (k, v)

    @overload
    def attend(
        self,
        layer: int,
        q: object,
        picked: Selection | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        error: float = 0.0,
        *,
        page_mass: Literal[False] = False,
    ) -> tuple[Array, Array]: ...

    @overload
    def attend(
        self,
        layer: int,
        q: object,
        picked: Selection | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        error: float = 0.0,
        *,
        page_mass: Literal[True],
    ) -> tuple[Array, Array, Array]: ...

    def attend(
        self,
        layer: int,
        q: object,
        picked: Selection | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        error: float = 0.0,
        *,
        page_mass: bool = False,
    ) -> tuple[Array, Array] | tuple[Array, Array, Array]:
        """(out, lse), and mass if page_mass, for q [q_heads, head_dim] or [rows, q_heads,
        head_dim]; see Batch.attend."""
        batch = self._batch if self._batch is not None else self._own()
        rows, single, starts = query_rows(q)
        found = batch._attend(
            layer, rows, starts, picked, scale, softcap, error, page_mass=page_mass, lone=True
        )
        out, lse, mass = found.out, found.lse, found.mass
        if single:
            out, lse, mass = out[0], lse[0], None if mass is None else mass[0]
        return (out, lse) if mass is None else (out, lse, mass)

    def fork(self) -> Sequence:
        """A child with the same tokens: shares all pages and, until one appends, the tail.

        Raises UnevenError in the middle of a step."""
        return Sequence(self._pool, self._layout, _core.sequence_fork(self._handle))

    def truncate(self, tokens: int) -> None:
        """Forget all tokens from `tokens` on; reaches back into complete pages by copying them.

        In a layer with a window only what the next token sees is sure to be there afterwards.
        BadArgumentError, and nothing changed, when a window has given back what that token would
        see: append with a larger rewind=.
        """
        if not is_whole(tokens):
            raise BadArgumentError(f"truncate to {tokens} tokens: 0 to the sequence's length")
        _core.sequence_truncate(self._handle, tokens)

    def release(self) -> None:
        """Give the pages back; a second time does nothing. Published pages stay in the pool."""
        _core.sequence_release(self._handle)

    @property
    def handle(self) -> bytes:
        """Bytes by which any process adopts this sequence, while this one is not released.

        An open tail goes along as a page of its own, which the next handle with another tail
        replaces: the older handle is then stale. Raises UnevenError, PoolFullError.
        """
        call = partial(_core.sequence_export, self._handle)
        return reclaim.retry(call, self._pool, self._parts)

    def _parts(self) -> int:
        return _core.pool_geometry(self._pool)["part_count"]


def size_text(tokens: int, layout: KVLayout) -> str:
    """A length in tokens, pages and bytes, for people."""
    pages = f"{-(-tokens // layout.page_tokens):,} pages"
    return f"{tokens:,} tokens in {pages} ({format_bytes(tokens * layout.stored_token_bytes)})"


def one_budget(budget: BudgetLike | None, top_k: int | None) -> Budget:
    """The budget in the arguments of a select of one sequence, here or at a server."""
    if budget is not None and top_k is not None:
        raise BadArgumentError("select takes a budget or top_k=, not both")
    if top_k is not None:
        return Budget(pages=top_k)
    return Budget() if budget is None else budget_of(budget)


def query_rows(q: object) -> tuple[View, bool, Starts]:
    """Queries of one sequence as [rows, q_heads, head_dim], and whether they had no first axis,
    which their owner then has not either."""
    got = view(q, "q")
    owner, address, shape, strides, dtype = got
    if len(shape) == 3:
        return got, False, np.array((0, shape[0]), np.int32)
    if len(shape) != 2:
        raise BadArgumentError(f"q has shape {shape}, wanted [q_heads, dim] or [rows, ...]")
    one = (owner, address, (1, *shape), (0, *strides), dtype)
    return tuple.__new__(View, one), True, np.array((0, 1), np.int32)
