"""`cxlkv bench litmus`: whether memory that two hosts share keeps what mode fast rests on.

Two roles, a and b, run the tests of native/measure/litmus.c on the same regions, which they
overwrite. Each writes a certificate for its own machine; docs/explanation/coherence.md, Litmus,
has the tests.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import TypedDict, cast

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.bench import loops
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.result import Result, commit
from cxlkv.errors import BadArgumentError, PeerError, SystemCallError
from cxlkv.layout import parse_bytes
from cxlkv.machine import certificate, sysfs
from cxlkv.machine.certificate import Certificate, Machine, Row
from cxlkv.machine.regions import check_below_dev
from cxlkv.stats import MAGIC as POOL_MAGIC

MAGIC = b"CXLKVLIT"
ROLES = ("a", "b")
ROUNDS = 50_000
EVICTION_SHARE = 20  # late eviction takes the time of so many other rounds
CHUNK = 500  # rounds of one call: Ctrl-C is heard in between
MEET_S = 120.0
SILENT_S = 30.0
PRESSURE_BYTES_MAX = 512 << 20

Progress = Callable[[str], object]


class Greeting(TypedDict):
    """What the roles tell each other first. boot: equal for all processes of one kernel."""

    version: int
    rounds: int
    boot: str
    machine: Machine
    commit: str


@dataclass
class Region:
    """A region that is mapped. made: the file was not there before."""

    path: Path
    inode: int
    identity: certificate.Identity
    memory: npt.NDArray[np.uint8]
    made: bool


@dataclass(frozen=True)
class Played:
    """What one role brings home; rows count both."""

    hosts: int
    other: Greeting
    rows: list[Row]
    seconds: list[float]


def run(
    regions: Sequence[Path],
    role: str | None = None,
    rounds: int = ROUNDS,
    certificate_path: Path | None = None,
    progress: Progress = lambda text: None,
    meet_s: float = MEET_S,
    pressure_bytes: int | None = None,
) -> tuple[Result, list[Path]]:
    """Play one role, or both on this machine, write the certificate, return the figures and where
    the certificates are: one for each region's own place, unless a path is given.

    Raises BadArgumentError for regions that hold something, PeerError when the other role does not
    come or does not answer. Violations are no exception: they stand in result and certificate.
    """
    if role not in (None, *ROLES):
        raise BadArgumentError(f"--role {role}: a or b")
    if role is not None and not regions:
        raise BadArgumentError("a role needs the regions that both have: --region, once or more")
    if len(regions) > loops.LITMUS_REGIONS_MAX:
        raise BadArgumentError(f"at most {loops.LITMUS_REGIONS_MAX} regions")
    pressure = cache_pressure_bytes() if pressure_bytes is None else pressure_bytes
    with ExitStack() as stack:
        paths = list(regions) or [stack.enter_context(_scratch_file()) for _ in range(2)]
        opened = stack.enter_context(_opened(paths))
        other = stack.enter_context(_other_role(paths)) if role is None else None
        number = ROLES.index(role or "a")
        try:
            played = _play(opened, number, rounds, progress, meet_s, pressure, other)
        except PeerError as error:
            if other is None:
                raise
            raise PeerError(f"{error}. Role b said: {other.said()}") from error
    made = _certificate(opened, role or "both", played)
    targets = {certificate_path or certificate.default_path(r.identity) for r in opened}
    for path in targets:
        certificate.write(path, made)
    return _result(made, played), sorted(targets)


def command(options: Options, say: Say) -> Shown:
    """Plays the tests and writes the certificate."""
    regions = [Path(region) for region in options.region]
    rounds = options.rounds or ROUNDS
    result, written = run(regions, options.role, rounds, options.certificate, progress=say)
    return Shown(result, lines=[f"certificate: {path}" for path in written])


def cache_pressure_bytes() -> int:
    """Twice the largest cache of this machine, as far as the kernel tells."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, BadArgumentError):
            sizes.append(parse_bytes(path.read_text().strip() + "iB"))
    return min(2 * max(sizes), PRESSURE_BYTES_MAX)


# ---- regions ----


@contextmanager
def _scratch_file() -> Iterator[Path]:
    handle, name = mkstemp(prefix="cxlkv-litmus-", dir="/dev/shm")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[list[Region]]:
    """The regions, mapped; files that were made for this run go when it ends."""
    opened: list[Region] = []
    try:
        for path in paths:
            opened.append(open_region(path))
        if len({(str(region.identity), region.inode) for region in opened}) < len(opened):
            raise BadArgumentError("one region is given twice")
        yield opened
    finally:
        _remove_made(opened)


def _remove_made(opened: Sequence[Region]) -> None:
    for region in opened:
        if region.made:
            region.path.unlink(missing_ok=True)
            region.made = False


