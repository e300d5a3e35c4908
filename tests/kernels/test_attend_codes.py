"""Attention to pieces of codes, held to a loop over single tokens in float64.

Pieces are random bytes with random scales, unpacked code by code; what no row sees has the scale
NaN, and what is read wrongly shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.kernels import attend as subject
from cxlkv.kernels.attend import attend
from cxlkv.kernels.attend_shape import Shape, tiles_of
from cxlkv.kernels.reference_codes import CodeForm, decode

from ..support import kept, reference
from ..support.encodings import Form
from ..support.lengths import matrix, nightly
from .test_attend import BF16, FP16, FP32, Case, Given, call, expected, given, same_gaps, weighed

BITS = {"int8": 8, "int4": 4}
PAIRS = [("int8", "int8"), ("int4", "int4"), ("int8", "int4"), ("int4", "int8")]
MIXED = [("none", "int4"), ("int8", "none")]
ROUNDING = {FP32: 2**-22, FP16: 2**-11, BF16: 2**-11}
"""Relative rounding of a query's channel, and of a weight. float32 has twice float16's bits."""
Encodings = tuple[str, str]


def drawn_pieces(shape: torch.Size, form: Form, rng: torch.Generator) -> torch.Tensor:
    """uint8 [lists, heads, k, piece_bytes] for rows of [lists, heads, k, page_tokens, dim]: scales
    as those of rows of usual size, of which some are far larger and smaller than others."""
    bytes_of = form.piece_bytes(shape[3])
    pieces = torch.randint(0, 256, (*shape[:3], bytes_of), dtype=torch.uint8, generator=rng)
    room = -(-shape[3] // 16) * 16
    sizes = torch.randn((*shape[:3], room), generator=rng)
    scales = (torch.exp(sizes) * 2 / (1 << form.bits)).half()
    scales[torch.rand(scales.shape, generator=rng) < 0.02] = 0
    pieces[..., form.scales_offset(shape[3]) :] = scales.view(torch.uint8)
    return pieces


def scales_of(pieces: torch.Tensor, form: Form, page_tokens: int) -> torch.Tensor:
    """A view of them, float16 [..., tokens of whole blocks]."""
    return pieces[..., form.scales_offset(page_tokens) :].view(torch.float16)


@cache
def places(form: Form, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of each code, [page_tokens, dim]: its byte in a piece, and the bit where it begins."""
    found = [[form.place(t, d) for d in range(form.dim)] for t in range(page_tokens)]
    both = torch.tensor(found)
    return both[..., 0], both[..., 1]


def unpacked(pieces: torch.Tensor, form: Form, page_tokens: int) -> torch.Tensor:
    """What they stand for, in the rows' own space: float64 [..., page_tokens, dim]."""
    byte, bit = places(form, page_tokens)
    codes = pieces[..., byte].int() >> bit & (1 << form.bits) - 1
    halves = codes.double() + 0.5 - (1 << form.bits - 1)
    scales = scales_of(pieces, form, page_tokens)[..., :page_tokens]
    return torch.from_numpy(kept.unrotated((halves * scales[..., None].double()).numpy()))


