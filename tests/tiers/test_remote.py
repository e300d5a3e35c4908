"""A remote pool below the tiers: what another machine's pool has is found here, bit for bit, also
where other ranks share its heads; and a far pool that fails is a shorter hit, once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, ObjectPool, Tiers
from cxlkv.arrays import NUMPY_DTYPES
from cxlkv.errors import BadArgumentError, SecretError
from cxlkv.layout import DTYPES
from cxlkv.pages import layout_crc
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.tiers import remote as module
from cxlkv.tiers.policy import NONE
from cxlkv.tiers.remote import open_remote, parse_remote
from cxlkv.transport import Remote, Server
from cxlkv.transport.shards import layout_among, renamed

from ..conftest import audit
from ..support.cable import Cable
from ..support.damaging import damage_piece
from ..support.lengths import matrix, nightly
from ..support.liar import Liar, liar_before, lying_once, truth
from ..support.waiting import until
from ..test_records import LAYOUTS, PAGE, names_of_keys, read_all

SECRET = b"a secret of the tests"
TOKENS = 12 * PAGE
DEADLINE_S = 1.0
SERVED = {name: layout for name, layout in LAYOUTS.items() if not layout.has_shapes}
WHOLE = {name: layout for name, layout in SERVED.items() if layout.kv_heads > 1}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@contextmanager
def pool_of(layout: KVLayout, where: object = "anonymous:") -> Iterator[CXLPool]:
    with CXLPool.create(str(where), layout=layout, capacity="4MiB", threads=1) as made:
        yield made
        audit(made)


def keys_of(tokens: int = TOKENS) -> PageKeys:
    return prefix_keys(list(range(tokens)), PAGE)


def fill(pool: CXLPool, tokens: int = TOKENS, keys: PageKeys | None = None) -> None:
    """Publishes the share of the pool's rank in a text of the whole model."""
    layout, sequence = pool.layout, pool.sequence()
    rng = np.random.default_rng(tokens)
    rank, size, _, _ = layout.shard
    heads = slice(rank * layout.kv_heads, (rank + 1) * layout.kv_heads)
    for layer in range(layout.layers):
        shape = (tokens, layout.kv_heads * size, layout.head_dim)
        dtype = NUMPY_DTYPES[DTYPES.index(layout.dtype)]
        k, v = (rng.standard_normal(shape).astype(dtype)[:, heads] for _ in range(2))
        sequence.append(layer, k, v[:, :, : layout.value_head_dim])
    pool.publish(sequence, keys or keys_of(tokens), PAGE)
    sequence.release()


def same_records(pool: CXLPool, right: CXLPool, keys: PageKeys) -> bool:
    """What is here of the prefix, byte for byte; behind a window it is not."""
    names = names_of_keys(pool, keys)
    there = names[pool.records.here(names)]
    return len(there) > 0 and np.array_equal(read_all(pool, there), read_all(right, there))


@contextmanager
def served(layouts: Sequence[KVLayout]) -> Iterator[tuple[list[CXLPool], list[str]]]:
    """Pools, and the addresses where this process serves them; at the end nothing is held."""
    with ExitStack() as stack:
        pools = [stack.enter_context(pool_of(layout)) for layout in layouts]
        servers = [stack.enter_context(Server(one, ("127.0.0.1", 0), SECRET)) for one in pools]
        yield pools, [f"tcp://127.0.0.1:{one.address[1]}" for one in servers]
        until(lambda: all(one.stats()["pages_held"] == 0 for one in pools))


def found(tiers: Tiers, keys: PageKeys) -> int:
    with tiers.match(keys) as hit:
        return hit.tokens


# ---- what comes ----