def open_region(path: Path) -> Region:
    """Map a region; a file that is not there is made. What holds something else is refused."""
    made = False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        check_below_dev(path)
        with suppress(FileExistsError):  # the other role was quicker
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            made = True
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        remedy = ". Bind its driver: daxctl reconfigure-device -m devdax"
        remedy = remedy if error.errno == errno.ENXIO else ""
        raise SystemCallError(f"{path}: cannot open: {error.strerror}{remedy}") from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            _reserve(path, descriptor, status.st_size)
            size_bytes = loops.LITMUS_REGION_BYTES
        elif stat.S_ISCHR(status.st_mode):
            size_bytes = _dax_bytes(path, status.st_rdev)
        else:
            raise BadArgumentError(f"{path}: neither a file nor a dax device")
        identity = certificate.region_identity(path)
        memory = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
        if memory[: len(POOL_MAGIC)].tobytes() == POOL_MAGIC:
            raise _holds(path, "a pool")
        inode = status.st_ino if stat.S_ISREG(status.st_mode) else 0
        return Region(path, inode, identity, memory, made)
    except BaseException:
        if made:
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _holds(path: Path, what: str) -> BadArgumentError:
    return BadArgumentError(
        f"{path}: holds {what}, which the litmus run would overwrite. Give a path where there is "
        "no file yet, on the same file system, or a device that holds no pool"
    )


def _reserve(path: Path, descriptor: int, size_bytes: int) -> None:
    """All of the file's memory, so that no access fails later; empty files and our own only."""
    head = os.pread(descriptor, len(MAGIC), 0)
    if size_bytes > 0 and not head.startswith(MAGIC):
        raise _holds(path, "a pool" if head.startswith(POOL_MAGIC) else "something")
    try:
        os.pwrite(descriptor, MAGIC, 0)  # first: the other role may look in between
        os.posix_fallocate(descriptor, 0, loops.LITMUS_REGION_BYTES)
    except OSError as error:
        raise SystemCallError(f"{path}: cannot reserve 2 MiB: {error.strerror}") from error


