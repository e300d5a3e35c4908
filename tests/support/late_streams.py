"""Stands for a device's streams and events on host tensors: what is queued runs late, in any order.

A kernel, or a copy that the host does not wait for, is put into its stream's queue. Queues are
emptied in an order drawn from a seed, which respects what CUDA respects: the order of each stream,
and the events that it was told to wait for. The host goes on meanwhile, and waits only where it
says so, or reads a device's tensor. So memory that is used again too early is seen to be.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from cxlkv.gpu import copier, decode, index, read, recent, resident, streams, write
from cxlkv.gpu.mailbox import Mailbox
from cxlkv.kernels import slots
from cxlkv.kernels.encode import Encoded, encode
from cxlkv.kernels.merge import merge
from cxlkv.kernels.sources import Sources

KERNELS: list[tuple[object, tuple[str, ...]]] = [
    (recent, ("append_rows", "append_codes")),
    (index, ("score", "choose", "copy_fragments")),
    (slots, ("assign", "residents", "invalidate")),
    (copier, ("move",)),
    (read, ("check_pieces", "page_sources")),
    (resident, ("attend", "check_pieces", "copy_fragments", "known_pages", "page_sources")),
]
"""Launches that return nothing but what they were given to write to."""


ELEMENTWISE = ("aten::lt", "aten::ne", "aten::minimum")
"""Operations whose results are as many as what they are given, and may be made later."""


WEIGHTS = (1.0, 0.1, 0.001)
"""How soon a stream's turn comes, beside the others'."""

Site = tuple[str, str, str, int]
"""A call that orders streams: module, function, what it calls, line."""


class Kernel(Protocol):
    """A launch, or what stands for it."""

    def __call__(self, *args: object, **given: object) -> object: ...


class Making(Protocol):
    """What makes a tensor of the host's numbers."""

    def __call__(self, *args: object, **given: object) -> torch.Tensor: ...


@dataclass
class Point:
    """A place in a stream's queue, or an answer of the host."""

    is_passed: bool = False


@dataclass
class Item:
    work: Callable[[], object]
    waits: Point | None = None


@dataclass(eq=False)
class LateStream:
    schedule: Schedule
    items: deque[Item] = field(default_factory=deque)
    weight: float = 1.0

    def wait_event(self, event: LateEvent) -> None:
        if not self.schedule.drops("wait_event"):
            self.wait_for(event)

    def wait_for(self, event: LateEvent) -> None:
        if event.point is not None:
            self.schedule.put(self, lambda: None, event.point)

    def wait_stream(self, other: LateStream) -> None:
        if not self.schedule.drops("wait_stream"):
            self.wait_for(LateEvent(self.schedule, other.end()))

    def synchronize(self) -> None:
        if not self.schedule.drops("synchronize"):
            self.schedule.pass_by(self.end())

    def end(self) -> Point:
        """Where it is when all that it has now is done."""
        point = Point()
        self.schedule.put(self, lambda: setattr(point, "is_passed", True))
        return point


@dataclass(eq=False)
class LateEvent:
    schedule: Schedule
    point: Point | None = None

    def record(self, stream: LateStream | None = None) -> None:
        if not self.schedule.drops("record"):
            self.point = (stream or self.schedule.current).end()

    def synchronize(self) -> None:
        if self.point is not None and not self.schedule.drops("synchronize"):
            self.schedule.pass_by(self.point)

    def query(self) -> bool:
        return self.point is None or self.point.is_passed


class Fault(Exception):
    """A device faults here, and this process would be overwritten."""


