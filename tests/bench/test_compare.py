"""Result files read back: compared, and refused when they were tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cxlkv.bench.cli import show, wide_console
from cxlkv.bench.result import Result, lower_is_better, read
from cxlkv.errors import BadArgumentError
from cxlkv.ops import cli

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, object]


def stored(
    path: Path,
    factor: float = 1.0,
    *,
    case: str = "story",
    ratio: float = 2.0,
    commit: str | None = None,
) -> Path:
    """A run whose times are `factor` times as long, of a commit of its own if none is given."""
    result = Result(case, checks={"right": True}, ratios={"ours_to_theirs": ratio})
    samples = [factor * (100 + i % 5) for i in range(20)]
    result.measure("part/time", samples, "us")
    result.measure("part/speed", [1e6 / sample for sample in samples], "GB/s")
    result.measure("part/bytes", [4096], "bytes")
    result.notes.append("a <b>note</b>")
    result.write(path)
    return of_commit(path, commit or path.stem)


def of_commit(path: Path, commit: str) -> Path:
    return changed(path, lambda found: found.update(commit=commit))


def changed(path: Path, change: Callable[[Json], object]) -> Path:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return path


def status(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *map(str, arguments)])
    return stopped.value.code


def test_every_result_in_the_docs_can_be_read() -> None:
    files = sorted((ROOT / "docs/results").glob("*.json"))
    assert files
    for path in files:
        assert read(path).case


def test_units_tell_which_way_is_good() -> None:
    good = {"ns": True, "us": True, "ns/page": True, "GB/s": False, "tokens/s": False}
    assert {unit: lower_is_better(unit) for unit in good} == good
    assert lower_is_better("bytes") is None


@pytest.mark.parametrize(
    ("factor", "ratio", "code", "said"),
    [
        (1.0, 2.0, 0, ()),
        (1.05, 2.0, 0, ("+5.0 %",)),
        (1.5, 2.0, 3, ("worse by more than 10 %: part/time, part/speed",)),
        (0.5, 2.0, 0, ("better",)),
        (1.0, 1.0, 0, ("-50.0 %", "changed")),
    ],
)
def test_compare_tells_worse_from_the_same(
    factor: float,
    ratio: float,
    code: int,
    said: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = stored(tmp_path / "old.json")
    new = stored(tmp_path / "new.json", factor, ratio=ratio)
    assert status("compare", old, new) == code
    shown = capsys.readouterr().out
    assert all(text in shown for text in said)
    assert ("worse" in shown) == (code == 3)


def test_a_ratio_is_not_worse_because_its_base_became_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours takes as long as before, theirs half as long."""
    for name, theirs in (("old", 200), ("new", 100)):
        result = Result("story", checks={"right": True})
        ours = result.measure("ours", [100 + i % 5 for i in range(20)], "us")
        base = result.measure("theirs", [theirs + i % 5 for i in range(20)], "us")
        result.ratio("ours_to_theirs", base.median / ours.median)
        result.write(tmp_path / f"{name}.json")
        of_commit(tmp_path / f"{name}.json", name)
    assert status("compare", tmp_path / "old.json", tmp_path / "new.json") == 0
    shown = capsys.readouterr().out
    assert "worse" not in shown
    assert "better" in shown