def _dax_bytes(path: Path, device: int) -> int:
    """What to map: a mapping past a device's end succeeds, and faults when it is touched."""
    folder = Path(f"/sys/dev/char/{os.major(device)}:{os.minor(device)}")
    align, size = (sysfs.number(folder / name) for name in ("align", "size"))
    if not align or size is None:
        raise BadArgumentError(f"{path}: a device, but no dax device")
    wanted = -(-loops.LITMUS_REGION_BYTES // align) * align
    if size < wanted:
        raise BadArgumentError(f"{path}: has {size} bytes, {wanted} are needed")
    return wanted


# ---- the two roles ----


@dataclass(frozen=True)
class _Other:
    """Role b in a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    def end(self) -> None:
        """Its own end, or ours."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
            return
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        self.end()
        return self.log.read_text(errors="replace").strip() or "nothing"


@contextmanager
def _other_role(paths: Sequence[Path]) -> Iterator[_Other]:
    """Its certificate is dropped: role a's counts for both."""
    with TemporaryDirectory(prefix="cxlkv-litmus-") as folder:
        command = [sys.executable, "-m", "cxlkv.ops.cli", "bench", "litmus", "--role", "b"]
        command += ["--certificate", str(Path(folder) / "b.json")]
        for path in paths:
            command += ["--region", str(path)]
        log = Path(folder) / "b.log"
        with log.open("wb") as to:
            other = _Other(subprocess.Popen(command, stdout=to, stderr=to), log)
        try:
            yield other
        finally:
            other.end()


def _play(
    opened: list[Region],
    role: int,
    rounds: int,
    progress: Progress,
    meet_s: float,
    pressure_bytes: int,
    other: _Other | None,
) -> Played:
    addresses = [region.memory.ctypes.data for region in opened]
    litmus = loops.litmus_make(addresses, role, pressure_bytes, SILENT_S)
    try:
        progress(f"role {ROLES[role]}: waiting for role {ROLES[1 - role]}")
        _meet(litmus, role, opened, meet_s, other)
        _remove_made(opened)  # both have it mapped
        own: Greeting = {
            "version": certificate.VERSION,
            "rounds": rounds,
            "boot": _boot(),
            "machine": certificate.this_machine(),
            "commit": commit(),
        }
        theirs = cast(Greeting, _exchange(litmus, own))
        if theirs["version"] != own["version"]:
            raise PeerError("the other role is of another version of cxlkv: install the same one")
        if role == 1:
            rounds = theirs["rounds"]
        same = own["boot"] == theirs["boot"] or not own["boot"] or not theirs["boot"]
        rows, seconds = _tests(litmus, role, opened, rounds, progress)
        return Played(1 if same else 2, theirs, rows, seconds)
    except BaseException:
        loops.litmus_give_up(litmus)
        raise
    finally:
        loops.litmus_destroy(litmus)


def _meet(
    litmus: _core.Handle,
    role: int,
    opened: Sequence[Region],
    meet_s: float,
    other: _Other | None,
) -> None:
    ends = time.monotonic() + meet_s
    while not loops.litmus_meet(litmus):
        if other is not None and other.process.poll() is not None:
            raise PeerError("role b ended before it came")
        if time.monotonic() > ends:
            paths = " ".join(f"--region {region.path}" for region in opened)
            raise PeerError(
                f"role {ROLES[1 - role]} did not come within {meet_s:g} s. Start on the other host:"
                f" cxlkv bench litmus --role {ROLES[1 - role]} {paths} (its own paths of the same "
                "regions, in the same order)"
            )
        time.sleep(0.001)


def _boot() -> str:
    text = sysfs.read(Path("/proc/sys/kernel/random/boot_id"))
    return certificate.short_hash(f"cxlkv {text}") if text else ""


def _exchange(litmus: _core.Handle, message: object) -> object:
    text = loops.litmus_exchange(litmus, json.dumps(message).encode())
    found: object = json.loads(text.rstrip(b"\0"))
    return found


def _tests(
    litmus: _core.Handle, role: int, opened: Sequence[Region], rounds: int, progress: Progress
) -> tuple[list[Row], list[float]]:
    """Each test over each pair of regions; the roles add up what they saw after each."""
    rows, seconds = [], []
    for test, name in enumerate(loops.LITMUS_TESTS):
        wanted = max(1, rounds // EVICTION_SHARE) if name == "late eviction" else rounds
        for first in range(len(opened)):
            for second in range(len(opened)):
                counts, began = loops.LitmusCounts(), time.monotonic()
                for start in range(0, wanted, CHUNK):
                    progress(f"{name}, regions {first} and {second}: {start} of {wanted} rounds")
                    chunk = range(start, min(start + CHUNK, wanted))
                    loops.litmus_run(litmus, test, (first, second), chunk, counts)
                seconds.append(time.monotonic() - began)
                numbers = counts.numbers()
                row: Row = {
                    "test": name,
                    "first": first,
                    "second": second,
                    "rounds": numbers["rounds"],
                    "raced": numbers["raced"],
                    "violations": numbers["violations"],
                    "first_violation": _described(numbers, role),
                }
                theirs = cast(Row, _exchange(litmus, row))
                row["raced"] += theirs["raced"]
                row["violations"] += theirs["violations"]
                row["first_violation"] = row["first_violation"] or theirs["first_violation"]
                rows.append(row)
    return rows, seconds


def _described(numbers: dict[str, int], role: int) -> str:
    if not numbers["violations"]:
        return ""
    return (
        f"{loops.LITMUS_KINDS[numbers['kind']]}: role {ROLES[role]}, round {numbers['round']}, "
        f"region {numbers['region']}: {numbers['words_wrong']} words, the first is word "
        f"{numbers['word']} of line {numbers['line']}: {numbers['got']:#x}, wanted is "
        f"{numbers['wanted']:#x}"
    )


# ---- what came of it ----


def _certificate(opened: Sequence[Region], role: str, played: Played) -> Certificate:
    label = "one coherent host: it shows that the tests run, and says nothing about two hosts"
    return {
        "label": label if played.hosts == 1 else "two hosts",
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "hosts": played.hosts,
        "role": role,
        "flush": loops.flush_name(),
        "machine": certificate.this_machine(),
        "other_machine": played.other["machine"],
        "regions": [
            {"path": str(r.path.absolute()), "inode": r.inode, "identity": r.identity}
            for r in opened
        ],
        "tests": played.rows,
        "rounds": sum(row["rounds"] for row in played.rows),
        "violations": sum(row["violations"] for row in played.rows),
    }


def _result(made: Certificate, played: Played) -> Result:
    checks = {"no_violations": made["violations"] == 0}
    result = Result("litmus", checks, over_links=False)
    timed = list(zip(played.rows, played.seconds, strict=True))
    for test in loops.LITMUS_TESTS:  # samples are the pairs of regions
        pairs = [(row, seconds) for row, seconds in timed if row["test"] == test]
        result.measure(f"{test}: rounds", [row["rounds"] for row, _ in pairs], "rounds")
        raced = [row["raced"] / row["rounds"] for row, _ in pairs]
        result.measure(f"{test}: raced", raced, "of the rounds")
        result.measure(f"{test}: speed", [row["rounds"] / s for row, s in pairs], "rounds/s")
        result.measure(f"{test}: violations", [row["violations"] for row, _ in pairs], "rounds")
    for row in played.rows:
        if row["violations"]:
            where = f"{row['test']}, regions {row['first']} and {row['second']}"
            result.notes.append(f"{where}: {row['first_violation']}")
    result.notes.append(f"{made['label']}. Lines are written back with {made['flush']}.")
    return result
