"""Runs the parts of the gate that take long, from where the last run stopped: `make nightly`.

    python3 tests/nightly.py [PART ...]           # those not yet passed at this state of the tree
    python3 tests/nightly.py --again [PART ...]   # those that passed as well
    python3 tests/nightly.py --changed            # those that a change calls for, as .ci/run does
    python3 tests/nightly.py --list

The parts, each with the folders whose change calls for it, are PARTS below. What a part wrote is
in build/nightly/PART.log, and what became of each in build/nightly/state.json, with the commit.
Exit status 0: each part passed, was skipped because a tool of it cannot be had here, or was left
for want of time (--minutes), which the last line says. 1: one failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDER = CHECKOUT / "build/nightly"
PART_MINUTES_MAX: float = 40
"""A part that takes longer is stopped, and has failed."""
SKIPPED = 77
"""Exit status of a command that lacks something which cannot be had here."""
LEFT = "left"
"""What became of a part that there was no time for."""
PASSED = ("passed", "skipped", LEFT)
TAIL_LINES = 40


@dataclass(frozen=True)
class Part:
    """One row of the table.

    command: what passes, run by bash in the checkout. prepare: what downloads something for it; a
        failure skips the part, for there may be no network.
    minutes: on two quiet cores, with its downloads.
    covers: beginnings of the paths whose change calls for it.
    tools: programs that it needs, and Debian's packages of each.
    """

    command: str
    minutes: float
    covers: tuple[str, ...]
    prepare: str = ""
    tools: tuple[tuple[str, str], ...] = ()


ARM64 = (
    ("qemu-aarch64-static", "qemu-user-static"),
    ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
)
CORE = ("native/src/", "native/include/")
C_TESTS = ("native/", "tests/native/")
PROTOCOL = (
    *(f"native/src/{name}/" for name in ("base", "coherence", "objects", "prefix")),
    *(f"native/src/{name}/" for name in ("format", "pages", "host", "sharing", "pool")),
    "native/emulation/",
    "tests/native/coherence/",
)


def engine(name: str, minutes: float, *covers: str, settings: str = "") -> Part:
    """The tests with an engine, in the environment that make builds for it."""
    covers = (*covers, f"tests/{name}/", "cxlkv/adapters/common/")
    command = f"{settings} make test-{name}".lstrip()
    return Part(command, minutes, covers, prepare=f"make env-{name}")


# Short ones first: what a broken tree fails at is seen early.
PARTS = {
    "docs": Part(
        "make docs",
        1,
        ("docs/", "mkdocs.yml", "README.md", "CHANGELOG.md", "bench/results/"),
        prepare="make env-docs",
    ),
    "tsan": Part("make native-tsan-rest", 3, C_TESTS),
    "arm64": Part("make native-test-arm64-rest", 2, C_TESTS, tools=ARM64),
    "triton": Part("make pytest-nightly ARGS=tests/kernels", 5, ("kernels/", "tests/kernels/")),
    "matrices": Part(
        "make pytest-nightly ARGS='tests/ndp tests/adapters'",
        8,
        (*CORE, "cxlkv/adapters/", "ndp/", "tests/adapters/", "tests/ndp/", "tests/support/"),
    ),
    "storms": Part(
        "make pytest-nightly "
        "ARGS='--ignore tests/kernels --ignore tests/ndp --ignore tests/adapters'",
        8,
        (*CORE, "cxlkv/", "ndp/", "tests/"),
    ),
    "seeds": Part("make test-seeds", 6, PROTOCOL),
    "models": Part("python3 docs/models/check.py", 9, ("docs/models/",), tools=(("spin", "spin"),)),
    "mutants": Part("make mutants", 15, (*PROTOCOL, "tests/native/mutants.py")),
    "drivers": Part(
        "make setup && .venv/bin/python -m tests.qemu.drivers "
        "device litmus sharing handover nodes rdma suites",
        6,
        ("tests/qemu/", "cxlkv/machine/", "cxlkv/transport/", "native/src/region/"),
    ),
    "drivers-engines": Part(
        "make setup && .venv/bin/python -m tests.qemu.drivers engines",
        6,
        (
            *("tests/qemu/guest/engine", "tests/qemu/guest/recording"),
            *("cxlkv/adapters/vllm/messages.py", "cxlkv/adapters/vllm/scheduler.py"),
            *("cxlkv/adapters/common/pools.py", "cxlkv/adapters/common/reopening.py"),
        ),
    ),
    "vllm": engine("vllm", 33, "cxlkv/adapters/vllm/", "cxlkv/ops/doctor_"),
    "vllm-storm": Part(
        "CXLKV_KILLS=30 make test-vllm ARGS='-k killed_at_any_moment'",
        35,
        ("cxlkv/adapters/common/reopening.py", "tests/vllm/test_hosts_storm.py"),
        prepare="make env-vllm",
    ),
    "sglang": engine("sglang", 9, "cxlkv/adapters/sglang/"),
    "lmcache": engine("lmcache", 9, "cxlkv/adapters/lmcache/"),
    "remote": Part(
        "make test-remote",
        4,
        ("cxlkv/tiers/cold_", "tests/tiers/test_cold_mooncake.py"),
        prepare="make env-remote",
    ),
    "model": Part(
        "make pytest-nightly ARGS='tests/demo tests/bench/test_lab.py'",
        6,
        ("cxlkv/demo/", "bench/lab/", "cxlkv/adapters/transformers/"),
        prepare="make model",
    ),
    "wheel": Part(
        "make wheel wheel-test wheel-upgrade",
        10,
        ("pyproject.toml", "native/CMakeLists.txt", "tests/check_dist.py", "tests/try_wheel.py"),
        prepare="make env-wheel",
    ),
}


CLANG = (("clang", "clang libclang-rt-14-dev"),)
IN_C, IN_PYTHON = ("request", "superblock", "hosts", "handle"), ("cold", "wire")
# No change calls for them: `make test` replays what they found, and half an hour is for the night.
PARTS |= {
    f"fuzz-{name}": Part(
        f"make fuzz FUZZ={name} FUZZ_S=1800", 33, (), tools=CLANG if name in IN_C else ()
    )
    for name in IN_C + IN_PYTHON
}


@dataclass
class Row:
    """What became of a part."""

    result: str
    seconds: float = 0.0
    why: str = ""


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def tree_state() -> str:
    """The commit, and a digest of what differs from it in the tracked files."""
    changed = git("diff", "HEAD")
    mark = f"+{hashlib.sha256(changed.encode()).hexdigest()[:12]}" if changed else ""
    return git("rev-parse", "HEAD") + mark


def recorded() -> dict[str, Row]:
    """What became of the parts that ran at this state of the tree."""
    try:
        text = json.loads((FOLDER / "state.json").read_text())
    except (OSError, ValueError):
        return {}
    rows = {name: Row(**row) for name, row in text["parts"].items()}
    return rows if text["state"] == tree_state() else {}


def record(rows: dict[str, Row]) -> None:
    text = {"state": tree_state(), "parts": {name: vars(row) for name, row in rows.items()}}
    part = FOLDER / "state.part"
    part.write_text(json.dumps(text, indent=1) + "\n")
    part.replace(FOLDER / "state.json")


def base_commit() -> str | None:
    """Where the change begins: the merge base with main, or on main the commit before; None in a
    clone that has neither."""
    head = git("rev-parse", "HEAD")
    for words in (("merge-base", "HEAD", "main"), ("merge-base", "HEAD", "origin/main")):
        with suppress(subprocess.CalledProcessError):
            if (base := git(*words)) != head:
                return base
    with suppress(subprocess.CalledProcessError):
        return git("rev-parse", "--verify", "HEAD~")
    return None


def called_for(paths: Iterable[str]) -> list[str]:
    """The parts that a change of these files calls for."""
    changed = list(paths)
    return [
        name
        for name, part in PARTS.items()
        if any(path.startswith(part.covers) for path in changed)
    ]


def lacking(part: Part) -> str:
    """The tools that are not here; tries to install them where apt and the right to it are."""
    packages = [
        package
        for tool, named in part.tools
        if shutil.which(tool) is None
        for package in named.split()
    ]
    if packages and shutil.which("apt-get") and os.geteuid() == 0:
        for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", "-q", *words], capture_output=True, check=False)
    lacks = [tool for tool, _ in part.tools if shutil.which(tool) is None]
    return f"not here: {', '.join(lacks)} (Debian: {' '.join(packages)})" if lacks else ""


def bash(command: str, log: Path, seconds: float) -> int | None:
    """The command's exit status, None if it took too long; what it writes is added to `log`."""
    # What was said to `make nightly` is not said to the make of a part; but the Python is.
    said = ("MAKE", "ARGS")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(said)}
    environment |= {"PYTHON": sys.executable}
    with log.open("a") as out:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also on Ctrl-C: what it started goes with it
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def last_line(log: Path, begins: str = "") -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith(begins)), "")


