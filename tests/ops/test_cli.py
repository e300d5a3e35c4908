"""The command line, as a person at a terminal meets it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import CXLKVError
from cxlkv.layout import ENCODINGS, format_bytes
from cxlkv.machine import topology
from cxlkv.ops import cli, info
from cxlkv.ops.pool import share_text
from cxlkv.stats import find

from ..support.command import run

runner = CliRunner()

CREATE = (
    *("pool", "create"),
    *("--layout", "{layers: 2, kv_heads: 2, head_dim: 64}"),
    *("--capacity", "8MiB"),
)


def test_info_names_the_kernels_in_use() -> None:
    result = runner.invoke(cli.app, ["info"])
    assert result.exit_code == 0
    assert "kernels in use" in result.output
    assert _core.isa() in result.output


def test_info_keeps_each_command_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "sudo sysctl vm.nr_hugepages=1024" + " # long" * 40
    advice = [topology.Advice("no huge pages", "scans are slower", command)]
    monkeypatch.setattr(info, "missing", lambda machine: advice)
    assert command in runner.invoke(cli.app, ["info"]).output


def test_info_as_json_is_json_and_nothing_else() -> None:
    result = runner.invoke(cli.app, ["info", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["kernels"] == _core.isa()
    assert report["cpu"]["cores_allowed"]
    assert isinstance(report["missing"], list)


def test_no_command_shows_the_help() -> None:
    result = runner.invoke(cli.app, [])
    for command in ("info", "demo", "pool", "bench"):
        assert command in result.output


def test_a_known_failure_is_one_line_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(root: Path) -> None:
        raise CXLKVError("the pool [red] is full: free pages, or make it larger")

    monkeypatch.setattr(info, "probe", probe)
    code, out, err = run(capsys, "info")
    assert (code, out) == (1, "")
    assert err == "error: the pool [red] is full: free pages, or make it larger\n"


def test_a_path_that_is_absent_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in ("inspect", "check"):
        code, _, err = run(capsys, "pool", command, str(tmp_path / "absent"))
        assert code == 1
        assert err.startswith("error: ")
        assert "absent" in err
        assert err.count("\n") == 1


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "pool.cxlkv"
    code, _, err = run(capsys, *CREATE[:-1], "2G", str(path))
    assert code == 1
    assert err.startswith("error: '2G' is not a size")
    assert not path.exists()


def test_a_pool_is_made_looked_at_checked_and_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "pool.cxlkv"
    code, out, err = run(capsys, *CREATE, str(path))
    assert (code, err) == (0, "")
    assert out
    assert path.exists()

    code, out, _ = run(capsys, "pool", "inspect", "--json", str(path))
    assert code == 0
    found = json.loads(out)
    assert found["layout"]["groups"][0]["layers"] == 2
    assert found["stats"]["pages_free"] == found["geometry"]["page_count"]
    code, out, _ = run(capsys, "pool", "inspect", str(path))
    assert code == 0
    assert "kv_heads" in out

    code, out, _ = run(capsys, "pool", "check", "--deep", str(path))
    assert (code, out) == (0, "clean\n")

    size = path.stat().st_size
    ended = run(capsys, "pool", "remove", "--yes", str(path))
    freed = f"{path}: removed, {format_bytes(size)} are free again\n"
    assert ended == (0, freed, "")
    assert not path.exists()


@pytest.mark.parametrize("encoding", ["int8,int4", "fp8_e4m3"])
def test_an_encoded_pool_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, encoding: str
) -> None:
    keys, values = encoding.split(",")[0], encoding.split(",")[-1]
    path = str(tmp_path / "encoded.pool")
    ended = run(capsys, *CREATE, path, "--encoding", encoding)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.rstrip().endswith(f"pages, {encoding}")
    found = json.loads(run(capsys, "pool", "inspect", "--json", path).out)["layout"]
    assert found["encoding"] == encoding
    group = found["groups"][0]
    assert (group["k_encoding"], group["v_encoding"]) == (keys, values)
    told = run(capsys, "pool", "inspect", path).out
    assert f"k_encoding      {keys}" in told
    assert f"v_encoding      {values}" in told
    (listed,) = json.loads(run(capsys, "pool", "list", "--json", path).out)["pools"]
    assert listed["encoding"] == encoding
    assert encoding in run(capsys, "pool", "list", path).out
    assert encoding in run(capsys, "pool", "top", "--once", path).out
    made = ("pool", "create", str(tmp_path / "o.pool"), "--capacity", "8MiB")
    error = run(capsys, *made, "--layout", "{object_bytes: 64KiB}", "--encoding", "int8").err
    assert "a pool of objects keeps them as they come" in error


def test_what_may_be_asked_for_is_named() -> None:
    for path, command in leaves(get_command(cli.app)):
        for option in command.params:
            told = getattr(option, "help", None) or ""
            if option.name == "encoding":
                assert [name for name in ENCODINGS[1:] if name not in told] == [], path


def test_a_pool_of_objects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "blocks.pool")
    made = ("pool", "create", path, "--capacity", "8MiB", "--layout", "{object_bytes: 64KiB}")
    for wrong, why in (
        ((*made, "--model", "smollm2"), "--model smollm2 --capacity 1GiB; or --layout, one of"),
        (made[:5], "--model smollm2 --capacity 1GiB; or --layout, one of"),
        ((*made[:6], "{layers: 2}"), "--layout: layout.kv_heads is missing"),
    ):
        code, _, error = run(capsys, *wrong)
        assert (code, why in error) == (1, True)
    assert run(capsys, *made)[0] == 0
    code, out, _ = run(capsys, "pool", "inspect", "--json", path)
    assert code == 0
    assert json.loads(out)["layout"]["object_bytes"] == 64 << 10
    code, out, _ = run(capsys, "pool", "inspect", path)
    assert code == 0
    assert "objects, one to a page" in out
    for word in ("kv_heads", "sketch", "layer group"):
        assert word not in out
    assert run(capsys, "pool", "check", path)[0] == 0
    assert run(capsys, "pool", "remove", "--yes", path)[0] == 0


@pytest.mark.parametrize("place", ["numa:0", "anonymous:"])
def test_memory_without_a_name_is_not_made_to_end_at_once(
    capsys: pytest.CaptureFixture[str], place: str
) -> None:
    code, _, err = run(capsys, *CREATE, place)
    assert code == 1
    assert "ends with this command" in err
    assert "/dev/shm/my.pool" in err


def test_a_pool_is_not_removed_without_a_yes(tmp_path: Path) -> None:
    path = tmp_path / "pool.cxlkv"
    assert runner.invoke(cli.app, [*CREATE, str(path)]).exit_code == 0
    result = runner.invoke(cli.app, ["pool", "remove", str(path)], input="n\n")
    assert result.exit_code == 1
    assert path.exists()


def test_what_cannot_be_removed_is_not_asked_about(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nothing is read from stdin: a question would end as "Nothing was done."."""
    notes, used = tmp_path / "notes.txt", tmp_path / "used.pool"
    notes.write_text("dear diary")
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=16, dtype="float32")
    with CXLPool.create(used, layout=layout, capacity="3MiB", threads=1):
        for path, said in (
            (tmp_path / "absent", "absent"),
            (notes, "not a cxlkv pool"),
            (used, f"in use by {os.getpid()}"),
        ):
            code, out, err = run(capsys, "pool", "remove", path)
            assert (code, out) == (1, "")
            assert err.startswith("error: ")
            assert said in err
    assert used.exists()


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 9, "0 %"), (1, 1000, "<1 %"), (999, 1000, "99 %"), (9, 9, "100 %"), (0, 0, "")],
)
def test_a_share_is_nothing_or_all_only_where_it_is(part: int, whole: int, text: str) -> None:
    assert share_text(part, whole) == text


