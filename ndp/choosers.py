"""Choosers are ways to choose tokens by a state of the sequence, not of each page: clusters of its
keys, hash tables. A class each, found by its name as a scorer is; they run here, or in a worker.

docs/adding-a-method.md says how one is written, docs/decisions/0038-choosers.md why there are two
ways.
"""

from __future__ import annotations

import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.arrays import Array, is_torch, view
from cxlkv.errors import BadArgumentError, BusyError, UnsupportedError, WorkerError
from cxlkv.layout import KVLayout
from cxlkv.ndp import names as method_names
from cxlkv.ndp import trials
from cxlkv.ndp.engine import (
    METHODS_TAKEN,
    PERS,
    Asked,
    Budget,
    Selection,
    VirtualRows,
    same_pages,
    uniform,
)
from cxlkv.ndp.kinds import AnyChooser as AnyChooser
from cxlkv.ndp.kinds import Arrays as Arrays
from cxlkv.ndp.kinds import Choice as Choice
from cxlkv.ndp.kinds import Chooser as Chooser
from cxlkv.ndp.kinds import Floats, State
from cxlkv.ndp.kinds import Question as Question
from cxlkv.ndp.simd import check_queries

RUN_TOKENS_MAX = 4096


# ---- by their names ----


of = method_names.chooser_of


def names() -> tuple[str, ...]:
    """Names of all installed choosers, in this package and others."""
    return method_names.known(method_names.choosers())


def add(chooser: Chooser[State]) -> None:
    """Make a chooser known to this process by its name, in place of another one that was added or
    offered by it; one of this package by its own class alone, with another seed. Raises
    BadArgumentError."""
    taken = method_names.known(method_names.scorers())
    name = method_names.check(chooser, Chooser, taken)
    method_names.left_out.pop(name, None)
    method_names.choosers()[name] = cast(AnyChooser, chooser)


def number_of(chooser: AnyChooser) -> int:
    """By what a worker knows it; 0 for one that this process added, which no worker has."""
    if method_names.installed_choosers().get(chooser.name) is not chooser:
        return 0
    source = method_names.source_of(chooser)
    return zlib.crc32(f"chooser {chooser.name} {chooser.seed} {source}".encode()) or 1


def refuse(method: str, where: str) -> None:
    """Raises UnsupportedError for a chooser's name: pages alone are not what it chose."""
    if method not in METHODS_TAKEN and of(method):
        raise UnsupportedError(
            f"method {method!r} chooses tokens, with weights and rows beside them, and {where} "
            "takes pages alone; attention in the pool takes all of it"
        )


# ---- states ----


class Run:
    """The state of neighbouring pages, which lives as long as a sequence that has asked for it."""

    def __init__(self, state: Arrays) -> None:
        self.state = state


class Held:
    """What keeps a sequence's runs alive, by choosers and layers. bytes_read: of K and V, to make
    some that no select has told of."""

    def __init__(self) -> None:
        self.runs: dict[tuple[AnyChooser, int], list[Run]] = {}
        self.bytes_read = 0

    def told(self) -> int:
        with _lock:
            read, self.bytes_read = self.bytes_read, 0
        return read


class Text(NamedTuple):
    """A sequence in one layer: its handle in the core, its tokens there; fetch: keys and values of
    chosen pages, each [1, kv_heads, pages, page_tokens, dim]; held: of the sequence."""

    handle: _core.Handle
    tokens: int
    fetch: Callable[[Selection], tuple[Array, Array]]
    held: Held


Key = tuple[AnyChooser, int, bytes]
"""A chooser, a layer, and the ids and generations of pages: what they hold never changes."""
_runs: WeakKeyDictionary[_core.Handle, WeakValueDictionary[Key, Run]] = WeakKeyDictionary()
_held: WeakKeyDictionary[_core.Handle, Held] = WeakKeyDictionary()
"""By sequences. A fork finds the runs of its prefix here; a run goes with its last sequence."""
_lock = threading.Lock()


