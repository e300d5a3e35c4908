"""What ships: one version everywhere, and checks of the wheels that see what they are for.

The wheels themselves are checked by `make wheel` and tried by `make wheel-test`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import cxlkv
from cxlkv import _core
from cxlkv.tiers import cold_file, cold_server
from cxlkv.transport import wire

from .support import support_matrix

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ROOT / "docs/reference/releases.md"


def load(name: str) -> ModuleType:
    """A script of this folder, which is on no path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_dist, round_trip = load("check_dist"), load("round_trip")
make_release = load("make_release")
WHEEL = "cxlkv-0.2.0-cp310-abi3-manylinux_2_28_x86_64.whl"
BINARY = b"\x7fELF /dev/shm/cxlkv- /proc/%d/stat /sys/kernel/mm/transparent_hugepage \0"


def project_version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_the_core_and_the_project_have_one_version() -> None:
    assert _core.version() == project_version()


def test_what_names_the_version_agrees() -> None:
    """It is written in pyproject.toml; the others are texts for people, and tell no other."""
    assert cxlkv.__version__ == project_version()
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    released = re.findall(r"^## (\d\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    rows = re.findall(r"^\| (\d\S+) \|", RELEASES.read_text(), re.MULTILINE)
    assert cited
    assert cited[1] == released[0] == rows[0] == project_version()


def constant(path: str, name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)", (ROOT / path).read_text())
    assert found, name
    return int(found[1])


def test_the_docs_tell_the_numbers_of_the_formats() -> None:
    """The newest row of each table in the page on releases, against the code."""
    cold = ", ".join(map(str, sorted(cold_file.VERSIONS.values())))
    numbers = {
        "pools": _core.FORMAT_VERSION,
        "also upgrades": constant("native/src/format/format.h", "FORMAT_BEFORE"),
        "cold files": cold,
        "records": _core.PACKED_VERSION,
        "handles": constant("native/src/prefix/handle.c", "HANDLE_VERSION"),
        "parts of striped pools": constant("native/src/region/stripes.c", "LABEL_VERSION"),
        "transport": wire.PROTOCOL,
        "cold-file messages": cold_server.VERSION,
    }
    table = re.findall(r"^\| (?:release|\d\S+) \|.*\|$", RELEASES.read_text(), re.MULTILINE)
    title, row = table[:2]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (title, row)]
    assert dict(zip(*cells, strict=True)) == {
        "release": project_version(),
        **{name: str(number) for name, number in numbers.items()},
    }


