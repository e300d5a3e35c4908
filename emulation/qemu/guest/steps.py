"""What the guests' scenarios share: steps that others wait for, the device, known pages."""

from __future__ import annotations

import faulthandler
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cxlkv import KVLayout, Sequence

Rows = npt.NDArray[np.float16]
SHARED = Path("/shared")
DEVICE = "/dev/dax0.0"
LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=64, page_tokens=16, dtype="float16")
WAIT_LIMIT_S = 180
WAIT_STEP_S = 0.02
faulthandler.dump_traceback_later(WAIT_LIMIT_S - 30)  # where it hangs, before the host gives up


def say(step: str) -> None:
    """Everybody sees that this guest has come to `step`."""
    print(f"-> {step}", flush=True)
    (SHARED / step).touch()


def wait_for(step: str) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not (SHARED / step).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {step!r} within {WAIT_LIMIT_S} s")
        time.sleep(WAIT_STEP_S)


def command(text: str) -> None:
    """Run a command line, as a person would who follows an error message."""
    print(f"$ {text}", flush=True)
    subprocess.run(text, shell=True, check=True)


def bind_device() -> None:
    """The device is there without a driver; this binds device_dax, as its user would."""
    command(f"daxctl reconfigure-device --mode=devdax --force {Path(DEVICE).name}")


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
