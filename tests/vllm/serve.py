"""An engine in a process of its own: requests as lines of JSON on stdin, answers on stdout."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import TypedDict

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest

SHOWN = ("kind", "state", "tier", "direction")  # labels that are part of a metric's name here
KEPT = ("vllm:cxlkv_", "vllm:external_prefix_cache", "vllm:spec_decode_num_")
FIXED = {"detokenize": False, "ignore_eos": True, "temperature": 0}


class Asked(TypedDict):
    """do: "generate", "storm" (all prompts at once, some aborted at random), "reset", "sleep",
    "wake", "reload" (weights of another folder), "adapter" (load it now), "metrics" (ours and the
    engine's of connectors, by name and labels), "end"."""

    do: str
    prompts: list[list[int]]
    max_tokens: int
    more: dict[str, object]  # of SamplingParams
    salt: str | None  # of the prompts' hashes
    connector: bool  # to be reset as well
    level: int  # of sleep
    weights: str  # the folder of those that are loaded
    adapter: dict[str, object]  # of LoRARequest; none: without one
    share: float  # of running requests that each step aborts
    seed: int


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to stderr

    def say(answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        llm = LLM(**json.loads(sys.argv[1]))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    for line in sys.stdin:
        asked: Asked = json.loads(line)
        if asked["do"] == "generate":
            say(generate(llm, asked))
        elif asked["do"] == "storm":
            say(storm(llm, asked))
        elif asked["do"] == "reset":
            connector = bool(asked.get("connector"))
            say({"reset": llm.reset_prefix_cache(reset_connector=connector)})
        elif asked["do"] == "sleep":
            llm.sleep(asked["level"])
            say({"sleeps": llm.llm_engine.is_sleeping()})
        elif asked["do"] == "wake":
            llm.wake_up()
            say({"sleeps": llm.llm_engine.is_sleeping()})
        elif asked["do"] == "reload":
            llm.collective_rpc("reload_weights", kwargs={"weights_path": asked["weights"]})
            say({"reloaded": asked["weights"]})
        elif asked["do"] == "adapter":
            say({"loaded": llm.llm_engine.add_lora(LoRARequest(**asked["adapter"]))})
        elif asked["do"] == "metrics":
            say(metrics(llm))
        else:
            break
    llm.llm_engine.engine_core.shutdown()
    say({"ended": True})


def generate(llm: LLM, asked: Asked) -> dict[str, object]:
    params = SamplingParams(**FIXED, max_tokens=asked["max_tokens"], **asked["more"])
    salt: TokensPrompt = {"cache_salt": asked["salt"]} if asked.get("salt") else {}
    prompts = [TokensPrompt(prompt_token_ids=ids, **salt) for ids in asked["prompts"]]
    given = asked.get("adapter")
    adapter = LoRARequest(**given) if given else None
    done = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in done],
        "cached": [one.num_cached_tokens for one in done],
        "ended": [str(one.outputs[0].finish_reason) for one in done],
    }


def storm(llm: LLM, asked: Asked) -> dict[str, object]:
    chance, engine = random.Random(asked["seed"]), llm.llm_engine
    going: set[str] = set()
    params = SamplingParams(**FIXED, max_tokens=asked["max_tokens"])
    for number, ids in enumerate(asked["prompts"]):
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=ids), params)
        going.add(str(number))
    aborted, done = 0, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and output.request_id in going:
                going.discard(output.request_id)
                done[output.request_id] = list(output.outputs[0].token_ids)
        for name in sorted(going):
            if chance.random() < asked["share"]:
                engine.abort_request([name])
                going.discard(name)
                aborted += 1
    return {"aborted": aborted, "done": done}


def metrics(llm: LLM) -> dict[str, float]:
    """Also has the engine log its line, as it does now and then when it serves."""
    llm.llm_engine.do_log_stats()
    found = {}
    for one in llm.get_metrics():
        if one.name.startswith(KEPT) and hasattr(one, "value"):
            given = [one.labels[name] for name in SHOWN if name in one.labels]
            found[" ".join([one.name, *given])] = one.value
    return found


if __name__ == "__main__":
    main()
