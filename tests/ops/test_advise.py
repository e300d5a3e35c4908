"""`cxlkv advise`, as a person at a terminal meets it; figures of the machine are put in by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxlkv import CXLPool, KVLayout
from cxlkv.bench.calibrate import links, rates
from cxlkv.bench.result import Result
from cxlkv.errors import UnsupportedError
from cxlkv.machine.costs import Costs, Tier
from cxlkv.ndp import tuning
from cxlkv.ops import advise as advise_module
from cxlkv.ops import cli

from ..support.command import run

# 10 layers of 50 channels of 2 bytes: 1000 bytes a token.
MODEL = ("--layout", "{layers: 10, kv_heads: 1, head_dim: 25, page_tokens: 10}")
KEPT = Costs(
    local=Tier(bytes_per_s=1e9, where="memory of this process"),
    far=Tier(bytes_per_s=1e8, latency_s=1e-3, write_bytes_per_s=5e7, where="/dev/dax0.0"),
    cold=Tier(bytes_per_s=1e7, latency_s=1e-3, write_bytes_per_s=1e7, where="/cold, O_DIRECT"),
    score_bytes_per_s=1e8,
    attend_bytes_per_s=1e8,
    step_latency_s=1e-4,
    engine_score_bytes_per_s=1e9,
    engine_attend_bytes_per_s=1e9,
    engine_step_latency_s=1e-5,
)
SPEED = ("--prefill-tokens-per-s", "10000")


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(advise_module, "DISK", tmp_path)
    monkeypatch.setattr(links, "DEVICE_FILE", tmp_path / "no GPU")
    monkeypatch.setattr(rates, "SIZE", rates.Size(1 << 20, 1 << 20, 256 << 10, rounds=1))
    tuning.current.cache_clear()
    yield
    tuning.current.cache_clear()


@pytest.fixture
def tuned() -> None:
    tuning.write(tuning.Tuning(machine=tuning.this_machine(), costs=KEPT), tuning.default_path())


def advise(*arguments: str) -> str:
    done = CliRunner().invoke(cli.app, ["advise", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr, as the command installed prints it."""
    ended = run(capsys, "advise", *arguments)
    assert (ended.code, ended.err[:7], ended.err.count("\n")) == (1, "error: ", 1)
    return ended.err


def cells(output: str, *first: str) -> list[str]:
    """The row of a table that begins with these cells."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    (found,) = [row for row in rows if row[: len(first)] == list(first)]
    return found


@pytest.mark.usefixtures("tuned")
def test_each_tier_says_whether_it_pays_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise_module, "DECODE_TOKENS", 50)
    output = advise(*MODEL, *SPEED, "--tokens", "50", "--tokens", "1000")
    # 50 steps of 10 calls of 0.1 ms, 25 kB of keys and 0.15 of 50 kB of keys and values; where the
    # engine has the prefix itself they take a tenth of it, behind fetch and recompute alike.
    row = ["50", "far", "17.1 ms", "66.2 ms", "11.6 ms", "recompute"]
    assert cells(output, "50", "far") == row
    row = ["1,000", "far", "57.5 ms", "375 ms", "138 ms", "fetch"]
    assert cells(output, "1,000", "far") == row
    assert "A prefix, then 50 tokens decoded with 15 % of pages" in output
    assert cells(output, "far")[1:] == ["0.1 GB/s", "1 ms", "0.05 GB/s", "/dev/dax0.0"]
    lines = output.splitlines()
    assert (
        "the far tier does not pay here because a hit of 50 tokens takes 10.5 ms to read and 5 ms "
        "to recompute; it pays from 120 tokens on"
    ) in lines
    assert (
        "the far tier pays here: a hit of 1,000 tokens takes 20 ms to read and 100 ms to "
        "recompute; it pays from 120 tokens on; writing to it pays when at least 25 % of what is "
        "written is read back"
    ) in lines
    assert (
        "the cold tier does not pay here because a hit of 1,000 tokens takes 220 ms to read and "
        "100 ms to recompute; it pays at no length up to 16,777,216 tokens"
    ) in lines
    assert sum(line.startswith("the ") for line in lines) == 4  # near pays at both lengths
    assert lines[-1] == (
        "advice: keep prefixes of 120 tokens and more in a pool and fetch them: 1,000 tokens take "
        "57.5 ms instead of 138 ms to compute again, decoding included; no file below it"
    )


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("1000 DECODE 1 --share 0.1", "a pool and attend to 10 % of their pages where"),
        ("50", "leave the pool off: 50 tokens take 22 ms to compute again and 27.5 ms to"),
        ("1000 --prefill-tokens-per-s 1000@0", "a file below it from 20 tokens on"),
    ],
)
def test_the_last_line_is_the_advice(
    arguments: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if " DECODE 1" in arguments:
        monkeypatch.setattr(advise_module, "DECODE_TOKENS", 1)
    words = arguments.replace(" DECODE 1", "").split()
    speed = () if "--prefill-tokens-per-s" in words else SPEED
    last = advise(*MODEL, *speed, "--tokens", *words).splitlines()[-1]
    assert last.startswith("advice: ")
    assert advice in last


@pytest.mark.usefixtures("tuned")
def test_a_gpu_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By copies within this host's memory here, in its place."""
    with pytest.raises(UnsupportedError, match="no NVIDIA GPU"):
        links.run(Result("advise"))
    found = links.run(Result("advise"), "cpu", 1 << 20)
    assert found.link_bytes_per_s > 0
    monkeypatch.setattr(links, "run", lambda _: links.Gpu("a GPU", 5e7, 1e12))
    output = advise(*MODEL, *SPEED, "--tokens", "1000")
    assert "link: 0.05 GB/s, measured by copies from pinned memory to a GPU; a GPU de" in output
    assert cells(output, "1,000", "far")[2] == "30.1 ms"


