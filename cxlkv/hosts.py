"""The hosts of a shared pool, as one of them sees the others."""

from __future__ import annotations

from dataclasses import dataclass

from cxlkv import _core

STATUS = ("unused", "live", "left", "damaged")  # by the core's number


@dataclass(frozen=True)
class Host:
    """One host: state is "unused", "live", "silent" (for longer than a lease), "fenced" (its epoch
    was ended), "off" (and its machine is declared off), "left" (in order) or "damaged".
    """

    number: int
    state: str
    epoch: int
    is_self: bool
    silent_s: float  # since this host saw it beat last; 0 for itself and for those not there
    extents: int


def hosts_of(handle: _core.Handle) -> list[Host]:
    """All hosts that the pool has room for, by number."""
    return [_host(row) for row in _core.pool_hosts(handle)]


def _host(row: dict[str, int]) -> Host:
    silent_s = row["silent_ns"] / 1e9
    state = STATUS[row["status"]]
    if state == "live":
        if row["off"]:
            state = "off"
        elif row["fenced"]:
            state = "fenced"
        elif row["silent"]:
            state = "silent"
    return Host(
        number=row["number"],
        state=state,
        epoch=row["epoch"],
        is_self=bool(row["is_self"]),
        silent_s=round(silent_s, 3) if STATUS[row["status"]] == "live" else 0.0,
        extents=row["extents"],
    )
