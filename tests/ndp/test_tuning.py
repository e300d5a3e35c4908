"""`cxlkv tune`: what it finds is used by "auto" and nobody else; what things cost is kept, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.bench.calibrate import copies, rates
from cxlkv.bench.result import Result
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.machine.costs import Costs, Tier
from cxlkv.ndp import tuning
from cxlkv.ndp.tuning import GpuCopyConstants, Tuning
from cxlkv.ops.cli import app


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tuning.current.cache_clear()
    yield
    tuning.current.cache_clear()


def test_without_a_file_the_defaults() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.current() == Tuning()


def test_a_user_without_a_home_has_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert tuning.current() == Tuning()


def test_auto_follows_the_rate_that_was_measured() -> None:
    """Where memory is slow, what reads least is cheapest; where it is fast, what computes least."""
    keys = np.random.default_rng(1).standard_normal((4096, 1, 64)).astype(np.float16)
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64, page_tokens=16, dtype="float16")
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, keys)
        batch, starts = pool.batch([sequence]), np.array([0, 1], np.int32)

        def taken(bytes_per_s: float) -> tuple[str, str]:
            costs = Costs(score_bytes_per_s=bytes_per_s, attend_bytes_per_s=bytes_per_s)
            tuning.write(Tuning(tuning.this_machine(), costs), tuning.default_path())
            tuning.current.cache_clear()
            q, k = keys[:1], keys[:1]
            budget = Budget(share=0.4)
            decoded = batch.decode(0, q, k, k, starts, budget, rewind=len(keys) - 1)
            return decoded.method, batch.select(0, q, starts, budget).method

        assert taken(1e9) == ("two_stage", "two_stage")
        assert taken(1e12) == ("all", "exact")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("{}", "machine"),
        ('{"machine": "another"}', "of another machine"),
        ("[]", "list indices"),
        ('"costs": []', "costs are a table"),
        ('"costs": {"warp": 9}', "'warp'"),
        ('"costs": {"far": 9}', "far is 9"),
        ('"costs": {"far": {"bytes_per_s": NaN, "where": ""}}', "bytes_per_s is nan"),
        ('"costs": {"far": {"where": ""}}', "bytes_per_s"),
        ('"costs": {"prefill": {"tokens_per_s": 9}}', "prefill"),
        ('"gpu": 9', "gpu is no table"),
        ('"gpu": {"kernel_sms": 0}', "kernel_sms is 0"),
        ('"gpu": {"kernel_pieces_from": true}', "kernel_pieces_from is True"),
        ('"gpu": {"kernel_piece_bytes_below": -1}', "kernel_piece_bytes_below is -1"),
        ('"gpu": {"device": 5}', "device is 5"),
        ('"gpu": {"warps": 5}', "warps"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, why: str) -> None:
    """A key alone stands in a file that is right but for it."""
    path = tmp_path / "tuning.json"
    if text.startswith('"'):
        text = f'{{"machine": "", {text}}}'
    path.write_text(text)
    with pytest.warns(UserWarning, match=rf"{why}.*cxlkv tune"):
        assert tuning.read(path) == Tuning()


def test_costs_are_kept() -> None:
    costs = Costs(
        local=Tier(bytes_per_s=2e10),
        far=Tier(bytes_per_s=1e10, latency_s=1e-6, write_bytes_per_s=5e9, where="/dev/dax0.0"),
        score_bytes_per_s=3e10,
        attend_bytes_per_s=2e10,
    )
    kept = Tuning(tuning.this_machine(), costs, GpuCopyConstants(1, 2, 3, "a GPU"))
    tuning.write(kept, tuning.default_path())
    assert tuning.current() == kept


def test_what_was_measured_of_a_gpu_is_kept_beside_all_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rates, "SIZE", rates.Size(1 << 20, 1 << 20, 256 << 10, rounds=1))
    constants = GpuCopyConstants(20000, 8, 10, "NVIDIA H200")

    def measured(result: Result) -> GpuCopyConstants:
        result.checks["measured"] = True
        return constants

    monkeypatch.setattr(copies, "run", measured)
    path = tuning.default_path()
    tuning.write(Tuning(tuning.this_machine()), path)
    done = CliRunner().invoke(app, ["tune", "--gpu"])
    assert done.exit_code == 0, done.output
    assert tuning.read(path) == Tuning(tuning.this_machine(), None, constants)
    done = CliRunner().invoke(app, ["tune"])
    assert done.exit_code == 0, done.output
    assert tuning.read(path).gpu == constants
    assert tuning.read(path).costs is not None
    path.unlink()
    assert CliRunner().invoke(app, ["tune", "--gpu"]).exit_code == 0
    assert tuning.read(path) == Tuning(tuning.this_machine(), None, constants)


def test_a_machine_without_a_gpu_is_told_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = Tuning(tuning.this_machine())
    tuning.write(before, tuning.default_path())
    done = CliRunner().invoke(app, ["tune", "--gpu"])
    assert isinstance(done.exception, UnsupportedError)
    assert "CUDA" in str(done.exception)
    done = CliRunner().invoke(app, ["tune", "--gpu", "--cold", "."])
    assert isinstance(done.exception, BadArgumentError)
    assert tuning.current() == before


def test_a_small_run_of_gpu_tuning_on_the_cpu() -> None:
    result = Result("tune")
    size = copies.Size(32 << 20, (1, 4), (2, 8), (4, 12), rounds=1, repeat=1)
    found = copies.run(result, size, "cpu")
    assert found.device == "cpu"
    assert found.kernel_sms in (4, 12)
    assert found.kernel_piece_bytes_below in (1024, 4096, 8192)
    assert found.kernel_pieces_from in (2, 8, 9)
    assert set(result.metrics) >= {"kernel_4_kib_x8", "dma_1_kib_x2", "kernel_with_12_programs"}


def test_what_the_times_of_copies_say() -> None:
    dma = {(n, s): 10.0 * n + s / 100 for n in (4, 16, 64) for s in (1000, 2000, 4000, 8000)}
    # The kernel has a start of 100, and a lower speed than DMA.
    kernel = {(n, s): 100 + n * s / 400 for n, s in dma}
    assert copies.piece_bytes_below(kernel, dma) == 4000
    assert copies.pieces_from(kernel, dma, 4000) == 16
    assert copies.pieces_from(dict.fromkeys(dma, 1.0), dma, 4000) == 4
    assert copies.piece_bytes_below(dict.fromkeys(dma, 1.0), dma) == 16000
    slow = dict.fromkeys(dma, 1000000.0)
    assert copies.piece_bytes_below(slow, dma) == 1000
    assert copies.pieces_from(slow, dma, 1000) == 65
    assert copies.fewest({4: 20.0, 8: 10.4, 12: 10.0, 16: 9.99}) == 8


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rates, "SIZE", rates.Size(1 << 20, 1 << 20, 256 << 10, rounds=1))
    done = CliRunner().invoke(app, ["tune", "--cold", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "cold_read" in done.output
    kept = tuning.read(tuning.default_path())
    assert kept.machine == tuning.this_machine()
    assert kept.costs is not None
    assert kept.costs.tiers == ("local", "far", "cold")
