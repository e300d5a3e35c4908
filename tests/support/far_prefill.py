"""A machine that only reads prompts: serves what it published until its input ends.

`python -m tests.support.far_prefill MODEL LENGTHS POOL SECRET HOST DEVICE`; test_transport_demo.py
starts it.
"""

from __future__ import annotations

import sys

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLRequests, layout_of
from cxlkv.transport import Server, read_secret

from ..adapters.test_transformers_requests import PAGE, generate, llama, windowed
from .small_models import prompts

MODELS = {"llama": llama, "windowed": windowed}


def main(name: str, lengths: str, where: str, secret: str, host: str, device: str) -> None:
    model = MODELS[name]()
    ids, mask = prompts(tuple(int(length) for length in lengths.split(",")))
    layout = layout_of(model, PAGE)
    with CXLPool.create(where, layout=layout, capacity="8MiB", threads=1) as pool:
        with CXLRequests(pool, model).begin(ids, mask) as cache:
            generate(model, ids, mask, cache, max_new_tokens=1)
        with Server(pool, (host, 0), read_secret(secret), device=device or None) as server:
            print("{}:{}".format(*server.address), flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
