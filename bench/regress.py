"""`make regress`: core calls timed with two builds in turn, so that a slower one is seen.

    python bench/regress.py [--base REV] [--rounds 15] [--json PATH]

The base is the merge base with main, or the commit before where that is this one. It is checked
out and built in build/regress, this checkout beside it, and pytest-benchmark runs
bench/regress_calls.py with both in turn: machines differ from day to day, so no figure of another
day is compared. A call is slower when the whole 95 % interval of its ratio of medians lies above
1.05; then the exit status is 1. Both builds run the calls of this checkout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

CHECKOUT = Path(__file__).resolve().parent.parent
WORK = CHECKOUT / "build/regress"
CALLS = CHECKOUT / "bench/regress_calls.py"
SLOWER = 1.05
"""The lowest ratio of times, new to base, that is too slow."""
# Student's t for 95 %, by degrees of freedom; beyond, that of the last.
T = (0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
T_BEYOND = 2.145


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def base_commit(asked: str | None) -> str:
    if asked:
        return git("rev-parse", f"{asked}^{{commit}}")
    try:
        head, base = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "main")
    except subprocess.CalledProcessError as error:
        raise SystemExit("there is no branch main here: name a commit with --base") from error
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD~") if base == head and not changed else base


def build(source: Path, name: str) -> Path:
    """A folder with the package, built from a checkout."""
    site = WORK / name / "site"
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(site)]
    command += [f"--config-settings=build-dir={WORK / name / 'native'}", str(source)]
    subprocess.run(command, check=True)
    return site


def checked_out(commit: str) -> Path:
    tree = WORK / "base/tree"
    if tree.exists():
        git("worktree", "remove", "--force", str(tree))
    git("worktree", "prune")
    git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    return tree


def times(site: Path, folder: Path) -> dict[str, float]:
    """The median time of each call, in seconds, with the package in `site`."""
    out = folder / "times.json"
    # Not as a program of this checkout: its own package, and the finder of an editable one, stay
    # out of the way.
    code = (
        "import sys, pytest;"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Scikit' not in type(f).__name__];"
        f"sys.path.insert(0, {str(site)!r});"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-P", "-c", code, str(folder / CALLS.name), "-q", "-c", os.devnull]
    command += ["--rootdir", str(folder), "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--benchmark-only", f"--benchmark-json={out}", "--benchmark-disable-gc"]
    command += ["--benchmark-max-time=0.2", "--benchmark-min-rounds=5", "--benchmark-warmup=on"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the calls failed with {site}:\n{done.stdout[-3000:]}{done.stderr}")
    rows = json.loads(out.read_text())["benchmarks"]
    return {row["name"].removeprefix("test_"): row["stats"]["median"] for row in rows}


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The geometric mean, and the 95 % interval round it."""
    logs = [math.log(ratio) for ratio in ratios]
    free = len(logs) - 1
    half = (T[free] if free < len(T) else T_BEYOND) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", metavar="REV", help="compare with it, not with the merge base")
    parser.add_argument("--rounds", type=int, default=15, help="of both builds, at least 2")
    parser.add_argument("--json", type=Path, metavar="PATH", help="all medians go there")
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error("--rounds: at least 2")
    os.environ.pop("CXLKV_EMULATE", None)  # the core is timed, and no link
    commit = base_commit(asked.base)
    sites = {"base": build(checked_out(commit), "base"), "new": build(CHECKOUT, "new")}
    medians: dict[str, list[dict[str, float]]] = {"base": [], "new": []}
    with tempfile.TemporaryDirectory(prefix="cxlkv-regress-", dir="/dev/shm") as name:
        folder = Path(name)
        shutil.copy(CALLS, folder)
        for i in track(range(asked.rounds), description="rounds"):
            for which in ("base", "new") if i % 2 == 0 else ("new", "base"):
                medians[which].append(times(sites[which], folder))
    if asked.json:
        told = {"base": commit, "new": git("rev-parse", "HEAD"), "median_s": medians}
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    return report(commit, medians)


def report(commit: str, medians: dict[str, list[dict[str, float]]]) -> int:
    """Prints a table; 1 when a call is slower."""
    table = Table("call", "base us", "new us", "new/base", "95 %", "", title=f"base {commit[:10]}")
    slower = 0
    for call in medians["base"][0]:
        base, new = ([row[call] for row in medians[which]] for which in ("base", "new"))
        mean, low, high = interval([n / b for n, b in zip(new, base, strict=True)])
        slower += low > SLOWER
        table.add_row(
            Text(call),
            f"{statistics.median(base) * 1e6:.2f}",
            f"{statistics.median(new) * 1e6:.2f}",
            f"{mean:.3f}",
            f"{low:.3f} to {high:.3f}",
            "SLOWER" if low > SLOWER else "",
        )
    Console(width=100).print(table)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
