"""An engine in a process of its own: PYTHON -m cxlkv.bench.vllm.engine 'JSON'.

The argument is what vllm.LLM takes. It answers requests as bench/peers/serving.py says, a line of
JSON each:

    {"op": "generate", "prompts": [[id, ...]], "tokens": 4, "options": {...} or null}
        {"tokens": [[id, ...]], "cached": [...], "first_s": ..., "decode_s": ..., "decoded": ...,
         "idle_s": ..., "idle_used_s": ...}
    {"op": "weigh", "prompt": [id, ...], "tokens": [id, ...]}             {"logprobs": [...]}
    {"op": "end"}                                                         {"ok": true}

All prompts are given at once. first_s: until each has its first token; decode_s: from then on,
for `decoded` tokens of all of them. cached: tokens that were not computed. idle_s: since the last
answer; idle_used_s: CPU seconds of all threads in that time. options: our part of
kv_transfer_params. weigh: log probabilities of each token to follow the prompt.
"""

from __future__ import annotations

import json
import sys
import time
from typing import ClassVar, TypedDict, cast

import torch
import vllm
from vllm import LLM, SamplingParams, TokensPrompt

from cxlkv import _core
from cxlkv.bench.peers.serving import Peer, serve


class Asked(TypedDict):
    """See above."""

    op: str
    prompts: list[list[int]]
    tokens: int
    options: dict[str, object] | None


class Weighed(TypedDict):
    """See above."""

    op: str
    prompt: list[int]
    tokens: list[int]


class Engine(Peer):
    """vLLM in this process, step by step."""

    version = f"vllm {vllm.__version__}, torch {torch.__version__}, cxlkv {_core.version()}"
    forms: ClassVar = {"engine": ("generate", "weigh")}

    def __init__(self) -> None:
        self._llm = LLM(**json.loads(sys.argv[1]))
        self._requests = 0
        self._idle_since = (time.perf_counter(), time.process_time())

    def answer(self, asked: dict[str, object]) -> dict[str, object]:
        if asked["op"] == "generate":
            return self.generate(cast("Asked", asked))
        if asked["op"] == "weigh":
            return {"logprobs": self.weigh(cast("Weighed", asked))}
        self._llm.llm_engine.engine_core.shutdown()
        return {"ok": True}

    def generate(self, asked: Asked) -> dict[str, object]:
        engine = self._llm.llm_engine
        texts: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        params = SamplingParams(
            detokenize=False,
            ignore_eos=True,
            temperature=0,
            max_tokens=asked["tokens"],
            extra_args=(
                None
                if asked["options"] is None
                else {"kv_transfer_params": {"cxlkv": asked["options"]}}
            ),
        )
        names = []
        began = time.perf_counter()
        idle_s, idle_used_s = began - self._idle_since[0], time.process_time() - self._idle_since[1]
        for ids in asked["prompts"]:
            self._requests += 1
            names.append(str(self._requests))
            engine.add_request(names[-1], TokensPrompt(prompt_token_ids=ids), params)
        first_s, at_first = None, 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if not outputs:  # as a server's loop does: who loads for the requests has a turn
                time.sleep(0.001)
            for output in outputs:
                texts[output.request_id] = list(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens or 0
            counts = [len(texts.get(name, ())) for name in names]
            if first_s is None and min(counts) > 0:
                first_s, at_first = time.perf_counter() - began, sum(counts)
        whole_s = time.perf_counter() - began
        assert first_s is not None
        self._idle_since = (time.perf_counter(), time.process_time())
        return {
            "tokens": [texts[name] for name in names],
            "cached": [cached[name] for name in names],
            "first_s": first_s,
            "decode_s": whole_s - first_s,
            "decoded": sum(counts) - at_first,
            "idle_s": idle_s,
            "idle_used_s": idle_used_s,
        }

    def weigh(self, asked: Weighed) -> list[float]:
        engine, tokens = self._llm.llm_engine, asked["tokens"]
        params = SamplingParams(
            detokenize=False, temperature=0, max_tokens=1, logprob_token_ids=tokens
        )
        prompt = TokensPrompt(prompt_token_ids=asked["prompt"])
        engine.add_request("weighed", prompt, params)
        found = []
        while engine.has_unfinished_requests():
            found = engine.step()
        (likely,) = found[0].outputs[0].logprobs
        self._idle_since = (time.perf_counter(), time.process_time())
        return [likely[token].logprob for token in tokens]


if __name__ == "__main__":
    sys.exit(serve(Engine))
