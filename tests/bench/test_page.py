"""The page of `cxlkv bench report`: it says what was measured in words, and fetches nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cxlkv.bench.result import Result

from .test_compare import ROOT, changed, machine_of, status, stored

pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'cxlkv[report]'")
page = pytest.importorskip("cxlkv.bench.page")


class Page(HTMLParser):
    """What a browser would fetch, the tags with their classes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        self.classes += [value or "" for name, value in attrs if name == "class"]

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "

    @property
    def line(self) -> str:
        return " ".join(self.text.split())


def page_of(*arguments: object, out: Path) -> Page:
    assert status("report", *arguments, "-o", out) == 0
    return Page(out.read_text())


def latency(path: Path, **more: float) -> Path:
    """A run of the case latency: with a curve of reads, one of reads and writes, and two nodes."""
    result = Result("latency", checks={"right": True}, ratios={"loaded_cost_to_idle": 2.0})
    figures = {"idle_8_mib": 100.0, "loaded_full": 200.0, "loaded_2r1w_full": 250.0, **more}
    for name, ns in figures.items():
        result.measure(f"{name}_ns", [ns, ns + 2], "ns")
        if name.startswith("loaded"):
            result.measure(f"{name}_speed", [10.0, 11.0], "GB/s")
    for near, node in ((0, 0), (0, 1), (1, 0), (1, 1)):
        result.measure(f"node{node}_from_node{near}_ns", [100.0 + 70 * (near != node)], "ns")
    result.write(path)
    return path


def test_the_page_says_all_and_fetches_nothing(tmp_path: Path) -> None:
    runs = [stored(tmp_path / f"{name}.json", factor) for name, factor in (("a", 1), ("b", 1.5))]
    emulated = changed(stored(tmp_path / "c.json"), lambda found: found.update(emulated="slow, x"))
    failed = changed(
        stored(tmp_path / "d.json", case="broken"),
        lambda found: found.update(checks={"right": False}, ratios={}),
    )
    out = tmp_path / "r.html"
    found = page_of(*runs, emulated, failed, latency(tmp_path / "e.json"), out=out)
    assert not {"script", "link", "iframe"} & set(found.tags)
    assert all(given.startswith(("#", "data:image/png;")) for given in found.fetched)
    text = out.read_text()
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert found.classes.count("bar") == 3 * 4 + 10  # a bar a figure of each run that holds
    assert "part/time 102 us 101 to 103 100 to 104 20" in found.line
    assert "a <b>note</b>" in found.text  # as text, not as a tag
    assert "emulated: slow, x" in found.line
    assert "Not compared with the first run of this case: the old run is not emulated" in found.line
    assert found.line.count("failed checks: right. No figures are shown.") == 1
    assert text.count(">worse<") == 2  # of the second run against the first
    assert "against the first run: 2 worse, 0 better" in found.line
    assert "102 +50.0 % worse" in found.line
    out.unlink()
    assert status("report", runs[0], "-o", tmp_path / "absent" / "r.html") == 1


def test_the_summary_and_a_warning_come_first(tmp_path: Path) -> None:
    quiet, busy = latency(tmp_path / "a.json"), latency(tmp_path / "b.json")
    said = "warning: load average 9.8 on 2 cores: figures will be noisy"
    changed(quiet, lambda found: machine_of(found).update(load_average=0.1))
    changed(busy, lambda found: found.update(notes=[said]))
    found = page_of(quiet, busy, out=tmp_path / "r.html")
    assert "busy when latency (a.json)" not in found.line
    warning, _, rest = found.line.partition("The machine was busy when latency (b.json) ran: load")
    assert "average 9.8 on 2 cores" in rest
    assert "latency (a.json)" not in warning
    assert "loaded_cost_to_idle: 2 ratio" in rest.partition("the machine:")[0]
    changed(busy, lambda found: found.update(notes=[]))
    changed(busy, lambda found: machine_of(found).update(load_average=9.8, cores_allowed=2))
    found = page_of(busy, out=tmp_path / "r.html")
    assert "load average 9.8 on 2 cores at the end" in found.line


def test_latency_under_load_is_drawn_by_read_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs of all cases, too."""
    drawn: list[object] = []

    def draw(curves: object) -> bytes:
        drawn.append(curves)
        return b"png"

    monkeypatch.setattr(page.pictures, "loaded_latency", draw)
    path = latency(tmp_path / "a.json")
    found = page_of(path, out=tmp_path / "r.html")
    changed(path, lambda found: found.update(metrics=prefixed(found["metrics"])))
    page_of(path, out=tmp_path / "r.html")
    reads = [(0.0, 101.0), (10.5, 201.0)]
    curves = {"reads only": reads, "2:1 reads and writes": [(0.0, 101.0), (10.5, 251.0)]}
    assert drawn == [curves] * 2
    assert "node1_from_node0_ns 170 ns" in found.line


def prefixed(metrics: object) -> dict[str, object]:
    assert isinstance(metrics, dict)
    return {f"memory/{name}": metric for name, metric in metrics.items()}


def test_a_page_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However many samples there are; with too many figures it is refused."""
    result = Result("story", checks={"right": True})
    for number in range(800):
        result.measure(f"time_{number}_us", [100 + (i * 37 % 101) / 10 for i in range(200)], "us")
    result.write(tmp_path / "a.json")
    out = tmp_path / "r.html"
    page_of(tmp_path / "a.json", out=out)
    assert out.stat().st_size < 1 << 20
    monkeypatch.setattr(page, "BYTES_MAX", 100_000)
    assert status("report", tmp_path / "a.json", "-o", out) == 1
    assert "give fewer runs to each page" in capsys.readouterr().err


def test_numbers_of_any_kind_have_a_bar(tmp_path: Path) -> None:
    ratios = {"zero": 0.0, "less": -2.0, "large": 1e12, "one": 1.0}
    result = Result("story", checks={"right": True}, ratios=ratios)
    for name, samples in {"nothing": [0.0], "below": [-3.0, 4.0], "huge": [1e15]}.items():
        result.measure(name, samples, "")
    result.write(tmp_path / "a.json")
    page_of(tmp_path / "a.json", out=tmp_path / "r.html")
    places = re.findall(r"--share:([^%]+)%\"", (tmp_path / "r.html").read_text())
    assert len(places) == 7
    assert all(0 <= float(place) <= 100 for place in places)


def test_every_result_in_the_docs_has_a_page(tmp_path: Path) -> None:
    for path in sorted((ROOT / "docs/results").glob("*.json")):
        found = page_of(path, out=tmp_path / "r.html")
        assert f"({path.name})" in found.text
        assert (tmp_path / "r.html").stat().st_size < 2 << 20
