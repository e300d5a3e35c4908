"""Attention over tables of addresses, held to a loop over single tokens in float64.

Pieces lie in several buffers of NaN, and so does what no row sees: what is read wrongly shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import attend as subject
from cxlkv.kernels.attend import attend, rows_as_pages
from cxlkv.kernels.attend_shape import Shape, blocks_of, splits_of, tiles_of
from cxlkv.kernels.merge import merge
from cxlkv.kernels.runtime import INTERPRETED

from ..support.lengths import matrix

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
# The interpreter hands NaN and infinity to numpy, which says so.
BROKEN = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@dataclass(frozen=True)
class Case:
    """One call; positions by row of each list, -1: no such row."""

    positions: list[list[int]]
    dim: int = 32
    value_dim: int | None = None
    kv_heads: int = 2
    group: int = 2
    page_tokens: int = 4
    k: int = 6
    own_values: bool = True
    window: int | None = None
    softcap: float | None = None
    buffers: int = 2

    @property
    def values(self) -> int:
        return self.dim if self.value_dim is None else self.value_dim


@dataclass
class Given:
    """Random tensors of a case, on the host."""

    case: Case
    dtype: torch.dtype
    q: torch.Tensor
    pages: torch.Tensor
    keys: torch.Tensor  # [lists, kv_heads, k, page_tokens, dim]
    values: torch.Tensor
    log_weights: torch.Tensor | None = None  # [lists, kv_heads, k, page_tokens]
    held: list[torch.Tensor] = field(default_factory=list)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of the pieces, in turn in each buffer, with NaN around them; their addresses."""
        keys_at = self._table(self.keys, device)
        return keys_at, self._table(self.values, device) if self.case.own_values else None

    def _table(self, pieces: torch.Tensor, device: torch.device) -> torch.Tensor:
        flat = pieces.flatten(0, 2)
        piece_bytes = flat[0].numel() * flat.element_size()
        stride = -(-piece_bytes // 16) * 16 + 32  # guards of 16 bytes and more
        rows = -(-len(flat) // self.case.buffers)
        buffers = [
            torch.full((rows * stride + 64,), 255, dtype=torch.uint8, device=device)
            for _ in range(self.case.buffers)
        ]
        self.held += buffers
        table = torch.zeros(len(flat), dtype=torch.int64)
        for index, piece in enumerate(flat):
            buffer = buffers[index % len(buffers)]
            start = index // len(buffers) * stride + 16 + -buffer.data_ptr() % 16
            raw = piece.contiguous().view(torch.uint8).flatten()
            buffer[start : start + piece_bytes] = raw.to(device)
            table[index] = buffer.data_ptr() + start
        return table.view(pieces.shape[:3]).to(device)


def given(case: Case, dtype: torch.dtype, seed: int) -> Given:
    """Pages of a longer sequence in a random order, a few of them missing; what lies behind the
    last position of all rows has never been written."""
    rng = torch.Generator().manual_seed(seed)
    lists, rows = len(case.positions), len(case.positions[0])
    shape = (lists, case.kv_heads, case.k, case.page_tokens)
    q = torch.randn(lists, rows, case.kv_heads * case.group, case.dim, generator=rng)
    keys = torch.randn(*shape, case.dim, generator=rng)
    values = torch.randn(*shape, case.values, generator=rng)
    pages = torch.full(shape[:3], -1, dtype=torch.int32)
    for one in range(lists):
        last = max(case.positions[one])
        for head in range(case.kv_heads):
            count = case.k - case.k // 4  # the rest is padding
            others = torch.randperm(max(last // case.page_tokens, count), generator=rng)[:count]
            # The page of the last position is always listed: rows differ there.
            others[0] = max(last, 0) // case.page_tokens
            pages[one, head, torch.randperm(count, generator=rng)] = others.int()
    at = pages[..., None] * case.page_tokens + torch.arange(case.page_tokens)
    unseen = at > torch.tensor([max(row) for row in case.positions])[:, None, None, None]
    keys[unseen | (pages < 0)[..., None]] = torch.nan
    values[unseen | (pages < 0)[..., None]] = torch.nan
    return Given(case, dtype, q.to(dtype), pages, keys.to(dtype), values.to(dtype))


def expected(of: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, row by row."""
    case = of.case
    lists, rows, q_heads = of.q.shape[:3]
    out = torch.zeros(lists, rows, q_heads, case.values, dtype=torch.float64)
    lse = torch.full((lists, rows, q_heads), -math.inf, dtype=torch.float64)
    held = of.values if case.own_values else of.keys[..., : case.values]
    for one, row, q_head in torch.cartesian_prod(*map(torch.arange, (lists, rows, q_heads))):
        head = q_head // case.group
        last = case.positions[one][row]
        low = -1 if case.window is None else last - case.window
        seen = [
            (place, token)
            for place in range(case.k)
            for token in range(case.page_tokens)
            if (page := int(of.pages[one, head, place])) >= 0
            and low < page * case.page_tokens + token <= last
            and (of.log_weights is None or of.log_weights[one, head, place, token] > -math.inf)
        ]
        if not seen:
            continue
        keys = torch.stack([of.keys[one, head, place, token] for place, token in seen]).double()
        values = torch.stack([held[one, head, place, token] for place, token in seen]).double()
        logits = keys @ of.q[one, row, q_head].double() * case.dim**-0.5
        if case.softcap is not None:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        if of.log_weights is not None:
            mine = of.log_weights[one, head]
            logits += torch.stack([mine[place, token] for place, token in seen])
        if logits.max() == -math.inf:
            continue
        weights = torch.exp(logits - logits.max())
        lse[one, row, q_head] = logits.max() + torch.log(weights.sum())
        out[one, row, q_head] = weights @ values / weights.sum()
    return out, lse


def call(
    of: Given,
    device: torch.device,
    tables: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys_at, values_at = of.tables(device) if tables is None else tables
    found = attend(
        of.q.to(device),
        keys_at,
        values_at,
        of.pages.to(device),
        torch.tensor(of.case.positions, device=device),
        page_tokens=of.case.page_tokens,
        value_dim=of.case.value_dim,
        window=of.case.window,
        softcap=of.case.softcap,
        log_weights=None if of.log_weights is None else of.log_weights.to(device),
        **options,  # type: ignore[arg-type]
    )
    return found[0].cpu(), found[1].cpu()


def same_gaps(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """NaN, and rows that see nothing, are where they should be."""
    out, lse = found
    assert out.dtype == lse.dtype == FP32
    assert torch.equal(out.isnan(), wanted[0].isnan())
    assert torch.equal(lse.isnan(), wanted[1].isnan())
    assert torch.equal(lse == -math.inf, wanted[1] == -math.inf)
    assert not out[lse == -math.inf].any()


def close(
    found: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Errors as parts of the largest result. On the GPU the weights are rounded to the dtype."""
    ratio = 4e-6 if INTERPRETED else {FP32: 1e-5, FP16: 2e-3, BF16: 1.5e-2}[dtype]
    out, lse = found
    same_gaps(found, wanted)
    error = largest(out - wanted[0]) / max(largest(wanted[0]), 1e-9)
    assert error <= ratio, f"out: {error:.2e} of the largest"
    error = largest(lse - wanted[1]) / max(largest(wanted[1]), 1)
    assert error <= 2e-5, f"lse: {error:.2e}"


def largest(of: torch.Tensor) -> float:
    finite = of[of.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def weighed(of: Given, seed: int) -> torch.Tensor:
    """Weights, some far above the others; of those that are left out, keys and values are NaN, and
    some pages are left out whole. Padding has NaN."""
    rng = torch.Generator().manual_seed(seed + 2)
    weights = 3 * torch.randn(of.keys.shape[:4], generator=rng)
    weights[torch.rand(weights.shape, generator=rng) < 0.3] = -math.inf
    weights[torch.rand(weights.shape[:3], generator=rng) < 0.2] = -math.inf
    gone = weights == -math.inf
    weights[of.pages < 0] = math.nan
    of.keys[gone] = of.values[gone] = torch.nan
    return weights


CASES = {
    "grouped heads, pages of 16": Case([[110], [37]], dim=128, group=4, page_tokens=16, k=7),
    "pages of 1": Case([[40]], page_tokens=1, k=23, dim=40),
    "pages of 3": Case([[70], [65]], page_tokens=3, k=30, dim=80),
    "pages of 5, one head a group": Case([[33]], page_tokens=5, k=7, dim=96, group=1),
    "pages longer than a tile": Case([[190]], page_tokens=96, k=2),
    "one page": Case([[3]], k=1),
    "few channels": Case([[9]], dim=8, value_dim=3),
    "values wider than keys": Case([[21]], dim=16, value_dim=48),
    "192 and 128 channels": Case([[30]], dim=192, value_dim=128, kv_heads=1),
    "MLA, pages": Case([[25]], dim=576, value_dim=512, kv_heads=1, group=16, k=7, own_values=False),
    "MLA, tokens": Case(
        [[50]], dim=576, value_dim=512, kv_heads=1, page_tokens=1, k=40, own_values=False
    ),
    "values in both blocks of the keys": Case([[20]], dim=96, value_dim=80, own_values=False),
    "values in one block of the keys": Case([[20]], dim=40, value_dim=24, own_values=False),
    "window": Case([[40], [2]], window=7, k=9),
    "softcap": Case([[40]], softcap=1.5),
    "rows": Case([[20, 21, 22], [17, 18, -1]]),
    "rows far apart": Case([[2, 60, 23]], page_tokens=3, k=20, softcap=3.0),
    "rows with a window": Case([[30, 31, 32], [-1, 9, 5]], window=3, page_tokens=5),
    "rows with a window over many tiles": Case([[80, 81]], window=50, page_tokens=1, k=110),
    "no rows": Case([[-1], [12]]),
    "no rows at all": Case([[-1, -1]]),
    "more lines than a tile": Case([[30, 31, 32]], group=24, kv_heads=1, page_tokens=5),
    "tiles of one row each": Case([[20, 21]], group=64, kv_heads=1),
    "three buffers": Case([[50]], buffers=3),
}


@matrix(name=CASES, dtype=[FP32, FP16, BF16])
def test_attend_is_attention(
    name: str, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    of = given(CASES[name], dtype, seed)
    close(call(of, device), expected(of), dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_attention(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "runs_triton", lambda device: False)
    of = given(case, FP32, seed)
    close(call(of, torch.device("cpu")), expected(of), FP32)


WEIGHED = (
    "grouped heads, pages of 16",
    "pages of 5, one head a group",
    "MLA, tokens",
    "values in both blocks of the keys",
    "window",
    "softcap",
    "rows with a window",
    "rows far apart",
    "no rows",
    "more lines than a tile",
)


@matrix(name=WEIGHED, dtype=[FP32, FP16, BF16])
def test_log_weights(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    of = given(CASES[name], dtype, seed)
    of.log_weights = weighed(of, seed)
    wanted = expected(of)
    close(call(of, device), wanted, dtype)
    close(call(of, device, splits=3), wanted, dtype)


@pytest.mark.parametrize("name", WEIGHED)
def test_the_reference_has_log_weights(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "runs_triton", lambda device: False)
    of = given(CASES[name], FP32, seed)
    of.log_weights = weighed(of, seed)
    close(call(of, torch.device("cpu")), expected(of), FP32)


def test_all_tokens_left_out(device: torch.device, seed: int) -> None:
    of = given(Case([[20, 21], [9, 3]]), FP32, seed)
    plain = call(of, device)
    of.log_weights = torch.zeros(of.keys.shape[:4])
    found = call(of, device)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    of.log_weights.fill_(-math.inf)
    found = call(of, device)
    assert not found[0].any()
    assert (found[1] == -math.inf).all()


@BROKEN
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_no_numbers_show(wrong: float, device: torch.device, seed: int) -> None:
    of = given(Case([[20], [22]], kv_heads=1), FP32, seed)
    of.log_weights = torch.zeros(of.keys.shape[:4])
    of.log_weights[place_of(of, 1, 22)] = wrong
    out, lse = call(of, device)
    assert out.isnan().all(-1).flatten(1).tolist() == [[False] * 2, [True] * 2]
    assert lse[0].isfinite().all()


@pytest.mark.parametrize("case", [CASES["grouped heads, pages of 16"], CASES["softcap"]])
def test_virtual_rows_are_pages_of_float32(case: Case, device: torch.device, seed: int) -> None:
    """rows_as_pages() says how: attend to them, and merge."""
    of = given(replace(case, positions=[[31], [30]]), FP16, seed)
    of.log_weights = weighed(of, seed)
    rng = torch.Generator().manual_seed(seed + 3)
    shape = (2, case.kv_heads, 19)
    k = torch.randn(*shape, case.dim, generator=rng)
    v = torch.randn(*shape, case.values, generator=rng)
    counts = torch.rand(shape, generator=rng) * 3
    counts[torch.rand(shape, generator=rng) < 0.3] = -math.inf
    k[counts == -math.inf] = v[counts == -math.inf] = torch.nan
    moved = k.to(device), v.to(device), counts.to(device)
    rows = rows_as_pages(*moved, torch.tensor(of.case.positions, device=device))
    part = attend(of.q.float().to(device), **rows, softcap=case.softcap)
    other = call(of, device)
    found = merge([part[0], other[0].to(device)], [part[1], other[1].to(device)])
    # The same of one list: rows are more tokens, of pages of a token.
    wanted = torch.zeros_like(other[0], dtype=torch.float64)
    lse = torch.zeros_like(other[1], dtype=torch.float64)
    whole = expected(of)
    for one, q_head in torch.cartesian_prod(torch.arange(2), torch.arange(of.q.shape[2])):
        head = q_head // case.group
        there = counts[one, head] > -math.inf
        logits = k[one, head][there].double() @ of.q[one, 0, q_head].double() * case.dim**-0.5
        if case.softcap is not None:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        logits = torch.cat([logits + counts[one, head][there], whole[1][one, :, q_head]])
        values = torch.cat([v[one, head][there].double(), whole[0][one, :, q_head]])
        wanted[one, 0, q_head] = logits.softmax(0) @ values
        lse[one, 0, q_head] = logits.logsumexp(0)
    close((found[0].cpu(), found[1].cpu()), (wanted, lse), FP16)


@DTYPES
def test_any_number_of_splits_gives_the_same(
    dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    of = given(Case([[300, 301]], page_tokens=5, k=41, kv_heads=1), dtype, seed)
    wanted = expected(of)
    for splits in (1, 2, 3, 25):
        close(call(of, device, splits=splits), wanted, dtype)


def test_results_and_scratch_of_the_caller_are_used(device: torch.device, seed: int) -> None:
    of = given(Case([[300]], page_tokens=16, k=16, kv_heads=1, dim=16), FP32, seed)
    out = torch.full((1, 1, 2, 16), torch.nan, device=device)
    lse = torch.full((1, 1, 2), torch.nan, device=device)
    scratch = torch.full((3 * 2 * 17 + 5,), torch.nan, device=device)
    call(of, device, programs=1000, out=out, lse=lse, scratch=scratch)
    close((out.cpu(), lse.cpu()), expected(of), FP32)
    assert scratch[: 3 * 2 * 17].isfinite().all(), "as many splits as it has room for"
    assert scratch[3 * 2 * 17 :].isnan().all()
    with pytest.raises(BadArgumentError, match="room for 3 splits, not 4"):
        call(of, device, splits=4, scratch=scratch)


def test_queries_may_be_strided(device: torch.device, seed: int) -> None:
    of = given(Case([[20, 21], [7, 8]]), FP16, seed)
    wide = torch.randn(2, 4, 2, 3, 32).half()
    wide[:, :, :, 1] = of.q.transpose(1, 2)
    of.q = wide[:, :, :, 1].transpose(1, 2)
    assert not of.q.is_contiguous()
    close(call(of, device), expected(of), FP16)
    odd = torch.randn(2, 2, 4, 33).half()
    odd[..., 1:] = of.q
    of.q = odd[..., 1:]
    close(call(of, device), expected(of), FP16)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_queries_may_have_another_dtype(
    dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    of = given(Case([[20], [7]]), dtype, seed)
    of.q = torch.randn(of.q.shape, generator=torch.Generator().manual_seed(seed))
    close(call(of, device, dtype=dtype), expected(of), FP32)


def test_a_zero_address_leaves_the_page_out(device: torch.device, seed: int) -> None:
    of = given(Case([[23]], kv_heads=1), FP32, seed)
    keys_at, values_at = of.tables(device)
    assert values_at is not None
    keys_at[0, 0, 0] = 0
    values_at[0, 0, 1] = 0
    found = call(of, device, (keys_at, values_at))
    of.pages[0, 0, :2] = -1
    close(found, expected(of), FP32)


def test_padding_may_have_any_address(device: torch.device, seed: int) -> None:
    of = given(Case([[23]], kv_heads=1), FP32, seed)
    keys_at, values_at = of.tables(device)
    assert values_at is not None
    keys_at[of.pages.to(device) < 0] = 16
    values_at[of.pages.to(device) < 0] = 1 << 60
    close(call(of, device, (keys_at, values_at)), expected(of), FP32)


ROWS = Case([[21, 22, 23], [14, 15, 13]], kv_heads=1, k=4, page_tokens=8)


def place_of(of: Given, one: int, position: int) -> tuple[int, int, int, int]:
    """Where the token of a position is listed."""
    places = of.pages[one, 0] == position // of.case.page_tokens
    return one, 0, int(places.nonzero()[0]), position % of.case.page_tokens


@BROKEN
@DTYPES
@pytest.mark.parametrize("what", ["keys", "values"])
def test_nan_reaches_the_rows_that_see_it_and_no_others(
    what: str, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    of = given(ROWS, dtype, seed)
    for one, position in ((0, 22), (1, 14)):
        getattr(of, what)[(*place_of(of, one, position), 0)] = torch.nan
    found = call(of, device)
    close(found, expected(of), dtype)
    broken = found[0][..., 0].isnan()
    assert broken.any(-1).tolist() == [[False, True, True], [True, True, False]]
    assert found[1].isnan().equal(broken if what == "keys" else torch.zeros_like(broken))


@BROKEN
@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_infinite_logits(infinity: float, device: torch.device, seed: int) -> None:
    of = given(Case([[3, 11]], kv_heads=1, k=3, page_tokens=4), FP32, seed)
    of.pages[0, 0] = torch.tensor([2, 0, -1])
    of.q.abs_()
    of.keys[0, 0, 0] = of.values[0, 0, 0] = 1.0
    of.keys[0, 0, 1] = infinity
    of.values[0, 0, 1] = 1.0
    found = call(of, device)
    close(found, expected(of), FP32)
    if infinity < 0:
        assert found[1][0, 0].tolist() == [-math.inf] * 2
        assert not found[0][0, 0].any()
        assert found[1][0, 1].isfinite().all()
    else:
        assert found[0].isnan().all()


@BROKEN
def test_softcap_bounds_large_logits(device: torch.device, seed: int) -> None:
    of = given(Case([[23]], softcap=20.0), FP32, seed)
    # Whole numbers, whose sums are exact: the few logits that the cap leaves in between would else
    # keep what rounding leaves of large terms that cancel.
    of.q = (of.q * 1e3).round()
    of.keys = (of.keys * 8).round() / 8
    close(call(of, device), expected(of), FP32)


@pytest.mark.parametrize(("lists", "rows", "k"), [(2, 1, 0), (0, 1, 3), (2, 0, 3)])
def test_nothing_to_do(lists: int, rows: int, k: int, device: torch.device) -> None:
    table = torch.zeros(lists, 2, k, dtype=torch.int64, device=device)
    q = torch.zeros(lists, rows, 4, 16, device=device)
    positions = torch.zeros(lists, rows, dtype=torch.int64, device=device)
    out, lse = attend(q, table, table, table.int(), positions, page_tokens=4)
    assert out.shape == (lists, rows, 4, 16)
    assert not out.any()
    assert (lse == -math.inf).all()


def wrong_calls() -> dict[str, tuple[str, dict[str, object]]]:
    table = torch.zeros(1, 2, 3, dtype=torch.int64)
    return {
        "q": ("q_heads, dim", {"q": torch.zeros(1, 4, 16)}),
        "lists": ("lists, kv_heads, k", {"keys_at": table.expand(2, 2, 3)}),
        "heads": ("a multiple", {"q": torch.zeros(1, 1, 3, 16)}),
        "channels": ("contiguous", {"q": torch.zeros(1, 1, 16, 4).transpose(2, 3)}),
        "dtype of q": ("float32, float16 or", {"q": torch.zeros(1, 1, 4, 16, dtype=torch.float64)}),
        "dtype": ("float32, float16 or", {"dtype": torch.int8}),
        "addresses": ("wanted contiguous int64", {"keys_at": table.int()}),
        "values": ("wanted contiguous int64", {"values_at": table[:, :, :2]}),
        "pages": ("pages is", {"pages": table}),
        "positions": ("positions is", {"positions": torch.zeros(1, 2, dtype=torch.int64)}),
        "page_tokens": ("outside 1 to 1024", {"page_tokens": 0}),
        "value_dim": ("values from keys", {"values_at": None, "value_dim": 17}),
        "window": ("window is 0", {"window": 0}),
        "softcap": ("softcap=-1.0 must be positive", {"softcap": -1.0}),
        "infinite softcap": ("softcap=inf must be positive and finite", {"softcap": math.inf}),
        "large softcap": ("softcap=1e\\+30: 10000 at most", {"softcap": 1e30}),
        "scale": ("scale=nan must be positive", {"scale": math.nan}),
        "log_weights": ("log_weights is", {"log_weights": torch.zeros(1, 2, 3, 1)}),
        "dtype of weights": ("log_weights is", {"log_weights": torch.zeros(1, 2, 3, 4).half()}),
        "splits": ("splits is 0", {"splits": 0}),
        "programs": ("programs is 0", {"programs": 0}),
        "out": ("out is", {"out": torch.zeros(1, 1, 4, 15)}),
        "lse": ("lse is", {"lse": torch.zeros(1, 1, 4, dtype=torch.float16)}),
        "scratch": ("scratch is", {"scratch": torch.zeros(100, dtype=torch.float64)}),
    }


@pytest.mark.skipif(not INTERPRETED, reason="wrong arguments are told alike on the GPU")
@pytest.mark.parametrize(("message", "wrong"), wrong_calls().values(), ids=wrong_calls())
def test_wrong_arguments_are_named(message: str, wrong: dict[str, object]) -> None:
    table = torch.zeros(1, 2, 3, dtype=torch.int64)
    right: dict[str, object] = {
        "q": torch.zeros(1, 1, 4, 16),
        "keys_at": table,
        "values_at": table,
        "pages": table.int(),
        "positions": table[:, :1, 0].contiguous(),
        "page_tokens": 4,
    }
    attend(**right)  # type: ignore[arg-type]
    with pytest.raises(BadArgumentError, match=message):
        attend(**right | wrong)  # type: ignore[arg-type]


def test_blocks_are_powers_of_two_that_cover_the_channels() -> None:
    assert [blocks_of(dim) for dim in (1, 16, 40, 80, 96, 112, 128, 192, 576)] == [
        (16, 0), (16, 0), (32, 16), (64, 16), (64, 32), (64, 64), (128, 0), (128, 64), (512, 64)
    ]  # fmt: skip
    for dim in range(1, 1025):
        first, second = blocks_of(dim)
        assert first + second >= dim
        assert first < dim or second == 0


def test_splits_fill_the_programs_once() -> None:
    assert splits_of(work=8, tiles=1000, programs=396) == 48
    assert splits_of(work=396, tiles=1000, programs=396) == 1
    assert splits_of(work=1, tiles=1, programs=396) == 1
    assert splits_of(work=1, tiles=3, programs=396) in (1, 2, 3)


def test_tiles_by_shape() -> None:
    usual = Shape(BF16, BF16, 128, 128, True, 4, 1, 16, False)
    assert (tiles_of(usual).lines, tiles_of(usual).tokens) == (16, 64)
    mla = replace(usual, dim=576, value_dim=512, own_values=False, group=128, rows=2)
    assert tiles_of(mla).lines == 32
    assert not mla.mixes_rows(32)
    assert replace(usual, rows=2).mixes_rows(16)
