"""Forks: every public object is alive in the parent when it forks, and used, closed and dropped on
both sides, in both orders, while a thread of the parent has all of its locks.

A new class with threads, locks or sockets needs a row in OBJECTS, and a new name in cxlkv one or a
place in VALUES: two tests compare.
"""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import cxlkv
from cxlkv import Budget, CXLPool, KVLayout, ObjectPool, Tiers, object_keys
from cxlkv.adapters.common.keyed_weights import KeyedWeights
from cxlkv.adapters.common.metrics import Counting, Failures, Shown
from cxlkv.adapters.common.object_cache import ObjectCache
from cxlkv.adapters.common.reopening import Reopening
from cxlkv.adapters.transformers import CXLCache, Hints, layout_of
from cxlkv.adapters.vllm.device_steps import DeviceSteps, Engine
from cxlkv.adapters.vllm.loading import BlockMemory, Load, Loader, Part
from cxlkv.adapters.vllm.pool_attention import Scores
from cxlkv.adapters.vllm.prefetch import Prefetch
from cxlkv.adapters.vllm.saving import Ring, Save, Saver
from cxlkv.emulation.link import Link, emulate
from cxlkv.emulation.profiles import named
from cxlkv.errors import ClosedError, CXLKVError, ReleasedError, StaleError, WorkerError
from cxlkv.gpu.mailbox import Mailbox
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.read import PageReader
from cxlkv.machine import lifetime
from cxlkv.machine.prefault import AsUsed
from cxlkv.ops.metrics import PoolCollector, StatsCollector
from cxlkv.pages import layout_crc
from cxlkv.pool import Pool
from cxlkv.prefix import prefix_keys
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import ColdFile, RecordShape
from cxlkv.tiers.cold_mooncake import MooncakeTier
from cxlkv.tiers.cold_shared import SharedColdTier
from cxlkv.tiers.compress import Codec
from cxlkv.tiers.local import LocalTier
from cxlkv.tiers.quota import Quota
from cxlkv.tiers.remote import RemoteTier, Source
from cxlkv.transport import Remote, Server
from cxlkv.transport.shards import heads_between

from .conftest import audit
from .ndp.test_worker import WorkerProcess
from .support.forking import child_beside, in_child
from .support.lengths import matrix
from .support.small_models import VOCABULARY_SIZE
from .support.texts import SMALL, append, grown, publish, verify

# A remote that is dropped has a socket until the collector finds it: Python warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

PAGE, TOKENS = 4, 10
SECRET = b"a secret of the tests"
SHAPE = RecordShape(1000, 7)
REPOSITORY = Path(__file__).parents[1]


@dataclass
class World:
    """What a test makes its object of; `after` runs when it ends."""

    folder: Path
    after: ExitStack
    monkeypatch: pytest.MonkeyPatch

    def pool(self) -> CXLPool:
        made = CXLPool.create(self.folder / "pool", layout=SMALL, capacity="4MiB", threads=2)
        self.after.callback(_audited, made)
        return made

    def objects(self) -> ObjectPool:
        layout = KVLayout.objects(4096)
        made = ObjectPool.create(self.folder / "objects", layout=layout, capacity="4MiB", threads=2)
        self.after.callback(_audited, made)
        return made


def _audited(pool: Pool) -> None:
    with suppress(ClosedError):
        audit(pool)
    pool.close()


class Subject(NamedTuple):
    """An object under test. raises: what use() raises in a child; a tuple of none: nothing."""

    owner: object
    use: Callable[[], object]
    close: Callable[[], object]
    raises: type[CXLKVError] | tuple[()] = ()


def filled(pool: CXLPool) -> cxlkv.Sequence:
    return grown(pool, range(10))


def published(pool: CXLPool) -> range:
    """Token ids that match() finds."""
    publish(pool, range(10))
    return range(8)


def goes_on(sequence: cxlkv.Sequence) -> None:
    """It is read, forked, chosen from, attended to and appended to."""
    ids, query = range(len(sequence)), np.ones((2, 8), np.float32)
    more = sequence.fork()
    append(more, [99])
    more.select(0, query, top_k=2)
    more.attend(1, query)
    verify(more, [*ids, 99])
    more.release()
    verify(sequence, ids)


def a_pool(world: World) -> Subject:
    pool = world.pool()
    return Subject(pool, lambda: filled(pool).release(), pool.close)


