"""LMCache's engine over a pool: what was stored is retrieved, in place, whatever goes wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventStatus, EventType
from lmcache.v1.memory_management import MemoryObj

from cxlkv import _core
from cxlkv.adapters.lmcache.metrics import KINDS

from ..support.processes import ROOT
from . import engines
from .conftest import MakeEngine
from .engines import CHUNK, LAYERS, OBJECT_BYTES, Engine, Paged, text

FORMS = ["memory", "tier", "staged"]
TOKENS = 6 * CHUNK


def stored(engine: Engine, seed: int, tokens: int = TOKENS) -> list[torch.Tensor]:
    was = engine.fill(seed)
    engine.store(text(seed, tokens))
    engine.clear()
    return was


def finds(engine: Engine, was: list[torch.Tensor], seed: int = 1) -> None:
    """All of a text, and what it was."""
    assert engine.retrieve(text(seed, TOKENS)) == TOKENS
    engine.check(was, text(seed, TOKENS), TOKENS)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_was_stored_is_retrieved(make_engine: MakeEngine, form: str, layerwise: bool) -> None:
    engine = make_engine(form=form, use_layerwise=layerwise)
    was = stored(engine, 1)
    finds(engine, was)
    assert engine.retrieve(text(2, TOKENS)) == 0
    assert engine.storage.allocator.out == 0
    assert engine.storage.counting.failures.total() == 0
    assert engine.engine.health() == 0


@pytest.mark.parametrize("layerwise", [False, True])
def test_chunks_have_the_priority_that_a_request_said(
    make_engine: MakeEngine, layerwise: bool
) -> None:
    """LMCache hands it on with what it stores and what it retrieves; it makes no other keys."""
    engine = make_engine(form="memory", use_layerwise=layerwise)
    for seed, priority in ((1, 4), (2, 0)):
        engine.said = {"lmcache.cxlkv.priority": priority}
        stored(engine, seed, 3 * CHUNK)
    engine.said = {"lmcache.cxlkv.priority": 9}
    assert engine.retrieve(text(2, 2 * CHUNK)) == 2 * CHUNK
    given = engine.storage.pool.hotness.published().rows["priority"].tolist()
    objects = LAYERS if layerwise else 1
    assert sorted(given) == [0] * objects + [4] * 3 * objects + [9] * 2 * objects


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_restart_hits(make_engine: MakeEngine, form: str, layerwise: bool) -> None:
    first = make_engine(form=form, use_layerwise=layerwise)
    was = stored(first, 1)
    first.close()
    engine = make_engine(form=form, use_layerwise=layerwise)
    engine.clear()
    longer = text(1, TOKENS) + text(3, CHUNK)
    assert engine.lookup(longer, "a", pin=True) == TOKENS
    assert engine.retrieve(longer, "a") == TOKENS
    engine.check(was, longer, TOKENS)
    engine.engine.lookup_unpin("a")
    assert engine.storage.allocator.out == 0
    assert engine.storage.counting.counts["hit_objects"] == 6 * (LAYERS if layerwise else 1)


def test_the_last_chunk_may_be_smaller(make_engine: MakeEngine) -> None:
    engine = make_engine(save_unfull_chunk=True)
    tokens = 2 * CHUNK + 5
    was = stored(engine, 1, tokens)
    assert engine.retrieve(text(1, tokens)) == tokens
    engine.check(was, text(1, tokens), tokens)
    assert engine.retrieve(text(1, tokens - 1)) == 2 * CHUNK


class Watched(Paged):
    """Tells of each object that the engine's memory is copied from or to, whether it is in the
    pool."""

    def __init__(self, engine: Engine):
        self.base, self.size = _core.pool_memory(engine.storage.pool._handle)
        self.read: list[bool] = []
        self.written: list[bool] = []
        engine.engine.gpu_connector = self

    def _is_there(self, one: MemoryObj) -> bool:
        return bool(self.base <= one.tensor.data_ptr() < self.base + self.size - OBJECT_BYTES)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: object) -> None:
        self.read.append(self._is_there(memory_obj))
        super().to_gpu(memory_obj, start, end, **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: object) -> None:
        self.written.append(self._is_there(memory_obj))
        super().from_gpu(memory_obj, start, end, **kwargs)


@pytest.mark.parametrize(
    ("form", "written_there", "read_there", "copies"),
    [("memory", True, True, 0), ("staged", False, True, 0), ("tier", False, False, 6)],
)
def test_what_is_copied(
    make_engine: MakeEngine, form: str, written_there: bool, read_there: bool, copies: int
) -> None:
    """For LMCache's memory, the pool is what the engine reads and writes itself. Behind memory of
    LMCache's own it copies what it stores, and copies on reads only where it keeps that.
    """
    first = make_engine(form=form)
    watched = Watched(first)
    was = stored(first, 1)
    assert watched.written == [written_there] * 6
    first.close()
    engine = make_engine(form=form)
    watched = Watched(engine)
    engine.clear()
    finds(engine, was)
    assert watched.read == [read_there] * 6
    assert engine.storage.counting.counts["copied_objects"] == copies
    assert engine.storage.allocator.out == 0  # LMCache's hot cache holds none of the pool


@pytest.mark.parametrize("layerwise", [False, True])
def test_what_is_damaged_is_computed_and_stored_again(
    make_engine: MakeEngine, where: Path, layerwise: bool
) -> None:
    first = make_engine(use_layerwise=layerwise)
    was = stored(first, 1)
    key = [key for _, _, key in first.engine.token_database.process_tokens(text(1, TOKENS))][2]
    wanted = key.split_layers(LAYERS)[1] if layerwise else key
    leased = first.storage.get_blocking(wanted)
    assert leased is not None
    leased.tensor.view(torch.uint8).reshape(-1)[7] ^= 1
    leased.ref_count_down()
    first.close()

    engine = make_engine(use_layerwise=layerwise)
    engine.clear()
    assert engine.lookup(text(1, TOKENS), "a", pin=True) == 2 * CHUNK
    assert engine.storage.counting.failures == {**dict.fromkeys(KINDS, 0), "corrupt": 1}
    assert engine.storage.allocator.out == 2 * (LAYERS if layerwise else 1)
    assert engine.retrieve(text(1, TOKENS), "a") == 2 * CHUNK
    engine.check(was, text(1, TOKENS), 2 * CHUNK)
    engine.engine.lookup_unpin("a")
    for layer, before in zip(engine.kept, was, strict=True):
        layer.copy_(before)
    engine.store(text(1, TOKENS))
    engine.clear()
    finds(engine, was)


@pytest.mark.parametrize("form", ["memory", "staged"])
def test_a_pool_full_of_pins_stores_no_more_and_goes_on(make_engine: MakeEngine, form: str) -> None:
    engine = make_engine(form=form)
    total = engine.storage.pool.stats()["pages_total"]
    texts = [text(seed, TOKENS) for seed in range(total // 6 + 1)]
    kept = []
    for seed, one in enumerate(texts[:-1]):
        kept.append(stored(engine, seed))
        assert engine.lookup(one, f"r{seed}", pin=True) == TOKENS
    stored(engine, len(texts) - 1)  # finds room for some of it, or none
    assert engine.storage.counting.failures["full"] > 0
    for seed, one in enumerate(texts[:-1]):
        engine.clear()
        assert engine.retrieve(one, f"r{seed}") == TOKENS
        engine.check(kept[seed], one, TOKENS)
        engine.engine.lookup_unpin(f"r{seed}")
    stored(engine, len(texts) - 1)
    assert engine.lookup(texts[-1]) == TOKENS


def test_pinned_is_read_though_it_was_removed(make_engine: MakeEngine) -> None:
    """By another engine on the pool, between the lookup and the read."""
    engine, other = make_engine(), make_engine()
    was = stored(engine, 1)
    tokens = text(1, TOKENS)
    assert engine.lookup(tokens, "a", pin=True) == TOKENS
    assert other.engine.clear(tokens) == 6
    assert other.lookup(tokens) == 0
    assert engine.retrieve(tokens, "a") == TOKENS
    engine.check(was, tokens, TOKENS)
    engine.engine.lookup_unpin("a")
    assert engine.lookup(tokens) == 0


def test_a_pin_that_nobody_takes_off_ends_by_itself(make_engine: MakeEngine) -> None:
    """LMCache's own timeout for pins reaches those of the pool."""
    from lmcache.v1.pin_monitor import PinMonitor

    PinMonitor.DestroyInstance()
    engine = make_engine(pin_timeout_sec=-1)
    stored(engine, 1)
    assert engine.lookup(text(1, TOKENS), "a", pin=True) == TOKENS
    assert engine.storage.allocator.out == 6
    PinMonitor.GetOrCreate()._check_timeouts()
    assert engine.storage.allocator.out == 0
    assert engine.storage.allocator.pinned == {}
    engine.engine.lookup_unpin("a")
    PinMonitor.DestroyInstance()


