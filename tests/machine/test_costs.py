"""The cost model: literal stories, what holds for all costs, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cxlkv import KVLayout
from cxlkv.errors import BadArgumentError
from cxlkv.layout import LayerGroup
from cxlkv.machine.costs import (
    CHOICES,
    TOKENS_MAX,
    Costs,
    Prefill,
    Tier,
    format_seconds,
    key_share,
    kv_bytes,
    stored_bytes,
)

# 10 layers of 1 head, 25 + 25 channels of 2 bytes: 1000 bytes a token. Pages of 10 tokens.
LAYOUT = KVLayout(layers=10, kv_heads=1, head_dim=25, page_tokens=10)

# Reading 1000 tokens from far: 10 calls of 1 ms and 1 MB at 100 MB/s: 20 ms. Cold: 100 records of
# 1 ms and 1 MB at 10 MB/s: 200 ms, then 20 ms from far. Recomputing 1000 tokens: 100 ms.
COSTS = Costs(
    local=Tier(bytes_per_s=1e9),
    far=Tier(bytes_per_s=1e8, latency_s=1e-3, write_bytes_per_s=5e7),
    cold=Tier(bytes_per_s=1e7, latency_s=1e-3, write_bytes_per_s=1e7),
    score_bytes_per_s=1e8,
    attend_bytes_per_s=1e8,
    step_latency_s=1e-4,
    engine_score_bytes_per_s=1e9,
    engine_attend_bytes_per_s=1e9,
    engine_step_latency_s=1e-5,
    prefill=Prefill(tokens_per_s=10_000),
)


def test_a_long_hit_in_far_memory_is_fetched() -> None:
    decision = COSTS.decide(LAYOUT, tokens=1000, cached_tokens=1000, tier="far", decode_tokens=50)
    assert decision.choice == "fetch"
    # A step: 10 layers of 0.1 ms, and 1 MB of K and V at 100 MB/s. 50 of them. The engine's takes
    # a tenth of that.
    assert decision.seconds == pytest.approx({"recompute": 0.155, "fetch": 0.075, "attend": 0.55})
    assert decision.reason == (
        "fetch: 1,000 tokens in the far tier take 75 ms to fetch, 550 ms to attend to where they "
        "lie and 155 ms to recompute, decoding included"
    )


def test_an_engine_that_decodes_no_faster_attends_in_place() -> None:
    costs = replace(COSTS, engine_attend_bytes_per_s=None)
    decision = costs.decide(LAYOUT, tokens=1000, cached_tokens=1000, tier="far", decode_tokens=50)
    assert decision.seconds == pytest.approx({"recompute": 0.65, "fetch": 0.57, "attend": 0.55})


def test_one_answer_about_a_long_prefix_is_attended_to_in_place() -> None:
    decision = COSTS.decide(LAYOUT, tokens=1001, cached_tokens=1000, tier="far", share=0.1)
    # A select reads the keys, 0.5 MB in 5 ms; attend a tenth of 1 MB in 1 ms; 1 ms of calls.
    assert decision.choice == "attend"
    assert decision.seconds["attend"] == pytest.approx(0.007)


def test_a_short_hit_is_recomputed() -> None:
    decision = COSTS.decide(LAYOUT, tokens=50, cached_tokens=50, tier="far", decode_tokens=100)
    assert decision.choice == "recompute"
    # 100 steps of the engine: 10 calls of 10 us, and 50 kB at 1 GB/s.
    assert decision.seconds["recompute"] == pytest.approx(0.005 + 0.015)
    assert decision.seconds["fetch"] == pytest.approx(0.0105 + 0.015)


def test_an_encoded_pool_is_read_in_its_own_bytes() -> None:
    """A row of 25 channels is 32 + 2 bytes in 8 bits, 16 + 2 in 4; over a link go 50, decoded."""
    encoded = LAYOUT.encoded("int8,int4")
    a_token = 10 * ((32 + 2) + (16 + 2))
    assert kv_bytes(encoded, 1000) == 1e6
    assert stored_bytes(encoded, 1000) == 1000 * a_token
    assert key_share(encoded) == pytest.approx(34 / 52)
    assert COSTS.read_seconds(encoded, 1000, "far") == pytest.approx(0.01 + 1000 * a_token / 1e8)
    linked = replace(COSTS, link_bytes_per_s=1e7)
    assert linked.read_seconds(encoded, 1000, "far") == pytest.approx(0.01 + 1e6 / 1e7)
    step = 1000 * a_token / 1e8 + 10 * 1e-4
    assert COSTS.step_seconds(encoded, 1000) == pytest.approx(step)
    engine = COSTS.decode_seconds(encoded, 1000, 1)  # of rows as the model made them
    assert engine == pytest.approx(COSTS.decode_seconds(LAYOUT, 1000, 1))


def test_what_lies_in_a_file_goes_through_the_pool() -> None:
    cold = COSTS.decide(LAYOUT, tokens=1000, cached_tokens=1000, tier="cold")
    wanted = {"recompute": 0.1011, "fetch": 0.2211, "attend": 0.211}
    assert cold.seconds == pytest.approx(wanted)
    assert cold.choice == "recompute"


def test_nothing_cached_is_nothing_to_fetch() -> None:
    decision = COSTS.decide(LAYOUT, tokens=1000, cached_tokens=0, tier="cold")
    assert decision.choice == "recompute"
    assert decision.seconds == {"recompute": 0, "fetch": 0, "attend": 0}
    assert decision.reason == "recompute: nothing is cached"


def test_without_rates_near_the_data_nobody_attends() -> None:
    costs = replace(COSTS, attend_bytes_per_s=None)
    decision = costs.decide(LAYOUT, tokens=1000, cached_tokens=1000, tier="far")
    assert decision.seconds["attend"] == math.inf
    assert decision.choice == "fetch"
    assert "attend" not in decision.reason


def test_requests_by_the_array_are_decided_as_one_by_one() -> None:
    rows = [(1000, 1000, "far", 50), (50, 50, "far", 100), (1000, 1000, "cold", 0)]
    many = COSTS.decide_all(
        LAYOUT,
        tokens=[row[0] for row in rows],
        cached_tokens=[row[1] for row in rows],
        tier=[row[2] for row in rows],
        decode_tokens=[row[3] for row in rows],
    )
    assert [CHOICES[choice] for choice in many.choice] == ["fetch", "recompute", "recompute"]
    for index, (tokens, cached, tier, decoded) in enumerate(rows):
        assert many[index] == COSTS.decide(
            LAYOUT, tokens=tokens, cached_tokens=cached, tier=tier, decode_tokens=decoded
        )
    assert len(COSTS.decide_all(LAYOUT, tokens=[], cached_tokens=[], tier="far")) == 0


def test_a_tier_says_from_which_length_it_pays() -> None:
    # 10 ms + n / 100,000 s against n / 10,000 s: equal at 111.1 tokens, so from 12 pages on.
    verdict = COSTS.verdict(LAYOUT, "far", 1000)
    assert (verdict.pays, verdict.pays_from) == (True, 120)
    assert verdict.prefill_tokens_per_s == pytest.approx(50_000)
    assert verdict.sentence == (
        "the far tier pays here: a hit of 1,000 tokens takes 20 ms to read and 100 ms to "
        "recompute; it pays from 120 tokens on"
    )
    # Written in 20 ms, and each hit saves 80.
    assert verdict.reads_per_write == pytest.approx(0.25)


def test_a_tier_says_why_it_does_not_pay() -> None:
    verdict = COSTS.verdict(LAYOUT, "cold", 1000)
    assert (verdict.pays, verdict.pays_from, verdict.reads_per_write) == (False, None, None)
    assert verdict.sentence == (
        "the cold tier does not pay here because a hit of 1,000 tokens takes 220 ms to read and "
        "100 ms to recompute; it pays at no length up to 16,777,216 tokens"
    )
    # Attention makes long contexts dearer: n + n² / 2000 tokens' time against 0.22 ms a token.
    slow = replace(COSTS, prefill=Prefill(tokens_per_s=10_000, context_half=1000))
    assert slow.pays_from(LAYOUT, "cold") == pytest.approx(2400, abs=150)


def test_without_a_prefill_speed_a_tier_says_which_one_would_do() -> None:
    verdict = replace(COSTS, prefill=None).verdict(LAYOUT, "far", 1000)
    assert (verdict.pays, verdict.recompute_s, verdict.pays_from) == (None, None, None)
    assert verdict.sentence == (
        "the far tier pays when your engine prefills 1,000 tokens more slowly than at 50,000 "
        "tokens/s: a hit of them takes 20 ms to read"
    )


def test_a_slow_link_to_the_gpu_counts_instead_of_faster_memory() -> None:
    linked = replace(COSTS, link_bytes_per_s=5e7)
    assert linked.read_seconds(LAYOUT, 1000, "far") == pytest.approx(0.03)
    assert linked.read_seconds(LAYOUT, 1000, "local") == pytest.approx(0.02)
    fast = replace(COSTS, link_bytes_per_s=1e12)
    assert fast.read_seconds(LAYOUT, 1000, "far") == COSTS.read_seconds(LAYOUT, 1000, "far")


def test_layers_with_a_window_keep_their_end_only() -> None:
    groups = [LayerGroup(layers=9, kv_heads=1, head_dim=25, window=100)]
    groups.append(LayerGroup(layers=1, kv_heads=1, head_dim=25))
    windowed = KVLayout.of(groups, page_tokens=10)
    assert kv_bytes(windowed, [50, 1000]).tolist() == [50_000, 9 * 100 * 100 + 100 * 1000]
    # Two groups: a record of each for a page. 10 pages of the window, 100 of the others.
    cold = COSTS.read_seconds(windowed, 1000, "cold") - COSTS.read_seconds(windowed, 1000, "far")
    assert cold == pytest.approx(0.110 + 190_000 / 1e7)


# ---- prefill ----


def test_deep_tokens_take_longer() -> None:
    prefill = Prefill(tokens_per_s=1000, context_half=4000)
    assert prefill.seconds(0, 4000) == pytest.approx(6.0)  # 4 s, and half as much of attention
    assert prefill.seconds(4000, 4001) == pytest.approx(0.002, rel=1e-3)  # at the half
    whole = prefill.seconds(0, 3000) + prefill.seconds(3000, 4000)
    assert whole == pytest.approx(prefill.seconds(0, 4000))


def test_two_measured_speeds_give_both_terms() -> None:
    truth = Prefill(tokens_per_s=12_000, context_half=30_000)
    points = [(context / float(truth.seconds(0, context)), context) for context in (65536, 2048)]
    found = Prefill.measured(points)
    assert found.tokens_per_s == pytest.approx(12_000)
    assert found.context_half == pytest.approx(30_000)
    assert Prefill.measured([(9000, 16384)]) == Prefill(tokens_per_s=9000)
    assert Prefill.measured([(9000, 16384), (9000, 1024)]).context_half == math.inf


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([], "one, or two"),
        ([(9000, 10), (8000, 10)], "different lengths"),
        ([(9000, 1000), (12000, 60000)], "more slowly"),
        ([(9000, 1000), (100, 1001)], "measure both again"),
        ([(0, 1000)], "tokens_per_s is 0"),
        ([(9000, -1)], "context is -1"),
        ([(math.nan, 0)], "tokens_per_s is nan"),
    ],
)
def test_measurements_that_cannot_be(points: list[tuple[float, float]], why: str) -> None:
    with pytest.raises(BadArgumentError, match=why):
        Prefill.measured(points)


# ---- what a page is worth ----


def test_a_deeper_page_is_worth_more() -> None:
    costs = replace(COSTS, prefill=Prefill(tokens_per_s=10_000, context_half=1000))
    depths = np.array([0, 1000, 2000])
    values = costs.value(10, depths, 10_000, "far")
    # 1 ms for 10 tokens at the start, 2 ms at the half, 3 ms at its double; 0.1 ms to read.
    assert values == pytest.approx([0.9e-3, 1.9e-3, 2.9e-3], rel=0.01)
    # From the file: 1 ms an operation, 1 ms of bytes, and 0.1 ms from the pool.
    assert costs.value(10, depths, 10_000, "cold") == pytest.approx(values - 2e-3)


def test_pages_of_several_sizes() -> None:
    costs = replace(COSTS, prefill=Prefill(tokens_per_s=10_000, context_half=1000))
    tokens, depths = np.array([10, 16, 3]), np.array([0, 500, 4000])
    values = costs.value(tokens, depths, 1000 * tokens, "far")
    assert values == pytest.approx(costs.recompute_seconds(depths, depths + tokens) - tokens / 1e5)


def test_the_share_of_keys() -> None:
    narrow = KVLayout(layers=1, kv_heads=1, head_dim=96, value_head_dim=32)
    latent = LayerGroup(layers=1, kv_heads=1, head_dim=576, value_head_dim=512, values="key_prefix")
    assert [key_share(LAYOUT), key_share(narrow)] == [0.5, 0.75]
    assert key_share(KVLayout.of([latent])) == 1


def test_the_pages_of_a_hit_sum_up_to_what_it_saves() -> None:
    costs = replace(COSTS, prefill=Prefill(tokens_per_s=10_000, context_half=1000))
    depths = np.arange(0, 1000, 10)
    pages = costs.value(10, depths, kv_bytes(LAYOUT, 10), "far").sum()
    read = costs.read_seconds(LAYOUT, 1000, "far") - LAYOUT.layers * 1e-3  # without the calls
    assert pages == pytest.approx(costs.recompute_seconds(0, 1000) - read)


# ---- what holds for all costs ----

rates = st.floats(1e3, 1e12)
latencies = st.floats(0, 1)
tier_costs = st.builds(Tier, bytes_per_s=rates, latency_s=latencies)
prefills = st.builds(
    Prefill,
    tokens_per_s=st.floats(1, 1e6),
    context_half=st.one_of(st.just(math.inf), st.floats(100, 1e7)),
)
all_costs = st.builds(
    Costs,
    local=tier_costs,
    far=tier_costs,
    cold=tier_costs,
    score_bytes_per_s=rates,
    attend_bytes_per_s=rates,
    step_latency_s=latencies,
    engine_score_bytes_per_s=st.one_of(st.none(), rates),
    engine_attend_bytes_per_s=rates,
    engine_step_latency_s=latencies,
    link_bytes_per_s=st.one_of(st.none(), rates),
    prefill=prefills,
)
tier_names = st.sampled_from(("local", "far", "cold"))
WINDOWED = KVLayout.of(
    [
        LayerGroup(layers=5, kv_heads=2, head_dim=8, window=64),
        LayerGroup(layers=1, kv_heads=2, head_dim=8),
    ],
    page_tokens=16,
)
layouts = st.sampled_from((LAYOUT, WINDOWED))


@given(all_costs, layouts, tier_names, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0))
def test_the_choice_is_the_cheapest(
    costs: Costs, layout: KVLayout, tier: str, cached: int, more: int, decoded: int
) -> None:
    decision = costs.decide(
        layout,
        tokens=cached + more,
        cached_tokens=cached,
        tier=tier,
        decode_tokens=min(decoded, 10**6),
        share=0.1,
    )
    assert decision.seconds[decision.choice] == min(decision.seconds.values())


@given(all_costs, layouts, tier_names, st.integers(0, 10**6), st.integers(0, 10**6))
def test_more_tokens_never_take_less(
    costs: Costs, layout: KVLayout, tier: str, one: int, other: int
) -> None:
    few, many = sorted((one, other))
    for seconds in (
        costs.read_seconds(layout, [few, many], tier),
        costs.step_seconds(layout, [few, many]),
        costs.recompute_seconds(0, [few, many]),
    ):
        assert seconds[0] <= seconds[1]


@given(all_costs, layouts, tier_names, st.integers(1, 10**6))
def test_the_break_even_length_agrees_with_the_decisions(
    costs: Costs, layout: KVLayout, tier: str, pages: int
) -> None:
    begins = costs.pays_from(layout, tier)
    tokens = min(pages * layout.page_tokens, TOKENS_MAX)
    costs = replace(costs, attend_bytes_per_s=None)
    read = costs.read_seconds(layout, tokens, tier)
    recomputed = costs.recompute_seconds(0, tokens)
    assume(abs(read - recomputed) > 1e-9 * recomputed)  # rounding decides
    decision = costs.decide(layout, tokens=tokens, cached_tokens=tokens, tier=tier)
    pays = begins is not None and tokens >= begins
    assert decision.choice == ("fetch" if pays else "recompute")
    assert costs.verdict(layout, tier, tokens).pays is pays


@given(all_costs, tier_names)
def test_just_below_the_break_even_length_nothing_is_gained(costs: Costs, tier: str) -> None:
    begins = costs.pays_from(LAYOUT, tier)
    assume(begins is not None and begins > LAYOUT.page_tokens)
    assert begins is not None
    last = costs.verdict(LAYOUT, tier, begins - LAYOUT.page_tokens)
    assert (last.pays, costs.verdict(LAYOUT, tier, begins).pays) == (False, True)


@given(all_costs, layouts, tier_names, st.integers(1, 10**6))
def test_an_engine_at_the_break_even_speed_is_as_fast_as_the_tier(
    costs: Costs, layout: KVLayout, tier: str, tokens: int
) -> None:
    verdict = replace(costs, prefill=None).verdict(layout, tier, tokens)
    equal = replace(costs, prefill=Prefill(tokens_per_s=verdict.prefill_tokens_per_s))
    assert equal.recompute_seconds(0, tokens) == pytest.approx(verdict.read_s)


# ---- what is refused ----


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, True, "fast", None])
@pytest.mark.parametrize(
    "name", ["bytes_per_s", "tokens_per_s", "link_bytes_per_s", "score_bytes_per_s"]
)
def test_a_rate_that_is_none_is_named(name: str, wrong: object) -> None:
    makes = {"bytes_per_s": Tier, "tokens_per_s": Prefill}
    make = makes.get(name, Costs)
    if make is Costs and wrong is None:
        return  # it means: not there
    with pytest.raises(BadArgumentError, match=f"{name} is .*above 0"):
        make(**{name: wrong})


@pytest.mark.parametrize("wrong", [-1e-9, math.nan, math.inf, False])
def test_a_latency_that_is_none_is_named(wrong: float) -> None:
    with pytest.raises(BadArgumentError, match=r"^latency_s is .*0 or more"):
        Tier(bytes_per_s=1, latency_s=wrong)
    with pytest.raises(BadArgumentError, match=r"^step_latency_s is .*0 or more"):
        Costs(step_latency_s=wrong)


def test_requests_that_cannot_be() -> None:
    def refused(why: str, **given: object) -> None:
        request = {"tokens": 10, "cached_tokens": 10, "tier": "far", **given}
        with pytest.raises(BadArgumentError, match=why):
            COSTS.decide(LAYOUT, **request)  # type: ignore[arg-type]

    refused("cached_tokens is 11, more than the prompt's 10 tokens", cached_tokens=11)
    refused("cached_tokens is .*0 or more", cached_tokens=-1)
    refused("tokens is .*whole", tokens=10.5)
    refused("decode_tokens is .*0 or more", decode_tokens=-1)
    refused("tier is 'disk': one of local, far, cold", tier="disk")
    refused("tier has 2 names for 1 requests", tier=("far", "local"))
    for share in (0, -0.1, 1.1, math.nan):
        refused("share is .*outside", share=share)
    with pytest.raises(BadArgumentError, match="tokens is 0"):
        COSTS.verdict(LAYOUT, "far", 0)


def test_what_is_not_known_is_not_made_up() -> None:
    request = {"tokens": 10, "cached_tokens": 10}
    with pytest.raises(BadArgumentError, match=r"tier cold: .*cxlkv tune.* --cold PATH"):
        replace(COSTS, cold=None).decide(LAYOUT, tier="cold", **request)
    with pytest.raises(BadArgumentError, match="prefill speed is not known"):
        replace(COSTS, prefill=None).decide(LAYOUT, tier="far", **request)
    with pytest.raises(BadArgumentError, match="prefill speed is not known"):
        replace(COSTS, prefill=None).value(10, 0, 10_000, "far")
    assert replace(COSTS, local=None).tiers == ("far", "cold")


@pytest.mark.parametrize("name", ["tokens", "depth_tokens", "page_bytes"])
@pytest.mark.parametrize("wrong", [-1, math.nan])
def test_pages_that_cannot_be(name: str, wrong: float) -> None:
    page = {"tokens": [16.0], "depth_tokens": [0.0], "page_bytes": [1000.0], name: [wrong]}
    with pytest.raises(BadArgumentError, match=f"^{name}: "):
        COSTS.value(page["tokens"], page["depth_tokens"], page["page_bytes"], "far")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (1.5e-6, "1.5 us"),
        (9.996e-4, "1 ms"),
        (0.0123456, "12.3 ms"),
        (0.9999, "1 s"),
        (4321, "4,321 s"),
    ],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
