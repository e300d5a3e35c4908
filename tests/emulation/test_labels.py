"""Every figure that a command shows or writes over an emulated link says so.

The walk goes through all commands: those whose figures a clock made are read, line by line, row by
row; of all others it is said here why they have none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup
from typer.main import get_command

from cxlkv import CXLPool, KVLayout
from cxlkv.bench import cli as bench_cli
from cxlkv.bench import result as results
from cxlkv.bench.calibrate import links, rates
from cxlkv.bench.cases import gather
from cxlkv.bench.result import HERE, LATE, Result, is_timed, read
from cxlkv.errors import BadArgumentError
from cxlkv.machine.costs import Costs
from cxlkv.ndp import tuning
from cxlkv.ops import advise as advise_module
from cxlkv.ops import cli

from ..support.command import run

NAME = "astera-a1000"
LABEL = f"{NAME}, wait"
MODEL = ("--layout", "{layers: 2, kv_heads: 1, head_dim: 32}")
FIGURE = re.compile(r"\d (ns|us|ms|s|[GM]i?B/s|tokens/s)\b")
# Made by this machine alone, as the line itself says; and what is no measurement.
ELSEWHERE = re.compile(
    r"O_DIRECT|│ cold_|^cxlkv bench all|load average|^warning: .*: noisy|outlier"
)
EMULATES = re.compile(r"[ (]emulate\(")
DOORS = {
    *("info", "doctor", "advise", "tune", "demo", "pool top", "lab"),
    *("bench run", "bench compare", "bench report"),
}
WITHOUT = {
    "sizes and counts": "size|pool create|pool inspect|pool list|pool check|"
    "pool upgrade|pool gc|pool remove|pool fence|metrics",
    "no figures": "serve|ndp-worker",
}


# ---- what an unlabelled figure is, in each form ----


def in_text(text: str) -> list[str]:
    """Lines with a figure that neither say themselves that it is emulated, nor the title of their
    table; where a table has a column for that, each row must."""
    found, above, title, has_column = list[str](), "", "", False
    whole = re.sub(r"(?m)^( .*)\n(?= )", r"\1", text)  # titles and captions of several lines
    for line in whole.splitlines():
        if line.startswith("┏"):
            title = above
        elif line.startswith("┃"):
            has_column = has_column or "emulated" in line
        elif line.startswith("└"):
            title, has_column = "", False
        cells = [cell.strip() for cell in line.split("│")]
        is_figure = FIGURE.search(line) or any(is_timed(c) or c == "ratio" for c in cells[1:])
        words = " ".join(line.split())
        labelled = LABEL in words or (LABEL in title and not has_column)
        if is_figure and not labelled and not ELSEWHERE.search(line):
            found.append(line)
        above = f"{above} {words}" if line.startswith(" ") else words
    return found


def in_json(path: Path) -> list[str]:
    result = read(path)
    return [n for n in (*result.metrics, *result.ratios) if result.label_of(n) != LABEL]


def in_page(path: Path) -> list[str]:
    """Rows of figures, and the summary's figures."""
    page = path.read_text()
    rows = re.findall(r"<tr><td>.*?</tr>", page, re.DOTALL)
    (summary,) = re.findall(r'<section class="summary">.*?</section>', page, re.DOTALL)
    lines = re.findall(r"[^>]+: <b>.*?</b>", summary)
    assert rows
    assert lines
    return [part for part in (*rows, *lines) if LABEL not in part]


# ---- doors ----


@pytest.fixture(autouse=True)
def behind_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("CXLKV_EMULATE", NAME)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "250")  # a label is in one piece
    monkeypatch.setattr(advise_module, "DISK", tmp_path)
    monkeypatch.setattr(links, "DEVICE_FILE", tmp_path / "no GPU")
    monkeypatch.setattr(rates, "SIZE", rates.Size(1 << 20, 1 << 20, 256 << 10, rounds=1))
    monkeypatch.setattr(gather, "QUICK", gather.Size(1 << 20, 256 << 10, (16,), rounds=1))
    tuning.current.cache_clear()
    yield
    tuning.current.cache_clear()


Walk = Callable[[Path, pytest.CaptureFixture[str]], list[str]]


def tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    shown = run(capsys, "tune", "--json", tmp_path / "t.json")
    assert shown.code == 0
    return in_text(shown.out) + in_json(tmp_path / "t.json")


def advise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    speed = ("--prefill-tokens-per-s", "9000")
    found = []
    for more in ((), speed):
        shown = run(capsys, "advise", *MODEL, *more, "--json", tmp_path / "a.json")
        assert shown.code == 0
        assert "pays" in shown.out
        written = json.loads(written_text := (tmp_path / "a.json").read_text())
        unsaid = {written["emulated"], written["costs"]["emulated"]} != {LABEL}
        found += in_text(shown.out) + ([written_text] if unsaid else [])
    return found


def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    file = tmp_path / "b.json"
    shown = run(capsys, "bench", "foundation/gather", "--quick", "--json", file)
    assert shown.code == 0
    return in_text(shown.out) + in_json(file)


def page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    bench(tmp_path, capsys)
    found = []
    for runs in ([tmp_path / "b.json"], [tmp_path / "b.json"] * 2):  # the second one is compared
        assert run(capsys, "bench", "report", *runs, "-o", tmp_path / "b.html").code == 0
        found += in_page(tmp_path / "b.html")
    return found


def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    bench(tmp_path, capsys)
    both = (tmp_path / "b.json",) * 2
    shown = run(capsys, "bench", "compare", *both).out
    assert "+0.0 %" in shown
    changes = json.loads(run(capsys, "bench", "compare", *both, "--json").out)["changes"]
    return in_text(shown) + [str(change) for change in changes if change["emulated"] != LABEL]


def demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    pytest.importorskip("transformers")
    from cxlkv.demo.text import run as on_text
    from tests.demo.test_demo_model import qwen, save

    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(word % 500) for word in range(0, 3000, 7)))
    console = Console(record=True, width=200)
    on_text.run(
        save(qwen(), tmp_path / "qwen"), text, json_path=tmp_path / "d.json", console=console
    )
    shown = console.export_text()
    assert "perplexity" in shown
    return in_text(shown) + in_json(tmp_path / "d.json")


WALKS: dict[str, Walk] = {
    **{"tune": tune, "advise": advise, "bench run": bench, "bench report": page},
    **{"bench compare": compare, "demo": demo},
}


def test_the_walk_knows_every_command() -> None:
    def names(group: object, before: str = "") -> Iterator[str]:
        assert isinstance(group, TyperGroup)
        for name, command in group.commands.items():
            if isinstance(command, TyperGroup):
                yield from names(command, f"{name} ")
            else:
                yield before + name

    without = {name for text in WITHOUT.values() for name in text.split("|")}
    assert {*names(get_command(cli.app))} == DOORS | without