@pytest.mark.parametrize("layerwise", [False, True])
def test_layers_that_are_gone_are_stored_again(make_engine: MakeEngine, layerwise: bool) -> None:
    """The pool evicts each object by itself, also one layer of a chunk."""
    engine = make_engine(use_layerwise=layerwise)
    stored(engine, 1)
    keys = [key for _, _, key in engine.engine.token_database.process_tokens(text(1, TOKENS))]
    gone = keys[1].split_layers(LAYERS)[2] if layerwise else keys[1]
    assert engine.storage.remove(gone)
    assert engine.retrieve(text(1, TOKENS)) == CHUNK
    was = stored(engine, 1)
    finds(engine, was)


class LookupServer:
    """Where LMCache's scheduler hears how many tokens were found."""

    def __init__(self) -> None:
        self.heard: dict[str, int] = {}

    def send_response_to_scheduler(self, lookup: str, tokens: int) -> None:
        self.heard[lookup] = tokens


@pytest.mark.parametrize("form", FORMS)
def test_prefetched_ahead_of_the_request(make_engine: MakeEngine, form: str) -> None:
    """LMCache's asynchronous loading: objects are leased at the lookup, and read later."""
    first = make_engine(form=form)
    was = stored(first, 1)
    first.close()
    engine = make_engine(form=form, enable_async_loading=True)
    engine.clear()
    manager = engine.engine.storage_manager
    server = manager.async_lookup_server = LookupServer()
    tokens = text(1, TOKENS)
    for request in ("a", "gone"):
        engine.engine.async_lookup_and_prefetch(request, tokens=tokens, pin=True)
        while request not in server.heard:
            engine.run_pending()
    assert server.heard == {"a": TOKENS, "gone": TOKENS}
    assert engine.storage.allocator.out == 12
    assert engine.retrieve(tokens, "a") == TOKENS
    engine.check(was, tokens, TOKENS)
    assert manager.event_manager.get_event_status(EventType.LOADING, "gone") == EventStatus.DONE
    engine.engine.lookup_unpin("gone")  # its request was aborted
    assert engine.storage.allocator.out == 0


