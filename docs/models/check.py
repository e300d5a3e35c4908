"""Runs spin over the models of the coherence protocol and over each of their mutants.

    python docs/models/check.py                             # all of them
    python docs/models/check.py publish.pml pins            # one variant and its mutants
    python docs/models/check.py publish.pml pins OWNER_LOOK

A model says in its first comment what is to be run: `variant NAME: DEFINES` must pass, and
`caught SITE: VARIANTS` must fail there when -DMUTANT_SITE leaves the site out, `redundant SITE:
VARIANTS: WHY` must pass. Every search is exhaustive: running out of depth, memory or time is a
failure. Exit status 0: all as said. 1: not. 2: a wrong argument. 3: spin or gcc is not here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build/models"
MEMORY_MIB = 6000
SEARCH_S = 180
DEPTH_STEPS = 1_000_000
ASSERTIONS = ("READS_ONLY", "")  # what the reader sees first; then the claims about memory
ROW = "{:<10} {:<9} {:<26} {:>9} {:>6} {:>6}  {}"


class CheckError(Exception):
    """The model does not say what is to be run, or a tool failed on it."""


@dataclass(frozen=True)
class Case:
    """One search: a variant as it is (site ""), or with one site left out."""

    model: Path
    variant: str
    defines: tuple[str, ...]
    site: str
    must_fail: bool

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.model.stem, self.variant, self.site) if part)


@dataclass(frozen=True)
class Result:
    states: int
    depth: int
    seconds: float
    fault: str  # what spin found; "" when nothing
    complete: bool  # every state was visited


def cases(model: Path) -> list[Case]:
    """What the first comment of the model asks for, plain variants first."""
    comment = model.read_text().partition("*/")[0]
    variants = {
        name: tuple(defines.split())
        for name, defines in re.findall(r"^ \* variant (\w+):(.*)$", comment, re.M)
    }
    if not variants:
        raise CheckError(f"{model}: no line ' * variant NAME: DEFINES' in the first comment")
    found = [Case(model, name, defines, "", False) for name, defines in variants.items()]
    pattern = r"^ \* (caught|redundant) (\w+): ([\w ]+)"
    for verdict, site, names in re.findall(pattern, comment, re.M):
        if f"MUTANT_{site}" not in model.read_text():
            raise CheckError(f"{model}: nothing asks for MUTANT_{site}")
        for name in names.split():
            if name not in variants:
                raise CheckError(f"{model}: {site} names a variant that is not there: {name}")
            found.append(Case(model, name, variants[name], site, verdict == "caught"))
    sites = set(re.findall(r"\bMUTANT_(\w+)", model.read_text()))
    if missing := sites - {case.site for case in found}:
        raise CheckError(f"{model}: not said what to expect of {', '.join(sorted(missing))}")
    return found


def command(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(f"{' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def search(case: Case, more: str) -> Result:
    """Builds the search in a folder of its own, where a counterexample stays, and runs it."""
    folder = BUILD / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    defines = [*case.defines, *([more] if more else [])]
    if case.site:
        defines.append(f"MUTANT_{case.site}")
    shutil.copy(case.model, folder)
    command(["spin", "-a", *(f"-D{define}" for define in defines), case.model.name], folder)
    flags = ["-O1", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}"]
    command(["gcc", *flags, "-o", "pan", "pan.c"], folder)
    begin = time.monotonic()
    try:
        arguments = ["./pan", f"-m{DEPTH_STEPS}", "-w24"]
        done = subprocess.run(
            arguments, cwd=folder, capture_output=True, text=True, timeout=SEARCH_S
        )
    except subprocess.TimeoutExpired:
        return Result(0, 0, SEARCH_S, f"no end after {SEARCH_S} s", False)
    return result_of(done.stdout, time.monotonic() - begin)


def result_of(output: str, seconds: float) -> Result:
    """What pan printed, as numbers."""
    states = re.search(r"(\d+(?:\.\d+e\+\d+)?) states, stored", output)
    depth = re.search(r"depth reached (\d+)", output)
    fault = re.search(r"^pan:\d+: (.*?)(?: \(at depth \d+\))?$", output, re.M)
    # "Warning: Search not completed" also follows an error, which is then the fault.
    complete = "Search not completed" not in output and "max search depth too" not in output
    return Result(
        int(float(states[1])) if states else 0,
        int(depth[1]) if depth else 0,
        seconds,
        fault[1] if fault else "",
        complete and states is not None,
    )


def judge(case: Case) -> bool:
    """Runs one case and prints its row. Is it as the model says?"""
    result = search(case, ASSERTIONS[0] if case.site else "")
    if case.must_fail and not result.fault:
        result = search(case, ASSERTIONS[1])
    found = "error" in result.fault or "violated" in result.fault or "end state" in result.fault
    as_said = found if case.must_fail else not result.fault and result.complete
    verdict = result.fault or ("passes" if result.complete else "not searched to the end")
    print(
        ROW.format(
            case.model.stem,
            case.variant,
            case.site or "(none left out)",
            result.states,
            result.depth,
            f"{result.seconds:.1f}",
            verdict if as_said else f"WRONG: {verdict}",
        ),
        flush=True,
    )
    if not as_said and found:
        print(f"    the steps: cd {BUILD / case.name} && ./pan -r")
    return as_said


def main(arguments: list[str]) -> int:
    absent = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if absent:
        print(f"skipped: {' and '.join(absent)} not here (Debian: apt-get install spin gcc)")
        return 3
    model, variant, site = [*arguments, "", "", ""][:3]
    paths = [Path(model) if Path(model).is_file() else HERE / model] if model else []
    try:
        found = [case for path in paths or sorted(HERE.glob("*.pml")) for case in cases(path)]
        chosen = [
            case for case in found if variant in ("", case.variant) and site in ("", case.site)
        ]
        if not chosen:
            raise CheckError(f"no such variant or site: {' '.join(arguments[1:])}")
        print(ROW.format("model", "variant", "left out", "states", "depth", "s", "verdict"))
        wrong = [case.name for case in chosen if not judge(case)]
    except (CheckError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(chosen)} searches, {len(wrong)} not as said {' '.join(wrong)}".rstrip())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
