"""Objects with tiers: a full pool makes room, what is held stays, and the cold file gives back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from cxlkv import CXLPool, KVLayout, ObjectPool, Tiers, object_keys
from cxlkv.arrays import Bytes, leading
from cxlkv.emulation.link import emulate
from cxlkv.errors import BadArgumentError, PoolFullError, QuotaError
from cxlkv.machine.costs import Costs
from cxlkv.objects import ABSENT, DAMAGED
from cxlkv.tiers.cold_shared import SharedColdTier
from cxlkv.tiers.local import LocalTier
from cxlkv.tiers.quota import Quota

from ..conftest import audit
from ..support.damaging import change_byte
from ..support.forking import in_child
from ..support.processes import Child

SIZE = 64 << 10
LAYOUT = KVLayout.objects(SIZE)


def made(name: object, version: int = 0) -> Bytes:
    """What follows from a name, of a size that does, too."""
    rng = np.random.default_rng([*str(name).encode(), version])
    return rng.integers(0, 256, int(rng.integers(1, SIZE + 1)), np.uint8)


def got(pool: ObjectPool, name: str) -> Bytes | None:
    out = np.empty(SIZE, np.uint8)
    size = pool.get_into(name, out)
    return None if size is None else out[:size]


def assert_is(pool: ObjectPool, name: str, version: int = 0) -> None:
    found = got(pool, name)
    assert found is not None
    assert np.array_equal(found, made(name, version))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ObjectPool]:
    with ObjectPool.create(tmp_path / "objects", layout=LAYOUT, capacity="5MiB", threads=2) as pool:
        yield pool
        audit(pool)
        assert pool.stats()["pages_held"] == 0


@pytest.fixture
def tiers(pool: ObjectPool, tmp_path: Path) -> Iterator[Tiers]:
    with Tiers(pool, cold=tmp_path / "cold", cold_capacity="16MiB", fsync="none") as tiers:
        yield tiers
        assert isinstance(tiers.cold, SharedColdTier)
        assert tiers.cold.check(deep=True) == []


def put_until_full(pool: ObjectPool) -> list[str]:
    names: list[str] = []
    while pool.stats()["pages_free"]:
        names.append(f"first {len(names)}")
        assert pool.put(names[-1], made(names[-1]))
    return names


# ---- texts ----

BLOCKS, TEXTS = 64, 20
POLICIES = ["adaptive", "lru"]
Text = list[str]


def useful(pool: ObjectPool, texts: Sequence[Text]) -> float:
    """Share of the objects left of texts that can be found, as all before them is there, too."""
    stay: set[str] = set()
    found: set[str] = set()
    for text in texts:
        there = pool.object_sizes(text) >= 0
        stay.update(key for key, is_there in zip(text, there, strict=True) if is_there)
        found.update(text[: leading(there)])
    assert len(stay) > 0.9 * pool.stats()["pages_total"]
    return len(found) / len(stay)


def put_text(pool: ObjectPool, text: Text, first: int = 0, end: int = BLOCKS) -> None:
    """A part of it, for which what is before it makes no room."""
    before = text[max(0, first - 1) : first]
    with pool.lease(before):
        pool.put_batch(text[first:end], [b"x"] * (end - first))
    assert pool.chain(before + text[first:end]) >= end - first


def stored_whole(pool: ObjectPool, texts: list[Text], chance: Random) -> None:
    for text in texts:
        put_text(pool, text)


def stored_in_turn(pool: ObjectPool, texts: list[Text], chance: Random) -> None:
    for first in range(0, BLOCKS, 8):
        for text in texts:
            put_text(pool, text, first, first + 8)


def read_in_between(pool: ObjectPool, texts: list[Text], chance: Random) -> None:
    """Read the ends of what is there, like an engine that has the beginning; put the rest."""
    out = np.empty((BLOCKS, 4096), np.uint8)
    for _ in range(4 * TEXTS):
        text = texts[min(TEXTS - 1, int(chance.expovariate(0.15)))]
        there = leading(pool.object_sizes(text) >= 0)
        if there:
            some = text[chance.randrange(there) : there]
            pool.get_batch_into(some, list(out[: len(some)]))
        put_text(pool, text, min(there, BLOCKS - 1))


def of_one_beginning(pool: ObjectPool, texts: list[Text], chance: Random) -> None:
    for text in texts:
        text[: BLOCKS // 2] = texts[0][: BLOCKS // 2]
        put_text(pool, text)


def raised(pool: ObjectPool, texts: list[Text], chance: Random) -> None:
    for number, text in enumerate(texts):
        put_text(pool, text)
        if number % 3 == 0:
            pool.admin.prioritize(text[BLOCKS // 2 :], 1 + number)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "fill", [stored_whole, stored_in_turn, read_in_between, of_one_beginning, raised]
)
def test_what_stays_of_texts_can_be_found(
    policy: str, fill: Callable[[ObjectPool, list[Text], Random], None]
) -> None:
    """A third of 20 texts. Some of what was put last may have lost its beginning meanwhile."""
    texts = [[f"text {text}, {block}" for block in range(BLOCKS)] for text in range(TEXTS)]
    layout = KVLayout.objects("4KiB")
    with ObjectPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        with Tiers(pool, policy=policy):
            fill(pool, texts, Random(1))
            assert useful(pool, texts) >= 0.98
        audit(pool)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_its_beginning_a_text_goes_first(pool: ObjectPool, policy: str) -> None:
    """Also when it was used last; with it again, it is like any other."""
    with Tiers(pool, policy=policy):
        names = put_until_full(pool)
        lost, whole, others = names[:5], names[5:10], names[10:]
        pool.chain(lost), pool.chain(whole)
        pool.forget(lost[:1])
        pool.lease(lost[1:]).release()
        for i in range(5):
            assert pool.put(f"more {i}", b"x")
        assert not (pool.object_sizes(lost) >= 0).any()
        assert (pool.object_sizes(whole + others) >= 0).all()
        put_text(pool, lost, 0, 5)
        pool.put("still more", b"x")
        assert leading(pool.object_sizes(lost) >= 0) >= 4


FILLER = """
import sys
from contextlib import suppress
from cxlkv import ObjectPool, Tiers
from cxlkv.errors import PoolFullError
path, number, texts, blocks = sys.argv[1], *map(int, sys.argv[2:])
with ObjectPool.open(path, threads=1) as pool, Tiers(pool, policy="lru"):
    print("ready", flush=True)
    sys.stdin.readline()
    for text in range(texts):
        keys = [f"{number}: {text}, {block}" for block in range(blocks)]
        with suppress(PoolFullError):  # the other one evicted what this one chose
            pool.put_batch(keys, [b"x"] * blocks)
        pool.chain(keys)
    print("done", flush=True)