def a_sequence(world: World) -> Subject:
    sequence = filled(world.pool())
    return Subject(sequence, lambda: goes_on(sequence), sequence.release)


def a_fork(world: World) -> Subject:
    parent = filled(world.pool())
    sequence = parent.fork()
    parent.release()
    return Subject(sequence, lambda: goes_on(sequence), sequence.release)


def a_batch(world: World) -> Subject:
    pool = world.pool()
    sequence = filled(pool)
    batch = pool.batch([sequence])
    q = np.ones((1, 2, 8), np.float32)
    return Subject(batch, lambda: batch.select(1, q, [0, 1], Budget(pages=2)), sequence.release)


def a_sequence_with_states(world: World) -> Subject:
    pytest.importorskip("numba", reason="numba compiles choosers")
    sequence = grown(world.pool(), range(100))
    query = np.ones((2, 8), np.float32)

    def use() -> None:
        picked = sequence.select(0, query, top_k=5, method="retro")
        assert picked.rows is not None
        sequence.attend(0, query, picked)

    use()
    return Subject(sequence, use, sequence.release)


def a_hit(world: World) -> Subject:
    pool = world.pool()
    hit = pool.match_prefix(published(pool))

    def use() -> None:
        assert hit.tokens == 8
        sequence = hit.sequence()
        goes_on(sequence)
        sequence.release()

    return Subject(hit, use, hit.release)


def a_pool_of_objects(world: World) -> Subject:
    pool = world.objects()
    pool.put("kept", b"bytes")

    def use() -> None:
        out = np.zeros(4096, np.uint8)
        assert pool.get_into("kept", out) == 5
        pool.put("more", b"more bytes")

    return Subject(pool, use, pool.close)


def a_lease(world: World) -> Subject:
    pool = world.objects()
    pool.put("kept", b"bytes")
    lease = pool.lease(["kept"])

    def use() -> None:
        view = lease.views[0]
        assert view is not None
        assert bytes(view) == b"bytes"

    return Subject(lease, use, lease.release)


def a_reservation(world: World) -> Subject:
    pool = world.objects()
    reserved = pool.reserve([8])
    return Subject(reserved, lambda: len(reserved.views), reserved.release)


def the_tiers(world: World) -> Subject:
    pool = world.pool()
    ids = published(pool)
    tiers = Tiers(
        pool, local="64KiB", cold=world.folder / "cold", cold_capacity="2MiB", compress="zstd"
    )
    tiers.start(every_s=0.001)

    def use() -> None:
        tiers.match_prefix(ids).release()
        tiers.step()

    return Subject(tiers, use, tiers.close, ClosedError)


def a_near_tier(world: World) -> Subject:
    tier = LocalTier(world.pool(), "64KiB")
    return Subject(tier, tier.step, tier.close, ClosedError)


def a_cold_tier(world: World) -> Subject:
    tier = ColdTier(world.folder / "cold", shape=SHAPE, capacity="1MiB", compress="zstd")
    names = np.arange(64, dtype=np.uint8).reshape(4, 16)
    records = np.zeros((4, 1000), np.uint8)
    return Subject(tier, lambda: tier.store(names, records), tier.close, ClosedError)


def a_cold_file_of_two(world: World) -> tuple[Subject, Subject]:
    """A cold file of two: one process has it open, and one asks that one."""
    owner, peer = (
        SharedColdTier(world.folder / "cold", shape=SHAPE, capacity="1MiB") for _ in range(2)
    )
    world.after.callback(peer.close)
    names, records = np.arange(64, dtype=np.uint8).reshape(4, 16), np.zeros((4, 1000), np.uint8)
    return (
        Subject(owner, lambda: owner.store(names, records), owner.close, ClosedError),
        Subject(peer, lambda: peer.store(names, records), peer.close, ClosedError),
    )


def a_shared_cold_file(world: World) -> Subject:
    return a_cold_file_of_two(world)[0]


def a_peer_of_a_cold_file(world: World) -> Subject:
    return a_cold_file_of_two(world)[1]


def a_cold_file(world: World) -> Subject:
    file = ColdFile(str(world.folder / "cold"), SHAPE, 1 << 20, durable=False)
    return Subject(file, lambda: None, file.close)


class FakeMooncake:
    def setup(self, *options: object) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [0] * len(keys)

    def close(self) -> int:
        return 0


