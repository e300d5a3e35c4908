"""Peers and our pool in one run: the same bytes, round by round in turn, every answer checked."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Bytes
from cxlkv.bench.peers.serving import UNIT_BYTES, Keys, Objects
from cxlkv.bench.peers.talking import OURS, ContenderError, Conversation, Program, program_of
from cxlkv.bench.result import Result
from cxlkv.errors import MemoryShortError
from cxlkv.layout import format_bytes

PEERS = ("mooncake", "lmcache", "faiss", "torch")
NAMES = ("ours", "plain", *PEERS)
ENVIRONMENTS = Path("build/peers")
SHARED = "/dev/shm"
SHARED_SHARE = 13  # of the payload: it, where it is read to, and the stores that are files
AGREEMENT = 0.95  # of pages: torch rounds scores to bf16, faiss ranks tokens


@dataclass(frozen=True)
class Size:
    """Objects of 1, 4 and 32 layers of 64 KiB, 256 MiB of them; as many bytes of keys to scan.

    cases: of serving.CASES, those that are measured.
    """

    cases: tuple[str, ...] = ("put", "get", "ranges", "scan")
    object_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 2 << 20)
    total_bytes: int = 256 << 20
    call_objects: int = 64
    range_share: float = 1 / 8
    kv_heads: int = 8
    head_dim: int = 128
    group: int = 4
    page_tokens: int = 16
    pages: int = 256
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 5
    settle_s: float = 0.25
    limit_s: float = 120.0

    @property
    def tokens(self) -> int:
        return self.total_bytes // (2 * self.kv_heads * self.head_dim)


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
        return unit_of(self.case)

    @property
    def metric(self) -> str:
        size = f"{self.object_bytes >> 10}k" if self.object_bytes else "keys"
        return f"{self.case}_{size}_{self.peer}_{self.form}_{self.threads}t"


@dataclass
class SideBySide(Result):
    """A result file that also has the versions, who is missing and why, and the rows."""

    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """The one shape of result files: a metric for each row, versions and who is missing in the
        notes."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        missing = [f"missing: {name}: {reason}" for name, reason in self.missing.items()]
        return {**super().as_dict(), "notes": [f"versions: {versions}", *missing, *self.notes]}

    def fastest(self, case: str, object_bytes: int, threads: int) -> dict[str, Row]:
        """Of each peer that does this, its fastest form."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if (row.case, row.object_bytes, row.threads) == (case, object_bytes, threads):
                best = found.setdefault(row.peer, row)
                found[row.peer] = row if row.median > best.median else best
        return found

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

    def measure(
        self,
        cases: Sequence[str],
        opening: dict[str, object],
        rounds: int,
        one: Callable[[int, Conversation, str, str], list[float]],
    ) -> dict[tuple[str, str, str], list[float]]:
        """Figures by (case, peer, form), of who is still there at the end: `one`, of the number of
        the round, a peer, a form and a case, `rounds` times in turn after one that warms."""
        contenders = [
            (talk, form, does)
            for talk in self.talks.values()
            for form, can in talk.forms.items()
            if (does := [case for case in cases if case in can])
        ]
        names = list(dict.fromkeys(talk.name for talk, _, _ in contenders))
        self.ask_all(names, {"op": "open", **opening})
        found: dict[tuple[str, str, str], list[float]] = {}
        for turn in range(rounds + 1):
            for talk, form, does in contenders:
                for case in cases_of(turn, does):
                    with self.dropping(talk.name):
                        if talk.name not in self.talks:
                            continue
                        figures = one(turn, talk, form, case)
                        if turn or case == "first":
                            found.setdefault((case, talk.name, form), []).extend(figures)
        self.ask_all(names, {"op": "close"})
        return {key: figures for key, figures in found.items() if key[1] in self.talks}

    def ask_all(self, names: Sequence[str], request: dict[str, object]) -> None:
        for name in names:
            with self.dropping(name):
                if name in self.talks:
                    self.talks[name].ask(request)

    def stop(self) -> None:
        for talk in self.talks.values():
            talk.stop()


def unit_of(case: str) -> str:
    """A lease moves no bytes."""
    return "us/object" if case == "lease" else "GB/s"


def run(
    result: SideBySide,
    programs: Sequence[Program],
    size: Size = Size(),
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """What measure() does, and ratios of our fastest form to each peer's."""
    measure(result, programs, size, progress)
    for case, object_bytes, threads in result.groups():
        best = result.fastest(case, object_bytes, threads)
        for name in best if "ours" in best else ():
            if name != "ours":
                row = best[name]
                ratio = best["ours"].median / row.median
                result.ratios[row.metric.replace(f"_{row.form}_", "_") + "_ours_to_it"] = ratio


def measure(
    result: SideBySide, programs: Sequence[Program], size: Size, progress: Callable[[str], None]
) -> None:
    """Rows and metrics of all programs that can be started; the others are `missing`.

    A check is for what we give; a peer that fails is missing from there on, by name.
    """
    room, needed = shutil.disk_usage(SHARED).free, SHARED_SHARE * size.total_bytes
    if room < needed:
        raise MemoryShortError(
            f"{SHARED} has {format_bytes(room)} free, the peers side by side need "
            f"{format_bytes(needed)}: enlarge it (mount -o remount,size=...)"
        )
    with tempfile.TemporaryDirectory(dir=SHARED) as made, contextlib.ExitStack() as leaving:
        place, ring = Path(made), Ring(result)
        leaving.callback(ring.stop)
        payload, queries = write_payload(place, size)
        for program in programs:
            ring.join(program, place / f"{program.name}.log", size.limit_s)
        for threads in size.threads:
            for object_bytes in size.object_bytes:
                progress(f"{result.case}: {object_bytes >> 10} KiB, {threads} threads ...")
                move(ring, place, payload, size, object_bytes, threads)
            if "scan" in size.cases:
                progress(f"{result.case}: scan, {threads} threads ...")
                scan(ring, place, payload, queries, size, threads)
    for name in OURS:
        if any(program.name == name for program in programs):
            result.checks[f"{name}_right"] = name not in result.missing
    for row in result.rows:
        result.measure(row.metric, row.samples, row.unit)


