"""A certificate of the litmus run lets a region use mode fast on this machine.

A certificate is a JSON file: what was run, on which region, machine and hosts, what came of it, and
a hash of all that. The hash finds damage and careless edits; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict, cast

from cxlkv.errors import BadArgumentError, CorruptError
from cxlkv.machine.state import state_folder, write_whole
from cxlkv.machine.sysfs import fields
from cxlkv.machine.sysfs import read as read_text
from cxlkv.numbers import is_whole

__all__ = ["certified_mode"]

WHAT = "cxlkv litmus certificate"
VERSION = 1  # of the tests as well: when they learn to see more, older certificates end
# For each test and pair of regions; a run with fewer rounds shows little.
ROUNDS_NEEDED = {"message passing": 10_000, "store buffering": 10_000, "late eviction": 500}

Identity = dict[str, str]


class Machine(TypedDict):
    """What a certificate is bound to. id: a hash of the machine's id, or of its name."""

    id: str
    architecture: str
    cpu: str
    flushes: list[str]


class Row(TypedDict):
    """Result of one test over one pair of regions, both roles together."""

    test: str
    first: int
    second: int
    rounds: int
    raced: int
    violations: int
    first_violation: str


class Region(TypedDict):
    """path and inode say what was tested, identity which memory it is in."""

    path: str
    inode: int
    identity: Identity


class Certificate(TypedDict):
    """Fields of a certificate file, between its header and its sha256."""

    label: str
    when: str
    commit: str
    hosts: int
    role: str
    flush: str
    machine: Machine
    other_machine: Machine
    regions: list[Region]
    tests: list[Row]
    rounds: int
    violations: int


class Certified(NamedTuple):
    """A coherence mode, and a sentence that says why it was chosen."""

    mode: Literal["fast", "strict"]
    reason: str


# ---- which memory, which machine ----


def region_identity(path: str | os.PathLike[str], root: Path = Path("/")) -> Identity:
    """What names the memory below `path`: a dax device by its place in sysfs, as its name changes
    from boot to boot; a file by the file system that it is in. The file need not exist yet.
    """
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    status = place.stat()
    if stat.S_ISCHR(status.st_mode):
        return _dax_identity(place, _numbers(status.st_rdev), root)
    number = _numbers(status.st_dev)
    kind, source = _mount(number, root)
    device = root / "sys/dev/block" / number
    sysfs = os.path.realpath(device) if device.exists() else ""
    return {
        "kind": "file system",
        "type": kind,
        "source": source,
        # A device of its own has a place; the number of a tmpfs is all that it has.
        **({"sysfs": sysfs} if sysfs else {"device": number}),
    }


def _dax_identity(place: Path, number: str, root: Path) -> Identity:
    folder = root / "sys/dev/char" / number
    if os.path.basename(os.path.realpath(folder / "subsystem")) != "dax":
        raise BadArgumentError(f"{place}: a device, but no dax device; give /dev/daxX.Y or a file")
    return {"kind": "dax", "sysfs": os.path.realpath(folder), "bytes": read_text(folder / "size")}


def _numbers(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _mount(number: str, root: Path) -> tuple[str, str]:
    """Type and source of the file system; "" where the kernel does not list it (btrfs)."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        words = line.split()
        if len(words) > 6 and words[2] == number and "-" in words:
            after = words[words.index("-") + 1 :]
            return after[0], after[1]
    return "", ""


def this_machine(root: Path = Path("/")) -> Machine:
    """Describe this machine as certificates name it; another CPU makes another machine."""
    info = fields(read_text(root / "proc/cpuinfo"))
    flags = (info.get("flags") or info.get("Features") or "").split()
    part = f"implementer {info.get('CPU implementer')} part {info.get('CPU part')}"
    name = read_text(root / "etc/machine-id") or os.uname().nodename
    return {
        "id": short_hash(f"cxlkv {name}"),
        "architecture": os.uname().machine,
        "cpu": info.get("model name") or part,
        "flushes": [flag for flag in ("clflush", "clflushopt", "clwb", "dcpop") if flag in flags],
    }


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- the file ----


def default_path(identity: Identity) -> Path:
    """Where the certificate of the memory with this identity lies, for this user."""
    name = short_hash(json.dumps(identity, sort_keys=True))
    return state_folder() / f"litmus-{name}.json"


def _hash(content: Mapping[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, certificate: Certificate) -> None:
    """Write the file atomically, replacing an older one."""
    content: dict[str, object] = {"what": WHAT, "version": VERSION, **certificate}
    content["sha256"] = _hash(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=2) + "\n")


def read(path: Path) -> Certificate:
    """The certificate; raises CorruptError for anything else, OSError when it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CorruptError(f"{path}: no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("what") != WHAT:
        raise CorruptError(f"{path}: no {WHAT}")
    if content.pop("sha256", None) != _hash(content):
        raise CorruptError(f"{path}: changed since it was written")
    if content.get("version") != VERSION:
        raise CorruptError(f"{path}: of version {content.get('version')}, wanted is {VERSION}")
    return cast(Certificate, content)


# ---- the answer ----


def certified_mode(
    region_path: str | os.PathLike[str], certificate: Path | None = None, hosts: int = 2
) -> Certified:
    """Whether the memory below `region_path` may be used in mode fast, between `hosts` hosts.

    certificate: None for where `cxlkv bench litmus` writes it. Never raises for what is wrong with
    a certificate: that is "strict", with the reason.
    """
    if not is_whole(hosts, 1):
        raise BadArgumentError(f"hosts={hosts!r:.40}: a whole number, at least 1")
    try:
        identity = region_identity(region_path)
        path = certificate or default_path(identity)
        reason = _objection(read(path), identity, hosts)
    except FileNotFoundError:
        reason = "there is none"
    except (OSError, BadArgumentError, CorruptError) as error:
        reason = str(error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"not of the right shape ({error!r})"
    if not reason:
        return Certified("fast", f"certified by {path}")
    remedy = f"cxlkv bench litmus --region {os.fspath(region_path)} --role a, and b on another host"
    return Certified("strict", f"no litmus certificate that holds: {reason}. For one: {remedy}")


def _objection(found: Certificate, identity: Identity, hosts: int) -> str:
    """Why the certificate does not hold here; "" when it does."""
    machine = this_machine()
    for name, value in machine.items():
        if found["machine"].get(name) != value:
            return f"it is of another machine: {name} is {value!r} here"
    if identity not in [region["identity"] for region in found["regions"]]:
        return "it is of another region"
    violations = found["violations"] + sum(row["violations"] for row in found["tests"])
    if violations != 0:
        return f"the run found {found['violations']} violations"
    missing = _missing(found["tests"], len(found["regions"]))
    if missing:
        return missing
    if found["hosts"] < hosts:
        return f"the run was on {found['hosts']} host, {hosts} are wanted"
    return ""


def _missing(rows: Sequence[Row], regions: int) -> str:
    rounds = {(row["test"], row["first"], row["second"]): row["rounds"] for row in rows}
    for test, needed in ROUNDS_NEEDED.items():
        for first in range(regions):
            for second in range(regions):
                made = rounds.get((test, first, second), 0)
                if made < needed:
                    where = f"{test}, regions {first} and {second}"
                    return f"the run was short: {made} rounds of {where}; {needed} are needed"
    return ""
