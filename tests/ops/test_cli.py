"""The command line, as a person at a terminal meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxlkv import _core
from cxlkv.errors import CXLKVError
from cxlkv.machine import topology
from cxlkv.ops import cli, info

from ..support.command import run

runner = CliRunner()

CREATE = (
    *("pool", "create"),
    *("--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--page-tokens", "16"),
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
    assert err.startswith("error: '2G' is no size")
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

    code, _, _ = run(capsys, "pool", "remove", "--yes", str(path))
    assert code == 0
    assert not path.exists()


def test_a_pool_of_objects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "blocks.pool")
    made = ("pool", "create", path, "--capacity", "8MiB", "--object-bytes", "64KiB")
    code, _, error = run(capsys, *made, "--layers", "2", "--dtype", "f16")
    assert code == 1
    assert "--layers, --dtype: of K and V" in error
    code, _, error = run(capsys, *made[:5], "--layers", "2")
    assert code == 1
    assert "--kv-heads, --head-dim missing: or --model" in error
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