"""


def test_processes_that_evict_leave_beginnings(tmp_path: Path) -> None:
    path, numbers = tmp_path / "shared", range(2)
    with ObjectPool.create(path, layout=KVLayout.objects("4KiB"), capacity="4MiB") as pool:
        with ExitStack() as stack:
            given = [("-c", FILLER, path, number, TEXTS, BLOCKS) for number in numbers]
            children = [stack.enter_context(Child(*words)) for words in given]
            for child in children:
                assert child.hear() == "ready"
            for child in children:
                child.tell("go")
            for child in children:
                assert child.hear() == "done"
        texts = [
            [f"{number}: {text}, {block}" for block in range(BLOCKS)]
            for number in numbers
            for text in range(TEXTS)
        ]
        assert useful(pool, texts) >= 0.9
        audit(pool)


def test_of_a_text_in_the_file_the_beginning_comes_back(pool: ObjectPool, tmp_path: Path) -> None:
    """It comes back as far as there is space; and the file drops its end first."""
    text, total = [f"block {i}" for i in range(60)], pool.stats()["pages_total"]
    with Tiers(pool, cold=tmp_path / "cold", cold_capacity="7MiB", fsync="none") as tiers:
        for first in range(0, 60, 10)[::-1]:
            pool.put_batch(text[first : first + 10], [b"x"] * 10)
            pool.chain(text[first : first + 10])
            tiers.reclaim(total)
        tiers._batch = 4
        back = tiers.restore(text)
        assert leading(back) == back.sum() == total // 4 * 4 < len(text)
        pool.chain(text)
        for number in range(2 * total):
            pool.put(f"other {number}", b"x")
        there = tiers.contains(text)
        assert 0 < leading(there) == there.sum() < len(text)


# ---- making room ----


def test_without_tiers_a_full_pool_says_so(pool: ObjectPool) -> None:
    put_until_full(pool)
    for call in (lambda: pool.put("one more", b"x"), lambda: pool.reserve([1])):
        with pytest.raises(PoolFullError):
            call()
    assert pool.object_sizes(["one more"]).tolist() == [ABSENT]


def test_what_is_held_or_pinned_makes_no_room(pool: ObjectPool) -> None:
    names = put_until_full(pool)
    pool.admin.pin(names[:3])
    with Tiers(pool), pool.lease(names[3:6]) as lease:
        for i in range(3 * len(names)):
            assert pool.put(f"next {i}", made(f"next {i}"))
        assert (pool.object_sizes(names[:6]) > 0).all(), "leased and pinned ones stay"
        assert not (pool.object_sizes(names[6:]) > 0).any()
        for name, view in zip(names[3:6], lease.views, strict=True):
            assert np.array_equal(np.asarray(view), made(name))
        for _ in names[6:]:
            reserved = pool.reserve([1])
            assert pool.stats()["pages_held"] == 4, "a reservation makes room, too"
            reserved.release()
        with pytest.raises(PoolFullError), pool.reserve([1] * (len(names) - 5)):
            pass
        with pool.reserve([1] * (len(names) - 6)):
            assert pool.stats()["pages_published"] == 6


def test_what_is_asked_for_stays(pool: ObjectPool) -> None:
    with Tiers(pool):
        names = put_until_full(pool)
        for i in range(2 * len(names)):
            pool.put(f"scan {i}", b"x")
            pool.lease(names[:5]).release()
        assert (pool.object_sizes(names[:5]) > 0).all()


# ---- the cold file ----


def test_what_went_comes_back(pool: ObjectPool, tiers: Tiers) -> None:
    names = put_until_full(pool)
    later = [f"later {i}" for i in range(len(names))]
    pool.put_batch(later, [made(name) for name in later])
    assert not (pool.object_sizes(names) > 0).any()
    assert tiers.contains([*names, "absent"]).tolist() == [True] * len(names) + [False]
    some = [*names[:5], "absent", names[2]]
    assert tiers.restore(some).tolist() == [True] * 5 + [False, True]
    for name in names[:5]:
        assert_is(pool, name)
    assert tiers.restore(names[:5]).all()
    assert tiers.stats()["promoted_pages"] == 5
    for name in later:  # wherever they are by now
        assert tiers.restore([name]).all()
        assert_is(pool, name)


def test_as_many_come_back_as_there_is_room_for(pool: ObjectPool, tiers: Tiers) -> None:
    names = put_until_full(pool)
    pool.put_batch(more := [f"more {i}" for i in range(len(names))], [b"x"] * len(names))
    with pool.lease(more[:-4]):
        assert tiers.restore(names).sum() == 0, "all have room, or the next ones are asked for"
        assert tiers.stats()["refused_pages"] == len(names)
        assert tiers.restore(names[:4]).all()
        assert tiers.restore(names[2:6]).all()
        assert not tiers.restore([*names[:1], *names[2:6]])[0], "of one call, none makes room"


def test_a_bouncing_object_is_written_once(pool: ObjectPool, tiers: Tiers) -> None:
    assert tiers.cold is not None
    pool.put("a", made("a"))
    for _ in range(3):
        tiers.reclaim(pool.stats()["pages_total"])
        assert got(pool, "a") is None
        assert tiers.restore(["a"]).all()
        assert_is(pool, "a")
    assert tiers.cold.stats()["stored"] == 1


def test_other_bytes_under_a_name_replace_the_old_ones(pool: ObjectPool, tiers: Tiers) -> None:
    """Once the first ones came back: a page's name says what is in it, an object's does not."""
    everything = pool.stats()["pages_total"]
    for version in range(3):
        assert pool.put("a", made("a", version))
        tiers.reclaim(everything)
        assert tiers.restore(["a"]).all()
        assert_is(pool, "a", version)
        assert pool.forget(["a"]) == 1


def test_bytes_of_an_earlier_opening_are_replaced(pool: ObjectPool, tmp_path: Path) -> None:
    everything = pool.stats()["pages_total"]
    for version in range(2):
        with Tiers(pool, cold=tmp_path / "cold", cold_capacity="4MiB") as tiers:
            assert tiers.contains(["a"])[0] == (version > 0)
            pool.put("a", made("a", version))
            tiers.reclaim(everything)
    with Tiers(pool, cold=tmp_path / "cold", cold_capacity="4MiB") as tiers:
        assert tiers.restore(["a"]).all()
        assert_is(pool, "a", 1)


def test_a_damaged_record_is_absent_and_no_other_one(
    pool: ObjectPool, tiers: Tiers, tmp_path: Path
) -> None:
    names = list("abcdef")
    pool.put_batch(names, [made(name) for name in names])
    tiers.reclaim(pool.stats()["pages_total"])
    stored = (tmp_path / "cold").read_bytes()
    at = stored.index(made("c").tobytes()[:64] if len(made("c")) > 64 else made("c").tobytes())
    change_byte(tmp_path / "cold", at)
    assert tiers.restore(names).tolist() == [True, True, False, True, True, True]
    assert not tiers.contains(["c"])[0]
    for name in "abdef":
        assert_is(pool, name)
    pool.put("c", made("c"))
    assert_is(pool, "c")


def test_a_damaged_object_does_not_go_to_the_file(pool: ObjectPool, tiers: Tiers) -> None:
    pool.put("a", made("a"))
    assert pool.path is not None
    with pool.lease(["a"]) as lease:
        base = Path(pool.path).read_bytes().index(np.asarray(lease.views[0]).tobytes())
    change_byte(pool.path, base)
    tiers.reclaim(pool.stats()["pages_total"])
    assert tiers.stats()["corrupt_pages"] == 1
    assert not tiers.contains(["a"])[0]


def test_it_outlives_pool_and_process(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from cxlkv import ObjectPool, KVLayout, Tiers
        layout = KVLayout.objects(65536)
        with ObjectPool.create(sys.argv[1], layout=layout, capacity="5MiB") as pool:
            with Tiers(pool, cold=sys.argv[2], cold_capacity="16MiB") as tiers:
                for i in range(100):
                    pool.put(str(i), str(i).encode() * 1000)
                tiers.reclaim(pool.stats()["pages_total"])
        ObjectPool.remove(sys.argv[1])
    """
    arguments = [str(tmp_path / "gone"), str(tmp_path / "cold")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    with (
        ObjectPool.create(tmp_path / "new", layout=LAYOUT, capacity="5MiB") as pool,
        Tiers(pool, cold=tmp_path / "cold", cold_capacity="16MiB") as tiers,
    ):
        for i in range(100):
            assert tiers.restore([str(i)]).all()
            found = got(pool, str(i))
            assert found is not None
            assert found.tobytes() == str(i).encode() * 1000


def test_a_child_has_no_tiers(pool: ObjectPool, tiers: Tiers) -> None:
    names = put_until_full(pool)

    def child() -> None:
        with pytest.raises(PoolFullError):
            pool.put("in the child", b"x")
        assert (pool.object_sizes(names) > 0).all()

    in_child(child)
    pool.put("in the parent", b"x")
    assert tiers.contains(names).all()


def test_what_is_of_k_and_v_is_refused(pool: ObjectPool, tmp_path: Path) -> None:
    for wrong in ({"local": "1MiB"}, {"costs": Costs()}):
        with pytest.raises(BadArgumentError, match="stores objects"):
            Tiers(pool, **wrong)
    with pytest.raises(BadArgumentError, match="costs"):
        Tiers(pool, policy="cost")
    with pytest.raises(BadArgumentError, match="stores objects"):
        LocalTier(pool, "1MiB")
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64)
    with (
        CXLPool.create(tmp_path / "kv", layout=layout, capacity="8MiB") as other,
        Tiers(other) as tiers,
    ):
        for call in (tiers.restore, tiers.contains, tiers.forget):
            with pytest.raises(BadArgumentError, match="pools of objects"):
                call(["a"])