class Coded(Given):
    """given(), but with codes in place of the rows that have an encoding."""

    def encode(self, encodings: Encodings, seed: int) -> Coded:
        rng = torch.Generator().manual_seed(seed + 1)
        self.encodings = encodings
        self.pieces: dict[str, torch.Tensor] = {}
        for values, name in enumerate(("keys", "values")):
            if encodings[values] == "none":
                continue
            rows: torch.Tensor = getattr(self, name)
            pieces = drawn_pieces(rows.shape, self.form(name), rng)
            unseen = rows[..., 0].isnan()
            room = scales_of(pieces, self.form(name), self.case.page_tokens)
            room[..., : self.case.page_tokens][unseen] = torch.nan
            room[..., self.case.page_tokens :] = torch.nan
            self.pieces[name] = pieces
        self.decode()
        return self

    def form(self, name: str) -> Form:
        values = name == "values"
        dim = self.case.values if values else self.case.dim
        return Form(BITS[self.encodings[values]], dim, values)

    def decode(self) -> None:
        for name, pieces in self.pieces.items():
            setattr(self, name, unpacked(pieces, self.form(name), self.case.page_tokens))

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        at = [
            self._table(self.pieces.get(name, getattr(self, name)), device)
            for name in ("keys", "values")
        ]
        return at[0], at[1]

    def call(self, device: torch.device, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        return call(self, device, encodings=self.encodings, **options)  # type: ignore[arg-type]


def coded(case: Case, encodings: Encodings, dtype: torch.dtype, seed: int) -> Coded:
    made = given(case, dtype, seed)
    return Coded(case, dtype, made.q, made.pages, made.keys, made.values).encode(encodings, seed)


def turned(rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(reference.hadamard(rows.double().nan_to_num().numpy()))


def bounds(of: Coded) -> tuple[float, float]:
    """How far a logit may be off, and how long the difference of an output may be.

    A query's channels are rounded in the rotated space, so a logit is off by ROUNDING of the sum of
    its products' sizes at most; if no logit is off by more than s, no weight is off by more than a
    factor of exp(2 s). A weight times its scale is rounded by ROUNDING, or to the smallest float16
    of the largest of them.
    """
    step = max(ROUNDING[of.q.dtype], 2**-21)
    keys = turned(of.keys) if of.encodings[0] != "none" else of.keys.double().nan_to_num()
    q = turned(of.q) if of.encodings[0] != "none" else of.q.double()
    longest_sum = float((keys.abs().flatten(0, 3) @ q.abs().flatten(0, 2).T).max())
    s = 2 * step * longest_sum * of.case.dim**-0.5
    longest = float(of.values.double().nan_to_num().norm(dim=-1).max())
    plain = {FP32: 2**-20, FP16: 2**-10, BF16: 2**-8}[of.q.dtype]
    by_weight = plain if of.encodings[1] == "none" else 2 * step + 2**-20
    return s + 1e-5, (math.expm1(2 * s) + by_weight + 1e-5) * longest


def check(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], of: Coded
) -> None:
    by_logit, by_out = bounds(of)
    out, lse = found
    same_gaps(found, wanted)
    off = (out - wanted[0]).nan_to_num().norm(dim=-1).max()
    assert off <= by_out, f"out: {off:.2e}, bound {by_out:.2e}"
    there = lse.isfinite()
    if there.any():
        off = (lse - wanted[1])[there].abs().max()
        assert off <= by_logit, f"lse: {off:.2e}, bound {by_logit:.2e}"


CASES = {
    "64 channels, pages of 16": Case(
        [[110], [37]], dim=64, group=4, page_tokens=16, k=7, kv_heads=1
    ),
    "80 channels": Case([[70]], dim=80, group=4, page_tokens=16, k=5, kv_heads=1),
    "128 channels, pages of 32": Case([[187]], dim=128, group=8, page_tokens=32, k=7, kv_heads=1),
    "256 channels": Case([[40]], dim=256, group=1, page_tokens=16, k=4, kv_heads=1),
    "few channels, pages of 4": Case([[21]], dim=3, value_dim=9, k=7),
    "blocks that are not full": Case([[70], [2]], dim=24, page_tokens=20, k=5, kv_heads=1),
    "values wider than keys": Case([[33]], dim=16, value_dim=80, page_tokens=16, k=4),
    "many tiles": Case([[400]], dim=16, page_tokens=16, k=26, kv_heads=1),
    "window": Case([[90], [2]], dim=16, page_tokens=16, window=37, k=7),
    "softcap": Case([[40]], dim=32, page_tokens=16, softcap=1.5, k=4),
    "rows": Case([[60, 61, 62], [17, 18, -1]], dim=32, page_tokens=16, k=5),
    "rows far apart": Case([[2, 60, 23]], page_tokens=3, dim=16, k=20, softcap=3.0),
    "rows with a window": Case([[80, 81, 33], [-1, 9, 5]], dim=16, window=20, page_tokens=16),
    "no rows": Case([[-1], [12]], dim=16, page_tokens=16, k=3),
    "more lines than a tile": Case([[30, 31, 32]], dim=16, group=24, kv_heads=1, page_tokens=16),
}


@dataclass(frozen=True)
class Way:
    """A kernel is compiled for each: all of them at every case would take a GPU's host minutes."""

    case: str
    encodings: Encodings
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.case}-{'-'.join(self.encodings)}-{str(self.dtype).removeprefix('torch.')}"


TWO = ((PAIRS[0], BF16), (PAIRS[1], FP32))
WAYS = [
    *(Way(case, *TWO[number % 2]) for number, case in enumerate(CASES)),
    *(Way("rows with a window", pair, FP32) for pair in PAIRS + MIXED),
    *(Way("blocks that are not full", pair, FP16) for pair in PAIRS[1:] + MIXED),
    *(Way("256 channels", pair, FP32) for pair in MIXED),  # the widest tiles that there are
]


MORE = [Way(case, *TWO[number % 2 - 1]) for number, case in enumerate(CASES)]


@pytest.mark.parametrize("way", [*dict.fromkeys(WAYS), *map(nightly, MORE)], ids=str)
def test_attend_is_attention_to_what_codes_stand_for(
    way: Way, device: torch.device, seed: int
) -> None:
    of = coded(CASES[way.case], way.encodings, way.dtype, seed)
    check(of.call(device), expected(of), of)


@matrix(name=CASES, encodings=PAIRS + MIXED)
def test_the_reference_is_attention(
    name: str, encodings: Encodings, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "runs_triton", lambda device: False)
    of = coded(CASES[name], encodings, FP32, seed)
    check(of.call(torch.device("cpu")), expected(of), of)


WEIGHED = [
    *(Way("rows with a window", pair, FP32) for pair in PAIRS + MIXED),
    *(Way("blocks that are not full", pair, FP16) for pair in MIXED),
    Way("softcap", PAIRS[0], BF16),
    Way("few channels, pages of 4", PAIRS[1], FP32),
]


