"""Builds the release before, has it make pools, and upgrades and reads them with a wheel.

    python tests/try_upgrade.py WHEEL FOLDER

The release is the commit that docs/reference/releases.md names. Its pools are made by its own code
in an environment of its own; then the tests of tests/test_upgrade.py run with the wheel, which is
installed in another one, on these in place of tests/golden. Exit status 77 and a line that begins
"skipped: " where the clone has no such commit. Run by `make wheel-upgrade`.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"^(\d+\.\d+\.\d+) ends with commit `([0-9a-f]{7,40})`", re.MULTILINE)
SKIPPED = 77
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
# What the options of pytest in pyproject.toml and tests/conftest.py ask for.
TEST_TOOLS = ("pytest", "pytest-benchmark", "pytest-timeout", "hypothesis")


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def environment(folder: Path, *wanted: str | Path) -> Path:
    """The Python of a new environment that has these packages."""
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", *PIP, *wanted)
    return folder / "bin/python"


def extract(commit: str, folder: Path, *paths: str) -> None:
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, *paths], check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")


def has(commit: str) -> bool:
    words = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def pools_of(commit: str, folder: Path) -> Path:
    """The folder of the pools that the release made, beside those that it kept of older formats."""
    extract(commit, folder / "source")
    python = environment(folder / "env", f"{folder / 'source'}[compress]")
    extract(commit, folder / "made", "tests")
    scripts = sorted((folder / "made/tests").rglob("golden_pools.py"))
    module = ".".join(scripts[0].relative_to(folder / "made").with_suffix("").parts)
    golden = folder / "made/tests/golden"
    kept = {path.name: path.read_bytes() for path in golden.iterdir()}
    run(python, "-m", module, cwd=folder / "made")
    anew = sorted(path.name for path in golden.iterdir() if kept[path.name] != path.read_bytes())
    assert anew, "the release made no pool"
    print(f"made by it: {' '.join(anew)}", flush=True)
    return golden


def main(wheel: Path, folder: Path) -> int:
    named = NAMED.search((ROOT / "docs/reference/releases.md").read_text())
    assert named, "docs/reference/releases.md names no commit of a release"
    release, commit = named.groups()
    if not has(commit):
        print(f"skipped: {commit} of release {release} is not in this clone: git fetch --unshallow")
        return SKIPPED
    shutil.rmtree(folder, ignore_errors=True)
    golden = pools_of(commit, folder / "before")
    python = environment(folder / "env", f"{wheel}[compress]", *TEST_TOOLS)
    extract("HEAD", folder / "now", "tests", "pyproject.toml")
    shutil.copytree(golden, folder / "now/tests/golden", dirs_exist_ok=True)
    run(python, "-m", "pytest", "-q", "tests/test_upgrade.py", cwd=folder / "now")
    print(f"pools of {release} ({commit}) were read and upgraded by {wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(strict=True), Path(sys.argv[2]).resolve()))
