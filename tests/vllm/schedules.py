"""vLLM's own schedulers and block tables around our connector, and a runner that computes no model.

K and V of a token are numbers made from the text up to it, so that each block tells whether it is
right, and so is the token that is sampled. Steps are computed up to one behind the schedule, as
with a GPU: vLLM's platform for CPUs turns asynchronous scheduling off, and its class is taken here.
On stdin come the cases that are wanted, each as a `Case`; each answer is a line, too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import ClassVar, NoReturn, TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from cxlkv import CXLPool
from cxlkv.adapters.common.keys import block_keys
from cxlkv.adapters.vllm.connector import CXLConnector
from cxlkv.adapters.vllm.engine_attention import EngineAttention
from cxlkv.adapters.vllm.texts import hashes_of
from cxlkv.sequence import Hit, Sequence
from tests.support.damaging import damage_piece

BLOCK, HEADS, DIM, VOCABULARY = 8, 2, 8, 97
STOP = 13  # ends a request that samples it, whatever is scheduled of it
WRONG = np.uint64(0x5DEECE66D)  # what is computed from a wrong block is wrong, too
WINDOW = 20
BATCH_TOKENS = 64
WITHIN_S = 60  # of a case, or it hangs
STEPS_MOST = 5000  # likewise

Numbers = npt.NDArray[np.float32]
States = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.float32 | np.int16 | np.int32]
"""Numbers as they are kept."""


class Case(TypedDict):
    """kinds: a window of each layer, 0: full attention. blocks: of the engine, few of them preempt
    requests. damage: whether pages of the pool are damaged on the way. lives: engines, one after
    the other; kills: before them, of engines in processes of their own. fails: the first step of
    the only one raises when all is computed."""

    folder: str
    model: str
    seed: int
    requests: int
    kinds: list[int]
    blocks: int
    lives: int
    kills: int
    fails: bool
    asynchronous: bool
    damage: bool
    settings: dict[str, object]


class Told(TypedDict):
    """What happened in a case, and in how many requests."""

    counts: dict[str, int]


# ---- a text and its numbers ----


class Text:
    """States of a text's tokens: each is made of all ids up to it."""

    def __init__(self, ids: list[int]):
        self.ids: list[int] = []
        self.states: list[int] = []
        for one in ids:
            self.add(one)

    def add(self, one: int) -> None:
        before = self.states[-1] if self.states else 1
        self.ids.append(one)
        self.states.append((before * 6364136223846793005 + one * 2 + 1442695040888963407) % 2**64)

    def upto(self, first: int, end: int) -> States:
        return np.array(self.states[first:end], np.uint64)


def rows_of(states: States, layer: int) -> Numbers:
    """[token, K or V, head, dim]"""
    numbers = np.random.default_rng(layer).integers(1, 2**62, 2 * HEADS * DIM, np.uint64) * 2 + 1
    mixed = (states[:, None] * numbers.astype(np.uint64)[None]) >> np.uint64(41)
    return mixed.astype(np.float32).reshape(-1, 2, HEADS, DIM)


def next_token(state: np.uint64) -> int:
    return int((int(state) >> 33) % VOCABULARY)


def answer_of(prompt: list[int], most: int) -> list[int]:
    """What a request of this prompt samples, wherever its blocks come from."""
    text, found = Text(prompt), list[int]()
    while len(found) < most and found[-1:] != [STOP]:
        found.append(next_token(np.uint64(text.states[-1])))
        text.add(found[-1])
    return found


# ---- the worker's side ----


class Rows:
    """In the place of the engine's attention: it writes rows where its backend for CPUs has
    them."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        keys, values = halves_of(kv_cache)
        blocks, places = slot_mapping // BLOCK, slot_mapping % BLOCK
        keys[blocks, :, places], values[blocks, :, places] = key, value


class Layer(torch.nn.Module):
    kv_cache_dtype = "auto"
    impl: Rows = Rows()


def halves_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, heads, tokens, dim] of K and of V."""
    halves = cache.view(len(cache), -1, 2 * BLOCK, DIM)
    return halves[:, :, :BLOCK], halves[:, :, BLOCK:]