def a_mooncake_tier(world: World) -> Subject:
    world.monkeypatch.setattr("cxlkv.tiers.cold_mooncake._client", lambda where: FakeMooncake())
    tier = MooncakeTier("mooncake://127.0.0.1:1?local=127.0.0.1", shape=SHAPE)
    names = np.zeros((1, 16), np.uint8)
    return Subject(tier, lambda: (tier.why_off, tier.contains(names)), tier.close, ClosedError)


def a_codec(world: World) -> Subject:
    codec = Codec("zstd", 1000, 2)
    rows = np.zeros((64, 1000), np.uint8)
    codec.pack(list(rows))  # its threads have begun
    return Subject(codec, lambda: codec.pack(list(rows)), codec.close)


def a_quota(world: World) -> Subject:
    pool = world.pool()
    quota = Quota(Tiers(pool), 100)

    def use() -> None:
        sequence = filled(pool)
        quota.publish(sequence, prefix_keys(range(8), PAGE))
        sequence.release()
        quota.stats()

    return Subject(quota, use, quota.tiers.close)


def a_server(world: World) -> Subject:
    pool = world.pool()
    server = Server(pool, ("127.0.0.1", 0), SECRET)
    world.after.callback(server.close)  # it has given back what it held for the peer then
    remote = world.after.enter_context(Remote(f"127.0.0.1:{server.address[1]}", SECRET))
    remote.match(prefix_keys(published(pool), PAGE))

    def use() -> None:
        server.connections()

    return Subject(server, use, server.close)


def a_remote(world: World) -> Subject:
    pool = world.pool()
    server = world.after.enter_context(Server(pool, ("127.0.0.1", 0), SECRET))
    remote = Remote(f"127.0.0.1:{server.address[1]}", SECRET)
    keys = prefix_keys(published(pool), PAGE)

    def use() -> None:
        assert remote.match(keys).tokens == 8

    use()
    return Subject(remote, use, remote.close)


def a_remote_tier(world: World) -> Subject:
    far = world.pool()
    pool = CXLPool.create("anonymous:", layout=SMALL, capacity="4MiB", threads=2)
    world.after.callback(pool.close)
    server = world.after.enter_context(Server(far, ("127.0.0.1", 0), SECRET))
    remote = Remote(f"127.0.0.1:{server.address[1]}", SECRET)
    heads = heads_between(pool.layout, pool.layout)
    tier = RemoteTier(pool, [Source(remote, heads, layout_crc(pool.layout, pool.sketch))])
    keys = prefix_keys(published(far), PAGE)

    def use() -> None:
        with tier.extend(keys, pool.match(keys)) as hit:
            assert hit.tokens == 8

    use()
    return Subject(tier, use, tier.close)


def a_hit_of_a_remote(world: World) -> Subject:
    remote = a_remote(world).owner
    assert isinstance(remote, Remote)
    world.after.callback(remote.close)
    hit = remote.match(prefix_keys(range(8), PAGE))
    q = np.ones((1, 2, 8), np.float32)

    def use() -> None:
        remote.select(hit, 0, q, Budget(pages=1))

    return Subject(hit, use, hit.release, StaleError)


def a_client_of_a_worker(world: World) -> Subject:
    pool = world.pool()
    sequence = filled(pool)
    worker = WorkerProcess(world.folder / "pool", slots=4)
    world.after.callback(worker.kill)
    pool.use_worker("only", deadline_s=60)
    row = np.ones((2, 8), np.float32)
    return Subject(pool, lambda: sequence.select(0, row, top_k=2), sequence.release)


def a_link(world: World) -> Subject:
    pool = world.pool()
    link = Link("astera-a1000", named("astera-a1000")[1])
    world.after.enter_context(emulate(pool, link))
    sequence = filled(pool)
    return Subject(link, lambda: sequence.fetch(0), sequence.release)


def collectors(world: World) -> Subject:
    pool = world.pool()
    tiers = Tiers(pool, local="64KiB")
    both = (PoolCollector(pool), StatsCollector("tiers", tiers.stats))
    return Subject(both, lambda: [list(one.collect()) for one in both], tiers.close)


def counting(world: World) -> Subject:
    made = Counting(["stored"], {"pool": "the pool failed"})

    def use() -> None:
        made.add(stored=1)
        made.failed("pool")

    return Subject(made, use, lambda: None)


