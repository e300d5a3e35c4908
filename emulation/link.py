"""An emulated link: a pool's transfers take as long as over the link of a named device.

    with emulate(pool, "astera-a1000"):           # waits for the rest of the device's time
    with emulate(pool, "astera-a1000", mode="virtual") as link:  # only counts it: link.seconds

docs/explanation/emulation.md says what is charged and what the model leaves out.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from cxlkv import _core, _io_hooks
from cxlkv._io_hooks import Kind
from cxlkv.arrays import Tokens
from cxlkv.emulation import profiles
from cxlkv.emulation.profiles import Profile
from cxlkv.emulation.sharing import GB, Transfer, check_devices, share_out
from cxlkv.errors import BadArgumentError, ClosedError
from cxlkv.layout import KVLayout
from cxlkv.machine import lifetime, numa_mode
from cxlkv.ndp.engine import Selection
from cxlkv.pool import Pool

__all__ = ["emulate"]

WRITES = ("append", "restore")
"""The kinds that write to the pool; all others read it."""
Mode = Literal["wait", "virtual"]
MODES: Mapping[str, Mode] = {"wait": "wait", "virtual": "virtual"}
SPIN_S = 150e-6
"""The last part of a wait is spent looking at the clock: a sleep ends late by so much."""


class Link:
    """What charges operations to one link; one or several pools lie behind it.

    "wait": an operation of this process that was faster than the device takes the rest of the time;
    those of several threads share the link. One that was slower takes no longer, and is counted in
    late_operations: where there are many of these, times are this machine's, not the device's.

    "virtual": nothing waits. `seconds` is a clock of its own, moved on by each operation in the
    order in which they end, one after the other; only sizes and order move it, so the same work
    gives the same time everywhere. sharing.simulate() has streams side by side.
    """

    def __init__(
        self, name: str, profile: Profile, mode: Mode = "wait", devices: int = 1, slow: float = 1.0
    ):
        check_devices(devices)
        self.profile, self.mode, self.devices = profile.slowed(slow), mode, devices
        extra = f" on {devices} devices" if devices > 1 else ""
        extra += f" slowed {slow:g} times" if slow != 1 else ""
        self.label = f"{name}{extra}, {mode}"
        self.seconds = 0.0  # by the model
        self.waited_s = 0.0
        self.operations: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._of_pool: WeakKeyDictionary[_core.Handle, Counter[bool]] = WeakKeyDictionary()
        self.late_operations = 0
        self._lock = threading.Condition()
        self._moving: list[Transfer] = []
        self._at_s = 0.0  # up to when `left_bytes` are right
        lifetime.watch(self)

    def alone_s(self, size_bytes: int, write: bool = False) -> float:
        """Seconds of one operation on an idle link."""
        rate = GB * self.profile.gb_per_s(float(write), self.devices)
        return self.profile.latency_ns / GB + size_bytes / rate

    def heard(
        self, kind: Kind, size_bytes: int, began_s: float, pool: _core.Handle | None = None
    ) -> None:
        """Charge an operation, on this pool, that has just ended; began_s: by
        time.perf_counter()."""
        write = kind in WRITES
        with self._lock:
            self.operations[kind] += 1
            self.bytes[kind] += size_bytes
            if pool is not None:
                self._of_pool.setdefault(pool, Counter())[write] += size_bytes
            if self.mode == "virtual":
                self.seconds += self.alone_s(size_bytes, write)
                return
            self._wait(size_bytes, write, began_s)

    def counts(self) -> tuple[int, int]:
        """Operations in which this machine was slower than the device, and all operations."""
        with self._lock:
            return self.late_operations, sum(self.operations.values())

    def moved_bytes(self, pool: _core.Handle) -> tuple[int, int]:
        """Read and written of one pool."""
        with self._lock:
            found = self._of_pool.get(pool, Counter[bool]())
            return found[False], found[True]

    def _wait(self, size_bytes: int, write: bool, began_s: float) -> None:
        """Until the transfer is over that began so early; what the host took counts as moved."""
        arrived = time.perf_counter()
        self._advance(arrived)
        load = sum(t.rate for t in self._moving if t.left_bytes > 0 and t.from_s <= arrived)
        from_s = began_s + self.profile.latency_ns_at(load / GB) / GB
        transfer = Transfer(size_bytes, write, -1, from_s=from_s)
        self._moving.append(transfer)
        self._rates()
        transfer.left_bytes -= max(0.0, arrived - from_s) * transfer.rate
        self.late_operations += transfer.left_bytes < 0
        now = arrived
        try:
            while transfer.left_bytes > 0 and transfer.rate > 0:
                self._sleep(max(now, from_s) + transfer.left_bytes / transfer.rate)
                now = time.perf_counter()
                self._advance(now)
        finally:
            self._moving.remove(transfer)
            self._rates()
        self.seconds += now - began_s
        self.waited_s += now - arrived

    def _sleep(self, until_s: float) -> None:
        """Without the lock; sooner back when rates have changed."""
        rest = until_s - time.perf_counter()
        if rest > SPIN_S:
            self._lock.wait(rest - SPIN_S)
            return
        self._lock.release()
        try:
            while time.perf_counter() < until_s:
                pass
        finally:
            self._lock.acquire()

    def _advance(self, now: float) -> None:
        for transfer in self._moving:
            flowed = now - max(self._at_s, transfer.from_s)
            transfer.left_bytes -= max(0.0, flowed) * transfer.rate
        self._at_s = now

    def _rates(self) -> None:
        # One that is over may not have been taken out by its thread yet.
        share_out(self.profile, [t for t in self._moving if t.left_bytes > 0], self.devices)
        self._lock.notify_all()

    def reset_after_fork(self) -> None:
        """What the parent's threads move is not waited for."""
        self._lock = threading.Condition()
        self._moving = []


