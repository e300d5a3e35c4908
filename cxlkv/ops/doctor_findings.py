"""What `cxlkv doctor` is asked, what its checks find, and how an error becomes a finding."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from cxlkv.adapters.common.pools import path_for, share_bytes
from cxlkv.errors import BadArgumentError, CXLKVError
from cxlkv.machine.regions import Place, check_below_dev, is_device, is_striped, parse_place

State = Literal["error", "warning", "ok", "absent"]
STATES: tuple[State, ...] = ("error", "warning", "ok", "absent")

SHM_LARGER = "docker run --shm-size=16g ..., or: sudo mount -o remount,size=16G /dev/shm"
# For causes that the texts of our errors name in words.
COMMANDS = (
    (
        r"share a table in",
        "docker run --tmpfs /dev/shm ..., or: sudo mount -t tmpfs tmpfs /dev/shm",
    ),
    (r"--shm-size", SHM_LARGER),
    (r"ulimit -([a-z])", r"ulimit -\1 unlimited"),
    (r"give a folder or a path", "--where /dev/shm/"),
    (r"the folder (\S+) does not exist", r"mkdir -p \1"),
    (r"--cap-add SYS_NICE", "docker run --cap-add SYS_NICE ..."),
    (r"`(cxlkv [^`]+)`", r"\1"),
    (r": ((?:rm|chmod) [^,;]+)$", r"\1"),
)


@dataclass(frozen=True)
class Finding:
    """What was seen when one thing was tried; unless all is well, why it matters and what mends
    it."""

    name: str
    state: State
    seen: str
    why: str = ""
    command: str = ""


@dataclass(frozen=True)
class Ask:
    """where and capacity (bytes; None: the engines' share): as in an engine's settings."""

    engine: str | None = None
    where: str = "/dev/shm/"
    capacity: int | None = None
    root: Path = Path("/")  # below it are procfs and sysfs

    def parse(self) -> Place:
        """Where the pool would lie; raises what CXLPool.create() would."""
        try:
            return parse_place(path_for(self.where, "cxlkv-doctor.pool"))
        except BadArgumentError:  # memory without a name
            if self.engine not in (None, "transformers"):
                raise
            return parse_place(self.where)

    @property
    def makeable(self) -> Place | None:
        """The place, where a file may be made: on a device, and in a file that keeps its size, the
        bytes may be somebody's."""
        try:
            place = self.parse()
            if place.path is not None:
                check_below_dev(place.path)
        except (CXLKVError, OSError):  # the check of the place says why
            return None
        fixed = place.path and (place.in_place or is_striped(place.path) or is_device(place.path))
        return None if fixed else place

    @cached_property
    def wanted_bytes(self) -> int:
        """Bytes of the pool that an engine would make."""
        if self.capacity is not None:
            return self.capacity
        place = self.makeable
        return share_bytes((place and place.path) or "/dev/shm/any.pool")


def of_error(name: str, error: Exception, why: str = "") -> Finding:
    """Our texts name the cause, and the remedy in the last sentence."""
    text = str(error)
    cause, _, remedy = text.rpartition(". ")
    found = ((re.search(pattern, text), command) for pattern, command in COMMANDS)
    commands = [match.expand(command) for match, command in found if match]
    commands += [remedy if cause else "cxlkv info"]
    return Finding(name, "error", cause or text, why, commands[0])