def test_ranks_and_engines_share_one_pool(make_engine: MakeEngine, where: Path) -> None:
    """Two ranks of two engines: each rank finds its own half, whoever of its like stored it."""
    first = [make_engine(worker=rank, workers=2) for rank in range(2)]
    was = [stored(engine, 1 + rank) for rank, engine in enumerate(first)]
    assert first[1].retrieve(text(1, TOKENS)) == 0
    tokens = text(9, TOKENS)
    for engine, kept in zip(first, was, strict=True):
        for layer, before in zip(engine.kept, kept, strict=True):
            layer.copy_(before)
        engine.store(tokens)
    second = [make_engine(worker=rank, workers=2) for rank in range(2)]
    for engine, kept in zip(second, was, strict=True):
        engine.clear()
        assert engine.retrieve(tokens) == TOKENS
        engine.check(kept, tokens, TOKENS)
    assert len(list(where.iterdir())) == 1


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"cxlkv.capcity": "1GiB"}, "did you mean cxlkv.capacity"),
        ({"cxlkv.capacity": "much"}, "much"),
    ],
)
def test_without_its_plugin_the_engine_goes_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, extra: dict[str, str], said: str
) -> None:
    """A mistake is an error in LMCache's log that names it."""
    heard: list[str] = []
    log = logging.getLogger("lmcache.v1.storage_backend")
    monkeypatch.setattr(log, "error", lambda text, *given: heard.append(text % given))
    engine = make_engine(form="tier", extra_config=extra)
    assert [line for line in heard if "Failed to create backend cxlkv" in line and said in line]
    assert list(engine.engine.storage_manager.storage_backends) == ["LocalCPUBackend"]


def test_a_small_pool_of_another_shape_is_refused_with_both(
    make_engine: MakeEngine, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    log = logging.getLogger("lmcache.v1.storage_backend")
    monkeypatch.setattr(log, "error", lambda text, *given: heard.append(text % given))
    make_engine(where / "one.pool", form="tier")
    make_engine(where / "one.pool", form="tier", chunk_size=2 * CHUNK)
    assert len(heard) == 1
    assert "another pool than the one wanted" in heard[0]
    half = make_engine(where / "one.pool", form="tier", chunk_size=CHUNK // 2)
    stored(half, 1)
    assert half.storage.counting.counts["stored_objects"] == 12


@pytest.mark.parametrize("page", ["docs/engines/lmcache.md", "examples/lmcache.yaml"])
def test_what_we_write_switches_it_on(where: Path, tmp_path: Path, page: str) -> None:
    """The lines of the docs and of the example, in a small pool of the test's."""
    text_of = (ROOT / page).read_text()
    lines = text_of.split("```yaml\n")[1].split("```")[0] if page.endswith(".md") else text_of
    ours = {"  cxlkv.where": where, "  cxlkv.capacity": "8MiB", "chunk_size": CHUNK}
    rows = [line for line in lines.splitlines() if line.split(":")[0] not in ours]
    rows += [f"{name}: {value}" for name, value in ours.items()]
    file = tmp_path / "lmcache.yaml"
    file.write_text("\n".join(rows))
    engine = engines.make_engine(LMCacheEngineConfig.from_file(str(file)), engines.metadata_of())
    finds(engine, stored(engine, 1))
    engine.close()
