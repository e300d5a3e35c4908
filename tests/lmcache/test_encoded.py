"""Chunks that the pool keeps encoded, with LMCache's own engine around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cxlkv.adapters.lmcache.names import name_of
from cxlkv.adapters.lmcache.storage import CXLStorage
from cxlkv.errors import UnsupportedError

from ..support.damaging import damage_object
from ..support.kept_rows import check_kept
from .conftest import MakeEngine
from .engines import CHUNK, DIM, HEADS, OBJECT_BYTES, Engine, config_of, metadata_of, text

each_encoding = pytest.mark.parametrize("encoding", ["int8", "int4", "fp8_e4m3"])
COUNT = 5 * CHUNK + 7


def made(
    make_engine: MakeEngine,
    encoding: str,
    form: str = "staged",
    place: Path | None = None,
    use_layerwise: bool = False,
    chunk_size: int = CHUNK,
) -> Engine:
    return make_engine(
        place,
        form=form,
        use_layerwise=use_layerwise,
        chunk_size=chunk_size,
        save_unfull_chunk=True,
        extra_config={} if encoding == "none" else {"cxlkv.encoding": encoding},
    )


def check(engine: Engine, was: list[torch.Tensor], encoding: str, count: int = COUNT) -> None:
    """The first tokens are what is kept of them, and nothing else was written."""
    slots = engine.slots(text(1, COUNT))[:count]
    others = torch.ones(engine.kept[0].shape[1], dtype=torch.bool)
    others[slots] = False
    for before, now in zip(was, engine.kept, strict=True):
        shape = (2, count, HEADS, DIM)
        check_kept(now[:, slots].reshape(shape), before[:, slots].reshape(shape), encoding)
        assert now[:, others].isnan().all()


@each_encoding
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("form", ["tier", "staged"])
def test_what_was_stored_is_retrieved_as_it_was_kept(
    make_engine: MakeEngine, encoding: str, layerwise: bool, form: str
) -> None:
    """By an engine that begins anew, so that nothing is in LMCache's hot cache; twice, of which the
    second may be from there. The last chunk is smaller."""
    first = made(make_engine, encoding, form, use_layerwise=layerwise)
    was = first.fill(1)
    first.store(text(1, COUNT))
    first.close()
    engine = made(make_engine, encoding, form, use_layerwise=layerwise)
    for _ in range(2):
        engine.clear()
        assert engine.lookup(text(1, COUNT), pin=True) == COUNT
        assert engine.retrieve(text(1, COUNT)) == COUNT
        check(engine, was, encoding)
        engine.engine.lookup_unpin("r")
    assert engine.retrieve(text(2, COUNT)) == 0
    assert engine.storage.allocator.out == 0
    assert engine.storage.counting.failures.total() == 0
    counts = engine.storage.counting.counts
    assert counts["copied_objects"] == counts["hit_objects"]


def test_a_pool_of_one_size_has_more_chunks(make_engine: MakeEngine) -> None:
    held = {}
    for encoding in ("none", "int8", "int4"):
        engine = made(make_engine, encoding, chunk_size=8 * CHUNK)
        held[encoding] = engine.storage.pool.stats()["pages_total"]
        assert (engine.storage.pool.layout.object_bytes or 0) % 4096 == 0
    assert held["int8"] > 1.7 * held["none"]
    assert held["int4"] > 3 * held["none"]


def test_engines_of_other_encodings_find_nothing(make_engine: MakeEngine, where: Path) -> None:
    """In a folder each has a file of its own; in one pool, keys of its own."""
    place = where / "one.pool"
    first = made(make_engine, "none", place=place)
    first.fill(1)
    first.store(text(1, COUNT))
    for encoding in ("int8", "int4"):
        engine = made(make_engine, encoding, place=place)
        assert engine.retrieve(text(1, COUNT)) == 0
        engine.store(text(1, COUNT))
        assert engine.retrieve(text(1, COUNT)) == COUNT
    for encoding in ("none", "int8", "int4"):
        made(make_engine, encoding)
    assert len(list(where.glob("cxlkv-lmcache-*.pool"))) == 3


def test_what_is_damaged_is_a_miss_from_there_on(make_engine: MakeEngine) -> None:
    engine = made(make_engine, "int8")
    was = engine.fill(1)
    engine.store(text(1, COUNT))
    engine.clear()
    key = [key for _, _, key in engine.engine.token_database.process_tokens(text(1, COUNT))][2]
    damage_object(engine.storage.pool, engine.storage.cache.keys([name_of(key)]))
    assert engine.retrieve(text(1, COUNT)) == 2 * CHUNK
    check(engine, was, "int8", 2 * CHUNK)
    assert engine.storage.counting.failures["corrupt"] == 1


def test_without_room_in_lmcaches_memory_it_is_a_miss(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(make_engine, "int8")
    engine.fill(1)
    engine.store(text(1, COUNT))
    near = engine.storage.local_cpu_backend
    with monkeypatch.context() as patch:
        patch.setattr(near, "allocate", lambda *_, **__: None)
        assert engine.retrieve(text(1, COUNT)) == 0
    assert engine.storage.counting.failures["memory"] > 0
    assert engine.storage.allocator.out == 0
    assert engine.retrieve(text(1, COUNT)) == COUNT


def test_what_is_counted_are_bytes_in_the_pool(make_engine: MakeEngine) -> None:
    engine = made(make_engine, "int8")
    engine.fill(1)
    engine.store(text(1, 6 * CHUNK))
    assert engine.retrieve(text(1, 6 * CHUNK)) == 6 * CHUNK
    counts = engine.storage.counting.counts
    assert counts["stored_bytes"] == counts["read_bytes"]
    assert 0.5 < counts["read_bytes"] / (6 * OBJECT_BYTES) < 0.6


def test_groups_that_come_later_and_have_no_rows_are_not_stored(make_engine: MakeEngine) -> None:
    engine = made(make_engine, "int8")
    engine.fill(1)
    engine.store(text(1, COUNT))
    about = engine.storage.metadata
    assert about is not None
    about.use_mla = True
    assert engine.retrieve(text(1, COUNT)) == 0
    engine.store(text(2, COUNT))
    about.use_mla = False
    assert engine.retrieve(text(2, COUNT)) == 0
    assert engine.storage.counting.failures["unsupported"] > 0


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("memory", {}, "max_local_cpu_size is 0"),
        ("staged", {"use_mla": True, "kv_shape": (4, 1, CHUNK, 1, 576)}, "MLA"),
        ("staged", {"kv_dtype": torch.uint8}, "in fewer bits already"),
    ],
)
def test_what_has_no_rows_of_heads_is_refused(
    where: Path, form: str, changes: dict[str, object], said: str
) -> None:
    config = config_of(where, form=form, extra_config={"cxlkv.encoding": "int8"})
    with pytest.raises(UnsupportedError, match=said):
        CXLStorage(config=config, metadata=metadata_of(0, 1, **changes))