def write_payload(place: Path, size: Size) -> tuple[Bytes, npt.NDArray[np.float32]]:
    """The bytes that all move and scan, Gaussian bf16, in place / payload; queries behind them."""
    rng = np.random.default_rng(1)
    payload: Bytes = np.empty(size.total_bytes, np.uint8)
    step = 1 << 24
    for at in range(0, size.total_bytes, step):
        part = payload[at : at + step].view(ml_dtypes.bfloat16)
        part[:] = rng.standard_normal(len(part), np.float32)
    shape = (size.kv_heads, size.group, size.head_dim)
    queries = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    with (place / "payload").open("wb") as file:
        file.write(payload.data)
        file.write(queries.tobytes())
    with (place / "out").open("wb") as file:
        file.truncate(size.total_bytes * 5 // 4 + (1 << 20))
    return payload, queries.astype(np.float32)


def move(
    ring: Ring, place: Path, payload: Bytes, size: Size, object_bytes: int, threads: int
) -> None:
    """All cases but scan, of objects of one size, `rounds` times in turn after one that warms."""
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

    def one(turn: int, talk: Conversation, form: str, case: str) -> list[float]:
        wanted = drawn[turn]
        right = expected(case, payload, given, wanted)
        out[: len(right)] = 0
        moved = len(right) or given.bytes
        request = {"op": "run", "case": case, "form": form, "wanted": wanted}
        seconds = talk.seconds(request, moved)
        check_bytes(case, form, out, right)
        return [figure(case, moved, given, s) for s in seconds]

    cases = [case for case in size.cases if case != "scan"]
    found = ring.measure(cases, {"objects": asdict(given)}, size.rounds, one)
    ring.result.rows += [
        Row(case, object_bytes, threads, name, form, figures)
        for (case, name, form), figures in found.items()
    ]


def cases_of(turn: int, cases: Sequence[str]) -> list[str]:
    """The first put is only there at the beginning, and read back like any other."""
    rest = [case for case in cases if case != "first"]
    return ["first", "get", *rest] if turn == 0 and "first" in cases else rest


def figure(case: str, moved: int, given: Objects, seconds: float) -> float:
    """In unit_of(case)."""
    return seconds * 1e6 / given.count if case == "lease" else moved / seconds / 1e9


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


def check_bytes(case: str, form: str, out: Bytes, right: Bytes) -> None:
    if not np.array_equal(out[: len(right)], right):
        at = int(np.argmax(out[: len(right)] != right))
        raise ContenderError(f"wrong bytes: {case} ({form}) differs at byte {at} of {len(right)}")


def scan(
    ring: Ring,
    place: Path,
    payload: Bytes,
    queries: npt.NDArray[np.float32],
    size: Size,
    threads: int,
) -> None:
    """The pages with the best keys; every round in turn, after a rest: OpenMP's threads spin on."""
    given = Keys(
        payload=str(place / "payload"),
        out=str(place / "out"),
        folder=str(place),
        kv_heads=size.kv_heads,
        tokens=size.tokens,
        head_dim=size.head_dim,
        group=size.group,
        page_tokens=size.page_tokens,
        pages=size.pages,
        threads=threads,
    )
    best = best_pages(payload, queries, given)
    out = np.memmap(given.out, np.int32, "r+", shape=best.shape)

    def one(turn: int, talk: Conversation, form: str, case: str) -> list[float]:
        time.sleep(size.settle_s)
        out[:] = -1
        request = {"op": "run", "case": case, "form": form, "wanted": []}
        seconds = talk.seconds(request, given.bytes)
        check_pages(form, out, best)
        return [given.bytes / s / 1e9 for s in seconds]

    found = ring.measure(("scan",), {"keys": asdict(given)}, size.rounds, one)
    ring.result.rows += [
        Row(case, 0, threads, name, form, speeds) for (case, name, form), speeds in found.items()
    ]


def best_pages(
    payload: Bytes, queries: npt.NDArray[np.float32], given: Keys
) -> npt.NDArray[np.int64]:
    """By numpy in float32: [kv_heads, pages], in no order."""
    shape = (given.kv_heads, given.tokens, given.head_dim)
    keys = payload[: given.bytes].view(ml_dtypes.bfloat16).reshape(shape)
    found = []
    for head, query in zip(keys, queries, strict=True):
        scores = (head.astype(np.float32) @ query.T).reshape(-1, given.page_tokens * given.group)
        found.append(np.argpartition(-scores.max(1), given.pages)[: given.pages])
    return np.stack(found)


def check_pages(form: str, out: npt.NDArray[np.int32], best: npt.NDArray[np.int64]) -> None:
    same = sum(len(np.intersect1d(a, b)) for a, b in zip(out, best, strict=True))
    if same < AGREEMENT * best.size:
        raise ContenderError(f"wrong pages: scan ({form}) has {same} of the best {best.size}")


def programs_of(
    result: SideBySide, environments: Path, names: Sequence[str] = NAMES
) -> list[Program]:
    """Ours, and the peers that have an environment; the others are `missing`."""
    found = []
    for name in names:
        try:
            found.append(program_of(name, environments))
        except ContenderError as error:
            result.missing[name] = str(error)
    return found