def shown(world: World) -> Subject:
    tiers = Tiers(world.objects())
    made = Shown("cxlkv_forks_", {"rank": "0"}, {"stored": "objects"}, {"pool": "it failed"})

    def use() -> None:
        made.add(stored=1)
        made.inspect(tiers)

    return Subject(made, use, tiers.close)


def weights_of_an_engine(world: World) -> Subject:
    made = KeyedWeights(["engine"], are_alone=True)

    def use() -> None:
        made.look()
        made.flushed()
        assert made.state == b""

    return Subject(made, use, lambda: None)


def object_cache(world: World) -> Subject:
    pool = world.objects()
    made = ObjectCache(
        lambda: pool, b"", Counting([], {"pool": "it failed", "changed": "so it did"})
    )
    keys = object_keys(["kept"])
    pool.put("kept", b"bytes")
    return Subject(made, lambda: made.verify(keys), made.close)


def loads_of_vllm(world: World) -> Subject:
    """One waits for another, which the parent's thread is about."""
    pool = world.pool()
    memory = [BlockMemory(np.zeros((4, 2, PAGE, 8), np.float32), None) for _ in range(2)]
    loader = Loader(memory)
    loads = [Load(pool, [Part("a", None, [[0]], [0], 0, PAGE)], 60.0) for _ in range(2)]
    for load in loads:
        loader.begin(load)

    def use() -> None:
        for load in loads:
            load.wait(2)
            assert load.look()

    return Subject((loader, *loads), use, loader.close)


def saves_of_vllm(world: World) -> Subject:
    pool, ring = world.pool(), Ring(64, torch.device("cpu"))
    tiers = Tiers(pool)
    world.after.callback(tiers.close)
    saver = Saver(pool, tiers, None, ring, unit=PAGE, groups=[0], ratios=[1])

    def use() -> None:
        memory = ring.take(32)
        assert memory is not None
        saver.submit(Save([], [np.zeros(1, np.int32)], 0, memory))
        saver.wait()
        assert ring.room == 64

    return Subject((ring, saver), use, saver.close)


def steps_of_vllm(world: World) -> Subject:
    pool = world.pool()
    heads, scores = pool.layout.kv_heads, Scores(1.0)
    steps = DeviceSteps(pool, Engine(torch.device("cpu"), 1, 1, heads, 64, scores), None)

    def use() -> None:
        steps.enter()
        steps.leave()

    return Subject(steps, use, steps.close)


def a_reopening(world: World) -> Subject:
    made = CXLPool.create(
        world.folder / "shared", layout=SMALL, capacity="4MiB", sharing="software", host=0
    )
    world.after.callback(made.close)
    looking = Reopening(made, lambda: made, 0.01)
    return Subject(looking, looking.take, looking.close)


def a_prefetch_of_vllm(world: World) -> Subject:
    pool = world.pool()
    tiers = Tiers(pool, cold=world.folder / "cold", cold_capacity="1MiB")
    world.after.callback(tiers.close)
    prefetch = Prefetch([tiers], Failures(), deadline_s=60.0, lease_s=60.0)
    keys = prefix_keys(range(8), PAGE)
    return Subject(prefetch, lambda: prefetch.matched("a", keys, 0), prefetch.close)


def a_cache_of_transformers(world: World) -> Subject:
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    layout = layout_of(config, page_tokens=PAGE)
    pool = CXLPool.create(world.folder / "llama", layout=layout, capacity="4MiB", threads=1)
    world.after.callback(_audited, pool)
    sequence = pool.sequence()
    rows = np.zeros((TOKENS, 2, 16), layout.dtype)
    for layer in range(2):
        sequence.append(layer, rows, rows)
    cache = CXLCache(pool, config, sequences=[sequence])

    def use() -> None:
        assert cache.get_seq_length() == TOKENS
        twin = cache.sequences[0].fork()
        twin.fetch(0)
        twin.release()

    return Subject(cache, use, sequence.release)


def a_model_with_hints(world: World) -> Subject:
    cache = a_cache_of_transformers(world).owner
    assert isinstance(cache, CXLCache)
    tier = LocalTier(cache.pool, "64KiB")
    world.after.callback(tier.close)
    made = Hints(torch.nn.Module(), cache, tier)
    return Subject(made, made.stats, made.close)


def a_mailbox(world: World) -> Subject:
    box = Mailbox(torch.device("cpu"), lambda _: None, lambda _: None, 60.0, threaded=True)
    return Subject(box, box.check, box.close, WorkerError)