def run(name: str) -> Row:
    part, log = PARTS[name], FOLDER / f"{name}.log"
    began = time.monotonic()
    log.write_text("")
    limit = PART_MINUTES_MAX * 60.0
    if lacks := lacking(part):
        return Row("skipped", 0.0, lacks)
    if part.prepare and bash(part.prepare, log, limit) != 0:
        return Row("skipped", time.monotonic() - began, f"{part.prepare}: {last_line(log)}")
    status = bash(part.command, log, limit - (time.monotonic() - began))
    seconds = time.monotonic() - began
    if status == SKIPPED:
        return Row("skipped", seconds, last_line(log, "skipped: "))
    if status is None:
        return Row("failed", seconds, f"stopped after {PART_MINUTES_MAX} minutes")
    return Row("failed", seconds, f"exit status {status}") if status else Row("passed", seconds)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def table(rows: dict[str, Row], names: list[str]) -> str:
    width = max(map(len, ["part", *names]))
    lines = [f"{'part':<{width}} {'result':<9} {'time':>6} {'about':>6}"]
    for name in names:
        row = rows.get(name, Row("not run"))
        about = clock(PARTS[name].minutes * 60)
        lines.append(
            f"{name:<{width}} {row.result:<9} {clock(row.seconds):>6} {about:>6}  {row.why}"
        )
    return "\n".join(line.rstrip() for line in lines)


