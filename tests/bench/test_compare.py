"""Result files read back: compared, shown as a page, and refused when they were tampered with."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cxlkv.bench.result import Result, lower_is_better, read
from cxlkv.errors import BadArgumentError
from cxlkv.ops import cli

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, object]


def stored(path: Path, factor: float = 1.0, *, case: str = "story", ratio: float = 2.0) -> Path:
    """A run whose times are `factor` times as long."""
    result = Result(case, checks={"right": True}, ratios={"ours_to_theirs": ratio})
    samples = [factor * (100 + i % 5) for i in range(20)]
    result.measure("part/time", samples, "us")
    result.measure("part/speed", [1e6 / sample for sample in samples], "GB/s")
    result.measure("part/bytes", [4096], "bytes")
    result.notes.append("a <b>note</b>")
    result.write(path)
    return path


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
        (1.0, 1.0, 3, ("worse by more than 10 %: ours_to_theirs",)),
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
    assert status("compare", old, new, "--threshold", "200") == 0


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


class Page(HTMLParser):
    """Collects what a browser would fetch, and the pictures."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_its_pictures_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'cxlkv[report]'")
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'cxlkv[report]'")
    runs = [stored(tmp_path / f"{name}.json", factor) for name, factor in (("a", 1), ("b", 1.5))]
    emulated = changed(stored(tmp_path / "c.json"), lambda found: found.update(emulated="slow, x"))
    failed = changed(
        stored(tmp_path / "d.json", case="broken"),
        lambda found: found.update(checks={"right": False}, ratios={}),
    )
    out = tmp_path / "r.html"
    assert status("report", *runs, emulated, failed, "-o", out) == 0
    text = out.read_text()
    page = Page(text)
    # Times, speeds, bytes and ratios of the three runs that hold, each for light and for dark.
    assert page.tags.count("img") == 3 * 4
    assert page.tags.count("source") == 3 * 4
    assert not {"script", "link", "iframe"} & set(page.tags)
    pictures = [given for given in page.fetched if not given.startswith("#")]
    assert len(pictures) == 2 * 3 * 4
    for picture in pictures:
        head, _, data = picture.partition(",")
        assert head == "data:image/svg+xml;base64"
        root = ElementTree.fromstring(base64.b64decode(data))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "url(" not in text.replace("url(#", "")
    assert "@import" not in text
    assert "a <b>note</b>" in page.text  # as text, not as a tag
    assert "b" not in page.tags
    assert "emulated: slow, x" in page.text
    assert "Not compared with the first run of this case: the old run is not emulated" in page.text
    assert "failed checks: right. No figures are shown." in page.text
    assert text.count(">worse<") == 2  # of the second run against the first
    out.unlink()
    assert status("report", runs[0], "-o", tmp_path / "absent" / "r.html") == 1


def test_the_loaded_latency_is_drawn_as_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'cxlkv[report]'")
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'cxlkv[report]'")
    result = Result("latency", checks={"right": True})
    result.measure("idle_8_mib_ns", [100.0, 101.0], "ns")
    result.measure("loaded_full_ns", [200.0, 210.0], "ns")
    result.measure("loaded_full_speed", [10.0, 11.0], "GB/s")
    result.write(tmp_path / "r.json")
    assert status("report", tmp_path / "r.json", "--out", tmp_path / "r.html") == 0
    assert "latency against the load of other threads" in (tmp_path / "r.html").read_text()
