"""Scores of pages by their summaries, and the best of them: kernels against their reference, the
reference against what the words say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_index
from cxlkv.kernels.index import FORMS, Choosing, Form, Scoring, Scratch, choose, score
from cxlkv.kernels.reference_encode import digests_of, sketches_of

from ..support import reference
from ..support.lengths import matrix

CPU = torch.device("cpu")
SHAPES = {  # query heads, kv heads, channels, tokens a page, rows
    "llama": (8, 2, 128, 16, 1),
    "small heads, speculated rows": (6, 2, 64, 16, 3),
    "MLA": (32, 1, 160, 16, 4),
    "odd": (5, 5, 80, 20, 1),
    "wide": (4, 1, 256, 8, 2),
}


def summaries_of(form: Form, keys: torch.Tensor) -> torch.Tensor:
    """uint8 [pages, heads, bytes] of keys [pages, heads, tokens, dim]."""
    if form.name == "digest":
        made = digests_of(keys)
    elif form.name == "mean_std":
        wide = keys.float()
        made = torch.stack([wide.mean(2), wide.std(2, correction=0)], 2).bfloat16()
    else:
        made = sketches_of(keys)
    found = torch.zeros((*keys.shape[:2], form.bytes), dtype=torch.uint8)
    flat = made.contiguous().view(torch.uint8).flatten(2)
    found[..., : flat.shape[2]] = flat
    return found


class Scene:
    """Two requests that share pages and one that is not there, 50 pages of 60 slots."""

    def __init__(self, name: str, dtype: torch.dtype, shape: str, rng: np.random.Generator):
        self.q_heads, self.heads, dim, tokens, self.rows = SHAPES[shape]
        self.form = Form(name, tokens, dim, torch.bfloat16 if name == "mean_std" else dtype)
        keys = rng.standard_normal((60, self.heads, tokens, dim)).astype(np.float32)
        self.keys = torch.from_numpy(keys).to(dtype)
        self.summaries = summaries_of(self.form, self.keys)
        slots = np.full((3, 50), -1, np.int32)
        slots[0, :47] = rng.permutation(60)[:47]
        slots[1, :20] = slots[0, :20]
        slots[2, :5] = 7
        self.slots = torch.from_numpy(slots)
        shaped = (3, self.rows, self.q_heads, dim)
        self.q = torch.from_numpy(rng.standard_normal(shaped).astype(np.float32)).to(dtype)
        self.positions = 800 + torch.arange(self.rows).expand(3, -1).clone()
        self.positions[2] = -1
        self.positions[1, 1:] = -1

    def scores(self, device: torch.device) -> torch.Tensor:
        summaries, slots, q, positions = (
            tensor.to(device) for tensor in (self.summaries, self.slots, self.q, self.positions)
        )
        out = torch.full((3, self.heads, 50), 77.0, device=device)
        scratch = Scratch.of(self.form, 3 * self.rows * self.q_heads, device)
        score(self.form, summaries, slots, q, positions, out, scale=0.125, scratch=scratch)
        return out.cpu()

    def expected(self) -> torch.Tensor:
        out = torch.zeros((3, self.heads, 50))
        given = (self.summaries, self.slots, self.q, self.positions)
        reference_index.score(Scoring(self.form, *given, out, 0.125))
        return out


@matrix(
    name=FORMS,
    shape=SHAPES,
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    times=2,
)
def test_scores_are_those_of_the_reference(
    device: torch.device, rng: np.random.Generator, name: str, shape: str, dtype: torch.dtype
) -> None:
    scene = Scene(name, dtype, shape, rng)
    got, wanted = scene.scores(device), scene.expected()
    seen = (scene.slots >= 0)[:, None].expand(got.shape).clone()
    seen[2] = False  # this request has no rows
    assert got[~seen].eq(-torch.inf).all()
    torch.testing.assert_close(got[seen], wanted[seen], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", FORMS)
def test_the_reference_does_what_the_words_say(rng: np.random.Generator, name: str) -> None:
    """One request, page by page and query by query, in numpy."""
    scene = Scene(name, torch.float32, "odd", rng)
    got = scene.expected()[0].numpy()
    for head in range(5):
        query = scene.q[0, 0, head].double().numpy()
        for page in range(47):
            keys = scene.keys[int(scene.slots[0, page]), head].double().numpy()
            if name == "digest":
                wanted = np.maximum(query * keys.min(0), query * keys.max(0)).sum() * 0.125
                tolerance = 1e-4
            elif name == "mean_std":
                wanted = (query * keys.mean(0) + np.abs(query) * keys.std(0)).sum() * 0.125
                tolerance = 0.1  # bfloat16
            else:
                codes, scales = reference.sketched(keys.astype(np.float32))
                wanted = reference.estimates(codes, scales, query, 0.125).max()
                tolerance = 0.1  # a query has 8 bits
            assert got[head, page] == pytest.approx(wanted, abs=tolerance)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("name", FORMS)
def test_numbers_that_are_none_are_above_all(
    device: torch.device, rng: np.random.Generator, name: str, odd: float
) -> None:
    scene = Scene(name, torch.float32, "odd", rng)
    slot = int(scene.slots[0, 11])
    scene.keys[slot, 3, 4, 5] = odd
    scene.summaries = summaries_of(scene.form, scene.keys)
    with np.errstate(invalid="ignore"):  # in the interpreter
        got, wanted = scene.scores(device), scene.expected()
        assert got.isnan().equal(wanted.isnan())
        assert not got[0, 3, 11].isfinite()
        scene.q[1, 0, 2, 7] = np.nan
        got = scene.scores(device)
    assert got[1, 2, :20].isnan().all()
    assert not got[1, 1, :20].isnan().any()


def best(scores: list[float], low: int, high: int, sinks: int, wanted: int) -> list[int]:
    """By Python's sort: NaN first, then larger, then lower pages."""
    forced = list(range(low, min(low + sinks, high)))
    free = range(low + len(forced), high)
    order = sorted(free, key=lambda page: (scores[page] == scores[page], -scores[page], page))
    return forced + sorted(order[: max(0, wanted - len(forced))])


