"""Makes docs/images/pool-top.svg: `cxlkv pool top` while two real processes work on a pool.

    python docs/capture_top.py

One prefills, decodes with a digest budget and audits a tenth of its selects; the other matches the
prefixes that were published, forks them and attends to all pages.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.ops.top import Top

PICTURE = Path(__file__).parent / "images/pool-top.svg"
LAYOUT = KVLayout(
    layers=2, kv_heads=4, head_dim=64, page_tokens=16, dtype="float16", model_id="example/tiny"
)
PROMPT_TOKENS, PROMPTS, INTERVAL_S = 1024, 12, 2.0


def rows(rng: np.random.Generator, tokens: int) -> npt.NDArray[np.float16]:
    return rng.standard_normal((tokens, LAYOUT.kv_heads, LAYOUT.head_dim)).astype(np.float16)


def prefill_and_decode(pool: CXLPool, rng: np.random.Generator) -> None:
    pool.admin.audit = 0.1
    for prompt in range(1_000_000):
        sequence = pool.sequence()
        keys = rows(rng, PROMPT_TOKENS)
        for layer in range(LAYOUT.layers):
            sequence.append(layer, keys, rows(rng, PROMPT_TOKENS))
        if prompt < PROMPTS:
            pool.publish_prefix(sequence, np.arange(PROMPT_TOKENS) + prompt * PROMPT_TOKENS)
        for _ in range(64):
            for layer in range(LAYOUT.layers):
                sequence.append(layer, rows(rng, 1), rows(rng, 1))
                q = 2 * np.repeat(keys[rng.integers(PROMPT_TOKENS)], 4, axis=0)  # seeks that token
                picked = sequence.select(layer, q, Budget(share=0.1), method="digest")
                sequence.attend(layer, q, picked)
        print(prompt, flush=True)
        sequence.release()


def match_and_attend(pool: CXLPool, rng: np.random.Generator) -> None:
    for turn in range(1_000_000):
        prompt = int(rng.integers(0, PROMPTS + 4))  # the last ones were never published
        with pool.match_prefix(np.arange(PROMPT_TOKENS) + prompt * PROMPT_TOKENS) as hit:
            sequence = hit.sequence()
        for layer in range(LAYOUT.layers if len(sequence) else 0):
            q = rng.standard_normal((16, LAYOUT.head_dim)).astype(np.float16)
            sequence.attend(layer, q)
            sequence.fetch(layer)
        print(turn, flush=True)


def capture() -> None:
    path = "/dev/shm/example.pool"
    CXLPool.create(path, layout=LAYOUT, capacity="36MiB").close()
    try:
        workers = [
            subprocess.Popen([sys.executable, __file__, path, job], stdout=subprocess.PIPE)
            for job in ("prefill_and_decode", "match_and_attend")
        ]
        try:
            for worker in workers:
                assert worker.stdout
                for _ in range(PROMPTS + 2):  # the first prompts are published, all are at work
                    assert worker.stdout.readline()
            console = Console(record=True, width=118, force_terminal=True)
            top = Top([path])
            top.frame()
            time.sleep(INTERVAL_S)
            console.print(top.frame())
            console.save_svg(str(PICTURE), title="cxlkv pool top")
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    finally:
        CXLPool.open(path).close()  # takes back what the killed ones held
        CXLPool.remove(path)


if __name__ == "__main__":
    if sys.argv[1:]:
        where, job = sys.argv[1:]
        with CXLPool.open(where, threads=1) as opened:
            jobs = {"prefill_and_decode": prefill_and_decode, "match_and_attend": match_and_attend}
            jobs[job](opened, np.random.default_rng(7))
    else:
        capture()
