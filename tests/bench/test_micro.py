"""Each case of the microbenchmark command line at tiny size: it runs, and its checks can fail."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlkv import _core
from cxlkv.bench import cli as bench_cli
from cxlkv.bench import loops, registry, streams
from cxlkv.bench.cases import agree, memory
from cxlkv.bench.loops import Stream
from cxlkv.bench.measure import change_interval, median_interval, warnings_of
from cxlkv.bench.registry import CASES, TABLE, Case, Options, filled, named
from cxlkv.bench.result import Result
from cxlkv.errors import (
    BadArgumentError,
    CXLKVError,
    PoolExistsError,
    SystemCallError,
    UnsupportedError,
)
from cxlkv.ops import cli

from ..support.command import run

ROOT = Path(__file__).resolve().parents[2]
UNIT = 16 * streams.UNIT_BYTES
MEMORY = memory.Size((4096, UNIT), UNIT, (100, 0), (1, 0), (4096,), sample_s=0, rounds=1)


def run_small(where: str | None = None) -> Result:
    result = Result("memory", over_links=CASES["memory"].over_links)
    memory.run(result, MEMORY, where)
    return result


def test_a_wrong_sum_fails_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = loops.memory_run

    def wrong(running: list[Stream], seconds: float) -> list[loops.Streamed]:
        return [did._replace(sum=did.sum + 1) for did in run(running, seconds)]

    monkeypatch.setattr(loops, "memory_run", wrong)
    result = run_small()
    assert not result.checks["latency_sums_right"]
    assert not result.checks["read_1t_right"]


@pytest.fixture(params=["anonymous:", "file", "striped"])
def place(request: pytest.FixtureRequest, shm_path: Path) -> Iterator[str]:
    """A place for pools that is as it was before when the test ends."""
    paths = [shm_path.with_suffix(f".{i}") for i in range(2)]
    if request.param == "striped":
        for path in paths:
            with path.open("wb") as file:
                file.truncate(16 << 20)
    yield {
        "anonymous:": "anonymous:",
        "file": str(paths[0]),
        "striped": "dax:" + "+".join(map(str, paths)),
    }[request.param]
    assert [path.exists() for path in paths] == [request.param == "striped"] * 2


def test_the_memory_of_a_place_is_measured(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It, and not this process's: its name is in the notes, and no link is charged for loads."""
    monkeypatch.setattr(loops, "memory_taken", None)  # nobody asks for memory of the process
    monkeypatch.setenv("CXLKV_EMULATE", "astera-a1000")
    used: list[int] = []
    run, memory_of, lent = loops.memory_run, _core.pool_memory, list[tuple[int, int]]()

    def noted(pool: _core.Handle) -> tuple[int, int]:
        lent.append(memory_of(pool))
        return lent[-1]

    def watched(running: list[Stream], seconds: float) -> list[loops.Streamed]:
        ((address, size),) = set(lent)
        for stream in running:
            used.append(stream.memory.ctypes.data - address)
            assert streams.BORDER_BYTES <= used[-1] <= size - stream.memory.size
        return run(running, seconds)

    monkeypatch.setattr(_core, "pool_memory", noted)
    monkeypatch.setattr(loops, "memory_run", watched)
    result = run_small(place)
    assert result.passed
    assert used
    assert any(place in note for note in result.notes)
    assert result.emulated is None


def test_a_place_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "letters"
    file.write_text("dear")
    with pytest.raises(PoolExistsError):
        memory.run(Result("memory"), MEMORY, str(file))
    assert file.read_text() == "dear"
    for case, region, why in (
        ("agree", ["anonymous:"], "--region goes with memory, litmus; not with agree"),
        ("memory", ["anonymous:", "numa:0"], "--region: one"),
        ("all", ["anonymous:"], "not with all"),
        ("memory", ["dax:dax99.9"], "no device"),
    ):
        options = [word for each in region for word in ("--region", each)]
        with pytest.raises(CXLKVError, match=why):
            cli.app(["bench", "run", case, *options], standalone_mode=False)