def test_two_runs_of_one_commit_are_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever changed between them, no code did; on another machine the machine did."""
    old = stored(tmp_path / "old.json", commit="0123abcd")
    new = stored(tmp_path / "new.json", 1.5, ratio=1.0, commit="0123abcd")
    assert status("compare", old, new) == 0
    shown = capsys.readouterr().out
    assert "both runs are of 0123abcd on one machine" in shown
    assert "noise" in shown
    assert "worse" not in shown
    for path in (old, new):
        of_commit(path, "0123abcd-dirty")
    assert status("compare", old, new) == 3
    for path in (old, new):
        of_commit(path, "0123abcd")
    changed(new, lambda found: machine_of(found).update(cpu="another"))
    assert status("compare", old, new) == 3
    assert "noise" not in capsys.readouterr().out


def machine_of(found: Json) -> Json:
    machine = found["machine"]
    assert isinstance(machine, dict)
    return machine


def test_no_figure_is_cut_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of a comparison nor of a run, however long its name is."""
    name, label = "time_of_" + "a_long_name_" * 12, "astera-a1000-remote-socket, waiting " * 4
    for which in ("old", "new"):
        result = Result("story", checks={"right": True})
        result.measure(name, [123.4, 123.5], "microseconds a step of all layers", label)
        result.write(tmp_path / f"{which}.json")
    assert status("compare", tmp_path / "old.json", tmp_path / "new.json") == 0
    result.notes.append("as it was")
    show(result, wide_console(), None)
    shown = capsys.readouterr().out
    assert shown.count(f" {name} ") == 2
    assert shown.count(label.strip()) == 2
    assert "123.4 to 123.5" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_compare_is_not_sure_of_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, samples in (("old", [1, 9, 2, 8, 3, 7]), ("new", [2, 8, 6, 9, 4, 7])):
        result = Result("story", checks={"right": True})
        result.measure("time", samples, "us")
        result.write(tmp_path / f"{name}.json")
    assert status("compare", tmp_path / "old.json", tmp_path / "new.json") == 0
    assert "+30.0 %" in capsys.readouterr().out


def test_compare_warns_of_another_machine_and_refuses_another_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = stored(tmp_path / "old.json"), stored(tmp_path / "new.json")

    def other_machine(found: Json) -> None:
        found["machine"] = {"cpu": "another one"}

    changed(new, other_machine)
    assert status("compare", old, new) == 0
    assert "the machines differ in cpu: " in capsys.readouterr().out
    changed(new, lambda found: found.update(emulated="astera-a1000, waiting"))
    assert status("compare", old, new) == 1
    assert "the old run is not emulated, the new one astera-a1000" in capsys.readouterr().err
    stored(new, case="other")
    assert status("compare", old, new) == 1
    assert "of two cases, story and other" in capsys.readouterr().err
    stored(new)
    changed(new, lambda found: found.update(checks={"right": False}, ratios={}))
    assert status("compare", old, new) == 1
    assert "its check right failed" in capsys.readouterr().err


def metric_of(found: Json) -> Json:
    metrics = found["metrics"]
    assert isinstance(metrics, dict)
    metric = metrics["part/time"]
    assert isinstance(metric, dict)
    return metric


BAD: dict[str, tuple[Callable[[Json], object], str]] = {
    "median": (lambda found: metric_of(found).update(median=1.0), "its median is 1, but 102"),
    "no_samples": (lambda found: metric_of(found).update(samples=[]), "metrics.part/time.samples"),
    "text": (lambda found: metric_of(found).update(samples=["fast"]), "valid number"),
    "infinite": (lambda found: metric_of(found).update(high=float("inf")), "part/time.high"),
    "extra": (lambda found: found.update(more=1), "more: Extra inputs"),
    "missing": (lambda found: found.pop("machine"), "machine: Field required"),
    "failed": (lambda found: found.update(checks={"right": False}), "not all of its checks hold"),
    "names": (lambda found: found.update(case="a\nb"), "case: String should match"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_changed_file_is_refused_by_name(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = BAD[what]
    old = stored(tmp_path / "old.json")
    new = changed(stored(tmp_path / "new.json"), change)
    for arguments in (("compare", old, new), ("report", new, "-o", tmp_path / "r.html")):
        assert status(*arguments) == 1
        error = capsys.readouterr().err
        assert said in error
        assert "new.json: not a whole, unchanged result file" in error
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_result_file_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(text)
    with pytest.raises(BadArgumentError, match="not a whole, unchanged result file"):
        read(path)
    with pytest.raises(BadArgumentError, match="cannot be read: No such file"):
        read(tmp_path / "absent.json")
    with pytest.raises(BadArgumentError, match="cannot be read: Is a directory"):
        read(tmp_path)
