"""What a layout takes, what it refuses, and what it refuses for now by name."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlkv import CXLPool, KVLayout, LayerGroup
from cxlkv.errors import BadArgumentError
from cxlkv.layout import dtype_name, format_bytes, parse_bytes


class Small(TypedDict):
    layers: int
    kv_heads: int
    head_dim: int


SMALL: Small = {"layers": 2, "kv_heads": 3, "head_dim": 4}


def test_the_short_form_is_one_group() -> None:
    layout = KVLayout(**SMALL)
    assert layout == KVLayout.of([LayerGroup(**SMALL)])
    assert hash(layout) == hash(KVLayout.of([LayerGroup(**SMALL)]))
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (2, 3, 4)
    assert (layout.value_head_dim, layout.page_tokens, layout.dtype) == (4, 16, "bfloat16")
    assert layout.token_bytes == 2 * 3 * (4 + 4) * 2
    wide = KVLayout(**SMALL, value_head_dim=6, dtype="float32")
    assert wide.token_bytes == 2 * 3 * (4 + 6) * 4
    assert wide != layout
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.page_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        (np.float16, "float16"),
        (np.dtype(np.float32), "float32"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        ("torch.float16", "float16"),
    ],
    ids=str,
)
def test_dtypes_by_any_name(given: object, name: str) -> None:
    assert dtype_name(given) == name


GROUP = LayerGroup(layers=2, kv_heads=3, head_dim=4)


def test_torch_dtypes() -> None:
    torch = pytest.importorskip("torch")
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_name(torch.float32) == "float32"
    with pytest.raises(BadArgumentError):
        dtype_name(torch.float64)


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": 0},
        {"kv_heads": -1},
        {"head_dim": 2.0},
        {"head_dim": True},
        {"layers": 2**40},
        {"value_head_dim": 0},
        {"dtype": "float64"},
        {"dtype": "int8"},
        {"page_tokens": 0},
        {"page_tokens": 1025},
        {"page_tokens": 2.5},
        {"page_tokens": True},
        {"shard": (1, 1, 0, 1)},
        {"shard": (0, 1, -1, 1)},
        {"shard": (0, 1)},
        {"shard": (0.0, 1, 0, 1)},
        {"shard": (0, 2**40, 0, 1)},
        {"model_id": "x" * 256},
        {"model_id": "é" * 128},
        {"model_id": "a\0b"},
    ],
    ids=str,
)
def test_nonsense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadArgumentError):
        KVLayout(**{**SMALL, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"values": "shared"},
        {"kind": "ssm"},
        {"window": 0},
        {"window": 2.5},
        {"window": 2**31},
        {"values": "key_prefix", "value_head_dim": 4096},
    ],
    ids=str,
)
def test_unknown_words_of_a_group_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadArgumentError):
        LayerGroup(**SMALL, **fields)  # type: ignore[arg-type]


def test_the_order_names_each_group_for_each_of_its_layers() -> None:
    groups = [dataclasses.replace(GROUP, layers=2, window=5), dataclasses.replace(GROUP, layers=1)]
    layout = KVLayout.of(groups, order=(0, 1, 0))
    assert (layout.layers, layout.windows) == (3, (5, None, 5))
    assert KVLayout.of(groups).order == (0, 0, 1)
    for order in ((0, 1), (0, 1, 1), (0, 1, 2), (0, 0, 1, 1), (0, 0, -1)):
        with pytest.raises(BadArgumentError, match="order"):
            KVLayout.of(groups, order=order)
    with pytest.raises(BadArgumentError, match="at least one"):
        KVLayout.of([])
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB") as pool:
        assert pool.layout == layout
        assert pool.layout != KVLayout.of(groups)


def test_a_pool_gives_its_layout_back() -> None:
    layout = KVLayout(
        layers=2,
        kv_heads=3,
        head_dim=5,
        value_head_dim=7,
        page_tokens=9,
        dtype="float16",
        shard=(1, 2, 3, 4),
        model_id="models/naïve-7b",
    )
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB") as pool:
        assert pool.layout == layout


@pytest.mark.parametrize(
    ("encoding", "both"),
    [
        ("none", ("none", "none")),
        ("int8", ("int8", "int8")),
        ("int8,int4", ("int8", "int4")),
        ("none, int4", ("none", "int4")),
        ("fp8_e4m3", ("fp8_e4m3", "fp8_e4m3")),
        ("fp8_e4m3,int4", ("fp8_e4m3", "int4")),
    ],
)
def test_a_layout_in_an_encoding(encoding: str, both: tuple[str, str]) -> None:
    groups = [LayerGroup(**SMALL), LayerGroup(layers=1, kv_heads=3, head_dim=4, window=32)]
    layout = KVLayout.of(groups, (0, 1, 0), page_tokens=8, model_id="m")
    made = layout.encoded(encoding)
    assert (made.k_encoding, made.v_encoding) == both
    assert made.encoding == encoding.replace(" ", "")
    assert made.encoded("none") == layout
    assert layout.encoded(made.encoding) == made
    assert made.token_bytes == layout.token_bytes == 3 * 3 * (4 + 4) * 2
    # Of codes 4 channels are filled up to 16, with a scale.
    a_row = {"none": 4 * 2, "int8": 16 + 2, "int4": 8 + 2, "fp8_e4m3": 4}
    assert made.stored_token_bytes == 3 * 3 * (a_row[both[0]] + a_row[both[1]])
    assert made.stored_key_bytes == 3 * 3 * a_row[both[0]]


def test_a_layout_without_an_encoding_has_the_name_that_it_had() -> None:
    """Keys of transformers' prefixes are made of the name of 0.2."""
    of_group = (
        "LayerGroup(layers=2, kv_heads=3, head_dim=4, value_head_dim=4, dtype='bfloat16', "
        "window=None, values='own', kind='attention'"
    )
    rest = "order=(0, 0), page_tokens=16, shard=(0, 1, 0, 1), model_id='')"
    layout = KVLayout(**SMALL)
    assert repr(layout) == f"KVLayout(groups=({of_group}),), {rest}"
    encodings = ", k_encoding='int8', v_encoding='int4'"
    assert repr(layout.encoded("int8,int4")) == f"KVLayout(groups=({of_group}{encodings}),), {rest}"


