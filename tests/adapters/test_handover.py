"""Prefill in one process, decode in another: the same tokens, deaths, and what is refused.

The other processes are real ones (tests/support/handover_worker.py), each with its own copy of the
model.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cxlkv import Budget, CXLPool, Sequence, _core
from cxlkv.adapters.transformers import CXLCache, CXLRequests, hand_over, layout_of, take_over
from cxlkv.adapters.transformers.handover import HEADER, LENGTH
from cxlkv.errors import (
    BadArgumentError,
    CXLKVError,
    GeometryError,
    PoolFullError,
    StaleError,
    UnevenError,
    UnsupportedError,
)

from ..conftest import audit
from ..support.forked import Forked, Nursery
from ..support.handover_worker import LEASE_S, Words, decode, model_of, prefill
from ..support.lengths import matrix
from ..support.sharing import shared
from ..support.small_models import PAGE_TOKENS, generate, prompts, run
from .test_transformers_models import all_free, dynamic, make

LENGTHS = (103, 70, 5)  # 102, 69 and 4 tokens are read: two rows end within a page
ONE = (103,)
LLAMA = ["llama", "float32"]
GREEDY: Words = {}
MODES: dict[str, Words] = {
    "greedy": GREEDY,
    "beams": {"num_beams": 4},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


class Process(Forked):
    """A worker: ask() it, or kill it."""

    def __init__(self, link: socket.socket, log: Path):
        super().__init__(link, log)
        self._lines = link.makefile("rw")

    def tell(self, do: str, **words: object) -> None:
        print(json.dumps({"do": do, **words}), file=self._lines, flush=True)

    def hear(self) -> Words:
        line = self._lines.readline()
        assert line, self.log.read_text()
        return cast(Words, json.loads(line))

    def ask(self, do: str, **words: object) -> Words:
        self.tell(do, **words)
        return self.hear()


Start = Callable[[], Process]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a worker."""
    command = [sys.executable, "-m", "tests.support.handover_worker"]
    with Nursery(command, tmp_path_factory.mktemp("workers"), Process) as nursery:
        yield partial(nursery.begin, {})


@pytest.fixture(scope="module")
def worker(start: Start) -> Process:
    """Process B, which lives through all tests."""
    return start()


@pytest.fixture
def other(worker: Process, shm_path: Path) -> Iterator[Process]:
    yield worker
    assert worker.ask("leave") == {}


@pytest.fixture
def path(shm_path: Path) -> str:
    return str(shm_path)


def make_pool(path: str, model: PreTrainedModel) -> CXLPool:
    layout = layout_of(model, PAGE_TOKENS)
    return CXLPool.create(path, layout=layout, capacity="16MiB", threads=1)


def make_shared(path: str, model: PreTrainedModel, host: int) -> CXLPool:
    """For hosts 0 to 2, seen by this one."""
    layout = layout_of(model, PAGE_TOKENS)
    return shared(path, layout, "16MiB", hosts=3, host=host)


@pytest.fixture
def pool(path: str) -> Iterator[CXLPool]:
    """For LLAMA; clean in the end."""
    with make_pool(path, model_of(*LLAMA)) as made:
        yield made
        audit(made)


def alone(model: PreTrainedModel, lengths: tuple[int, ...], mode: Words) -> list[list[int]]:
    """What one process makes of the prompts."""
    with make_pool("anonymous:", model) as pool:
        return decode(model, prefill(pool, model, lengths), lengths, mode)


def overwrite(pool: CXLPool, pages: int = 1 << 20) -> None:
    """All pages that are free get other numbers, or those of so many pages' tokens."""
    layout, sequences = pool.layout, list[Sequence]()
    dtype: torch.dtype = getattr(torch, layout.dtype)
    k = torch.full((10 * PAGE_TOKENS, layout.kv_heads, layout.head_dim), 9, dtype=dtype)
    v = None if layout.values == "key_prefix" else k[..., : layout.value_head_dim]
    with suppress(PoolFullError):
        for _ in range(0, pages, 10):
            new = [pool.sequence() for _ in range(10)]
            sequences += new
            for layer in range(layout.layers):
                starts = np.arange(0, len(k) + 1, PAGE_TOKENS, dtype=np.int32)
                pool.batch(new).append(layer, k, v, starts)
    for sequence in sequences:
        sequence.release()


