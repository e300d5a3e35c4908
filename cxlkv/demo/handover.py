"""`cxlkv demo --handover`: one process reads a context into a pool, another one answers from it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.text import Text

from cxlkv.adapters.transformers import CXLCache, hand_over, layout_of, take_over
from cxlkv.bench.result import Result
from cxlkv.demo.measure import TRAINED_TOKENS, Asked, Examiner, Plan
from cxlkv.demo.run import SHARED_MEMORY, SMALL_SHARE, demo_pool, finish, load_model
from cxlkv.emulation.link import marked
from cxlkv.errors import MemoryShortError, PeerError
from cxlkv.layout import format_bytes
from cxlkv.pool import CXLPool

TOKENS = TRAINED_TOKENS - 3
"""The last page is not full, so that something has to be copied."""
SHARES = (1.0, SMALL_SHARE)
TIMES = 20
"""So often the context is handed over, each time by a fork with a tail of its own."""
WAIT_LIMIT_S = 600.0


@dataclass
class Seen:
    """What the reading process measured, and the answers of both by share of pages."""

    plan: Plan
    token_bytes: int
    pages: int
    tail_tokens: int
    prefill_s: float
    own: list[Asked]
    handed_bytes: int
    hand_over_ms: list[float]
    take_over_ms: list[float]
    others: list[Asked]
    pages_left: int

    @property
    def together_ms(self) -> list[float]:
        """Time on both sides, without the transfer of the bytes between them."""
        return [a + b for a, b in zip(self.hand_over_ms, self.take_over_ms, strict=True)]


def run(
    json_path: Path | None = None, tokens: int | None = None, console: Console | None = None
) -> bool:
    """Measure, print, write the result file; True when all checks hold.

    Raises MemoryShortError where /dev/shm has no room for the pool (tens of MiB), PeerError when
    the other process fails, OSError where the file cannot be written.
    """
    console = console or Console()
    plan = Plan.of(TOKENS if tokens is None else tokens, None)
    plan = replace(plan, seeds=plan.seeds[:1], shares=SHARES)
    model = load_model()
    with demo_pool(layout_of(model), plan) as (pool, place):
        if pool.path is None:
            raise MemoryShortError(
                f"{SHARED_MEMORY} has no room for the pool, and other memory no second process can "
                "open: docker run --shm-size=1g, or mount -o remount,size=1G /dev/shm"
            )
        console.print(Text(f"The KV cache lies in {place}."), soft_wrap=True)
        with other_process(pool.path, plan) as other:
            seen = measure(Examiner(model, pool, plan), other)
    result = result_of(seen)
    result.notes.append(f"memory: {place}")
    for line in lines_of(seen):
        console.print(Text(marked(line, result.emulated)), soft_wrap=True)
    return finish(result, console, json_path)


class Other:
    """The decoding process, as the prefilling process sees it."""

    def __init__(self, process: BaseProcess, pipe: Connection[object, object]) -> None:
        self._process = process
        self._pipe = pipe

    def send(self, word: object) -> None:
        self._pipe.send(word)

    def hear(self) -> object:
        """Return the peer's next message; raises PeerError when it has ended."""
        try:
            if self._pipe.poll(WAIT_LIMIT_S):
                return self._pipe.recv()
            how = f"said nothing for {WAIT_LIMIT_S:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            how = f"ended with status {self._process.exitcode}; what it said stands above"
        raise PeerError(f"the process that was to go on {how}")


