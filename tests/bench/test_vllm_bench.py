"""vLLM side by side, without vLLM: engines are fakes that are right, wrong, dead or busy, and no
ratio is given when one of them is not right. Likewise with a trained model, where ties are none."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cxlkv import CXLPool
from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.peers.talking import Program
from cxlkv.bench.registry import Options
from cxlkv.bench.result import read as read_result
from cxlkv.bench.vllm import case, prefill_decode, running, trained
from cxlkv.bench.vllm.trained import ByBudget, ByEncoding
from cxlkv.demo import smollm2 as model
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.prefix import prefix_keys
from cxlkv.transport import Remote

from ..support import texts

SMALL = replace(
    running.QUICK,
    prefix_tokens=128,
    decode=((128, 1), (128, 2), (256, 1)),
    bounds={**running.BOUNDS, "ttft_cached_miss_to_stock": 0.1},
)

# An engine as the runner sees it. Its first tokens come at once where it has the prefix.
FAKE = """\
import json, os, sys
name, fault = sys.argv[1:3]
if fault == "cannot start":
    print(json.dumps({"error": "UnsupportedError: vLLM 9.9: this release was tested with ..."}))
    sys.exit(1)
print(json.dumps({"version": "vllm 9", "forms": {}}), flush=True)
seen, hits, count = set(), 0, 0
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "end":
        print(json.dumps({"ok": True}), flush=True)
        continue
    if asked["op"] == "weigh":
        print(json.dumps({"logprobs": [-1.0, -4.0 if fault == "sure" else -1.2]}), flush=True)
        continue
    tokens, cached, count = [], [], count + 1
    for prompt in asked["prompts"]:
        ends = range((len(prompt) - 1) // 32 * 32, 0, -32)
        cached.append(max((n for n in ends if tuple(prompt[:n]) in seen), default=0))
        if name in ("two_stage", "shared", "pulled") and count > 1:
            cached[-1] = max(ends)  # from another's pool
        tokens.append([(sum(prompt) + place) % 512 for place in range(asked["tokens"])])
        budget = (asked["options"] or {}).get("budget")
        if budget is True or budget and budget["share"] < 1:
            tokens[-1][-1] += 1  # what pages were left out may be seen
    for prompt in asked["prompts"] if name != "stock" else ():
        seen.update(tuple(prompt[:n]) for n in range(32, len(prompt), 32))
    hits += any(cached)
    first_s = 0.25 if any(cached) else 1.0
    decoded = len(tokens) * (asked["tokens"] - 1)
    answer = {"tokens": tokens, "cached": cached, "first_s": first_s, "decode_s": 2.0}
    answer |= {"decoded": decoded, "idle_s": 10.0, "idle_used_s": 0.01}
    if fault == "spins":
        answer["idle_used_s"] = 9.0
    if (fault, hits) in (("another token", 2), ("another token later", 5)):
        tokens[0][3] += 1
    if fault == "never cached":
        answer["cached"] = [0 for _ in cached]
    if fault == "too few":
        tokens[0].pop()
    if fault == "no time":
        answer["first_s"] = 0.0
    if fault == "text":
        answer["cached"] = ["all"]
    if fault == "an error" and hits:
        answer = {"error": "PoolMissingError: gone"}
    if fault == "dies" and hits:
        sys.exit("std::bad_alloc")
    print(json.dumps(answer), flush=True)
"""


def engines(folder: Path, names: Sequence[str] = running.NAMES, **faults: str) -> list[Program]:
    path = folder / "engine.py"
    path.write_text(FAKE)
    return [
        Program(name, (sys.executable, str(path), name, faults.get(name, "")), dict(os.environ))
        for name in names
    ]


def test_engines_side_by_side(tmp_path: Path) -> None:
    result, said = SideBySide("vllm"), list[str]()
    running.run(result, engines(tmp_path), SMALL, tmp_path, said.append)
    assert result.missing == {}
    assert set(result.checks) == {
        f"{n}_{what}" for n in running.NAMES for what in "right slept".split()
    }
    assert result.passed
    found = result.metrics
    assert found["ttft_stock"].samples == [1.0] * 2 * SMALL.rounds  # what warms is left out
    assert found["ttft_engine_attention_hit"].samples == [0.25] * SMALL.rounds
    assert found["decode_128_2_pool_attention_100"].samples == [8.0] * SMALL.decode_rounds
    assert found["decode_128_1_pool_attention_10_same_tokens"].median == 8 / 9
    assert "decode_256_1_engine_attention" not in found
    assert result.ratios["ttft_pool_attention_hit_to_stock"] == 0.25
    assert result.ratios["decode_256_1_pool_attention_10_to_stock"] == 1
    assert not any("same_tokens" in name or "cached_to" in name for name in result.ratios)
    assert "ttft_engine_attention_hit_to_stock: at most 0.3 wanted: kept" in result.notes
    assert "ttft_cached_miss_to_stock: at most 0.1 wanted: NOT kept" in result.notes
    assert any("round 2 of 2: pool_attention_10" in text for text in said)
    result.write(tmp_path / "vllm.json")
    assert read_result(tmp_path / "vllm.json").ratios == result.ratios


def test_each_engine_comes_first_in_turn() -> None:
    assert [running.rotated(("a", "b", "c"), turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


POOL, ENGINE = "pool_attention", "engine_attention"


@pytest.mark.parametrize(
    ("name", "fault", "reason"),
    [
        (POOL, "cannot start", "UnsupportedError: vLLM 9.9"),
        (ENGINE, "another token", r"hit of 128 tokens: other tokens than stock, from token 3 of"),
        (POOL, "never cached", r"cached tokens: \[0\], 128 of each expected"),
        (ENGINE, "too few", "not as many tokens as asked"),
        (POOL, "no time", "its answer: first_s: Input should be greater than 0"),
        (ENGINE, "text", r"its answer: cached\.0: Input should be a valid integer"),
        (POOL, "an error", "PoolMissingError: gone"),
        (ENGINE, "dies", r"it died with exit code 1: std::bad_alloc"),
    ],
)
def test_no_ratio_when_an_engine_fails(tmp_path: Path, name: str, fault: str, reason: str) -> None:
    result = SideBySide("vllm")
    running.run(result, engines(tmp_path, **{name: fault}), SMALL, tmp_path)
    assert list(result.missing) == [name]
    assert re.search(reason, result.missing[name])
    assert [check for check, holds in result.checks.items() if not holds] == [f"{name}_right"]
    assert result.as_dict()["ratios"] == {}


def test_without_stock_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    result = SideBySide("vllm")
    running.run(result, engines(tmp_path, stock="cannot start"), SMALL, tmp_path)
    assert not result.checks["stock_right"]
    assert not any(name.startswith("ttft") for name in result.metrics)


def test_an_engine_that_spins_while_others_are_asked_fails_the_run(tmp_path: Path) -> None:
    result = SideBySide("vllm")
    running.run(result, engines(tmp_path, cached="spins"), SMALL, tmp_path)
    assert [check for check, holds in result.checks.items() if not holds] == ["cached_slept"]
    assert result.as_dict()["ratios"] == {}


def test_where_no_engine_is_installed_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(running.PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(UnsupportedError, match=r"is no Python: make test-vllm"):
        case.command(Options(quick=True), print)


def test_a_python_without_the_engine_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv(running.PYTHON_VARIABLE, str(python))
    monkeypatch.setattr(running, "SHARED", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"cannot make the model: No module named torch"):
        case.command(Options(quick=True), print)
    assert os.listdir(tmp_path) == ["python"]


def test_too_little_shared_memory_is_said_first(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"two pools and a model need .*: enlarge it"):
        running.programs_of("python", tmp_path, replace(SMALL, pool_bytes=1 << 60))


def test_engines_differ_in_what_is_compared_only(tmp_path: Path) -> None:
    settings = {name: running.settings_of(name, tmp_path, SMALL) for name in running.NAMES}
    for name, own in settings.items():
        transfer = own.pop("kv_transfer_config", None)
        assert (transfer is not None) == (name in running.OURS)
        assert own.pop("enable_prefix_caching") == (name == running.CACHED)
    assert all(own == settings["stock"] for own in settings.values())


TRAINED = replace(ByBudget.quick, decode=((100, 2), (70, 3)))
PROMPTS = [
    [[case + 10 * one + at % 7 for at in range(tokens)] for one in range(requests)]
    for case, (tokens, requests) in enumerate(TRAINED.decode)
]


def test_a_trained_model_and_several_requests(tmp_path: Path) -> None:
    """Contenders that cannot be had are named, and a token that is as likely is counted."""
    result = SideBySide("vllm")
    faults = {"offloaded": "cannot start", "pool_attention": "another token later"}
    running.run_cases(
        ByBudget(result, TRAINED), engines(tmp_path, ByBudget.names, **faults), tmp_path, PROMPTS
    )
    assert set(result.missing) == {"offloaded"}
    assert {name for name in result.checks if name.endswith("right")} == {
        "cached_right", "pool_attention_right", "two_stage_right"
    }  # fmt: skip
    assert result.passed
    found = result.metrics
    assert found["prompt_100_2_pool_attention"].samples == [1.0]
    assert "prompt_100_2_two_stage" not in found
    assert found["first_100_2_pool_attention_15"].samples == [0.25] * TRAINED.decode_rounds
    assert found["decode_70_3_lmcache"].samples == [12.0] * TRAINED.decode_rounds
    assert found["decode_70_3_pool_attention_5_two_stage_same_tokens"].median == 8 / 9
    assert found["decode_70_3_pool_attention_same_tokens"].median == 1
    assert result.ratios["first_70_3_pool_attention_100_to_stock"] == 1
    assert result.ratios["decode_100_2_pool_attention_5_exact_to_stock"] == 1
    (note,) = result.notes
    assert note.startswith("1 times a token was another than stock's")
    assert note.endswith("at most 0.200 apart")


def test_a_token_that_is_much_less_likely_is_no_tie(tmp_path: Path) -> None:
    result = SideBySide("vllm")
    programs = engines(
        tmp_path, ByBudget.names, cached="sure", pool_attention="another token later"
    )
    running.run_cases(ByBudget(result, TRAINED), programs, tmp_path, PROMPTS)
    assert "other tokens than stock, from token 3 of request 0" in result.missing["pool_attention"]
    assert [check for check, holds in result.checks.items() if not holds] == [
        "pool_attention_right"
    ]
    assert result.as_dict()["ratios"] == {}


def test_a_trained_model_by_what_is_kept(tmp_path: Path) -> None:
    """What is kept otherwise may say other tokens; a pool of what stock has may not."""
    result, size = SideBySide("vllm-encodings"), replace(ByEncoding.quick, decode=((100, 2),))
    programs = engines(tmp_path, ByEncoding.names, pool_attention_int4="another token")
    running.run_cases(ByEncoding(result, size), programs, tmp_path, PROMPTS[:1])
    assert result.missing == {}
    assert result.passed
    found = result.metrics
    assert found["decode_100_2_pool_attention_fp8"].samples == [8.0] * size.decode_rounds
    assert found["decode_100_2_pool_attention_fp8_tokens_of_cached_fp8"].median == 1
    assert min(found["decode_100_2_pool_attention_int4_same_tokens"].samples) < 1
    assert result.ratios["decode_100_2_pool_attention_int8_to_stock"] == 1
    wrong = SideBySide("vllm-encodings")
    programs = engines(tmp_path, ByEncoding.names, cached="sure", pool_attention="another token")
    running.run_cases(ByEncoding(wrong, size), programs, tmp_path, PROMPTS[:1])
    assert list(wrong.missing) == ["pool_attention"]
    wrong = SideBySide("vllm-encodings")
    programs = engines(
        tmp_path, ByEncoding.names, cached_fp8="sure", pool_attention_fp8="another token"
    )
    running.run_cases(ByEncoding(wrong, size), programs, tmp_path, PROMPTS[:1])
    assert list(wrong.missing) == ["pool_attention_fp8"], "stock in fp8 is who judges"


def test_engines_differ_in_what_is_kept_only(tmp_path: Path) -> None:
    size, found = ByEncoding.quick, {}
    for name in ByEncoding.names:
        own = ByEncoding.settings_of(name, tmp_path, tmp_path, size)
        transfer = own.pop("kv_transfer_config", None)
        assert (transfer is None) == own.pop("enable_prefix_caching")
        assert isinstance(transfer, dict | None)
        extra = {} if transfer is None else transfer["kv_connector_extra_config"]
        found[name] = (own.pop("kv_cache_dtype"), extra.get("encoding"))
        assert own.items() <= ByEncoding.settings_of("cached", tmp_path, tmp_path, size).items()
    assert found == {
        **{"cached": ("auto", None), "cached_fp8": ("fp8", None)},
        **{"pool_attention": ("auto", None), "pool_attention_fp8": ("fp8", None)},
        **{"pool_attention_int8": ("auto", "int8"), "pool_attention_int4": ("auto", "int4")},
    }


def test_prefill_in_one_and_decode_in_another(tmp_path: Path) -> None:
    result, size = SideBySide("prefill-decode"), replace(prefill_decode.QUICK, decode=((100, 1),))
    prompts = [[at % (7 + turn) for at in range(100)] for turn in range(size.decode_rounds + 1)]
    programs = engines(tmp_path, prefill_decode.NAMES, prefill="never cached")
    one = prefill_decode.Run(result, size)
    prefill_decode.run(one, programs, tmp_path, [prompts])
    assert result.missing == {}
    assert result.passed
    assert result.metrics["first_100_alone"].samples == [1.0] * size.decode_rounds
    assert result.metrics["both_100_pulled"].samples == [1.25] * size.decode_rounds
    assert result.ratios["both_100_shared_to_alone"] == 1.25
    assert result.ratios["each_100_shared_to_alone"] == 1


def test_a_pool_is_served_over_a_socket(tmp_path: Path, shm_path: Path) -> None:
    """On one machine, too, and nothing is left."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of the tests")
    secret.chmod(0o600)
    with ExitStack() as stack:
        made = CXLPool.create(shm_path, layout=texts.SMALL, capacity="4MiB")
        texts.publish(stack.enter_context(made), range(16))
        address = prefill_decode.served(shm_path, secret, stack)
        assert list(shm_path.parent.glob(f"{shm_path.stem}*")) == [shm_path]
        remote = stack.enter_context(Remote(address, secret.read_bytes()))
        with remote.match(prefix_keys(range(16), texts.SMALL.page_tokens)) as hit:
            assert hit.tokens == 16
        assert remote.link == "socket"


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgumentError, match="smollm2 is what goes with vllm, not other"):
        trained.command_of_budgets(Options(model=Path("other")), print, "python")


def test_a_trained_models_engines_differ_in_what_is_compared_only(tmp_path: Path) -> None:
    settings = {n: ByBudget.settings_of(n, tmp_path, tmp_path, TRAINED) for n in ByBudget.names}
    transfers = {name: own.pop("kv_transfer_config", None) for name, own in settings.items()}
    for own in settings.values():
        del own["enable_prefix_caching"]
        assert own == settings["cached"]
    assert [name for name in ByBudget.names if transfers[name] is None] == ["cached"]
    assert str(transfers["pool_attention"]).replace("'exact'", "'two_stage'") == str(
        transfers["two_stage"]
    )


@pytest.mark.skipif(model.model_file() is None, reason=f"no model: {model.INSTALL}")
def test_no_two_prompts_begin_alike() -> None:
    size = ByBudget.full
    cases = trained.prompts_of(model.prepare(Console()), size)
    assert [(len(prompts[0]), len(prompts)) for prompts in cases] == list(size.decode)
    begun = [tuple(one[: size.block_tokens]) for prompts in cases for one in prompts]
    assert len(set(begun)) == len(begun)