@pytest.mark.parametrize(
    "copies", [pickle.dumps, copy.copy, lambda one: torch.save(one, io.BytesIO())]
)
def test_a_cache_is_handed_over_and_not_pickled(
    pool: CXLPool, copies: Callable[[object], object]
) -> None:
    cache = prefill(pool, model_of(*LLAMA), ONE)
    for one in (cache, cache.layers[0]):
        with pytest.raises(UnsupportedError, match=r"copied: .*hand_over\(\) makes bytes of"):
            copies(one)
    cache.release()


# ---- the same tokens ----


@matrix(
    name=["llama", "gemma3", "gpt-oss", "deepseek-v3"],
    dtype=["float32", "bfloat16"],
    mode=MODES,
    times=2,
)
def test_another_process_makes_the_same_tokens(
    other: Process, path: str, name: str, dtype: str, mode: str
) -> None:
    """It goes on after this one has let go of its rows and written over all that is free."""
    model = model_of(name, dtype)
    with make_pool(path, model) as pool:
        cache = prefill(pool, model, LENGTHS)
        data = hand_over(cache, model)
        words: Words = {"model": [name, dtype], "name": "taken"}
        taken = other.ask("take", path=path, data=data.hex(), **words)
        assert taken == {"tokens": LENGTHS[0] - 1}
        cache.release()
        overwrite(pool)
        found = other.ask("decode", lengths=LENGTHS, mode=MODES[mode], **words)
        other.ask("release", name="taken")
        assert all_free(pool)
        audit(pool)
    assert found["ids"] == alone(model, LENGTHS, MODES[mode])
    if dtype == "float32":
        ids, mask = prompts(LENGTHS)
        wanted = generate(model, ids, mask, dynamic(model), **MODES[mode])
        assert found["ids"] == wanted.tolist()


def test_under_a_budget(other: Process, pool: CXLPool) -> None:
    model = model_of(*LLAMA)
    cache = prefill(pool, model, ONE)
    data = hand_over(cache, model).hex()
    other.ask("take", path=pool.path, data=data, model=LLAMA, name="few", mass=0.3)
    found = other.ask("decode", model=LLAMA, name="few", lengths=ONE, mode=GREEDY)
    other.ask("release", name="few")
    cache.budget = Budget(mass=0.3)
    assert found["ids"] == decode(model, cache, ONE, GREEDY) != alone(model, ONE, GREEDY)
    cache.release()


def test_several_go_on_from_one_and_so_does_it(other: Process, start: Start, pool: CXLPool) -> None:
    model, third = model_of(*LLAMA), start()
    cache = prefill(pool, model, LENGTHS)
    held = pool.stats()["pages_held"]
    data = hand_over(cache, model)
    assert hand_over(cache, model) == data
    tails = pool.stats()["pages_held"] - held
    assert tails == 2, "an open tail is a page, of the rows that have one"
    for process, name in ((other, "one"), (other, "two"), (third, "three")):
        process.ask("take", path=pool.path, data=data.hex(), model=LLAMA, name=name)
    wanted = alone(model, LENGTHS, GREEDY)
    assert decode(model, cache, LENGTHS, GREEDY) == wanted
    for process, name in ((other, "one"), (other, "two"), (third, "three")):
        found = process.ask("decode", model=LLAMA, name=name, lengths=LENGTHS, mode=GREEDY)
        assert found["ids"] == wanted
    cache.release()
    other.ask("release", name="one")
    other.ask("release", name="two")
    third.kill()
    assert pool.stats()["pages_held"] == 0


def test_rows_that_are_all_padded(pool: CXLPool) -> None:
    """The longest one has left the batch: how far that was goes along with the others."""
    model = model_of(*LLAMA)
    cache = prefill(pool, model, LENGTHS)
    cache.batch_select_indices(torch.tensor([1, 2]))
    taken = take_over(hand_over(cache, model), pool, model)
    cache.release()
    assert (taken.get_seq_length(), len(taken.sequences[0])) == (LENGTHS[0] - 1, LENGTHS[1] - 1)
    ids, mask = prompts(LENGTHS)
    found = generate(model, ids[1:], mask[1:], taken).tolist()
    assert found == alone(model, LENGTHS, GREEDY)[1:]
    taken.release()


def test_what_shared_prefixes_have_read_is_handed_over_within_the_block(pool: CXLPool) -> None:
    """A reader that knows most of the prompt reads the rest; at its end only full pages stay."""
    model = model_of(*LLAMA)
    requests, wanted = CXLRequests(pool, model), alone(model, ONE, GREEDY)
    ids, mask = (each[:, :-1] for each in prompts(ONE))
    for _ in range(2):
        with requests.begin(ids, mask) as cache:
            generate(model, ids, mask, cache, max_new_tokens=1)
            data = hand_over(cache, model)
            taken = take_over(data, pool, model)
        assert decode(model, taken, ONE, GREEDY) == wanted
        taken.release()
        with pytest.raises(StaleError):
            take_over(data, pool, model)
    assert pool.stats()["pages_published"] == (ONE[0] - 1) // PAGE_TOKENS
    assert pool.stats()["pages_held"] == 0


