"""Arrays of numpy, torch and DLPack, with any strides, as the core reads them in place."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from cxlkv import Budget, CXLPool
from cxlkv.arrays import Floats, view
from cxlkv.errors import BadArgumentError

torch = pytest.importorskip("torch")

TOKENS, HEADS, DIM = 11, 2, 8  # as the pool fixture stores them


class Capsule:
    """Something that speaks DLPack and nothing else."""

    def __init__(self, array: object):
        self.array = array

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__(**options)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> object:
        return self.array.__dlpack_device__()  # type: ignore[attr-defined]


def transposed(a: Floats) -> Floats:
    return np.ascontiguousarray(a.transpose(2, 1, 0)).transpose(2, 1, 0)


def sliced(a: Floats) -> Floats:
    room = np.full((2 * a.shape[0] + 1, a.shape[1] + 3, a.shape[2] + 5), np.nan, np.float32)
    room[1::2, 2:-1, 3:-2] = a
    return room[1::2, 2:-1, 3:-2]


def backwards(a: Floats) -> Floats:
    return np.ascontiguousarray(a[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


def spread(a: Floats) -> Floats:
    """The last axis is not contiguous."""
    room = np.full((*a.shape[:2], 3 * a.shape[2]), np.nan, np.float32)
    room[..., ::3] = a
    return room[..., ::3]


def unaligned(a: Floats) -> Floats:
    room = np.zeros(a.nbytes + 1, np.uint8)
    made = room[1:].view(np.float32).reshape(a.shape)
    made[:] = a
    return made


def read_only(a: Floats) -> Floats:
    made = a.copy()
    made.flags.writeable = False
    return made


SHAPES: list[Callable[[Floats], Floats]] = [
    np.copy,
    transposed,
    sliced,
    backwards,
    spread,
    unaligned,
    read_only,
]
KINDS: dict[str, Callable[[Floats], object]] = {
    "numpy": lambda a: a,
    "torch": lambda a: torch.from_numpy(a) if min(a.strides) > 0 and a.flags.writeable else a,
    "dlpack": lambda a: Capsule(a) if a.flags.writeable and a.flags.aligned else a,
}


@pytest.fixture(params=[True, False], ids=["checksum", "no checksum"])
def store(request: pytest.FixtureRequest) -> CXLPool:
    """With a checksum pages are gathered first; without, they go straight to the pool."""
    make = request.getfixturevalue("make_pool")
    made = make(checksum=request.param)
    assert isinstance(made, CXLPool)
    return made


def stored(pool: CXLPool, k: object, v: object) -> tuple[Floats, Floats]:
    """[tokens, heads, dim] of k and v as they come back from the pool."""
    sequence = pool.sequence()
    sequence.append(0, k, v)
    keys, values = sequence.fetch(0)
    tokens = sequence.tokens(0)
    return tuple(  # type: ignore[return-value]
        np.asarray(x).reshape(HEADS, -1, DIM).transpose(1, 0, 2)[:tokens] for x in (keys, values)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
def test_any_strides_come_in_as_their_values(
    store: CXLPool, rng: np.random.Generator, shape: Callable[[Floats], Floats], kind: str
) -> None:
    k, v = rng.standard_normal((2, TOKENS, HEADS, DIM)).astype(np.float32)
    given = KINDS[kind](shape(k)), KINDS[kind](shape(v))
    got = stored(store, *given)
    np.testing.assert_array_equal(got[0], k)
    np.testing.assert_array_equal(got[1], v)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_broadcast_axes(store: CXLPool, rng: np.random.Generator, axis: int) -> None:
    small = np.take(rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float32), [0], axis)
    wide = np.broadcast_to(small, (TOKENS, HEADS, DIM))
    assert wide.strides[axis] == 0
    tensor = torch.from_numpy(small).expand(TOKENS, HEADS, DIM)
    got = stored(store, wide, tensor)
    np.testing.assert_array_equal(got[0], wide)
    np.testing.assert_array_equal(got[1], wide)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
def test_queries_of_any_strides(
    pool: CXLPool, rng: np.random.Generator, shape: Callable[[Floats], Floats]
) -> None:
    sequence = pool.sequence()
    k, v = rng.standard_normal((2, TOKENS, HEADS, DIM)).astype(np.float32)
    sequence.append(0, k, v)
    q = rng.standard_normal((3, 2 * HEADS, DIM)).astype(np.float32)
    out, lse = sequence.attend(0, q)
    other, other_lse = sequence.attend(0, shape(q))
    np.testing.assert_array_equal(out, other)
    np.testing.assert_array_equal(lse, other_lse)
    np.testing.assert_array_equal(
        sequence.select(0, q, top_k=2).pages, sequence.select(0, shape(q), top_k=2).pages
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_outputs_are_of_the_queries_kind_and_dtype(pool: CXLPool, dtype: str) -> None:
    sequence = pool.sequence()
    sequence.append(0, np.ones((5, 2, 8), np.float32), np.ones((5, 2, 8), np.float32))
    tensor = torch.ones(4, 8, dtype=getattr(torch, dtype), requires_grad=True)
    out, lse = sequence.attend(0, tensor)
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert out.dtype == tensor.dtype
    assert lse.dtype == torch.float32
    assert out.shape == (4, 8)
    assert torch.equal(out.detach().float(), torch.ones(4, 8))
    array = np.ones((4, 8), dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    made, _ = sequence.attend(0, array)
    assert isinstance(made, np.ndarray)
    assert made.dtype == array.dtype
    if dtype != "bfloat16":  # which numpy cannot import from a capsule
        imported, _ = sequence.attend(0, Capsule(array))
        assert isinstance(imported, np.ndarray)
        picked = pool.batch([sequence]).select(0, Capsule(array[None]), [0, 1], Budget(share=1.0))
        assert picked.counts.tolist() == [[2, 2]]


def test_bfloat16_from_torch_is_bfloat16_of_ml_dtypes(request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue("make_pool")(dtype="bfloat16")
    tensor = torch.randn(7, 2, 8).bfloat16()
    sequence = made.sequence()
    sequence.append(0, tensor, Capsule(tensor))
    k, v = sequence.fetch(0)
    assert k.dtype == ml_dtypes.bfloat16
    want = tensor.view(torch.uint16).numpy().transpose(1, 0, 2)
    for got in (k, v):
        bits = got.view(np.uint16).reshape(2, 8, 8)
        np.testing.assert_array_equal(bits[:, :7], want)
        assert (bits[:, 7] == 0).all()


def test_empty_arrays_are_nothing_to_append(pool: CXLPool) -> None:
    sequence = pool.sequence()
    for empty in (np.empty((0, 2, 8), np.float32), torch.empty(0, 2, 8)):
        sequence.append(0, empty, empty)
        sequence.append(1, empty, empty)
    assert len(sequence) == 0
    assert sequence.fetch(0)[0].shape == (2, 0, 4, 8)
    out, lse = sequence.attend(0, torch.empty(0, 4, 8))
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        3.0,
        np.ones((1, 2, 8), ">f4"),
        torch.ones(1, 2, 8, dtype=torch.float64),
        torch.ones(1, 2, 8, device="meta"),
        Capsule(np.ones((1, 2, 8))),
        np.float32(1),
        np.ones((), np.float32),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_is_not_stored_is_refused_by_name(pool: CXLPool, wrong: object) -> None:
    sequence = pool.sequence()
    good = np.ones((1, 2, 8), np.float32)
    with pytest.raises(BadArgumentError, match=r"^k\b"):
        sequence.append(0, wrong, good)
    with pytest.raises(BadArgumentError, match=r"^v\b"):
        sequence.append(0, good, wrong)
    assert sequence.tokens(0) == 0


def test_a_view_keeps_its_array_alive() -> None:
    made = view(np.ones((3, 2), np.float32)[::-1], "x")
    assert made.shape == (3, 2)
    assert made.strides == (-8, 4)
    assert made.dtype == 2
    assert isinstance(made.owner, np.ndarray)