def a_mapping(world: World) -> Subject:
    mapping = Mapping(world.pool(), "cpu")
    return Subject(mapping, lambda: mapping.tensor, mapping.close, ClosedError)


def a_reader_of_pages(world: World) -> Subject:
    reader = PageReader(world.pool(), torch.device("cpu"))

    def use() -> None:
        with reader.using():
            pass

    return Subject(reader, use, reader.close, ClosedError)


def huge_pages_as_used(world: World) -> Subject:
    ahead = AsUsed(world.pool()._handle)
    ahead.start()
    return Subject(ahead, lambda: None, ahead.end)


class Row(NamedTuple):
    """covers: names of public classes, and of those with threads, locks or sockets."""

    make: Callable[[World], Subject]
    covers: str


OBJECTS = (
    Row(a_pool, "CXLPool"),
    Row(a_sequence, "Sequence"),
    Row(a_fork, "Sequence"),
    Row(a_batch, "Batch"),
    Row(a_sequence_with_states, "Sequence"),
    Row(a_hit, "Hit"),
    Row(a_pool_of_objects, "ObjectPool"),
    Row(a_lease, "Lease"),
    Row(a_reservation, "Reserved"),
    Row(the_tiers, "Tiers"),
    Row(a_near_tier, "LocalTier"),
    Row(a_cold_tier, "ColdTier"),
    Row(a_cold_file, "ColdFile"),
    Row(a_shared_cold_file, "SharedColdTier ColdServer"),
    Row(a_peer_of_a_cold_file, "SharedColdTier _Peer"),
    Row(a_mooncake_tier, "MooncakeTier"),
    Row(a_codec, "Codec"),
    Row(a_quota, "Quota"),
    Row(a_server, "Server Listener"),
    Row(a_remote, "Remote"),
    Row(a_remote_tier, "RemoteTier"),
    Row(a_hit_of_a_remote, "RemoteHit"),
    Row(a_client_of_a_worker, "CXLPool"),
    Row(a_link, "Link"),
    Row(collectors, "PoolCollector StatsCollector"),
    Row(counting, "Counting"),
    Row(shown, "Shown"),
    Row(weights_of_an_engine, "KeyedWeights"),
    Row(object_cache, "ObjectCache"),
    Row(loads_of_vllm, "Load Loader"),
    Row(saves_of_vllm, "Ring Saver"),
    Row(steps_of_vllm, "DeviceSteps"),
    Row(a_prefetch_of_vllm, "Prefetch"),
    Row(a_reopening, "Reopening"),
    Row(a_cache_of_transformers, "CXLCache"),
    Row(a_model_with_hints, "Hints"),
    Row(a_mailbox, "Mailbox"),
    Row(huge_pages_as_used, "AsUsed"),
    Row(a_mapping, "Mapping"),
    Row(a_reader_of_pages, "PageReader"),
)
VALUES = {
    "Budget",
    "Buffers",
    "CXLKVError",
    "KVLayout",
    "LayerGroup",
    "PoolFullError",
    "RowForm",
    "Rotary",
    "Selection",
    "States",
    "VirtualRows",
    "object_keys",
}
"""Names in cxlkv.__all__ that are nothing but their fields."""
ELSEWHERE = {
    "CXLStorage": "needs LMCache; its ObjectCache is here",
    "PoolAllocator": "needs LMCache; its ObjectCache is here",
    "Driver": "needs CUDA, which does not cross a fork: tests/gpu/test_gpu_mapping.py",
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A dropped socket is collected by its own test, which ignores the warning, and not by a later
    one: meanwhile nothing is moved to the oldest generation."""
    gc.disable()
    with ExitStack() as after:
        yield World(tmp_path, after, monkeypatch)
    gc.collect(1)
    gc.enable()


def locks_of(owner: object) -> list[threading.Lock]:
    """Locks of the object and of what it is made of, as far as that is ours."""
    seen: dict[int, object] = {}
    left, found = [owner], []
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, (tuple, list, set, dict)):
            left += one.values() if isinstance(one, dict) else one
        elif hasattr(one, "acquire") and hasattr(one, "release"):
            found.append(one)
        elif type(one).__module__.startswith("cxlkv") and not isinstance(one, type):
            left += vars(one).values() if hasattr(one, "__dict__") else ()
    return found  # type: ignore[return-value]


@contextmanager
def held_by_a_thread(locks: list[threading.Lock]) -> Iterator[None]:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as all_of_them:
            for lock in locks:
                all_of_them.enter_context(lock)
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join()


def everything(subject: Subject, closes: bool, in_parent: bool) -> None:
    """Used; closed, twice, or not at all; and dropped."""
    expected = () if in_parent else subject.raises
    if expected:
        with pytest.raises(expected):
            subject.use()
    else:
        subject.use()
    if closes:
        subject.close()
        with suppress(ReleasedError):
            subject.close()
    del subject
    gc.collect(1)  # whatever was made since `world`; a full one takes far longer


@matrix(
    row=[row.make.__name__ for row in OBJECTS],
    first=["child", "parent"],
    end=["closed", "dropped"],
)
def test_a_fork_of(world: World, row: str, first: str, end: str) -> None:
    """The child neither hangs nor disturbs: what the parent does is as without it."""
    make = next(each.make for each in OBJECTS if each.make.__name__ == row)
    subject, closes = [make(world)], end == "closed"

    def child() -> None:
        everything(subject.pop(), closes, in_parent=False)

    if first == "child":
        with held_by_a_thread(locks_of(subject[0].owner)):
            in_child(child)
        everything(subject.pop(), closes, in_parent=True)
        return
    with child_beside(child):
        everything(subject.pop(), closes, in_parent=True)


def test_a_fork_with_everything_alive(world: World) -> None:
    """All at once, each in a world of its own; the child closes all of them, the parent goes on."""
    subjects = []
    for index, row in enumerate(OBJECTS):
        folder = world.folder / str(index)
        folder.mkdir()
        subjects.append(row.make(World(folder, world.after, world.monkeypatch)))

    def child() -> None:
        for subject in reversed(subjects):
            subject.close()

    in_child(child)
    for subject in subjects:
        subject.use()
    for subject in reversed(subjects):
        subject.close()


# ---- what has to be in the table ----

OWNED = {
    f"threading.{name}" for name in ("Lock", "RLock", "Condition", "Event", "Thread", "Semaphore")
}
OWNED |= {"ThreadPoolExecutor", "socket.socket", "socket.create_server"}


def classes() -> Iterator[ast.ClassDef]:
    """Classes of the package, but for what measures it."""
    for folder in ("cxlkv", "ndp", "kernels", "emulation"):
        for path in sorted((REPOSITORY / folder).glob("**/*.py")):
            tree = ast.parse(path.read_text())
            yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


@cache
def owners() -> dict[str, ast.ClassDef]:
    """Classes that keep threads, locks or sockets of their own."""
    found = {}
    for node in classes():
        for each in ast.walk(node):
            if not isinstance(each, (ast.Assign, ast.AnnAssign)) or each.value is None:
                continue
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            calls = {
                ast.unparse(part.func)
                for part in ast.walk(each.value)
                if isinstance(part, ast.Call)
            }
            if calls & OWNED and "self." in "".join(map(ast.unparse, targets)):
                found[node.name] = node
    return found


def covered() -> set[str]:
    return {name for row in OBJECTS for name in row.covers.split()}


def test_every_public_name_is_in_the_table() -> None:
    assert set(cxlkv.__all__) - VALUES <= covered()
    assert set(cxlkv.__all__) >= VALUES


def test_who_has_threads_locks_or_sockets_is_in_the_table() -> None:
    found = owners()
    assert {"Listener", "Remote", "Tiers", "Link", "Counting"} <= set(found)  # the search finds
    assert set(found) - set(ELSEWHERE) <= covered(), "give it a row in OBJECTS"
    assert set(ELSEWHERE) <= set(found)


def test_who_has_threads_locks_or_sockets_begins_anew() -> None:
    """By the one hook; a Driver asks who it is in at each call."""
    for name, node in owners().items():
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        assert "reset_after_fork" in methods or name == "Driver", name


def test_one_that_cannot_be_reset_leaves_the_others_theirs() -> None:
    reset: list[str] = []

    class One:
        def __init__(self, name: str):
            self.name = name
            lifetime.watch(self)

        def reset_after_fork(self) -> None:
            reset.append(self.name)
            raise RuntimeError("no")

    kept = [One("a"), One("b")]

    def check() -> None:
        assert sorted(reset) == ["a", "b"]

    in_child(check)
    assert not reset
    del kept
