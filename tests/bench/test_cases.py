"""Each benchmark case once, small: it runs, its checks hold, and no ratio is missing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from rich.console import Console

from cxlkv import errors
from cxlkv.bench import streams
from cxlkv.bench.cases import coherence
from cxlkv.bench.pools import Shape
from cxlkv.bench.registry import CASES
from cxlkv.bench.result import Result
from cxlkv.ops import cli

torch = pytest.importorskip("torch", reason="these benchmarks compare with torch")
pytest.importorskip("transformers", reason="these benchmarks run trained models")
from cxlkv.bench import loops, pictures, quality, sources  # noqa: E402
from cxlkv.bench.cases import (  # noqa: E402
    ndp,
    ndp_models,
    ndp_rivals,
    ndp_shared,
    recall,
    windows,
    worker,
)

PNG = b"\x89PNG\r\n\x1a\n"
SMALL_MODELS = ndp_models.Size(
    demo_tokens=2048,
    questions=8,
    text_tokens=2048,
    texts=2,
    queries=2,
    rounds=1,
    settle_s=0,
)
SMALL_NDP = ndp.Size(
    tokens=16640,
    layers=1,
    kv_heads=2,
    head_dim=64,
    rounds=1,
    settle_s=0,
    models=SMALL_MODELS,
    shared=ndp_shared.Size(
        tokens=1100, kv_heads=1, head_dim=16, own=(1, 20), requests=3, rounds=1, settle_s=0
    ),
)
SMALL_WORKER = worker.Size(tokens=64, kv_heads=1, head_dim=16, steps=3)
SMALL_RECALL = recall.Size(short=2048, long=16384, queries=2, shares=(0.05,), recalls=(0.9,))

UNIT = 16 * streams.UNIT_BYTES
# What a case's Size is made of, or what its run() takes that has none.
SMALL: dict[str, dict[str, object]] = {
    "memory": {
        **{"ring_bytes": (4096, UNIT), "data_bytes": UNIT, "pace_ns": (100, 0)},
        **{"threads": (1, 0), "block_bytes": (4096,)},
    },
    "foundation/pages": {
        **{"layers": 2, "capacity": 64 << 20, "counts": (1, 8), "pages": 16, "tokens": 128},
        **{"forks": 2, "repeat": 1, "fork_rounds": 1},
    },
    "foundation/gather": {"kv_bytes": 4 << 20, "call_bytes": 2 << 20, "page_tokens": (16, 64)},
    "coherence": {
        **{"record_bytes": (4096,), "table_bytes": (64,), "memory_bytes": 1 << 20, "rounds": 2},
        **{"sample_bytes": 1 << 16, "calls": 40, "call_rounds": 1},
        **{"pool_bytes": 8 << 20, "pool_rounds": 1},
    },
    "foundation/calls": {"layers": 2, "counts": (1, 3)},
    "foundation/transfer": {"layers": 2, "tokens": 2048},
    "windows": {"prompt": 2048, "decode": 20, "heads": 8},
    "worker": {},
    "tiers/hotness": {
        **{"tokens": 2048, "pairs": 3, "mass_pairs": 3},
        "weighed": (("d64", Shape(layers=1, kv_heads=2, head_dim=64, tokens=256)),),
    },
    "tiers/policy": {"pages": 2000, "rounds": 1},
    "tiers/prefix": {"tokens": 2048, "rounds": 1},
    "tiers/moves": {"layers": 2, "tokens": 512, "batch_units": 40},
    "tiers/residency": {"tokens": 2048, "tiers": (0.25,)},
    "tiers/cold": {"layers": 2, "kv_heads": 2, "call_records": 3, "calls": 2},
    "tiers/compression": {"tokens": 512, "batch_bytes": 1 << 16},
    "foundation/paged": {"kv_bytes": 4 << 20},
    "encodings": {
        **{"shapes": ("smollm2",), "tokens_most": 256, "threads": (1,), "walk_bytes": 1},
        **{"append_tokens": 64, "region_bytes": UNIT, "steps": None},
    },
    "transport": {"pages": 3, "layers": 2, "rounds": 2, "short_rounds": 2},
}
ONCE = {"rounds": 1, "sample_s": 0, "settle_s": 0}
"""What a Size has of these, unless its line says more."""
RATIOS = {
    "tiers/cold": {"read_to_memcpy", "write_to_memcpy"},
    "tiers/moves": {"move_to_memcpy"},
    "foundation/paged": {
        f"{verb}_{pool}_{threads}_to_memcpy"
        for verb in ("append", "fetch")
        for pool in ("plain", "crc", "sketches")
        for threads in (1, 2)
    },
    "transport": {"file_pull_to_bare", "socket_push_to_bare"},
    "worker": {"retro_1x16_512_worker_to_here", "magicpig_1x16_512_worker_to_here"},
}
ELSEWHERE = (
    "agree",
    "decode/attention",
    "decode/shapes",
    "decode/steps",
    "hints",
    "link",
    "ndp",
)  # run by tests of their own


def check_result(result: Result) -> None:
    assert result.passed, result.checks
    ratios = result.as_dict()["ratios"]
    assert isinstance(ratios, dict)
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios.values())
    assert result.metrics


@pytest.mark.parametrize(
    "case",
    [c.name for c in CASES.values() if c.module and not c.is_command and c.name not in ELSEWHERE],
)
def test_a_case_runs_small(case: str) -> None:
    if case == "tiers/compression":
        pytest.importorskip("zstandard", reason="no zstandard: pip install 'cxlkv[compress]'")
    result, module, given = Result(case), CASES[case].load(), SMALL[case]
    if case == "worker":
        worker.run(result, SMALL_WORKER, worker.ChooserSize(((1, 16, 512),), 4))
    elif hasattr(module, "Size"):
        names = {field.name for field in dataclasses.fields(module.Size)}
        given = {**{name: value for name, value in ONCE.items() if name in names}, **given}
        module.run(result, module.Size(**given))
    else:
        module.run(result, **given)
    check_result(result)
    assert set(result.ratios) >= RATIOS.get(case, set())
    if case == "encodings":
        of_link = {name for name in result.ratios if name.startswith("link_")}
        assert of_link
        assert set(result.links) == of_link
    if case == "tiers/residency":
        served = {n.split("_")[1]: m.median for n, m in result.metrics.items() if "served" in n}
        assert 0 < served["ours"] <= 1
        assert 0 < served["optimum"] <= 1
        assert served["static"] > served["random"]
    if case == "tiers/compression":
        assert result.ratios["noise_share"] >= 1
        assert result.ratios["text_bfloat16_share"] < 0.8


NDP_RATIOS = (
    *("exact_to_stream_1t", "exact_to_stream_2t", "exact_to_torch", "queries16_cost"),
    *("two_stage_speedup", "two_stage_bytes_share", "two_stage_answers", "text_speedup"),
    *("attend_to_stream", "attend_to_torch", "shared_attend_speedup"),
)


def test_ndp_runs_small_and_says_what_it_did_not_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without faiss, and it draws."""
    monkeypatch.setattr(ndp_rivals.Faiss, "of", lambda keys: None)
    result = Result("ndp")
    ndp.run(result, SMALL_NDP)
    check_result(result)
    assert set(NDP_RATIOS) <= set(result.ratios)
    assert "exact_to_faiss" not in result.ratios
    assert "exact_to_faiss_2t: not measured, " in "\n".join(result.notes)
    assert 0.1 < result.ratios["two_stage_bytes_share"] < 0.5
    pictures.roofline(result, tmp_path / "ndp.png")
    assert (tmp_path / "ndp.png").read_bytes().startswith(PNG)


