"""State checkpoints go to the cold tier page by page, and come back with all that they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import CXLPool, KVLayout, States, Tiers
from cxlkv.arrays import Codes, Generations, PageIds, RecordBytes
from cxlkv.layout import LayerGroup
from cxlkv.prefix import prefix_keys
from cxlkv.tiers.remote import open_remote
from cxlkv.transport import Remote, Server, pull, push
from cxlkv.transport.far import shape_of
from cxlkv.transport.shards import put_headers

from ..conftest import audit

STATES = States.of([("ssm", (3, 100, 7), "float32"), ("conv", (5, 11), "bfloat16")])
FULL = LayerGroup(layers=2, kv_heads=2, head_dim=16, dtype="float32")
WINDOW = LayerGroup(layers=1, kv_heads=2, head_dim=16, dtype="float32", window=20)
LAYOUTS = {
    "full": KVLayout.of([FULL], page_tokens=8, states=STATES),
    "windows": KVLayout.of([FULL, WINDOW], page_tokens=4, states=STATES),
}
Ids = npt.NDArray[np.int64]


def publish(pool: CXLPool, ids: Ids, states: npt.NDArray[np.uint8]) -> None:
    """A text whose keys are its ids."""
    rows = np.repeat(ids.astype(np.float32), 2 * 16).reshape(len(ids), 2, 16)
    sequence = pool.sequence()
    for layer in range(pool.layout.layers):
        sequence.append(layer, rows + layer, rows)
    pool.publish_prefix(sequence, ids, states=states)
    sequence.release()


def check(pool: CXLPool, tiers: Tiers, ids: Ids, states: npt.NDArray[np.uint8]) -> None:
    """All of the text is found, with its checkpoint."""
    with tiers.match_prefix(np.append(ids, -1)) as hit:
        assert hit.tokens == len(ids)
        np.testing.assert_array_equal(hit.read_states(), states)
        sequence = hit.sequence()
        keys = np.asarray(sequence.fetch(0)[0]).transpose(1, 2, 0, 3).reshape(-1, 2, 16)
        np.testing.assert_array_equal(keys[: len(ids), 0, 0], ids)
        sequence.release()


@pytest.mark.parametrize("name", LAYOUTS)
def test_texts_and_checkpoints_come_back(name: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    layout = LAYOUTS[name]
    with (
        CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool,
        Tiers(pool, cold=tmp_path / "cold", cold_capacity="64MiB") as tiers,
    ):
        texts = [
            (rng.integers(0, 1000, length), rng.integers(0, 256, STATES.bytes).astype(np.uint8))
            for length in rng.integers(3, 300, 40)
        ]
        for ids, states in texts:
            publish(pool, ids, states)
        for ids, states in texts:
            check(pool, tiers, ids, states)
        assert tiers.stats()["promoted_pages"] > 0
        assert tiers.stats()["evicted_pages"] > 0
        audit(pool)


def test_a_checkpoint_behind_a_text_that_went_on(seed: int, tmp_path: Path) -> None:
    """The tail of the first checkpoint is a full page of the longer text, in the cold tier, too."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, 50)
    states = rng.integers(0, 256, (2, STATES.bytes)).astype(np.uint8)
    with (
        CXLPool.create("anonymous:", layout=LAYOUTS["full"], capacity="4MiB") as pool,
        Tiers(pool, cold=tmp_path / "cold", cold_capacity="64MiB") as tiers,
    ):
        publish(pool, ids[:27], states[0])
        publish(pool, ids, states[1])
        tail = prefix_keys(ids[:27], 8, tail=True)[-1]
        found = pool.records.find(pool.records.names(tail).reshape(-1, 16))
        assert (pool.records.forget(*found, only_unheld=True) == 0).all()
        tiers.reclaim(pool.stats()["pages_total"])
        check(pool, tiers, ids, states[1])
        tiers.reclaim(pool.stats()["pages_total"])
        with tiers.match_prefix(ids[:40]) as hit:
            assert hit.tokens == 27
            np.testing.assert_array_equal(hit.read_states(), states[0])