def test_a_pool_smaller_than_its_capacity_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = run(capsys, *CREATE, tmp_path / "a.pool")
    assert " of 8 MiB (whole extents), for " in made.out


def test_a_file_that_is_no_pool_is_left_alone_and_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    for command in (
        CREATE,
        ("pool", "inspect"),
        ("pool", "check"),
        ("pool", "remove", "--yes"),
    ):
        code, _, err = run(capsys, *command, str(path))
        assert code == 1
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert path.read_text() == "dear diary"


# ---- the tree of commands ----


def leaves(
    command: object, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from leaves(each, (*path, name))
    else:
        assert isinstance(command, TyperCommand)
        yield path, command


# They print no figures: they serve until they are stopped, ask, or write files that are named.
NO_JSON = {("serve",), ("metrics",), ("ndp-worker",), ("bench", "report"), ("lab",)}
NO_JSON |= {("pool", name) for name in ("remove", "fence", "upgrade")}


def test_what_prints_figures_has_them_as_json() -> None:
    lack = {
        path
        for path, command in leaves(get_command(cli.app))
        if not any("--json" in each.opts for each in command.params)
    }
    assert lack == NO_JSON


def test_every_command_has_a_place_in_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, "--help").out
    places = [out.index(f"─ {panel} ─") for panel in (cli.START, cli.RUN, cli.MEASURE, cli.SERVE)]
    assert places == sorted(places)
    assert "─ Commands ─" not in out
    assert set(cli.ORDER) == {path[0] for path, _ in leaves(get_command(cli.app))}
    assert "--install-completion" in out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"cxlkv {version('cxlkv')}\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pool", "lst"), "Did you mean 'list'?"),
        (("nfo",), "Did you mean 'info'?"),
        (("pool", "create", "/x", "--capcity", "1GiB"), "--capacity"),
        (("serve", "/x", "--port", "7777"), "--listen HOST:PORT"),
        (("size",), "For example: cxlkv size smollm2 --tokens 32K"),
        (("size", "/" + "long-" * 40, "--requests", "0"), "--requests"),
    ],
)
def test_a_line_that_does_not_parse_says_what_was_meant(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_a_case_that_is_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(capsys, "bench", "memry")
    assert (ended.code, "did you mean memory?" in ended.err) == (1, True)


def test_the_shell_completes() -> None:
    words = {"_CXLKV_COMPLETE": "complete_bash", "COMP_WORDS": "cxlkv pool i", "COMP_CWORD": "2"}
    program = "from cxlkv.ops.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **words},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["inspect"]


# ---- what is printed at 80 columns ----


def test_paths_stay_in_one_piece(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / ("long-" * 12) / ("longer-" * 12)
    folder.mkdir(parents=True)
    path = str(folder / "my.pool")
    places = {
        CREATE: path,
        ("pool", "inspect"): path,
        ("pool", "list"): str(folder),
        ("pool", "top", "--once", "--interval-s", "0.01"): str(folder),
    }
    for words, place in places.items():
        assert f"{path}" in run(capsys, *words, place).out
    assert path in run(capsys, *CREATE, path).err  # it is there
    assert run(capsys, "pool", "remove", "--yes", path).code == 0
    assert path in run(capsys, "pool", "inspect", path).err


def test_nothing_found_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (("list",), ("top", "--once", "--interval-s", "0.01")):
        said = run(capsys, "pool", *words, tmp_path).out
        assert "cxlkv pool create /dev/shm/my.pool --model smollm2 --capacity 1GiB" in said


def test_a_pool_that_nobody_has_used_has_no_rows_of_zeros(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "my.pool")
    assert run(capsys, *CREATE, path).code == 0
    said = run(capsys, "pool", "top", "--once", "--interval-s", "0.01", path).out
    assert "not used yet" in said
    assert "0 B" not in said


def test_top_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "my.pool")
    assert run(capsys, *CREATE, path).code == 0
    absent = str(tmp_path / "absent")
    words = ("pool", "top", "--json", "--interval-s", "0.01", path, absent)
    with CXLPool.open(path):
        told = json.loads(run(capsys, *words).out)
    assert told["missing"] == [absent]
    (pool,) = told["pools"]
    assert pool["state"] == "live"
    (process,) = pool["processes"]
    assert process["pid"] == os.getpid()
    assert "python" in process["command"]
    assert process["appended_bytes_per_s"] == 0


def test_gc_as_json_asks_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "my.pool")
    assert run(capsys, *CREATE, path).code == 0
    words = ("pool", "gc", "--json", "--idle-s", "0")
    for last, collected in (((), False), (("--yes",), True)):
        (found,) = json.loads(run(capsys, *words, *last, tmp_path).out)["found"]
        assert (found["path"], found["collected"]) == (path, collected)
    assert not Path(path).exists()


def test_long_steps_are_told_without_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "my.pool")
    assert run(capsys, *CREATE, path, "--huge", "never").err == "touching all of 8MiB ...\n"
    code, out, err = run(capsys, "pool", "check", "--deep", "--json", path)
    assert (code, json.loads(out)["clean"]) == (0, True)
    assert err.startswith("reading ")
    assert err.endswith(" pages ...\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_pools_of_another_user_are_told_of() -> None:
    """A user who may not read them does not hear that there are none."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        os.chmod(folder, 0o755)
        path = f"{folder}/theirs.pool"
        Path(path).touch(mode=0o600)
        Path(f"{folder}/notes.txt").touch(mode=0o600)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(12345)
                (found,) = find([folder])
                assert (found.path, found.state) == (path, "closed")
                assert "sudo -u 'root' cxlkv pool list" in found.detail
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_an_address_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(
            capsys, "metrics", "--listen", f"127.0.0.1:{port}", "/dev/shm/absent.pool"
        )
    assert (code, out) == (1, "")
    assert err.startswith(f"error: 127.0.0.1:{port}: Address already in use: another program")
    assert f"give another --listen 127.0.0.1:{port + 1}" in err
