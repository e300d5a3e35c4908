"""Tensors whose memory is not their values: each call takes the values, or refuses by name.

torch's negative bit, and tensors without memory of their own. Each call below once took the wrong
sign, or read or wrote address 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from cxlkv import CXLPool, KVLayout, ObjectPool
from cxlkv.errors import BadArgumentError
from cxlkv.sequence import Batch, Sequence


class Make(Protocol):
    """Makes a tensor of a shape."""

    __name__: str

    def __call__(self, *shape: int) -> Tensor: ...


TOKENS, DIM = 32, 64
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=DIM, dtype="float32")


class Store:
    """A sequence of some tokens, and a pool of objects with one."""

    def __init__(self) -> None:
        self.pool = CXLPool.create("anonymous:", layout=LAYOUT, capacity="8MiB")
        self.objects = ObjectPool.create(
            "anonymous:", layout=KVLayout.objects("16KiB"), capacity="8MiB"
        )
        self.rows = torch.randn(TOKENS, 1, DIM)
        self.sequence: Sequence = self.pool.sequence()
        self.sequence.append(0, self.rows, self.rows)
        self.batch: Batch = self.pool.batch([self.sequence])
        self.objects.put("there", torch.randn(100))


@pytest.fixture
def store() -> Iterator[Store]:
    found = Store()
    yield found
    found.pool.close()
    found.objects.close()


def negated(*shape: int) -> Tensor:
    """A tensor whose memory has the other sign."""
    found = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert found.is_neg()
    return found


class Wrapper(Tensor):
    """A wrapper like torchao's and DTensor."""

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
        return NotImplemented


def fake(*shape: int) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.zeros(shape))


def wrapper(*shape: int) -> Tensor:
    return Tensor._make_wrapper_subclass(Wrapper, shape, dtype=torch.float32)


def zero(*shape: int) -> Tensor:
    return torch._efficientzerotensor(shape)


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


CALLS: dict[str, Callable[[Store, Make], object]] = {
    "append": lambda s, of: s.sequence.append(0, of(1, 1, DIM), of(1, 1, DIM)),
    "attend": lambda s, of: s.sequence.attend(0, of(1, 2, DIM)),
    "select": lambda s, of: s.sequence.select(0, of(1, 2, DIM), top_k=1),
    "decode": lambda s, of: s.batch.decode(0, of(1, 2, DIM), s.rows[:1], s.rows[:1], [0, 1]),
    "decode k": lambda s, of: s.batch.decode(
        0, torch.zeros(1, 2, DIM), of(1, 1, DIM), s.rows[:1], [0, 1]
    ),
    "put": lambda s, of: s.objects.put("new", of(100)),
}
OUTPUTS: dict[str, Callable[[Store, Make], object]] = {
    "decode out": lambda s, of: s.batch.decode(
        0, torch.zeros(1, 2, DIM), s.rows[:1], s.rows[:1], [0, 1], out=of(1, 2, DIM)
    ),
    "fetch out": lambda s, of: s.sequence.fetch(0, out=(of(1, 2, 16, DIM), of(1, 2, 16, DIM))),
    "get_into": lambda s, of: s.objects.get_into("there", of(100)),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("make", [fake, wrapper, zero, meta], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", [*CALLS, *OUTPUTS])
def test_what_has_no_memory_is_refused(store: Store, name: str, make: Make) -> None:
    with pytest.raises(BadArgumentError, match="memory"):
        {**CALLS, **OUTPUTS}[name](store, make)
    assert len(store.sequence) == TOKENS
    assert store.pool.admin.check(deep=True)["clean"]


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_of_the_other_sign_is_refused(store: Store, name: str) -> None:
    with pytest.raises(BadArgumentError, match="resolve_neg"):
        OUTPUTS[name](store, lambda *shape: torch._neg_view(torch.zeros(shape)))


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_requires_grad_is_refused(store: Store, name: str) -> None:
    with pytest.raises(BadArgumentError, match="grad"):
        OUTPUTS[name](store, lambda *shape: torch.zeros(shape, requires_grad=True))


def test_the_negative_bit_counts_in_what_is_stored(store: Store) -> None:
    k, v = negated(TOKENS, 1, DIM), negated(TOKENS, 1, DIM)
    sequence = store.pool.sequence()
    sequence.append(0, k, v)
    for found, given in zip(sequence.fetch(0), (k, v), strict=True):
        assert np.array_equal(np.reshape(found, (-1, DIM)), given.resolve_neg().reshape(-1, DIM))
    given, room = torch._neg_view(torch.randn(50)), np.zeros(50, np.float32)
    store.objects.put("other", given)
    store.objects.get_into("other", room)
    assert np.array_equal(room, given.resolve_neg())


def test_the_negative_bit_counts_in_queries(store: Store) -> None:
    q = negated(1, 2, DIM)
    plain = q.resolve_neg().clone()
    for one, other in zip(
        store.sequence.attend(0, q), store.sequence.attend(0, plain), strict=True
    ):
        assert np.array_equal(one, other)
    picked = [store.sequence.select(0, one, top_k=1) for one in (q, plain)]
    assert np.array_equal(picked[0].pages, picked[1].pages)
    assert np.array_equal(picked[0].scores, picked[1].scores)
    row, made = negated(1, 1, DIM), []
    for one, new in ((q, row), (plain, row.resolve_neg())):
        batch = store.pool.batch([store.sequence.fork()])
        made.append(torch.as_tensor(batch.decode(0, one, new, new, [0, 1]).out))
    assert torch.equal(made[0], made[1])
