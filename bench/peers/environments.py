"""`make peers`: an environment for each peer, by pip; who cannot be installed is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),
    "lmcache": ("torch==2.13.0", "lmcache==0.5.6"),
}
LIMIT_S = 1800


def install(name: str, packages: Sequence[str], folder: Path, options: Sequence[str]) -> str | None:
    """None when the environment is there; otherwise why not, which is also in NAME.failed."""
    environment, failed = folder / name, folder / f"{name}.failed"
    done = environment / ".installed"
    if done.is_file() and done.read_text().split() == list(packages):
        return None
    shutil.rmtree(environment, ignore_errors=True)
    failed.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    python = str(environment / "bin" / "python")
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *options)
    for command in ((sys.executable, "-m", "venv", str(environment)), (*pip, *packages)):
        reason = outcome(command)
        if reason is not None:
            failed.write_text(f"{reason}\n")
            return reason
    done.write_text("\n".join(packages))
    return None


def outcome(command: Sequence[str]) -> str | None:
    """None when it went well, otherwise the first line that says error, or the last one."""
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S} s"
    if ran.returncode == 0:
        return None
    lines = ran.stdout.decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.lower().startswith("error")]
    return next(iter(errors or lines[-1:]), f"exit code {ran.returncode} of {command[0]}")


def main(arguments: Sequence[str]) -> int:
    """FOLDER [pip option ...]: exit code 0 also when some could not be installed."""
    folder, options = Path(arguments[0]), arguments[1:]
    for name, packages in PACKAGES.items():
        print(f"{name}: {', '.join(packages)} ...", flush=True)
        reason = install(name, packages, folder, options)
        print(f"{name}: {'here' if reason is None else f'not installed: {reason}'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
