"""Peers beside ours, small and without a network: ours runs as in earnest, others are fakes that
are right, wrong, dead or hanging; those that fail are named and not in the figures."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cxlkv.bench.cli import perform
from cxlkv.bench.peers import cache_steps, running, serving, store
from cxlkv.bench.peers import llama_steps as llama
from cxlkv.bench.peers.running import SideBySide, Size
from cxlkv.bench.peers.talking import ContenderError, Conversation, Program, program_of
from cxlkv.bench.registry import Options
from cxlkv.bench.result import read as read_result

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"
SMALL = Size(
    object_bytes=(64 << 10, 128 << 10),
    total_bytes=4 << 20,
    call_objects=8,
    threads=(1,),
    rounds=2,
)
SMALLER = replace(SMALL, object_bytes=(64 << 10,))
STORE = replace(
    store.QUICK,
    object_bytes=SMALL.object_bytes,
    total_bytes=SMALL.total_bytes,
    call_objects=SMALL.call_objects,
    threads=(1, 2),
    bounds={"memcpy": 0.0, "mooncake": 1e9},
)
STORE_SMALLER = replace(STORE, object_bytes=(64 << 10,), threads=(1,))

# A peer as another project would write one; the fault is what it gets wrong.
FAKE = """\
import fcntl, json, os, pathlib, signal, subprocess, sys, time
import numpy as np
fault = {fault!r}
if fault == "cannot start":
    print(json.dumps({{"error": "ModuleNotFoundError: No module named 'rival'"}}))
    sys.exit(1)
if fault == "dies at once":
    sys.exit("libibverbs.so.1 is not here")
