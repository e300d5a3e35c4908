"""One process of a hand-over: reads prompts into a pool, or goes on where another has read them.

`python -m tests.support.handover_worker` imports what takes seconds, and forks one for each line on
its stdin. It takes a JSON object a line, and answers with one. test_handover.py starts them.
"""

from __future__ import annotations

import json
import socket
from functools import cache as once
from typing import TextIO

import torch
from transformers import PreTrainedModel

from cxlkv import Budget, CXLPool
from cxlkv.adapters.transformers import CXLCache, hand_over, take_over
from cxlkv.errors import CXLKVError

from ..adapters.test_transformers_models import make
from .forked import fork_engines
from .small_models import generate, prompts, run

LEASE_S = 2.0
Words = dict[str, object]

caches: dict[str, CXLCache] = {}
pools: dict[tuple[str, int | None], CXLPool] = {}


@once
def model_of(name: str, dtype: str) -> PreTrainedModel:
    model = make(name)
    model.to(getattr(torch, dtype))
    return model


def pool_at(path: str, host: int | None) -> CXLPool:
    """host: as which one of a shared pool's; it stays open until leave()."""
    if (path, host) not in pools:
        pools[path, host] = CXLPool.open(path, threads=1, host=host, lease_s=LEASE_S)
    return pools[path, host]


def prefill(pool: CXLPool, model: PreTrainedModel, lengths: tuple[int, ...]) -> CXLCache:
    """All tokens of the prompts but the last ones are read; generate() knows padding's places."""
    ids, mask = prompts(lengths)
    cache = CXLCache(pool, model)
    generate(model, ids[:, :-1], mask[:, :-1], cache, max_new_tokens=1)
    return cache


def decode(
    model: PreTrainedModel, cache: CXLCache, lengths: tuple[int, ...], mode: Words
) -> list[list[int]]:
    """Tokens, the prompts' included; modes of several rows a prompt share what was read."""
    ids, mask = prompts(lengths)
    repeats = int(str(mode.get("num_beams", mode.get("num_return_sequences", 1))))
    if repeats > 1:
        cache.batch_repeat_interleave(repeats)
    found: list[list[int]] = generate(model, ids, mask, cache, **mode).tolist()
    return found


class Commands:
    """What a line may ask for in "do"; the other words are its arguments."""

    def __init__(self, lines: TextIO):
        self._lines = lines

    def say(self, answer: Words) -> None:
        print(json.dumps(answer), file=self._lines, flush=True)

    def prefill(
        self, path: str, model: list[str], lengths: list[int], name: str, host: int | None = None
    ) -> Words:
        loaded = model_of(*model)
        caches[name] = prefill(pool_at(path, host), loaded, tuple(lengths))
        return {"data": hand_over(caches[name], loaded).hex()}

    def take(
        self,
        path: str,
        model: list[str],
        data: str,
        name: str,
        mass: float | None = None,
        host: int | None = None,
    ) -> Words:
        budget = None if mass is None else Budget(mass=mass)
        pool = pool_at(path, host)
        caches[name] = take_over(bytes.fromhex(data), pool, model_of(*model), budget=budget)
        return {"tokens": caches[name].get_seq_length()}

    def hand(self, model: list[str], name: str) -> Words:
        return {"data": hand_over(caches[name], model_of(*model)).hex()}

    def decode(self, model: list[str], name: str, lengths: list[int], mode: Words) -> Words:
        return {"ids": decode(model_of(*model), caches[name], tuple(lengths), mode)}

    def decode_on(self, model: list[str], name: str) -> Words:
        """A line for each step, until it is killed."""
        while True:
            run(model_of(*model), torch.tensor([[1]]), caches[name])
            self.say({"tokens": caches[name].get_seq_length()})

    def release(self, name: str) -> Words:
        caches.pop(name).release()
        return {}

    def leave(self) -> Words:
        caches.clear()
        while pools:
            pools.popitem()[1].close()
        return {}


def live(link: socket.socket, settings: Words) -> None:
    with link.makefile("rw") as lines:
        commands = Commands(lines)
        for line in lines:
            words = json.loads(line)
            try:
                commands.say(getattr(commands, words.pop("do"))(**words))
            except CXLKVError as error:
                commands.say({"error": type(error).__name__, "text": str(error)})


if __name__ == "__main__":
    fork_engines(live)