def test_handed_on_and_back(other: Process, pool: CXLPool) -> None:
    """A reads, B takes over, A lets go and takes over from B what it once had."""
    model = model_of(*LLAMA)
    cache = prefill(pool, model, ONE)
    first = hand_over(cache, model).hex()
    other.ask("take", path=pool.path, data=first, model=LLAMA, name="b")
    back = take_over(bytes.fromhex(first), pool, model)
    cache.release()
    again = take_over(hand_over(back, model), pool, model)
    back.release()
    other.ask("release", name="b")
    assert decode(model, again, ONE, GREEDY) == alone(model, ONE, GREEDY)
    again.release()
    assert all_free(pool)


# ---- whoever is killed ----


def test_a_reader_that_was_killed_before_is_named_and_after_is_not_missed(
    other: Process, start: Start, pool: CXLPool
) -> None:
    model = model_of(*LLAMA)
    wanted = alone(model, ONE, GREEDY)
    for before in (True, False):
        reader = start()
        read = reader.ask("prefill", path=pool.path, model=LLAMA, lengths=ONE, name="a")
        if before:
            reader.kill()
        taken = other.ask("take", path=pool.path, data=read["data"], model=LLAMA, name="b")
        if before:
            assert taken["error"] == "StaleError"
            assert "was freed" in str(taken["text"])
        reader.kill()
        assert all_free(pool) == before
    overwrite(pool)
    found = other.ask("decode", model=LLAMA, name="b", lengths=ONE, mode=GREEDY)
    assert found["ids"] == wanted
    other.ask("release", name="b")
    assert all_free(pool)


def test_one_that_is_killed_while_it_goes_on_leaves_the_rest_as_it_was(
    other: Process, start: Start, pool: CXLPool
) -> None:
    model = model_of(*LLAMA)
    cache = prefill(pool, model, ONE)
    data = hand_over(cache, model).hex()
    held = pool.stats()["pages_held"]
    first = start()
    first.ask("take", path=pool.path, data=data, model=LLAMA, name="b")
    first.tell("decode_on", model=LLAMA, name="b")
    while cast(int, first.hear()["tokens"]) < 2 * ONE[0]:
        assert pool.stats()["pages_held"] >= held
    first.kill()
    assert pool.stats()["pages_held"] == held
    other.ask("take", path=pool.path, data=data, model=LLAMA, name="b")
    cache.release()
    found = other.ask("decode", model=LLAMA, name="b", lengths=ONE, mode=GREEDY)
    assert found["ids"] == alone(model, ONE, GREEDY)
    other.ask("release", name="b")
    assert all_free(pool)


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_host_that_dies_takes_nothing_along(
    other: Process, start: Start, path: str, dies: str
) -> None:
    """Its pages are nobody's to write until it comes back, and those that others read not even
    then."""
    model = model_of(*LLAMA)
    make_shared(path, model, host=2).close()
    reader = start()
    words: Words = {"path": path, "model": LLAMA}
    read = reader.ask("prefill", host=0, lengths=LENGTHS, name="a", **words)
    if dies == "before":
        reader.kill()
    taken = other.ask("take", host=1, data=read["data"], name="b", **words)
    assert taken == {"tokens": LENGTHS[0] - 1}
    reader.kill()
    with CXLPool.open(path, threads=1, host=0, lease_s=LEASE_S) as back:
        overwrite(back)
        audit(back)
    found = other.ask("decode", model=LLAMA, name="b", lengths=LENGTHS, mode=GREEDY)
    assert found["ids"] == alone(model, LENGTHS, GREEDY)
    other.ask("release", name="b")
    with CXLPool.open(path, threads=1, host=2, lease_s=LEASE_S) as pool:
        with pytest.raises(StaleError, match="of another host was freed"):
            take_over(bytes.fromhex(str(read["data"])), pool, model)
        audit(pool)


def test_a_process_that_dies_on_a_host_that_lives(other: Process, start: Start, path: str) -> None:
    model = model_of(*LLAMA)
    words: Words = {"path": path, "model": LLAMA}
    with make_shared(path, model, host=0) as pool:
        reader = start()
        read = reader.ask("prefill", host=0, lengths=ONE, name="a", **words)
        reader.kill()
        assert pool.stats()["pages_held"] == 0, "who looks gives the dead one's pages back"
        taken = other.ask("take", host=1, data=read["data"], name="b", **words)
        assert taken["error"] == "StaleError"
        audit(pool)


