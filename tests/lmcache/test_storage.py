"""The plugin by itself: memory of others, pins, removals, faults, counts; from many threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat, MemoryObj

from cxlkv.adapters.lmcache import form, memory
from cxlkv.adapters.lmcache.storage import LAYERWISE_LOOKUP, CXLStorage
from cxlkv.arrays import leading
from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError

from .conftest import MakeStorage
from .engines import CHUNK, DIM, HEADS, LAYERS, config_of, metadata_of
from .objects import DTYPE, SHAPE, foreign, got, is_right, key, lent, put, room, value, written


def test_what_was_put_is_got(storage: CXLStorage) -> None:
    put(storage, 1, 2)
    one = lent(storage, 1)
    assert torch.equal(one.tensor, value(1))
    assert (one.get_shape(), one.get_dtype(), one.meta.fmt) == (SHAPE, DTYPE, MemoryFormat.KV_2LTD)
    assert (one.get_ref_count(), one.get_num_tokens()) == (1, CHUNK)
    one.ref_count_down()
    assert not one.is_valid()
    assert got(storage, 3) is None
    found = storage.batched_get_blocking([key(2), key(3), key(1)])
    assert [one is None for one in found] == [False, True, False]
    for one in found:
        if one is not None:
            one.ref_count_down()
    assert storage.counting.counts["asked_objects"] == 5
    assert storage.counting.counts["hit_objects"] == 3
    assert storage.batched_get_blocking([]) == []


@pytest.mark.parametrize("memory_of", [None, foreign])
def test_of_texts_in_several_calls_the_beginnings_stay(
    storage: CXLStorage, memory_of: Callable[[int], MemoryObj] | None
) -> None:
    """With chunked prefill LMCache has looked the text up before. Written in place, or copied from
    memory of LMCache's own.
    """
    total, chunks = storage.pool.stats()["pages_total"], 16
    texts = [range(text, text + chunks) for text in range(0, 2 * total, chunks)]
    for text in texts:
        assert storage.batched_contains([key(one) for one in text]) == 0
        for first in range(0, chunks, 4):
            given = text[first : first + 4]
            if memory_of is None:
                put(storage, *given)
                continue
            objects = [memory_of(number) for number in given]
            storage.batched_submit_put_task([key(number) for number in given], objects)
            storage.drain()
    there = [storage.cache.present(storage._keys([key(n) for n in text])) for text in texts]
    assert sum(one.sum() for one in there) > total - 8
    assert all(leading(one) == one.sum() for one in there)


def test_by_layers_a_text_loses_its_last_chunk_first(make_storage: MakeStorage) -> None:
    """With all its layers: without one a chunk is none."""
    storage = make_storage(use_layerwise=True)
    shape, chunks = torch.Size([CHUNK, 2, HEADS * DIM]), 4
    total = storage.pool.stats()["pages_total"]
    texts = [[key(n) for n in range(t, t + chunks)] for t in range(0, total, chunks)]
    for text in texts:
        by_chunk = [one.split_layers(LAYERS) for one in text]
        for layer in range(LAYERS):
            objects = storage.batched_allocate(shape, DTYPE, chunks) or []
            storage.batched_submit_put_task([one[layer] for one in by_chunk], objects)
            for one in objects:
                one.ref_count_down()
            storage.drain()
    for text in texts:
        layers = [layer for one in text for layer in one.split_layers(LAYERS)]
        there = storage.cache.present(storage._keys(layers))
        assert leading(there) == there.sum()


def test_the_first_of_equal_keys_stays(storage: CXLStorage) -> None:
    told: list[CacheEngineKey] = []
    for seed in (1, 2):
        one = written(storage, seed)
        futures = storage.batched_submit_put_task([key(7)], [one], None, told.append)
        one.ref_count_down()
        assert futures is not None
        futures[0].result()
    assert told == [key(7)]
    found = got(storage, 7)
    assert found is not None
    assert torch.equal(found, value(1))


def test_a_request_says_when_its_chunks_make_room(storage: CXLStorage) -> None:
    """Those that it stores and those that it reads; a number that makes no sense is counted."""

    def asked(number: int, priority: object) -> CacheEngineKey:
        said = {"lmcache.cxlkv.priority": priority}
        return CacheEngineKey("m", 1, 0, number, DTYPE, said)

    put(storage, 1, 2)
    one = written(storage, 3)
    storage.batched_submit_put_task([asked(3, 5)], [one])
    one.ref_count_down()
    storage.drain()
    for number, priority in ((2, 7), (1, "high")):
        found = storage.get_blocking(asked(number, priority))
        assert found is not None
        found.ref_count_down()
    given = storage.pool.hotness.published().rows["priority"].tolist()
    assert sorted(given) == [0, 5, 7]
    assert storage.counting.failures["bad_options"] == 1


def test_groups_and_smaller_chunks_keep_their_shapes(storage: CXLStorage) -> None:
    small = torch.Size([2, LAYERS, 3, HEADS * DIM])
    one = written(storage, 1, small)
    storage.batched_submit_put_task([key(1)], [one])
    one.ref_count_down()
    storage.drain()
    found = got(storage, 1)
    assert found is not None
    assert torch.equal(found, value(1, small))

    # Two groups of layers, of other dtypes, as LMCache describes models that have such.
    shapes = [torch.Size([2, 1, CHUNK, 32]), torch.Size([1, 2, CHUNK, 16])]
    dtypes = [torch.bfloat16, torch.float8_e4m3fn]
    metadata = storage.metadata
    metadata.get_shapes = lambda tokens=CHUNK: [
        torch.Size([*shape[:2], tokens, shape[3]]) for shape in shapes
    ]
    metadata.get_dtypes = lambda: dtypes
    (two,) = storage.batched_allocate(shapes, dtypes, 1) or []
    two.get_tensor(0).fill_(3)
    two.get_tensor(1).view(torch.uint8).fill_(5)
    storage.batched_submit_put_task([key(2)], [two])
    two.ref_count_down()
    storage.drain()
    found = lent(storage, 2)
    assert (found.get_shapes(), found.get_dtypes()) == (shapes, dtypes)
    assert (found.get_tensor(0) == 3).all()
    assert (found.get_tensor(1).view(torch.uint8) == 5).all()
    found.ref_count_down()
    assert storage.get_blocking(key(1)) is None  # a chunk of one group is not what is wanted now
    assert storage.counting.failures["mismatch"] == 1
    assert not storage.contains(key(1))


def test_others_memory_is_copied(storage: CXLStorage) -> None:
    objects = [foreign(1), foreign(2, slack=100)]
    storage.batched_submit_put_task([key(1), key(2)], objects)
    storage.drain()
    for one in objects:
        one.tensor.zero_()
        assert one.get_ref_count() == 1
    assert is_right(storage, 1)
    assert is_right(storage, 2)
    assert storage.counting.counts["copied_objects"] == 2


def test_what_was_read_can_be_put_under_another_key(storage: CXLStorage) -> None:
    put(storage, 1)
    one = lent(storage, 1)
    storage.batched_submit_put_task([key(2)], [one])
    storage.drain()
    one.ref_count_down()
    found = got(storage, 2)
    assert found is not None
    assert torch.equal(found, value(1))


def test_what_is_not_served_is_counted(storage: CXLStorage) -> None:
    other = foreign(1)
    other.meta.fmt = MemoryFormat.HS_TD
    storage.batched_submit_put_task([key(1), key(2)], [BytesBufferMemoryObj(b"packed"), other])
    storage.drain()
    assert storage.batched_contains([key(1)]) == storage.batched_contains([key(2)]) == 0
    assert storage.counting.failures["unsupported"] == 2
    assert storage.allocate(torch.Size([2, LAYERS, 2 * CHUNK, HEADS * DIM]), DTYPE) is None
    assert storage.counting.failures["large"] == 1
    one = written(storage, 3)
    one.meta.shapes = [SHAPE, SHAPE]  # described otherwise than it was allocated
    one.meta.dtypes = [DTYPE, DTYPE]
    storage.batched_submit_put_task([key(3)], [one])
    storage.drain()
    one.ref_count_down()
    assert not storage.contains(key(3))
    assert storage.counting.failures["unsupported"] == 3


def test_an_object_of_another_form_is_a_miss(storage: CXLStorage) -> None:
    """Under our key, by whatever error: LMCache never gets it."""
    size = SHAPE.numel() * DTYPE.itemsize
    wrong = [
        form.Form("KV_T2D", ("bfloat16",), (tuple(SHAPE),)),
        form.Form("KV_2LTD", ("float16",), (tuple(SHAPE),)),
        form.Form("KV_2LTD", ("bfloat16",), ((2, LAYERS * 2, CHUNK // 2, HEADS * DIM),)),
        form.Form("KV_2LTD", ("nonsense",), (tuple(SHAPE),)),
        form.Form("KV_2LTD", ("bfloat16",), ((2, LAYERS, CHUNK - 1, HEADS * DIM),)),
        form.Form("NONSENSE", ("bfloat16",), (tuple(SHAPE),)),
        form.Form("KV_2LTD", ("bfloat16",), ((SHAPE.numel(),),)),
    ]
    for number, one in enumerate(wrong):
        whole = [np.zeros(size, np.uint8), form.encode(one, size)]
        assert storage.pool.put_batch(storage._keys([key(number)]), [whole]).all()
        assert got(storage, number) is None
    assert storage.pool.put_batch(storage._keys([key(99)]), [np.zeros(size, np.uint8)]).all()
    assert got(storage, 99) is None
    assert storage.counting.failures["mismatch"] == len(wrong) + 1


def put_that_waits(storage: CXLStorage) -> Callable[[], None]:
    """Put the first object; puts wait from now on, until what is returned is called."""
    going = threading.Event()
    storage._puts.submit(going.wait)
    one = written(storage, 1)
    storage.batched_submit_put_task([key(1)], [one])
    one.ref_count_down()
    return going.set


def test_puts_that_are_still_to_come(storage: CXLStorage) -> None:
    go_on = put_that_waits(storage)
    assert storage.exists_in_put_tasks(key(1))
    assert not storage.contains(key(1))
    again = written(storage, 2)
    assert storage.batched_submit_put_task([key(1)], [again]) is None
    again.ref_count_down()
    go_on()
    storage.drain()
    assert not storage.exists_in_put_tasks(key(1))
    assert is_right(storage, 1)


def test_removed_before_it_was_put(storage: CXLStorage) -> None:
    go_on = put_that_waits(storage)
    assert storage.remove(key(1))
    assert not storage.remove(key(2))
    go_on()
    storage.drain()
    assert not storage.contains(key(1))


def test_closing_ends_what_is_being_put(make_storage: MakeStorage) -> None:
    storage = make_storage()
    go_on = put_that_waits(storage)
    go_on()
    storage.close()
    assert make_storage().contains(key(1))


def test_after_closing_everything_is_a_miss(storage: CXLStorage) -> None:
    put(storage, 1)
    storage.close()
    storage.close()
    assert got(storage, 1) is None
    assert not storage.contains(key(1), pin=True)
    assert not storage.pin(key(1))
    assert not storage.unpin(key(1))
    assert not storage.remove(key(1))
    assert storage.allocate(SHAPE, DTYPE) is None
    assert storage.batched_submit_put_task([key(1)], [foreign(1)]) is None
    assert not storage.exists_in_put_tasks(key(1))
    storage.drain()


def test_closed_with_objects_out(storage: CXLStorage, where: Path) -> None:
    """Their memory stays readable, and the process's end gives it back."""
    put(storage, 1)
    one = lent(storage, 1)
    storage.close()
    assert torch.equal(one.tensor, value(1))
    one.ref_count_down()
    storage.pool.close()