@pytest.mark.parametrize("door", WALKS)
def test_each_figure_says_that_it_is_emulated(
    door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert WALKS[door](tmp_path, capsys) == []


@pytest.mark.parametrize("door", [door for door in WALKS if door != "demo"])  # it takes long
def test_the_walk_finds_a_door_that_forgets(
    door: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "emulation", lambda *_: None)
    assert WALKS[door](tmp_path, capsys)


@pytest.mark.parametrize("door", ["bench run", "bench report", "bench compare"])
def test_the_walk_finds_one_figure_that_is_planted(
    door: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = gather.run

    def planted(result: Result, *size: gather.Size) -> None:
        ours(result, *size)
        result.measure("planted", [1.0], "us", HERE)

    monkeypatch.setattr(gather, "run", planted)
    found = WALKS[door](tmp_path, capsys)
    assert found
    assert all("planted" in one for one in found)


def test_tables_and_lines_of_a_case_are_labelled_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables(result: Result) -> list[Table]:
        made = Table("what", "time")
        made.add_row("all of it", "3 ms")
        result.notes.append("and 7 us more")
        return [made]

    monkeypatch.setattr(gather, "tables", tables, raising=False)
    assert bench(tmp_path, capsys) == []
    monkeypatch.setattr(bench_cli, "labelled", lambda table, label: table)
    assert "3 ms" in bench(tmp_path, capsys)[0]


def test_cases_with_links_of_their_own_are_known() -> None:
    """Their tests look at the labels, of which each has its own."""
    bench = Path(bench_cli.__file__).parent
    found = {path.stem for path in bench.rglob("*.py") if EMULATES.search(path.read_text())}
    assert found == {"decode_layers", "encodings", "hints", "link"}


# ---- what else is said ----


def test_how_often_the_machine_was_slower_than_the_link_is_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(tmp_path, capsys)
    late = read(tmp_path / "b.json").metrics[LATE]
    assert 0 <= late.median <= 1
    assert late.unit == "share of operations"
    advised = run(capsys, "advise", *MODEL).out
    assert re.search(r"note: this machine was slower than the emulated link in \S+ % of", advised)


def test_what_an_emulated_link_costs_is_not_kept_as_this_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run(capsys, "tune").out
    assert f"not kept: emulated ({LABEL})" in shown
    assert not tuning.default_path().exists()
    with pytest.raises(BadArgumentError, match=LABEL):
        tuning.write(tuning.Tuning("m", Costs(emulated=LABEL)), tuning.default_path())
    monkeypatch.delenv("CXLKV_EMULATE")
    assert run(capsys, "tune").code == 0
    monkeypatch.setenv("CXLKV_EMULATE", NAME)
    tuning.current.cache_clear()
    assert "was taken" not in run(capsys, "advise", *MODEL).out  # nor the machine's for a link's


def test_loads_of_bare_memory_are_not_called_emulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result("latency", over_links=False)
    result.measure("idle", [100.0], "ns")
    assert (result.label_of("idle"), result.late_text()) == (None, "")


@pytest.mark.parametrize(
    "words",
    [("tune",), ("advise", *MODEL), ("bench", "foundation/gather", "--quick"), ("demo",)],
    ids=lambda words: words[0],
)
def test_no_command_goes_by_the_wall_clock_over_a_virtual_link(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXLKV_EMULATE", f"{NAME}, virtual")
    ended = run(capsys, *words)
    assert ended.code == 1
    assert not FIGURE.search(ended.out)
    assert f"nothing waits for the emulated link ({NAME}, virtual)" in ended.err


def test_the_lab_does_not_time_methods_over_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(capsys, "lab", "run", "--methods", "exact", "--out", tmp_path)
    assert ended.code == 1
    assert f"not over {LABEL}: unset CXLKV_EMULATE" in ended.err


def test_info_and_doctor_say_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"Emulated (CXLKV_EMULATE): {LABEL}\n" in run(capsys, "info").out
    assert json.loads(run(capsys, "info", "--json").out)["emulated"] == LABEL
    assert in_text(run(capsys, "doctor").out) == []
    monkeypatch.setenv("CXLKV_EMULATE", "numa:63")
    assert "numa:63, which is not there" in run(capsys, "info").out


def test_inspect_and_metrics_have_no_times(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    from cxlkv.ops.metrics import registry

    prometheus = pytest.importorskip("prometheus_client")
    layout = KVLayout(layers=1, kv_heads=1, head_dim=32, page_tokens=16)
    with CXLPool.create(path, layout=layout, capacity="8MiB"):
        assert in_text(run(capsys, "pool", "inspect", path).out) == []
        text = prometheus.generate_latest(registry([path])).decode()
    assert "seconds" not in text.partition("select_recall")[0]
    assert not re.search(r"_(seconds|us|ns|per_s)\b", text)


def test_top_says_whose_rates_are_of_a_link(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the environment of the process itself, not by that of top."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=32, page_tokens=16)
    CXLPool.create(path, layout=layout, capacity="8MiB").close()
    program = (
        "import sys\nfrom cxlkv import CXLPool\npool = CXLPool.open(sys.argv[1])\n"
        "print('open', flush=True)\ninput()"
    )
    command, pipe = [sys.executable, "-c", program, str(path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        monkeypatch.delenv("CXLKV_EMULATE")
        words = ("pool", "top", "--once", "--interval-s", "0.05", path)
        shown = run(capsys, *words).out
        (row,) = json.loads(run(capsys, *words, "--json").out)["pools"][0]["processes"]
        other.communicate("\n")
    assert f"pid {row['pid']}: its rates (emulated: {NAME})" in shown
    assert row["emulated"] == NAME
