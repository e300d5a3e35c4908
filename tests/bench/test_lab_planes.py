"""Attention by planes against a loop over tokens, heads and pages that does what the rule says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cxlkv.bench.lab import codes, planes
from cxlkv.bench.lab.planes import VALUES_ERROR, Planes

TOKENS, HEADS, GROUP, DIM, SCALE, COUNTED = 41, 2, 3, 32, 32**-0.5, 9
Doubles = np.typing.NDArray[np.float64]
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def case() -> Case:
    """query, key, value: a few keys are large, so that shares differ. Always the same ones: a share
    that is a limit but for its rounding would be read by one and not by the other."""
    rng = np.random.default_rng(5)
    sizes = rng.choice([0.2, 1, 3], (HEADS, TOKENS, 1))
    key = rng.normal(size=(HEADS, TOKENS, DIM)) * sizes
    query = rng.normal(size=(HEADS * GROUP, TOKENS, DIM))
    value = rng.normal(size=(HEADS, TOKENS, DIM))
    first, second, third = (torch.from_numpy(a.astype(np.float32)) for a in (query, key, value))
    return first, second, third


def softmax(scores: Doubles) -> Doubles:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True), np.float64)


def heavy_tokens(weights: Doubles, limit: float) -> list[bool]:
    """weights: [group, tokens]."""
    shares = [weights[:, at : at + 16].sum(1).max() for at in range(0, weights.shape[1], 16)]
    return [bool(shares[token // 16] >= limit) for token in range(weights.shape[1])]


def by_hand(case: Case, head: int, last: int, error: float) -> tuple[Doubles, int, int]:
    """Outputs [group, dim] of one token; tokens whose keys and whose values were read whole."""
    query = case[0].double().numpy()[head * GROUP : (head + 1) * GROUP, last]
    eight, four, steps = list[Doubles](), list[Doubles](), np.zeros(0)
    for rows in (case[1][head, : last + 1].numpy(), case[2][head, : last + 1].numpy()):
        coded = codes.encode_rows(rows, 8)
        eight.append(codes.unrotate(codes.decode(coded, 8)).astype(np.float64))
        upper = codes.upper_half(coded)
        four.append(codes.unrotate(codes.decode(upper, 4)).astype(np.float64))
        steps = steps if len(steps) else upper.scales.astype(np.float64)
    variance = max(SCALE**2 * (row @ row) * (steps**2).mean() / 12 for row in query)
    rough = SCALE * query @ four[0].T
    keys = heavy_tokens(softmax(rough), error**2 / (2 * variance))
    scores = np.where(keys, SCALE * query @ eight[0].T, rough)
    weights = softmax(scores)
    values = heavy_tokens(weights, error**2 / (2 * VALUES_ERROR))
    mixed = np.where(np.array(values)[:, None], eight[1], four[1])
    return weights @ mixed, sum(keys), sum(values)


@pytest.mark.parametrize("error", [0.0, 0.05, 0.12, 5.0])
def test_each_token_reads_what_the_rule_says(case: Case, error: float) -> None:
    out, read = planes.attention(*case, SCALE, Planes(error), COUNTED)
    assert out.shape == case[0].shape
    counts, seen = np.zeros(2), 0
    for head in range(HEADS):
        for last in range(TOKENS):
            wanted, keys, values = by_hand(case, head, last, error)
            found = out[head * GROUP : (head + 1) * GROUP, last].numpy()
            np.testing.assert_allclose(found, wanted, atol=2e-5)
            if last >= TOKENS - COUNTED:
                counts += keys, values
                seen += last + 1
    assert (read.key_bits, read.value_bits) == pytest.approx(tuple(4 + 4 * counts / seen))
    if error in (0.05, 0.12):
        assert 4 < read.key_bits < 8
        assert 4 < read.value_bits < 8


def test_the_error_is_within_what_was_asked_for(case: Case) -> None:
    for error in (0.05, 0.12, 0.3):
        _, read = planes.attention(*case, SCALE, Planes(error), COUNTED)
        assert read.error <= error**2, error


def test_fixed_limits_are_those_shares(case: Case) -> None:
    _, all_keys = planes.attention(*case, SCALE, Planes(limits=(0.0, 2.0)), COUNTED)
    assert (all_keys.key_bits, all_keys.value_bits) == (8, 4)
    _, some = planes.attention(*case, SCALE, Planes(limits=(0.3, 0.1)), COUNTED)
    assert 4 < some.key_bits < some.value_bits < 8
