"""Runs peers beside our pool: the same bytes in turn, every answer checked."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.bench.peers.serving import UNIT_BYTES, Objects
from cxlkv.bench.peers.talking import OURS, ContenderError, Conversation, Program, program_of
from cxlkv.bench.result import Result
from cxlkv.errors import MemoryShortError
from cxlkv.layout import format_bytes

ENVIRONMENTS = Path("build/peers")
SHARED = "/dev/shm"
SHARED_SHARE = 16  # of the payload: it, where it is read to, and the stores that are files


@dataclass(frozen=True)
class Size:
    """Objects of 1, 4 and 32 layers of 64 KiB, 256 MiB of them; cases as in Store.run."""

    cases: tuple[str, ...] = ("put", "get", "ranges")
    object_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 2 << 20)
    total_bytes: int = 256 << 20
    call_objects: int = 64
    range_share: float = 1 / 8
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 5
    limit_s: float = 120.0


@dataclass(frozen=True)
class Row:
    """One line of the side-by-side table: the samples of one form of one peer, in `unit`."""

    case: str
    object_bytes: int
    threads: int
    peer: str
    form: str
    samples: list[float]

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def unit(self) -> str:
        """A lease moves no bytes."""
        return "us/object" if self.case == "lease" else "GB/s"

    @property
    def metric(self) -> str:
        return f"{self.case}_{self.object_bytes >> 10}k_{self.peer}_{self.form}_{self.threads}t"


@dataclass
class SideBySide(Result):
    """A result file that also has the versions, the missing peers and why, and the rows."""

    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def who(self) -> list[str]:
        """The version of each that was measured, and why the others were not."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        missing = [f"missing: {name}: {reason}" for name, reason in self.missing.items()]
        return [f"versions: {versions}", *missing]

    def as_dict(self) -> dict[str, object]:
        """The one shape of result files: a metric for each row."""
        return {**super().as_dict(), "notes": [*self.who(), *self.notes]}

    def groups(self) -> list[tuple[str, int, int]]:
        return list(dict.fromkeys((row.case, row.object_bytes, row.threads) for row in self.rows))


class Ring:
    """The peers that are still in the run. Who fails is out of it, with the reason."""

    def __init__(self, result: SideBySide) -> None:
        self.result = result
        self.talks: dict[str, Conversation] = {}

    def join(self, program: Program, log: Path, limit_s: float) -> None:
        with self.dropping(program.name):
            talk = Conversation(program, log, limit_s)
            self.talks[program.name] = talk
            self.result.versions[program.name] = talk.version

    @contextlib.contextmanager
    def dropping(self, name: str) -> Iterator[None]:
        """A ContenderError within drops that peer, and nobody else."""
        try:
            yield
        except ContenderError as error:
            self.result.missing[name] = str(error)
            talk = self.talks.pop(name, None)
            if talk is not None:
                talk.stop()

    def ask_all(self, names: Sequence[str], request: dict[str, object]) -> None:
        for name in names:
            with self.dropping(name):
                if name in self.talks:
                    self.talks[name].ask(request)

    def stop(self) -> None:
        for talk in self.talks.values():
            talk.stop()


def measure(
    result: SideBySide, programs: Sequence[Program], size: Size, progress: Callable[[str], None]
) -> None:
    """Rows and metrics of all programs that can be started; the others are `missing`.

    A check is for what we give; a peer that fails is missing from there on, by name.
    """
    need_room(SHARED, SHARED_SHARE * size.total_bytes, "the peers side by side need")
    with tempfile.TemporaryDirectory(dir=SHARED) as made, contextlib.ExitStack() as leaving:
        place, ring = Path(made), Ring(result)
        leaving.callback(ring.stop)
        payload = write_payload(place, size)
        for program in programs:
            ring.join(program, place / f"{program.name}.log", size.limit_s)
        for threads in size.threads:
            for object_bytes in size.object_bytes:
                progress(f"{result.case}: {object_bytes >> 10} KiB, {threads} threads ...")
                move(ring, place, payload, size, object_bytes, threads)
    for name in OURS:
        if any(program.name == name for program in programs):
            result.checks[f"{name}_right"] = name not in result.missing
    for row in result.rows:
        result.measure(row.metric, row.samples, row.unit)


