"""What a notebook shows of a pool and of what comes from it: one line, whatever its state is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, ObjectPool, _core, object_keys
from cxlkv.bench.cases.calls import counted_calls
from cxlkv.errors import FencedError

from .support.forking import in_child
from .support.texts import DIM, HEADS, SMALL, grown, numbers, publish


@pytest.fixture
def store() -> Iterator[ObjectPool]:
    layout = KVLayout.objects("4KiB")
    with ObjectPool.create("anonymous:", layout=layout, capacity="4MiB") as made:
        yield made


def line(one: object) -> str:
    """Its repr, made by few calls into the core however much it holds."""
    with counted_calls() as calls:
        said = repr(one)
    assert sum(calls.values()) <= 3, calls
    assert "\n" not in said
    assert len(said) < 250
    return said


def test_a_pool_says_what_it_holds(pool: CXLPool) -> None:
    publish(pool, range(8))
    kept = grown(pool, range(100, 110))
    total = pool.stats()["pages_total"]
    said = line(pool)
    assert said.startswith("<CXLPool in anonymous memory: 4 pages used (16 tokens, ")
    assert f", {total - 4:,} pages free ({4 * (total - 4):,} tokens, " in said
    assert "2 published; 2 layers of 2 kv heads x 8 float32, 4 tokens a page>" in said
    kept.release()
    pool.close()
    assert line(pool) == "<CXLPool in anonymous memory: closed>"
    assert line(kept) == "<Sequence: closed>"


def test_a_fenced_pool_says_so(pool: CXLPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fenced(_: object) -> dict[str, int]:
        raise FencedError("declared dead")

    monkeypatch.setattr(_core, "pool_stats", fenced)
    assert repr(pool).endswith(": fenced>")


def test_windows_make_tokens_a_guess() -> None:
    groups = [
        LayerGroup(layers=1, kv_heads=2, head_dim=8, dtype="float32", window=8),
        LayerGroup(layers=1, kv_heads=2, head_dim=8, dtype="float32"),
    ]
    layout = KVLayout.of(groups, page_tokens=4)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        total = pool.stats()["pages_total"]
        assert f"{total:,} pages free (about {4 * (total // 2):,} tokens" in line(pool)
        assert "kv heads x 8 float32, some with a window, 4 tokens" in line(pool)


def test_sequences_and_hits(pool: CXLPool) -> None:
    publish(pool, range(8))
    sequence = grown(pool, range(6))
    assert line(sequence) == "<Sequence: 6 tokens in 2 pages (1.5 KiB)>"
    sequence.append(0, numbers([7], 0, 0), numbers([7], 0, 1))
    assert line(sequence).endswith("7 in layer 0: a step is half done>")
    sequence.release()
    assert line(sequence) == "<Sequence: released>"
    hit = pool.match_prefix(range(8))
    assert re.fullmatch(r"<Hit: 8 tokens in 2 pages \(\d.* KiB\), held>", line(hit))
    hit.release()
    assert line(hit).endswith(", released>")
    assert line(pool.match_prefix([9])).startswith("<Hit: 0 tokens in 0 pages (0 B), ")
    pool.close()
    assert line(hit).endswith(", closed>")


def test_a_selection_is_counted_not_listed(pool: CXLPool) -> None:
    sequence = grown(pool, range(40))
    q = np.ones((3, 2 * HEADS, DIM), np.float32)
    several = line(sequence.select(0, q, Budget(pages=4)))
    assert several.startswith("<Selection: 4 pages for 2 kv heads of 3 queries, chosen by ")
    one = line(sequence.select(0, q[0], Budget(pages=5), method="exact"))
    read = r"[\d.]+ KiB read, [\d.]+ KiB to fetch>"
    assert re.fullmatch(rf"<Selection: 5 pages for 2 kv heads, chosen by exact; {read}", one)


def test_objects_and_leases(store: ObjectPool) -> None:
    store.put_batch(["a", "b"], [b"x" * 1024, b"y" * 2048])
    assert re.match(r"<ObjectPool in anonymous memory: 2 pages used \(8\S* KiB\), ", line(store))
    assert line(store).endswith("; objects of up to 4 KiB>")
    lease = store.lease(["a", "none", "b"])
    assert line(lease) == "<Lease: 2 of 3 objects (3 KiB), held>"
    lease.release_one(0)
    assert line(lease) == "<Lease: 2 of 3 objects (3 KiB), 1 released>"
    lease.release()
    assert line(lease) == "<Lease: 2 of 3 objects (3 KiB), released>"
    with store.reserve([10, 20]) as room:
        room.publish(object_keys(["c"]), [0])
        assert line(room) == "<Reserved: 2 objects (30 B), 1 published, held>"
    store.close()
    assert line(store) == "<ObjectPool in anonymous memory: closed>"
    assert line(lease).endswith("released>")


def test_a_forked_child_has_them_too(shm_path: Path) -> None:
    with CXLPool.create(shm_path, layout=SMALL, capacity="4MiB") as pool:
        publish(pool, range(8))
        with pool.match_prefix(range(8)) as hit:
            kept = [pool, grown(pool, range(6)), hit]
            here = [repr(one) for one in kept[1:]]

            def same() -> None:
                said = [repr(one) for one in kept]
                assert said[0].startswith(f"<CXLPool {shm_path}: ")
                assert said[1:] == here, said

            in_child(same)
