"""Checks the sdist and the wheels that `make wheel` made: what is in them, and their tags.

Run by `make wheel` in its own environment, so it imports nothing of cxlkv.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEEL_NAME = re.compile(r"cxlkv-[\d.]+-cp310-abi3-manylinux_2_28_(x86_64|aarch64)\.whl")
GLIBC_MAX = (2, 28)  # what the tag promises
# No Python file imports these, so a wheel without them would only fail when it is used.
DATA_FILES = {
    "cxlkv/demo/answers/handbook/handbook.txt",
    "cxlkv/demo/answers/handbook/questions.json",
    "cxlkv/demo/model/model.safetensors",
    "cxlkv/bench/page.html.j2",
    "cxlkv/bench/lab/texts/german.txt",
    "cxlkv/bench/models/text/model.safetensors",
}

BINARIES = ["cxlkv/_measure.abi3.so", "cxlkv/_native.abi3.so"]

# The files of the kernel and of POSIX that the core opens, from the root or below a folder that its
# caller names (%s); any other path is of the machine that compiled it. Relative ones are found as
# well: they would be the names of our sources.
PATH_IN_BINARY = re.compile(rb"(?:%s|[\w.-]*)(?:/[\w.-]{2,}){2,}")
PATH_EXPECTED = re.compile(rb"/(dev/shm|proc|sys)\b|%s/")


def tracked_files() -> set[str] | None:
    """The names that git has, None where this is no checkout."""
    if not (ROOT / ".git").exists():
        return None
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], check=True, stdout=subprocess.PIPE)
    return set(listed.stdout.decode().splitlines())


def sdist_faults(sdist: Path, tracked: set[str] | None) -> list[str]:
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    top = sdist.name.removesuffix(".tar.gz") + "/"
    names = {member.name.removeprefix(top) for member in members} - {"PKG-INFO"}
    faults = [f"{member.name} is no plain file" for member in members if not member.isfile()]
    faults += [f"{name} is missing" for name in {"pyproject.toml", "native/CMakeLists.txt"} - names]
    if tracked is not None:
        faults += [f"{name} is not in git: remove or commit it" for name in sorted(names - tracked)]
    return faults


def wheel_faults(wheel: Path) -> list[str]:
    named = WHEEL_NAME.fullmatch(wheel.name)
    if named is None:
        return ["its name promises something else than cp310-abi3-manylinux_2_28"]
    faults = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        binaries = [name for name in names if ".so" in name]
        info = "-".join(wheel.name.split("-")[:2]) + ".dist-info/"
        faults += [f"{name} is foreign" for name in names if not name.startswith(("cxlkv/", info))]
        faults += [f"{name} is missing" for name in sorted(DATA_FILES - set(names))]
        if sorted(binaries) != BINARIES:
            faults.append(f"it has the binaries {binaries}, not {BINARIES}")
        for name in binaries:
            faults += [f"{name} names {path}" for path in foreign_paths(archive.read(name))]
    return faults


def foreign_paths(binary: bytes) -> list[str]:
    found = PATH_IN_BINARY.finditer(binary)
    return [match[0].decode() for match in found if not PATH_EXPECTED.match(match[0])]


def audit_faults(wheel_name: str, audit: dict[str, str]) -> list[str]:
    """What auditwheel read off the binaries, against what the wheel's name says."""
    needed = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", audit["overall_tag"])
    if needed is None:
        return [f"it needs more than a glibc: {audit['overall_tag']}"]
    faults = []
    glibc = (int(needed[1]), int(needed[2]))
    if glibc > GLIBC_MAX:
        faults.append(f"it needs glibc {glibc[0]}.{glibc[1]}")
    if not wheel_name.endswith(f"_{needed[3]}.whl"):
        faults.append(f"its binary is for {needed[3]}")
    return faults


def audit(wheel: Path) -> dict[str, str]:
    shown = subprocess.run(["auditwheel", "show", "--json", wheel], check=True, capture_output=True)
    found: dict[str, str] = json.loads(shown.stdout)
    return found


def main(folder: Path) -> int:
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if len(sdists) != 1 or not wheels:
        print(f"error: {folder} has {len(sdists)} sdists and {len(wheels)} wheels", file=sys.stderr)
        return 1
    faults = {sdists[0]: sdist_faults(sdists[0], tracked_files())}
    for wheel in wheels:
        found = audit(wheel)
        faults[wheel] = wheel_faults(wheel) + audit_faults(wheel.name, found)
        print(f"{wheel.name}: its binary needs {found['overall_tag']}")
    for path, texts in faults.items():
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {len(texts)} faults")
        for text in texts:
            print(f"error: {path.name}: {text}", file=sys.stderr)
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