def test_by_keys_of_pages(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    ids, states = rng.integers(0, 1000, 48), rng.integers(0, 256, STATES.bytes).astype(np.uint8)
    with (
        CXLPool.create("anonymous:", layout=LAYOUTS["full"], capacity="4MiB") as pool,
        Tiers(pool, cold=tmp_path / "cold", cold_capacity="64MiB") as tiers,
    ):
        publish(pool, ids[:32], states)
        tiers.reclaim(pool.stats()["pages_total"])
        assert pool.match(prefix_keys(ids, 8)).tokens == 0
        with tiers.match(prefix_keys(ids, 8)) as hit:
            assert hit.tokens == 32
            np.testing.assert_array_equal(hit.read_states(), states)


def test_a_checkpoint_of_which_the_file_lost_a_page_is_none(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    ids, states = rng.integers(0, 1000, 48), rng.integers(0, 256, STATES.bytes).astype(np.uint8)
    with (
        CXLPool.create("anonymous:", layout=LAYOUTS["full"], capacity="4MiB") as pool,
        Tiers(pool, cold=tmp_path / "cold", cold_capacity="64MiB") as tiers,
    ):
        publish(pool, ids, states)
        publish(pool, ids[:20], states)
        tiers.reclaim(pool.stats()["pages_total"])
        records = pool.records
        last = prefix_keys(ids, 8)[-1]
        gone = records.state_names(last, records.state_pages)[0, -1:]
        assert tiers.cold is not None
        assert tiers.cold.drop(gone).all()
        with tiers.match_prefix(ids) as hit:
            assert hit.tokens == 20


def test_reach_ends_at_a_checkpoint(seed: int, tmp_path: Path) -> None:
    """As match() does: pages behind it are of no use. What was asked stays where it is."""
    rng = np.random.default_rng(seed)
    ids, states = rng.integers(0, 1000, 48), rng.integers(0, 256, STATES.bytes).astype(np.uint8)
    keys = prefix_keys(ids, 8)
    with (
        CXLPool.create("anonymous:", layout=LAYOUTS["full"], capacity="4MiB") as pool,
        Tiers(pool, cold=tmp_path / "cold", cold_capacity="64MiB") as tiers,
    ):
        publish(pool, ids, states)
        publish(pool, ids[:16], states)
        assert tiers.reach(keys) == 48
        tiers.reclaim(pool.stats()["pages_total"])
        assert tiers.reach(keys) == 48
        assert tiers.reach(keys[:5]) == 16
        records = pool.records
        gone = records.state_names(keys[-1], records.state_pages)[0, -1:]
        assert tiers.cold is not None
        assert tiers.cold.drop(gone).all()
        assert tiers.reach(keys) == 16
        assert tiers.reach(keys[:1]) == 0
        assert tiers.brought_pages == 0
        with tiers.match(keys) as hit:
            assert hit.tokens == 16
        assert tiers.reach(keys) == 16


@contextmanager
def far_and_near(name: str, folder: Path) -> Iterator[tuple[CXLPool, CXLPool, Tiers]]:
    """A pool, and one whose tiers have that for their remote pool."""
    secret = folder / "secret"
    secret.write_bytes(b"a secret of the tests")
    secret.chmod(0o600)
    with (
        CXLPool.create("anonymous:", layout=LAYOUTS[name], capacity="4MiB") as far,
        CXLPool.create("anonymous:", layout=LAYOUTS[name], capacity="4MiB") as pool,
        Server(far, ("localhost", 0), secret.read_bytes()) as server,
        Tiers(pool, remote=f"tcp://localhost:{server.address[1]}", remote_secret=secret) as tiers,
    ):
        yield far, pool, tiers
        audit(pool)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_remote_pool_has_checkpoints_too(name: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    ids, states = rng.integers(0, 1000, 48), rng.integers(0, 256, STATES.bytes).astype(np.uint8)
    tokens = LAYOUTS[name].page_tokens
    with far_and_near(name, tmp_path) as (far, pool, tiers):
        publish(far, ids[:40], states)
        publish(pool, ids[:24], states[::-1].copy())
        with tiers.match(prefix_keys(ids, tokens)) as hit:
            assert hit.tokens == 40
            np.testing.assert_array_equal(hit.read_states(), states)
        with pool.match(prefix_keys(ids, tokens)) as hit:
            assert hit.tokens == 40
        with tiers.match(prefix_keys(ids[:32], tokens)) as hit:
            assert hit.tokens == 24


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_remote_pool_has_those_behind_any_token(name: str, seed: int, tmp_path: Path) -> None:
    """Tails, of a text that ends there or goes on; what is here already is not read again."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, 61)
    kept = {end: rng.integers(0, 256, STATES.bytes).astype(np.uint8) for end in (5, 27, 32, 59)}
    with far_and_near(name, tmp_path) as (far, pool, tiers):
        for end, states in kept.items():
            publish(far, ids[:end], states)
        for end in (3, 5, 20, 27, 31, 32, 40, 59, 61):
            whole = max((one for one in kept if one <= end), default=0)
            before = tiers.stats()
            with tiers.match_prefix(ids[:end]) as hit:
                assert hit.tokens == whole
                assert not whole or np.array_equal(hit.read_states(), kept[whole])
            read = [tiers.stats()[it] - before[it] for it in ("remote_bytes", "remote_link_bytes")]
            assert end in kept or read == [0, 0]
            assert end == 32 or read[0] == read[1]
        check(pool, tiers, ids[:59], kept[59])
        stats = tiers.stats()
        assert stats["remote_pages"] * pool.records.shape[0] == stats["remote_bytes"]
        assert stats["remote_errors"] == stats["remote_damaged"] == stats["remote_stale"] == 0


def test_where_all_names_differ_there(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    ids, states = rng.integers(0, 1000, 43), rng.integers(0, 256, STATES.bytes).astype(np.uint8)
    secret, delta = tmp_path / "secret", rng.bytes(16)
    with (
        far_and_near("full", tmp_path) as (far, first, _),
        CXLPool.create("anonymous:", layout=LAYOUTS["full"], capacity="4MiB") as pool,
        Server(far, ("localhost", 0), secret.read_bytes()) as server,
    ):
        publish(first, ids, states)
        rows = first.hotness.published().rows
        records = np.empty((len(rows), first.records.shape[0]), np.uint8)
        assert not first.records.read(rows["page"].copy(), rows["generation"].copy(), records).any()
        put_headers(records, shape_of(far), records[:, :64], delta)
        assert not far.records.write(records).any()
        address = f"tcp://localhost:{server.address[1]}"
        with Tiers(pool, remote=open_remote(pool, [address], secret, delta=delta)) as tiers:
            check(pool, tiers, ids, states)
            audit(pool)


def test_a_window_has_gaps_there(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    ids, states = rng.integers(0, 1000, 59), rng.integers(0, 256, STATES.bytes).astype(np.uint8)
    with far_and_near("windows", tmp_path) as (far, pool, tiers):
        publish(far, ids, states)
        names = far.records.names(prefix_keys(ids, 4).packed[:9].tobytes())[:, 0, -1]
        gone = far.records.find(np.ascontiguousarray(names))
        assert (far.records.forget(*gone, only_unheld=True) == 0).all()
        check(pool, tiers, ids, states)
        assert tiers.stats()["remote_stale"] == 0


def test_a_tail_that_is_a_full_page_there_by_now(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, 50)
    states = rng.integers(0, 256, (2, STATES.bytes)).astype(np.uint8)
    with far_and_near("full", tmp_path) as (far, _, tiers):
        publish(far, ids[:27], states[0])
        publish(far, ids, states[1])
        tail = prefix_keys(ids[:27], 8, tail=True)[-1]
        found = far.records.find(far.records.names(tail).reshape(-1, 16))
        assert (far.records.forget(*found, only_unheld=True) == 0).all()
        with tiers.match_prefix(ids[:40]) as hit:
            assert hit.tokens == 27
            np.testing.assert_array_equal(hit.read_states(), states[0])


@pytest.mark.parametrize("what", ["a state's page", "a page", "the tail", "damage", "meanwhile"])
def test_what_is_gone_there_ends_at_the_checkpoint_before(
    what: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is looked for, or after that, as another process may take it at any time."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, 43)
    states = rng.integers(0, 256, (2, STATES.bytes)).astype(np.uint8)
    with far_and_near("full", tmp_path) as (far, _, tiers):
        publish(far, ids[:16], states[0])
        publish(far, ids, states[1])
        records, read = far.records, far.records.read
        tail = prefix_keys(ids, 8, tail=True)[-1]
        names = {
            "a state's page": records.state_names(tail, records.state_pages)[0, -1:],
            "a page": records.names(prefix_keys(ids, 8)[3]).reshape(-1, 16),
        }.get(what, records.names(tail).reshape(-1, 16))

        def late(pages: PageIds, generations: Generations, out: RecordBytes) -> Codes:
            if what == "meanwhile":
                records.forget(*records.find(names), only_unheld=True)
            codes = read(pages, generations, out)
            out[:, -1] ^= what == "damage"
            return codes

        if what in ("damage", "meanwhile"):
            monkeypatch.setattr(records, "read", late)
        else:
            records.forget(*records.find(names), only_unheld=True)
        with tiers.match_prefix(ids) as hit:
            assert hit.tokens == 16
            np.testing.assert_array_equal(hit.read_states(), states[0])
        stats = tiers.stats()
        assert stats["remote_off"] == 0
        assert (stats["remote_damaged"] > 0) == (what == "damage")
        assert (stats["remote_stale"] > 0) == (what == "meanwhile")


def test_pull_and_push_take_checkpoints_along(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, states = rng.integers(0, 1000, 48), rng.integers(0, 256, STATES.bytes).astype(np.uint8)
    layout = LAYOUTS["full"]
    pools = [CXLPool.create("anonymous:", layout=layout, capacity="4MiB") for _ in range(3)]
    with (
        pools[0] as far,
        pools[1] as near,
        pools[2] as third,
        Server(far, ("localhost", 0), b"a secret of the tests") as server,
        Remote(f"localhost:{server.address[1]}", b"a secret of the tests") as remote,
    ):
        publish(near, ids, states)
        assert push(remote, near, prefix_keys(ids, 8)).tokens == 48
        assert pull(remote, third, prefix_keys(ids, 8)).tokens == 48
        for pool in (far, third):
            with pool.match(prefix_keys(ids, 8)) as hit:
                np.testing.assert_array_equal(hit.read_states(), states)
