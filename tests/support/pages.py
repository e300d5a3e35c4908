"""The code blocks of README and docs/, and how a reader runs them: each page from its top, in one
folder, as it stands.

    python tests/support/pages.py FOLDER    runs what FOLDER/steps.json lists

Fences say what they are: `python` and `sh` are run; a `yaml` block with a title is written to a
file of that name; `console` (a terminal's commands and what they print) and `text` are only shown.
A comment in the line before a fence, <!-- needs: gpu -->, names what not every machine has.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"(?:<!-- needs: (?P<needs>[^\n]*?) -->\n)?^(?P<indent> *)```(?P<info>[^\n]*)\n"
    r"(?P<code>.*?)^ *```$",
    re.M | re.S,
)
SHOWN = {"console", "text", "c", "toml"}
RUN = {"python", "sh", "yaml"}
# A tmpfs of its own at /dev/shm, so that a page finds no pool of this machine's users and leaves
# none: in a user namespace, where the kernel lets a process make one.
ALONE = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


class Block(NamedTuple):
    """line: of the fence in its page. title: name of the file that it is, or ""."""

    page: Path
    line: int
    language: str
    title: str
    needs: tuple[str, ...]
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Step(TypedDict):
    name: str
    language: str
    title: str
    code: str


def pages() -> list[Path]:
    """README.md and docs/, without the records of decisions: these keep what was tried once."""
    found = [path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts]
    return [ROOT / "README.md", *sorted(found), *(ROOT / "examples").glob("*.md")]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        language, _, rest = found["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        needs = tuple(one.strip() for one in (found["needs"] or "").split(",") if one.strip())
        indent = len(found["indent"])
        code = "".join(line[indent:] for line in found["code"].splitlines(keepends=True))
        line = text.count("\n", 0, found.start("info")) + 1
        yield Block(page, line, language, title[1] if title else "", needs, code)


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def has_gpu() -> bool:
    if not has_module("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def lacking(need: str) -> str | None:
    """Why a block cannot run here; None where it can."""
    if need == "smollm2":
        from cxlkv.errors import UnsupportedError

        try:
            from cxlkv.demo import smollm2

            smollm2.prepare()
        except (ImportError, UnsupportedError) as error:
            return str(error)
        return None
    there, why = {
        "gpu": (has_gpu(), "there is no CUDA device"),
        "lmcache": (has_module("lmcache"), "LMCache is not installed here: make test-lmcache"),
        "numba": (has_module("numba"), "numba is not installed here"),
        "matplotlib": (has_module("matplotlib"), "matplotlib is not installed here"),
        "numa node 1": (Path("/sys/devices/system/node/node1").exists(), "there is no NUMA node 1"),
        "dax device": (Path("/dev/dax0.0").exists(), "there is no /dev/dax0.0"),
        "second machine": (False, "it is about two machines"),
        "sglang": (has_module("sglang"), "SGLang is not installed here: make test-sglang"),
        "transformers": (has_module("transformers"), "transformers is not installed here"),
        "vllm": (has_module("vllm"), "vLLM is not installed here: make test-vllm"),
        "your own files": (False, "it names files that only a reader has"),
    }[need]
    return None if there else why


def as_reader(steps: Sequence[Step], folder: Path) -> str:
    """Run the steps in the folder, in a process of their own; return what failed printed, or ""."""
    (folder / "steps.json").write_text(json.dumps(steps))
    command = [sys.executable, str(Path(__file__).resolve()), str(folder)]
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0:
        command = [*ALONE, *command]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        command,
        cwd=folder,
        # Threads of torch wait for one another, which takes long where other work is done.
        env={"OMP_NUM_THREADS": "1", **os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return "" if ended.returncode == 0 else ended.stdout[-6000:]


def main(folder: str) -> None:
    """Run the steps: Python blocks share a session, as what is pasted from a page's top does."""
    steps: list[Step] = json.loads(Path(folder, "steps.json").read_text())
    session: dict[str, object] = {"__name__": "__main__"}
    for step in steps:
        print(f"--- {step['name']}", flush=True)
        if step["language"] == "yaml":
            Path(folder, step["title"]).write_text(step["code"])
        elif step["language"] == "sh":
            subprocess.run(["bash", "-euo", "pipefail", "-c", step["code"]], check=True)
        else:
            exec(compile(step["code"], step["name"], "exec"), session)


if __name__ == "__main__":
    main(*sys.argv[1:])
