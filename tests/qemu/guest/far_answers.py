"""Prefill on one machine, decode on another that shares no memory with it: the demo's model.

Guest a reads a text into its pool and serves that. Guest b pulls the text's full pages over RDMA,
reads the tokens of the page that was not full itself, and answers.
"""

from __future__ import annotations

import json
import time

from cxlkv import CXLPool
from cxlkv.demo.task import make_context
from cxlkv.prefix import prefix_keys
from cxlkv.transport import pull
from tests.qemu.guest.answering import FACTS, MODEL, SEEDS, TOKENS, answers, prefilled
from tests.qemu.guest.llama import Llama
from tests.qemu.guest.soft_rdma import check, connected, end, near_pool, server
from tests.qemu.guest.steps import DEVICE, SHARED, say, wait_for

SEED = SEEDS[0]
IDS = make_context(SEED, TOKENS, FACTS, 0).tokens
ANSWERS = SHARED / "answers"


def read_and_serve() -> None:
    """Guest a. Its server has ended when b answers."""
    model = Llama(MODEL)
    with CXLPool.create(
        DEVICE, layout=model.layout, capacity="all", force=True, replace=True
    ) as pool:
        began = time.monotonic()
        sequence = prefilled(model, pool, SEED)
        print(f"read {len(sequence)} tokens in {time.monotonic() - began:.1f} s", flush=True)
        pool.publish_prefix(sequence, IDS)
        sequence.release()
        with server() as process:
            say("a serves what it has read")
            wait_for("b has pulled it")
            end(process)
        check(pool)
    CXLPool.remove(DEVICE)
    say("a's pool is gone")


def pull_and_answer() -> None:
    """Guest b; its answers go to the host outside."""
    model = Llama(MODEL)
    size = model.layout.page_tokens
    with near_pool(model.layout) as pool:
        with connected() as remote:
            began = time.monotonic()
            moved = pull(remote, pool, prefix_keys(IDS, size))
            took_ms = 1e3 * (time.monotonic() - began)
            print(f"{moved} in {took_ms:.0f} ms, connection included", flush=True)
            assert moved.tokens == TOKENS // size * size < TOKENS
        say("b has pulled it")
        wait_for("a's pool is gone")
        with pool.match_prefix(IDS) as hit:
            sequence = hit.sequence()
        assert len(sequence) == moved.tokens
        model.read(sequence, IDS[len(sequence) :])
        ANSWERS.write_text(json.dumps(answers(model, sequence, SEED)))
        sequence.release()
    say("b has answered")