class Schedule:
    """One order of all work, by its seed. `with schedule:` around what stands for calls of the
    host, which are not to be seen by the test's own tensors."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.eagerness = self.random.choice([0.0, 0.2, 1.0])
        self.streams: list[LateStream] = []
        self.current = self.new()
        self.host_memory: dict[int, torch.Tensor] = {}  # by address; pinned
        self.memory: list[torch.Tensor] = []  # that addresses may still name, whoever has it
        self.temporary: dict[int, int] = {}  # likewise, that is not: how many tensors
        self.is_running = False
        self._mode: _Deferred | None = None
        self.sites: set[Site] = set()
        self.dropped: Site | None = None
        self.readable: list[range] = []  # addresses of the pool's pages
        self.writable: set[int] = set()  # and of the hot buffer's slots

    def drops(self, method: str) -> bool:
        """Record the caller; True if this test leaves the caller's wait out."""
        frame = sys._getframe(2)
        code = frame.f_code
        site = (Path(code.co_filename).stem, code.co_name, method, frame.f_lineno)
        if code.co_filename != __file__:
            self.sites.add(site)
        return site == self.dropped

    def new(self) -> LateStream:
        self.streams.append(LateStream(self, weight=self.random.choice(WEIGHTS)))
        return self.streams[-1]

    # ---- the device ----

    def put(
        self, stream: LateStream, work: Callable[[], object], waits: Point | None = None
    ) -> None:
        stream.items.append(Item(work, waits))
        if self.random.random() < 0.02:
            stream.weight = self.random.choice(WEIGHTS)
        while self.random.random() < self.eagerness / (1 + self.eagerness) and self._run():
            pass

    def pass_by(self, point: Point) -> None:
        self.until(lambda: point.is_passed)

    def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self._run(), "the host waits for what never comes"

    def _run(self) -> bool:
        """One item of any stream that waits for nothing; False: there is none."""
        ready = [s for s in self.streams if s.items and _is_ready(s.items[0])]
        if not ready or self.is_running:
            return False
        (stream,) = self.random.choices(ready, [one.weight for one in ready])
        item = stream.items.popleft()
        self.is_running = True
        try:
            with _disable_current_modes():
                item.work()
        finally:
            self.is_running = False
        return True

    # ---- the host ----

    def __enter__(self) -> Schedule:
        self._mode = _Deferred(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        assert self._mode is not None
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        self._mode = None

    @contextlib.contextmanager
    def use(self, stream: LateStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def pinned(self, *shape: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        made = torch.zeros(shape, dtype=dtype)
        self.host_memory[_address(made)] = made
        return made

    def is_host(self, tensor: torch.Tensor) -> bool:
        at = _address(tensor)
        return at in self.host_memory or self.temporary.get(at, 0) > 0

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) in self.host_memory

    def note_temporary(self, tensor: torch.Tensor) -> torch.Tensor:
        at = _address(tensor)
        self.temporary[at] = self.temporary.get(at, 0) + 1
        weakref.finalize(tensor, self._forget, at)
        return tensor

    def _forget(self, at: int) -> None:
        self.temporary[at] -= 1

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with garbage until the current stream computes it, and again once it is
        released, as another may have its memory then."""
        garbage = torch.nan if tensor.is_floating_point() else 85
        memory, stream = torch.full_like(tensor, garbage), self.current
        lent = memory.view_as(memory)
        self.memory.append(memory)
        self.put(stream, lambda: memory.copy_(tensor))
        weakref.finalize(lent, lambda: self.put(stream, lambda: memory.fill_(garbage)))
        return lent

    def launch(self, kernel: Kernel) -> Kernel:
        """The same, late. It returns what it will have written: out, or what it was given last."""

        def late(*args: object, **given: object) -> object:
            if self.is_running or self._mode is None:
                return kernel(*args, **given)
            own, named = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, given))
            self.put(self.current, lambda: kernel(*own, **named))
            return given.get("out", args[-1])

        return late

    def by_address(self, name: str) -> Kernel:
        """A launch, or a Fault where one of its tables has an address that is none of these."""
        kernel: Kernel = getattr(resident, name)

        def checked(*args: object, **given: object) -> object:
            sources, targets = args[:2]
            if isinstance(sources, Sources):
                sources = torch.stack([sources.descriptors, sources.checksums])
                assert isinstance(targets, tuple)
                targets = torch.stack([one for one in targets if one is not None])
            assert isinstance(sources, torch.Tensor)
            for address in sources.flatten().tolist():
                if address and not any(address in known for known in self.readable):
                    raise Fault(f"{name} reads at {address:#x}")
            for address in targets.flatten().tolist() if torch.is_tensor(targets) else ():
                if address and address not in self.writable:
                    raise Fault(f"{name} writes at {address:#x}")
            return kernel(*args, **given)

        return checked

    def merged_late(
        self, partials: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """merge() into what it makes."""
        out, lse = torch.empty_like(partials[0], dtype=dtype), torch.empty_like(lses[0])
        self.put(self.current, lambda: merge(partials, lses, dtype, out=out, lse=lse))
        return out, lse

    def encoded_late(self, k: torch.Tensor, v: torch.Tensor | None, **given: object) -> Encoded:
        """Call encode(), and treat its outputs as given() does."""
        with _disable_current_modes():
            made = encode(k, v, **given)  # type: ignore[arg-type]
            parts = {name: part for name, part in vars(made).items() if part is not None}
            return replace(made, **{name: self.given(part) for name, part in parts.items()})

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """For everything that a decoder uses of a device."""
        patch.setattr(streams, "new", lambda device: self.new())
        patch.setattr(streams, "current", lambda device: self.current)
        patch.setattr(streams, "event", lambda device, **how: LateEvent(self))
        patch.setattr(streams, "use", self.use)
        patch.setattr(streams, "pinned", self.pinned)
        for name in ("copy_fragments", "check_pieces"):
            patch.setattr(resident, name, self.by_address(name))
        for module, names in KERNELS:
            for name in names:
                patch.setattr(module, name, self.launch(getattr(module, name)))
        patch.setattr(resident, "merge", self.merged_late)
        patch.setattr(decode, "Mailbox", lambda *args: LateMailbox(self, *args))
        patch.setattr(write, "encode", self.encoded_late)
        for name in ("from_numpy", "tensor"):
            patch.setattr(torch, name, self._made_on_host(getattr(torch, name)))

    def _made_on_host(self, make: Making) -> Making:
        def made(*args: object, **given: object) -> torch.Tensor:
            found = make(*args, **given)
            return found if given.get("device") is not None else self.note_temporary(found)

        return made


class LateMailbox(Mailbox):
    """Questions are served some time after the stream has come to them; the stream waits at
    await_answer()."""

    def __init__(self, schedule: Schedule, device: torch.device, *rest: object):
        super().__init__(device, *rest, threaded=False)  # type: ignore[arg-type]
        self._schedule = schedule
        self._engine = schedule.new()
        self._asked = 0
        self._answer = Point()

    def ask(self, subject: int) -> None:
        self._answer = answer = Point()
        found: list[bool] = []
        self._found = found

        def serve() -> None:
            found.append(self._did(self._serve, subject))
            answer.is_passed = True

        def arrive() -> None:
            self._engine.items += (
                Item(serve),
                Item(lambda: self._did(self._then, subject)),
                Item(lambda: setattr(self, "_asked", self._asked - 1)),
            )

        self._asked += 1
        self._schedule.put(self._schedule.current, arrive)

    def await_answer(self) -> None:
        def take() -> None:
            self.answered[0] = int(found[0])
            self.answered[1] = min(int(self.answered[0]), int(self.answered[1]))

        is_dropped = self._schedule.drops("await_answer")
        found = [True] if is_dropped else self._found
        self._schedule.put(self._schedule.current, take, None if is_dropped else self._answer)

    def check(self) -> None:
        self._schedule.until(lambda: self._asked == 0)
        super().check()


class _Deferred(TorchDispatchMode):
    """What torch does with a device's tensors is queued. What makes new ones of them, or reads
    them, waits for the current stream first: no step does so."""

    def __init__(self, schedule: Schedule):
        super().__init__()  # type: ignore[no-untyped-call]
        self._schedule = schedule

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        assert callable(func)
        given, schedule = kwargs or {}, self._schedule
        schema = func._schema  # type: ignore[attr-defined]
        named = {one.name: i for i, one in enumerate(schema.arguments)}
        written = [
            args[i] if i < len(args) else given.get(one.name)
            for one, i in ((one, named[one.name]) for one in schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        tensors = [t for t in tree_leaves((args, given)) if isinstance(t, torch.Tensor)]
        on_device = [t for t in tensors if not schedule.is_host(t)]
        if not written:
            is_view = any(one.alias_info is not None for one in schema.returns)
            if not on_device or is_view:
                return func(*args, **given)
            if schema.name in ELEMENTWISE:
                made, own = (
                    func(*args, **given),
                    tree_map_only(torch.Tensor, torch.Tensor.detach, args),
                )
                schedule.put(schedule.current, lambda: made.copy_(func(*own, **given)))
                return made
            schedule.pass_by(schedule.current.end())
            return func(*args, **given)
        target = written[0]
        assert isinstance(target, torch.Tensor)
        crosses = len({schedule.is_host(t) for t in tensors}) == 2 and "copy_" in schema.name
        if not on_device or (schedule.is_host(target) and not crosses):
            return func(*args, **given)
        own = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, given))
        schedule.put(schedule.current, lambda: func(*own[0], **own[1]))
        is_async = crosses and (
            (len(args) > 2 and bool(args[2])) or bool(given.get("non_blocking"))
        )
        hosts = [t for t in tensors if schedule.is_host(t)]
        if crosses and not (is_async and all(map(schedule.is_pinned, hosts))):
            schedule.pass_by(schedule.current.end())
        return target


def _is_ready(item: Item) -> bool:
    return item.waits is None or item.waits.is_passed


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