# ---- what it costs on a link ----


def test_a_link_is_charged_what_is_moved(pool: ObjectPool, tiers: Tiers) -> None:
    assert tiers.cold is not None
    record = tiers.cold.shape.bytes
    with emulate(pool, "astera-a1000", mode="virtual") as link:
        pool.put_batch(["a", "b"], [bytes(1000), bytes(50)])
        assert link.bytes["append"] == 1050
        pool.put_batch(["a", "c"], [bytes(1000), bytes(7)])
        assert link.bytes["append"] == 1057
        with pool.reserve([300, 9]) as reserved:
            reserved.publish(["d"], [0])
        assert link.bytes["append"] == 1357
        pool.get_batch_into(["a", "absent"], [bytearray(1000), bytearray(9)])
        pool.get_ranges(["a"], [[0, 5, 10, 0], [0, 0, 3, 0]], bytearray(10))
        assert link.bytes["fetch"] == 1013
        pool.lease(["b", "absent"]).release()
        assert link.bytes["fetch"] == 1063
        tiers.reclaim(pool.stats()["pages_total"])
        assert link.bytes["demote"] == 4 * record
        tiers.restore(["a", "b", "absent"])
        assert link.bytes["restore"] == 2 * record


# ---- against a dictionary ----

NAMES = [f"n{i}" for i in range(12)]