def test_the_docs_list_the_extras() -> None:
    text = (ROOT / "docs/project/packaging.md").read_text()
    listed = set(re.findall(r"^\| `\[(\w+)\]` \|", text, re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text()
    section = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert listed == set(re.findall(r"^(\w+) = ", section, re.MULTILINE))


def test_the_classifiers_name_each_python_that_the_wheel_test_tries() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r"Python :: (3\.\d+)", project)
    tried = re.search(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tried
    assert [f"python{version}" for version in named] == tried[1].split()
    assert f'requires-python = ">={named[0]}"' in project


def test_the_installed_package_has_that_version() -> None:
    try:
        installed = importlib.metadata.version("cxlkv")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cxlkv is not installed here, only its folder is on the path")
    assert installed == project_version()


def test_the_round_trip_of_the_wheel_test(tmp_path: Path) -> None:
    round_trip.round_trip(tmp_path / "pool")


def make_wheel(
    folder: Path, name: str = WHEEL, binary: bytes = BINARY, more: str = "", without: str = ""
) -> Path:
    wheel = folder / name
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("cxlkv/__init__.py", "")
        for extension in check_dist.BINARIES:
            archive.writestr(extension, binary if "_native" in extension else BINARY)
        archive.writestr("cxlkv-0.2.0.dist-info/WHEEL", "")
        for weights in check_dist.DATA_FILES - {without}:
            archive.writestr(weights, "")
        if more:
            archive.writestr(more, "")
    return wheel


# The C core is left out: Python's files alone tell what is importable.
BUILD = """
from scikit_build_core.build import build_editable
build_editable("..", {"wheel.cmake": "false", "wheel.py-api": "py3"})
"""
# In a bare interpreter: addsitedir() does with an installation what the start of Python does.
IMPORT = """
import json, sys
from importlib.machinery import PathFinder
from site import addsitedir
addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
import cxlkv, cxlkv.kernels, numpy
checked = PathFinder.find_spec("cxlkv")  # as type checkers look for it: they do not run the finder
print(json.dumps({
    "imported": [one.__file__ for one in (cxlkv, cxlkv.kernels, numpy)],
    "checked": checked and checked.origin,
    "others": [name for name in sys.argv[3:] if PathFinder.find_spec(name)],
}))
"""


def test_an_editable_install_makes_only_cxlkv_importable(tmp_path: Path) -> None:
    """Not the checkout's other folders, nor what lies beside it. Type checkers find cxlkv, too."""
    pytest.importorskip("scikit_build_core")
    clones, site = tmp_path / "clones", tmp_path / "site"
    checkout, numpy_at = clones / "checkout", Path(np.__file__).parents[1]
    folders = ["kernels", "ndp", "emulation", "bench"]
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for name in ("cxlkv", ".editable", *folders):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("tests.py", "vllm.py", "numpy.py"):
        (clones / name).write_text("raise SystemExit('planted')")
    subprocess.run([sys.executable, "-c", BUILD], cwd=checkout, check=True, capture_output=True)
    zipfile.ZipFile(next(clones.glob("*.whl"))).extractall(site)
    command = [sys.executable, "-I", "-S", "-c", IMPORT, str(site), str(numpy_at)]
    done = subprocess.run([*command, *folders, "tests"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    ours = [f"{checkout}/cxlkv/__init__.py", f"{checkout}/cxlkv/kernels/__init__.py"]
    assert found["imported"] == [*ours, np.__file__]
    assert Path(found["checked"]).resolve() == Path(ours[0])
    assert found["others"] == []


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")
@pytest.mark.parametrize(
    ("options", "errors"),
    [([], True), (["-DSKBUILD=2"], False), (["-DSKBUILD=2", "-DCXLKV_WERROR=ON"], True)],
    ids=["the C tests", "pip", "make setup"],
)
def test_warnings_are_errors_only_for_who_works_on_the_core(
    tmp_path: Path, options: list[str], errors: bool
) -> None:
    """A user's compiler may warn of what no compiler warned of when the version was made."""
    configure = ["cmake", f"-S{ROOT / 'native'}", f"-B{tmp_path}", *options]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    done = subprocess.run(configure, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = json.loads((tmp_path / "compile_commands.json").read_text())
    core = [each["command"].split() for each in built if "/native/src/" in each["file"]]
    assert core
    for command in core:
        assert {"-Wall", "-Wextra"} <= set(command)
        assert ("-Werror" in command) is errors


def test_no_text_of_the_core_reads_as_a_path_of_its_builder() -> None:
    """`make wheel` looks for such paths in the whole of both binaries."""
    native = ROOT / "native"
    sources = [*native.glob("src/*/*.[ch]"), *native.glob("include/*.h"), *native.glob("measure/*")]
    texts = [
        text
        for source in sources
        for line in source.read_bytes().splitlines()
        if not line.startswith(b"#include")
        for text in re.findall(rb'"((?:[^"\\]|\\.)*)"', line)
    ]
    assert b"%s/dev/char/%u:%u" in texts
    assert check_dist.foreign_paths(b"\0".join(texts)) == []


def written_symbols(extension: str) -> set[str]:
    """What our C code of an extension keeps in memory that it writes."""
    built = ROOT / "build/editable" / extension
    if not built.exists() or shutil.which("nm") is None:
        pytest.skip("needs nm, and the build folder of make setup")
    listed = subprocess.run(["nm", "-f", "sysv", built], check=True, capture_output=True, text=True)
    rows = [re.split(r" *\| *", row) for row in listed.stdout.splitlines() if row.count("|") == 6]
    names = {row[0].partition(".")[0] for row in rows if row[6] in (".data", ".bss", ".tbss")}
    return {name for name in names if not name.startswith("_")} - {"completed"}  # of the compiler


def test_two_extensions_share_no_state() -> None:
    """Each links objects of the core: two handlers of SIGBUS would be one too many."""
    native, measure = map(written_symbols, ["_native.abi3.so", "_measure.abi3.so"])
    assert {"previous_action", "install_lock"} <= native, "the guard, which the loops have not"
    # Which instructions this CPU has, and how far its time namespace's clock is off: found by each
    # and the same. The text of its own last error.
    assert native & measure == {"known", "chosen", "offset_ns", "gap_ns", "text"}


def test_a_right_wheel_has_no_faults(tmp_path: Path) -> None:
    assert check_dist.wheel_faults(make_wheel(tmp_path)) == []


def with_path(path: str) -> dict[str, bytes]:
    return {"binary": BINARY + path.encode() + b"\0"}


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (with_path("/tmp/tmpq1/native/src/pool/pool.c"), "_native.abi3.so names "),
        (with_path("/usr/include/python3.11"), "_native.abi3.so names "),
        (with_path("native/src/pool/pool.c"), "_native.abi3.so names "),
        ({"more": "kernels/__init__.py"}, ""),
        ({"more": "cxlkv/_native.cpython-311.so"}, ""),
        ({"name": "cxlkv-0.2.0-cp311-cp311-manylinux_2_28_x86_64.whl"}, ""),
        ({"name": "cxlkv-0.2.0-cp310-abi3-linux_x86_64.whl"}, ""),
        ({"name": "cxlkv-0.2.0-cp310-abi3-manylinux_2_34_x86_64.whl"}, ""),
        *(({"without": name}, f"{name} is missing") for name in sorted(check_dist.DATA_FILES)),
    ],
    ids=str,
)
def test_a_wrong_wheel_has_one_fault(tmp_path: Path, wrong: dict[str, str], fault: str) -> None:
    """A path of the machine in the binary, a file that is not ours, another tag, lost weights."""
    (found,) = check_dist.wheel_faults(make_wheel(tmp_path, **wrong))  # type: ignore[arg-type]
    assert fault in found
    assert (ROOT / wrong.get("without", "")).exists()


@pytest.mark.parametrize(
    ("needed", "faults"),
    [
        ("manylinux_2_17_x86_64", 0),
        ("manylinux_2_28_x86_64", 0),
        ("manylinux_2_34_x86_64", 1),  # what gcc on Debian 12 links against
        ("manylinux_2_28_aarch64", 1),
        ("linux_x86_64", 1),
    ],
)
def test_the_tag_is_compared_with_what_the_binary_needs(needed: str, faults: int) -> None:
    assert len(check_dist.audit_faults(WHEEL, {"overall_tag": needed})) == faults


def make_sdist(folder: Path, names: list[str]) -> Path:
    sdist = folder / "cxlkv-0.2.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"cxlkv-0.2.0/{name}"), io.BytesIO())
    return sdist


def test_an_sdist_has_the_build_files_and_only_what_git_has(tmp_path: Path) -> None:
    tracked = {"pyproject.toml", "native/CMakeLists.txt", "cxlkv/errors.py"}
    right = make_sdist(tmp_path, [*tracked, "PKG-INFO"])
    assert check_dist.sdist_faults(right, tracked) == []
    assert check_dist.sdist_faults(right, None) == []
    foreign = make_sdist(tmp_path, [*tracked, "notes.txt"])
    assert check_dist.sdist_faults(foreign, tracked) == [
        "notes.txt is not in git: remove or commit it"
    ]
    short = make_sdist(tmp_path, ["pyproject.toml"])
    assert check_dist.sdist_faults(short, tracked) == ["native/CMakeLists.txt is missing"]


CHANGES = (
    "# Changelog\n\n## Next\n\n- new\n\n## 0.2.0\n\n### Added\n\n- old\n\n## 0.1.0\n\n- older\n"
)


def test_the_notes_of_a_release_are_its_part_of_the_changelog() -> None:
    assert make_release.notes(CHANGES, "0.2.0") == "### Added\n\n- old\n"
    assert make_release.notes(CHANGES, "0.1.0") == "- older\n"
    with pytest.raises(ValueError, match=r"no heading ## 0\.3\.0"):
        make_release.notes(CHANGES, "0.3.0")


def test_checksums_are_what_sha256sum_checks(tmp_path: Path) -> None:
    (dist := tmp_path / "dist").mkdir()
    make_wheel(dist)
    make_sdist(dist, ["pyproject.toml"])
    (tmp_path / "SHA256SUMS").write_text(make_release.checksums(dist))
    checked = subprocess.run(
        ["sha256sum", "--strict", "--check", tmp_path / "SHA256SUMS"],
        cwd=dist,
        check=True,
        capture_output=True,
        text=True,
    )
    assert checked.stdout.count(": OK") == 2


def test_a_bill_of_materials_has_what_is_installed_and_what_is_compiled_in() -> None:
    packages = [
        {"name": "cxlkv", "version": "9", "requires_dist": ["b>=1", 'c; extra == "demo"']},
        {"name": "B", "version": "1.0", "license_expression": "MIT"},
        {"name": "c", "version": "2"},
    ]
    bom = make_release.bill_of_materials(packages, {"cffi": "2.1", "ziglang": "0.17", "build": "1"})
    assert bom["metadata"]["component"]["purl"] == "pkg:pypi/cxlkv@9"
    refs = [one["bom-ref"] for one in bom["components"]]
    assert refs == [
        *("pkg:pypi/b@1.0", "pkg:pypi/c@2", "compiled-in:cffi", "compiled-in:ziglang"),
    ]
    assert bom["components"][0]["licenses"] == [{"expression": "MIT"}]
    needs = {one["ref"]: one["dependsOn"] for one in bom["dependencies"]}
    own = needs.pop("pkg:pypi/cxlkv@9")
    assert own == ["pkg:pypi/b@1.0", "compiled-in:cffi", "compiled-in:ziglang"]
    assert all(where == [] for where in needs.values())


def test_the_page_of_what_is_supported_is_up_to_date() -> None:
    """python -m tests.support.support_matrix writes it."""
    text = support_matrix.PAGE.read_text()
    assert support_matrix.page(text) == text
