"""The bytes of pages that a GPU writes, against those that the C core writes for the same rows."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes  # noqa: F401  numpy's name of bfloat16
import numpy as np
import numpy.typing as npt
import pytest
import torch

from cxlkv import CXLPool, KVLayout, LayerGroup, _core
from cxlkv.arrays import Bytes
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.kernels import crc32c, encode
from cxlkv.kernels.crc32c_shifts import lanes_for
from cxlkv.kernels.encode import Encoded
from cxlkv.kernels.reference_encode import hadamard
from cxlkv.pages import checksums_at, layer_places, places_of

from ..support.lengths import matrix

SEED = 7010
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# page_tokens, heads, dim, value_dim; None: values are a prefix of the keys
SHAPES = [(16, 2, 64, 64), (5, 1, 7, 3), (20, 2, 96, 80), (1, 1, 1, 1), (16, 1, 144, None)]


@pytest.fixture(params=["kernel", "reference"])
def where(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> torch.device:
    """Where the tensors lie; by the kernels, or as on a CPU without the interpreter. Fresh memory
    is full of ones, so that what nobody writes is seen."""
    if request.param == "reference":
        for module in (encode, crc32c):
            monkeypatch.setattr(module, "runs_triton", lambda device: False)
    empty = torch.empty

    def poisoned(*shape: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = empty(*shape, **options)  # type: ignore[call-overload]
        return made.fill_(255) if made.dtype == torch.uint8 else made

    monkeypatch.setattr(torch, "empty", poisoned)
    return device


def rows(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    made = generator.standard_normal(shape).astype(np.float32)
    made *= np.exp2(generator.integers(-3, 4, shape[-1])).astype(np.float32)
    return torch.from_numpy(made).to(DTYPES[dtype])


class Written:
    """What the C core wrote for one layer: pieces as in Encoded, from the mapped file."""

    def __init__(
        self,
        path: Path,
        k: torch.Tensor,
        v: torch.Tensor | None,
        page_tokens: int,
        dtype: str,
        encodings: tuple[str, str] = ("none", "none"),
    ) -> None:
        heads, dim = k.shape[1:]
        group = LayerGroup(
            layers=1,
            kv_heads=heads,
            head_dim=dim,
            value_head_dim=dim if v is None else v.shape[2],
            dtype=dtype,
            values="key_prefix" if v is None else "own",
            k_encoding=encodings[0],
            v_encoding=encodings[1],
        )
        layout = KVLayout.of([group], page_tokens=page_tokens)
        where, capacity = path / "pool", "64MiB"
        with CXLPool.create(where, layout=layout, capacity=capacity, sketch=True) as pool:
            sequence = pool.sequence()
            sequence.append(0, k, v)
            geometry = _core.pool_geometry(pool._handle)
            pages = sequence.pages
            places = places_of(geometry, layer_places(layout, geometry)[0], pages)
            memory = np.fromfile(path / "pool", np.uint8)

            def pieces(offsets: npt.NDArray[np.int64] | None, size: int) -> Bytes:
                assert offsets is not None
                index = offsets[:, None] + np.arange(heads * size)
                found: Bytes = memory[index].reshape(len(pages), heads, size)
                return found

            self.keys = pieces(places.keys, geometry["key_piece_bytes"])
            self.digests = pieces(places.digests, geometry["digest_piece_bytes"])
            self.sketches = pieces(places.sketches, geometry["sketch_piece_bytes"])
            self.values = None
            if v is not None:
                self.values = pieces(places.values, geometry["value_piece_bytes"])
            self.checksums = pieces(checksums_at(geometry, pages), 16).view(np.uint32)


def taken(tensor: torch.Tensor | None) -> Bytes:
    assert tensor is not None
    return tensor.cpu().numpy()


def codes_and_scales(sketch: Bytes, dim: int) -> tuple[Bytes, npt.NDArray[np.float32]]:
    """[..., tokens, channels] and [..., tokens]; tokens and channels that are not there, too."""
    groups = -(-dim // 16)
    blocks = sketch.reshape(*sketch.shape[:2], -1, groups + 1, 16, 4)
    bits = blocks[..., :groups, :, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    codes = np.moveaxis(bits, 3, 4).reshape(*sketch.shape[:2], -1, groups * 16).astype(np.uint8)
    scales = np.ascontiguousarray(blocks[..., groups, :, :]).view(np.float32)[..., 0]
    return codes, scales.reshape(*sketch.shape[:2], -1)


def check_sketches(got: Bytes, wanted: Bytes, k: torch.Tensor, page_tokens: int) -> None:
    dim = k.shape[2]
    codes, scales = codes_and_scales(got, dim)
    right_codes, right_scales = codes_and_scales(wanted, dim)
    assert not codes[:, :, page_tokens:].any()
    assert not codes[..., dim:].any()
    assert not scales[:, :, page_tokens:].view(np.uint32).any()
    np.testing.assert_array_equal(np.isnan(scales), np.isnan(right_scales))
    pieces = k.cpu().reshape(-1, page_tokens, *k.shape[1:]).transpose(1, 2)
    y = hadamard(pieces.double()).numpy()
    r = np.sqrt((y**2).mean(-1, keepdims=True))
    borders = np.stack([np.abs(y + r), np.abs(y), np.abs(y - r)])
    doubtful = (borders <= 1e-5 * r).any(axis=0)
    finite = ~np.isnan(scales[:, :, :page_tokens])[..., None]
    differs = codes[:, :, :page_tokens, :dim] != right_codes[:, :, :page_tokens, :dim]
    assert not (differs & finite & ~doubtful).any()
    same = finite[..., 0] & ~differs.any(-1)
    np.testing.assert_allclose(
        scales[:, :, :page_tokens][same], right_scales[:, :, :page_tokens][same], rtol=1e-5
    )


def check_checksums(made: Encoded, sizes: tuple[int, int, int, int]) -> None:
    """Each is that of the bytes that it stands for."""
    sums = made.checksums.cpu().numpy().view(np.uint32)
    kinds = (made.digests, made.sketches, made.keys, made.values)
    for kind, (pieces, size) in enumerate(zip(kinds, sizes, strict=True)):
        if pieces is None:
            assert not sums[..., kind].any()
            continue
        flat = taken(pieces).reshape(-1, pieces.shape[2])
        right = [_core.crc32c(np.ascontiguousarray(piece[:size])) for piece in flat]
        assert sums[..., kind].ravel().tolist() == right
        assert not flat[:, size:].any()  # what is behind the data is zero


def sizes_of(
    k: torch.Tensor, v: torch.Tensor | None, page_tokens: int
) -> tuple[int, int, int, int]:
    element, dim = k.element_size(), k.shape[2]
    values = 0 if v is None else page_tokens * v.shape[2] * element
    return (
        2 * dim * element,
        encode.sketch_bytes(page_tokens, dim),
        page_tokens * dim * element,
        values,
    )


def check(
    k: torch.Tensor, v: torch.Tensor | None, page_tokens: int, tmp_path: Path, dtype: str
) -> None:
    """All of what encode() makes of k and v, which lie on the device."""
    written = Written(tmp_path, k.cpu(), None if v is None else v.cpu(), page_tokens, dtype)
    made = encode.encode(k, v, page_tokens=page_tokens)
    sizes = sizes_of(k, v, page_tokens)
    np.testing.assert_array_equal(taken(made.keys), written.keys)
    if v is not None:
        np.testing.assert_array_equal(taken(made.values), written.values)
    digests = taken(made.digests)[..., : sizes[0]]
    right = written.digests[..., : sizes[0]]
    numbers, right_numbers = (
        torch.from_numpy(np.ascontiguousarray(bytes_)).view(DTYPES[dtype])
        for bytes_ in (digests, right)
    )
    torch.testing.assert_close(numbers, right_numbers, rtol=0, atol=0, equal_nan=True)
    signs, right_signs = torch.signbit(numbers), torch.signbit(right_numbers)
    assert (signs == right_signs)[~numbers.isnan()].all()  # -0 is below +0
    check_sketches(taken(made.sketches), written.sketches, k, page_tokens)
    check_checksums(made, sizes)
    sums = made.checksums.cpu().numpy().view(np.uint32)
    kinds = [2] if v is None else [2, 3]
    assert (sums[..., kinds] == written.checksums[..., kinds]).all()
    if not numbers.isnan().any():
        assert (sums[..., 0] == written.checksums[..., 0]).all()


@matrix(shape=SHAPES, dtype=DTYPES)
def test_pieces_are_those_of_the_core(
    where: torch.device, shape: tuple[int, int, int, int | None], dtype: str, tmp_path: Path
) -> None:
    page_tokens, heads, dim, value_dim = shape
    generator = np.random.default_rng(SEED)
    k = rows(generator, (2 * page_tokens, heads, dim), dtype).to(where)
    v = None
    if value_dim is not None:
        v = rows(generator, (2 * page_tokens, heads, value_dim), dtype).to(where)
    check(k, v, page_tokens, tmp_path, dtype)


@pytest.mark.parametrize("strides", ["heads first", "channels apart", "tokens apart"])
def test_rows_of_any_strides(where: torch.device, strides: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(SEED + 1)
    k = rows(generator, (16, 2, 24), "bfloat16").to(where)
    v = rows(generator, (16, 2, 16), "bfloat16").to(where)

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        if strides == "heads first":
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        axis = 2 if strides == "channels apart" else 0
        return torch.repeat_interleave(tensor, 3, dim=axis).movedim(axis, 0)[1::3].movedim(0, axis)

    assert not apart(k).is_contiguous()
    check(apart(k), apart(v), 8, tmp_path, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_no_ordinary_numbers(where: torch.device, dtype: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(SEED + 2)
    k = rows(generator, (32, 1, 20), dtype)
    k[3, 0, 5] = float("nan")
    k[3, 0, 6] = -float("nan")
    k[17, 0, 1] = float("inf")
    k[18, 0, 2] = -float("inf")
    k[:16, 0, 7], k[4, 0, 7] = 0.0, -0.0  # -0 is the minimum, 0 the maximum
    k[16:, 0, 8] = -0.0
    k[20] = 0.0  # of no length
    k[:16, 0, 9] = torch.finfo(k.dtype).smallest_normal / 2
    k[16:, 0, 9] = torch.finfo(k.dtype).max
    with np.errstate(all="ignore"):  # the interpreter's numpy warns of them
        check(k.to(where), k.to(where), 16, tmp_path, dtype)


def test_long_pieces_have_long_rows_of_lanes(where: torch.device, tmp_path: Path) -> None:
    """Pieces above 16 KiB go in rows of 512 words."""
    generator = np.random.default_rng(SEED + 3)
    k = rows(generator, (33, 1, 140), "float32").to(where)
    assert lanes_for(33 * 140 * 4) == 512
    check(k, None, 33, tmp_path, "float32")


@pytest.mark.parametrize("size", [2, 4, 62, 64, 66, 510, 512, 514, 2050, 16386])
def test_checksums_of_all_lengths(where: torch.device, size: int) -> None:
    generator = np.random.default_rng(SEED + size)
    pieces = np.zeros((2, 1, -(-size // 64) * 64), np.uint8)
    pieces[..., :size] = generator.integers(0, 256, (2, 1, size), np.uint8)
    tensor = torch.from_numpy(pieces).to(where)
    found = crc32c.checksums([tensor, None, tensor], [size, 0, size]).cpu().numpy()
    right = [_core.crc32c(np.ascontiguousarray(piece[0, :size])) for piece in pieces]
    assert found.view(np.uint32)[:, 0, 0].tolist() == right
    assert found.view(np.uint32)[:, 0, 2].tolist() == right
    assert not found[..., 1].any()


def test_no_tokens_are_no_pages(where: torch.device) -> None:
    k = torch.zeros((0, 2, 8), device=where)
    made = encode.encode(k, k, page_tokens=4)
    assert made.keys.shape == (0, 2, 128)
    assert made.checksums.shape == (0, 2, 4)


def test_without_sketches(where: torch.device) -> None:
    k = torch.ones((4, 2, 8), device=where)
    made = encode.encode(k, k, page_tokens=4, sketch=False)
    assert made.sketches is None
    assert not made.checksums[..., 1].any()
    check_checksums(made, (64, 0, 128, 128))


def test_bad_input_is_named() -> None:
    k = torch.zeros((8, 2, 4))
    with pytest.raises(BadArgumentError, match="8 tokens do not fill pages of 3"):
        encode.encode(k, k, page_tokens=3)
    with pytest.raises(BadArgumentError, match="their channels only"):
        encode.encode(k, k[:, :1], page_tokens=4)
    with pytest.raises(BadArgumentError, match="their channels only"):
        encode.encode(k, k.half(), page_tokens=4)
    with pytest.raises(BadArgumentError, match=r"k is torch\.int32"):
        encode.encode(k.int(), k.int(), page_tokens=4)
    with pytest.raises(BadArgumentError, match=r"k is torch\.float32 \(8, 8\)"):
        encode.encode(k.flatten(1), None, page_tokens=4)
    with pytest.raises(BadArgumentError, match="different devices"):
        encode.encode(k, k.to("meta"), page_tokens=4)
    with pytest.raises(UnsupportedError, match="meta"):
        encode.encode(k.to("meta"), k.to("meta"), page_tokens=4)
    with pytest.raises(BadArgumentError, match="whole lines of 64 bytes"):
        crc32c.checksums([torch.zeros((1, 1, 60), dtype=torch.uint8)], [60])
