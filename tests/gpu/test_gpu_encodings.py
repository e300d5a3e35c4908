"""Pools that keep keys and values as codes: a device attends to pages as they are kept."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.errors import UnsupportedError
from cxlkv.gpu.copier import Copier
from cxlkv.gpu.decode import Decoder
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.pieces import encodings_of, pieces_of
from cxlkv.gpu.staging import Staging
from cxlkv.kernels import runtime
from cxlkv.kernels.attend import attend
from cxlkv.ndp.engine import same_pages
from cxlkv.sequence import Sequence

from ..support import kept
from ..support.lengths import nightly
from .test_gpu_decode import GROUP, HEADS, Model, decoder_of, dense, device, resident_of

__all__ = ["device"]  # a fixture

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, page_tokens=4, dtype="float32")
TOKENS = 9
ENCODINGS = ["int8", "int4", "int8,int4", "none,int4"]
NEAR = 1e-3
"""Error of an output by rounding queries and weights: to 14 bits near the data."""


@pytest.fixture(params=ENCODINGS)
def pool(request: pytest.FixtureRequest) -> Iterator[CXLPool]:
    layout = LAYOUT.encoded(request.param)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as made:
        yield made


@pytest.fixture
def sequence(pool: CXLPool) -> Iterator[Sequence]:
    made = pool.sequence()
    rows = torch.randn((TOKENS, 2, 16), generator=torch.Generator().manual_seed(5))
    for layer in range(2):
        made.append(layer, rows, rows)
    yield made
    made.release()


@pytest.fixture
def queries() -> torch.Tensor:
    """[rows, q_heads, dim], of one sequence."""
    return torch.randn((1, 4, 16), generator=torch.Generator().manual_seed(6))


def attended(
    pool: CXLPool, q: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], pages: torch.Tensor
) -> torch.Tensor:
    """By the kernel, of layer 1: [rows, q_heads, dim]."""
    positions = torch.full((1, 1), TOKENS - 1)
    named = {"page_tokens": 4, "encodings": encodings_of(pool.layout)}
    return attend(q[None], *tables, pages, positions, **named)[0][0]  # type: ignore[arg-type]


def test_pages_that_go_through_pinned_buffers_are_decoded(
    pool: CXLPool, sequence: Sequence, queries: torch.Tensor
) -> None:
    batch = pool.batch([sequence])
    picked = batch.select(1, queries, [0, 1], Budget(pages=2))
    staged = Staging(pool, "cpu").get(batch, 1, picked)
    staged.wait()
    keys, values = (torch.as_tensor(one) for one in batch.fetch(1, picked))
    assert torch.equal(staged.keys, keys)
    assert torch.equal(staged.values, values)
    assert keys.any()


def test_pages_may_be_staged_as_they_are_kept_and_attended_to(
    pool: CXLPool, sequence: Sequence, queries: torch.Tensor
) -> None:
    batch = pool.batch([sequence])
    picked = same_pages(range(3), 2)
    with_room = Staging(pool, "cpu", buffer=4096, buffers=2)
    staged = with_room.get(batch, 1, picked, decoded=False)
    staged.wait()
    for got, wanted in zip(
        (staged.keys, staged.values), batch.fetch(1, picked, decoded=False), strict=True
    ):
        assert torch.equal(got, torch.as_tensor(wanted))
    pages = torch.from_numpy(picked.pages)
    found = attended(pool, queries, staged.tables(), pages)
    wanted = torch.as_tensor(batch.attend(1, queries, [0, 1])[0])
    assert (found - wanted).abs().max() < NEAR
    out = (torch.zeros_like(staged.keys), torch.zeros_like(staged.values))
    again = with_room.get(batch, 1, picked, out, decoded=False)
    assert again.keys is out[0]
    assert torch.equal(out[0], staged.keys)
    assert torch.equal(out[1], staged.values)


def test_fewer_bytes_are_staged() -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=128, page_tokens=16).encoded("int8,int4")
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        sequence.append(0, *torch.randn(2, 16, 1, 128).bfloat16())
        picked = same_pages([0], 1)
        staged = Staging(pool, "cpu").get(pool.batch([sequence]), 0, picked, decoded=False)
        assert (staged.keys.nbytes, staged.values.nbytes) == (2080, 1056)
        sequence.release()


def test_a_mapped_pool_is_attended_to_where_it_lies(
    pool: CXLPool, sequence: Sequence, queries: torch.Tensor
) -> None:
    sequence.truncate(8)
    with Mapping(pool, "cpu") as mapping:
        table = mapping.pages(sequence, 1)
        pages = torch.arange(2, dtype=torch.int32).expand(1, 2, 2).contiguous()
        found = attended(pool, queries, (table.keys_at[None], table.values_at[None]), pages)
    wanted = torch.as_tensor(sequence.attend(1, queries)[0])
    assert (found - wanted).abs().max() < NEAR


def test_a_region_may_be_copied(pool: CXLPool, sequence: Sequence) -> None:
    """Bytes are bytes: a record, or a whole pool, may be moved by a device."""
    with Mapping(pool, "cpu") as mapping:
        source = mapping.device_address + int(sequence.places(0).keys[0])
        found = torch.zeros(64, dtype=torch.uint8)
        tables = (torch.tensor([source]), torch.tensor([found.data_ptr()]))
        Copier(mapping).copy(*tables, 64).wait()
        assert torch.equal(found, mapping.tensor[source - mapping.device_address :][:64])
    assert found.any()


# ---- decode ----


class KeptModel(Model):
    """Plain attention is to what the pool keeps of the rows."""

    def plain(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: set[tuple[int, int]] | None,
        window: int | None,
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        k, v = (
            torch.from_numpy(kept.kept(rows.float().numpy(), encoding))
            for rows, encoding in zip((k, v), encodings_of(self.layout), strict=True)
        )
        return super().plain(q, k, v, pages, window)


def kept_model(seed: int, encoding: str, dtype: str, page_tokens: int = 4) -> KeptModel:
    layout = KVLayout(
        layers=2, kv_heads=HEADS, head_dim=16, page_tokens=page_tokens, dtype=dtype
    ).encoded(encoding)
    return KeptModel(seed, layout=layout)


def steps(model: KeptModel, decoder: Decoder, count: int) -> None:
    most = {torch.float32: NEAR, torch.bfloat16: 2e-2}[model.dtype]
    for _ in range(count):
        assert model.step(decoder, None) < most


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hot_pages", [0, 24])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_decoder_attends_to_what_is_kept(
    device: torch.device, seed: int, encoding: str, dtype: str, hot_pages: int
) -> None:
    """The ring of newest pages, the hot buffer and what is fetched for it, all of them codes; or
    the ring, and the near-data engine for the others."""
    model = kept_model(seed, encoding, dtype)
    with dense(model, device, requests=3, hot_pages=hot_pages) as decoder:
        model.add(decoder, 50, 7)
        steps(model, decoder, 5)
        assert decoder.fallback is None


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_speculated_rows_and_a_truncate(device: torch.device, seed: int, encoding: str) -> None:
    model = kept_model(seed, encoding, "float32", page_tokens=16)
    with dense(model, device, rows=3) as decoder:
        request = model.add(decoder, 61)
        steps(model, decoder, 3)
        decoder.truncate(request, 59)
        model.rows[request] = [(k[:59], v[:59]) for k, v in model.rows[request]]
        steps(model, decoder, 2)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="the kernels are compiled here, for the GPU")
@pytest.mark.parametrize("encoding", ["int8,int4", nightly("int4,int8")])
def test_in_the_interpreter_it_is_attention_to_what_is_kept(seed: int, encoding: str) -> None:
    """The kernels themselves, all of them, over two steps and the end of a page."""
    model = kept_model(seed, encoding, "bfloat16")
    with decoder_of(
        model, "cpu", requests=1, budget=Budget(pages=8), pages_max=8, hot_pages=8
    ) as decoder:
        model.add(decoder, 15)
        steps(model, decoder, 2)


def test_without_a_device_it_is_the_engine(seed: int) -> None:
    model = kept_model(seed, "int8", "float32")
    with Decoder(
        model.pool, requests=1, q_heads=HEADS * GROUP, budget=Budget(share=1.0), pages_max=64
    ) as decoder:
        model.add(decoder, 33)
        steps(model, decoder, 2)


def test_slots_have_the_bytes_of_codes(device: torch.device, seed: int) -> None:
    """A page of 4 tokens takes a block of 16, as in the pool."""
    model = kept_model(seed, "int8,int4", "bfloat16")
    with dense(model, device) as decoder:
        hot = resident_of(decoder).hot
        assert hot is not None
        keys, values = hot.pieces(0, 0, 0)
        assert (keys.dtype, values.dtype) == (torch.uint8, torch.uint8)
        assert (keys.shape[1], values.shape[1]) == (16 * 16 + 32, 16 * 8 + 32)


# ---- what is refused ----


@pytest.mark.parametrize("encoding", ["progressive", "fp8_e4m3"])
def test_what_kernels_do_not_read_in_a_pool_is_refused(encoding: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"as {encoding}\. Staging brings them"):
        pieces_of(LAYOUT.encoded(encoding))


def test_planes_are_staged_as_codes_of_8_bits_and_fp8_as_rows(queries: torch.Tensor) -> None:
    rows = torch.randn((TOKENS, 2, 16), generator=torch.Generator().manual_seed(5))
    found = {}
    for encoding in ("int8", "progressive", "fp8_e4m3"):
        layout = LAYOUT.encoded(encoding)
        with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
            sequence = pool.sequence()
            for layer in range(2):
                sequence.append(layer, rows, rows)
            batch, staging = pool.batch([sequence]), Staging(pool, "cpu")
            picked = batch.select(1, queries, [0, 1], Budget(pages=3))
            if encoding == "fp8_e4m3":
                with pytest.raises(UnsupportedError, match="do not attend to fp8"):
                    staging.get(batch, 1, picked, decoded=False)
                assert staging.get(batch, 1, picked).keys.dtype == torch.float32
                continue
            staged = staging.get(batch, 1, picked, decoded=False)
            staged.wait()
            found[encoding] = (staged.keys, staged.values)
    assert torch.equal(found["progressive"][0], found["int8"][0])
    assert torch.equal(found["progressive"][1], found["int8"][1])