def test_ndp_agrees_with_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    monkeypatch.setattr(ndp_models, "run", lambda result, size, threads: None)
    result = Result("ndp")
    ndp.run(result, SMALL_NDP, threads=(2,))
    check_result(result)
    assert result.checks["exact_and_faiss_agree_2t"]
    assert result.ratios["exact_to_faiss"] == result.ratios["exact_to_faiss_2t"]


def test_ndp_writes_no_ratio_when_forms_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's choice shifted by a page."""
    monkeypatch.setattr(ndp_models, "run", lambda result, size, threads: None)
    chosen = ndp_rivals.keys_first
    monkeypatch.setattr(ndp_rivals, "keys_first", lambda *given: chosen(*given) + 1)
    monkeypatch.setattr(ndp_rivals.Faiss, "of", lambda keys: None)
    result = Result("ndp")
    ndp.run(result, SMALL_NDP, threads=(1,))
    broken = {name for name, holds in result.checks.items() if not holds}
    assert broken == {
        f"{name}_and_torch_agree_1t"
        for name in ("exact", "exact_5_percent", "one_query", "queries16")
    }
    assert result.as_dict()["ratios"] == {}


def test_recall_runs_small_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size, result = SMALL_RECALL, Result("recall")
    every = recall.named_sources(size, tmp_path)
    assert list(every) == [
        *("demo_2K", "demo_16K", "text_2K", "gaussian_made_up_16K", "clustered_made_up_16K"),
        tmp_path.name,
    ]
    some = {name: every[name] for name in ("demo_2K", "text_2K", "gaussian_made_up_16K")}
    monkeypatch.setattr(recall, "named_sources", lambda size, model, text: some)
    found = recall.run(result, size)
    check_result(result)
    gaussian = {str(row.way): row for row in found["gaussian_made_up_16K"]}
    assert list(gaussian) == ["digest", "two_stage_0.9", "exact"]
    exact, staged, digest = gaussian["exact"], gaussian["two_stage_0.9"], gaussian["digest"]
    assert set(exact.bytes_share + exact.recall + exact.mass_to_exact) == {1.0}
    assert quality.mean(staged.recall) > 0.8 > 0.5 > quality.mean(digest.recall)
    assert quality.mean(digest.bytes_share) < quality.mean(staged.bytes_share) < 0.5
    assert len(staged.recall) == 2
    assert len(staged.mass) == 8
    assert all(0 < mass < 1 for mass in staged.mass)
    pictures.recall(found, tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes().startswith(PNG)
    shown = Console(width=140, record=True)
    shown.print(recall.table(found))
    assert "two_stage 0.9" in shown.export_text()


def test_quality_tells_a_wrong_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "exact" chooses is compared with torch's own scores; and mass is of what was chosen."""
    taken = sources.gaussian(2048, 2)
    _, agreement = quality.weigh(taken, (0.1,), (quality.EXACT,))
    assert agreement == 1
    moved = dataclasses.replace(taken[0], queries=taken[0].queries.roll(1, 0))
    held = quality._Layer.look
    other = quality._Layer(0, moved)
    monkeypatch.setattr(quality._Layer, "look", lambda layer, at: held(other, at))
    _, agreement = quality.weigh(taken, (0.1,), (quality.EXACT,))
    assert agreement < 0.5
    with pytest.raises(errors.BadArgumentError, match="more than the 3 pages"):
        quality.weigh(taken, (0.01,), (quality.EXACT,))


def test_what_a_command_cannot_draw_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent = str(tmp_path / "absent" / "x.png")
    for given, what in (
        (
            ("foundation", "--picture", absent),
            "--picture goes with ndp, encodings, recall, decode/shapes, ",
        ),
        (("ndp", "--model", str(tmp_path)), "--model goes with recall, vllm; not with ndp"),
        (("recall", "--text", str(tmp_path)), "--text goes with --model"),
        (("ndp", "--picture", absent), "its folder does not exist"),
        (("recall", "--json", absent), "its folder does not exist"),
        (("rocket",), "unknown case 'rocket': `cxlkv bench` has all"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["bench", *given])
        assert what in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("model", "full_of"), [("gemma3_12b", (8, 48)), ("gpt_oss_20b", (12, 24))])
def test_windows_hold_what_their_layers_see(model: str, full_of: tuple[int, int]) -> None:
    """Layers that see all hold all; the others their window, what a crop takes back, and edges."""
    size = windows.Size(prompt=4096, decode=40)
    windowed, window, full, every = windows.MODELS[model]
    result = Result("windows")
    held = windows.pages_held(result, model, size, (windowed, window, full, every))
    pages = (size.prompt + size.decode) // 16
    low = full * pages + windowed * (window // 16)
    assert low <= held <= low + windowed * (128 // 16 + 2)
    assert (full, windowed + full) == full_of
    order = windows.alternating(windowed, full, every)
    assert (order.count(0), order.count(1)) == (windowed, full)


def test_the_cost_of_coherence_is_of_calls_that_do_what_they_say() -> None:
    """What is published is in the memory; each operation's name is the core's number for it."""
    memory, source = coherence.at_page(64 << 10), coherence.at_page(4096)
    target = coherence.at_page(4096)
    memory[:] = 0
    source[:] = 7
    with pytest.raises(errors.StaleError, match="record 0 is not there"):
        loops.coherence_time_s("acquire", memory, target, 0, 1)
    for operation in ("store", "stream", "write_back", "invalidate", "evict"):
        before = int(memory.sum())
        assert loops.coherence_time_s(operation, memory, source, 3, 1) > 0
        assert int(memory.sum()) == before + 7 * 4096
        memory[:] = 0
    for operation in ("read", "read_invalidated", "read_evicted"):
        loops.coherence_time_s("store", memory, source, 0, 1)
        target[:] = 0
        loops.coherence_time_s(operation, memory, target, 0, 1)
        assert bool((target == 7).all())
    loops.coherence_time_s("publish", memory, source, 0, 15, checksum=True)
    for operation in ("acquire", "acquire_unpinned"):
        target[:] = 0
        loops.coherence_time_s(operation, memory, target, 0, 7, batch=2, checksum=True)
        assert bool((target == 7).all())
    assert loops.coherence_time_s("unpin", memory, target, 0, 7, batch=2) > 0
    memory[15 * 64 + 14 * (4096 + 64) + 64 + 100] ^= 1  # of the last payload
    with pytest.raises(errors.StaleError, match="record 14 is not there"):
        loops.coherence_time_s("acquire", memory, target, 14, 1, checksum=True)
    with pytest.raises(errors.BadArgumentError):
        loops.coherence_time_s("publish", memory, source[:100], 0, 1)
    with pytest.raises(errors.BadArgumentError):
        loops.coherence_calls_ns("fast", 4097, 1)
    with pytest.raises(errors.BadArgumentError):
        loops.coherence_visible_ns("fast", 100, 1)