def need_room(place: str | Path, needed: int, who_needs: str) -> None:
    """Raises MemoryShortError where there is less."""
    room = shutil.disk_usage(place).free
    if room < needed:
        raise MemoryShortError(
            f"{place} has {format_bytes(room)} free, {who_needs} {format_bytes(needed)}: "
            "enlarge it (mount -o remount,size=...)"
        )


def write_payload(place: Path, size: Size) -> Bytes:
    """The bytes that all move, Gaussian bf16, in place / payload."""
    rng = np.random.default_rng(1)
    payload: Bytes = np.empty(size.total_bytes, np.uint8)
    step = 1 << 24
    for at in range(0, size.total_bytes, step):
        part = payload[at : at + step].view(ml_dtypes.bfloat16)
        part[:] = rng.standard_normal(len(part), np.float32)
    payload.tofile(place / "payload")
    with (place / "out").open("wb") as file:
        file.truncate(size.total_bytes * 5 // 4 + (1 << 20))
    return payload


def move(
    ring: Ring, place: Path, payload: Bytes, size: Size, object_bytes: int, threads: int
) -> None:
    """All cases, of objects of one size, `rounds` times in turn after one that warms."""
    given = Objects(
        payload=str(place / "payload"),
        out=str(place / "out"),
        folder=str(place),
        object_bytes=object_bytes,
        count=size.total_bytes // object_bytes,
        call_objects=size.call_objects,
        threads=threads,
    )
    out = np.memmap(given.out, np.uint8, "r+")
    rng = np.random.default_rng(object_bytes)
    drawn = [ranges_of(rng, given, size.range_share) for _ in range(size.rounds + 1)]

    def one(talk: Conversation, form: str, case: str, wanted: list[list[int]]) -> float:
        right = expected(case, payload, given, wanted)
        out[: len(right)] = 0
        moved = len(right) or given.bytes
        request = {"op": "run", "case": case, "form": form, "wanted": wanted}
        seconds = talk.seconds(request, moved)
        if not np.array_equal(out[: len(right)], right):
            at = int(np.argmax(out[: len(right)] != right))
            raise ContenderError(
                f"wrong bytes: {case} ({form}) differs at byte {at} of {len(right)}"
            )
        return seconds * 1e6 / given.count if case == "lease" else moved / seconds / 1e9

    contenders = [
        (talk, form, [case for case in size.cases if case in can])
        for talk in ring.talks.values()
        for form, can in talk.forms.items()
    ]
    names = list(ring.talks)
    ring.ask_all(names, {"op": "open", "objects": asdict(given)})
    found: dict[tuple[str, str, str], list[float]] = {}
    for turn, wanted in enumerate(drawn):
        for talk, form, cases in contenders:
            for case in cases_of(turn, cases):
                with ring.dropping(talk.name):
                    if talk.name not in ring.talks:
                        continue
                    speed = one(talk, form, case, wanted)
                    if turn or case == "first":
                        found.setdefault((case, talk.name, form), []).append(speed)
    ring.ask_all(names, {"op": "close"})
    ring.result.rows += [
        Row(case, object_bytes, threads, name, form, figures)
        for (case, name, form), figures in found.items()
        if name in ring.talks
    ]


def cases_of(turn: int, cases: Sequence[str]) -> list[str]:
    """The first put is only there at the beginning, and read back like any other."""
    rest = [case for case in cases if case != "first"]
    return ["first", "get", *rest] if turn == 0 and "first" in cases else rest


def ranges_of(rng: np.random.Generator, given: Objects, share: float) -> list[list[int]]:
    """Pages that each layer wants, others in each round."""
    count = max(1, int(share * given.count))
    return [
        np.sort(rng.choice(given.count, count, replace=False)).tolist() for _ in range(given.layers)
    ]


def expected(case: str, payload: Bytes, given: Objects, wanted: list[list[int]]) -> Bytes:
    """What `out` must begin with."""
    if case in ("first", "put"):
        return payload[:0]
    if case in ("get", "lease"):
        return payload[: given.bytes]
    units = payload.reshape(given.count, given.layers, UNIT_BYTES)
    return np.concatenate([units[pages, layer] for layer, pages in enumerate(wanted)]).reshape(-1)


def programs_of(result: SideBySide, environments: Path, names: Sequence[str]) -> list[Program]:
    """Ours, and the peers that have an environment; the others are `missing`."""
    found = []
    for name in names:
        try:
            found.append(program_of(name, environments))
        except ContenderError as error:
            result.missing[name] = str(error)
    return found
