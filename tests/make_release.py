"""Writes what goes beside the files of a release: checksums, a bill of materials, and the notes.

    python tests/make_release.py DIST FOLDER

Run by `make release` in the environment of the wheels. FOLDER gets SHA256SUMS of all in DIST,
cxlkv-VERSION.cdx.json (CycloneDX), and NOTES.md, the release's part of CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# What is inside the binaries beside our C: cffi's glue between C and Python, and what zig links in
# for operations that a CPU lacks.
COMPILED_IN = {"cffi": "its generated C and _cffi_include.h", "ziglang": "LLVM's compiler-rt"}

Component = dict[str, object]


def version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def notes(changelog: str, released: str) -> str:
    """What CHANGELOG.md has under the heading of a release; ValueError without one."""
    found = re.search(rf"^## {re.escape(released)}\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no heading ## {released}: name the release there")
    return found[1].strip() + "\n"


def checksums(folder: Path) -> str:
    """Digests as sha256sum writes them, and reads them with --check."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(folder.iterdir())
    ]
    return "".join(f"{line}\n" for line in lines)


def resolved(wheel: Path) -> list[dict[str, object]]:
    """What pip would install for the wheel, at the pinned versions: metadata, cxlkv's own first."""
    words = "install --quiet --disable-pip-version-check --dry-run --ignore-installed --report -"
    command = [sys.executable, "-m", "pip", *words.split(), "-c", str(ROOT / "constraints.txt")]
    report = json.loads(
        subprocess.run([*command, wheel], check=True, stdout=subprocess.PIPE).stdout
    )
    return [each["metadata"] for each in report["install"]]


def purl(name: str, at: str) -> str:
    return f"pkg:pypi/{canonicalize_name(name)}@{at}"


def component(metadata: dict[str, object]) -> Component:
    name, at = str(metadata["name"]), str(metadata["version"])
    made: Component = {"type": "library", "bom-ref": purl(name, at), "purl": purl(name, at)}
    made |= {"name": name, "version": at, "description": str(metadata.get("summary", ""))}
    if expression := metadata.get("license_expression"):
        made["licenses"] = [{"expression": expression}]
    elif (said := str(metadata.get("license") or "")) and "\n" not in said:
        made["licenses"] = [{"license": {"name": said}}]
    return made


def compiled_in(tools: dict[str, str]) -> list[Component]:
    return [
        {
            "type": "library",
            "bom-ref": f"compiled-in:{name}",
            "name": name,
            "version": tools[name],
            "purl": purl(name, tools[name]),
            "description": f"Compiled into cxlkv's extension modules: {what}",
        }
        for name, what in COMPILED_IN.items()
    ]


def bill_of_materials(packages: list[dict[str, object]], tools: dict[str, str]) -> Component:
    """CycloneDX 1.5 of a wheel. tools: version by name of what made it."""
    refs = {
        canonicalize_name(str(one["name"])): purl(str(one["name"]), str(one["version"]))
        for one in packages
    }
    needed: dict[str, list[str]] = {}
    for one in packages:
        asked = [Requirement(str(text)) for text in listed(one.get("requires_dist"))]
        names = {canonicalize_name(each.name) for each in asked if applies(each)}
        ref = refs[canonicalize_name(str(one["name"]))]
        needed[ref] = sorted(refs[name] for name in names & refs.keys())
    inside = compiled_in(tools)
    own = str(component(packages[0])["bom-ref"])
    needed[own] += [str(one["bom-ref"]) for one in inside]
    with_scope = [component(one) | {"scope": "required"} for one in packages[1:]]
    makers = [{"type": "application", "name": name, "version": at} for name, at in tools.items()]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"tools": {"components": makers}, "component": component(packages[0])},
        "components": [*with_scope, *inside],
        "dependencies": [{"ref": ref, "dependsOn": on} for ref, on in needed.items()],
    }


def listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def tool_versions() -> dict[str, str]:
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
    found = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    wanted = ("auditwheel", "build", "cffi", "scikit_build_core", "ziglang")
    return {each["name"]: each["version"] for each in found if each["name"] in wanted}


def main(dist: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "NOTES.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(), version()))
    wheel = next(iter(sorted(dist.glob("*_x86_64.whl"))), None) or min(dist.glob("*.whl"))
    bom = bill_of_materials(resolved(wheel), tool_versions())
    bom_file = folder / f"cxlkv-{version()}.cdx.json"
    bom_file.write_text(json.dumps(bom, indent=1) + "\n")
    (folder / "SHA256SUMS").write_text(checksums(dist))
    for path in sorted(folder.iterdir()):
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