def test_pins_are_counted(storage: CXLStorage) -> None:
    put(storage, 1)
    assert storage.pin(key(1))
    assert storage.contains(key(1), pin=True)
    assert not storage.pin(key(2))
    assert storage.unpin(key(1))
    assert storage.allocator.out == 1
    one = lent(storage, 1)  # the one that is pinned
    assert storage.allocator.out == 1
    assert storage.unpin(key(1))
    assert not storage.unpin(key(1))
    assert torch.equal(one.tensor, value(1))
    one.ref_count_down()
    assert storage.allocator.out == 0
    assert storage.allocator.pinned == {}


def test_removed_while_it_is_read_or_pinned(storage: CXLStorage) -> None:
    put(storage, 1, 2)
    one = lent(storage, 1)
    storage.pin(key(2))
    storage.pin(key(2))
    assert storage.remove(key(1))
    assert not storage.remove(key(1))
    assert not storage.remove(key(2), force=False)
    assert storage.contains(key(2))
    assert storage.batched_remove([key(1), key(2)]) == 1
    assert storage.allocator.pinned == {}
    assert torch.equal(one.tensor, value(1))
    put(storage, 1)
    one.ref_count_down()
    assert is_right(storage, 1)


def test_prefixes_of_several(storage: CXLStorage) -> None:
    put(storage, 1, 2, 4)
    keys = [key(number) for number in (1, 2, 3, 4)]
    assert storage.batched_contains(keys) == 2
    assert storage.batched_contains(keys, pin=True) == 2
    assert storage.allocator.out == 2
    assert [storage.unpin(one) for one in keys] == [True, True, False, False]
    assert asyncio.run(storage.batched_async_contains("a", keys, True)) == 2
    found = asyncio.run(storage.batched_get_non_blocking("a", keys))
    assert len(found) == storage.allocator.out == 2
    for one in found:
        one.ref_count_down()


