"""Runs the protocol on emulated memory whose hosts' caches do not see each other, seed by seed.

    python -m tests.native.incoherent protocol --seeds 2000 --model x86 --leave-out FLUSH_TAKE
    python -m tests.native.incoherent protocol --seed 7513 --model arm64 --trace

The emulator (native/emulation/incoherent.h) and the programs that run on it (tests/native) are C,
built here from a checkout. A seed decides everything: who runs, what the caches do, who dies. A
flush or fence of native/src/base/flush.h may be left out; then some seed should fail.

Exit code 0: no seed failed; 1: one did, and its trace was made as small as it could be.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError

CHECKOUT = Path(__file__).resolve().parents[2]
# What publishes and acquires; calls between hosts; a look at owners that is stopped at each step;
# all but the calls, with deaths, fences and returns.
PROGRAMS = {
    "visibility": "test_visibility_incoherent",
    "rpc": "test_rpc_incoherent",
    "hosts": "test_hosts_incoherent",
    "protocol": "test_protocol_incoherent",
}
MODELS = ("x86", "arm64")
SEEDS = 2000
CHUNK_SEEDS = 100  # what one process runs: well below a second
NEAR_SEEDS = 100  # so many are tried for each smaller run
ROUNDS_MAX = 24  # no program lets a process have more
EVENTS_MAX = 1 << 20  # of a trace: more than a seed has, but for those that hang
TAIL_ROWS = 60

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Limits:
    """Where a seed draws more hosts, deaths and pauses, or rounds of a process, it gets these."""

    hosts: int | None = None
    disturbances: int | None = None
    rounds: int | None = None

    def options(self) -> str:
        """Options as on the command line."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return "".join(f" --{name} {value}" for name, value in given.items())


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Result:
    """What some seeds of a program came to.

    failed_seed: the lowest one that failed, and `what` failed there; None and "" when none did.
    trace: its events on the lines that the failed check is about. counters: what the seeds before
    it did, as the program counts it, up to CHUNK_SEEDS of them left out.
    """

    program: Path
    model: str
    left_out: str | None
    limits: Limits
    failed_seed: int | None
    what: str
    trace: str
    counters: dict[str, int]


def sites() -> dict[str, int]:
    """Every site of flush.h, with its number; FLUSH_NONE, which is 0, is none."""
    text = (_sources() / "native/src/base/flush.h").read_text()
    body = text[text.index("enum flush_site {") :]
    names = re.findall(r"FLUSH_\w+", re.sub(r"/\*.*?\*/", "", body[: body.index("};")], flags=re.S))
    return {
        name: number
        for number, name in enumerate(names)
        if name not in ("FLUSH_LOCAL", "FLUSH_SITES")
    }


