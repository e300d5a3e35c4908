"""The litmus run as two processes or threads of this machine: what is refused, found, certified."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.arrays import Bytes
from cxlkv.bench import loops
from cxlkv.bench.cases import litmus
from cxlkv.bench.result import Result
from cxlkv.errors import BadArgumentError, CXLKVError, PeerError
from cxlkv.machine import certificate
from cxlkv.machine.certificate import certified_mode
from cxlkv.ops import cli

PRESSURE_BYTES = 1 << 20
LINE_BYTES = 64


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def region(tmp_path: Path) -> Path:
    return tmp_path / "scratch.litmus"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rounds that are enough in this test."""
    needed = {"message passing": 400, "store buffering": 400, "late eviction": 20}
    monkeypatch.setattr(certificate, "ROUNDS_NEEDED", needed)
    return 400


def play(
    tmp_path: Path,
    regions: dict[str, list[Path]],
    rounds: int,
    watch: Callable[[str], object] = str,
) -> dict[str, Result | CXLKVError]:
    """Both roles as threads, each with its own paths; certificates are a.json and b.json."""
    found: dict[str, Result | CXLKVError] = {}

    def one(role: str) -> None:
        target = tmp_path / f"{role}.json"
        try:
            found[role], _ = litmus.run(
                regions[role], role, rounds, target, watch, 60, PRESSURE_BYTES
            )
        except CXLKVError as error:
            found[role] = error

    threads = [threading.Thread(target=one, args=(role,), name=role) for role in regions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_without_a_role_both_run_here_and_one_host_is_certified(
    region: Path, few: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.app(
        ["bench", "run", "litmus", "--rounds", str(few), "--region", str(region)],
        standalone_mode=False,
    )
    assert "one coherent host" in capsys.readouterr().out
    assert not region.exists(), "made for the run"
    made = certificate.read(certificate.default_path(certificate.region_identity(region)))
    assert made["hosts"] == 1
    assert made["violations"] == 0
    assert [row["rounds"] for row in made["tests"]] == [400, 400, 20]
    assert made["rounds"] == 820
    assert certified_mode(region, hosts=1).mode == "fast"
    assert "1 host" in certified_mode(region).reason
    assert certified_mode(region).mode == "strict"


def test_two_scratch_files_by_default_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def made_file(prefix: str, dir: str) -> tuple[int, str]:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=dir)
        made.append(Path(name))
        return handle, name

    monkeypatch.setattr(litmus, "mkstemp", made_file)
    result, written = litmus.run([], rounds=20, pressure_bytes=PRESSURE_BYTES)
    assert result.passed
    assert len(result.metrics["message passing: rounds"].samples) == 4
    assert len(made) == 2
    assert not any(path.exists() for path in made)
    assert [path.parent for path in written] == [tmp_path / "state/cxlkv"]


def test_two_roles_agree_and_count_hosts_by_their_kernels(
    tmp_path: Path, region: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litmus, "_boot", lambda: threading.current_thread().name)
    found = play(tmp_path, {"a": [region], "b": [region]}, few)
    assert all(isinstance(result, Result) and result.passed for result in found.values()), found
    a, b = (certificate.read(tmp_path / f"{role}.json") for role in "ab")
    assert (a["role"], b["role"]) == ("a", "b")
    assert a["hosts"] == b["hosts"] == 2
    assert a["tests"] == b["tests"]
    assert certified_mode(region, tmp_path / "b.json").mode == "fast"
    names = {"a": "", "b": "known"}
    monkeypatch.setattr(litmus, "_boot", lambda: names[threading.current_thread().name])
    play(tmp_path, {"a": [region], "b": [region]}, 1)
    assert certificate.read(tmp_path / "a.json")["hosts"] == 1, "not known is not two"


@contextmanager
def scribbler(path: Path) -> Iterator[None]:
    """Somebody who writes into the lines of the tests, not into those of the rendezvous."""
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), loops.LITMUS_REGION_BYTES), np.uint64)
    lines = memory[3 * LINE_BYTES // 8 : -2 * loops.LITMUS_MESSAGE_BYTES // 8]
    stop = threading.Event()

    def scribble() -> None:
        value = 0
        while not stop.is_set():
            lines[:] = value = value + 1

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_violations_are_counted_described_and_certify_nothing(
    region: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    region.write_bytes(litmus.MAGIC.ljust(loops.LITMUS_REGION_BYTES, b"\0"))
    while True:  # until the scribbler runs beside this test, of the run's several
        with scribbler(region), pytest.raises(SystemExit):
            cli.app(["bench", "run", "litmus", "--rounds", "5000", "--region", str(region)])
        out = capsys.readouterr().out
        assert "check failed: no_violations" in out
        made = certificate.read(certificate.default_path(certificate.region_identity(region)))
        rows = {row["test"]: row for row in made["tests"]}
        stale = rows["message passing"]
        if stale["violations"]:
            break
    assert stale["violations"] > 0
    assert stale["first_violation"].startswith(("stale: role ", "lost: role "))
    assert "region 0: " in stale["first_violation"]
    assert stale["first_violation"] in out
    assert made["violations"] == sum(row["violations"] for row in rows.values())
    assert "violations" in certified_mode(region, hosts=1).reason
    assert region.exists(), "it was there before"


def test_memory_that_is_not_shared_is_found_and_both_count_it(tmp_path: Path) -> None:
    """Region 1 of role b is a copy of role a's, with its label: nothing gets across there."""
    paths = [tmp_path / name for name in ("shared", "of_a", "of_b")]
    for path in paths:
        path.write_bytes(litmus.MAGIC.ljust(loops.LITMUS_REGION_BYTES, b"\0"))

    def copy_label(text: str) -> None:
        if text.startswith("role a: waiting"):
            with paths[2].open("r+b") as of_b, paths[1].open("rb") as of_a:
                of_b.write(of_a.read(LINE_BYTES))

    found = play(tmp_path, {"a": paths[:2], "b": [paths[0], paths[2]]}, 100, copy_label)
    assert all(isinstance(result, Result) and not result.passed for result in found.values())
    a, b = (certificate.read(tmp_path / f"{role}.json") for role in "ab")
    counted = {(row["test"], row["first"], row["second"]): row["violations"] for row in a["tests"]}
    assert list(counted.values()) == [row["violations"] for row in b["tests"]]
    assert all(counted[test, 0, 0] == 0 for test in loops.LITMUS_TESTS)
    for where in ((0, 1), (1, 0), (1, 1)):
        assert counted[("message passing", *where)] == 100, "lost or stale in each round"
    assert counted["store buffering", 1, 1] == 100
    assert all(counted[("late eviction", *where)] >= 5 for where in ((0, 1), (1, 0), (1, 1)))
    assert "violations" in certified_mode(paths[0], tmp_path / "a.json").reason


def test_a_role_that_fails_tells_the_other(tmp_path: Path, region: Path) -> None:
    def fail(text: str) -> None:
        if threading.current_thread().name == "b" and text.startswith("store buffering"):
            raise BadArgumentError("as a test wants it")

    found = play(tmp_path, {"a": [region], "b": [region]}, 600, fail)
    assert isinstance(found["b"], BadArgumentError)
    assert "gave up" in str(found["a"])
    assert not (tmp_path / "a.json").exists()


def test_what_holds_something_is_refused_and_stays(tmp_path: Path) -> None:
    pool, text, folder = tmp_path / "my.pool", tmp_path / "text", tmp_path / "folder"
    CXLPool.create(pool, layout=KVLayout(layers=1, kv_heads=1, head_dim=8), capacity="4MiB").close()
    text.write_bytes(b"\0" * 5000)
    folder.mkdir()
    before = pool.read_bytes()
    for path, reason in ((pool, "holds a pool"), (text, "holds something")):
        with pytest.raises(BadArgumentError, match=reason):
            litmus.run([path], "a")
    assert pool.read_bytes() == before
    assert text.read_bytes() == b"\0" * 5000
    for path in (folder, Path("/dev/null")):
        with pytest.raises(CXLKVError, match=r"no dax device|Is a directory"):
            litmus.run([path], "a")


def test_a_region_that_the_other_role_began_with_is_not_refused(region: Path) -> None:
    first = litmus.open_region(region)
    began = loops.litmus_make([first.memory.ctypes.data], 1, PRESSURE_BYTES, 1.0)
    second = litmus.open_region(region)
    assert (first.made, second.made) == (True, False)
    assert (first.memory == second.memory).all()
    assert first.memory[2 * LINE_BYTES : 3 * LINE_BYTES].any(), "role b's line"
    loops.litmus_destroy(began)


def test_bad_arguments_are_named(region: Path) -> None:
    for regions, role, reason in (
        ([region], "c", "a or b"),
        ([], "a", "--region"),
        ([region, region], "a", "given twice"),
        ([region] * 17, "a", "at most 16"),
    ):
        with pytest.raises(BadArgumentError, match=reason):
            litmus.run(regions, role)
        assert not region.exists()
    with pytest.raises(BadArgumentError, match="goes with litmus"):
        cli.app(["bench", "run", "memory", "--role", "a"], standalone_mode=False)


def test_a_role_that_nobody_joins_says_what_to_start(region: Path) -> None:
    with pytest.raises(PeerError, match=r"role a did not come .* --role a --region "):
        litmus.run([region], "b", meet_s=0.01, pressure_bytes=PRESSURE_BYTES)
    assert not region.exists()


def test_other_regions_are_noticed_by_both(tmp_path: Path, region: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    found = play(tmp_path, {"a": [region, one], "b": [region, two]}, 10)
    assert isinstance(found["b"], BadArgumentError)
    assert "region 1 is not" in str(found["b"])
    assert isinstance(found["a"], PeerError)
    assert "gave up" in str(found["a"])
    assert not any(path.exists() for path in (region, one, two))
    assert not (tmp_path / "a.json").exists()


def test_a_role_that_is_killed_is_missed(region: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litmus, "SILENT_S", 0.2)
    command = [sys.executable, "-m", "cxlkv.ops.cli", "bench", "litmus", "--role", "b"]
    with subprocess.Popen(
        [*command, "--region", str(region)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as other:

        def kill(text: str) -> None:
            if text.startswith("message passing"):
                other.kill()
                other.wait()

        with pytest.raises(PeerError, match=r"silent for 0\.2 s"):
            litmus.run([region], "a", progress=kill, pressure_bytes=PRESSURE_BYTES)
    assert not region.exists()


def pair() -> tuple[list[Bytes], Callable[[int], _core.Handle]]:
    memory = [np.frombuffer(mmap.mmap(-1, loops.LITMUS_REGION_BYTES), np.uint8)]
    address = memory[0].ctypes.data
    return memory, lambda role: loops.litmus_make([address], role, PRESSURE_BYTES, 30.0)


def test_what_an_older_run_left_is_nobody() -> None:
    memory, make = pair()
    a, b = make(0), make(1)
    met = [loops.litmus_meet(litmus) for litmus in (a, b, a, b)]
    assert met[-2:] == [True, True]
    b = make(1)
    assert not any(loops.litmus_meet(b) for _ in range(3)), "role a's lines are of its old run"
    with pytest.raises(PeerError, match="started anew"):
        loops.litmus_run(a, 0, (0, 0), range(1), loops.LitmusCounts())
    with pytest.raises(BadArgumentError, match="no such"):
        loops.litmus_run(a, 3, (0, 0), range(1), loops.LitmusCounts())
    del memory


def test_the_result_file_of_the_docs_is_one_host_without_violations() -> None:
    path = Path(__file__).resolve().parents[2] / "docs/results/litmus.json"
    found = json.loads(path.read_text())
    assert found["checks"] == {"no_violations": True}
    assert any("one coherent host" in note for note in found["notes"])
    assert os.fspath(path).endswith(f"{found['case']}.json")