def caches_of(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """The layers' tensors in one piece of memory: groups lie over each other in it."""
    size = max(one.size for one in config.kv_cache_tensors)
    memory = torch.full((size // 4,), torch.nan)
    found = {}
    for one in config.kv_cache_tensors:
        for place, name in enumerate(one.layers):
            start = (one.offset + place * one.layer_stride) // 4
            found[name] = memory.as_strided(
                (config.num_blocks, HEADS, BLOCK, 2 * DIM),
                (one.block_stride // 4, BLOCK * 2 * DIM, 2 * DIM, 1),
                start,
            )
    return found


class Worker(CXLConnector):
    """Before a hit is loaded its blocks hold nothing that might pass for it."""

    poison: Callable[[int, list[int]], None]
    loaded = 0  # tokens

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        assert isinstance(self.worker, EngineAttention)
        for part in (*self.worker._new, *self.worker._later):
            for group, blocks in enumerate(part.blocks):
                self.poison(group, blocks)
            self.loaded += part.end - part.begin
        super().start_load_kv(forward_context, **kwargs)


@dataclass
class Running:
    """A request as a runner has it. blocks: by group. sampled: what it has not given back yet, too,
    is in its text."""

    text: Text
    blocks: list[list[int]]


class Runner:
    """windows: of the layers, in order. silent: layers around which vLLM calls no connector."""

    block = BLOCK
    silent: Collection[str] = ()
    worker: ClassVar[type[Worker]] = Worker

    def __init__(self, vllm_config: VllmConfig, config: KVCacheConfig, windows: dict[str, int]):
        self.vllm_config, self.config, self.windows = vllm_config, config, windows
        self.connector = self.worker(vllm_config, KVConnectorRole.WORKER, config)
        self.connector.poison = self.poison
        self.caches = self.allocated()
        self.connector.register_kv_caches(dict(self.caches))
        self.requests: dict[str, Running] = {}
        self.group_of = {
            name: number
            for number, group in enumerate(config.kv_cache_groups)
            for name in group.layer_names
        }
        self.layers = list(windows)
        self.wrong: list[str] = []
        self.counts = Counter[str]()

    def allocated(self) -> dict[str, torch.Tensor]:
        return caches_of(self.config)

    def poison(self, group: int, blocks: list[int]) -> None:
        for name in self.config.kv_cache_groups[group].layer_names if blocks else ():
            self.caches[name][blocks] = torch.nan

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """As vLLM's runner has it: the connector's calls around the step are those of its mixin."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self._hear(output)
        for group in range(len(self.config.kv_cache_groups)):  # before the connector hears of them
            self.poison(group, output.new_block_ids_to_zero or [])
        if not output.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output) as ours,
        ):
            sampled = self._forward(output)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=ours,
        )

    def _hear(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        self._fresh = dict[str, list[list[int]]]()  # blocks that this step writes first
        for new in output.scheduled_new_reqs:
            ids = new.prefill_token_ids or new.prompt_token_ids or []
            self._begin(new.req_id, list(ids), new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                assert blocks is not None
                self._begin(name, cached.all_token_ids[name], blocks, computed)
                continue
            new_blocks = [list(of) for of in blocks or [[] for _ in self.config.kv_cache_groups]]
            for own, more in zip(self.requests[name].blocks, new_blocks, strict=True):
                own += more
            self._fresh[name] = new_blocks

    def _begin(
        self, name: str, ids: list[int], blocks: tuple[list[int], ...], computed: int
    ) -> None:
        self.requests[name] = Running(Text(ids), [list(of) for of in blocks])
        self._fresh[name] = [of[-(-computed // self.block) :] for of in blocks]

    def _forward(self, output: SchedulerOutput) -> dict[str, list[int]]:
        for blocks in self._fresh.values():
            for group, of in enumerate(blocks):
                self.poison(group, [one for one in of if one])
        spans = self._spans(output)
        tainted = set[str]()
        for layer, name in enumerate(self.layers):
            if name not in self.silent:
                self.connector.wait_for_layer_load(name)
            for request, (first, end) in spans.items():
                self._write(request, layer, first, end, request in tainted)
                if self.vllm_config.parallel_config.use_ubatching:  # each part calls by itself
                    self.connector.save_kv_layer(name, self.caches[name], None)
            for request, (first, _) in spans.items():  # some see what others have just written
                if not self._is_right(request, layer, first):
                    tainted.add(request)
                    self.wrong.append(f"{request}, layer {layer}, {first} tokens")
            if name not in self.silent:
                self.connector.save_kv_layer(name, self.caches[name], None)
        return {name: self._sample(name, end, name in tainted) for name, (_, end) in spans.items()}

    def _spans(self, output: SchedulerOutput) -> dict[str, tuple[int, int]]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        counts = output.num_scheduled_tokens
        return {name: (computed[name], computed[name] + counts[name]) for name in counts}

    def _is_right(self, request: str, layer: int, computed: int) -> bool:
        """Whether all is there that the step's first token sees in this layer, by every bit."""
        own, window = self.requests[request], self.windows[self.layers[layer]]
        first = max(0, computed - window + 1) if window else 0
        if first >= computed:
            return True
        blocks, places = self._slots(own, layer, first, computed)
        right = self.rows(own.text.upto(first, computed), layer)
        self.counts["rows compared"] += computed - first
        return all(
            np.array_equal(half[blocks, :, places], right[:, kind])
            for kind, half in enumerate(self.halves(layer))
        )

    def rows(self, states: States, layer: int) -> Bits:
        """rows_of(), as they are kept."""
        return rows_of(states, layer)

    def halves(self, layer: int) -> list[Bits]:
        """K and V of a layer, [blocks, heads, tokens, dim], in place."""
        return [half.numpy() for half in halves_of(self.caches[self.layers[layer]])]

    def _slots(
        self, own: Running, layer: int, first: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        tokens = np.arange(first, end)
        table = np.array(own.blocks[self.group_of[self.layers[layer]]], np.int64)
        blocks = table[tokens // self.block]
        assert blocks.all(), "the engine has let go of a block that the step sees"
        return blocks, tokens % self.block

    def _write(self, request: str, layer: int, first: int, end: int, is_wrong: bool) -> None:
        own = self.requests[request]
        states = own.text.upto(first, end)
        rows = self.rows(states ^ WRONG if is_wrong else states, layer)
        blocks, places = self._slots(own, layer, first, end)
        for kind, half in enumerate(self.halves(layer)):
            half[blocks, :, places] = rows[:, kind]

    def _sample(self, request: str, end: int, is_wrong: bool) -> list[int]:
        text = self.requests[request].text
        if end < len(text.ids):
            return []
        state = np.uint64(text.states[-1])
        token = next_token(state ^ WRONG if is_wrong else state)
        text.add(token)
        return [token]


# ---- the scheduler's side ----


def vllm_config_of(case: Case) -> VllmConfig:
    extra = {"where": case["folder"] + "/", "capacity": "16MiB", **case["settings"]}
    args = EngineArgs(
        model=case["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=BATCH_TOKENS,
        max_num_seqs=6,
        block_size=BLOCK,
        num_gpu_blocks_override=case["blocks"],
        kv_transfer_config={
            "kv_connector": "CXLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )
    made = args.create_engine_config()
    made.scheduler_config.async_scheduling = case["asynchronous"]
    return made


def specs_of(windows: dict[str, int], dtype: torch.dtype) -> dict[str, KVCacheSpec]:
    shape = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": dtype}
    return {
        name: SlidingWindowSpec(**shape, sliding_window=window)
        if window
        else FullAttentionSpec(**shape)
        for name, window in windows.items()
    }


@dataclass
class Engine:
    """vLLM's core without a model: what `step_with_batch_queue` does, in one thread. scale: of the
    lengths of texts."""

    scale: ClassVar[int] = 1
    layout = "LBHNC"  # as the backend for CPUs has it
    dtype = torch.float32
    case: Case
    random: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.vllm_config = self.configured()
        with set_current_vllm_config(self.vllm_config):
            self._make(self.layers())
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.pending: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()

    def configured(self) -> VllmConfig:
        return vllm_config_of(self.case)

    def layers(self) -> dict[str, KVCacheSpec]:
        """Put the model's layers where vLLM has them; what they say of their caches."""
        self.windows = {f"layers.{at}.attn": one for at, one in enumerate(self.case["kinds"])}
        of_model = self.vllm_config.compilation_config.static_forward_context
        of_model.update({name: Layer() for name in self.windows})
        return specs_of(self.windows, self.dtype)

    def runner_of(self, made: KVCacheConfig) -> Runner:
        return Runner(self.vllm_config, made, self.windows)

    def _make(self, specs: dict[str, KVCacheSpec]) -> None:
        config = self.vllm_config
        config.cache_config.kv_cache_layout = self.layout
        (made,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [1 << 30])
        config.cache_config.num_gpu_blocks = made.num_blocks
        own, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(made, config)
        made.hash_block_size = hashed
        algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(algorithm)
        self.hasher = kv_cache_utils.get_request_block_hasher(hashed, algorithm)
        self.runner = self.runner_of(made)
        made = kv_cache_utils.generate_scheduler_kv_cache_config([made])
        kind = cast("type[Scheduler]", config.scheduler_config.get_scheduler_cls())
        self.counts[kind.__name__] = 1
        self.counts["groups"] = len(made.kv_cache_groups)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=made,
            structured_output_manager=StructuredOutputManager(config),
            block_size=own,
            hash_block_size=hashed,
            log_stats=False,
        )

    def damage(self, pool: CXLPool, page: int) -> None:
        damage_piece(pool, page, 0)

    def check_hit(self, pool: CXLPool, hit: Hit, text: Text, name: str) -> None:
        sequence, (shard, shards, *_) = pool.adopt(hit.handle), pool.layout.shard
        heads = slice(shard * HEADS // shards, (shard + 1) * HEADS // shards)
        for layer, window in enumerate(self.case["kinds"]):
            first = max(0, hit.tokens - window + 1) // BLOCK if window else 0
            found = fetched(pool, sequence, layer, first, hit.tokens // BLOCK)
            right = rows_of(text.upto(first * BLOCK, hit.tokens), layer)[:, :, heads]
            assert np.array_equal(found, right), (name, layer)
        sequence.release()

    @property
    def ours(self) -> CXLConnector:
        return cast("CXLConnector", self.scheduler.connector)

    def add(self, name: str, ids: list[int], most: int) -> None:
        self.requests[name], self.answers[name] = self.request(name, ids, most), []
        self.scheduler.add_request(self.requests[name])

    def request(self, name: str, ids: list[int], most: int) -> Request:
        params = SamplingParams(max_tokens=most, temperature=0, stop_token_ids=[STOP])
        return Request(name, ids, params, None, block_hasher=self.hasher)

    def abort(self, name: str) -> None:
        flying = any(name in output.num_scheduled_tokens for output, _ in self.pending)
        self.counts["aborted in flight"] += flying
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Schedule one step, and take the output of the oldest where two are under way."""
        self.counts["steps"] += 1
        assert self.counts["steps"] < STEPS_MOST, self.told()
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.counts["preempted"] += len(output.preempted_req_ids or ())
            self.pending.append((output, None))
        if self.random.random() < 0.5:
            self._run_all()
        is_full = len(self.pending) >= self.vllm_config.max_concurrent_batches
        if self.pending and (is_full or not self.scheduler.has_requests()):
            self._take()

    def settle(self) -> None:
        """Wait for what workers do beside steps."""

    def settles(self) -> bool:
        """Whether nothing is under way after this: vLLM resets no running requests else."""
        while self.pending:
            self._take()
        loading = any(one.is_finished() for one in self.scheduler.requests.values())
        return not loading and not self.scheduler.kv_holding_waiting

    def _run_all(self) -> None:
        for place, (output, result) in enumerate(self.pending):
            if result is None:
                self.pending[place] = (output, self.runner.run(output))

    def _take(self) -> None:
        output, result = self.pending.popleft()
        if result is None:
            result = self.runner.run(output)
        if self.random.random() < 0.05 and output.num_scheduled_tokens:
            self.abort(self.random.choice(list(output.num_scheduled_tokens)))
        for told in self.scheduler.update_from_output(output, result).values():
            for one in told.outputs:
                self.answers[one.request_id] += one.new_token_ids
                flying = any(one.request_id in o.num_scheduled_tokens for o, _ in self.pending)
                self.counts["ended in flight"] += flying and one.finished

    def told(self) -> str:
        """What an engine that comes to no end is about."""
        manager = self.scheduler.kv_cache_manager
        who = [
            f"{name} {one.status} {one.num_tokens} tokens, {one.num_computed_tokens} computed, "
            f"{[len(of) for of in manager.get_block_ids(name)]} blocks"
            for name, one in self.scheduler.requests.items()
        ]
        free = manager.block_pool.get_num_free_blocks()
        return f"no end: {who}, {free} free, {len(self.scheduler.deferred_frees)} to be freed"

    def close(self) -> None:
        """Nothing is held by anybody then."""
        assert self.scheduler.reset_prefix_cache(), "blocks that were not given back"
        self.check_idle()
        self.ours.shutdown()
        self.runner.connector.shutdown()

    def check_idle(self) -> None:
        scheduling, workers = self.ours.scheduling, self.runner.connector._workers
        assert scheduling is not None
        for name in ("_matches", "_told", "_requests", "_starts", "_options", "_spaces"):
            assert not getattr(scheduling, name), (name, getattr(scheduling, name))
        for worker in workers:
            for name in ("_held", "_beside", "_writing", "_new", "_later"):
                assert not getattr(worker, name), (name, getattr(worker, name))
        assert not self.runner.connector._ended, self.runner.connector._ended


# ---- a case ----


def prompts_of(case: Case, chance: random.Random, scale: int) -> list[list[int]]:
    """Many begin alike: with whole texts of others, or with parts."""
    found: list[list[int]] = []
    for _ in range(case["requests"]):
        base = chance.choice(found) if found and chance.random() < 0.7 else []
        kept = base[: chance.randint(0, len(base))] if chance.random() < 0.6 else base
        own = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 60 * scale))]
        found.append((kept + own)[: 200 * scale])
    return found


def serve(engine: Engine, prompts: list[list[int]], prefix: str) -> None:
    """All of them, at times that are drawn; the engine's own cache is reset now and then."""
    chance = engine.random
    left = {f"{prefix}{number}": prompt for number, prompt in enumerate(prompts)}
    while left or engine.scheduler.has_requests() or engine.pending:
        for name in list(left)[: chance.randint(0, 2)]:
            engine.add(name, left.pop(name), chance.randint(1, 24))
        drawn = chance.random()
        if drawn < 0.04:
            engine.counts["reset"] += engine.scheduler.reset_prefix_cache()
        elif drawn < 0.06 and engine.settles():
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.counts["reset while running"] += 1
        elif drawn < 0.5 and engine.case["damage"]:
            engine.counts["damaged"] += damage(engine, chance)
        engine.step()


def pools_in(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob("*.pool"))


def damage(engine: Engine, chance: random.Random) -> bool:
    with CXLPool.open(chance.choice(pools_in(engine.case["folder"])), threads=1) as pool:
        pages = pool.stats()["pages_published"]
        with suppress(Exception):
            engine.damage(pool, chance.randrange(max(1, pages)))
            return True
    return False


def check_answers(engine: Engine) -> None:
    for name, request in engine.requests.items():
        prompt = list(request.prompt_token_ids or [])
        wanted = answer_of(prompt, request.max_tokens)
        found = engine.answers[name]
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        assert found == wanted[: len(found)], (name, found, wanted)
        assert aborted or found == wanted, (name, request.status, found, wanted)
        engine.counts["aborted" if aborted else "served"] += 1


def check_pool(engine: Engine, requests: Iterable[Request]) -> int:
    """What the pool has of each text is right, by every bit; how many tokens that is."""
    scheduling, found = engine.ours.scheduling, 0
    assert scheduling is not None
    for request, pool in product(requests, scheduling.pools):
        hashes = hashes_of(request, scheduling._every, 0)
        keys = block_keys(hashes, engine.runner.block, scheduling.space)
        with pool.match(keys) as hit:
            found += hit.tokens
            if hit:
                engine.check_hit(pool, hit, Text(list(request.all_token_ids)), request.request_id)
    return found


def fetched(pool: CXLPool, sequence: Sequence, layer: int, first: int, count: int) -> Numbers:
    """Rows of blocks [first, count) of a text, as rows_of() has them."""
    heads = pool.layout.of_layer(layer).kv_heads
    memory = torch.full((count - first, heads, BLOCK, 2 * DIM), torch.nan)
    keys, values = halves_of(memory)
    batch = pool.batch([sequence])
    where = (range(count - first), [0, count - first], [first])
    batch.fetch_blocks(layer, keys.numpy(), values.numpy(), *where)
    both = torch.stack([keys, values])  # [K or V, block, head, token, dim]
    return cast(Numbers, both.permute(1, 3, 0, 2, 4).reshape(-1, 2, heads, DIM).numpy())


def run(case: Case, kind: type[Engine] = Engine) -> Told:
    Path(case["folder"]).mkdir(parents=True, exist_ok=True)
    chance, counts = random.Random(case["seed"]), Counter[str]()
    prompts: list[list[int]] = []
    if case["fails"]:
        fail(kind(case, chance))
    for number in range(case["kills"]):
        die(case, kind, random.Random(f"{case['seed']} {number}"))
    for life in range(case["lives"]):
        engine = kind(case, chance)
        prompts = prompts or prompts_of(case, chance, engine.scale)
        if case["kills"] and not life:
            inherit(engine, prompts)
        live(engine, prompts if life == 0 else chance.sample(prompts, len(prompts) // 2))
        counts.update(engine.counts)
        counts[f"loaded in life {life}"] = engine.runner.connector.loaded
    for path in pools_in(case["folder"]):
        with CXLPool.open(path, threads=1) as pool:
            report, stats = pool.admin.check(deep=True), pool.stats()
        assert report["clean"], report["problems"]
        assert stats["pages_held"] == 0, stats
        counts["pages"] += stats["pages_published"]
        counts["pools"] += 1
    return {"counts": dict(counts)}


def fail(engine: Engine) -> None:
    def sample(*_: object) -> list[int]:
        raise ConnectionError("the step has failed")

    vars(engine.runner)["_sample"] = sample
    engine.add("a", [7] * 4 * engine.runner.block, 1)
    with suppress(ConnectionError):
        while True:
            engine.step()
    engine.ours.shutdown()
    engine.runner.connector.shutdown()


def die(case: Case, kind: type[Engine], chance: random.Random) -> None:
    """An engine is killed at any moment, after it has stored some pages; nothing of it is held."""
    enough, later_s = chance.randrange(1, case["requests"]), chance.uniform(0, 0.5)
    process = os.fork()
    if not process:
        serve_for_ever(case, kind, chance)
    with ExitStack() as stack:
        ended, within_s = os.pidfd_open(process), time.monotonic() + WITHIN_S / 2
        stack.callback(os.close, ended)
        pools: dict[str, CXLPool] = {}
        try:
            while sum(pool.stats()["pages_published"] for pool in pools.values()) < enough:
                assert time.monotonic() < within_s, "it stores nothing"
                assert not select.select([ended], [], [], 0)[0]
                for path in {*pools_in(case["folder"])} - pools.keys():
                    pools[path] = stack.enter_context(CXLPool.open(path, threads=1))
            assert not select.select([ended], [], [], later_s)[0]
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for pool in pools.values():
            assert pool.admin.check(deep=True)["clean"]
            assert not pool.stats()["pages_held"]


def serve_for_ever(case: Case, kind: type[Engine], chance: random.Random) -> NoReturn:
    try:
        engine = kind(case, chance)
        prompts = prompts_of(case, random.Random(case["seed"]), engine.scale)
        for number in count():
            serve(engine, prompts, f"{number} of the dead, ")
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def inherit(engine: Engine, prompts: list[list[int]]) -> None:
    """What killed engines have stored of these and of their answers is right, and is found."""
    texts = [prompt + answer_of(prompt, 24) for prompt in prompts]
    requests = [engine.request(f"of the dead {n}", ids, 1) for n, ids in enumerate(texts)]
    found = [check_pool(engine, [one]) for one in requests]
    engine.counts["tokens of the dead"] = sum(found)
    best = found.index(max(found))
    engine.add("heir", texts[best], 1)
    while engine.scheduler.has_requests() or engine.pending:
        engine.step()
    engine.counts["inherited"] = engine.runner.connector.loaded


def live(engine: Engine, prompts: list[list[int]]) -> None:
    case, chance = engine.case, engine.random
    serve(engine, prompts, "a")
    assert engine.scheduler.reset_prefix_cache(), "blocks that were not given back"
    engine.counts["reset"] += 1
    serve(engine, chance.sample(prompts, len(prompts) // 2), "b")
    if not case["damage"]:
        assert not engine.runner.wrong, engine.runner.wrong[:3]
    engine.settle()
    for path in pools_in(case["folder"]):
        with CXLPool.open(path, threads=1) as pool:
            pool.admin.check(deep=True, repair=True)  # takes out what is damaged, and nothing else
    engine.counts["pool tokens"] += check_pool(engine, engine.requests.values())
    check_answers(engine)
    engine.counts["loaded tokens"] = engine.runner.connector.loaded
    engine.counts.update(engine.runner.counts)
    engine.counts["wrong steps"] = len(engine.runner.wrong)
    for worker in engine.runner.connector._workers:
        engine.counts["corrupt"] += worker.requests.failures()["corrupt"]
    engine.close()


def answer(run: Callable[[Case], Told]) -> None:
    """Run the cases on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to stderr
    load_general_plugins()
    for line in sys.stdin:
        faulthandler.dump_traceback_later(WITHIN_S, exit=True)
        try:
            said: object = run(json.loads(line))
        except Exception:
            said = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    answer(run)