def run_all(names: list[str], rows: dict[str, Row], minutes: float | None) -> None:
    """Runs the parts in order and records each; one that `minutes` have no room for is left."""
    began = time.monotonic()
    for name in names:
        left = (minutes or 1e9) - (time.monotonic() - began) / 60
        if PARTS[name].minutes > left:
            rows[name] = Row(LEFT, why=f"{max(left, 0):.0f} of {minutes:.0f} minutes were left")
            continue
        print(f"{name}: {PARTS[name].command}", flush=True)
        rows[name] = row = run(name)
        record(rows)
        print(f"{name}: {row.result} in {clock(row.seconds)} {row.why}".rstrip(), flush=True)
        if row.result == "failed":
            log = FOLDER / f"{name}.log"
            print(*log.read_text(errors="replace").splitlines()[-TAIL_LINES:], sep="\n  ")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these")
    parser.add_argument("--again", action="store_true", help="those that passed, too")
    parser.add_argument("--changed", action="store_true", help="those that the change calls for")
    parser.add_argument("--base", metavar="REV", help="the change begins there (--changed)")
    parser.add_argument("--minutes", type=float, help="run no part that takes longer than is left")
    parser.add_argument("--list", action="store_true", help="print the parts, and what ran already")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.parts) - PARTS.keys()):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    names = asked.parts or list(PARTS)
    if asked.changed:
        base = asked.base or base_commit()
        names = called_for(git("diff", "--name-only", base, "--").splitlines()) if base else []
        print(f"since {base or 'no commit that is here'}, parts: {', '.join(names) or 'none'}")
    rows = recorded()
    if not asked.list:
        FOLDER.mkdir(parents=True, exist_ok=True)
        done = () if asked.again else PASSED[:1]
        waiting = [name for name in names if name not in rows or rows[name].result not in done]
        run_all(waiting, rows, asked.minutes)
    print(table(rows, names), flush=True)
    if left := [name for name in names if name in rows and rows[name].result == LEFT]:
        print(f"not run, for want of time: make nightly ARGS='{' '.join(left)}'", flush=True)
    return 0 if asked.list or all(rows[name].result in PASSED for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
