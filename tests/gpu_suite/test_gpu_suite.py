"""The GPU suite: it comes to its end without a GPU, its cases are right, no figure is made up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the suite measures kernels for torch's tensors")
from cxlkv.bench.result import Result  # noqa: E402

from ..support.pool_worker import is_alive  # noqa: E402
from . import attend, blocks, decode, gather  # noqa: E402
from . import case as gpu_case  # noqa: E402
from . import suite as gpu_suite  # noqa: E402
from .case import Progress, Timer  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/gpu_suite/suite.py"
CPU = torch.device("cpu")
RUN: dict[str, Callable[[Progress], None]] = {
    "gather": lambda progress: gather.run(progress, CPU, gather.TINY),
    "attend": lambda progress: attend.run(progress, CPU, attend.TINY),
    "decode": lambda progress: decode.run(progress, CPU, decode.TINY),
    "blocks": lambda progress: blocks.run(progress, CPU, blocks.TINY),
}


def small(case: str, folder: Path) -> Result:
    """A case with what it would call figures: on a CPU they mean nothing, but have their names."""
    result = Result(f"gpu {case}")
    progress = Progress(result, folder / f"{case}.json", seconds=600, figures=True)
    RUN[case](progress)
    progress.save()
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("case", RUN)
def test_a_case_on_the_gpu_is_right(case: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result = gpu_case.run(case, tmp_path, torch.device("cuda"), seconds=600, tiny=True)
    assert result.checks
    assert [name for name, held in result.checks.items() if not held] == []


def of_any_size(name: str) -> str:
    """Names of ratios say the size: tiny cases have others than those that count."""
    return re.sub(r"\d+k?", "#", name)


def test_cases_are_right_and_name_figures_as_the_summary_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "LONG_BYTES", 0)
    found = {case: small(case, tmp_path) for case in RUN}
    for result in found.values():
        assert result.checks
        assert [name for name, held in result.checks.items() if not held] == []
    made = {of_any_size(name) for result in found.values() for name in result.ratios}
    on_a_gpu = {"kernel_below_break_even_to_dma"}  # there is no DMA on a CPU
    assert {of_any_size(name) for name in gpu_suite.WANTED.keys() - on_a_gpu} <= made


def test_a_case_whose_time_is_over_says_what_it_left_out(tmp_path: Path) -> None:
    result = gpu_case.run("attend", tmp_path, CPU, seconds=0, tiny=True)
    assert "out of time before: 2 lists of 64 tokens" in result.notes
    assert not result.passed


# ---- the script ----


@pytest.mark.nightly
def test_the_script_comes_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "gather.json").write_bytes(b"of an earlier run")
    # Without the interpreter, which the tests of the cases have, the torch references run.
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT), TRITON_INTERPRET="0")
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"index.json", "summary.md", *(f"{case}.json" for case in RUN)}
    index = json.loads((tmp_path / "index.json").read_text())
    steps = {step["name"]: step for step in index["steps"]}
    assert list(steps) == list(gpu_suite.STEPS)
    for name, step in steps.items():
        assert step["state"] == ("skipped" if name == "tests" else "passed"), step
        assert step["reason"] or name == "environment"
    assert "no GPU" in steps["tests"]["reason"]
    assert "no figures" in steps["gather"]["reason"]
    assert index["environment"]["no_gpu"]
    for case in RUN:
        written = json.loads((tmp_path / f"{case}.json").read_text())
        assert (written["metrics"], written["ratios"]) == ({}, {})
        assert written["checks"]
        assert written["notes"][0] == gpu_case.NO_FIGURES
    assert index["results"] == [f"{case}.json" for case in RUN]
    text = (tmp_path / "summary.md").read_text() + (tmp_path / "index.json").read_text()
    assert str(ROOT) not in text
    assert re.search(r"^\[ +\d+\.\d s\] gather: passed", done.stdout, re.M)


def suite(tmp_path: Path, wheels: Path | None = None) -> gpu_suite.Suite:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "out").mkdir()
    return gpu_suite.Suite(tmp_path / "out", work, wheels, quick=True, minutes=5)


def test_a_step_that_fails_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(of: gpu_suite.Suite) -> gpu_suite.Step:
        raise ValueError("broken, in " + "/home" + "/somebody/folder")

    def holds(of: gpu_suite.Suite) -> gpu_suite.Step:
        return gpu_suite.Step("holds", "passed")

    monkeypatch.setattr(gpu_suite, "STEPS", {"breaks": breaks, "holds": holds})
    assert gpu_suite.main([str(tmp_path / "out")]) == 1
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert [step["state"] for step in index["steps"]] == ["failed", "passed"]
    assert index["steps"][0]["reason"] == "ValueError: broken, in /.../somebody/folder"


def test_no_step_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert gpu_suite.main([str(tmp_path), "--minutes", "0.01"]) == 0
    index = json.loads((tmp_path / "index.json").read_text())
    assert {step["state"] for step in index["steps"]} == {"skipped"}
    assert index["steps"][0]["reason"] == "the 0.01 minutes are over"


def test_a_command_whose_time_is_over_ends_with_its_children() -> None:
    said: list[str] = []
    shell = "sh -c 'echo $$; exec sleep 100'; echo not reached"
    ran = gpu_suite.run(["sh", "-c", shell], os.environ, 2.0, say=said.append)
    assert ran.status is None
    assert ran.fault.startswith("out of time: ")
    assert len(said) == 1
    deadline = time.monotonic() + 60
    while is_alive(int(said[0])):  # its end is told to init, which comes to it
        assert time.monotonic() < deadline


def test_wheels_are_found_and_those_that_do_not_fit_are_named(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "odd-1.0-py3-none-any.whl").write_bytes(b"no zip")
    about = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
    kind = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as made:
        made.writestr("carried_along.py", "")
        made.writestr("carried-1.0.dist-info/METADATA", about)
        made.writestr("carried-1.0.dist-info/WHEEL", kind)
        made.writestr("carried-1.0.dist-info/RECORD", "")
    of = suite(tmp_path, wheels)
    assert not gpu_suite.is_there("carried_along", of.site)
    notes = gpu_suite.install(of)
    assert notes[0] == "carried-1.0-py3-none-any.whl: installed"
    assert notes[1].startswith("odd-1.0-py3-none-any.whl: exit status")
    assert gpu_suite.is_there("carried_along", of.site)
    assert gpu_suite.run([sys.executable, "-c", "import carried_along"], of.env, 60).status == 0


def test_a_missing_module_fails_the_step_and_says_which_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_suite, "MODULES", {"nothing_of_that_name": "the build"})
    monkeypatch.setattr(gpu_suite, "NEEDED", ("nothing_of_that_name",))
    step = gpu_suite.environment(suite(tmp_path))
    assert step.state == "failed"
    assert step.reason == "missing here and in --wheels: wheels of nothing_of_that_name"


def test_tests_are_counted_with_their_reasons(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2, 'as it should'\n"
        "def test_skips(): pytest.skip('for a reason')\n"
    )
    report = tmp_path / "report.xml"
    words = "-q -p no:cacheprovider -p no:xdist -o addopts= --rootdir".split()
    words += [str(tmp_path), f"--junitxml={report}", str(file)]
    command = [sys.executable, "-m", "pytest", *words]
    ran = gpu_suite.run(command, os.environ, 120, folder=tmp_path)
    found = gpu_suite.counted("test_three.py", report, ran)
    assert (found.passed, found.skips) == (1, ["for a reason"])
    (failure,) = found.failures
    assert failure.startswith("test_three.py::test_fails: AssertionError: as it should")
    cut = gpu_suite.counted("test_four.py", tmp_path / "none.xml", gpu_suite.Ran(None, "begun"))
    assert cut.failures == ["test_four.py: out of time: begun"]


def test_each_file_of_gpu_tests_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "tests/kernels").mkdir(parents=True)
    (checkout / "tests/gpu").mkdir()
    marked = "import os, pytest\npytestmark = pytest.mark.gpu\n"
    (checkout / "tests/kernels/test_a.py").write_text(
        f"{marked}def test_one(): pass\ndef test_two(): pytest.skip('a reason')\n"
    )
    (checkout / "tests/gpu/test_b.py").write_text(f"{marked}def test_three(): os._exit(3)\n")
    (checkout / "tests/gpu/test_c.py").write_text("def test_four(): assert False\n")
    monkeypatch.setattr(gpu_suite, "CHECKOUT", checkout)
    monkeypatch.chdir(checkout)
    of = suite(tmp_path)
    of.quick, of.environment = False, {"gpu": "one that is not asked"}
    step = gpu_suite.tests(of)
    assert step.state == "failed"
    assert step.reason.startswith("1 failed, 1 passed; the first: tests/gpu/test_b.py: exit status")
    assert step.details["skips"] == {"a reason": 1}
    (checkout / "tests/gpu/test_b.py").unlink()
    step = gpu_suite.tests(of)
    assert (step.state, step.reason) == ("passed", "1 passed, 1 skipped")


@pytest.mark.nightly
def test_a_bare_checkout_gets_its_core(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in ("native", "kernels", "ndp", "emulation", "bench"):
        shutil.copytree(ROOT / name, checkout / name)
    unwanted = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "cxlkv", checkout / "cxlkv", symlinks=True, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", checkout)  # has the version
    step = gpu_suite.compile_core(suite(tmp_path), checkout)
    assert step.state == "passed", step.tail
    assert step.reason.startswith("compiled: 0.")
    (checkout / "native/src/pages/pages.c").write_text("#error broken\n")
    again = tmp_path / "again"
    again.mkdir()
    step = gpu_suite.compile_core(suite(again), checkout)
    assert step.state == "failed"
    assert "#error broken" in step.tail


@pytest.mark.gpu
def test_a_timer_sees_the_device_and_not_the_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    timer = Timer(torch.device("cuda"), rounds=3)
    large = torch.ones(1 << 28, device="cuda")
    timed = timer({"large": large.sum, "small": large[: 1 << 20].sum})
    assert min(timed["large"]) > max(timed["small"]) > 0