class Charged(NamedTuple):
    """A transfer of a pool behind a link. local_reads: of the local tier, before it."""

    link: Link
    pool: _core.Handle
    began_s: float
    local_reads: int

    def end(self, kind: Kind, size_bytes: int) -> None:
        if size_bytes > 0:
            self.link.heard(kind, size_bytes, self.began_s, self.pool)

    def end_append(self, layout: KVLayout, layer: int, tokens: Tokens, added: Tokens) -> None:
        """The open tails are in this process: pages are charged when they are complete."""
        pages = tokens // layout.page_tokens - (tokens - added) // layout.page_tokens
        self.end("append", int(pages.sum()) * self._page_bytes(layout)[layer])

    def end_attach(self, layout: KVLayout, pages: npt.NDArray[np.uint32]) -> None:
        places = _core.layer_places(layout, _core.pool_geometry(self.pool))
        pages_of = (pages != _core.NO_PAGE).sum(axis=1)
        each = zip(places, self._page_bytes(layout), strict=True)
        self.end("attach", sum(int(pages_of[place.part]) * size for place, size in each))

    def end_read(
        self,
        kind: Kind,
        layout: KVLayout,
        layer: int,
        tokens: Tokens,
        picked: Selection | None,
        most_bytes: int | None = None,
    ) -> None:
        """Neither open tails, nor local copies of chosen pages, come over the link."""
        complete = tokens // layout.page_tokens
        if picked is None:
            window = layout.windows[layer]
            most = complete if window is None else -(-window // layout.page_tokens) + 1
            pieces = int(np.minimum(complete, most).sum()) * layout.kv_heads
        else:
            lists = np.diff(picked.starts) if picked.per == "query" else 1
            visible = np.repeat(complete, lists)[:, None, None]
            pieces = int(((picked.pages >= 0) & (picked.pages < visible)).sum())
        pieces -= max(0, _local_reads(self.pool) - self.local_reads)
        tokens_bytes = layout.stored_layer_bytes // layout.kv_heads
        size = pieces * tokens_bytes * layout.page_tokens
        self.end(kind, size if most_bytes is None else min(size, most_bytes))

    def _page_bytes(self, layout: KVLayout) -> list[int]:
        """Bytes of one page, by layer: digests, sketches, K and V."""
        places = _core.layer_places(layout, _core.pool_geometry(self.pool))
        return [
            layout.groups[group].kv_heads * sum(place.piece_bytes)
            for group, place in zip(layout.order, places, strict=True)
        ]


class Links:
    """Which pools of this process lie behind a link: what the io hooks ask."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[_core.Handle, Link] = WeakKeyDictionary()

    def begin(self, pool: _core.Handle) -> Charged | None:
        link = self.of.get(pool)
        if link is None:
            return None
        return Charged(link, pool, time.perf_counter(), _local_reads(pool))

    def label(self, pool: _core.Handle) -> str | None:
        link = self.of.get(pool)
        return link.label if link else None

    def read_rate(self, pool: _core.Handle) -> float:
        link = self.of.get(pool)
        return link.profile.gb_per_s(0.0, link.devices) if link else 0.0

    def moved_bytes(self, pool: _core.Handle) -> tuple[int, int]:
        link = self.of.get(pool)
        return link.moved_bytes(pool) if link else (0, 0)


_links = Links()


def charge(pool: _core.Handle, link: Link | None) -> Link | None:
    """Charge the pool's transfers to this link from now on, None: to none; returns the one before.

    The first link subscribes to the io hooks.
    """
    before = _links.of.pop(pool, None)
    if link is not None:
        _links.of[pool] = link
        _io_hooks.subscriber = _links
    return before


def labels() -> str | None:
    """What the memory of pools is said to be, for what is measured now: of those open here, and of
    all that CXLKV_EMULATE is about, also in child processes. None: what it is. Raises
    BadArgumentError for a CXLKV_EMULATE that names no link."""
    link = of_environment()
    found = {each.label for each in _links.of.values()} | ({link.label} if link else set())
    return "; ".join(sorted(found)) or None


def marked(text: str, label: str | None) -> str:
    """A figure's text with what is emulated behind it, if anything is."""
    return f"{text} (emulated: {label})" if label else text


def is_virtual(label: str) -> bool:
    """Tell whether nothing waits for one of the links: this machine's clock says nothing of it."""
    return any(one.endswith(", virtual") for one in label.split("; "))


def _local_reads(pool: _core.Handle) -> int:
    try:
        return _core.local_stats(pool)["reads_local"]
    except ClosedError:  # there is no local tier
        return 0


@contextmanager
def emulate(
    pool: Pool,
    profile: str | Profile | Link,
    *,
    mode: str = "wait",
    devices: int = 1,
    slow: float = 1.0,
) -> Iterator[Link]:
    """Until the block ends, charge this process's transfers on the pool to a device's link.

    profile: a name of the project's profiles or your own, FILE.yaml:NAME, or a Profile; or a Link
    that another pool is behind, too (the other arguments do not count then). devices: over how many
    the pool is striped, where the profile has a limit for each. slow: how many times as slow as the
    profile everything is. Raises BadArgumentError.
    """
    link = profile if isinstance(profile, Link) else link_of(profile, mode, devices, slow)
    before = charge(pool._handle, link)
    try:
        yield link
    finally:
        charge(pool._handle, before)


def link_of(
    profile: str | Profile, mode: str = "wait", devices: int = 1, slow: float = 1.0
) -> Link:
    """A link that nothing is charged to yet; arguments as of emulate()."""
    if mode not in MODES:
        raise BadArgumentError(f"mode {mode!r}: one of {', '.join(MODES)}")
    if isinstance(profile, Profile):
        name, found = "a profile of its own", profile
    else:
        name, found = profiles.named(profile)
    return Link(name, found, MODES[mode], devices, slow)


def parse(text: str) -> Link:
    """The link that "PROFILE" or "PROFILE, MODE" names, as in YAML and CXLKV_EMULATE."""
    name, _, mode = text.partition(",")
    return link_of(name.strip(), mode.strip() or "wait")


@cache
def shared(text: str) -> Link:
    """parse(), but one link for all pools of this process that name the same."""
    return parse(text)


def begin(handle: _core.Handle, text: str) -> None:
    """Charge the pool's operations from now on, for as long as it lives."""
    charge(handle, shared(text))


def from_environment() -> str | None:
    """What CXLKV_EMULATE says of a link; values "numa:N" are about places of memory, not this."""
    text = os.environ.get(numa_mode.VARIABLE, "").strip()
    return None if not text or numa_mode.is_mode(text) else text


def of_environment() -> Link | None:
    """The link that CXLKV_EMULATE puts this process's pools behind. Raises BadArgumentError."""
    text = from_environment()
    try:
        return None if text is None else shared(text)
    except BadArgumentError as error:
        raise BadArgumentError(f"{numa_mode.VARIABLE}={text}: {error}") from None


def begin_from_environment(handle: _core.Handle) -> None:
    """Emulate what CXLKV_EMULATE says, for each pool that is made or opened. Raises
    BadArgumentError.
    """
    link = of_environment()
    if link is not None:
        charge(handle, link)