def test_a_layer_that_is_gone_is_an_error(make_storage: MakeStorage) -> None:
    """LMCache would go on without it, and leave its place in the engine's memory as it was."""
    storage = make_storage(use_layerwise=True)
    shape = torch.Size([CHUNK, 2, HEADS * DIM])
    keys = [one.split_layers(LAYERS)[0] for one in (key(1), key(2))]
    objects = storage.batched_allocate(shape, DTYPE, 2) or []
    storage.batched_submit_put_task(keys, objects)
    for one in objects:
        one.ref_count_down()
    storage.drain()
    for one in asyncio.run(storage.batched_get_non_blocking(LAYERWISE_LOOKUP, keys)):
        assert one.meta.fmt == MemoryFormat.KV_T2D
        one.ref_count_down()
    assert storage.remove(keys[1])
    with pytest.raises(LookupError, match="a chunk's layer is gone"):
        asyncio.run(storage.batched_get_non_blocking(LAYERWISE_LOOKUP, keys))
    assert storage.allocator.out == 0
    assert not storage.contains(keys[0])  # the first layer stands for all


def fill(storage: CXLStorage) -> list[MemoryObj]:
    """Objects that nobody has published, in all of the pool."""
    total = storage.pool.stats()["pages_total"]
    made = storage.batched_allocate(SHAPE, DTYPE, total, eviction=True, busy_loop=False)
    assert made is not None
    return made


