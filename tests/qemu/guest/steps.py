"""What the guests' scenarios share: steps that others wait for, the device, known pages."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cxlkv import CXLPool, KVLayout, Sequence

T = TypeVar("T")
Rows = npt.NDArray[np.float16]
SHARED = Path("/shared")
LEASE_S = 60.0  # of a hit
DEVICE = "/dev/dax0.0"
LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=64, page_tokens=16, dtype="float16")
TEXTS = {1: 40 * 16, 2: 7 * 16}  # seeds of texts, and their tokens
HOST_GIVES_UP_S = 400
# On a busy host an emulated clock was seen to run three times too fast; the host's own ends a wait.
WAIT_LIMIT_S = 4 * HOST_GIVES_UP_S
WAIT_STEP_S = 0.02
HANGS_S = HOST_GIVES_UP_S - 30  # without a step


def expect_a_step() -> None:
    """Begins the time anew after which this guest prints where its threads hang, before the host
    gives up. It reads threads that may run meanwhile, which has ended a process: only a
    hanging one may come to that."""
    faulthandler.dump_traceback_later(HANGS_S)


expect_a_step()


class Skip(Exception):
    """A part cannot run here; the text says why."""


_failed: list[str] = []


@contextmanager
def part(name: str) -> Iterator[None]:
    """One line of the host's summary; what fails in it does not keep the next part from running."""
    try:
        yield
        line = f"PASS {name}"
    except Skip as error:
        line = f"SKIP {name}: {error}"
    except Exception as error:
        traceback.print_exc()
        line = f"FAIL {name}: {type(error).__name__}: {error}"
        _failed.append(name)
    print(line, flush=True)
    with (SHARED / f"{sys.argv[1]}.parts").open("a") as parts:
        parts.write(" ".join(line.split()) + "\n")


def end_parts() -> None:
    """The guest's exit status says whether all of its parts passed."""
    sys.exit(1 if _failed else 0)


def say(step: str) -> None:
    """Everybody sees that this guest has come to `step`."""
    print(f"-> {step}", flush=True)
    expect_a_step()
    (SHARED / step).touch()


def wait_for(step: str) -> None:
    wait_until((SHARED / step).exists, repr(step))


def wait_until(look: Callable[[], T], what: str) -> T:
    """What `look` returns once that is true."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {WAIT_LIMIT_S} s")
        time.sleep(WAIT_STEP_S)
    expect_a_step()
    return seen


def command(text: str) -> None:
    """Run a command line, as a person would who follows an error message."""
    print(f"$ {text}", flush=True)
    subprocess.run(text, shell=True, check=True)


def bind_device(device: str = DEVICE) -> None:
    """The device is there without a driver; this binds device_dax, as its user would."""
    command(f"daxctl reconfigure-device --mode=devdax --force {Path(device).name}")


def load(purpose: str) -> None:
    """The kernel modules for it, of MODULES_LATER in image.py."""
    for module in Path("/guest/modules", purpose).read_text().split():
        command(f"/guest/busybox insmod /guest/modules/{module}")


def make_system_ram() -> None:
    """The device's memory becomes that of its NUMA node, as its user would have it."""
    # daxctl refuses where the kernel would be faster: it wants to bring the memory online itself.
    command("echo offline >/sys/devices/system/memory/auto_online_blocks")
    load("kmem")
    command(f"daxctl reconfigure-device --mode=system-ram {Path(DEVICE).name}")


def errno_of(act: Callable[[], object]) -> int:
    try:
        act()
    except OSError as error:
        return error.errno or 0
    return 0


def refusal(kind: type[Exception], act: Callable[[], object]) -> str:
    """The text of the error that `act` must raise."""
    try:
        act()
    except kind as error:
        print(f"refused: {error}", flush=True)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def rows(seed: int, tokens: int, layer: int) -> tuple[Rows, Rows]:
    """K and V of one layer: the same in every guest, and of fewer tokens the first of them."""
    shape = (tokens, LAYOUT.kv_heads, LAYOUT.head_dim)
    k, v = (
        np.random.default_rng([seed, layer, kind]).standard_normal(shape, np.float32)
        for kind in range(2)
    )
    return k.astype(np.float16), v.astype(np.float16)


def append(sequence: Sequence, seed: int, tokens: int) -> None:
    for layer in range(LAYOUT.layers):
        sequence.append(layer, *rows(seed, tokens, layer))


def token_ids(seed: int, tokens: int) -> npt.NDArray[np.int64]:
    return np.arange(tokens) + 1_000_000 * seed


def assert_holds(sequence: Sequence, seed: int, tokens: int) -> None:
    """The sequence holds rows(seed) of its first `tokens` tokens, byte for byte."""
    assert len(sequence) == tokens, f"{len(sequence)} tokens, not {tokens}"
    for layer in range(LAYOUT.layers):
        for got, wanted in zip(sequence.fetch(layer), rows(seed, tokens, layer), strict=True):
            found = np.asarray(got).transpose(1, 2, 0, 3).reshape(-1, *wanted.shape[1:])[:tokens]
            assert found.tobytes() == wanted.tobytes(), f"layer {layer} differs"


def publish(pool: CXLPool, seed: int, tokens: int) -> Sequence:
    """A sequence of the text, published."""
    sequence = pool.sequence()
    append(sequence, seed, tokens)
    pool.publish_prefix(sequence, token_ids(seed, tokens))
    return sequence


def found(pool: CXLPool, seed: int, tokens: int, lease_s: float = LEASE_S) -> Sequence:
    """The whole text, matched and compared byte for byte."""
    with pool.match_prefix(token_ids(seed, tokens), lease_s=lease_s) as hit:
        sequence = hit.sequence()
    assert_holds(sequence, seed, tokens)
    return sequence


def publish_texts(pool: CXLPool) -> None:
    for seed, tokens in TEXTS.items():
        publish(pool, seed, tokens).release()


def read_texts(pool: CXLPool) -> None:
    for seed, tokens in TEXTS.items():
        found(pool, seed, tokens).release()
    check(pool)


def check(pool: CXLPool) -> None:
    report = pool.admin.check(deep=True)
    assert report["clean"], report["problems"]