def build(folder: Path, names: Iterable[str] = tuple(PROGRAMS)) -> dict[str, Path]:
    """Builds the programs of these names with cmake in a folder; what is built already stays."""
    names = list(names)
    for name in names:
        _known("program", name, PROGRAMS)
    source = _sources() / "native"
    if shutil.which("cmake") is None:
        raise UnsupportedError("cmake is missing, and builds the emulation: install it with apt")
    targets = [PROGRAMS[name] for name in names]
    steps = [
        ["cmake", "-S", str(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", str(folder), "--parallel", str(_cpus()), "--target", *targets],
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may build here, too
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                said = (done.stdout + done.stderr)[-2000:]
                raise UnsupportedError(f"{' '.join(step)} failed:\n{said}")
    return {name: folder.resolve() / PROGRAMS[name] for name in names}


def run(
    program: Path,
    first_seed: int,
    seeds: int,
    model: str,
    left_out: str | None = None,
    limits: Limits = NO_LIMITS,
    progress: Progress = lambda text: None,
) -> Result:
    """Runs seeds on all CPUs until one fails; the same seed always does the same.

    Raises BadArgumentError for a model or site that is not there, and CXLKVError when the program
    ended without naming a seed.
    """
    found = _run(program, first_seed, seeds, model, left_out, limits, progress)
    return found if found.failed_seed is None else _with_trace(found)


def smaller(failed: Result, progress: Progress = lambda text: None) -> Result:
    """The smallest run that fails by the same check: with its trace, no counters.

    Smallest: the fewest hosts, then the fewest deaths and pauses, then the fewest rounds of each
    process with which one of the next NEAR_SEEDS seeds fails so. Found by trial: there may be
    smaller ones with other seeds.
    """
    assert failed.failed_seed is not None
    check = failed.what.partition(" (")[0]
    best = failed
    for name, values in (
        ("hosts", range(2, 8)),
        ("disturbances", range(6)),
        ("rounds", range(1, ROUNDS_MAX)),
    ):
        for value in values:
            progress(f"looking for a smaller run: at most {value} {name}")
            limits = replace(best.limits, **{name: value})
            seed = best.failed_seed or 0
            tried = _run(best.program, seed, NEAR_SEEDS, best.model, best.left_out, limits)
            if tried.failed_seed is not None and tried.what.partition(" (")[0] == check:
                best = tried
                break
    best = _with_trace(replace(best, counters={}))
    for name in vars(NO_LIMITS):  # what changes nothing need not be said
        without = replace(best, limits=replace(best.limits, **{name: None}))
        if _what(_said(without, best.failed_seed or 0, 1)) == best.what:
            without = _with_trace(without)
            best = without if without.trace == best.trace else best
    return best


def _sources() -> Path:
    for name in ("native/CMakeLists.txt", "tests/native/support/knobs.h"):
        if not (CHECKOUT / name).is_file():
            raise UnsupportedError(
                f"the emulation is built from the sources, and {name} is not in {CHECKOUT}: "
                "run it in a checkout of cxlkv"
            )
    return CHECKOUT


def _known(kind: str, name: str, there: Iterable[str]) -> None:
    if name not in there:
        raise BadArgumentError(f"no {kind} is called {name!r}; there are {', '.join(there)}")


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


# ---- running seeds ----


def _run(
    program: Path,
    first_seed: int,
    seeds: int,
    model: str,
    left_out: str | None,
    limits: Limits,
    progress: Progress = lambda text: None,
) -> Result:
    _known("model", model, MODELS)
    if left_out is not None:
        _known("site of native/src/base/flush.h", left_out, sites())
    if first_seed < 0 or seeds < 1:
        raise BadArgumentError(f"{seeds} seeds from {first_seed} on: 1 or more, from 0 or later on")
    for name, least in (("hosts", 2), ("disturbances", 0), ("rounds", 1)):
        limit = vars(limits)[name]
        if limit is not None and limit < least:
            raise BadArgumentError(f"at most {limit} {name}: {least} is the least")
    result = Result(program, model, left_out, limits, None, "", "", {})
    end, counters = first_seed + seeds, Counter[str]()
    with ThreadPoolExecutor(_cpus()) as executor:
        chunks = [
            executor.submit(_said, result, seed, min(CHUNK_SEEDS, end - seed))
            for seed in range(first_seed, end, CHUNK_SEEDS)
        ]
        try:
            for number, chunk in enumerate(chunks):  # in order, so that the lowest seed is named
                said = chunk.result()
                failed = re.search(r"^seed (\d+), ", said, re.M)
                if failed:
                    result = replace(result, failed_seed=int(failed[1]), what=_what(said))
                    break
                counters.update(_counters(said))
                progress(f"{model}: {min((number + 1) * CHUNK_SEEDS, seeds):,} of {seeds:,} seeds")
        finally:
            for chunk in chunks:
                chunk.cancel()
    return replace(result, counters=dict(counters))


def _said(of: Result, first_seed: int, seeds: int, events: int = 0) -> str:
    """What the program prints about these seeds."""
    settings = {
        "SEED": first_seed,
        "SEEDS": seeds,
        "ARM64": MODELS.index(of.model),
        "LEFT_OUT": sites()[of.left_out] if of.left_out else 0,
        "HOSTS": of.limits.hosts,
        "DISTURBANCES": of.limits.disturbances,
        "ROUNDS": of.limits.rounds,
        "TRACE": events,
    }
    environment = {name: text for name, text in os.environ.items() if name[:6] != "CXLKV_"}
    environment |= {f"CXLKV_{k}": str(v) for k, v in settings.items() if v is not None}
    done = subprocess.run(
        [of.program], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0 and not re.search(r"^seed \d+, ", done.stderr, re.M):
        code = done.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise CXLKVError(
            f"{of.program} ended by {how} and named no seed, between {first_seed} and "
            f"{first_seed + seeds - 1}, {of.model}:\n{done.stderr[-2000:]}"
        )
    return done.stderr


def _what(said: str) -> str:
    """What failed: a check of the program, or of the emulator itself."""
    found = re.search(r"^(?:failed|incoherent memory): (.*)", said, re.M)
    return found[1] if found else said.strip().rpartition("\n")[2]


def _counters(said: str) -> dict[str, int]:
    """Parse counters such as "100 seeds, 7 steps: accepted 5, read in place 3"."""
    before = re.findall(r"(\d+) ([a-z]+)[,:\n]", said)
    after = re.findall(r"([a-z][a-z -]+) (\d+)[,\n]", said)
    return {name: int(count) for count, name in before} | {n: int(count) for n, count in after}


# ---- traces ----

EVENT = re.compile(
    r" *(\d+) host \d+ (?:actor (\d+)|memory) +(.+?)(?: +line (\d+)\.(\d) = \S+)?(?: +at \w+)?$"
)


@dataclass(frozen=True)
class _Event:
    """One line of a trace. actor: "" for memory itself; line: None for fences and deaths."""

    text: str
    step: int
    actor: str
    what: str
    line: int | None
    word: int

    def is_of_fence(self) -> bool:
        return self.what in ("fence all", "fence stores", "no fence")

    def goes_on(self, before: _Event) -> bool:
        """Another word of the same line as the row before, which begins with `before`."""
        same = (self.actor, self.what, self.line) == (before.actor, before.what, before.line)
        return same and self.line is not None and self.word != before.word


def _with_trace(failed: Result) -> Result:
    """Runs the seed that failed again, to see all of its events."""
    assert failed.failed_seed is not None
    said = _said(failed, failed.failed_seed, 1, EVENTS_MAX)
    if _what(said) != failed.what:
        raise CXLKVError(
            f"seed {failed.failed_seed} of {failed.program} does not do the same again: "
            f"{failed.what}, then {_what(said) or 'nothing'}. It depends on more than its seed"
        )
    return replace(failed, trace=_trace(said))


def _trace(said: str) -> str:
    events = []
    for text in said.splitlines():
        if found := EVENT.match(text):
            step, actor, what, line, word = found.groups()
            at = int(line) if line else None
            events.append(_Event(text, int(step), actor or "", what, at, int(word or 0)))
    named = re.findall(r"^about lines (\d+) to (\d+): (.*)$", said, re.M)
    ranges = [(int(first), int(last), name) for first, last, name in named]
    if not ranges:
        overwritten = {e.line for e in events if e.what == "overwrites" and e.line is not None}
        ranges = [(line, line, "overwritten") for line in sorted(overwritten)]
    wanted = {line for first, last, _ in ranges for line in range(first, last + 1)}
    kept = _about(events, wanted) if wanted else events[-256:]
    rows = [(event.step, event.text) for event in _folded(kept)]
    notes = re.findall(r"^( *(\d+) member .*)", said, re.M)
    rows += [(int(step), text) for text, step in notes if rows and int(step) >= rows[0][0]]
    lines = ", ".join(
        f"{first} {name}" if first == last else f"{first} to {last} {name}"
        for first, last, name in ranges
    )
    head = re.search(r"^seed \d+, \w+, left out: \w+", said, re.M)
    how_many = f"{len(kept)} of {len(events)} events, of lines {lines or 'all'}"
    return "\n".join(
        [
            f"{head[0] if head else 'no trace'}; {how_many}",
            *(text for _, text in sorted(rows, key=lambda row: row[0])),
            f"failed: {_what(said)}",
        ]
    )


def _about(events: list[_Event], wanted: set[int]) -> list[_Event]:
    """What happened to these lines, deaths, and of each actor the fences next to its part in it.

    Where nothing in it was left out, but something elsewhere, the last few of that.
    """
    keep: set[int] = set()
    before: dict[str, list[int]] = {}  # an actor's fences since it last had to do with the lines
    after: set[str] = set()  # actors that had, and no fence since
    for index, event in enumerate(events):
        if event.is_of_fence():
            if event.actor in after:
                keep.add(index)
            else:
                real = [i for i in before.get(event.actor, []) if events[i].what != "no fence"]
                before[event.actor] = [*real, index] if event.what == "no fence" else [index]
            if event.what != "no fence":
                after.discard(event.actor)
        elif event.line in wanted:
            keep |= {index, *before.pop(event.actor, [])}
            after |= {event.actor} - {""}
        elif event.line is None:
            keep.add(index)
    nothing = [i for i, event in enumerate(events) if event.what in ("left out", "no fence")]
    if not keep.intersection(nothing):
        keep.update(nothing[-10:])
    return [events[index] for index in sorted(keep)]


def _folded(events: list[_Event]) -> list[_Event]:
    """A line's words, loaded or stored one after the other, are one row."""
    rows: list[_Event] = []
    more = 0
    for event in events:
        if rows and event.goes_on(rows[-1]):
            more += 1
            text = re.sub(r" \(and .*", "", rows[-1].text) + f" (and {more} more)"
            rows[-1] = replace(rows[-1], text=text)
        else:
            more = 0
            rows.append(event)
    return rows


# ---- the command ----


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.native.incoherent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", help=", ".join(PROGRAMS))
    parser.add_argument("--seeds", type=int, help=f"how many (default {SEEDS}; with --seed 1)")
    parser.add_argument("--seed", type=int, help="the first one (default 1)")
    parser.add_argument("--model", help=f"{' or '.join(MODELS)} (default: one after the other)")
    parser.add_argument(
        "--leave-out", metavar="SITE", help="of native/src/base/flush.h: FLUSH_TAKE"
    )
    parser.add_argument("--hosts", type=int, help="at most; this and the next two make it small")
    parser.add_argument("--disturbances", type=int, help="deaths and pauses, at most")
    parser.add_argument("--rounds", type=int, help="of each process, at most")
    parser.add_argument(
        "--trace", action="store_true", help=f"all of the trace, not its last {TAIL_ROWS} rows"
    )
    parser.add_argument(
        "--build", type=Path, default=CHECKOUT / "build/incoherent", help="where cmake builds"
    )
    return parser.parse_args(arguments)


def _failure(name: str, found: Result, whole: bool, progress: Progress) -> list[str]:
    """Lines to print. A run that was given limits is small already."""
    least = smaller(found, progress) if found.limits == NO_LIMITS else found
    head, *trace = least.trace.splitlines()
    if not whole and len(trace) > TAIL_ROWS:
        cut, trace = trace[:-TAIL_ROWS], trace[-TAIL_ROWS:]
        left_out = [row for row in cut if " left out " in row or " no fence " in row]
        trace = [*left_out[-3:], f"... {len(cut)} rows, which --trace shows ...", *trace]
    replay = f"{name} --seed {least.failed_seed} --model {least.model}"
    replay += f" --leave-out {least.left_out}" if least.left_out else ""
    replay += least.limits.options()
    return [
        f"{name}, {found.model}: seed {found.failed_seed} failed: {found.what}",
        f"the smallest run found that fails so: {replay}",
        "",
        head,
        *trace,
    ]


def _success(name: str, found: Result) -> list[str]:
    did = ", ".join(f"{what} {count:,}" for what, count in found.counters.items())
    lines = [f"{name}, {found.model}: no seed failed: {did}"]
    if found.left_out and not found.counters["left out"]:
        lines.append(f"{found.left_out} was never met: it is in another program's part")
    return lines


def _command(given: argparse.Namespace, progress: Progress) -> int:
    program = build(given.build, [given.program])[given.program]
    first_seed = 1 if given.seed is None else given.seed
    seeds = (SEEDS if given.seed is None else 1) if given.seeds is None else given.seeds
    limits = Limits(given.hosts, given.disturbances, given.rounds)
    for model in [given.model] if given.model else MODELS:
        found = run(program, first_seed, seeds, model, given.leave_out, limits, progress)
        if found.failed_seed is not None:
            print("\n".join(_failure(given.program, found, given.trace, progress)))
            return 1
        print("\n".join(_success(given.program, found)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    given = _arguments(arguments)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with console.status("building the programs") as status:
            return _command(given, status.update)
    except (CXLKVError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
