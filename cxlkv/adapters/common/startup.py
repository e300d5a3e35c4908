"""Adapters log once where the pool lies, how much it holds, and what slows it down."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from cxlkv.config import format_bytes
from cxlkv.machine.topology import Machine, missing, probe
from cxlkv.stats import Overview

log = logging.getLogger("cxlkv")

SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class Place:
    """A rank's pool. room_bytes: what its file system has left; missing_bytes: of the pool, that no
    page has been taken for yet."""

    path: str
    made: bool  # now; else it was there
    tokens: int
    bytes: int
    rank: int = 0
    ranks: int = 1
    room_bytes: int | None = None
    missing_bytes: int = 0


def say(place: Place, wanted_tokens: int) -> None:
    """In the log, by the first rank: once for the engine."""
    if place.rank:
        return
    log.info(where(place))
    for concern in concerns(place, probe(), wanted_tokens):
        log.warning(concern)


def measure(pool: Overview, made: bool, tokens: int, rank: int, ranks: int) -> Place:
    """Of a pool's file; a device has neither room nor holes."""
    room_bytes, missing_bytes = None, 0
    if os.path.isfile(pool.path):
        space = os.statvfs(pool.path)
        room_bytes = space.f_bavail * space.f_frsize if space.f_blocks else None
        missing_bytes = max(0, pool.bytes - os.stat(pool.path).st_blocks * 512)
    return Place(pool.path, made, tokens, pool.bytes, rank, ranks, room_bytes, missing_bytes)


def where(place: Place) -> str:
    found = "made" if place.made else "found"
    size = f"{place.tokens} tokens ({format_bytes(place.bytes)})"
    stays = "" if place.made else "; its capacity stays what it was made with"
    ranks = f"; each of the {place.ranks} ranks has one like it" if place.ranks > 1 else ""
    return f"cxlkv: {found} {place.path}, for {size}{stays}{ranks}"


def concerns(place: Place, machine: Machine, wanted_tokens: int) -> list[str]:
    """What is not ideal, each with what mends it. wanted_tokens: of the longest request."""
    found = []
    if place.tokens < wanted_tokens:
        found.append(
            f"cxlkv: the pool holds {place.tokens} tokens, and one request may have "
            f'{wanted_tokens}: give a larger "capacity"'
        )
    if place.room_bytes is not None and place.missing_bytes > place.room_bytes:
        found.append(
            f"cxlkv: {place.path} may still grow by {format_bytes(place.missing_bytes)}, and its "
            f"file system has {format_bytes(place.room_bytes)} left: what does not fit is not "
            "saved. Remove what else lies there, or make the pool smaller"
        )
    for advice in missing(machine):
        shared = "/dev/shm" in advice.what and place.path.startswith(SHARED_MEMORY)
        if shared or "locked" in advice.what:
            found.append(f"cxlkv: {advice.what}: {advice.why}. What mends it: {advice.command}")
    return found
