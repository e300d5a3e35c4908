"""Checkpoints of a trace, counted by hand; and where the pool itself finds that texts parted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, States
from cxlkv.adapters.common.checkpoints import positions
from cxlkv.bench.replay.checkpoints import replay
from cxlkv.bench.replay.traces import Request

from ..support.command import run

# The second goes on behind the first one's answer; the third and the fourth part from it.
CHAT = [
    Request(0, [1, 2], 1000, 100),
    Request(1, [1, 2, 3], 1300, 10),
    Request(2, [1, 4], 1024, 10),
    Request(3, [1, 5], 1024, 10),
]
BEFORE = [-1, 0, -1, -1]


def test_by_hand() -> None:
    blocks, prompts, ours = (replay(CHAT, BEFORE, way) for way in ("blocks", "prompts", "ours"))
    assert blocks.hit == 1088 + 512 + 512
    assert blocks.stored == 68 + (1309 - 1088) // 16 + 2 * ((1033 - 512) // 16)
    assert (prompts.hit, prompts.stored) == (999, 4)
    # The third one takes a checkpoint where it parts, and the fourth one hits it.
    assert (ours.hit, ours.stored) == (1099 + 0 + 512, 4 + 1)


def test_positions() -> None:
    assert positions(100, 0, 0) == [99]
    assert positions(100, 16, 64) == [64, 99]
    assert positions(100, 64, 64) == [99]
    assert positions(100, 99, 99) == []
    assert positions(100, 0, 99) == [99]
    assert positions(100, 30, 64, every=32) == [32, 64, 96, 99]


def test_the_pool_says_where_a_text_parts_from_others() -> None:
    states = States.of([("ssm", (100,), "float32")])
    layout = KVLayout(
        layers=1, kv_heads=1, head_dim=16, page_tokens=8, dtype="float32", states=states
    )
    checkpoint = np.zeros(states.bytes, np.uint8)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        text = list(range(100))
        sequence = pool.sequence()
        rows = np.zeros((100, 1, 16), np.float32)
        sequence.append(0, rows, rows)
        pool.publish_prefix(sequence, text, states=checkpoint)
        with pool.match_prefix([*text[:50], 7, 7, 7]) as hit:
            assert (hit.tokens, hit.known_tokens) == (0, 48)
        pool.publish_prefix(sequence, text[:48], states=checkpoint)
        with pool.match_prefix([*text[:50], 8, 8, 8]) as hit:
            assert (hit.tokens, hit.known_tokens) == (48, 48)
        with pool.match_prefix([*text, 1]) as hit:
            assert (hit.tokens, hit.known_tokens) == (100, 100)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, results = tmp_path / "a.jsonl", tmp_path / "a.json"
    names = ("input_length", "output_length", "hash_ids")
    lines = [
        {
            "timestamp": one.time_s,
            **dict(zip(names, (one.tokens, one.answer, one.pages), strict=True)),
        }
        for one in CHAT
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert run(capsys, "bench", "checkpoints", "--trace", file, "--json", results).code == 0
    ratios = json.loads(results.read_text())["ratios"]
    assert ratios["hit_over_blocks"] == pytest.approx((1099 + 512) / (1088 + 1024))