@matrix(name=WHOLE, ranks=[(1, 1), (2, 1), (1, 2)], chunk=[3, 1000])
def test_it_is_what_this_rank_would_have_written(
    secret: Path,
    name: str,
    ranks: tuple[int, int],
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every record, byte for byte; a prefix of which a part is here; a longer one in its place."""
    there, here = ranks
    monkeypatch.setattr(module, "chunk_records", lambda record_bytes: chunk)
    layout, keys = WHOLE[name], keys_of()
    with served([layout_among(layout, rank, there) for rank in range(there)]) as (pools, addresses):
        for pool in pools:
            fill(pool)
        for rank in range(here):
            own = layout_among(layout, rank, here)
            with pool_of(own) as right, pool_of(own) as pool:
                fill(right)
                remote = open_remote(pool, addresses, secret, ranks=there)
                with Tiers(pool, remote=remote) as tiers:
                    assert found(tiers, keys[:5]) == 5 * PAGE
                    pages = tiers.stats()["remote_pages"]
                    assert found(tiers, keys) == TOKENS
                    assert found(tiers, keys) == TOKENS
                    assert same_records(pool, right, keys)
                    assert tiers.stats()["remote_pages"] > pages > 0
                    assert tiers.match_prefix(list(range(TOKENS))).close() is None
                    assert not tiers.stats()["remote_errors"]


def test_keys_there_may_differ_from_those_here(secret: Path) -> None:
    """By one number for all: the page has the name that it has here, and is found by no other."""
    layout, delta = LAYOUTS["gemma"], bytes(range(16))
    with served([layout]) as (pools, addresses), pool_of(layout) as pool:
        fill(pools[0])
        own = PageKeys(keys_of().packed ^ np.frombuffer(delta, np.uint8), PAGE)
        with Tiers(pool, remote=open_remote(pool, addresses, secret, delta=delta)) as tiers:
            assert found(tiers, keys_of()) == 0
            assert found(tiers, own) == TOKENS
        with pool.match(keys_of()) as hit:
            assert hit.tokens == 0


def test_what_it_continues_is_evicted_after_it(secret: Path) -> None:
    """Chunk by chunk, and behind a part that was here: the chain has no break."""
    layout = LAYOUTS["float32"]
    with served([layout]) as (pools, addresses), pool_of(layout) as pool:
        fill(pools[0])
        with Tiers(pool, remote=addresses, remote_secret=secret) as tiers:
            assert found(tiers, keys_of()[:5]) == 5 * PAGE
            assert found(tiers, keys_of()) == TOKENS
            _, published = tiers.published()
            roots = np.count_nonzero(published.parents == NONE)
            assert roots == 1, "one page that continues none"


def test_as_far_as_there_is_room(secret: Path) -> None:
    """What runs here keeps its pages; what came stays, and is right."""
    layout = LAYOUTS["bfloat16"]
    with served([layout]) as (pools, addresses), pool_of(layout) as pool:
        fill(pools[0])
        running = pool.pages.alloc(pool.stats()["pages_total"] - 5)
        with Tiers(pool, remote=addresses, remote_secret=secret) as tiers:
            assert found(tiers, keys_of()) in range(0, 5 * PAGE + 1)
            assert tiers.stats()["remote_refused"] == 1
            assert not tiers.stats()["remote_off"]
            pool.pages.free(running)
            assert found(tiers, keys_of()) == TOKENS


# ---- what fails ----


@pytest.fixture
def looked_for_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", (0.01, 0.05))


Break = Callable[[Cable], None]


@pytest.mark.usefixtures("looked_for_soon")
@pytest.mark.parametrize("after_bytes", [0, 200, 5_000, 40_000])
@pytest.mark.parametrize("act", [Cable.cut, Cable.hang], ids=["cut", "hangs"])
def test_a_link_that_fails_is_asked_again_when_it_answers(
    secret: Path, act: Break, after_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any byte: in time, right as far as it came, and whole when the link is there again."""
    monkeypatch.setattr(module, "chunk_records", lambda record_bytes: 2)
    layout = LAYOUTS["bfloat16"]
    with served([layout]) as (pools, addresses), pool_of(layout) as pool, pool_of(layout) as right:
        fill(pools[0])
        fill(right)
        with Cable(addresses[0].removeprefix("tcp://")) as cable:
            remote = open_remote(pool, [cable.address], secret, deadline_s=DEADLINE_S)
            with Tiers(pool, remote=remote) as tiers:
                cable.after(after_bytes, act)
                began = time.monotonic()
                some = found(tiers, keys_of())
                assert time.monotonic() - began < 10 * DEADLINE_S
                assert some < TOKENS
                stats = tiers.stats()
                assert stats["remote_errors"] + stats["remote_late"] == 1
                began = time.monotonic()
                if stats["remote_off"]:
                    assert found(tiers, keys_of()) == some
                    assert time.monotonic() - began < DEADLINE_S / 2, "it waited for it again"
                cable.mend()
                until(lambda: remote.is_on)
                assert found(tiers, keys_of()) == TOKENS
                assert same_records(pool, right, keys_of())


@pytest.mark.usefixtures("looked_for_soon")
def test_what_is_wrong_there_is_said_once(secret: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks in another order, a pool of another layout, another secret: nothing comes."""
    halves = [layout_among(LAYOUTS["float32"], rank, 2) for rank in range(2)]
    other = secret.with_name("other")
    other.write_bytes(b"another secret of the tests")
    other.chmod(0o600)
    with served([*halves, LAYOUTS["float16"]]) as (pools, addresses):
        for pool in pools:
            fill(pool)
        for wrong, known in (
            (addresses[1::-1], secret),
            (addresses[2:], secret),
            (addresses[:1], secret),
            (addresses[:2], other),
        ):
            with (
                pool_of(LAYOUTS["float32"]) as pool,
                Tiers(pool, remote=wrong, remote_secret=known) as tiers,
            ):
                caplog.clear()
                assert [found(tiers, keys_of()) for _ in range(5)] == [0] * 5
                said = [one for one in caplog.records if one.levelname == "WARNING"]
                assert len(said) == tiers.stats()["remote_errors"] == 1


@contextmanager
def lied_to(
    secret: Path, layout: KVLayout, rng: np.random.Generator
) -> Iterator[tuple[CXLPool, Tiers, Liar]]:
    """A pool and its tiers, below which is the pool of a server that a liar stands before."""
    with served([layout]) as (pools, addresses), pool_of(layout) as pool:
        fill(pools[0])
        host, _, port = addresses[0].removeprefix("tcp://").partition(":")
        with liar_before((host, int(port)), SECRET) as liar:
            remote = open_remote(pool, [f"tcp://{liar.address}"], secret)
            with Tiers(pool, remote=remote) as tiers:
                yield pool, tiers, liar


@pytest.mark.usefixtures("looked_for_soon")
@pytest.mark.parametrize("trials", [60, nightly(1500)])
@pytest.mark.parametrize("name", ["bfloat16", "gemma"])
def test_answers_that_make_no_sense_are_a_shorter_hit(
    secret: Path, name: str, trials: int, rng: np.random.Generator
) -> None:
    """One of a match's answers is changed, or all are: no error here, nothing wrong is found, and
    all of it once the server is sane."""
    layout, off = LAYOUTS[name], 0
    with lied_to(secret, layout, rng) as (pool, tiers, liar), pool_of(layout) as right:
        fill(right)
        remote = tiers.remote
        assert remote is not None
        for trial in range(trials):
            always = trial % 4 == 0
            if trial % 2:
                remote._forget()
            liar.lie = lying_once(rng, 0 if always else int(rng.integers(6)), always)
            assert found(tiers, keys_of()) in range(0, TOKENS + 1, PAGE)
            names = names_of_keys(pool, keys_of())
            there = names[pool.records.here(names)]
            assert np.array_equal(read_all(pool, there), read_all(right, there))
            off += not remote.is_on
            liar.lie = truth
            until(lambda: remote.is_on)
            found(tiers, keys_of())  # the first one may still use the old description
            assert found(tiers, keys_of()) == TOKENS
            pool.forget(keys_of())
    assert off > trials / 4, "most lies are to be seen"


@pytest.mark.usefixtures("looked_for_soon")
def test_what_looks_for_it_outlives_anything(
    secret: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MemoryError, TypeError: the thread goes on, and the tier comes back."""
    with lied_to(secret, LAYOUTS["bfloat16"], rng) as (_, tiers, _):
        remote = tiers.remote
        assert remote is not None
        for error in (MemoryError(), TypeError("of ours"), KeyError("parts")):
            asked: list[int] = []

            def fail(*_: object, error: Exception = error, asked: list[int] = asked) -> None:
                asked.append(1)
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(Remote, "shape", fail)
                assert found(tiers, keys_of()) == 0
                assert not remote.is_on
                until(lambda asked=asked: len(asked) > 3)  # type: ignore[misc]
            until(lambda: remote.is_on)
        assert found(tiers, keys_of()) == TOKENS


@pytest.mark.usefixtures("looked_for_soon")
def test_another_pool_at_the_same_address_is_found(secret: Path, rng: np.random.Generator) -> None:
    """The tier comes back when a pool of the right layout takes the place of a wrong one."""
    with lied_to(secret, LAYOUTS["bfloat16"], rng) as (_, tiers, liar):
        remote = tiers.remote
        assert remote is not None
        remote._forget()
        liar.lie = lambda op, header, body: (
            {**header, "layout_crc": 1} if op == "hello" else header,
            body,
        )
        assert found(tiers, keys_of()) == 0
        assert not remote.is_on
        liar.lie = truth
        until(lambda: remote.is_on)
        assert found(tiers, keys_of()) == TOKENS


def test_a_damaged_page_ends_the_prefix(secret: Path, tmp_path: Path) -> None:
    """On either rank: what is before it comes, and nothing of it is published."""
    layout = LAYOUTS["bfloat16"]
    halves = [layout_among(layout, rank, 2) for rank in range(2)]
    with ExitStack() as stack:
        pools = [stack.enter_context(pool_of(h, tmp_path / f"{h.shard[0]}")) for h in halves]
        servers = [stack.enter_context(Server(one, ("127.0.0.1", 0), SECRET)) for one in pools]
        for pool in pools:
            fill(pool)
        page, _ = pools[1].records.find(names_of_keys(pools[1], keys_of()[7:8]))
        damage_piece(pools[1], int(page[0]), 1, "keys")
        addresses = [f"tcp://127.0.0.1:{one.address[1]}" for one in servers]
        pool = stack.enter_context(pool_of(layout))
        tiers = stack.enter_context(Tiers(pool, remote=addresses, remote_secret=secret))
        assert found(tiers, keys_of()) == 7 * PAGE
        assert tiers.stats()["remote_damaged"] == 1
        assert pools[1].forget(keys_of()[7:])  # which the audits would find


def test_heads_of_other_pages_are_not_joined(secret: Path) -> None:
    """Were two ranks to answer with pages of other names, nothing would come of them."""
    halves = [layout_among(LAYOUTS["float32"], rank, 2) for rank in range(2)]
    other = bytes(range(16))
    with served(halves) as (pools, addresses), pool_of(LAYOUTS["float32"]) as pool:
        fill(pools[0])
        fill(pools[1], keys=PageKeys(renamed(keys_of().packed, other), PAGE))
        remote = open_remote(pool, addresses, secret)
        remote._sources[1] = replace(remote._sources[1], delta=other)
        with Tiers(pool, remote=remote) as tiers:
            assert found(tiers, keys_of()) == 0
            assert tiers.stats()["remote_stale"] > 0


def test_a_rank_that_has_less_shortens_all(secret: Path) -> None:
    halves = [layout_among(LAYOUTS["gemma"], rank, 2) for rank in range(2)]
    with served(halves) as (pools, addresses), pool_of(LAYOUTS["gemma"]) as pool:
        for one in pools:
            fill(one)
        assert pools[1].forget(keys_of()[9:])
        with Tiers(pool, remote=addresses, remote_secret=secret) as tiers:
            assert found(tiers, keys_of()) == 9 * PAGE


def test_close_ends_what_looks_for_it(secret: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pool_of(LAYOUTS["float32"]) as pool:
        remote = open_remote(pool, ["tcp://127.0.0.1:9"], secret)
        assert "127.0.0.1:9 cannot be reached" in caplog.text  # at once; it may come later
        assert remote.is_on
        tiers = Tiers(pool, remote=remote)
        assert found(tiers, keys_of()) == 0
        assert not remote.is_on
        tiers.close()
        tiers.close()
    assert "cxlkv-remote" not in [one.name for one in threading.enumerate()]


# ---- what is refused ----


def test_addresses() -> None:
    assert parse_remote("tcp://10.0.0.1:7777") == ("10.0.0.1:7777", None)
    assert parse_remote("rdma://[::1]:7?device=mlx5_0") == ("[::1]:7", "mlx5_0")
    for wrong in (
        *("10.0.0.1:7777", "tcp://10.0.0.1", "http://a:1", "rdma://a:1", "tcp://a:1?device=b"),
        *("tcp://a:1/b", "rdma://a:1?devices=b", ""),
    ):
        with pytest.raises(BadArgumentError):
            parse_remote(wrong)


def test_what_cannot_be_had_is_refused(secret: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["float32"]
    one = "tcp://127.0.0.1:9"
    with pool_of(layout) as pool:
        for given in ({"remote": one}, {"remote_secret": secret}):
            with pytest.raises(BadArgumentError, match="go together"):
                Tiers(pool, **given)
        with pytest.raises(BadArgumentError, match="2 kv heads"):
            Tiers(pool, remote=[one] * 3, remote_secret=secret)
        with pytest.raises(BadArgumentError, match="one for each of 2 ranks"):
            open_remote(pool, [one], secret, ranks=2)
        secret.chmod(0o644)
        with pytest.raises(SecretError, match="chmod 600"):
            Tiers(pool, remote=one, remote_secret=secret)
    secret.chmod(0o600)
    blocks = KVLayout.objects(4096)
    with (
        ObjectPool.create("anonymous:", layout=blocks, capacity="8MiB") as objects,
        pytest.raises(BadArgumentError, match="pools of objects"),
    ):
        Tiers(objects, remote=one, remote_secret=secret)


@pytest.mark.parametrize("sketch", [True, False])
@pytest.mark.parametrize("name", SERVED)
def test_the_layout_says_what_pools_agree_in(name: str, sketch: bool) -> None:
    with CXLPool.create(
        "anonymous:", layout=LAYOUTS[name], capacity="4MiB", sketch=sketch, threads=1
    ) as pool:
        assert layout_crc(pool.layout, sketch) == pool.records.shape[1]