def test_no_room_is_none_at_once_or_after_a_second(
    storage: CXLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = fill(storage)
    monkeypatch.setattr(memory, "WAIT_S", 0.1)
    assert storage.allocate(SHAPE, DTYPE, busy_loop=False) is None
    assert storage.allocate(SHAPE, DTYPE, busy_loop=True) is None
    assert storage.counting.failures["full"] == 2
    storage.batched_submit_put_task([key(1)], [foreign(1)])
    storage.drain()
    assert storage.counting.failures["full"] == 3
    for one in held:
        one.ref_count_down()
    assert storage.allocator.out == 0


def test_who_waits_for_room_gets_it_when_it_comes(
    storage: CXLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = fill(storage)
    monkeypatch.setattr(memory, "WAIT_S", 60.0)
    monkeypatch.setattr(memory, "LOOK_S", 60.0)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(storage.allocate, SHAPE, DTYPE)
        held.pop().ref_count_down()
        one = waiting.result(30)
    assert one is not None
    for each in [one, *held]:
        each.ref_count_down()


def test_without_eviction_a_full_pool_is_full(storage: CXLStorage) -> None:
    total = storage.pool.stats()["pages_total"]
    put(storage, *range(total))
    assert storage.allocate(SHAPE, DTYPE, eviction=False, busy_loop=False) is None
    assert storage.counting.failures["full"] == 0
    room(storage).ref_count_down()


def test_what_lmcache_writes_to_after_it_was_published_is_found(
    storage: CXLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of so many objects is verified again when it is given back; all are, by every reader in
    another process."""
    monkeypatch.setattr(memory, "AUDIT_EVERY", 1)
    put(storage, 1, 2)
    one, two = lent(storage, 1), lent(storage, 2)
    with torch.inference_mode():
        one.tensor[1, 2, 3] = 0
    for each in (one, two):
        each.ref_count_down()
    storage.drain()
    assert storage.counting.failures["changed"] == 1
    assert not storage.contains(key(1))
    assert is_right(storage, 2)


def test_features_that_are_not_served_are_refused(where: Path) -> None:
    with pytest.raises(UnsupportedError, match="enable_blending"):
        CXLStorage(config=config_of(where, enable_blending=True), metadata=metadata_of())
    with pytest.raises(BadArgumentError, match="write storage_plugins"):
        CXLStorage(config=config_of(where, form="staged"), metadata=metadata_of())
    scheduler = metadata_of(role="scheduler")
    CXLStorage(config=config_of(where, form="staged"), metadata=scheduler).close()


def test_anything_in_any_order(make_storage: MakeStorage) -> None:
    """Threads as LMCache has them, on few keys and a pool of few pages; at the end nothing is
    held."""
    seed = Random().getrandbits(32)
    print("seed", seed)
    storage = make_storage(capacity="8MiB")
    wrong: list[object] = []

    def work(random: Random) -> None:
        pinned: list[int] = []
        for _ in range(150):
            number = random.randrange(12)
            what = random.choice("put put get get many pin unpin remove".split())
            if what == "put" and (one := storage.allocate(SHAPE, DTYPE, busy_loop=False)):
                one.tensor.copy_(value(number))
                storage.batched_submit_put_task([key(number)], [one])
                one.ref_count_down()
            elif what == "get" and (found := got(storage, number)) is not None:
                if not torch.equal(found, value(number)):
                    wrong.append(number)
            elif what == "many":
                keys = [key(number + more) for more in range(4)]
                for more, leased in enumerate(storage.batched_get_blocking(keys)):
                    if leased is not None:
                        if not torch.equal(leased.tensor, value(number + more)):
                            wrong.append((number, more))
                        leased.ref_count_down()
            elif what == "pin" and storage.contains(key(number), pin=True):
                pinned.append(number)
            elif what == "unpin" and pinned:
                storage.unpin(key(pinned.pop()))
            elif what == "remove":
                storage.remove(key(number), force=random.random() < 0.5)
        for number in pinned:
            storage.unpin(key(number))

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, Random(seed + index)) for index in range(4)]:
            done.result()
    storage.drain()
    storage.allocator.unpin_all(list(storage.allocator.pinned))
    assert wrong == []
    assert storage.allocator.out == 0
    failures = {name: count for name, count in storage.counting.failures.items() if count}
    assert set(failures) <= {"full"}


def test_a_file_that_is_cut_short_kills_nobody(make_storage: MakeStorage, tmp_path: Path) -> None:
    """What lies in its memory is gone: whoever touched it would die by a signal."""
    folder = tmp_path / "short"
    folder.mkdir()
    storage = make_storage(folder)
    put(storage, 1)
    one = room(storage)
    os.truncate(next(folder.glob("*.pool")), 1 << 20)
    for _ in range(2):
        assert got(storage, 1) is None
        assert storage.allocate(SHAPE, DTYPE, busy_loop=False) is None
        storage.batched_submit_put_task([key(2), key(3)], [one, foreign(3)])
        storage.drain()
        assert not storage.pin(key(1))
        assert not storage.contains(key(2))
    one.ref_count_down()
    assert storage.counting.failures["pool"] > 0
    assert storage.allocator.out == 0
    for _ in range(2):
        storage.close()
    with pytest.raises(CXLKVError, match="short"):
        make_storage(folder)
