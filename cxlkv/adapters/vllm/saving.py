"""A thread saves what a device has copied to host memory: it appends and publishes.

The worker says what is to be saved when it has begun the copies, and goes on. It counts on that: of
what could not be saved it hears later, and saves no more of that request, or saves it again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.adapters.common.metrics import LOST
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.vllm.device_blocks import Staged
from cxlkv.adapters.vllm.device_states import StagedStates
from cxlkv.adapters.vllm.messages import Span, unpacked
from cxlkv.errors import CXLKVError, MemoryShortError, PoolFullError
from cxlkv.gpu import streams
from cxlkv.machine import lifetime
from cxlkv.pool import CXLPool
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

log = logging.getLogger("cxlkv")


class Ring:
    """Host memory for copies, given back in the order in which it was taken. Any thread may."""

    def __init__(self, size: int, device: torch.device):
        try:
            self._memory = streams.pinned(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise MemoryShortError(
                f"cxlkv: this host gives no {size} bytes of pinned memory for blocks on their way "
                f"from {device}: free some, raise the container's limit, or start vLLM with fewer "
                f"--max-num-batched-tokens ({error})"
            ) from error
        self._taken: deque[range] = deque()
        self._lock = threading.Lock()
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """The most that take() has now."""
        with self._lock:
            return max(len(free) for free in self._free())

    def _free(self) -> tuple[range, range]:
        """Behind what was taken last, and before what was taken first."""
        size = self._memory.numel()
        if not self._taken:
            return range(size), range(0)
        first, end = self._taken[0].start, self._taken[-1].stop
        if self._taken[-1].start < first:
            return range(end, first), range(0)
        return range(end, size), range(first)

    def take(self, size: int) -> torch.Tensor | None:
        """None: there is no room now."""
        with self._lock:
            found = next((free for free in self._free() if len(free) >= size), None)
            if found is None:
                return None
            own = range(found.start, found.start + size)
            self._taken.append(own)
            return self._memory[own.start : own.stop]

    def give_back(self) -> None:
        with self._lock:
            self._taken.popleft()


@dataclass(frozen=True)
class SavedText:
    """Units [first, end) of a request's text; keys: of all up to there. tail: tokens of the last
    one, where it is not a whole unit."""

    name: str
    keys: bytes
    first: int
    end: int
    tail: int = 0


@dataclass
class Save:
    """What is saved together. starts: by group, of each text's blocks in all layers of it; rewind:
    as in Batch.append(). layers: in order."""

    texts: list[SavedText]
    starts: list[npt.NDArray[np.int32]]
    rewind: int
    memory: torch.Tensor
    layers: list[Staged] = field(default_factory=list)
    place: int = 0  # in memory, of the next layer
    numbers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # of blocks, by kind

    def part(self, size: int) -> torch.Tensor:
        self.place += size
        return self.memory[self.place - size : self.place]


@dataclass
class Outcome:
    """What has become of saves. dropped: requests of which no more is to be saved; gaps: units of a
    request that are in the pool, where those that were to follow cannot."""

    stored: list[Span] = field(default_factory=list)
    tails: dict[str, int] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    gaps: dict[str, int] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)


class Saver:
    """The thread of one pool. groups: the group of each layer; ratios: blocks of a unit, by group.
    tiers, quota: of the pool. threaded: else work() does what was submitted."""

    def __init__(
        self,
        pool: CXLPool,
        tiers: Tiers,
        quota: Quota | None,
        ring: Ring,
        *,
        unit: int,
        groups: Sequences[int],
        ratios: Sequences[int],
        threaded: bool = True,
    ):
        self._pool, self._ring, self._unit = pool, ring, unit
        self._groups, self._ratios = groups, ratios
        self._requests = PoolRequests(pool, tiers, quota)
        self._units: dict[str, int] = {}  # of a request's text that are in the pool
        self._ends = Counter[str]()  # that were submitted, by name
        self._cancelled: dict[str, int] = {}  # by name: ends of others that had it before
        self._outcome, self._told = Outcome(), Counter[str]()
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_working = self._ended = self._lost = False
        self._thread: threading.Thread | None = None
        self._threaded = threaded
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        self._changed, self._thread = threading.Condition(), None
        self._is_working = False
        self._waiting.clear()
        self._ends.clear()

    # ---- the worker's thread ----

    def submit(self, save: Save) -> None:
        self._put(partial(self._save, save))

    def submit_states(self, text: SavedText, staged: StagedStates | None, ring: Ring) -> None:
        """The checkpoint behind a text, if there is one; ring: that its memory goes back to."""
        self._put(partial(self._save_states, text, staged, ring))

    def end(self, name: str, keys: bytes, priority: int) -> None:
        """The request has ended: behind what was submitted of it."""
        with self._changed:
            self._ends[name] += 1
        self._put(partial(self._end, name, keys, priority))

    def cancel(self, names: Iterable[str]) -> None:
        """Publish nothing more of these, also of what was submitted."""
        with self._changed:
            self._cancelled.update((name, self._ends[name]) for name in names)

    def reopened(self, pool: CXLPool, tiers: Tiers) -> None:
        self._put(partial(self._reopen, pool, tiers))

    def is_lost(self) -> bool:
        """Whether saves are in vain, as the pool was lost and is not open again yet."""
        if self._lost:
            try:
                self._pool.admin.hosts()
            except LOST:
                return True
            except CXLKVError:  # a pool of one host, which has no others
                pass
            self._lost = False
        return False

    def take(self) -> Outcome:
        """What has happened since the last call."""
        with self._changed:
            found, self._outcome = self._outcome, Outcome()
            counts = self._requests.failures()
            found.failures, self._told = counts - self._told, counts
        return found

    def wait(self) -> None:
        """Until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_working)

    def close(self) -> None:
        """Save what was submitted, and end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for name in list(self._requests.sequences):
            self._requests.release(name)

    def _put(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.append(work)
            if self._threaded and self._thread is None:
                thread = threading.Thread(target=self._run, name="cxlkv-saves", daemon=True)
                with suppress(RuntimeError):  # no thread to be had now; the next call tries again
                    thread.start()
                    self._thread = thread
            self._changed.notify_all()

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
            self.work()

    def work(self) -> None:
        """Do what was submitted first, if anything was."""
        with self._changed:
            if not self._waiting:
                return
            work, self._is_working = self._waiting.popleft(), True
        try:
            work()
        except Exception:  # without the thread nothing would be saved any more
            log.exception("a save failed")
        finally:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()

    def _save(self, save: Save) -> None:
        try:
            for staged in save.layers:  # also of what is not wanted any more: it is written to
                staged.done.synchronize()
            wanted = [(place, saved) for place, saved in self._missing(save.texts)]
            for place, saved in self._written(save, wanted):
                self._publish(save.texts[place], saved)
        finally:
            self._ring.give_back()

    def _missing(self, texts: list[SavedText]) -> list[tuple[int, int]]:
        """Texts, by place, that the pool does not have whole, and how many units it has."""
        found = list[tuple[int, int]]()
        for place, text in enumerate(texts):
            if self._is_cancelled(text.name):
                continue
            try:
                saved = self._adopt(text)
            except CXLKVError as error:
                self._fail("save", error)
                saved = self._units.get(text.name, 0)
            if saved < text.first:
                with self._changed:
                    self._outcome.gaps[text.name] = saved
            elif saved < text.end and text.name in self._requests.sequences:
                found.append((place, saved))
        return found

    def _adopt(self, text: SavedText) -> int:
        """Adopt what the pool has of the text, whichever engine stored it; how many units."""
        name, known = text.name, self._units.get(text.name)
        if known is None or text.end - known > 1:
            keys = unpacked(text.keys, self._unit)[: text.end]
            with self._pool.match(keys) as hit:
                if known is None or hit.tokens > known * self._unit:
                    self._requests.release(name)
                    got = self._requests.load(name, hit.handle, hit.tokens, verify=False)
                    known = self._units[name] = got // self._unit
        return known

    def _written(
        self, save: Save, wanted: list[tuple[int, int]], is_told: bool = False
    ) -> list[tuple[int, int]]:
        """Of the texts those that were appended. is_told: that the pool is full."""
        if not wanted:
            return []
        try:
            self._append(save, wanted)
        except CXLKVError as error:
            is_full = isinstance(error, PoolFullError)
            if not is_full or not is_told:
                self._fail("full" if is_full else "save", error)
            if is_full and len(wanted) > 1:  # nothing was written; some may fit alone
                return [one for each in wanted for one in self._written(save, [each], True)]
            for place, _ in wanted:
                self._let_go(save.texts[place].name, for_good=is_full)
            return []
        return wanted

    def _append(self, save: Save, wanted: list[tuple[int, int]]) -> None:
        texts = [save.texts[place] for place, _ in wanted]
        batch = self._pool.batch([self._requests.sequences[text.name] for text in texts])
        blocks, starts = list[npt.NDArray[np.int32]](), list[npt.NDArray[np.int32]]()
        for all_starts, ratio in zip(save.starts, self._ratios, strict=True):
            some = [
                np.arange(
                    all_starts[place] + (saved - save.texts[place].first) * ratio,
                    all_starts[place + 1],
                    dtype=np.int32,
                )
                for place, saved in wanted
            ]
            blocks.append(np.concatenate(some))
            starts.append(np.cumsum([0, *map(len, some)], dtype=np.int32))
        for layer, staged in enumerate(save.layers):
            group = self._groups[layer]
            staged.append(batch, layer, blocks[group], starts[group], save.rewind)

    def _publish(self, text: SavedText, saved: int) -> None:
        name, keys = text.name, unpacked(text.keys, self._unit)[: text.end]
        if self._is_cancelled(name):
            self._let_go(name)
            return
        try:
            self._requests.store(name, keys)
        except CXLKVError as error:
            self._fail("save", error)
            self._let_go(name, for_good=True)
            return
        if self._requests.stored(name) < text.end * self._unit:  # the quota refused it
            self._let_go(name, for_good=True)
            return
        self._units[name] = text.end
        whole = text.end - bool(text.tail)
        with self._changed:
            if whole > saved:
                self._outcome.stored.append(Span(name, saved, whole))
            if text.tail:
                self._outcome.tails[name] = text.tail

    def _save_states(self, text: SavedText, staged: StagedStates | None, ring: Ring) -> None:
        """If the pages of the text are saved."""
        try:
            if staged is None:
                return
            found = staged.read()  # also where it is not wanted: its memory is written to
            if self._units.get(text.name, 0) < text.end or self._is_cancelled(text.name):
                return
            self._requests.store_states(text.name, unpacked(text.keys, self._unit), found)
        except CXLKVError as error:
            self._fail("full" if isinstance(error, PoolFullError) else "save", error)
        finally:
            ring.give_back()

    def _let_go(self, name: str, for_good: bool = False) -> None:
        """What was appended goes; a later save finds what is published."""
        self._requests.release(name)
        self._units.pop(name, None)
        if for_good:
            with self._changed:
                self._outcome.dropped.add(name)

    def _fail(self, kind: str, error: CXLKVError) -> None:
        self._lost = self._lost or isinstance(error, LOST)
        self._requests.fail(kind, error)

    def _is_cancelled(self, name: str) -> bool:
        with self._changed:
            return name in self._cancelled

    def _end(self, name: str, keys: bytes, priority: int) -> None:
        try:
            if priority:
                self._requests.prioritize(unpacked(keys, self._unit), priority)
        except CXLKVError as error:
            self._fail("save", error)
        self._let_go(name)
        with self._changed:
            self._ends -= Counter([name])
            before = self._cancelled.pop(name, 0)
            if before:  # another request has the name now
                self._cancelled[name] = before - 1

    def _reopen(self, pool: CXLPool, tiers: Tiers) -> None:
        self._pool = pool
        self._requests.reopened(pool, tiers)
        self._units.clear()
