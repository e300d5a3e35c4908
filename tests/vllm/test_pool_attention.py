"""vLLM with attention in the pool: the tokens of stock vLLM, by any way that a request can go."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import pytest

from ..support.processes import ROOT

RUNS = [sys.executable, "-m", "tests.vllm.pool_attention_runs"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: `make test-vllm` has an environment of its own",
)


class Seen(TypedDict, total=False):
    """What a run prints."""

    equal: bool | list[bool]
    cached: list[list[int]]
    failures: dict[str, int]
    clean: bool
    held: int
    preemptions: int
    blocks: int
    used: list[int]
    audits: int
    recall: float
    mass: float
    drafts: list[int]
    told: dict[str, str]
    kept: dict[str, str]
    steps: int


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([*RUNS, "models", folder], check=True, cwd=ROOT)
    return folder


@pytest.fixture
def run(
    models: Path, pools_folder: Path, record_property: Callable[[str, object], None]
) -> Callable[[str], Seen]:
    for model in models.iterdir():
        (pools_folder / model.name).symlink_to(model)

    def start(name: str) -> Seen:
        with (pools_folder / f"{name}.log").open("w+") as log:
            done = subprocess.run(
                [*RUNS, name, pools_folder],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=300,
            )
            log.seek(0)
            assert done.returncode == 0, log.read()[-3000:]
        seen: Seen = json.loads(done.stdout)
        record_property("show", f"attention in the pool, {name}: {seen}")
        assert "told" in seen or seen["clean"], "the pool is not whole when the run has ended"
        return seen

    return start


@pytest.mark.parametrize(
    "name",
    [
        *("same", "windows", "encoded", "fp8"),
        *("gpu", "gpu_windows", "gpu_index", "gpu_encoded"),
    ],
)
def test_the_tokens_are_those_of_stock_vllm(name: str, run: Callable[[str], Seen]) -> None:
    """Chunked prefill, several requests, hits. windows: other layers see 64 tokens, capped. gpu:
    the backend and steps of GPU engines, with tensors of the host in the place of a GPU's; the host
    chooses their pages, or an index. encoded: those of hits, and of each request alone, are the
    first ones."""
    seen = run(name)
    assert seen["equal"] == [True, True]
    assert seen["cached"] == [[0, 0, 0, 0], [288, 32, 672, 0]]
    assert "gpu" not in name or seen["steps"] > 30
    kept = {"encoded": "int8,int4", "gpu_encoded": "int8,int4", "fp8": "fp8_e4m3"}
    assert seen.get("kept", {}).get("encoding") == kept.get(name)
    assert not seen["failures"]


def test_a_pool_in_fp8_has_the_bytes_of_vllm(run: Callable[[str], Seen]) -> None:
    assert run("fp8_bytes")["equal"] == [True, True, True]


def test_custom_is_ours_on_cuda_where_attention_is_in_the_pool(run: Callable[[str], Seen]) -> None:
    told = run("chosen_on_cuda")["told"]
    assert told["pool"] == "cxlkv.adapters.vllm.attention_backend.GpuPoolBackend"
    assert "leave out --attention-backend" in told["engine"]


@pytest.mark.parametrize("name", ["preempted", "gpu_preempted"])
def test_requests_that_were_preempted_go_on(name: str, run: Callable[[str], Seen]) -> None:
    seen = run(name)
    assert seen["equal"]
    assert seen["preemptions"] > 0
    assert not seen["failures"]


@pytest.mark.parametrize("name", ["space", "gpu_space"])
def test_the_pool_holds_what_the_engine_could_not(name: str, run: Callable[[str], Seen]) -> None:
    seen = run(name)
    assert seen["equal"] == [True, True]
    assert seen["blocks"] == 8
    assert seen["used"] == [1, 4]


@pytest.mark.parametrize("name", ["budgets", "gpu_budgets"])
def test_budgets_choose_pages(name: str, run: Callable[[str], Seen]) -> None:
    seen = run(name)
    assert seen["equal"] == [True, True]
    assert seen["audits"] > 0
    assert 0.9 < seen["recall"] <= 1
    assert 0 < seen["mass"] <= 1
    assert not seen["failures"]


@pytest.mark.parametrize("name", ["speculated", "gpu_speculated"])
def test_speculated_tokens_are_attended_and_cut_off(name: str, run: Callable[[str], Seen]) -> None:
    seen = run(name)
    assert seen["equal"] == [True, True]
    drafted, accepted = seen["drafts"]
    assert 0 < accepted < drafted
    assert not seen["failures"]


@pytest.mark.parametrize("name", ["damaged", "gpu_damaged"])
def test_a_damaged_page_is_computed_again_and_counted(
    name: str, run: Callable[[str], Seen]
) -> None:
    run("stored")
    seen = run(name)
    assert seen["equal"] == [True, True]
    assert seen["cached"] == [[288, 192], [288, 192]]
    assert seen["failures"] == {"corrupt": 1}


def test_what_cannot_be_served_is_refused_by_name(run: Callable[[str], Seen]) -> None:
    told = run("refused")["told"]
    assert "Give the pool more capacity" in told["small"]
    assert "attention in the pool has no fp8_e5m2 caches" in told["fp8_e5m2"]
    assert "--kv-cache-dtype fp8_e5m2 is not served" in told["engine"]
    assert '"encoding": "int8" with --kv-cache-dtype fp8' in told["both"]