if fault == "has a child":
    lock = open(pathlib.Path(__file__).parent / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    subprocess.Popen(["sleep", "600"], pass_fds=[lock.fileno()])
if fault == "says nothing":
    time.sleep(600)
if fault == "babbles":
    sys.stdout.write("x" * (2 << 20))
    sys.stdout.flush()
    time.sleep(600)
forms = {{"batch": ["put", "get"]}}
print("null" if fault == "no greeting" else json.dumps({{"version": "9", "forms": forms}}))
sys.stdout.flush()
gets = 0
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "open":
        given = asked["objects"]
        total = given["count"] * given["object_bytes"]
        out = np.memmap(given["out"], np.uint8, "r+")[:total]
        stored = np.fromfile(given["payload"], np.uint8, total)
    answer = {{"ok": True}}
    if asked["op"] == "run":
        answer = {{"seconds": 0.5, "bytes": total}}
        gets += asked["case"] == "get"
    if asked["op"] == "run" and asked["case"] == "get":
        if fault != "nothing back":
            out[:] = stored
        if fault == "a wrong byte":
            out[12345] ^= 1
        if fault == "wrong later" and gets == 3:
            out[7] ^= 1
        if fault == "less than asked":
            answer["bytes"] -= 1
        if fault == "no time":
            answer["seconds"] = 0.0
        if fault == "time that is none":
            answer["seconds"] = "fast"
        if fault == "not a number":
            answer["seconds"] = float("nan")
        if fault == "an error":
            answer = {{"error": "RuntimeError: batch_get_into gave -800"}}
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            time.sleep(600)
        if fault == "half an answer":
            sys.stdout.write("{{")
            sys.stdout.flush()
            time.sleep(600)
        if fault == "no JSON":
            print("done!", flush=True)
            continue
    print(json.dumps(answer), flush=True)
    if fault == "ends between requests":
        sys.exit("out of memory")
"""


def fake(folder: Path, fault: str, name: str = "rival") -> Program:
    path = folder / f"{name}.py"
    path.write_text(FAKE.format(fault=fault))
    return Program(name, (sys.executable, str(path)), dict(os.environ))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cannot start", "No module named 'rival'"),
        ("dies at once", "exit code 1: libibverbs.so.1 is not here"),
        ("no greeting", "no JSON object"),
        ("babbles", "a line of more than"),
        ("a wrong byte", r"wrong bytes: get \(batch\) differs at byte 12345"),
        ("nothing back", r"wrong bytes: get \(batch\) differs at byte [0-9] "),
        ("wrong later", r"wrong bytes: get \(batch\) differs at byte 7 "),
        ("less than asked", "it moved 4194303 bytes of 4194304"),
        ("no time", "seconds that are none"),
        ("time that is none", "seconds that are none"),
        ("not a number", "seconds that are none"),
        ("an error", "batch_get_into gave -800"),
        ("killed", "it died with signal 9"),
        ("no JSON", "its answer is no JSON"),
    ],
)
def test_a_peer_that_fails_is_named_and_not_in_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(running, "SHARED", str(shared))
    result = SideBySide("store")
    programs = [program_of("plain", tmp_path), fake(tmp_path, fault)]
    running.measure(result, programs, SMALLER, print)
    assert list(result.missing) == ["rival"]
    assert re.search(reason, result.missing["rival"])
    assert {row.peer for row in result.rows} == {"plain"}
    assert not any("rival" in name for name in [*result.metrics, *result.ratios])
    assert result.passed  # its failure is not ours
    assert os.listdir(shared) == []


@pytest.mark.parametrize("fault", ["hangs", "half an answer"])
def test_a_peer_that_hangs_is_ended(tmp_path: Path, fault: str) -> None:
    """It has all the time to start, and little to answer."""
    payload, out = tmp_path / "payload", tmp_path / "out"
    payload.write_bytes(bytes(1 << 16))
    out.write_bytes(bytes(1 << 17))
    given = {"payload": str(payload), "out": str(out), "count": 1, "object_bytes": 1 << 16}
    talk = Conversation(fake(tmp_path, fault), tmp_path / "log", limit_s=60)
    try:
        talk.ask({"op": "open", "objects": given})
        talk.limit_s = 0.5
        with pytest.raises(ContenderError, match=r"no answer in 0\.5 s"):
            talk.seconds({"op": "run", "case": "get", "form": "batch", "wanted": []}, 1 << 16)
    finally:
        talk.stop()
        talk.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(talk._process.pid, 0)


@pytest.mark.timeout(60)
def test_what_a_peer_started_ends_with_it(tmp_path: Path) -> None:
    """Its child holds a lock as long as it lives, like Mooncake's master its ports."""
    talk = Conversation(fake(tmp_path, "has a child"), tmp_path / "log", limit_s=60)
    with (tmp_path / "lock").open("w") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        talk.stop()
        fcntl.flock(file, fcntl.LOCK_EX)


def test_a_peer_that_ended_between_requests_is_told_of(tmp_path: Path) -> None:
    """The next request cannot be written, and what was not written is no error of the end."""
    talk = Conversation(fake(tmp_path, "ends between requests"), tmp_path / "log", limit_s=60)
    try:
        talk.ask({"op": "close"})
        talk._process.wait()
        with pytest.raises(ContenderError, match="it died with exit code 1: out of memory"):
            talk.ask({"op": "close"})
    finally:
        talk.stop()


def test_a_peer_that_never_greets_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match=r"no answer in 0\.5 s"):
        Conversation(fake(tmp_path, "says nothing"), tmp_path / "log", limit_s=0.5)


def test_wrong_bytes_of_ours_fail_the_run(tmp_path: Path) -> None:
    liar = Program("plain", fake(tmp_path, "a wrong byte").command, dict(os.environ))
    result = SideBySide("store")
    running.measure(result, [liar], SMALLER, print)
    assert result.checks == {"plain_right": False}
    assert not result.passed
    assert result.as_dict()["ratios"] == {}


BOUND_KEPT = r"get_64k_objects_no_crc_1t_to_memcpy: [0-9.]+, at least 0 wanted: kept"


def test_the_command_names_who_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lmcache.failed").write_text("ERROR: No matching distribution found\n")
    options = Options(json=tmp_path / "r.json")
    command = partial(store.command, environments=tmp_path, size=STORE_SMALLER)
    result = perform("store", command, options)
    assert isinstance(result, SideBySide)
    shown = capsys.readouterr().out
    assert set(result.missing) == set(store.PEERS)
    assert "missing: lmcache: not installed: ERROR: No matching distribution found" in shown
    assert re.search("missing: mooncake: no environment in .*: make build/peers/mooncake", shown)
    assert re.search(BOUND_KEPT, shown)
    written = read_result(tmp_path / "r.json")
    assert len(written.metrics) == len(result.rows)
    assert all(f"missing: {who}: {why}" in written.notes for who, why in result.missing.items())


