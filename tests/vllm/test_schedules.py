"""vLLM's schedulers, the asynchronous one too, with requests, aborts and preemptions at random."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from .engines import ENVIRONMENT
from .models_page import PAGE, WITHOUT_KERNELS, table

FULL, WINDOWS = [0, 0], [0, 20, 20]
HAPPENS = ("reset", "loaded tokens", "rows compared", "pages", "served", "aborted")
FLIES = ("aborted in flight", "ended in flight")


# Of models that vLLM's CPU backend does not run: tokens of a block, and blocks that preempt.
LAYERS = {
    "Jamba": (16, 36),
    "Kimi-Linear": (128, 64),
    "DeepSeek-V3.2": (64, 36),
    "GLM-5": (128, 36),
}
USUAL: dict[str, object] = {
    **{"requests": 40, "lives": 1, "fails": False, "kinds": [], "settings": {}, "damage": False},
    **{"parts": 1, "device": False, "kills": 0},
}
LAYOUTS = [
    *(("LBHNC", 8, "float32"), ("LBHNC", 4, "bfloat16")),  # heads before tokens
    *(("LBNHC", 8, "bfloat16"), ("LBNHC", 4, "float16")),  # tokens before heads
    *(("LHBNC", 8, "float16"), ("BHLNC", 8, "bfloat16")),
    *(("BLHNC", 8, "bfloat16"), ("BLNHC", 8, "float32")),
]
STATES = ("Jamba", "Kimi-Linear")


class Ask(Protocol):
    def __call__(self, seed: int, **case: object) -> dict[str, int]: ...


@pytest.fixture(scope="module")
def program(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = Program(tmp_path_factory.mktemp("schedules"), "schedules")
    yield made
    made.end()


@pytest.fixture(scope="module")
def layers(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = Program(tmp_path_factory.mktemp("layers"), "layer_schedules")
    yield made
    made.end()


class Program:
    """schedules.py, in a process of its own, since importing vLLM changes this one."""

    def __init__(self, folder: Path, name: str):
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.vllm.{name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

    def ask(self, folder: Path, seed: int, **case: object) -> dict[str, int]:
        """Runs a case; what happened in it, by name."""
        print(f"seed {seed}")
        said = self._ask(**{**USUAL, **case, "folder": str(folder / str(seed)), "seed": seed})
        assert "error" not in said, said["error"]
        counts = said["counts"]
        assert isinstance(counts, dict)
        return counts

    def _ask(self, **case: object) -> dict[str, object]:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(case), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, Path(self.log.name).read_text()[-3000:]
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def end(self) -> None:
        self.process.communicate(timeout=60)
        self.log.close()


@pytest.fixture(scope="module")
def device(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = Program(tmp_path_factory.mktemp("device"), "device_schedules")
    yield made
    made.end()


@pytest.fixture
def ask(program: Program, model: Path, pools_folder: Path) -> Ask:
    def run(seed: int, **case: object) -> dict[str, int]:
        return program.ask(pools_folder, seed, model=str(model), **case)

    return run


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("kinds", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_blocks_pages_and_tokens_are_right(
    ask: Ask, asynchronous: bool, load: str, kinds: list[int], damage: bool, shards: int | None
) -> None:
    """All that a step sees is compared with what it should be, what is in the pools in the end, and
    the tokens: also where pages of one were damaged, whose requests are computed again."""
    # Where a load has failed, vLLM 0.32 may wait for ever for blocks that a request behind holds.
    blocks = (44, 76) if not damage else (160, 400)
    case = {"kinds": kinds, "blocks": blocks[kinds != FULL], "damage": damage}
    found = Counter[str]()
    for seed in range(3):
        settings = {"load": load, "shards": shards}
        found.update(ask(seed, asynchronous=asynchronous, settings=settings, **case))
    assert found["pools"] == 3 * (shards or 1)
    assert found["AsyncScheduler" if asynchronous else "Scheduler"] == 3
    assert found["groups"] == (3 if kinds == FULL else 9)
    wanted = HAPPENS + FLIES * asynchronous + (("damaged",) if damage else ("preempted",))
    assert all(found[name] for name in wanted), found


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("kinds", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize(("layout", "kernel", "dtype"), LAYOUTS)
def test_blocks_of_devices_pages_and_tokens_are_right(
    device: Program,
    model: Path,
    pools_folder: Path,
    layout: str,
    kernel: int,
    dtype: str,
    kinds: list[int],
    damage: bool,
) -> None:
    """In each order that vLLM has for them, and where its kernels have shorter blocks; in a second
    engine, too."""
    blocks = (44, 76) if not damage else (160, 400)
    case = {"kinds": kinds, "blocks": blocks[kinds != FULL], "damage": damage, "lives": 2}
    case |= {"layout": layout, "kernel": kernel, "dtype": dtype, "model": str(model)}
    found = Counter[str]()
    for seed, asynchronous in enumerate((True, False, False)):
        settings: dict[str, object] = {
            "load": "async" if seed == 1 else "sync",
            "shards": 2 - seed % 2,
        }
        how = {"asynchronous": asynchronous, "settings": settings}
        found.update(device.ask(pools_folder, seed, **case, **how))
    assert (found["AsyncScheduler"], found["Scheduler"]) == (2, 4)
    wanted = [*HAPPENS, *FLIES, "loaded in life 1", "damaged" if damage else "preempted"]
    assert all(found[name] for name in wanted), found


@pytest.mark.parametrize("kinds", [FULL, WINDOWS], ids=["full", "windows"])
def test_engines_on_devices_are_killed_while_they_save_and_load(
    device: Program, model: Path, pools_folder: Path, kinds: list[int], seed: int
) -> None:
    """At any moment, two of them: what they have stored is right, and another engine finds it."""
    case = {"kinds": kinds, "blocks": 44 if kinds == FULL else 76, "kills": 2, "model": str(model)}
    case |= {"layout": "LBNHC", "kernel": 4, "dtype": "bfloat16"}
    found = Counter[str]()
    for more, asynchronous in enumerate((True, False)):
        settings = {"load": "async" if more else "sync", "shards": 2 - more}
        how = {"asynchronous": asynchronous, "settings": settings}
        found.update(device.ask(pools_folder, seed + more, **case, **how))
    assert all(found[name] for name in (*HAPPENS, "tokens of the dead", "inherited")), found


def test_layers_are_saved_when_all_parts_of_a_step_have_run(
    device: Program, model: Path, pools_folder: Path
) -> None:
    """vLLM may run requests of a step beside each other, and each part names the layers."""
    case = {"kinds": FULL, "blocks": 44, "layout": "LBHNC", "kernel": 8, "dtype": "float32"}
    found = device.ask(pools_folder, 0, model=str(model), asynchronous=False, parts=2, **case)
    assert found["pages"] > 0


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_layers_without_kernels_have_their_bytes(
    layers: Program, pools_folder: Path, kind: str, asynchronous: bool, damage: bool, device: bool
) -> None:
    """All bytes of a text in each layer, also in a second engine that finds the pool of the first.
    vLLM names layers around attention, or none, as with Kimi-Linear and DeepSeek-V3.2 on GPUs."""
    block, few = LAYERS[kind]
    case = {"model": kind, "block": block, "blocks": 300 if damage else few, "damage": damage}
    case |= {"silent": asynchronous, "requests": 24, "lives": 2, "device": device}
    found = Counter[str]()
    for seed in range(2):
        found.update(layers.ask(pools_folder, seed, asynchronous=asynchronous, **case))
    assert found["AsyncScheduler" if asynchronous else "Scheduler"] == 4
    wanted = [*HAPPENS, "loaded in life 1", "corrupt" if damage else "preempted"]
    wanted += ["states compared"] * (kind in STATES)
    assert all(found[name] for name in wanted), found
    assert not found["wrong steps"]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_that_fails_leaves_nothing(layers: Program, pools_folder: Path, kind: str) -> None:
    """vLLM ends it as any other, and K, V or states of the last layers may not be computed."""
    case = {"model": kind, "block": LAYERS[kind][0], "blocks": 300, "silent": True, "lives": 0}
    assert layers.ask(pools_folder, 0, asynchronous=False, fails=True, **case) == {
        "pages": 0,
        "pools": 1,
    }


@pytest.mark.parametrize("kind", LAYERS)
def test_attention_in_the_pool_refuses_them(layers: Program, pools_folder: Path, kind: str) -> None:
    """As the page says."""
    ((kinds, cause),) = [one for one in WITHOUT_KERNELS.items() if kind in one[0].split(", ")]
    case = {"model": kind, "block": LAYERS[kind][0], "blocks": 300, "asynchronous": False}
    case |= {"silent": False, "settings": {"attention": "pool"}}
    with pytest.raises(AssertionError, match=re.escape(f"cxlkv: {cause}: leave")):
        layers.ask(pools_folder, 0, **case)
    assert f"| {kinds} | bytes equal | refused: {cause} |" in table(PAGE.read_text())