@pytest.mark.usefixtures("tuned")
def test_without_a_speed_the_break_even_speed() -> None:
    output = advise(*MODEL, "--tokens", "1000")
    assert cells(output, "1,000", "far")[-1] == "50,000"
    assert (
        "the far tier pays when your engine prefills 1,000 tokens more slowly than at 50,000 "
        "tokens/s: a hit of them takes 20 ms to read"
    ) in output.splitlines()
    assert "no prefill speed was given" in output
    assert "recompute;" not in output
    assert output.splitlines()[-1] == (
        "advice: use a pool if your engine prefills 1,000 tokens more slowly than at 50,000 "
        "tokens/s; measure it, and give --prefill-tokens-per-s"
    )


@pytest.mark.usefixtures("tuned")
def test_what_must_be_read_back_more_than_once() -> None:
    # A hit saves 250 - 220 ms, and took 100 ms to write.
    output = advise(*MODEL, "--prefill-tokens-per-s", "4000", "--tokens", "1000")
    assert "pays when what is written is read back 3.33 times or more" in output


@pytest.mark.usefixtures("tuned")
def test_two_speeds_say_how_much_attention_adds(tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    speeds = ("--prefill-tokens-per-s", "8000@1000", "--prefill-tokens-per-s", "4000@6000")
    output = advise(*MODEL, *speeds, "--json", str(file))
    assert "equally fast" not in output
    found = json.loads(file.read_text())
    # 125 us a token of 1000, 250 us of 6000: 100 us, and 25 us for each 1000.
    assert found["costs"]["prefill"]["tokens_per_s"] == pytest.approx(10_000)
    assert found["costs"]["prefill"]["context_half"] == pytest.approx(2000)


@pytest.mark.usefixtures("tuned")
def test_the_json_has_all_figures(tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    arguments = (*MODEL, "--tokens", "1000", "--json", str(file))
    assert f"written: {file}" in advise(*arguments, *SPEED)
    found = json.loads(file.read_text())
    assert found["costs"]["far"]["where"] == "/dev/dax0.0"
    assert found["costs"]["prefill"] == {"tokens_per_s": 10_000, "context_half": None}
    assert found["layout"]["page_tokens"] == 10
    assert "cpu" in found["machine"]
    far = found["rows"][1]
    assert (far["tier"], far["tokens"], far["pays"], far["pays_from"]) == ("far", 1000, True, 120)
    assert (far["choice"], far["reason"][:6]) == ("fetch", "fetch:")
    assert far["read_s"] == pytest.approx(0.02)
    assert far["attend_s"] == pytest.approx(128 * 0.0075)
    assert far["decode_s"] == pytest.approx(128 * 0.00075)
    assert found["advice"].startswith("keep prefixes of 120 tokens")
    assert far["reads_per_write"] == pytest.approx(0.25)

    advise(*arguments)
    far = json.loads(file.read_text())["rows"][1]
    assert far["prefill_tokens_per_s"] == pytest.approx(50_000)
    for unknown in ("choice", "reason", "pays", "pays_from", "recompute_s"):
        assert far[unknown] is None


def test_an_untuned_machine_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    output = advise(*MODEL, "--cold", str(tmp_path), "--json", str(file))
    assert "far was measured in this process's own memory" in output
    found = json.loads(file.read_text())
    assert [row["tier"] for row in found["rows"][:3]] == ["local", "far", "cold"]
    assert found["costs"]["cold"]["where"].startswith(str(tmp_path))
    assert not tuning.default_path().exists()  # only `cxlkv tune` keeps what it finds


def test_a_busy_machine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (77.0, 77.0, 77.0))
    said = "load average 77.0 on "
    assert f"note: {said}" in advise(*MODEL, "--cold", str(tmp_path))
    tuned = CliRunner().invoke(cli.app, ["tune"])
    assert f"warning: {said}" in tuned.stdout
    tuning.write(tuning.Tuning(machine=tuning.this_machine(), costs=KEPT), tuning.default_path())
    tuning.current.cache_clear()
    assert said not in advise(*MODEL)  # nothing is measured now


def test_a_pool_gives_its_layout_and_its_memory(tmp_path: Path) -> None:
    path, file = tmp_path / "my.pool", tmp_path / "advice.json"
    layout = KVLayout(layers=2, kv_heads=2, head_dim=32)
    CXLPool.create(path, layout=layout, capacity="8MiB").close()
    config = tmp_path / "pool.yaml"
    shape = "{layers: 2, kv_heads: 2, head_dim: 32}"
    config.write_text(f"where: {path}\ncapacity: 8MiB\nlayout: {shape}\n")
    for arguments in (("--pool", str(path)), ("--layout", str(config))):
        output = advise(*arguments, "--json", str(file))
        assert "own memory" not in output
        found = json.loads(file.read_text())
        assert found["costs"]["far"]["where"] == str(path)
        assert found["layout"]["groups"][0]["layers"] == 2
    with CXLPool.open(path) as pool:
        assert pool.stats()["pages_free"] == pool.stats()["pages_total"]


@pytest.mark.usefixtures("tuned")
def test_encoded_keys_and_values_are_fewer_bytes(tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    output = advise(*MODEL, "--encoding", "int8,int4", "--tokens", "1000", "--json", str(file))
    assert "K and V are kept as int8,int4: 520 of 1,000 bytes a token" in output
    found = json.loads(file.read_text())
    (far,) = [row for row in found["rows"] if row["tier"] == "far"]
    assert far["read_s"] == pytest.approx(0.01 + 520_000 / 1e8)
    assert found["layout"]["groups"][0]["k_encoding"] == "int8"


def test_a_pool_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    config = tmp_path / "pool.yaml"
    shape = "{layers: 2, kv_heads: 2, head_dim: 32}"
    path = tmp_path / "later.pool"
    config.write_text(f"where: {path}\ncapacity: 8MiB\nlayout: {shape}\n")
    assert "own memory" in advise("--layout", str(config))
    assert not path.exists()


def test_a_configuration_of_another_pool(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, config = tmp_path / "my.pool", tmp_path / "pool.yaml"
    other = KVLayout(layers=1, kv_heads=2, head_dim=32)
    CXLPool.create(path, layout=other, capacity="8MiB").close()
    shape = "{layers: 2, kv_heads: 2, head_dim: 32}"
    config.write_text(f"where: {path}\ncapacity: 8MiB\nlayout: {shape}\n")
    wrong = refused(capsys, "--layout", str(config))
    assert "describes: layout.layers is 1 there, 2 wanted" in wrong
    with CXLPool.open(path) as pool:
        assert pool.layout == other


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("", "give one of --pool and --layout"),
        ("--pool absent.pool", "absent.pool"),
        ("--pool absent.pool MODEL", "give one of"),
        ("--layout {layers:", "--layout, line 1: no YAML"),
        ("MODEL --encoding int2", "encoding 'int2': one of"),
        ("--pool absent.pool --encoding int8", "--encoding: --pool says that"),
        ("MODEL --prefill-tokens-per-s fast", "fast: a speed is wanted"),
        ("MODEL --prefill-tokens-per-s 9000@", "9000@: a speed is wanted"),
        ("MODEL --prefill-tokens-per-s 0", "tokens_per_s is 0.0: a number above 0"),
        ("MODEL --prefill-tokens-per-s nan", "tokens_per_s is nan"),
        ("MODEL --prefill-tokens-per-s 9@1 --prefill-tokens-per-s 9@1", "different lengths"),
        ("MODEL --share 0", "'0' is not a --share of the pages: write it like 0.05 or 5%"),
        ("MODEL --cold absent/cold", "its folder does not exist"),
        ("MODEL --json absent/advice.json", "its folder does not exist"),
        (f"MODEL --tokens {2**64}", "tokens is 18446744073709551616: whole numbers"),
    ],
)
def test_what_cannot_be_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [w for word in arguments.split() for w in (MODEL if word == "MODEL" else [word])]
    assert why in refused(capsys, *words)
    assert list(tmp_path.glob("*.json")) == []
