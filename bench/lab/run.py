"""`cxlkv lab run` measures all units of a plan, and goes on where an earlier run stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from rich.console import Console
from transformers import AutoTokenizer

from cxlkv.adapters.transformers import layout_of
from cxlkv.bench.lab import peers
from cxlkv.bench.lab.costs import COSTS
from cxlkv.bench.lab.reading import Reader
from cxlkv.bench.lab.units import Advance, Arrays, Plan, Runner
from cxlkv.bench.result import commit
from cxlkv.demo.progress import progress_of
from cxlkv.demo.text import inputs
from cxlkv.errors import BadArgumentError, CorruptError, UnsupportedError
from cxlkv.layout import KVLayout
from cxlkv.machine.state import write_whole
from cxlkv.ndp import choosers, names, scorers
from cxlkv.ndp.engine import METHODS
from cxlkv.pool import CXLPool

PLAN = "plan.json"
FORMAT = 3
"""Format of the units' files: changes with what they hold, or what it means."""


def run(folder: Path, model: Path, plan: Plan, console: Console) -> list[str]:
    """Measure the units that the folder lacks, but for those that another process measures now;
    these are returned.

    Raises BadArgumentError where the folder holds those of another plan, model or texts, and for
    what cannot be measured: a model that takes too few tokens, or a tokenizer of another kind;
    UnsupportedError for MLA, for attention sinks, and where all layers have a window.
    """
    config = inputs.read_config(model)
    layout = layout_of(config)
    is_latent = layout.values == "key_prefix"
    if is_latent or None not in layout.windows:
        what = "is MLA" if is_latent else "has a window in each layer, so that nothing is chosen"
        raise UnsupportedError(f"cxlkv lab run: this model {what}; see docs/how-to/lab.md")
    decoder = config.get_text_config(decoder=True)
    most = max(plan.prefix + plan.steps + 1, plan.context_tokens * 5 // 4)
    if getattr(decoder, "max_position_embeddings", most) < most:
        raise BadArgumentError(
            f"the model takes {decoder.max_position_embeddings} tokens, the lab reads {most}"
        )
    loaded = inputs.read_model(model)
    if any(name.endswith(".sinks") for name, _ in loaded.named_parameters()):
        raise UnsupportedError(
            "cxlkv lab run: this model's attention has learned sinks, which are in no page"
        )
    layout = layout_of(loaded)
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity_bytes(layout, plan)) as pool:
        made = {name: peers.load(name, layout) for name in plan.timed if name in peers.NAMES}
        runner = Runner(
            Reader(loaded, pool, made, folder), AutoTokenizer.from_pretrained(model), plan, console
        )
        begin(folder, model, asdict(plan), runner.check(), sources_of(plan))
        with alone(folder / COSTS):
            runner.prepare(folder / COSTS)
        return measure_units(folder, plan.units(), runner.run, console)


def measure_units(
    folder: Path,
    units: Mapping[str, int],
    measure: Callable[[str, Advance], Arrays],
    console: Console,
) -> list[str]:
    """Measure the units that the folder lacks, but for those that another process measures now;
    these are returned. units: the steps that each takes."""
    todo = {name: steps for name, steps in units.items() if not path_of(folder, name).exists()}
    with progress_of(console, sum(units.values()), sum(todo.values())) as progress:
        for name, steps in todo.items():
            path = path_of(folder, name)
            with claimed(path) as is_ours:
                if not is_ours or path.exists():
                    progress.skip(steps)
                    continue
                progress.begin(f"reading {name}")
                save(path, measure(name, progress.advance))
    return [name for name in units if not path_of(folder, name).exists()]


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process is the one to make the file. A process that ends lets go of all."""
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        lock.unlink(missing_ok=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Other processes that come here wait, until the file is there, so that times are of one."""
    with path.with_name(f".{path.name}.lock").open("w") as file:
        if not path.exists():
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists():
                fcntl.flock(file, fcntl.LOCK_UN)
        yield


def sources_of(plan: Plan) -> dict[str, str]:
    """Digests of the modules that define the classes of scorers and choosers among the methods."""
    found = {}
    for name in plan.timed:
        if name not in (*METHODS, *peers.NAMES):
            found[name] = names.source_of(choosers.of(name) or scorers.of(name))
    return found


def begin(
    folder: Path,
    model: Path,
    plan: dict[str, object],
    texts: dict[str, str],
    methods: dict[str, str] | None = None,
) -> None:
    """Write what the folder is of, or hold it against what it says."""
    folder.mkdir(parents=True, exist_ok=True)
    of: dict[str, object] = {"format": FORMAT, "model": digest_of(model), "texts": texts}
    of |= {"plan": plan} | ({"source of a method": methods} if methods else {})
    text = json.dumps(of, indent=1)
    path = folder / PLAN
    if not path.exists():
        write_whole(path, text)
        return
    try:
        before = json.loads(path.read_text())
    except ValueError as error:
        raise CorruptError(f"{path}: {error}; delete the folder and run again") from error
    wanted = json.loads(text)
    for name in of:
        if before.get(name) != wanted[name]:
            what = name
            if methods and name == "source of a method":
                had = before.get(name) or {}
                changed = [each for each, source in methods.items() if had.get(each) != source]
                what = f"source of {', '.join(changed)}"
            raise BadArgumentError(
                f"{folder} holds a run with another {what}: give another folder with --out"
            )


def digest_of(model: Path) -> str:
    """SHA-256 of weights, configuration and tokenizer."""
    found = hashlib.sha256()
    for path in sorted(model.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".model", ".txt"):
            found.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    found.update(block)
    return found.hexdigest()


def path_of(folder: Path, unit: str) -> Path:
    return folder / f"{unit}.npz"


def save(path: Path, arrays: Arrays) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays, commit=np.array(commit()))
    unfinished.replace(path)


def load_units(folder: Path, plan: Plan) -> dict[str, Arrays]:
    """What was measured, by unit. Raises CorruptError for a damaged file."""
    return {name: load_arrays(path_of(folder, name)) for name in plan.units()}


def load_arrays(path: Path) -> Arrays:
    """What was measured in one unit. Raises CorruptError for a damaged file."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise CorruptError(
            f"{path}: {error}; delete the file and run again to measure it"
        ) from error


def capacity_bytes(layout: KVLayout, plan: Plan) -> int:
    """For a context, and for a fork of each form with as many tokens as it reads on; one with
    refresh has two."""
    context = max(plan.prefix, 2 * plan.context_tokens)
    watched = sum(form.refresh > 1 for form in (*plan.forms, *plan.variants))
    more = (len(plan.forms) + watched + 2) * (max(plan.steps, plan.passage) + 512)
    return (context + more) * layout.token_bytes * 4 // 3 + (64 << 20)