def coded_and_weighed(way: Way, seed: int) -> Coded:
    """What is left out has the scale NaN."""
    made = given(CASES[way.case], way.dtype, seed)
    weights = weighed(made, seed)
    of = Coded(made.case, way.dtype, made.q, made.pages, made.keys, made.values)
    of.encode(way.encodings, seed)
    of.log_weights = weights
    return of


@pytest.mark.parametrize(
    "way",
    [
        *WEIGHED[-4:],
        *map(nightly, WEIGHED[:-4]),
        *(nightly(Way("blocks that are not full", pair, FP16)) for pair in PAIRS),
    ],
    ids=str,
)
def test_log_weights(way: Way, device: torch.device, seed: int) -> None:
    of = coded_and_weighed(way, seed)
    wanted = expected(of)
    check(of.call(device), wanted, of)
    check(of.call(device, splits=3), wanted, of)


@pytest.mark.parametrize("way", WEIGHED, ids=str)
def test_the_reference_has_log_weights(
    way: Way, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "runs_triton", lambda device: False)
    of = coded_and_weighed(way, seed)
    check(of.call(torch.device("cpu")), expected(of), of)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("values", [False, True])
def test_the_reference_unpacks_as_the_form_says(bits: int, values: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    form = Form(bits, 40, values)
    pieces = drawn_pieces(torch.Size((1, 2, 3, 20, 40)), form, rng)
    assert CodeForm(bits, 40, values).piece_bytes(20) == form.piece_bytes(20)
    found = decode(pieces, CodeForm(bits, 40, values), 20)
    torch.testing.assert_close(found, unpacked(pieces, form, 20), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("encodings", PAIRS[:2], ids="-".join)
def test_any_number_of_splits_gives_the_same(
    encodings: Encodings, device: torch.device, seed: int
) -> None:
    of = coded(
        Case([[500, 501]], dim=16, page_tokens=16, k=33, kv_heads=1, group=1), encodings, FP32, seed
    )
    wanted = expected(of)
    for splits in (1, 2, 3, 9):
        check(of.call(device, splits=splits), wanted, of)


@pytest.mark.parametrize("encodings", PAIRS[2:], ids="-".join)
def test_queries_may_be_strided_and_scratch_given(
    encodings: Encodings, device: torch.device, seed: int
) -> None:
    of = coded(Case([[60, 61], [7, 8]], dim=32, page_tokens=16), encodings, FP16, seed)
    of.q = of.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not of.q.is_contiguous()
    out = torch.full((2, 2, 4, 32), torch.nan, device=device)
    lse = torch.full((2, 2, 4), torch.nan, device=device)
    scratch = torch.full((3 * 16 * 33,), torch.nan, device=device)
    of.call(device, out=out, lse=lse, scratch=scratch, programs=100)
    check((out.cpu(), lse.cpu()), expected(of), of)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("encodings of values: 'int5'", {"encodings": ("int8", "int5")}),
        ("values from keys", {"encodings": ("int8", "int8"), "values_at": None}),
    ],
)
def test_wrong_arguments_are_named(message: str, wrong: dict[str, object]) -> None:
    table = torch.zeros(1, 2, 3, dtype=torch.int64)
    right: dict[str, object] = {
        "q": torch.zeros(1, 1, 4, 16),
        "keys_at": table,
        "values_at": table,
        "pages": table.int() - 1,
        "positions": table[:, :1, 0].contiguous(),
        "page_tokens": 4,
    }
    attend(**right)  # type: ignore[arg-type]
    with pytest.raises(BadArgumentError, match=message):
        attend(**right | wrong)  # type: ignore[arg-type]


def test_tiles_hold_whole_words_for_a_dot() -> None:
    """16 tokens of each place in a word, at the least."""
    for pair in PAIRS:
        of = replace(CASES["few channels, pages of 4"])
        shape = subject._shape(
            torch.zeros(1, 1, 4, of.dim),
            torch.zeros(1, 2, 1),
            torch.zeros(1, 2, 1),
            4,
            of.value_dim,
            None,
            None,
            (BITS[pair[0]], BITS[pair[1]]),
        )
        assert tiles_of(shape).tokens >= 16 * 32 // shape.value_bits


def test_keys_too_wide_for_shared_memory_beside_codes_are_refused() -> None:
    """128 tokens of float32 with 512 channels take 256 KiB."""
    wide = Shape(FP32, FP32, 512, 512, True, 4, 1, 16, False, 0, 4)
    with pytest.raises(UnsupportedError, match=r"keys of torch\.float32 with 512 channels"):
        tiles_of(wide)
    for fits in (
        replace(wide, dtype=FP16, query_dtype=FP16),
        replace(wide, dim=256),
        replace(wide, value_bits=8),
        replace(wide, dim=1024, value_dim=1024, key_bits=4),
        replace(wide, dim=1024, value_dim=1024, key_bits=4, value_bits=0),
    ):
        tiles_of(fits)
