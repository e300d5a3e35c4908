"""Transfers share an emulated link equally, as far as the link, the switch and devices allow.

A fluid model: at each moment every transfer has a rate, and rates change when one begins or ends.
So the sum never passes a limit, a limit that binds is used to the full, and nobody queues behind a
long transfer of somebody else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cxlkv.emulation.profiles import Profile
from cxlkv.errors import BadArgumentError
from cxlkv.numbers import is_real, is_whole

__all__ = ["simulate"]

GB = 1e9
ROUNDS = 8  # until the share of writes and the rates agree; two are enough without rate limits


@dataclass(eq=False)
class Transfer:
    """Bytes on their way. at_most: what its source asks for, in bytes/s; from_s: not before."""

    left_bytes: float
    write: bool = False
    device: int = 0
    at_most: float = math.inf
    from_s: float = 0.0
    rate: float = field(default=0.0, init=False)


def share_out(profile: Profile, transfers: Sequence[Transfer], devices: int = 1) -> None:
    """Set the rate of each, in bytes/s: max-min fair under all limits.

    What the link gives depends on how much of it is writes, which depends on the rates: both are
    made to agree.
    """
    if not transfers:
        return
    writes = sum(t.write for t in transfers) / len(transfers)
    for _ in range(ROUNDS):
        _fill(profile, transfers, writes, devices)
        total = sum(t.rate for t in transfers)
        found = sum(t.rate for t in transfers if t.write) / total
        if abs(found - writes) < 1e-9:
            return
        writes = found


def _fill(
    profile: Profile, transfers: Sequence[Transfer], write_share: float, devices: int
) -> None:
    """All rates rise together; one that meets a limit stays there."""
    count = len(transfers)
    # A limit, and what part of each transfer's rate counts in it: of one that is striped over all
    # devices (-1), its share of each.
    limits = [(GB * profile.gb_per_s(write_share, devices), dict.fromkeys(range(count), 1.0))]
    if profile.per_device_gb_per_s is not None:
        for device in {t.device for t in transfers} - {-1}:
            parts = {device: 1.0, -1: 1 / devices}
            here = {i: parts[t.device] for i, t in enumerate(transfers) if t.device in parts}
            limits.append((GB * profile.per_device_gb_per_s, here))
    limits += [(t.at_most, {i: 1.0}) for i, t in enumerate(transfers) if t.at_most < math.inf]
    rates, rising = [0.0] * count, set(range(count))
    while rising:
        step, bound = math.inf, set[int]()
        for most, parts_of in limits:
            slope = sum(part for i, part in parts_of.items() if i in rising)
            if slope:
                used = sum(part * rates[i] for i, part in parts_of.items())
                room = max(0.0, most - used) / slope
                if room <= step:
                    bound = (bound if room == step else set()) | (parts_of.keys() & rising)
                    step = room
        for index in rising:
            rates[index] += step
        rising -= bound
    for transfer, rate in zip(transfers, rates, strict=True):
        transfer.rate = rate


@dataclass(frozen=True)
class Stream:
    """Operations of one source, each begun when the one before is done.

    device: which one it reaches, -1: all, striped. at_most_gb_per_s: what it asks for while bytes
    move, None: all it can get.
    """

    operation_bytes: int
    operations: int = 1
    write: bool = False
    device: int = -1
    at_most_gb_per_s: float | None = None
    begins_s: float = 0.0

    def __post_init__(self) -> None:
        counts = (self.operation_bytes, self.operations)
        if not all(is_whole(one, 1) for one in counts) or not is_real(self.begins_s):
            raise BadArgumentError(f"{self}: one operation of one byte, or more, from 0 on")
        most = self.at_most_gb_per_s
        if most is not None and not (is_real(most) and most > 0):
            raise BadArgumentError(f"at_most_gb_per_s={most!r}: a number above 0")


@dataclass
class Served:
    """What a stream got: when each operation began and ended, and the latency that it met."""

    stream: Stream
    began_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended_s[-1] - self.began_s[0]

    @property
    def gb_per_s(self) -> float:
        """Over its whole time, latencies included."""
        return self.stream.operation_bytes * len(self.ended_s) / self.seconds / GB


def simulate(profile: Profile, streams: Sequence[Stream], devices: int = 1) -> list[Served]:
    """Streams on one link, on a virtual clock: no waiting, and the same result every time.

    An operation meets the latency at the load of the others when it begins, then takes its share
    of the bandwidth.
    """
    check_devices(devices, [stream.device for stream in streams])
    served = [Served(stream) for stream in streams]
    # Of each stream its next beginning, or its transfer; neither: it has ended.
    begins = {index: stream.begins_s for index, stream in enumerate(streams)}
    moving: dict[int, Transfer] = {}
    now = 0.0
    while begins or moving:
        flowing = [t for t in moving.values() if t.from_s <= now]
        share_out(profile, flowing, devices)
        then = min(_events(now, begins, moving))
        for transfer in flowing:
            transfer.left_bytes -= (then - now) * transfer.rate
        now = then
        for index in [i for i, t in moving.items() if t in flowing and _done(t, now)]:
            del moving[index]
            served[index].ended_s.append(now)
            if len(served[index].ended_s) < streams[index].operations:
                begins[index] = now
        due = [i for i, at in begins.items() if at <= now]
        flowing = [t for t in moving.values() if t.from_s <= now]
        share_out(profile, flowing if due else [], devices)
        load = sum(t.rate for t in flowing)
        for index in due:
            del begins[index]
            latency_s = profile.latency_ns_at(load / GB) / GB
            served[index].began_s.append(now)
            served[index].latency_s.append(latency_s)
            moving[index] = _transfer(streams[index], now + latency_s)
    return served


def _done(transfer: Transfer, now: float) -> bool:
    """What is left is less than the clock can tell from nothing."""
    return transfer.left_bytes <= transfer.rate * max(now, 1e-6) * 1e-12


def _events(now: float, begins: dict[int, float], moving: dict[int, Transfer]) -> Iterator[float]:
    yield from begins.values()
    for transfer in moving.values():
        if transfer.from_s > now:
            yield transfer.from_s
        else:
            yield now + max(0.0, transfer.left_bytes) / transfer.rate


def _transfer(stream: Stream, from_s: float) -> Transfer:
    at_most = math.inf if stream.at_most_gb_per_s is None else GB * stream.at_most_gb_per_s
    return Transfer(stream.operation_bytes, stream.write, stream.device, at_most, from_s)


DEVICES_MAX = 1024


def check_devices(devices: int, used: Sequence[int] = ()) -> None:
    if not is_whole(devices, 1, DEVICES_MAX):
        raise BadArgumentError(f"devices={devices!r:.40}: a whole number from 1 to {DEVICES_MAX}")
    for device in used:
        if not is_whole(device, -1, devices - 1):
            raise BadArgumentError(f"device {device}: 0 to {devices - 1}, or -1 for all")
