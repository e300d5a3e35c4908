"""Begins engines by forking: vLLM is imported once, and a life takes seconds less.

A life gets requests as lines of JSON over a socket, and takes more while it serves; each answer is
a line, too. On stdin come the engines that are wanted, each as {"socket", "log", "settings"}.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from typing import IO, TypedDict, cast

import vllm.v1.engine.llm_engine  # noqa: F401  what else a life would import
from vllm import LLM, SamplingParams, TokensPrompt

from cxlkv.adapters.vllm.engine_attention import EngineAttention
from cxlkv.adapters.vllm.loading import BlockMemory, Load
from cxlkv.adapters.vllm.pool_attention import Step
from cxlkv.adapters.vllm.states import Blocks, Bytes, StateMemory
from tests.support.forked import fork_engines

from .serve import FIXED, metrics
from .tiny_models import add_torchvision


class Asked(TypedDict, total=False):
    """do: "add" (a request; its answer comes when it has ended), "reset", "metrics", "signal" (to
    itself, with `number`, in the middle of the next save, load or decode step, or between the next
    save and that of its states: `where`), "end"."""

    do: str
    name: str
    prompt: list[int]
    max_tokens: int
    at_s: float  # when it was sent, by this machine's monotonic clock
    where: str
    number: int


def live(link: socket.socket, settings: dict[str, object]) -> None:
    with link.makefile("w") as answers:
        serve(settings, link, answers)


def serve(settings: dict[str, object], link: socket.socket, answers: IO[str]) -> None:
    def say(answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    os.environ.update(cast("dict[str, str]", settings.pop("environment", {})))
    try:
        llm = LLM(**settings)
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    engine, since, left = llm.llm_engine, dict[str, float](), b""
    while True:
        busy = engine.has_unfinished_requests()
        if select.select([link], [], [], 0 if busy else None)[0]:
            *lines, left = (left + link.recv(1 << 20)).split(b"\n")
            for line in lines:
                asked: Asked = json.loads(line)
                if asked["do"] == "add":
                    since[asked["name"]] = asked["at_s"]
                    add(llm, asked)
                elif asked["do"] == "end":
                    engine.engine_core.shutdown()
                    say({"ended": True})
                    return
                else:
                    say(obey(llm, asked))
        for one in engine.step() if busy else ():
            if one.finished:
                took_s = time.monotonic() - since.pop(one.request_id)
                said = {"name": one.request_id, "cached": one.num_cached_tokens, "took_s": took_s}
                say({**said, "tokens": list(one.outputs[0].token_ids)})


def add(llm: LLM, asked: Asked) -> None:
    params = SamplingParams(**FIXED, max_tokens=asked["max_tokens"])
    prompt = TokensPrompt(prompt_token_ids=asked["prompt"])
    llm.llm_engine.add_request(asked["name"], prompt, params)


def obey(llm: LLM, asked: Asked) -> object:
    if asked["do"] == "reset":
        return {"reset": llm.reset_prefix_cache()}
    if asked["do"] == "metrics":
        return metrics(llm)
    signal_in(asked["where"], asked["number"])
    return {"waits": asked["where"]}


# ---- in the middle of something ----


def signal_in(where: str, number: int) -> None:
    """To this process, once: when a layer of it is done and the next one is not."""
    waits = [where]

    def reached(place: str) -> None:
        if waits == [place]:
            waits.clear()
            os.kill(os.getpid(), number)

    gather = StateMemory.gather

    def gather_states(self: StateMemory, blocks: Blocks) -> Bytes:
        reached("states")
        return gather(self, blocks)

    StateMemory.gather = gather_states  # type: ignore[method-assign]
    save, bring, attend = EngineAttention.save_layer, Load._bring, Step.attend

    def save_layer(self: EngineAttention, name: str) -> None:
        if any(writing.layers == 1 for writing in self._writing):
            reached("save")
        save(self, name)

    def bring_layer(self: Load, layer: int, own: BlockMemory) -> None:
        if layer == 1:
            reached("load")
        bring(self, layer, own)

    def attend_layer(self: Step, layer: int, *tensors: object) -> None:
        if layer == 1:
            grow = self.starts[-1] > len(self.computed)
            reached("decode" if not grow else "load" if any(self.computed) else "save")
        attend(self, layer, *tensors)  # type: ignore[arg-type]

    EngineAttention.save_layer, Load._bring = save_layer, bring_layer  # type: ignore[method-assign]
    Step.attend = attend_layer  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    add_torchvision()
    fork_engines(live)