class Moves(RuleBasedStateMachine):
    """What a name has is what was put last; it may be absent after an eviction without a file, but
    with one that is large enough it comes back. Another handle of the pool looks on."""

    folder: Path

    @initialize(cold=st.booleans())
    def begin(self, cold: bool) -> None:
        self.path = self.folder / f"pool{id(self)}"
        file = {"cold": self.folder / f"cold{id(self)}", "cold_capacity": "8MiB"} if cold else {}
        self.pool = ObjectPool.create(self.path, layout=LAYOUT, capacity="4MiB", threads=1)
        self.tiers = Tiers(self.pool, **file, fsync="none")  # type: ignore[arg-type]
        self.other = ObjectPool.open(self.path)
        self.model: dict[str, int] = {}
        self.version = 0
        self.cold = cold

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=12, unique=True))
    def put(self, names: list[str]) -> None:
        self.version += 1
        there = self.tiers.contains(names)
        wanted = [name for name, is_there in zip(names, there, strict=True) if not is_there]
        new = self.pool.put_batch(wanted, [made(name, self.version) for name in wanted])
        assert new.all()
        self.model |= dict.fromkeys(wanted, self.version)

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=12))
    def restore(self, names: list[str]) -> None:
        there = self.tiers.restore(names)
        if self.cold:
            assert there.tolist() == [name in self.model for name in names]
        for name, is_there in zip(names, there, strict=True):
            if is_there:
                assert_is(self.pool, name, self.model[name])
                assert_is(self.other, name, self.model[name])

    @rule(name=st.sampled_from(NAMES))
    def get(self, name: str) -> None:
        if (found := got(self.other, name)) is not None:
            assert np.array_equal(found, made(name, self.model[name]))

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    def forget(self, names: list[str]) -> None:
        found = self.tiers.forget(names)
        known = {name for name in names if name in self.model}
        assert found <= len(known)
        assert not self.cold or found == len(known)
        for name in known:
            del self.model[name]

    @rule(name=st.sampled_from(NAMES))
    def forget_and_put_elsewhere(self, name: str) -> None:
        """By another handle of the pool, which knows nothing of the file."""
        self.version += 1
        if self.other.forget(object_keys([name])):
            assert self.other.put(name, made(name, self.version))
            self.model[name] = self.version

    @rule(pages=st.sampled_from([2, 4, 100]))
    def evict(self, pages: int) -> None:
        stats = self.pool.stats()
        self.tiers.reclaim(min(stats["pages_free"] + pages, stats["pages_total"]))

    @invariant()
    def nothing_is_held(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.stats()["pages_held"] == 0

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.other.close()
        self.tiers.close()
        audit(self.pool)
        self.pool.close()
        for path in self.folder.glob(f"*{id(self)}"):
            path.unlink()


def test_moves_against_a_dictionary(tmp_path: Path) -> None:
    Moves.folder = tmp_path
    run_state_machine_as_test(
        Moves, settings=settings(max_examples=30, stateful_step_count=25, deadline=None)
    )


# ---- objects in several slots ----

SLOT = 4 << 10


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[tuple[ObjectPool, Tiers]]:
    layout = KVLayout.objects(SIZE, slot=SLOT)
    with (
        ObjectPool.create(tmp_path / "slots", layout=layout, capacity="5MiB") as pool,
        Tiers(pool, cold=tmp_path / "cold", cold_capacity="32MiB", fsync="none") as tiers,
    ):
        yield pool, tiers
        audit(pool)
        assert pool.stats()["pages_held"] == pool.stats()["corrupt_pieces"] == 0


def test_objects_in_slots_go_whole_and_come_back(slots: tuple[ObjectPool, Tiers]) -> None:
    pool, tiers = slots
    names = [f"n{i}" for i in range(400)]
    for name in names:
        assert pool.put(name, made(name))
        sizes = pool.object_sizes(names)
        assert (sizes != DAMAGED).all()
    taken = -(-np.array([made(name).size for name in names]) // SLOT)
    gone = [name for name, size in zip(names, sizes.tolist(), strict=True) if size == ABSENT]
    assert gone
    there = sizes >= 0
    assert pool.stats()["pages_published"] == taken[there].sum(), "of what went nothing stays"
    assert tiers.contains(names).all()
    for first in range(0, 400, 10):
        some = names[first : first + 10]
        assert tiers.restore(some).all()
        for name in some:
            assert_is(pool, name)
    assert tiers.stats()["corrupt_pages"] == 0


def test_a_text_of_objects_in_slots_ends_first(slots: tuple[ObjectPool, Tiers]) -> None:
    pool, _ = slots
    text = [f"t{i}" for i in range(8)]
    pool.put_batch(text, [made(name) for name in text])
    assert pool.chain(text) == 8
    number = 0
    while (pool.object_sizes(text) >= 0).all():
        pool.put(f"other {number}", made(number))
        number += 1
    for _ in range(30):
        pool.put(f"other {number}", made(number))
        number += 1
        there = pool.object_sizes(text) >= 0
        assert there.sum() == leading(there)


def test_other_bytes_in_slots_replace_the_old_ones(slots: tuple[ObjectPool, Tiers]) -> None:
    pool, tiers = slots
    pool.put("a", made("a", 3))
    tiers.reclaim(pool.stats()["pages_total"])
    assert pool.object_sizes(["a"]).tolist() == [ABSENT]
    pool.put("a", made("a", 4))
    tiers.reclaim(pool.stats()["pages_total"])
    assert tiers.restore(["a"]).all()
    assert_is(pool, "a", 4)
    assert tiers.forget(["a"]) == 1
    assert not tiers.restore(["a"]).any()
    assert tiers.stats()["cold_records"] == 0


def test_a_lost_record_of_a_slot_is_no_object(slots: tuple[ObjectPool, Tiers]) -> None:
    pool, tiers = slots
    data = np.arange(5 * SLOT, dtype=np.uint32).view(np.uint8)[: 5 * SLOT]
    pool.put("a", data)
    tiers.reclaim(pool.stats()["pages_total"])
    assert tiers.cold is not None
    tiers.cold.drop(pool.records.names(object_keys(["a"]).packed.tobytes(), 5)[0, 2])
    assert not tiers.restore(["a"]).any()
    assert pool.stats()["pages_published"] == 0
    assert pool.put("a", data)


def test_a_quota_counts_slots(slots: tuple[ObjectPool, Tiers]) -> None:
    pool, tiers = slots
    quota = Quota(tiers, pages=40)
    for number in range(10):
        key = object_keys([str(number)])
        with quota.room_for(key, 10):
            pool.put_batch(key, [np.full(10 * SLOT - 9, number, np.uint8)])
        assert quota.used() == min(10 * (number + 1), 40)
    with pytest.raises(QuotaError), quota.room_for(object_keys(["large"]), 41):
        pass
    with quota.room_for(object_keys(["9", "new"]), [99, 1]):  # the first is there
        pass
    with quota.bringing(object_keys(["0"])):
        tiers.restore(["0"])
    assert pool.object_sizes(["0"]).tolist() == [10 * SLOT - 9]
    assert quota.used() == 40