def _after_fork() -> None:
    """Another thread of the parent may have had the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def held_of(handle: _core.Handle) -> Held:
    """States that this process holds of a sequence."""
    with _lock:
        return _held.setdefault(handle, Held())


class UnfinishedError(Exception):
    """There was no time for all states: those that are made are kept for the next select."""


def runs_tokens(page_tokens: int) -> int:
    """Tokens of the longest runs."""
    tokens = page_tokens
    while 4 * tokens <= RUN_TOKENS_MAX:
        tokens *= 4
    return tokens


def runs_of(pages: int, page_tokens: int) -> Iterator[tuple[int, int]]:
    """[first, last) of the runs that whole pages are cut into: each a power of four long, and as
    long as its place allows. So a page that is added makes few runs anew, and sequences that share
    pages share runs."""
    first, most = 0, runs_tokens(page_tokens)
    while first < pages:
        size = 1
        while (
            4 * size * page_tokens <= most and first % (4 * size) == 0 and first + 4 * size <= pages
        ):
            size *= 4
        yield first, first + size
        first += size


def _states(
    chooser: AnyChooser,
    pool: _core.Handle,
    layout: KVLayout,
    layer: int,
    text: Text,
    pages: int,
    end_s: float,
) -> list[Arrays]:
    """States of the first `pages` pages. Raises UnfinishedError after a new state, if end_s is
    over and others are still to make.
    """
    names = _names(text, layer, 0, pages)
    with _lock:
        known = _runs.setdefault(pool, WeakValueDictionary())
    found: list[Run] = []
    held, late = text.held, False
    token_bytes = layout.stored_layer_bytes
    for first, last in runs_of(pages, layout.page_tokens):
        key = (chooser, layer, names[:, first:last].tobytes())
        with _lock:
            run = known.get(key)
        if run is None:
            if late:
                with _lock:
                    before = held.runs.get((chooser, layer), [])
                    held.runs[chooser, layer] = found + before
                raise UnfinishedError(f"states of {first} of {pages} pages are made")
            keys, values = text.fetch(same_pages(np.arange(first, last), layout.kv_heads))
            run = Run(trials.state_of(chooser, _floats(keys[0]), _floats(values[0])))
            # Another thread may have truncated the sequence before the fetch.
            if np.array_equal(_names(text, layer, first, last), names[:, first:last]):
                with _lock:
                    run = known.setdefault(key, run)
            with _lock:
                held.bytes_read += token_bytes * layout.page_tokens * (last - first)
            late = time.monotonic() > end_s
        found.append(run)
    with _lock:
        held.runs[chooser, layer] = found
    return [run.state for run in found]


def _names(text: Text, layer: int, first: int, last: int) -> npt.NDArray[np.uint64]:
    """Names of pages [first, last): id and generation, [2, pages]."""
    places = _core.sequence_places(text.handle, layer, first, last - first)
    both = np.stack([places.pages.astype(np.uint64), places.generations])
    return both[:, : last - first]


def _floats(pages: Array) -> Floats:
    """[kv_heads, pages, page_tokens, dim] -> float32 [kv_heads, tokens, dim]."""
    array = np.asarray(pages).astype(np.float32)
    return array.reshape(array.shape[0], -1, array.shape[3])


def kept_share(chooser: AnyChooser, layout: KVLayout) -> float:
    """Bytes of a chooser's states over those of K and V."""
    tokens = runs_tokens(layout.page_tokens)
    noise = np.random.default_rng(1).standard_normal
    keys = noise((1, tokens, layout.head_dim), np.float32)
    values = noise((1, tokens, layout.value_head_dim), np.float32)
    kept = sum(array.nbytes for array in trials.state_of(chooser, keys, values))
    return kept * layout.layers * layout.kv_heads / (layout.token_bytes * tokens)


# ---- select ----