@pytest.mark.parametrize("kind", ["write", "mixed", "copy", "copy_past"])
def test_what_is_not_written_is_seen(kind: str) -> None:
    with loops.memory_taken(UNIT) as memory:
        streams.number(memory)
        stream = Stream(kind, memory, first_word=1 << 40)
        (did,) = loops.memory_run([stream], 0)
        assert did.moved_bytes > 0
        assert streams.contents_are_right(stream, did)
        memory[{"write": 0, "mixed": UNIT // 3 * 2}.get(kind, UNIT // 2)] ^= 1
        assert not streams.contents_are_right(stream, did)


def test_sums_wrap_as_words_do() -> None:
    first = 2**64 - 3
    assert streams.sum_of_words(first, 5) == (first + first + 1 + first + 2 + 0 + 1) % 2**64


def test_what_memory_and_cpus_are_not_there_is_said() -> None:
    with (
        pytest.raises(SystemCallError, match="memory of node 1000"),
        loops.memory_taken(4096, 1000),
    ):
        pass
    with (
        loops.memory_taken(UNIT) as memory,
        pytest.raises(SystemCallError, match="cannot run on CPU 1000"),
    ):
        loops.memory_run([Stream("read", memory, cpu=1000)], 0)
    to = np.empty(100, np.uint8)
    with pytest.raises(BadArgumentError, match="do not fit"):
        loops.memory_gather_s(to, to, np.zeros(2, np.uint64), 64)


def test_matrices_name_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes as far as the case knows; memory is taken wherever it is."""
    cpus = tuple(streams.allowed_cpus()[:1])
    (node, *_) = streams.places(UNIT).memory
    two = streams.Places((node, node), {0: cpus, 1: cpus})
    monkeypatch.setattr(streams, "places", lambda need_bytes: two)
    taken = loops.memory_taken
    monkeypatch.setattr(loops, "memory_taken", lambda size, node=-1: taken(size))
    assert {"read_node0_from_node1", "node0_from_node1_ns"} <= set(run_small().metrics)


def test_agree_names_the_programs_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="apt install"):
        agree.run(Result("agree"), agree.QUICK)
    notes: list[str] = []
    assert agree.found_tools(agree.QUICK, tmp_path, notes) == {}
    assert notes[1:] == [f"{t}: not measured, {t} is not installed" for t in ("mbw", "perf")]
    program = tmp_path / "mbw"
    program.write_text("#!/bin/sh\necho nonsense\n")
    program.chmod(0o755)
    agree.found_tools(agree.QUICK, tmp_path, notes)
    assert "mbw printed something else than a figure" in notes[-2]


def test_agree_takes_figures_of_another_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in for mbw, as it prints, and slower than any memory: it disagrees, and no page is
    green over that. The true ones are compared by the case itself."""
    program = tmp_path / "mbw"
    program.write_text(
        "#!/bin/sh\necho 'AVG\tMethod: MEMCPY\tElapsed: 0.1\tMiB: 8.0\tCopy: 100.000 MiB/s'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    result = Result("agree")
    agree.run(result, agree.Size(1 << 20, sample_s=0, rounds=1))
    assert result.metrics["copy_mbw"].samples == [100 * 2**20 / 1e9]
    assert result.ratios["copy_to_mbw"] > 1.15
    assert result.checks["copy_agrees_with_mbw"] is False
    assert result.as_dict()["ratios"] == {}
    assert any("DISAGREES by more than 15 %" in note for note in result.notes)
    monkeypatch.setattr(agree, "AGREE_WITHIN", 1e9)
    result = Result("agree")
    agree.run(result, agree.Size(1 << 20, sample_s=0, rounds=1))
    assert result.passed


def test_all_keeps_what_runs_and_names_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(case: Case, result: Result, options: Options) -> None:
        assert options.quick
        if case.name == "memory":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        if case.name == "coherence":
            raise UnsupportedError("no such thing here")
        result.measure("time", [1.0, 2.0, 3.0], "us")
        result.checks["right"] = case.name != "foundation/gather"

    monkeypatch.setattr(Case, "measure", measure)
    out = tmp_path / "r.json"
    ended = run(capsys, "bench", "all", "--quick", "--json", out)
    assert ended.code == 1
    found = json.loads(out.read_text())
    assert set(found["metrics"]) == {"foundation/pages/time"}
    assert found["checks"]["foundation/gather/right"] is False
    assert found["ratios"] == {}
    shown = ended.out
    assert "check failed: foundation/gather/right" in shown
    assert "memory: not measured, torch is not installed" in shown
    assert "coherence: not measured, no such thing here" in shown


def test_no_speed_is_shown_when_a_check_failed() -> None:
    result = Result("story", checks={"right": False})
    result.measure("time", [1], "us")
    result.measure("violations", [7], "count")
    assert bench_cli.table(result).row_count == 1
    result.checks["right"] = True
    assert bench_cli.table(result).row_count == 2


def test_every_case_is_listed_with_what_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert all(case.group for case in CASES.values())
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(capsys, "bench").out
    for name in CASES:
        assert f" {name} " in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert run(capsys, "bench", "run", "--json", tmp_path / "cases.json").code == 0
    told = json.loads((tmp_path / "cases.json").read_text())["cases"]
    said = [case["about"] for case in told]
    assert all(said)
    assert len(set(said)) == len(CASES), "two cases with one description"


def test_what_a_wheel_leaves_out_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "PACKAGE", tmp_path)
    for name in ("encodings", "store", "vllm"):
        assert "from a checkout" in named(name).about()
        with pytest.raises(UnsupportedError, match=f"{name} runs from a checkout"):
            named(name).load()


def test_nothing_in_a_wheel_imports_what_it_leaves_out() -> None:
    left_out = re.findall(r'"cxlkv/(bench/.*?)(?:\.py)?",', (ROOT / "pyproject.toml").read_text())
    assert {"bench/peers", "bench/vllm", "bench/regress"} <= set(left_out)
    names = "|".join(name.replace("/", r"\.") for name in left_out)
    imports = re.compile(rf"^ *(?:from|import) cxlkv\.(?:{names})\b", re.M)
    for path in [*(ROOT / "cxlkv").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        if not path.relative_to(ROOT).as_posix().startswith(tuple(left_out)):
            assert not imports.search(path.read_text()), path


def test_a_joined_case_runs_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their figures are in one result; a part that cannot run here is named."""

    def measure(part: Case, result: Result, options: Options) -> None:
        if part.name == "decode/steps":
            raise UnsupportedError("no such thing here")
        result.measure(part.name, [1.0], "us")

    monkeypatch.setattr(Case, "measure", measure)
    decode, said = named("decode"), list[str]()
    result = decode.run(Options(), said.append).result
    assert said == [part.name for part in decode.parts]
    assert list(result.metrics) == ["decode/shapes", "decode/attention"]
    assert result.notes == ["decode/steps: not measured, no such thing here"]
    with pytest.raises(UnsupportedError):
        named("decode/steps").run(Options(), said.append)
    assert decode.seconds == sum(part.seconds or 0 for part in decode.parts)
    assert len(TABLE) <= 24


def test_the_docs_have_every_case_and_its_result() -> None:
    docs = ROOT / "docs"
    text = (docs / "reference/benchmarks.md").read_text()
    assert filled(text) == text, "python -m cxlkv.bench.registry writes the table"
    named_files = {name for case in CASES.values() for name in case.files}
    # Of commands that are no case:
    others = {"demo-answers", "lab", "lab-encodings", "lab-encodings-gemma", "lab-kept"}
    others |= {"lab-sketches", "methods-2000", "methods-7000", "methods-authors"}
    others |= {"methods-authors-states", "methods-sketch", "methods-32000"}
    assert named_files | others == {path.stem for path in (docs / "results").glob("*.json")}


def test_quick_goes_where_there_is_a_quick_size(capsys: pytest.CaptureFixture[str]) -> None:
    for case in ("foundation/calls", "foundation", "replay"):
        more = ("--trace", "zipf") if case == "replay" else ()
        ended = run(capsys, "bench", case, "--quick", *more)
        assert (ended.code, "--quick" in ended.err) == (1, True)


def test_the_interval_holds_the_median_as_often_as_it_says(rng: np.random.Generator) -> None:
    assert median_interval(list(range(1, 7))) == (1, 6)  # 1 - 2 / 2**6 = 0.97
    assert median_interval(list(range(1, 21))) == (6, 15)  # the table in textbooks
    assert median_interval([3.0]) == (3.0, 3.0)
    draws = [median_interval(rng.exponential(1, 21).tolist()) for _ in range(1000)]
    inside = sum(low <= math.log(2) <= high for low, high in draws)
    assert inside > 930  # of 1,000 at 0.95 or more: four deviations below it


def test_a_change_is_sure_when_the_samples_say_so() -> None:
    old = [100 + i % 5 for i in range(20)]
    low, high = change_interval(old, [2 * sample for sample in old])
    assert 1.9 < low <= high < 2.1
    low, high = change_interval([1, 9, 2, 8, 3, 7], [2, 8, 3, 9, 1, 7])
    assert low < 1 < high


def test_noise_is_said() -> None:
    quiet = [100 + i % 3 * 0.1 for i in range(20)]
    assert warnings_of(quiet) == []
    assert "the first sample is an outlier" in warnings_of([300, *quiet])[0]
    assert "3 of 23 samples are outliers" in warnings_of([*quiet, 300, 400, 500])[0]
    assert "noisy: the median is only known within" in warnings_of([1, 2, 3, 4, 5, 6, 7])[0]
    assert warnings_of([1, 100]) == []  # too few to tell