@contextmanager
def other_process(path: str, plan: Plan) -> Iterator[Other]:
    """Start a process that loads the model and opens the pool."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=go_on, args=(path, plan, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        other = Other(process, ours)
        other.hear()
        yield other
    finally:
        ours.close()
        process.join(1)
        process.kill()
        process.join()


def go_on(path: str, plan: Plan, pipe: Connection[object, object]) -> None:
    """Process B: takes over whatever bytes come, and at their end answers from the last of them."""
    model = load_model()
    with CXLPool.open(path) as pool:
        pipe.send("ready")
        cache = CXLCache(pool, model)
        while data := cast(bytes, pipe.recv()):
            cache.release()
            began = time.perf_counter()
            cache = take_over(data, pool, model)
            pipe.send(1e3 * (time.perf_counter() - began))
        examiner = Examiner(model, pool, plan)
        examiner.prefilled.append(cache)
        pipe.send([examiner.ask(examiner.budget(share)) for share in plan.shares])
        examiner.release()
    pipe.send("closed")


def measure(examiner: Examiner, other: Other) -> Seen:
    """Process A: reads, answers itself, hands over, lets go, and hears what the other answers."""
    plan, pool = examiner.plan, examiner.pool
    prefill_s = examiner.prefill()
    own = [examiner.ask(examiner.budget(share)) for share in plan.shares]
    pages = len(examiner.prefilled[0].sequences[0].pages)
    hand_over_ms, take_over_ms, data = [], [], b""
    for _ in range(TIMES):
        fork = examiner.prefilled[0].fork()
        began = time.perf_counter()
        data = hand_over(fork, examiner.model)
        hand_over_ms.append(1e3 * (time.perf_counter() - began))
        other.send(data)
        take_over_ms.append(cast(float, other.hear()))
        fork.release()
    examiner.release()
    other.send(b"")
    others = cast("list[Asked]", other.hear())
    other.hear()
    return Seen(
        plan=plan,
        token_bytes=pool.layout.stored_token_bytes,
        pages=pages,
        tail_tokens=plan.tokens % pool.layout.page_tokens,
        prefill_s=prefill_s,
        own=own,
        handed_bytes=len(data),
        hand_over_ms=hand_over_ms,
        take_over_ms=take_over_ms,
        others=others,
        pages_left=pool.stats()["pages_held"],
    )


def result_of(seen: Seen) -> Result:
    """The result file's content: checks, metrics, the ratio to the time of reading anew."""
    result = Result("handover")
    full = seen.others[0]
    if seen.plan.tokens <= TRAINED_TOKENS:
        result.checks["full_attention_right"] = full.right_share >= 0.95
    for share, own, other in zip(SHARES, seen.own, seen.others, strict=True):
        result.checks[f"same_answers_at_{100 * share:g}_percent"] = own.answers == other.answers
    result.checks["all_pages_given_back"] = seen.pages_left == 0
    result.measure("prefill_time", [seen.prefill_s], "s")
    result.measure("hand_over_time", seen.hand_over_ms, "ms")
    result.measure("take_over_time", seen.take_over_ms, "ms")
    together = result.measure("both_times", seen.together_ms, "ms")
    result.measure("handed_bytes", [seen.handed_bytes], "bytes")
    result.measure("tail_bytes", [seen.tail_tokens * seen.token_bytes], "bytes")
    result.measure("kv_bytes", [seen.plan.tokens * seen.token_bytes], "bytes")
    result.ratios["both_times_to_prefill_time"] = together.median / 1e3 / seen.prefill_s
    return result


def lines_of(seen: Seen) -> list[str]:
    """Format the result for a terminal."""
    result = result_of(seen)
    hand, take = (result.metrics[f"{which}_over_time"].median for which in ("hand", "take"))
    kv_bytes = format_bytes(seen.plan.tokens * seen.token_bytes)
    tail = format_bytes(seen.tail_tokens * seen.token_bytes)
    answers = " and ".join(
        f"{sum(asked.right)} of {len(asked.right)} right from {100 * share:g} % of the pages"
        for share, asked in zip(SHARES, seen.others, strict=True)
    )
    prefill_ms = 1e3 * seen.prefill_s
    return [
        f"A read {seen.plan.tokens:,} tokens in {seen.prefill_s:.2f} s: {kv_bytes} of keys and "
        f"values in {seen.pages:,} pages and an open tail.",
        f"A handed over {format_bytes(seen.handed_bytes)} in {hand:.2f} ms, B took over in "
        f"{take:.2f} ms (medians of {TIMES}): 1/{prefill_ms / (hand + take):.0f} of the time of "
        "reading the context again.",
        f"Copied: the open tail of {seen.tail_tokens} tokens ({tail}), into a page and out of it. "
        "The pages stayed where they are.",
        f"A let go of all. B answered {answers}.",
    ]