def test_between_living_hosts(other: Process, path: str) -> None:
    """To and fro: what host 1 made of host 0's prompt goes back, after host 0 has let go of it."""
    model = model_of(*LLAMA)
    words: Words = {"path": path, "model": LLAMA, "host": 1}
    with make_shared(path, model, host=0) as pool:
        cache = prefill(pool, model, LENGTHS)
        other.ask("take", data=hand_over(cache, model).hex(), name="b", **words)
        cache.release()
        overwrite(pool, 1000)  # all of them, and host 1 would have none to go on
        found = other.ask("decode", model=LLAMA, name="b", lengths=LENGTHS, mode=GREEDY)
        assert found["ids"] == alone(model, LENGTHS, GREEDY)
        back = other.ask("hand", model=LLAMA, name="b")
        ids = torch.tensor(cast("list[list[int]]", found["ids"]))
        cache = take_over(bytes.fromhex(str(back["data"])), pool, model)
        other.ask("release", name="b")
        mask = torch.cat([prompts(LENGTHS)[1], torch.ones(len(ids), 16, dtype=torch.int64)], dim=1)
        more = generate(model, ids, mask, cache)
        with make_pool("anonymous:", model) as alone_pool:
            wanted = generate(
                model, *prompts(LENGTHS), CXLCache(alone_pool, model), max_new_tokens=32
            )
        assert torch.equal(more, wanted)
        cache.release()
        audit(pool)


# ---- what is refused ----


def test_rows_that_were_released(pool: CXLPool) -> None:
    model = model_of(*LLAMA)
    cache = prefill(pool, model, LENGTHS)
    data = hand_over(cache, model)
    cache.sequences[1].release()  # one row is enough, and then none is held
    held = pool.stats()["pages_held"]
    for _ in range(2):
        with pytest.raises(StaleError, match=r"was freed .*must keep its sequence"):
            take_over(data, pool, model)
        assert pool.stats()["pages_held"] == held
    cache.release()
    assert all_free(pool)


def test_a_cache_that_grew_since(pool: CXLPool) -> None:
    """The first hand-over ends with the second one's tail; a fork keeps what it had."""
    model = model_of(*LLAMA)
    cache = prefill(pool, model, ONE)
    kept = cache.fork()
    first, kept_data = hand_over(cache, model), hand_over(kept, model)
    wanted = alone(model, ONE, GREEDY)
    decode(model, cache, ONE, GREEDY)
    assert decode(model, take_over(first, pool, model), ONE, GREEDY) == wanted
    hand_over(cache, model)
    with pytest.raises(StaleError):
        take_over(first, pool, model)
    assert decode(model, take_over(kept_data, pool, model), ONE, GREEDY) == wanted


def test_windows_that_went_on_since(path: str) -> None:
    """A hand-over is good as long as its window's pages are there; then it is stale."""
    model = model_of("gemma3", "float32")
    with make_pool(path, model) as pool:
        cache = CXLCache(pool, model)
        cache.rewind_tokens = 8
        ids, mask = prompts(ONE)
        generate(model, ids[:, :-1], mask[:, :-1], cache, max_new_tokens=1)
        data, wanted, taken = hand_over(cache, model), alone(model, ONE, GREEDY), 0
        with suppress(StaleError):
            for _ in range(20):
                again = take_over(data, pool, model)
                assert decode(model, again, ONE, GREEDY) == wanted
                again.release()
                taken += 1
                run(model, torch.tensor([[5]]), cache)
        assert 1 < taken < 20
        cache.release()
        assert all_free(pool)
        audit(pool)


def test_another_model(pool: CXLPool) -> None:
    model = model_of(*LLAMA)
    cache = prefill(pool, model, ONE)
    data = hand_over(cache, model)
    retrained = make("llama")
    with torch.no_grad():
        next(retrained.parameters()).view(-1)[-1].add_(1e-3)
    other_config = make("llama", rms_norm_eps=1e-3)
    other_dtype = make("llama").to(torch.bfloat16)  # type: ignore[arg-type]
    held = pool.stats()["pages_held"]
    for changed in (retrained, other_config):
        with pytest.raises(BadArgumentError, match="by another model: config, dtype or weights"):
            take_over(data, pool, changed)
    for changed in (other_dtype, make("llama", num_hidden_layers=2)):
        with pytest.raises((GeometryError, BadArgumentError)):
            take_over(data, pool, changed)
    assert pool.stats()["pages_held"] == held
    take_over(data, pool, make("llama")).release()
    cache.release()


