"""A server that answers nonsense: an error of ours, little memory, and the next answer is right."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from cxlkv import Budget, CXLPool
from cxlkv.errors import BadArgumentError, CXLKVError, GeometryError, PeerError
from cxlkv.pages import CORRUPT, STALE, names_of
from cxlkv.prefix import PageKeys
from cxlkv.transport import Remote, RemoteHit, pull, push
from cxlkv.transport.base import CHUNK_BYTES
from cxlkv.transport.far import Shape, shape_of
from cxlkv.transport.loopback import _boot
from cxlkv.transport.verbs import far_of
from cxlkv.transport.wire import BODY_BYTES_MAX, Deadline, Header

from ..support.lengths import nightly
from ..support.liar import Liar, Said, liar_before, lying_once, truth
from ..support.waiting import until
from ..test_records import LAYOUTS, grown
from .test_transport import (
    QUERY,
    SECRET,
    TOKENS,
    ask,
    local,
    made,
    publish,
    remote_of,
    serving,
    what,
)

BYTES_MAX = BODY_BYTES_MAX + 2 * CHUNK_BYTES
"""What a client allocates at most for a server of small records: a message, and a buffer."""


@pytest.fixture(params=["file", "socket"])
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def lied_to(
    folder: Path, link: str, layout: str = "gemma"
) -> Iterator[tuple[CXLPool, Liar, Remote]]:
    """A pool, a liar before its server, and a client of the liar."""
    with (
        made(folder, link, LAYOUTS[layout]) as pool,
        serving(pool, link) as server,
        liar_before(server.address, SECRET) as liar,
    ):
        with remote_of(liar.address, link) as remote:
            remote._attempts = 1
            yield pool, liar, remote
        until(lambda: server.connections() == 0)


@contextmanager
def allocating_less(most: int) -> Iterator[None]:
    """At any time within the block."""
    tracemalloc.start()
    try:
        yield
        found = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found < most


def all_calls(remote: Remote, here: CXLPool, keys: PageKeys, own: PageKeys, handle: bytes) -> None:
    with remote.match(keys) as hit:
        if hit:
            remote.select(hit, 0, np.tile(QUERY, (1, 2, 1)), Budget(pages=2))
            remote.read(hit.pages, hit.generations)
    with remote.adopt(handle) as adopted:
        remote.select(adopted, 1, np.tile(QUERY, (3, 2, 1)), Budget(pages=2, per="sequence"))
    names = here.records.names(keys.packed.tobytes()).reshape(-1, 16)[:4]
    records, codes = remote.named(names, Deadline(remote.deadline_s))
    assert np.array_equal(names_of(records[codes == 0]), names[codes == 0])
    pull(remote, here, keys)
    push(remote, here, own)


def forget(here: CXLPool, keys: PageKeys, pool: CXLPool, own: PageKeys) -> None:
    """So that a pull and a push have work to do again."""
    here.forget(keys)
    pool.forget(own)


class Counting:
    """The truth, and how many answers that are."""

    answers = 0

    def __call__(self, op: str, header: Header, body: bytearray) -> Said:
        self.answers += 1
        return truth(op, header, body)


@pytest.mark.parametrize("trials", [60, nightly(1500)])
def test_an_answer_that_makes_no_sense_is_an_error_of_ours(
    tmp_path: Path, link: str, trials: int, rng: np.random.Generator
) -> None:
    """One answer of each trial is changed. Nothing but our errors is raised, no more than BYTES_MAX
    is allocated, what came is right, and the same client then works."""
    refused = 0
    with lied_to(tmp_path, link) as (pool, liar, remote), local(pool.layout) as here:
        keys, own = publish(pool, rng), publish(here, rng, salt=b"own")
        sequence = grown(pool, rng, TOKENS - 3)
        right, handle = what(pool, keys), sequence.handle
        all_calls(remote, here, keys, own, handle)
        forget(here, keys, pool, own)
        remote.close()
        counting = Counting()
        liar.lie = counting
        all_calls(remote, here, keys, own, handle)
        order = rng.permutation(counting.answers)  # each of them, again and again
        for trial in range(trials):
            forget(here, keys, pool, own)
            remote.close()
            liar.lie = lying_once(rng, int(order[trial % counting.answers]))
            try:
                with allocating_less(BYTES_MAX):
                    all_calls(remote, here, keys, own, handle)
            except CXLKVError:
                refused += 1
            liar.lie = truth
            with here.match(keys) as hit:
                some = keys[: hit.tokens // pool.layout.page_tokens]
            assert not some or what(here, some) == what(pool, some)
            remote.close()  # each connection describes the pool anew
            assert pull(remote, here, keys).tokens == TOKENS
            assert what(here, keys) == right
        sequence.release()
    assert refused > trials / 4, "most lies are to be seen"


SHAPES: dict[str, Callable[[Header, dict[str, int]], object]] = {
    "record": lambda of, geometry: of.update(record_bytes=2**50),
    "record and extent": lambda of, geometry: (
        of.update(record_bytes=2**29),
        geometry.update(extent_bytes=2**50, region_bytes=2**61),
    ),
    "heads of nothing": lambda of, geometry: of.update(kv_heads=2**40, piece_bytes=[0, 0, 0, 0]),
    "table": lambda of, geometry: geometry.update(checksum_bytes=2**40),
    "layers": lambda of, geometry: of.update(part_layers=[1024] * 1024),
    "one part of many layers": lambda of, geometry: of.update(part_layers=[2**40]),
    "no slots": lambda of, geometry: geometry.update(slab_slots=0),
    "pages": lambda of, geometry: geometry.update(page_count=2**40),
    "pages beyond the region": lambda of, geometry: geometry.update(
        page_count=10 * geometry["page_count"]
    ),
    "a layer beyond the extent": lambda of, geometry: geometry.update(layer_bytes=2**50),
    "pieces in one another": lambda of, geometry: geometry.update(keys_offset=0),
    "offsets that wrap": lambda of, geometry: geometry.update(extents_offset=2**63 - 64),
    "less than nothing": lambda of, geometry: of.update(piece_bytes=[-1, 0, 8, 8]),
    "tokens": lambda of, geometry: of.update(page_tokens=2**40),
    "another field": lambda of, geometry: of.update(more=1),
    "another place": lambda of, geometry: geometry.update(more=1),
}


def test_a_record_of_another_name_is_damaged(tmp_path: Path, rng: np.random.Generator) -> None:
    with lied_to(tmp_path, "socket", "float32") as (pool, liar, remote):
        keys = publish(pool, rng)
        names = pool.records.names(keys.packed.tobytes()).reshape(-1, 16)[:3]
        right, codes = remote.named(names, Deadline(remote.deadline_s))
        assert (codes == 0).all()

        def swapped(op: str, header: Header, body: bytearray) -> Said:
            records = right[[1, 0, 2]].tobytes()
            return (header, body[:12] + records) if op == "records" else (header, body)

        liar.lie = swapped
        found, codes = remote.named(names, Deadline(remote.deadline_s))
        assert codes.tolist() == [CORRUPT, CORRUPT, 0]
        assert np.array_equal(found[2], right[2])
        none = np.zeros((1, 16), np.uint8)
        liar.lie = truth
        assert remote.named(none, Deadline(remote.deadline_s))[1].tolist() == [STALE]
        with pytest.raises(BadArgumentError, match="records of"):
            remote.named(np.zeros((1 << 16, 16), np.uint8), Deadline(remote.deadline_s))


@pytest.mark.parametrize("name", SHAPES)
def test_a_pool_that_cannot_be_is_refused_before_anything_is_allocated(
    tmp_path: Path, name: str
) -> None:
    with made(tmp_path, "file", LAYOUTS["float32"]) as pool:
        described = shape_of(pool).model_dump()
    Shape.model_validate(described)
    SHAPES[name](described, described["geometry"])
    with allocating_less(1 << 20), pytest.raises(ValueError, match="validation error"):
        Shape.model_validate(described)


def test_a_pool_that_cannot_be_is_an_error_of_the_connection(tmp_path: Path) -> None:
    with lied_to(tmp_path, "file") as (_, liar, remote):
        liar.lie = lambda op, header, body: ({**header, "record_bytes": 2**50}, body)
        with pytest.raises(PeerError, match="makes no sense: record_bytes"):
            remote.connect()
        liar.lie = truth
        assert remote.match([]).tokens == 0


def test_records_of_another_size_are_another_layout(tmp_path: Path) -> None:
    """A sound description, and the CRC of this layout, of which it is not."""
    with (
        lied_to(tmp_path, "file", "float32") as (pool, liar, remote),
        local(LAYOUTS["float16"]) as other,
    ):
        shape = {**shape_of(other).model_dump(), "layout_crc": pool.records.shape[1]}
        liar.lie = lambda op, header, body: (shape if op == "hello" else header, body)
        with pytest.raises(GeometryError, match="other sizes"):
            pull(remote, pool, [])


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("match", {"hit": 1, "tokens": 2**40, "parts": [10]}),
        ("match", {"hit": 1, "tokens": "x", "parts": []}),
        ("match", {"hit": 1, "tokens": 16}),
        ("match", {"hit": 0, "tokens": 16, "parts": []}),
        ("match", {"hit": 1, "tokens": TOKENS, "parts": [-1]}),
        ("match", {"hit": 1, "tokens": TOKENS, "parts": [2**40]}),
        ("match", {"hit": 1, "tokens": TOKENS, "parts": [5, 5]}),
        ("select", {"shape": [1, 2, 2**40]}),
        ("select", {"shape": [2**32, 2**32, 1]}),
        ("select", {"shape": [1, -2, 3]}),
        ("select", {"per": "other"}),
        ("select", {"stages": {"lists": 1}}),
        ("select", {"bytes_scored": -1}),
        ("lacks", {"more": 1}),
        ("release", {"more": 1}),
    ],
)
def test_a_header_that_makes_no_sense(
    tmp_path: Path, op: str, said: Header, rng: np.random.Generator
) -> None:
    with lied_to(tmp_path, "file", "float32") as (pool, liar, remote):
        keys = publish(pool, rng)

        def lie(asked: str, header: Header, body: bytearray) -> Said:
            if asked != op:
                return header, body
            return ({**header, **said} if op == "select" else said), body

        liar.lie = lie
        hit = None if op == "match" else remote.match(keys)
        if op == "release":  # a client that gives back asks nothing
            assert hit is not None
            hit.release()
        else:
            names = np.zeros((3, 16), np.uint8)
            acts: dict[str, Callable[[], object]] = {
                "match": lambda: remote.match(keys),
                "select": lambda: ask(remote, cast(RemoteHit, hit)),
                "lacks": lambda: remote.lacks(names),
            }
            with pytest.raises(PeerError, match="makes no sense"):
                acts[op]()
        liar.lie = truth
        assert remote.match(keys).tokens == TOKENS
        if hit is not None and op != "release":
            with pytest.raises(CXLKVError, match="lost"):
                hit.number()


QUEUE: Header = {"qp": 1, "psn": 2, "gid": "::1", "lid": 0, "mtu": 3, "reads": 1}
QUEUE |= {"region": [4096, 1 << 20, 7], "staging": [8192, 1 << 20, 8]}


@pytest.mark.parametrize(
    "more",
    [
        {"region": None},
        {"region": [1, 2]},
        {"region": [1, 2, 1 << 32]},
        {"staging": [1 << 63, 2, 3]},
        {"staging": [-1, 2, 3]},
        {"mtu": [3]},
        {"qp": "1"},
        {"more": 1},
    ],
)
def test_a_queue_pair_that_makes_no_sense(more: Header) -> None:
    assert far_of(QUEUE, bytearray()).region == (4096, 1 << 20, 7)
    with pytest.raises(PeerError, match="makes no sense"):
        far_of({**QUEUE, **more}, bytearray())


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "another file", "nothing"])
def test_nothing_is_opened_that_is_not_the_pool(
    tmp_path: Path, kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server names a place here: what is no regular file is not opened, not even for a moment."""
    place = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "another file":
        place.write_bytes(b"private")
    elif kind == "device":
        place = Path("/dev/zero")
    opened: list[str] = []
    plain = os.open

    def spy(path: str, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_PATH:
            opened.append(os.path.realpath(path))
        return plain(path, flags, mode)

    monkeypatch.setattr("cxlkv.transport.loopback.os.open", spy)
    with lied_to(tmp_path, "file", "float32") as (pool, liar, remote):
        keys = publish(pool, rng)

        def lie(op: str, header: Header, body: bytearray) -> Said:
            if op != "loopback":
                return header, body
            found = place.stat() if place.exists() else None
            known = [found.st_dev, found.st_ino] if found and kind != "another file" else [1, 1]
            return {"path": str(place), "file": known, "boot": _boot()}, body

        liar.lie = lie
        assert remote.link == "socket"
        assert str(place) not in opened
        with local(pool.layout) as here:
            assert pull(remote, here, keys).tokens == TOKENS