@pytest.mark.parametrize("pages", [7, 64, 1000, 9000])
def test_the_best_are_chosen(device: torch.device, rng: np.random.Generator, pages: int) -> None:
    """Ties, NaN, infinities, zeros of both signs; lists that are too short, and empty ones."""
    requests, heads, k = 6, 2, 40
    scores = rng.integers(-9, 9, (requests, heads, pages)).astype(np.float32)
    scores[1] = rng.standard_normal((heads, pages))
    scores[2, :, :: max(1, pages // 3)] = np.nan
    scores[3, :, ::2], scores[3, :, 1::2] = -0.0, 0.0
    scores[4] = -np.inf
    first = np.array([0, 2, 0, 1, 0, 3], np.int32)
    last = np.array([pages, pages - 1, pages + 5, pages, pages, 3], np.int32)
    wanted = np.array([12, k + 9, 20, 5, 6, 4], np.int32)
    for sinks in (0, 1, 3):
        of, low, high, count = (
            torch.from_numpy(array).to(device) for array in (scores, first, last, wanted)
        )
        out = torch.full((requests, heads, k), -77, dtype=torch.int32, device=device)
        got = choose(of, low, high, sinks, count, out).cpu()
        again = torch.full_like(got, -77)
        given = (of.cpu(), low.cpu(), high.cpu(), sinks, count.cpu(), again)
        reference_index.choose(Choosing(*given))
        for request in range(requests):
            end = max(int(first[request]), min(int(last[request]), pages))
            for head in range(heads):
                row = scores[request, head].tolist()
                most = min(int(wanted[request]), k)
                pages_of = best(row, int(first[request]), end, sinks, most)
                padded = (pages_of + [-1] * k)[:k]
                assert got[request, head].tolist() == padded, (request, head, sinks)
                assert again[request, head].tolist() == padded


def test_bad_arguments() -> None:
    form = Form("digest", 16, 64)
    summaries = torch.zeros((3, 2, form.bytes), dtype=torch.uint8)
    slots, positions = (
        torch.zeros((1, 4), dtype=torch.int32),
        torch.zeros((1, 1), dtype=torch.int64),
    )
    out, q = torch.zeros((1, 2, 4)), torch.zeros((1, 1, 4, 64), dtype=torch.bfloat16)
    scratch = Scratch.of(form, 4, CPU)
    for match, given in (
        ("query heads", (summaries, slots, q[:, :, :3].contiguous(), positions, out)),
        ("q is", (summaries, slots, q[..., :32].contiguous(), positions, out)),
        ("summaries", (summaries[..., 1:], slots, q, positions, out)),
        ("slots", (summaries, slots.long(), q, positions, out)),
        ("out", (summaries, slots, q, positions, out[..., :3])),
    ):
        with pytest.raises(BadArgumentError, match=match):
            score(form, *given, scale=1.0, scratch=scratch)