@pytest.mark.parametrize("encoding", ["", "int2", "INT8", "int8,", "int8,int4,int4", "int8 int4"])
def test_no_encoding(encoding: str) -> None:
    with pytest.raises(BadArgumentError, match="one of none, int8, int4"):
        KVLayout(**SMALL).encoded(encoding)


def test_what_has_no_keys_of_its_own_is_not_encoded() -> None:
    mla = LayerGroup(layers=1, kv_heads=1, head_dim=64, value_head_dim=32, values="key_prefix")
    with pytest.raises(BadArgumentError, match="leave out k_encoding"):
        KVLayout.of([mla]).encoded("int8")
    with pytest.raises(BadArgumentError, match="keeps them as they come"):
        KVLayout.objects("4KiB").encoded("int8")
    assert KVLayout.of([mla]).encoded("none") == KVLayout.of([mla])


@pytest.mark.parametrize(
    ("size", "expected_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("64B", 64),
        ("16KiB", 16 << 10),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        (" 2 gib ", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("3TiB", 3 << 40),
        ("1GB", 10**9),
        ("0.5MB", 500_000),
        ("9007199254740993B", 9007199254740993),  # a float loses the last digit
    ],
)
def test_sizes_are_read_exactly(size: str | int, expected_bytes: int) -> None:
    assert parse_bytes(size) == expected_bytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "2G", "2 bananas", "-1GiB", "1e9", "0x10", "2GiB 1", "0.3B", -1, True, 1.5]
)
def test_what_is_no_size_is_refused_as_a_value_error(size: str | int) -> None:
    with pytest.raises(BadArgumentError) as caught:
        parse_bytes(size)
    assert isinstance(caught.value, ValueError)
    assert str(size) in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 29, "1.5 GiB"),
        (2 << 40, "2 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes_are_shown_short(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(min_value=0, max_value=1 << 50))
def test_what_is_shown_reads_back_to_four_digits(size_bytes: int) -> None:
    # Four digits may not be whole bytes ("1.001 KiB"), so the number is read apart from its unit.
    number, unit = format_bytes(size_bytes).split()
    assert abs(float(number) * parse_bytes(f"1{unit}") - size_bytes) <= size_bytes * 0.0005