def test_another_pool_and_things_that_are_no_hand_over(pool: CXLPool) -> None:
    model = model_of(*LLAMA)
    cache = prefill(pool, model, ONE)
    data = hand_over(cache, model)
    with (
        make_pool("anonymous:", model) as elsewhere,
        pytest.raises(StaleError, match="of another pool"),
    ):
        take_over(data, elsewhere, model)
    with pytest.raises(BadArgumentError, match=r"handle of a sequence: CXLCache\(pool, model, "):
        take_over(cache.sequences[0].handle, pool, model)
    with pytest.raises(BadArgumentError, match="bytes, not str"):
        take_over("text", pool, model)  # type: ignore[arg-type]
    with pytest.raises(StaleError, match="has version 7, this cxlkv reads 2"):
        take_over(sealed(data[:4] + struct.pack("<I", 7) + data[8:-4]), pool, model)


def test_nothing_to_hand_over(pool: CXLPool) -> None:
    model = model_of(*LLAMA)
    with pytest.raises(BadArgumentError, match="the cache is empty"):
        hand_over(CXLCache(pool, model), model)
    cache = prefill(pool, model, ONE)
    with pytest.raises(GeometryError):
        hand_over(cache, make("llama", num_hidden_layers=2))
    cache.sequences[0].append(0, torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))
    with pytest.raises(UnevenError):
        hand_over(cache, model)
    cache.release()


def test_a_full_pool_has_no_page_for_a_tail(pool: CXLPool) -> None:
    model = model_of(*LLAMA)
    cache = prefill(pool, model, ONE)
    rest = pool.pages.alloc(pool.stats()["pages_free"])
    with pytest.raises(PoolFullError):
        hand_over(cache, model)
    pool.pages.free(rest)
    assert decode(model, take_over(hand_over(cache, model), pool, model), ONE, GREEDY)


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def test_cut_or_changed_anywhere(pool: CXLPool) -> None:
    model = model_of(*LLAMA)
    cache = prefill(pool, model, (21, 6))
    data = hand_over(cache, model)
    held = pool.stats()["pages_held"]
    changed = [data[:end] for end in range(len(data))] + [data + b"\0"]
    changed += [
        data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))
    ]
    for bad in changed:
        with pytest.raises((StaleError, BadArgumentError)) as caught:
            take_over(bad, pool, model)
        assert "hand-over" in str(caught.value) or bad.startswith(b"CKVH")
    assert pool.stats()["pages_held"] == held
    cache.release()


def test_forged_ones_are_refused_or_read_as_what_they_name(pool: CXLPool, seed: int) -> None:
    """Any bytes changed, all checksums right: no crash, no page that stays held, no page lost."""
    random, model = Random(seed), model_of(*LLAMA)
    cache = prefill(pool, model, (21, 6))
    data = hand_over(cache, model)
    held, refused, taken = pool.stats()["pages_held"], 0, 0
    for _ in range(500):
        try:
            found = take_over(forged(data, random), pool, model)
        except CXLKVError:
            refused += 1
        else:
            taken += 1
            for row in found.sequences:
                for layer in range(pool.layout.layers):
                    if len(row):
                        row.fetch(layer)
            found.release()
        assert pool.stats()["pages_held"] == held
    assert refused > 150
    assert taken > 5, "some of the changes are harmless, as those of the number of tokens"
    assert decode(model, cache, (21, 6), GREEDY) == alone(model, (21, 6), GREEDY)
    cache.release()


def forged(data: bytes, random: Random) -> bytes:
    """One or two places changed in a row's handle, or in the header behind the version."""
    body = bytearray(data[:-4])
    for _ in range(random.randrange(1, 3)):
        at = random.choice((8, 12, *range(HEADER.size, len(body) - 8, 4)))
        old = struct.unpack_from("<I", body, at)[0]
        new = random.choice((0, 1, old + 1, old - 1, old ^ 1 << random.randrange(32), 1 << 31))
        struct.pack_into("<I", body, at, new & 0xFFFFFFFF)
    at = HEADER.size
    while at + LENGTH.size <= len(body):  # the handles' own checksums
        (size,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size + size
        if not LENGTH.size < size <= at <= len(body):
            break
        inner = bytes(body[at - size : at - 4])
        struct.pack_into("<I", body, at - 4, _core.crc32c(inner))
    return sealed(bytes(body))
