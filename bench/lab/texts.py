"""Texts that forms of attention are compared on: of many kinds, each with its source.

Some ship with cxlkv and were written for it; others are files of the Python that runs, or of
packages that it needs; tables and logs are generated. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from pydoc import HTMLDoc

import numpy as np

from cxlkv.demo.answers.ask import handbook
from cxlkv.demo.text.inputs import read_config, read_tokens
from cxlkv.errors import BadArgumentError

WRITTEN = Path(__file__).parent / "texts"
STDLIB = Path(sysconfig.get_path("stdlib"))
SEED = 11
CHARACTERS = 120_000
"""Enough for 8,192 tokens of any kind of text."""


@dataclass(frozen=True)
class Text:
    name: str
    kind: str
    source: str
    whole: Callable[[], str]

    def read(self, characters: int = CHARACTERS) -> str:
        """Its first characters."""
        return self.whole()[:characters]


def written(name: str) -> Callable[[], str]:
    return lambda: (WRITTEN / f"{name}.txt").read_text(encoding="utf-8")


def library_file(path: str) -> Callable[[], str]:
    return lambda: (STDLIB / path).read_text(encoding="utf-8")


def topics(first: str, last: str) -> str:
    """Pages of Python's language reference, as help() shows them."""
    pages = import_module("pydoc_data.topics").topics
    return "\n\n".join(pages[name] for name in sorted(pages) if first <= name < last)


def docstrings() -> str:
    names = [name for name in dir(np) if callable(getattr(np, name)) and name[0].islower()]
    return "\n\n".join(f"numpy.{n}\n\n{getdoc(getattr(np, n))}" for n in names)


def markup() -> str:
    page = HTMLDoc().docmodule(argparse)
    return page.replace(str(STDLIB), "lib")


def header() -> str:
    return (Path(np.get_include()) / "numpy" / "ndarraytypes.h").read_text()


def table() -> str:
    """Measurements of stations as CSV: what a row says can be told from earlier ones in part."""
    rng = random.Random(SEED)
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow("time station region temperature humidity pressure wind status".split())
    stations = [
        (f"ST{rng.randrange(1000, 9999)}", rng.choice("north south east west".split()))
        for _ in range(12)
    ]
    at = datetime(2031, 3, 1)
    for _ in range(1500):
        at += timedelta(minutes=rng.randrange(1, 30))
        station, region = rng.choice(stations)
        base = int(station[2:]) % 17
        rows.writerow([
            at.isoformat(" "), station, region, f"{base + rng.gauss(0, 1.5):.1f}",
            rng.randrange(40, 95), f"{1000 + base + rng.gauss(0, 2):.1f}",
            f"{abs(rng.gauss(4, 3)):.1f}", rng.choices(["ok", "late", "repaired"], [20, 3, 1])[0],
        ])  # fmt: skip
    return out.getvalue()


def log() -> str:
    """Requests of a service as lines of JSON; each has two or three lines at different times."""
    rng = random.Random(SEED + 1)
    lines, at = [], datetime(2031, 5, 4, 7)
    waiting: list[tuple[str, str]] = []
    for number in range(1200):
        at += timedelta(milliseconds=rng.randrange(5, 900))
        if waiting and rng.random() < 0.5:
            name, path = waiting.pop(rng.randrange(len(waiting)))
            line: dict[str, object] = {"event": "end", "request": name, "path": path}
            line |= {"status": rng.choices([200, 404, 503], [30, 2, 1])[0]}
        else:
            name = f"{rng.randrange(16**8):08x}"
            path = f"/api/{rng.choice('orders items users carts'.split())}/{rng.randrange(400)}"
            waiting.append((name, path))
            line = {"event": "begin", "request": name, "path": path, "number": number}
        lines.append(json.dumps({"time": at.isoformat(), **line}))
    return "\n".join(lines)


WRITTEN_HERE = "written for cxlkv, in this package"
PYTHON = "Python's own library"
TEXTS = (
    Text("handbook", "prose", WRITTEN_HERE, lambda: handbook()[0]),
    Text("essay", "prose", WRITTEN_HERE, written("essay")),
    Text("dialogue", "dialogue", WRITTEN_HERE, written("dialogue")),
    Text("german", "prose in German", WRITTEN_HERE, written("german")),
    Text("reference-a", "technical prose", f"{PYTHON}: pydoc_data.topics, a to c",
         lambda: topics("a", "d")),
    Text("reference-d", "technical prose", f"{PYTHON}: pydoc_data.topics, d to n",
         lambda: topics("d", "o")),
    Text("reference-o", "technical prose", f"{PYTHON}: pydoc_data.topics, o to z",
         lambda: topics("o", "~")),
    Text("docstrings", "technical prose", "numpy's docstrings", docstrings),
    Text("argparse", "code in Python", f"{PYTHON}: argparse.py", library_file("argparse.py")),
    Text("tarfile", "code in Python", f"{PYTHON}: tarfile.py", library_file("tarfile.py")),
    Text("events", "code in Python", f"{PYTHON}: asyncio/base_events.py",
         library_file("asyncio/base_events.py")),
    Text("decimal", "code in Python", f"{PYTHON}: _pydecimal.py", library_file("_pydecimal.py")),
    Text("header", "code in C", "numpy's headers: ndarraytypes.h", header),
    Text("html", "markup", f"{PYTHON}: help on argparse as HTML, by pydoc", markup),
    Text("table", "table", "generated, seed 11", table),
    Text("log", "lines of JSON", "generated, seed 12", log),
)  # fmt: skip


LEARNED_FROM = Text("pickletools", "code in Python", PYTHON, library_file("pickletools.py"))
"""What methods learn from, which no figure is of."""


def beginnings(folder: Path, tokens: int, count: int, first: int = 0) -> list[list[int]]:
    """Token ids of the first `count` texts that have `tokens` from the token `first` on, by the
    tokenizer of the model in a folder."""
    vocabulary_size = int(read_config(folder).vocab_size)
    found: list[list[int]] = []
    for text in TEXTS:
        ids = read_tokens(folder, text.read(), vocabulary_size).tolist()[first : first + tokens]
        if len(ids) == tokens:
            found.append(ids)
        if len(found) == count:
            return found
    raise BadArgumentError(f"{len(found)} texts have {first + tokens} tokens, {count} are wanted")