class _List(NamedTuple):
    """What one list gets: of `pages` pages, `most` tokens of pages [first, last) are to be chosen;
    the other pages are in. most None: all are."""

    pages: int
    first: int
    last: int
    most: int | None


class _Listed(NamedTuple):
    """A list of each kv head: pages [kv_heads, k], -1 padded; log_weights [kv_heads, k,
    page_tokens], None: all 0; fetched: bytes of K and V of all these pages' tokens."""

    pages: npt.NDArray[np.int32]
    log_weights: Floats | None
    rows: VirtualRows | None
    fetched: int


def select(
    chooser: AnyChooser,
    pool: _core.Handle,
    layout: KVLayout,
    batch: _core.Handle,
    texts: list[Text],
    asked: Asked,
) -> Selection:
    """Choose tokens for each row, or each sequence, of a batch. A list names every page of which a
    token is chosen, and has log-weights of its tokens; a budget of n pages is that many pages'
    tokens. What the rows of a call add to a sequence is always in."""
    check_budgets(chooser, layout, asked)
    rows, number = _float_rows(layout, asked), number_of(chooser)
    asked = asked._replace(scale=float(np.float32(asked.scale)))  # as a worker has it
    try:
        made = _by_worker(number, layout, batch, texts, rows, asked)
    except BusyError as error:  # "only", and it never ends
        raise WorkerError(str(error)) from error
    if made is not None:
        return _joined(layout, *made, asked, chooser.name)
    here = asked._replace(queries=view(rows, "q"))
    return select_here(chooser, pool, layout, texts, here)


def select_here(
    chooser: AnyChooser,
    pool: _core.Handle,
    layout: KVLayout,
    texts: list[Text],
    asked: Asked,
    end_s: float = math.inf,
) -> Selection:
    """select() in this process, by arguments that were checked, queries a float32
    array [rows, q_heads, dim]. Raises UnfinishedError when the time on the monotonic clock is later
    than end_s."""
    first = asked.budgets[0]
    queries, page_tokens = _by_heads(layout, cast(Floats, asked.queries.owner)), layout.page_tokens
    made, scored = [], 0
    for at, text in enumerate(texts):
        begin, end = asked.starts[at : at + 2].tolist()
        budget = asked.budgets[at % len(asked.budgets)]
        whole = max(0, text.tokens - max(0, end - begin - 1)) // page_tokens
        states: list[Arrays] | None = None
        each = (
            [(begin, end)] if first.per == "sequence" else [(r, r + 1) for r in range(begin, end)]
        )
        for rows in each:
            tokens = text.tokens - (end - rows[1]) if begin < end else 0
            wanted = _list(budget, asked.layer, page_tokens, tokens, whole)
            choice = None
            if wanted.most:
                if states is None:
                    of = (chooser, pool, layout, asked.layer, text, whole, end_s)
                    states = _states(*of)
                own = queries[:, slice(*rows)].reshape(layout.kv_heads, -1, layout.head_dim)
                question = Question(
                    queries=np.ascontiguousarray(own),
                    scale=asked.scale,
                    tokens=whole * page_tokens,
                    first=wanted.first * page_tokens,
                    last=wanted.last * page_tokens,
                    most=wanted.most,
                    seed=hash((chooser.seed, asked.layer, tokens)) & (2**62 - 1),
                )
                choice = trials.choice_of(chooser, layout, states, question)
                scored += choice.bytes_read
            made.append(_listed(layout, tokens, wanted, choice))
    scored += sum(text.held.told() for text in texts)
    return _joined(layout, made, scored, asked, chooser.name)


