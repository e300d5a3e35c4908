"""Chunks in a pool of small slots, of which each takes as many as it needs, with LMCache's own
engine around it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from cxlkv import KVLayout, ObjectPool
from cxlkv.adapters.lmcache.form import bytes_of
from cxlkv.adapters.lmcache.names import name_of
from cxlkv.adapters.lmcache.storage import CXLStorage
from cxlkv.errors import GeometryError

from ..support.damaging import change_byte
from .conftest import MakeEngine
from .engines import CHUNK, OBJECT_BYTES, Engine, config_of, metadata_of, text

SLOT = 512
COUNT = 5 * CHUNK + 7
FORMS = pytest.mark.parametrize("form", ["tier", "staged"])


@pytest.fixture
def place(where: Path) -> Path:
    """A pool of a user's, of larger objects than LMCache will store."""
    made = where / "slots.pool"
    layout = KVLayout.objects("64KiB", slot=SLOT)
    ObjectPool.create(made, layout=layout, capacity="8MiB").close()
    return made


def made(
    make_engine: MakeEngine,
    place: Path,
    form: str,
    layerwise: bool = False,
    quota: int | None = None,
) -> Engine:
    return make_engine(
        place,
        form=form,
        use_layerwise=layerwise,
        save_unfull_chunk=True,
        extra_config={} if quota is None else {"cxlkv.quota": quota},
    )


@FORMS
@pytest.mark.parametrize("layerwise", [False, True])
def test_what_was_stored_is_retrieved(
    make_engine: MakeEngine, place: Path, form: str, layerwise: bool
) -> None:
    """By an engine that begins anew; twice, of which the second may be from LMCache's hot cache."""
    first = made(make_engine, place, form, layerwise)
    was = first.fill(1)
    first.store(text(1, COUNT))
    first.close()
    engine = made(make_engine, place, form, layerwise)
    slots = engine.slots(text(1, COUNT))
    for _ in range(2):
        engine.clear()
        assert engine.lookup(text(1, COUNT), pin=True) == COUNT
        assert engine.retrieve(text(1, COUNT)) == COUNT
        for before, now in zip(was, engine.kept, strict=True):
            assert torch.equal(before[:, slots], now[:, slots])
        engine.engine.lookup_unpin("r")
    assert engine.retrieve(text(2, COUNT)) == 0
    assert engine.storage.allocator.out == 0
    assert not engine.storage.counting.failures.total()
    counts = engine.storage.counting.counts
    assert counts["copied_objects"] == counts["hit_objects"]


def test_little_is_lost_of_chunks_of_unlike_sizes(
    make_engine: MakeEngine, place: Path, where: Path, seed: int
) -> None:
    """Ends of texts are smaller chunks. Of what these take in small slots 95 % are their bytes."""
    draw = Random(seed)
    lengths = [draw.randrange(1, 2 * CHUNK) for _ in range(40)]
    shares = []
    for pool in (place, where / "one.pool"):
        engine = made(make_engine, pool, "staged")
        engine.fill(1)
        free = engine.storage.pool.stats()["pages_free"]
        for number, length in enumerate(lengths):
            engine.store(text(number, length))
            assert engine.lookup(text(number, length)) == length
        taken = free - engine.storage.pool.stats()["pages_free"]
        stored = engine.storage.counting.counts["stored_bytes"]
        assert stored == sum(lengths) * OBJECT_BYTES // CHUNK
        shares.append(stored / (taken * engine.storage.pool.layout.page_tokens))
    print(f"stored over taken: {shares[0]:.3f}, one slot a chunk: {shares[1]:.3f}")
    assert shares[0] >= 0.95
    assert shares[1] < 0.75


def test_a_quota_counts_slots(make_engine: MakeEngine, place: Path) -> None:
    """A chunk counts as many as it takes, not as the largest object would."""
    chunks, each = 12, -(-(OBJECT_BYTES // 2 + bytes_of(1)) // SLOT)
    with ObjectPool.open(place) as pool:
        extent = pool.pages.geometry
        slot_bytes = extent["extent_bytes"] // extent["slab_slots"]
    engine = made(make_engine, place, "staged", quota=(chunks * each + 1) * slot_bytes)
    engine.fill(1)
    quota = engine.storage.cache.quota
    assert quota
    for number in range(chunks):
        engine.store(text(number, CHUNK // 2))
        assert engine.lookup(text(number, CHUNK // 2)) == CHUNK // 2
        assert quota.used() == (number + 1) * each
    engine.store(text(chunks, CHUNK // 2))
    assert quota.used() == (chunks - 1) * each  # one more than need be makes room
    assert [engine.lookup(text(number, CHUNK // 2)) for number in (0, chunks)] == [0, CHUNK // 2]
    assert not engine.storage.counting.failures.total()


def test_what_is_damaged_is_a_miss_from_there_on(make_engine: MakeEngine, place: Path) -> None:
    engine = made(make_engine, place, "staged")
    engine.fill(1)
    engine.store(text(1, COUNT))
    engine.clear()
    key = [key for _, _, key in engine.engine.token_database.process_tokens(text(1, COUNT))][2]
    chunk = bytearray(64 << 10)
    assert engine.storage.pool.get_batch_into(engine.storage.cache.keys([name_of(key)]), [chunk])
    change_byte(place, place.read_bytes().index(chunk[7 * SLOT : 8 * SLOT]))
    assert engine.retrieve(text(1, COUNT)) == 2 * CHUNK
    assert engine.storage.counting.failures["corrupt"] == 1
    assert engine.storage.allocator.out == 0


def test_another_object_in_its_place_meanwhile_is_a_miss(
    make_engine: MakeEngine, place: Path
) -> None:
    """It is shorter, and its bytes do not end as those of the one that was found."""
    engine = made(make_engine, place, "staged")
    engine.fill(1)
    engine.store(text(1, CHUNK))
    storage, cache = engine.storage, engine.storage.cache
    key = [key for _, _, key in engine.engine.token_database.process_tokens(text(1, CHUNK))]
    load = cache.load

    def late(keys, buffers):  # type: ignore[no-untyped-def]
        storage.pool.put_batch(keys, [bytes(OBJECT_BYTES // 2)], replace=True)
        return load(keys, buffers)

    cache.load = late  # type: ignore[method-assign]
    assert storage.batched_get_blocking(key) == [None]
    assert storage.allocator.out == 0


def test_what_wants_one_piece_is_refused_by_name(place: Path) -> None:
    for form, extra in (("memory", {}), ("staged", {"cxlkv.encoding": "int8"})):
        config = config_of(place, form=form, extra_config=extra)
        with pytest.raises(GeometryError, match="in slots of 512 B there"):
            CXLStorage(config=config, metadata=metadata_of(role="scheduler"))
