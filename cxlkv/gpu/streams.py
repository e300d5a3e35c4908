"""Streams and events of a device; on the CPU, where work is done when it is called, none.

Tests stand in for these functions to run the work of streams late, in any order that waits allow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch


class Done:
    """In the place of a stream or an event of the CPU: all of its work is done."""

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


DONE = Done()


def new(device: torch.device) -> torch.cuda.Stream:
    """A stream, with work of its own."""
    if device.type == "cpu":
        return cast(torch.cuda.Stream, DONE)
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def current(device: torch.device) -> torch.cuda.Stream:
    if device.type == "cpu":
        return cast(torch.cuda.Stream, DONE)
    return torch.cuda.current_stream(device)


def event(device: torch.device, *, sleeps: bool = False) -> torch.cuda.Event:
    """sleeps: a thread that waits for it does; else it spins, which is sooner and takes a CPU."""
    if device.type == "cpu":
        return cast(torch.cuda.Event, DONE)
    return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]


def use(stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[object]:
    """Make it the current one."""
    if isinstance(stream, torch.cuda.Stream):
        return torch.cuda.stream(stream)
    return contextlib.nullcontext()


def captures(device: torch.device) -> bool:
    """True while the current stream's work becomes a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def lend(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Keep a tensor's memory from others until what the stream has now is done, should it go."""
    if isinstance(stream, torch.cuda.Stream):
        tensor.record_stream(stream)


def pinned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in host memory that a device copies to and from while the host goes on."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, by the current stream; the host does not wait."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Side:
    """A stream beside the current one, for numbered pieces of work that are waited for one by one.
    A CUDA graph captures both streams."""

    def __init__(self, device: torch.device, pieces: int):
        self._device = device
        self._stream = new(device)
        self._forked = event(device)
        self._done = [event(device) for _ in range(pieces)]
        self._forked_now: set[int] = set()

    def __contains__(self, number: int) -> bool:
        """True from fork() to join()."""
        return number in self._forked_now

    @contextlib.contextmanager
    def fork(self, number: int) -> Iterator[None]:
        """Queue what follows there, behind all that the current stream has now."""
        self._forked_now.add(number)
        self._forked.record(current(self._device))
        self._stream.wait_event(self._forked)
        with use(self._stream):
            try:
                yield
            finally:
                self._done[number].record(self._stream)

    def join(self, number: int) -> None:
        """Make the current stream wait for a piece, if it was forked."""
        if number in self._forked_now:
            current(self._device).wait_event(self._done[number])
            self._forked_now.remove(number)

    def synchronize(self) -> None:
        """Block the host until all of it is done, joined or not."""
        self._stream.synchronize()
        self._forked_now.clear()