def _by_worker(
    number: int,
    layout: KVLayout,
    batch: _core.Handle,
    texts: list[Text],
    queries: Floats,
    asked: Asked,
) -> tuple[list[_Listed], int] | None:
    """The lists, and the bytes read to choose; None where no worker chooses."""
    criteria = _core.Criteria(0, 0, PERS.index(asked.budgets[0].per), scorer=number)
    by = _core.criterion([budget.row(asked.layer) for budget in asked.budgets], criteria)
    made: list[_Listed] = []
    scored = first = 0
    # It makes a state, of a page or more, each time that it is asked.
    left = len(texts) + sum(text.tokens // layout.page_tokens for text in texts)
    while first < len(texts):
        ask = (batch, asked.layer, view(queries, "q"), asked.starts, by, asked.scale, first, layout)
        found = _core.batch_choose(*ask, may_wait=left > 0)
        left -= 1
        if found is None:
            return None
        if found.end == 0:
            continue
        fetched = found.bytes_fetched
        for at, pages in enumerate(found.pages):
            weights = None if found.log_weights is None else found.log_weights[at]
            of_rows = [each[at : at + 1] for each in found.rows or ()]
            made.append(
                _Listed(pages, weights, VirtualRows(*of_rows) if of_rows else None, fetched)
            )
            fetched = 0
        scored, first = scored + found.bytes_scored, found.end
    return made, scored


def check_budgets(chooser: AnyChooser, layout: KVLayout, asked: Asked) -> None:
    """Raises BadArgumentError and UnsupportedError for what a chooser cannot be asked."""
    name, budget = chooser.name, uniform(asked.budgets)
    if any(each.mass is not None for each in asked.budgets):
        raise BadArgumentError(f"method {name!r} knows no mass: give pages or a share")
    if budget.union != "kv_head":
        raise UnsupportedError(f"method {name!r} makes a list for each kv head: no union='layer'")
    if asked.layer < layout.layers and layout.windows[asked.layer] is not None:
        raise UnsupportedError(f"method {name!r} is not for layers with a window")


def try_out(chooser: AnyChooser, layout: KVLayout) -> None:
    """Have it compiled for a layout, by states and choices that are of noise: of one run, and of
    several, whose parts of an array are not contiguous. Raises BadArgumentError where it fails."""
    noise, heads = np.random.default_rng(1), layout.kv_heads
    tokens = 16 * layout.page_tokens
    keys = noise.standard_normal((heads, tokens, layout.head_dim), np.float32)
    values = noise.standard_normal((heads, tokens, layout.value_head_dim), np.float32)
    question = Question(keys[:, :1].copy(), 1.0, tokens, 0, tokens, layout.page_tokens, 1)
    try:
        for runs in (1, 4):
            parts = zip(np.split(keys, runs, axis=1), np.split(values, runs, axis=1), strict=True)
            states = [trials.state_of(chooser, k.copy(), v.copy()) for k, v in parts]
            trials.choice_of(chooser, layout, states, question)
    except BadArgumentError:
        raise
    except Exception as error:  # of anyone's code
        raise BadArgumentError(
            f"method {chooser.name!r} fails on noise, {tokens} tokens of this layout: "
            f"{type(error).__name__}: {error}"
        ) from error


def _float_rows(layout: KVLayout, asked: Asked) -> Floats:
    """The queries, float32 [rows, q_heads, dim]: a contiguous copy, which is a chooser's own. Numba
    makes other code of what cannot be written to, and that rounds otherwise."""
    check_queries(layout, asked.queries, int(asked.starts[-1]))
    given = asked.queries.owner
    if is_torch(given):
        given = given.detach().float().numpy()
    return np.array(given, np.float32, order="C").reshape(asked.queries.shape)


def _by_heads(layout: KVLayout, rows: Floats) -> Floats:
    """[rows, q_heads, dim] -> [kv_heads, rows, group, dim]"""
    group = rows.shape[1] // layout.kv_heads
    by_head = rows.reshape(len(rows), layout.kv_heads, group, layout.head_dim)
    return np.ascontiguousarray(by_head.swapaxes(0, 1))


def _list(budget: Budget, layer: int, page_tokens: int, tokens: int, whole: int) -> _List:
    """whole: pages that the states are of; those behind them are in."""
    pages = -(-tokens // page_tokens)
    wanted = budget.pages_at_most(pages, layer)
    last = max(0, min(whole, pages - budget.recent))
    first = min(budget.sinks, last)
    free = wanted - (pages - (last - first))
    if layer < budget.dense_layers or free >= last - first:
        return _List(pages, first, last, None)
    return _List(pages, first, last, page_tokens * max(0, free))


def _listed(layout: KVLayout, tokens: int, wanted: _List, choice: Choice | None) -> _Listed:
    pages, first, last, most = wanted
    heads, page_tokens = layout.kv_heads, layout.page_tokens
    weights = np.zeros((heads, pages, page_tokens), np.float32)
    if most is not None:
        weights[:, first:last] = -np.inf
    if choice is not None:
        given = choice.log_weights[:, first * page_tokens : last * page_tokens]
        weights[:, first:last] = given.reshape(heads, -1, page_tokens)
    named: npt.NDArray[np.bool_] = np.any(weights > -np.inf, axis=2)
    fetched = named.sum() * page_tokens - named[:, -1:].sum() * (pages * page_tokens - tokens)
    counts = named.sum(1, keepdims=True)
    k = int(counts.max(initial=0))
    places = np.argsort(~named, axis=1, kind="stable")[:, :k]
    numbers = np.where(np.arange(k) < counts, places, -1).astype(np.int32)
    own = None if choice is None else np.take_along_axis(weights, places[..., None], axis=1)
    rows = None
    if choice is not None and choice.rows is not None:
        rows = VirtualRows(choice.rows.k[None], choice.rows.v[None], choice.rows.log_counts[None])
    a_token = layout.stored_layer_bytes // heads
    return _Listed(numbers, own, rows, int(fetched) * a_token)


def _joined(
    layout: KVLayout, made: list[_Listed], scored: int, asked: Asked, method: str
) -> Selection:
    k = max((each.pages.shape[1] for each in made), default=0)
    pages = np.full((len(made), layout.kv_heads, k), -1, np.int32)
    weights = np.zeros((*pages.shape, layout.page_tokens), np.float32)
    for at, each in enumerate(made):
        pages[at, :, : each.pages.shape[1]] = each.pages
        if each.log_weights is not None:
            weights[at, :, : each.pages.shape[1]] = each.log_weights
    return Selection(
        pages=pages,
        scores=np.where(pages >= 0, 0, -np.inf).astype(np.float32),
        counts=(pages >= 0).sum(-1, dtype=np.int32),
        bytes_scored=scored,
        bytes_fetched=sum(each.fetched for each in made),
        per=asked.budgets[0].per,
        starts=asked.starts,
        method=method,
        log_weights=weights if any(each.log_weights is not None for each in made) else None,
        rows=joined_rows([each.rows for each in made], [1] * len(made)),
    )


def joined_rows(made: Sequence[VirtualRows | None], lists: Sequence[int]) -> VirtualRows | None:
    """Those of neighbouring lists, `lists` of them in each, as one; what a list has fewer than
    another is padded."""
    some = next((rows for rows in made if rows is not None), None)
    if some is None:
        return None
    most = max(rows.log_counts.shape[2] for rows in made if rows is not None)
    shape = (sum(lists), some.k.shape[1], most)
    k = np.zeros((*shape, some.k.shape[3]), np.float32)
    v = np.zeros((*shape, some.v.shape[3]), np.float32)
    log_counts = np.full(shape, -np.inf, np.float32)
    ends = np.cumsum(lists).tolist()
    for rows, count, end in zip(made, lists, ends, strict=True):
        if rows is not None:
            at = np.s_[end - count : end, :, : rows.log_counts.shape[2]]
            k[at], v[at], log_counts[at] = rows.k, rows.v, rows.log_counts
    return VirtualRows(k, v, log_counts)