def test_the_store_door_beside_memcpy_and_a_store(tmp_path: Path) -> None:
    result = SideBySide("store")
    mine = [program_of(name, tmp_path) for name in ("objects", "ours", "plain")]
    store.run(result, [*mine, fake(tmp_path, "nothing", "mooncake")], STORE)
    assert result.missing == {}
    assert result.checks == {"objects_right": True, "ours_right": True, "plain_right": True}
    assert result.versions["mooncake"] == "9"
    found = {(row.case, row.peer, row.form) for row in result.rows}
    for form in ("crc", "no_crc"):
        assert {(case, "objects", form) for case in STORE.cases} <= found
    for form in ("pages", "pages_no_crc", "memory_no_crc"):
        assert {(case, "ours", form) for case in ("put", "get", "ranges")} <= found
    assert {("put", "ours", "records"), ("get", "ours", "records")} <= found
    speed = STORE.total_bytes / 0.5 / 1e9
    rival = result.metrics["get_64k_mooncake_batch_1t"].samples
    assert rival == [speed] * STORE.rounds  # the warming round is left out
    for row in result.rows:
        assert len(row.samples) == (1 if row.case == "first" else STORE.rounds), row
        assert row.unit == ("us/object" if row.case == "lease" else "GB/s")
    metrics, name = result.metrics, "get_64k_objects_crc_2t"
    ratio = metrics[name].median / metrics["get_64k_mooncake_batch_2t"].median
    assert result.ratios[f"{name}_to_mooncake"] == ratio
    assert "ranges_128k_objects_no_crc_1t_to_memcpy" in result.ratios
    assert not any("lease" in name or "dax" in name for name in result.ratios)
    kept = [note for note in result.notes if "at least 0 wanted: kept" in note]
    missed = [note for note in result.notes if "at least 1e+09 wanted: NOT kept" in note]
    assert len(kept) == len(missed) == len(result.notes) // 2 == 8  # 2 cases, sizes and threads
    assert all("_objects_no_crc_" in note for note in result.notes)
    result.write(tmp_path / "store.json")
    written = read_result(tmp_path / "store.json")
    assert len(written.metrics) == len(result.rows)
    assert "mooncake 9" in written.notes[0]


def test_the_first_put_is_read_back_before_another_one() -> None:
    cases = ("first", "put", "get")
    assert running.cases_of(0, cases) == ["first", "get", "put", "get"]
    assert running.cases_of(1, cases) == running.cases_of(0, cases[1:]) == ["put", "get"]


def wheel(path: Path) -> None:
    """A package of nothing, that pip installs without a network."""
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in about.items():
            archive.writestr(f"rival-1.0.dist-info/{name}", text)


@pytest.mark.nightly
def test_what_pip_says_is_kept_and_an_environment_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    folder = tmp_path / "build/peers"

    def make(package: str) -> str:
        words = ["make", "-s", "-C", str(tmp_path), "-f", str(MAKEFILE), "build/peers/rival"]
        words += [f"PYTHON={sys.executable}", f"PEER_rival={package}"]
        words += [f"PEERS_PIP=--no-index --find-links {tmp_path}"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    assert "no-such-package-here" in make("no-such-package-here")
    with pytest.raises(ContenderError, match=r"(?s)not installed: .*no-such-package-here"):
        program_of("rival", folder)
    wheel(tmp_path / "rival-1.0-py3-none-any.whl")
    assert make("rival==1.0") == "rival: rival==1.0 ...\n"
    assert program_of("rival", folder).command[0] == str(folder / "rival/bin/python")
    assert make("rival==1.0") == "", "made once"


def test_every_peer_with_packages_has_a_module_and_a_place_in_the_run() -> None:
    found = re.findall(r"^PEER_(\w+) :=", MAKEFILE.read_text(), re.M)
    assert tuple(found) == (*store.PEERS, llama.PEER, cache_steps.PEER)
    folder = Path(serving.__file__).parent
    for name in (*store.NAMES, llama.PEER, cache_steps.PEER):
        assert (folder / f"{name}.py").is_file()


def test_too_little_shared_memory_is_said_first() -> None:
    size = Size(total_bytes=1 << 50)
    with pytest.raises(MemoryError, match=r"the peers side by side need .*: enlarge it"):
        running.measure(SideBySide("store"), [], size, print)
