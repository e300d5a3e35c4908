"""Batches of sequences: append, select, fetch, attend; one call into the core for each."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from functools import partial
from typing import TYPE_CHECKING, Literal, cast, overload

import numpy as np
import numpy.typing as npt

from cxlkv import _core, _io_hooks
from cxlkv._core import reclaim
from cxlkv.arrays import (
    Array,
    Starts,
    View,
    forms,
    positive_float32,
    rows_or_bytes,
    softcap_of,
    target,
    view,
)
from cxlkv.errors import (
    BadArgumentError,
    CXLKVError,
    PoolFullError,
)
from cxlkv.layout import FP8, STORED, KVLayout
from cxlkv.machine.lifetime import OfThisProcess
from cxlkv.ndp import audit, choosers, scorers, simd, tuning
from cxlkv.ndp.engine import (
    METHODS,
    RECALL,
    Asked,
    Budget,
    BudgetLike,
    Decoded,
    Selection,
    check_error,
    errors_of,
    least_error,
    with_axis,
)
from cxlkv.numbers import array_of
from cxlkv.sequence.checks import (
    LayerShape,
    budgets_of,
    check_apart,
    check_blocks,
    check_rows,
    int32_of,
    layer_of,
    layer_shapes,
    rewind_of,
    whole_int32,
    words_of,
)

if TYPE_CHECKING:
    from cxlkv.sequence.sequence import Sequence


class Member(OfThisProcess):
    """A sequence as a batch sees it: what it holds, and how long it is."""

    _instead = "pass its handle on, and adopt() it there; fork() copies it here"

    def __init__(self, pool: _core.Handle, layout: KVLayout, handle: _core.Handle):
        self._pool = pool
        self._layout = layout
        self._handle = handle
        self._batch: Batch | None = None

    def __len__(self) -> int:
        """Tokens that all layers have."""
        return _core.sequence_tokens(self._handle)

    def tokens(self, layer: int) -> int:
        """Tokens of one layer."""
        return _core.sequence_tokens(self._handle, layer_of(layer))

    def page_count(self, layer: int) -> int:
        """Pages of one layer, the open tail included."""
        return -(-self.tokens(layer) // self._layout.page_tokens)

    def _own(self) -> Batch:
        """A batch of this sequence alone, of which it is no member: that would be a cycle."""
        if self._batch is None:
            alone = Member(self._pool, self._layout, self._handle)
            self._batch = Batch(self._pool, self._layout, [alone])
        return self._batch


class Batch(OfThisProcess):
    """Sequences that are worked on together; reusable, any number of steps.

    Arrays have one row for each token or query, sequence after sequence: rows
    [starts[i], starts[i + 1]) are of sequence i; starts is int32 [n + 1], an engine's
    query_start_loc. Tables and tails live in C: nothing here grows with the tokens.
    """

    _instead = "make another one of sequences that were adopted there"

    def __init__(self, pool: _core.Handle, layout: KVLayout, sequences: Sequences[Member]):
        if not isinstance(sequences, Sequences):
            raise BadArgumentError(f"a list of sequences is wanted, not {type(sequences).__name__}")
        if not sequences:
            raise BadArgumentError("a batch needs at least one sequence")
        self.sequences = cast("tuple[Sequence, ...]", tuple(sequences))
        for each in self.sequences:
            if not isinstance(each, Member):
                raise BadArgumentError(f"a batch is of sequences, not of {type(each).__name__}")
        self._layout = layout
        self._shapes = layer_shapes(layout)
        self._view = rows_or_bytes if FP8 in (layout.k_encoding, layout.v_encoding) else view
        self._pool = pool
        self._list_pages = 0  # pages a list, for the next select
        self._mass_pages = 0  # pages, for the next attend that says what they weigh
        self._decodings: list[simd.Decoding] = []  # at most one a thread: the last, between calls
        self._handle = _core.batch_create(pool, [s._handle for s in self.sequences])

    def __len__(self) -> int:
        return len(self.sequences)

    def _shape(self, layer: int) -> LayerShape:
        number, shapes = layer_of(layer), self._shapes
        return shapes[number if number < len(shapes) else 0]  # the core says that there is none

    def append(
        self,
        layer: int,
        k: object,
        v: object | None,
        starts: npt.ArrayLike,
        rewind: int | None = None,
    ) -> None:
        """Append tokens of one layer: k [rows, kv_heads, head_dim], v likewise; any strides.

        v is None when values are a prefix of the keys. What is kept in fp8_e4m3 may also come as
        its bytes, uint8 or float8_e4m3fn, which are stored as they are. Layers are appended in
        order: layer l never gets ahead of layer l - 1. All or nothing: PoolFullError leaves every
        sequence as it was.

        Layers with a window give back the pages behind it, at the next step: until then the step's
        own tokens may attend, and be truncated. rewind=n, given with layer 0: they keep what the
        tokens from the new length - n on see instead. More than a step lets a truncate reach back
        further; less, where the step's own attention is computed elsewhere (a long prefill), takes
        no page that nobody will read. Raises OrderError, BadArgumentError.
        """
        values = None if v is None else self._view(v, "v")
        self._append(layer, self._view(k, "k"), values, self._starts(starts), rewind)

    def _check_new(self, layer: int, keys: View, values: View | None, starts: Starts) -> None:
        """Runs for each layer of each token: what is wrong is looked at by calls, the rest not."""
        known = type(layer) is int and 0 <= layer < len(self._shapes)  # it saves two calls
        _, key_row, value_row, _ = shape = self._shapes[layer] if known else self._shape(layer)
        rows, (heads, dim, dtype, _) = int(starts[-1]), key_row
        if keys.shape != (rows, heads, dim) or keys.dtype != dtype:
            check_rows(keys, "k", rows, key_row)
        if values is None or value_row is None:
            _check_values("v", values, shape)
        elif values.shape != (rows, heads, value_row[1]) or values.dtype != dtype:
            check_rows(values, "v", rows, value_row)

    def _append(
        self, layer: int, keys: View, values: View | None, starts: Starts, rewind: int | None
    ) -> None:
        self._check_new(layer, keys, values, starts)
        back = -1 if rewind is None else rewind_of(rewind)
        transfer = _io_hooks.begin(self._pool) if _io_hooks.subscriber else None
        try:
            _core.batch_append(self._handle, layer, keys, values, starts, back)
        except PoolFullError as error:
            write = partial(_core.batch_append, self._handle, layer, keys, values, starts, back)
            reclaim.again(error, write, self._pool, lambda: self._pages_of(starts, 1))
        if transfer:
            self._end_append(transfer, layer, starts, 1)

    def _end_append(
        self, transfer: _io_hooks.Transfer, layer: int, starts: Starts, unit: int
    ) -> None:
        added = np.diff(starts).astype(np.int64) * unit
        transfer.end_append(self._layout, layer, self._tokens(layer), added)

    def append_blocks(
        self,
        layer: int,
        keys: object,
        values: object | None,
        blocks: npt.ArrayLike,
        starts: npt.ArrayLike,
        rewind: int | None = None,
    ) -> None:
        """Append whole blocks of an engine's own paged memory to one layer.

        keys [block_count, kv_heads, block_tokens, head_dim], values likewise or None, as in
        append(), but both of one dtype; a block's rows of one head are contiguous, strides to
        blocks and heads any.
        block_tokens is page_tokens or a multiple. Of sequence i are the blocks
        blocks[starts[i]:starts[i + 1]], so starts counts blocks here; each sequence ends at the end
        of a page. All or nothing, and all else as in append().

        The bytes may be packed in any way within a block, which stays whole where it is fetched
        from its first page on; digests and sketches of such keys choose nothing sensible, and in a
        layer with a window packed blocks must be as long as pages.
        """
        k, v, offsets, ids = self._blocks(self._shape(layer), keys, values, blocks, starts)
        number, back = layer_of(layer), rewind_of(rewind)
        call = partial(_core.batch_append_blocks, self._handle, number, k, v, ids, offsets, back)
        transfer = _io_hooks.begin(self._pool)
        reclaim.retry(call, self._pool, lambda: self._pages_of(offsets, k.shape[2]))
        if transfer:
            self._end_append(transfer, layer, offsets, k.shape[2])

    def fetch_blocks(
        self,
        layer: int,
        keys: object,
        values: object | None,
        blocks: npt.ArrayLike,
        starts: npt.ArrayLike,
        first: npt.ArrayLike,
    ) -> None:
        """Copy pages first[i].. of each sequence to its blocks, which are as in append_blocks().

        All pages of these blocks are complete. In a layer with a window, those behind it become
        zeros, where the block has pages that are not; a sequence may not begin with a whole block
        behind it. The blocks of a call are different ones: they are written by several threads.

        Every piece is verified on the way. What cannot be read ends only its own block, which
        becomes zeros: the first error is raised when the others are done (CorruptError,
        PoisonError, StaleError), and error.good says of each sequence how many of its blocks are
        right, from the first on. After other errors that is 0 for all.
        """
        for array, name in ((keys, "keys"), (values, "values")):
            if array is not None:
                check_apart(target(array, name), name)
        shape = self._shape(layer)
        k, v, offsets, ids = self._blocks(shape, keys, values, blocks, starts)
        pages = int32_of(first, "first")
        if pages.shape != (len(self),):
            raise BadArgumentError(f"first has shape {pages.shape}, wanted ({len(self)},)")
        transfer = _io_hooks.begin(self._pool)
        _core.batch_fetch_blocks(self._handle, layer_of(layer), k, v, ids, offsets, pages)
        if transfer:
            piece_bytes = shape.layout.stored_layer_bytes * k.shape[2]
            transfer.end("fetch", int(offsets[-1]) * piece_bytes)

    def _blocks(
        self,
        shape: LayerShape,
        keys: object,
        values: object | None,
        blocks: npt.ArrayLike,
        starts: npt.ArrayLike,
    ) -> tuple[View, View | None, Starts, Starts]:
        """(keys, values, starts, blocks), checked but for the ids and starts' order."""
        k = self._view(keys, "keys")
        check_blocks(k, "keys", shape.key_row)
        v = None if values is None else self._view(values, "values")
        _check_values("values", v, shape)
        if v is not None and shape.value_row is not None:
            check_blocks(v, "values", shape.value_row)
            if v.shape[::2] != k.shape[::2]:
                raise BadArgumentError(
                    f"keys {tuple(k.shape)} and values {tuple(v.shape)}: other blocks or tokens"
                )
            if v.dtype != k.dtype:
                names = f"keys are {STORED[k.dtype]}, values {STORED[v.dtype]}"
                raise BadArgumentError(f"{names}: blocks have one dtype")
        offsets, ids = self._starts(starts), int32_of(blocks, "blocks")
        if ids.shape != (max(0, int(offsets[-1])),):
            raise BadArgumentError(
                f"blocks has shape {ids.shape}, wanted ({offsets[-1]},) by the last of starts"
            )
        return k, v, offsets, ids

    def attach(
        self,
        pages: npt.ArrayLike,
        starts: npt.ArrayLike,
        checksums: npt.ArrayLike | None = None,
        *,
        rewind: int | None = None,
        verify: bool = False,
    ) -> None:
        """Make pages that somebody else has written the next ones of sequences; all or nothing.

        pages: ids from pool.pages.alloc(), uint32 [parts, n], a page of each part for the same
        tokens (`part_count` of describe()'s geometry; 1 without layer groups), [n] for one part;
        starts counts pages: those of sequence i are [starts[i], starts[i + 1]). All pieces of all
        layers lie where pool.pages.places() says, complete and seen by this CPU (a device's event
        was waited for): K and V head-major or as the pool's encoding has them, digests, and
        sketches if the pool has them.
        checksums: their CRC32C, [layers, n, kv_heads, 4] (kv_heads: the most of any layer) in the
        order digest, sketch, K, V, uint32 or the same bits in int32; None in a pool without
        checksums.

        verify=True computes every CRC before anything is to be seen, and raises CorruptError; else
        the first reading of a page does, so that what was not written whole is never used. The
        sequences end at the end of a page, in all layers. NO_PAGE (cxlkv.pages) stands for a page
        behind its part's window, others there are freed; rewind is as in append(). From now on the
        pages are the sequences'; after an error they are still the caller's. Raises UnevenError,
        BadArgumentError.
        """
        offsets = self._starts(starts)
        count = int(offsets[-1])
        geometry = _core.pool_geometry(self._pool)
        given = words_of(pages, "pages", (geometry["part_count"], count))
        sums = None
        if checksums is not None:
            heads = max(group.kv_heads for group in self._layout.groups)
            sums = words_of(checksums, "checksums", (self._layout.layers, count, heads, 4))
        transfer = _io_hooks.begin(self._pool)
        _core.batch_attach(self._handle, offsets, given, sums, rewind_of(rewind), verify)
        if transfer and verify:  # else only tables and headers are written
            transfer.end_attach(self._layout, given)

    def _pages_of(self, starts: Starts, unit: int) -> int:
        """The most pages that a step of these rows can take."""
        geometry, tokens = _core.pool_geometry(self._pool), self._layout.page_tokens
        before = np.array([len(s) for s in self.sequences], np.int64)
        pages = (before + np.diff(starts).astype(np.int64) * unit) // tokens - before // tokens
        return int(pages.sum()) * geometry["part_count"]

    def select(
        self,
        layer: int,
        q: object,
        starts: npt.ArrayLike,
        budgets: BudgetLike | Sequences[BudgetLike],
        method: str = "auto",
        scale: float | None = None,
        recall: float = RECALL,
    ) -> Selection:
        """Choose pages for queries q [rows, q_heads, head_dim], scored where they lie.

        Row r of sequence i is token length_i - (starts[i + 1] - r) and sees nothing later: append
        a step's keys first. method "exact" scores every key, and a page as its best token for any
        query head of a kv head; "attention" does so by the share of the attention that a page
        holds, averaged over these heads, in about twice the time; "digest" by the min/max bound of
        each page (Quest, arXiv 2406.10774). "two_stage" estimates scores from sketches, an eighth
        of the bytes, and scores by their keys the tokens that may matter, so that about `recall` of
        the pages of "exact" are chosen; 1 is all of them; "sketch" leaves it at the estimates, and
        reads no keys of complete pages. "auto" is that of "two_stage" and "exact" which should take
        less time (native/src/ndp/cost.c), "exact" for a budget of mass. One budget, or one for each
        sequence; 0.05 is Budget(share=0.05). In a layer with a window a row sees the pages of its
        window only, and budgets count these. scale defaults to head_dim ** -0.5.
        """
        several = (budgets,) if isinstance(budgets, Budget) else budgets_of(budgets)
        count = len(self.sequences)
        if len(several) not in (1, count):
            raise BadArgumentError(f"{len(several)} budgets for {count} sequences")
        offsets = self._starts(starts)
        return self._select(layer, view(q, "q"), offsets, several, method, scale, recall)

    def _select(
        self,
        layer: int,
        queries: View,
        starts: Starts,
        budgets: tuple[Budget, ...],
        method: str,
        scale: float | None,
        recall: float,
        lone: bool = False,
    ) -> Selection:
        """lone: there is one list for each kv head, and the result has no axis for lists."""
        known = type(layer) is int and 0 <= layer < len(self._shapes)  # it saves two calls
        layout, _, _, usual = self._shapes[layer] if known else self._shape(layer)
        factor = usual if scale is None else positive_float32(scale, "scale")
        rate = _io_hooks.read_rate(self._pool) if _io_hooks.subscriber else 0.0
        chooser, scorer = (None, 0) if method in METHODS else self._way(method)
        asked = Asked(layer, queries, starts, budgets, method, factor, recall, rate, scorer)
        transfer = _io_hooks.begin(self._pool) if _io_hooks.subscriber else None
        if chooser:
            of = (self._pool, layout, self._handle)
            picked = choosers.select(chooser, *of, self._texts(layer), asked)
            picked = picked.at(0) if lone else picked
        else:
            picked = simd.select(self._handle, layout, asked, self._list_pages, lone)
            # A step later a list is one page longer at most: then one call into the core is enough.
            self._list_pages = picked.pages.shape[-1] + 1
        if transfer:
            transfer.end("select", picked.bytes_scored)
        if audit.used and audit.is_due(self._pool):
            audit.measure(self._pool, self._handle, layout, asked, with_axis(picked))
        return picked

    def _way(self, method: str) -> tuple[choosers.AnyChooser | None, int]:
        """The chooser of a method that is not the core's, or its scorer's number."""
        chooser = choosers.of(method)
        if chooser:
            return chooser, 0
        return None, scorers.number_of(self._pool, self._layout, method)

    def _texts(self, layer: int) -> list[choosers.Text]:
        return [
            choosers.Text(
                each._handle,
                each.tokens(layer),
                partial(_read, each, layer),
                choosers.held_of(each._handle),
            )
            for each in self.sequences
        ]

    def fetch(
        self,
        layer: int,
        picked: Selection | None = None,
        out: tuple[Array, Array] | None = None,
        *,
        decoded: bool = True,
    ) -> tuple[Array, Array]:
        """Copy pages to (k, v), each [rows or n, kv_heads, k, page_tokens, dim], the pool's dtype.

        picked=None: every page of every sequence (n lists); not for a layer with a window.
        Unwritten tokens and padding are zero. Where values are a prefix of the keys, v is a copy of
        these channels. Every piece is verified against its CRC on the way: CorruptError.
        decoded=False gives what has an encoding as the pool keeps it, uint8 [rows or n, kv_heads,
        k, piece_bytes] (layout.piece_bytes; kernels.attend takes such pieces), for fewer bytes on
        a link; what has none is rows in any case.
        """
        guess = 0
        if picked is None:
            guess = max(s.page_count(layer) for s in self.sequences)
        transfer = _io_hooks.begin(self._pool)
        layout, number, handle = self._shape(layer).layout, layer_of(layer), self._handle
        found = simd.fetch(handle, layout, number, picked, len(self), guess, out, decoded)
        if transfer:
            transfer.end_read("fetch", layout, layer, self._tokens(layer), picked)
        return found

    @overload
    def attend(
        self,
        layer: int,
        q: object,
        starts: npt.ArrayLike,
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
        starts: npt.ArrayLike,
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
        starts: npt.ArrayLike,
        picked: Selection | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        error: float = 0.0,
        *,
        page_mass: bool = False,
    ) -> tuple[Array, Array] | tuple[Array, Array, Array]:
        """softmax(q.k) v near the data: (out [rows, q_heads, value_head_dim] in q's dtype, lse).

        lse is float32 [rows, q_heads], natural log: two partial results merge exactly by it.
        picked=None: over all pages that the rows see. Causal, as in select(). softcap: logits
        become softcap * tanh(logit / softcap). error: as of Budget, which decode() takes it from;
        under picked.log_weights all bits are read. These and picked.rows take part as Selection
        and VirtualRows say, and out, lse and the shares below are of all that took part.

        page_mass: a third array, float32 [rows, kv_heads, k], has each page's share of the row's
        attention, the mean over the queries of a kv head: of picked pages by their places in the
        list, 0 where it is padded; else by page, k being the pages of the longest sequence. The
        shares of a list sum to 1, less what its virtual rows have, or are all 0 where nothing was
        seen.
        """
        offsets = self._starts(starts)
        queries = view(q, "q")
        of = (layer, queries, offsets, picked, scale, softcap, error)
        found = self._attend(*of, page_mass=page_mass)
        return found[:2] if found.mass is None else (found.out, found.lse, found.mass)

    def _attend(
        self,
        layer: int,
        queries: View,
        starts: Starts,
        picked: Selection | None,
        scale: float | None,
        softcap: float | None,
        error: float = 0.0,
        out: object | None = None,
        page_mass: bool = False,
        lone: bool = False,
    ) -> simd.Attended:
        """lone: picked may be of one list without its axis."""
        transfer = _io_hooks.begin(self._pool) if _io_hooks.subscriber else None
        known = type(layer) is int and 0 <= layer < len(self._shapes)  # it saves two calls
        layout, _, _, usual = self._shapes[layer] if known else self._shape(layer)
        factor = usual if scale is None else positive_float32(scale, "scale")
        if error != 0:
            check_error(error)
        found = simd.attend(
            self._handle,
            layout,
            layer,
            queries,
            starts,
            picked,
            factor,
            softcap,
            error,
            out,
            self._mass_pages if page_mass else None,
            lone,
        )
        if found.mass is not None and picked is None:
            self._mass_pages = found.mass.shape[2]
        if transfer:
            # Lower planes may have stayed, or pages that are left out.
            weighed = picked is not None and picked.log_weights is not None
            most = found.read if error or weighed else None
            lists = None if picked is None else with_axis(picked)
            transfer.end_read("attend", layout, layer, self._tokens(layer), lists, most)
        return found

    def decode(
        self,
        layer: int,
        q: object,
        k: object,
        v: object | None,
        starts: npt.ArrayLike,
        budgets: BudgetLike | Sequences[BudgetLike] | None = None,
        method: str = "auto",
        scale: float | None = None,
        softcap: float | None = None,
        recall: float = RECALL,
        rewind: int | None = None,
        out: object | None = None,
    ) -> Decoded:
        """One layer of a step: append k and v, choose pages for q, attend to them; see append(),
        select() and attend(), of which this is one call into the core.

        budgets: None attends to all pages; one, or one for each sequence, which share union= and
        per=. out: memory for the output, contiguous, of q's dtype. An error whose `appended` is set
        came after the tokens were there: the output may be asked for again by attend(), or
        truncate() takes them back.
        """
        number, several = layer_of(layer), budgets_of(budgets)
        chooser, scorer = (None, 0) if method in METHODS else self._way(method)
        if chooser and several:
            asked, new = self._asked(number, (q, k, v), starts, several, method, scale, recall)
            if any(budget.chooses(number) for budget in several):
                choosers.check_budgets(chooser, self._shape(number).layout, asked)
            return self._decode_apart(asked, new, rewind, softcap, out)
        if _io_hooks.subscriber or audit.used:
            asked, new = self._asked(number, (q, k, v), starts, several, method, scale, recall)
            heard = _io_hooks.subscriber and _io_hooks.label(self._pool)
            if heard or audit.share(self._pool):
                return self._decode_apart(asked, new, rewind, softcap, out)
        arrays = forms(q, k, v, out)
        of = (arrays, several, method, scorer, scale, softcap, recall, rewind, tuning.current())
        layout = self._shape(number).layout
        others = (*of, id(layout))  # it lives as long as this batch
        made = self._taken(others, starts)
        if made is None:
            asked, new = self._asked(number, (q, k, v), starts, several, method, scale, recall)
            made = simd.Decoding(layout, asked, new, rewind_of(rewind), softcap_of(softcap))
            q = asked.queries.owner
            if out is not None:
                made.check_output(out)
            k, v = new[0].owner, None if new[1] is None else new[1].owner
            if arrays and not any(b.dense_layers or b.by_layer for b in several):
                made.others = (*others, asked.starts.tobytes())
        work = partial(made.decode, self._handle, number, (q, k, v), out)
        try:
            found = work()
        except PoolFullError as error:
            offsets = self._starts(starts)
            found = reclaim.again(error, work, self._pool, lambda: self._pages_of(offsets, 1))
        if made.others:
            self._decodings.append(made)
        return found

    def _taken(self, others: tuple[object, ...], starts: npt.ArrayLike) -> simd.Decoding | None:
        """Take the last decode out of the list, if this one differs from it by addresses only. No
        other thread has it until it is put back."""
        try:
            made = self._decodings.pop()
        except IndexError:
            return None
        if type(starts) is np.ndarray and starts.dtype == np.int32 and starts.ndim == 1:
            return made if made.others == (*others, starts.tobytes()) else None
        return None

    def _asked(
        self,
        layer: int,
        arrays: tuple[object, object, object | None],
        starts: npt.ArrayLike,
        budgets: tuple[Budget, ...],
        method: str,
        scale: float | None,
        recall: float,
    ) -> tuple[Asked, tuple[View, View | None]]:
        """All checked but the queries; arrays: q, k, v."""
        q, k, v = arrays
        new = (self._view(k, "k"), None if v is None else self._view(v, "v"))
        offsets = self._starts(starts)
        self._check_new(layer, *new, offsets)
        if len(budgets) not in (0, 1, len(self.sequences)):
            raise BadArgumentError(f"{len(budgets)} budgets for {len(self.sequences)} sequences")
        errors_of(recall)  # raises for what is none, also where no budget uses it
        factor = self._shape(layer).scale if scale is None else positive_float32(scale, "scale")
        rate = _io_hooks.read_rate(self._pool) if _io_hooks.subscriber else 0.0
        queries = view(q, "q")
        _, scorer = (None, 0) if method in METHODS else self._way(method)
        return Asked(layer, queries, offsets, budgets, method, factor, recall, rate, scorer), new

    def _decode_apart(
        self,
        asked: Asked,
        new: tuple[View, View | None],
        rewind: int | None,
        softcap: float | None,
        out: object | None,
    ) -> Decoded:
        """Decode by three calls, each of which tells its subscriber."""
        layer, queries, starts, budgets, method, scale, recall, *_ = asked
        softcap_of(softcap)  # what is wrong is said before the tokens are there
        self._append(layer, *new, starts, rewind)
        picked = None
        try:
            if not any(budget.chooses(layer) for budget in budgets):
                method = "all"
            elif method == "auto":
                method = simd.cheapest(self._handle, self._shape(layer).layout, asked)
            if method != "all":
                picked = self._select(layer, queries, starts, budgets, method, scale, recall)
            least = least_error(budgets)
            made = self._attend(layer, queries, starts, picked, scale, softcap, least, out)
        except CXLKVError as error:
            error.appended = True
            raise
        scored, stages = (picked.bytes_scored, picked.stages) if picked else (0, None)
        return Decoded(made.out, made.lse, scored, made.read, method, stages)

    def verify(self, layer: int, picked: Selection) -> None:
        """Verify the pages of a selection (per="sequence") by their CRCs, for a GPU or another
        reader that has only their addresses. fetch, select and attend do it themselves.

        What this process has found right before is not read again. Raises CorruptError.
        """
        rows = simd.picked_pages(picked, self._shape(layer).layout)
        _core.batch_verify(self._handle, layer_of(layer), rows)

    def _tokens(self, layer: int) -> npt.NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.array([s.tokens(layer) for s in self.sequences], np.int64)

    def _starts(self, starts: npt.ArrayLike) -> Starts:
        if type(starts) is not np.ndarray or starts.dtype != np.int32:
            starts = whole_int32(array_of(starts, "starts"), "starts")
        offsets: Starts = np.ascontiguousarray(starts)
        wanted = (len(self.sequences) + 1,)
        if offsets.shape != wanted:
            raise BadArgumentError(f"starts has shape {offsets.shape}, wanted {wanted}")
        return offsets


def _check_values(name: str, values: View | None, shape: LayerShape) -> None:
    if (values is None) == (shape.value_row is not None):
        given = "the pool stores them" if values is None else "a prefix of the keys is stored"
        raise BadArgumentError(f"{name} is {'None' if values is None else 'given'}: {given}")


def _read(sequence: Member, layer: int, picked: Selection) -> tuple[Array, Array]:
    """Sequence.fetch for a select, which counts what it has read in all."""
    own = sequence._own()
    return simd.fetch(own._handle, own._layout.of_layer(layer), layer, picked, 1, 0, None)
