"""Pools that keep keys and values as codes: what reads or writes rows refuses them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.errors import UnsupportedError
from cxlkv.gpu.copier import Copier
from cxlkv.gpu.decode import Decoder
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.resident import Resident
from cxlkv.gpu.staging import Staging
from cxlkv.gpu.tables import PageTables
from cxlkv.gpu.write import WriteThrough
from cxlkv.sequence import Sequence

CPU = torch.device("cpu")
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, page_tokens=4, dtype="float32")


@pytest.fixture(params=["int8", "none,int4"])
def pool(request: pytest.FixtureRequest) -> Iterator[CXLPool]:
    layout = LAYOUT.encoded(request.param)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as made:
        yield made


@pytest.fixture
def sequence(pool: CXLPool) -> Iterator[Sequence]:
    made = pool.sequence()
    rows = torch.randn((9, 2, 16), generator=torch.Generator().manual_seed(5))
    for layer in range(2):
        made.append(layer, rows, rows)
    yield made
    made.release()


def decoder(pool: CXLPool, hot_pages: int) -> Decoder:
    given = {"q_heads": 4, "budget": Budget(pages=2), "pages_max": 16, "hot_pages": hot_pages}
    return Decoder(pool, requests=1, **given)  # type: ignore[arg-type]


def resident(pool: CXLPool) -> Resident:
    sizes = {"requests": 1, "rows": 1, "q_heads": 4, "pages_max": 16, "lists": 2}
    more = {"hot_pages": 0, "recent_pages": 2, "scale": 1.0, "softcap": None}
    return Resident(pool, CPU, **sizes, **more)  # type: ignore[arg-type]


def page_table(pool: CXLPool) -> object:
    sequence = pool.sequence()
    try:
        with Mapping(pool, "cpu") as mapping:
            return mapping.pages(sequence, 0)
    finally:
        sequence.release()


READERS: dict[str, Callable[[CXLPool], object]] = {
    "a Decoder": lambda pool: decoder(pool, 0),
    "a Resident": resident,
    "a PageTables": lambda pool: PageTables(pool, 1, 16, 0, CPU),
    "a page table": page_table,
    "a WriteThrough": WriteThrough,
}


@pytest.mark.parametrize("who", READERS)
def test_who_reads_rows_refuses_codes(pool: CXLPool, who: str) -> None:
    with pytest.raises(UnsupportedError) as told:
        READERS[who](pool)
    said = str(told.value)
    assert said.startswith(f"{who}: this pool keeps keys and values as {pool.layout.encoding}")
    assert "without an encoding" in said


def test_a_decoder_of_hot_pages_refuses_them_before_it_takes_memory(pool: CXLPool) -> None:
    with pytest.raises(UnsupportedError, match=r'CXLCache\(attention="device"\)'):
        decoder(pool, 64)


def test_pages_that_somebody_else_has_written_are_refused(pool: CXLPool) -> None:
    pages = pool.pages.alloc(1)
    sequence = pool.sequence()
    with pytest.raises(UnsupportedError, match=r"written by append\(\), which encodes"):
        pool.batch([sequence]).attach(pages, [0, 1], np.zeros((2, 1, 2, 4), np.uint32))
    sequence.release()
    pool.pages.free(pages)


def test_pages_that_go_through_pinned_buffers_are_decoded(
    pool: CXLPool, sequence: Sequence
) -> None:
    batch = pool.batch([sequence])
    queries = torch.randn((1, 2, 16), generator=torch.Generator().manual_seed(6))
    picked = batch.select(1, queries, [0, 1], Budget(pages=2))
    staged = Staging(pool, "cpu").get(batch, 1, picked)
    staged.wait()
    keys, values = (torch.as_tensor(one) for one in batch.fetch(1, picked))
    assert torch.equal(staged.keys, keys)
    assert torch.equal(staged.values, values)
    assert keys.any()


def test_a_region_may_still_be_mapped_and_copied(pool: CXLPool, sequence: Sequence) -> None:
    """Bytes are bytes: a record, or a whole pool, may be moved by a device."""
    with Mapping(pool, "cpu") as mapping:
        source = mapping.device_address + int(sequence.places(0).keys[0])
        found = torch.zeros(64, dtype=torch.uint8)
        tables = (torch.tensor([source]), torch.tensor([found.data_ptr()]))
        Copier(mapping).copy(*tables, 64).wait()
        assert torch.equal(found, mapping.tensor[source - mapping.device_address :][:64])
    assert found.any()
