"""Imports what an engine's server imports, in a process of its own, and says what mends it.

The engine's metadata say what it needs; whether it starts only an import tells. It may crash, hang
or take memory: so it has its own process, and a deadline.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from signal import Signals

from cxlkv.ops.doctor_findings import Finding

DEADLINE_S = 300.0  # torch and vLLM from a cold disk take a minute
MODULES = {
    "vllm": (
        *("vllm.entrypoints.openai.api_server", "vllm.v1.worker.gpu_model_runner"),
        "cxlkv.adapters.vllm.connector",
    ),
    "sglang": ("cxlkv.adapters.sglang.storage",),
    "lmcache": ("cxlkv.adapters.lmcache.storage",),
    "transformers": ("transformers.generation", "cxlkv.adapters.transformers"),
}
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Compiled for one build of torch; an engine that serves texts imports them where they are."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# sys.path begins with the working directory, as behind `python -m`. vLLM only warns of kernels
# that it cannot load, and fails at the first request.
PROGRAM = """
import importlib, json, logging, os, sys, traceback
warned = []
class Listens(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        warned.extend([text] * text.startswith("Failed to import from"))
told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
found = {}
try:
    for name in sys.argv[1:]:
        importlib.import_module(name)
        if name.startswith("vllm."):
            logging.getLogger("vllm").addHandler(Listens())
            importlib.import_module("vllm.platforms").current_platform.import_kernels()
    if warned:
        found = {"error": warned[0], "packages": ["vllm"]}
except BaseException as error:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    found = {"error": f"{type(error).__name__}: {error}"}
    lacks = getattr(error, "obj", None)  # a module, of an AttributeError
    found["missing"] = error.name if isinstance(error, ImportError) else None
    found["missing"] = lacks.__name__ if isinstance(lacks, type(sys)) else found["missing"]
    for path in sys.path if isinstance(error, SyntaxError) else ():  # no frame is in that file
        if path and str(error.filename).startswith(os.path.join(path, "")):
            names.append(os.path.relpath(error.filename, path).partition(os.sep)[0])
    found["packages"] = names[::-1]
here = os.path.join(os.getcwd(), "")
files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
found["here"] = sorted({os.path.relpath(file, here).partition(os.sep)[0] for name, file in
    files.items() if file and file.startswith(here) and "." not in name and
    not file.startswith(os.path.join(sys.prefix, ""))})
print(json.dumps(found), file=told, flush=True)
os._exit(0)  # an engine's threads may hold up the end
"""


@dataclass(frozen=True)
class Failure:
    """Why modules do not import. error: in Python's words. packages: at the top of what was
    importing then, the innermost first; none, if the process hung or crashed. missing: a module
    that is not there, or lacks a name. here: what the working directory gave.
    """

    modules: tuple[str, ...]
    error: str
    packages: tuple[str, ...] = ()
    missing: str | None = None
    here: tuple[str, ...] = ()


def imports(engine: str, package: str) -> Finding:
    """package: by which pip knows the engine."""
    failure = try_imports(MODULES[engine])
    if failure is None:
        return Finding("imports", "ok", f"{', '.join(MODULES[engine])}")
    first = next(iter(failure.error.splitlines()), "")[:300]
    cause, command = cause_and_remedy(failure, package)
    return Finding("imports", "error", first, f"a server ends there, too: {cause}", command)


def try_imports(modules: tuple[str, ...], deadline_s: float = DEADLINE_S) -> Failure | None:
    """What went wrong when they were imported, one after the other."""
    command = [sys.executable, "-c", PROGRAM, *modules]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Failure(modules, f"importing takes longer than {deadline_s:.0f} s")
    if done.returncode:  # the program itself ends with 0
        code = done.returncode
        by = Signals(-code).name if code < 0 else f"status {code}"
        return Failure(modules, f"importing ended by {by}")
    told = json.loads(done.stdout.splitlines()[-1])
    if "error" not in told:
        return None
    packages = tuple(told["packages"])
    return Failure(modules, told["error"], packages, told.get("missing"), tuple(told["here"]))


# ---- what mends it ----


def cause_and_remedy(failure: Failure, package: str) -> tuple[str, str]:
    """What is wrong, and a command for this very environment. Of several causes the likeliest: the
    next run of doctor names the next."""
    missing = (failure.missing or "").partition(".")[0]
    involved = {*failure.packages, missing}
    for name in failure.here:
        if _is_elsewhere(name) and (name != "cxlkv" or name in involved):
            return f"./{name} of this folder is imported in place of what is installed", "cd /"
    if found := [name for name in COMPANIONS if name in involved]:
        torch = f"torch {_version('torch')}"
        there = [name for name in COMPANIONS if _version(name)] or found
        cause = f"{found[0]} was compiled for another build than {torch}; texts need none of these"
        return cause, pip("uninstall", "-y", *there)
    if unmet := unmet_requirements(package):
        there = [f"{name} {_version(name) or 'is not there'}" for name in unmet]
        return f"{package} needs others ({', '.join(there)})", pip("install", *unmet.values())
    if not failure.packages:
        modules = f"import {', '.join(failure.modules)}"
        return "it did not say why", shlex.join(
            [sys.executable, "-X", "faulthandler", "-c", modules]
        )
    owners = metadata.packages_distributions()
    names = (missing, *failure.packages)
    broken = [owner for name in names for owner in owners.get(name, ())]
    owner = next(owner for owner in (*broken, package) if owner != "cxlkv")
    again = pip("install", "--force-reinstall", "--no-deps", f"{owner}=={_version(owner)}")
    return f"files of {owner} may be damaged", again


def pip(*words: str) -> str:
    """The command of this environment; uv makes environments without pip."""
    own = [sys.executable, "-m", "pip", words[0]]
    if util.find_spec("pip") is None:
        own = ["uv", "pip", words[0], "--python", sys.executable]
    if any(word.endswith("+cpu") and word.startswith("torch") for word in words):
        words = (*words, "--extra-index-url", TORCH_INDEX)
    return shlex.join([*own, *words[1:]])


def unmet_requirements(package: str) -> dict[str, str]:
    """What the package, cxlkv and all that they need require and this environment has not, by name,
    as pip takes it; COMPANIONS are none."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return {}  # transformers and vLLM need it
    left, seen, unmet = [package, "cxlkv"], set[str](), dict[str, str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in metadata.requires(name) or () if _version(name) else ():
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            there = _version(needed.name)
            if there is not None and needed.specifier.contains(there, prereleases=True):
                left.append(needed.name)
            elif needed.name not in COMPANIONS:
                unmet[needed.name] = f"{needed.name}{needed.specifier}"
    return unmet


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_elsewhere(name: str) -> bool:
    """Whether what a file or folder of this name gives is found without this folder, too."""
    here, stem = Path.cwd(), name.partition(".")[0]
    paths = [Path(path) for path in sys.path if path and Path(path).resolve() != here]
    return any(
        (path / found).exists() for path in paths for found in (f"{stem}.py", f"{stem}/__init__.py")
    )
