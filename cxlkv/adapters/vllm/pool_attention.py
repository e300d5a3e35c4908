"""A worker's side of attention in the pool: rows of requests, where K and V go, what is read.

    hear(message)            before a step: which requests ended, which start with which hit
    step(request_rows, ...)  in the step, once: its rows' sequences, each as long as it must be
    step.attend(layer, ...)  for each layer: append K and V, attend near them
    end_step()               after it: complete pages are published

Whatever goes wrong for one request breaks that request in that step only: its rows are computed
from the step's own K and V where these are all it has, else they are zeros and its request row is
in bad_blocks(), so that the engine computes it again from its first token. Nothing is published of
it then, and pages that are damaged are forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.common.sinks import beside_sinks
from cxlkv.adapters.vllm.messages import (
    KEY_BYTES,
    Message,
    Options,
    Report,
    Span,
    Started,
    unpacked,
)
from cxlkv.errors import CorruptError, CXLKVError, PoolFullError, StaleError
from cxlkv.ndp.engine import Budget, least_error
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Batch
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

Ints = npt.NDArray[np.int32]

Kind = tuple[str, ...]
"""How rows are attended: the words of a budget (union, per), which one call shares, or one of:"""
ALL: Kind = ()
MANY: Kind = ("many",)  # all pages, by Many where the layer has no window

ROWS_ALONE = 256
ROWS_MANY = 64
"""Rows of a request from which it pays to copy its pages for a kernel that is faster."""

KINDS: tuple[tuple[type[CXLKVError], str], ...] = (
    (CorruptError, "corrupt"),
    (StaleError, "stale"),
    (PoolFullError, "full"),
)


@dataclass
class Held:
    """A request of this worker."""

    name: str
    request_row: int
    options: Options
    keys: bytes = b""
    stored: int = 0  # blocks of it that the report has told of
    has_hit: bool = False
    audited: int | None = None  # the block that is to be compared with the pool's


class Steps(Protocol):
    """Makes the steps of tensors that are not in host memory."""

    def __call__(
        self,
        attention: PoolAttention,
        request_rows: Sequences[int],
        starts: Ints,
        lengths: Sequences[int],
    ) -> Step: ...

    def capture(self) -> None: ...

    def replayed(self, layer: int, given: Rows, scores: Scores) -> None: ...

    def counts(self) -> dict[str, int]: ...

    def reopened(self, pool: CXLPool) -> None: ...

    def close(self) -> None: ...


class PoolAttention:
    """The requests of one worker over its pool.

    layers: the engine's names of the pool's layers, in order. block_tokens: of the engine's keys,
    whole pages. rank: of this worker; number: of its pool, by which a message's handles are told
    apart. has_peers: there are other ranks; shares: they have the same in this pool. decode_rows: a
    request that has tokens and brings at most so many more is decoding, which is what budgets are
    for. method: as in Batch.select. steps: makes a Step; None: of tensors in host memory. many:
    attends for many rows of one request, where that is faster than the pool. tiers: of the pool,
    closed with this, as steps are; None: such that evict only. quota: of the same tiers.
    """

    def __init__(
        self,
        pool: CXLPool,
        layers: Sequences[str],
        *,
        block_tokens: int,
        rank: int = 0,
        number: int = 0,
        has_peers: bool = False,
        shares: bool = False,
        decode_rows: int = 1,
        method: str = "auto",
        steps: Steps | None = None,
        many: Many | None = None,
        tiers: Tiers | None = None,
        quota: Quota | None = None,
    ):
        self.pool, self.tiers = pool, tiers or Tiers(pool)
        self.layers = {name: place for place, name in enumerate(layers)}
        self.requests = PoolRequests(pool, self.tiers, quota)
        self.decode_rows = decode_rows
        self.method = method
        self.block_tokens, self.has_peers = block_tokens, has_peers
        self._rank, self._number = rank, number
        self._shares = shares
        self._unpublished: list[Held] = []  # of the last step, until all ranks have said how it was
        self._held: dict[str, Held] = {}
        self.by_request_row: dict[int, Held] = {}
        self._steps = steps
        self._planned: tuple[Sequences[int], Ints, Sequences[int]] | None = None
        self.many = many
        self._step: Step | None = None
        self._failed: set[int] = set()
        self._batches: dict[tuple[str, ...], Batch] = {}  # of the last step, to be used again
        self._report, self._told = Report(), Counter[str]()

    def reopened(self, pool: CXLPool, tiers: Tiers | None = None) -> None:
        """Go on in a new pool, between two steps: the one before was lost, with K and V of all
        requests. They are empty here, so that the next step fails for those that have tokens, and
        the engine computes them again."""
        self.pool, self.tiers = pool, tiers or Tiers(pool)
        self.requests.reopened(pool, self.tiers)
        self._batches.clear()
        self._unpublished = []
        for held in self._held.values():
            self._load(held, None, 0)
        if self._steps is not None:
            self._steps.reopened(pool)

    # ---- a step ----

    def plan(self, request_rows: Sequences[int], starts: Ints, lengths: Sequences[int]) -> None:
        """Say what the next step's rows are, before its message: as in step(). A device begins it
        then, as its layers may be a graph, which asks for no step."""
        self._planned = None if self._steps is None else (request_rows, starts, lengths)

    def capture(self) -> None:
        """What comes are layers of a graph, or of a replay of one that stands for no step."""
        self._planned = None
        if self._steps is not None:
            self._steps.capture()

    def replayed(self, layer: int, given: Rows, scores: Scores) -> None:
        """A layer of a graph, after capture()."""
        assert self._steps is not None, "get_cudagraph_support() says where graphs are"
        self._steps.replayed(layer, given, scores)

    def hear(self, message: Message) -> None:
        self._step, self._failed = None, set()
        self.stop_saving(message.unshared)
        self.requests.withdraw(*message.withdrawn)
        for own in self._unpublished:
            if own.options.save and own.name not in message.broken:
                self._publish(own)
        self._unpublished = []
        for name in message.ended:
            self._release(name)
        self._report.ended += message.ended
        for started in message.started:
            self._start(started)
        for continued in message.continued:
            held = self._held.get(continued.request)
            if held is not None:
                held.keys += continued.keys
        if self._planned is not None:
            planned, self._planned = self._planned, None
            self.step(*planned)

    def _start(self, started: Started) -> None:
        self._release(started.request)
        ((request_row,),) = started.blocks  # one group, and one block of a request (blocks.py)
        held = Held(started.request, request_row, started.options, started.keys)
        handle = started.handles[self._number] if started.handles else None
        # Without its hit the sequence is shorter than the step wants it: a failure, seen there.
        # Pages are verified when attention reads them.
        self._load(held, handle, started.tokens)
        held.has_hit = held.stored > 0
        held.audited = held.stored if started.audit and held.has_hit else None
        self._held[held.name] = held
        self.by_request_row[held.request_row] = held
        try:
            self.requests.brought(started.brought_keys(self.block_tokens))
        except CXLKVError as error:
            self.count(error)

    def _load(self, held: Held, handle: bytes | None, tokens: int) -> None:
        held.stored = 0
        try:
            there = self.requests.load(held.name, handle, tokens, verify=False)
        except CXLKVError as error:  # the step finds no sequence
            self.count(error)
            return
        held.stored = there // self.block_tokens

    def _release(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None and self.by_request_row.get(held.request_row) is held:
            del self.by_request_row[held.request_row]
        if held is not None and held.options.priority:  # before it lets go of its pages
            self._prioritize(held)
        self.requests.release(name)

    def _prioritize(self, held: Held) -> None:
        """Prioritize all pages of its text that the pool has, whichever engine stored them."""
        try:
            self.requests.prioritize(self._keys(held), held.options.priority)
        except CXLKVError as error:
            self.count(error)

    def step(self, request_rows: Sequences[int], starts: Ints, lengths: Sequences[int]) -> Step:
        """The step that is under way: rows [starts[i], starts[i + 1]) are of request row i, whose
        text has lengths[i] tokens with these. One for all layers."""
        if self._step is None:
            self._step = (self._steps or Step)(self, request_rows, starts, lengths)
            self._failed = self._step.failed
        return self._step

    def bad_blocks(self) -> set[int]:
        """Request rows whose output in the last step is not to be used; asked for before or after
        end_step()."""
        if self._step is not None:
            self._step.settle()
        return self._failed

    def end_step(self) -> None:
        """Publish what is complete, mend what broke."""
        step, self._step = self._step, None
        if step is not None:
            step.settle()
        if step is not None and 0 < step.layers < self.pool.layout.layers:
            step.fill()
        there = [
            (place, held)
            for place, held in enumerate(step.held if step is not None else ())
            if held is not None and self._held.get(held.name) is held
        ]
        broken = {} if step is None else step.broken
        if not all(self._is_right(held) for place, held in there if place not in broken):
            self._doubt()
            return
        for place, held in there:
            if place in broken:
                if isinstance(broken[place], CorruptError):
                    self._forget(held)
                self._empty(held)
            elif held.options.save and self.has_peers:
                self._unpublished.append(held)
            elif held.options.save:
                self._publish(held)
        self._report.broken += [one.name for one in self._held.values() if self._has_failed(one)]

    def drop_step(self) -> None:
        """The engine has raised in the step: nothing of it is published."""
        if self._step is not None:
            self._step.drop()
        self._step = None

    def _has_failed(self, held: Held) -> bool:
        return held.request_row in self._failed

    def _empty(self, held: Held) -> None:
        """The engine begins again."""
        self.requests.release(held.name)
        self._load(held, None, 0)
        held.has_hit, held.audited = False, None

    def _doubt(self) -> None:
        """The pool has a page that is not what its key says. Requests with a hit begin again, and
        no running request is published."""
        self.stop_saving()
        for held in self._held.values():
            if held.has_hit:
                self._failed.add(held.request_row)
                self._empty(held)

    def _is_right(self, held: Held) -> bool:
        """Whether its audit, if there is one and its block is computed, finds no wrong page."""
        block, sequence = held.audited, self.requests.sequences.get(held.name)
        if block is None or sequence is None:
            return True
        keys = self._keys(held)
        if min(len(keys), len(sequence) // self.block_tokens) <= block:
            return True
        held.audited, self._report.audited = None, self._report.audited + 1
        place = block * self.block_tokens // self.pool.layout.page_tokens
        return self.requests.audit(keys[: block + 1], sequence, place)

    def stop_saving(self, names: Iterable[str] | None = None) -> None:
        """Publish no more of these requests. None: of all, as K and V are not those that their keys
        name."""
        for name in list(self._held if names is None else names):
            if name in self._held:
                held = self._held[name]
                held.options, held.audited = replace(held.options, save=False), None

    def tell_weights(self, state: bytes) -> None:
        self._report.weights[self._rank] = state

    def report(self) -> Report:
        """What happened since the last one."""
        report, self._report = self._report, Report()
        failures = self.requests.failures()
        report.failures = failures - self._told
        self._told = failures
        return report

    def device_counts(self) -> dict[str, int]:
        """What a device has counted since this was made, between two steps; waits for it."""
        return {} if self._steps is None else self._steps.counts()

    def close(self) -> None:
        """Give all requests' pages back, and close the pool."""
        for name in list(self._held):
            self._release(name)
        if self._steps is not None:
            self._steps.close()
        self.tiers.close()
        self.pool.close()

    # ---- no-ops here; engine_attention copies K and V ----

    def start_loads(self) -> None:
        """A hit is adopted when it is heard of."""

    def wait_for_layer(self, name: str) -> None:
        """Attention reads the pool itself."""

    def save_layer(self, name: str) -> None:
        """Attention has appended K and V."""

    def finished(self) -> set[str]:
        return set()

    # ---- publishing ----

    def _publish(self, held: Held) -> None:
        """Hashes are of text that is sure: speculated tokens have none before they are accepted."""
        try:
            there = len(self.requests.sequences[held.name]) // self.block_tokens
            blocks = min(there, len(held.keys) // KEY_BYTES)
            if blocks <= held.stored:
                return
            self.requests.store(held.name, self._keys(held)[:blocks])
        except CXLKVError as error:
            self.count(error)
            return
        if self.requests.stored(held.name) < blocks * self.block_tokens:  # the quota refused it
            held.options = replace(held.options, save=False)
            return
        self._report.stored.append(Span(held.name, held.stored, blocks))
        held.stored = blocks
        if self._shares and len(self.requests.sequences[held.name]) == blocks * self.block_tokens:
            self._join(held)

    def _join(self, held: Held) -> None:
        """Go on from the pages that are published, whichever rank wrote them, and let go of those
        that this one wrote beside them."""
        try:
            with self.requests.match(self._keys(held)[: held.stored]) as hit:
                if hit.tokens == held.stored * self.block_tokens:
                    self.requests.release(held.name)
                    self._load(held, hit.handle, hit.tokens)
        except CXLKVError as error:
            self.count(error)

    def _keys(self, held: Held) -> PageKeys:
        return unpacked(held.keys, self.block_tokens)

    # ---- failures ----

    def _forget(self, held: Held) -> None:
        """Forget its damaged pages."""
        try:
            self.requests.mend(self._keys(held))
        except CXLKVError as error:
            self.count(error)

    def count(self, error: CXLKVError) -> None:
        self.requests.fail(kind_of(error), error)

    def batch(self, held: Sequences[Held]) -> Batch:
        """The same requests' batch as in the step before, where there is one."""
        names = tuple(one.name for one in held)
        sequences = [self.requests.sequences[name] for name in names]
        found = self._batches.get(names)
        if found is None or any(
            a is not b for a, b in zip(found.sequences, sequences, strict=True)
        ):
            if len(self._batches) > 8:
                self._batches.clear()
            found = self._batches[names] = self.pool.batch(sequences)
        return found


@dataclass(frozen=True)
class Scores:
    """How logits are made: softcap 0 is none. window: of the layer, None sees all. sinks: [heads],
    logits that take weight and have no value."""

    scale: float
    softcap: float = 0.0
    window: int | None = None
    sinks: torch.Tensor | None = None


class Rows(NamedTuple):
    """A layer's rows of a step, and where their attention is written. There may be more behind
    them, of no request. v: None where values are the first channels of k."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    out: torch.Tensor


@dataclass(frozen=True)
class Group:
    """Rows of a step that go through one call."""

    places: list[int]
    rows: slice[int, int] | torch.Tensor
    starts: Ints
    batch: Batch
    kind: Kind
    budgets: list[Budget]  # of each place, where they are what chooses
    method: str

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor | None) -> None:
        values = None if v is None else v[self.rows]
        self.batch.append(layer, k[self.rows], values, self.starts)

    def decode(self, layer: int, given: Rows, scores: Scores) -> None:
        """append() and attend() in one call; its rows of out."""
        q, k, v, out = given
        there = None
        if isinstance(self.rows, slice) and out.dtype == q.dtype:
            rows = out if self.rows == slice(0, len(out)) else out[self.rows]
            there = rows if rows.is_contiguous() else None
        if self.rows != slice(0, len(q)):  # most steps are of one group, which has all rows
            q, k = q[self.rows], k[self.rows]
            v = None if v is None else v[self.rows]
        found = self.batch.decode(
            layer,
            q,
            k,
            v,
            self.starts,
            self.budgets or None,
            self.method,
            scores.scale,
            scores.softcap or None,
            out=there,
        )
        if there is None or scores.sinks is not None:
            sums = torch.as_tensor(found.lse)
            out[self.rows] = beside_sinks(torch.as_tensor(found.out), sums, scores.sinks)

    def attend(
        self, layer: int, q: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend for its rows of q: (out, lse)."""
        queries, scale, picked = q[self.rows], scores.scale, None
        if any(budget.chooses(layer) for budget in self.budgets):
            asked = (layer, queries, self.starts, self.budgets, self.method, scale)
            picked = self.batch.select(*asked)
        softcap = scores.softcap or None
        error = least_error(self.budgets)
        out, lse = self.batch.attend(layer, queries, self.starts, picked, scale, softcap, error)
        return torch.as_tensor(out), torch.as_tensor(lse)


class Step:
    """The rows of one step; attend() is called for layer after layer."""

    def __init__(
        self,
        attention: PoolAttention,
        request_rows: Sequences[int],
        starts: Ints,
        lengths: Sequences[int],
    ):
        self._attention, self.request_rows = attention, list(request_rows)
        self.held = [attention.by_request_row.get(request_row) for request_row in request_rows]
        self.starts = np.asarray(starts, np.int32)
        rows, self._rows_end = np.diff(self.starts), int(self.starts[-1])
        self.computed = [int(n - r) for n, r in zip(lengths, rows, strict=True)]
        self.broken: dict[int, CXLKVError] = {}
        self.failed: set[int] = set()
        self.layers = 0  # that have K and V of the step
        self._places = [place for place, one in enumerate(self.held) if one and rows[place]]
        for place in self._places:
            self._align(place)
        self._groups = self._plan()

    def _align(self, place: int) -> None:
        """A sequence that ends where this step begins; what was rejected since is cut off."""
        held, wanted = self._of(place), self.computed[place]
        requests = self._attention.requests
        try:
            there = len(requests.sequences[held.name]) if held.name in requests.sequences else -1
            if there < wanted:
                raise StaleError(f"{held.name}: the pool has {max(there, 0)} of {wanted} tokens")
            if there > wanted:
                requests.truncate(held.name, wanted)
                held.stored = min(held.stored, wanted // self._attention.block_tokens)
        except CXLKVError as error:
            self._break(place, error)

    def _of(self, place: int) -> Held:
        held = self.held[place]
        assert held is not None
        return held

    def _plan(self) -> list[Group]:
        """Group rows by how they are attended to: one call has one kind."""
        kinds: dict[Kind, list[int]] = {}
        for place in self._sound():
            kinds.setdefault(self._kind(place), []).append(place)
        return [self._group(places, kind) for kind, places in kinds.items()]

    def _sound(self) -> list[int]:
        return [place for place in self._places if place not in self.broken]

    def _kind(self, place: int) -> Kind:
        budget = self._of(place).options.budget
        decodes = 0 < self._count(place) <= self._attention.decode_rows and self.computed[place] > 0
        if budget is not None and decodes:
            return (budget.union, budget.per)
        many = self._attention.many is not None and self._count(place) >= ROWS_MANY
        return MANY if many else ALL

    def _count(self, place: int) -> int:
        return int(self.starts[place + 1] - self.starts[place])

    def _group(self, places: list[int], kind: Kind) -> Group:
        held = [self._of(place) for place in places]
        budgets = [one.options.budget for one in held if one.options.budget is not None]
        rows = np.diff(self.starts)[places]
        return Group(
            places=places,
            rows=self._rows(places),
            starts=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
            batch=self._attention.batch(held),
            kind=kind,
            budgets=budgets if kind not in (ALL, MANY) else [],
            method=self._attention.method,
        )

    def _rows(self, places: list[int]) -> slice[int, int] | torch.Tensor:
        """A view where the places are neighbours, as they are in most steps."""
        if places[-1] - places[0] == len(places) - 1:
            return slice(int(self.starts[places[0]]), int(self.starts[places[-1] + 1]))
        spans = [np.arange(self.starts[place], self.starts[place + 1]) for place in places]
        return torch.from_numpy(np.concatenate(spans).astype(np.int64))

    def attend(self, layer: int, given: Rows, scores: Scores, is_shared: bool = False) -> None:
        """Append k and v, and write attention of q to out. is_shared: another layer of the model
        has appended what this one attends to."""
        q, k, v, out = given
        self.layers = max(self.layers, layer + 1)
        if len(out) > self._rows_end:
            out[self._rows_end :] = 0

        def attend(group: Group) -> None:
            if group.kind == MANY and scores.window is None:
                self._attend_many(group, layer, q, out, scores)
            else:
                found, sums = group.attend(layer, q, scores)
                out[group.rows] = beside_sinks(found, sums, scores.sinks)

        def decode(group: Group) -> None:
            if group.kind != MANY or scores.window is not None:
                group.decode(layer, given, scores)
                return
            group.append(layer, k, v)
            try:
                attend(group)
            except CXLKVError as error:
                error.appended = True
                raise

        self._each(self._groups, *((attend,) if is_shared else (decode, attend)))
        if len(self._places) == len(self.held) and not self.broken:
            return
        if not is_shared:
            values = k[..., : out.shape[2]] if v is None else v
            for place, held in enumerate(self.held):
                if held is not None and place in self.broken and not self.computed[place]:
                    rows = self._rows([place])
                    out[rows] = attend_alone(q[rows], k[rows], values[rows], scores)
        self._fill_failed(out, is_shared)

    def settle(self) -> None:
        """Wait for what layers have begun, and break what went wrong in it: nothing, as layers
        wait for the host."""

    def drop(self) -> None:
        """Let go of what it holds: it does not end."""

    def fill(self) -> None:
        """Append zeros to the layers that the step left out. Near the longest text the engine skips
        its drafter, but a sequence has each token in all layers. Drafts get worse, tokens do not,
        and the pages are not published."""
        for layer in range(self.layers, self._attention.pool.layout.layers):
            of = self._attention.pool.layout.of_layer(layer)
            k, rows = (
                torch.zeros(self._rows_end, of.kv_heads, dim, dtype=getattr(torch, of.dtype))
                for dim in (of.head_dim, of.value_head_dim)
            )
            v = rows if of.values == "own" else None
            self._each(self._groups, partial(Group.append, layer=layer, k=k, v=v))
        self._attention.stop_saving(one.name for one in self.held if one is not None)

    def _attend_many(
        self, group: Group, layer: int, q: torch.Tensor, out: torch.Tensor, scores: Scores
    ) -> None:
        many = self._attention.many
        assert many is not None
        for place, sequence in zip(group.places, group.batch.sequences, strict=True):
            rows = slice(int(self.starts[place]), int(self.starts[place + 1]))
            tokens = sequence.tokens(layer)
            keys, values = (tokens_of(one, tokens) for one in sequence.fetch(layer))
            out[rows] = many(q[rows], keys, values, scores)

    def _each(
        self,
        groups: list[Group],
        work: Callable[[Group], None],
        rest: Callable[[Group], None] | None = None,
    ) -> None:
        """A call for a group; when that fails, one by one, to find out whose failure it is. rest:
        what is left to do after an error that says that the tokens were appended."""
        before = len(self.broken)
        for group in groups:
            try:
                work(group)
            except CXLKVError as error:
                left = rest if rest is not None and error.appended else work
                self._one_by_one(group, left, error)
        if len(self.broken) > before:
            self._groups = self._plan()

    def _one_by_one(self, group: Group, work: Callable[[Group], None], error: CXLKVError) -> None:
        if len(group.places) == 1:
            self._break(group.places[0], error)
            return
        for place in group.places:
            single = self._group([place], group.kind)
            try:
                work(single)
            except CXLKVError as its:
                self._break(place, its)

    def _break(self, place: int, error: CXLKVError) -> None:
        self.broken[place] = error
        self._attention.count(error)

    def _fill_failed(self, out: torch.Tensor, is_shared: bool = False) -> None:
        """Zero the rows of unknown requests and of requests whose pages are lost: of a first chunk
        only a layer with K and V of its own has more than these."""
        for place, held in enumerate(self.held):
            has_own = not self.computed[place] and not is_shared
            lost = held is None or (place in self.broken and not has_own)
            if lost and self._count(place):
                out[self._rows([place])] = 0
                self.failed.add(self.request_rows[place])


def tokens_of(pages: object, tokens: int) -> torch.Tensor:
    """[kv_heads, pages, page_tokens, dim] as [tokens, kv_heads, dim]."""
    return torch.as_tensor(pages).flatten(1, 2)[:, :tokens].transpose(0, 1)


def attend_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Attention of a whole text over itself, [rows, heads, dim], in float32; some rows at once."""
    rows, heads, _ = q.shape
    kv_heads = k.shape[1]
    queries = q.float().reshape(rows, kv_heads, heads // kv_heads, -1)
    keys, values, places = k.float(), v.float(), torch.arange(rows)
    found = torch.empty((rows, heads, v.shape[2]), dtype=q.dtype)
    for first in range(0, rows, ROWS_ALONE):
        some = slice(first, min(first + ROWS_ALONE, rows))
        logits = torch.einsum("qhgd,khd->hgqk", queries[some], keys) * scores.scale
        if scores.softcap:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        behind = places[some, None] - places[None]
        unseen = behind < 0
        if scores.window is not None:
            unseen |= behind >= scores.window
        logits = logits.masked_fill(unseen, -torch.inf)
        mixed = torch.einsum("hgqk,khd->qhgd", logits.softmax(-1), values)
        sums = logits.logsumexp(-1).permute(2, 0, 1).reshape(-1, heads)
        found[some] = beside_sinks(mixed.reshape(-1, heads, v.shape[2]), sums, scores.sinks)
    return found


Many = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scores], torch.Tensor]
"""Attention of q [rows, heads, dim], a text's last tokens, to k and v of all of them."""


def kind_of(error: CXLKVError) -> str:
    return next((name for kind, name in KINDS if isinstance(error, kind)), "other")
