"""Tails on traces: what is made out of names and lengths alone is what tokens say."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from random import Random

import pytest

from cxlkv.bench.replay.tails import NAME_TOKENS, end_of, parents, replay
from cxlkv.bench.replay.traces import Request, read
from cxlkv.errors import BadArgumentError

from ..support.command import run


def test_a_next_turn_gains_what_is_behind_the_last_block() -> None:
    """1,099 tokens of the first turn have K and V; the third request goes on elsewhere."""
    first = Request(0, [1, 2], 1000, 100)
    requests = [first, Request(1, [1, 3, 4], 1300, 10), Request(2, [5], 600, 10)]
    assert parents(requests) == [-1, 0, -1]
    for block, whole in ((16, 1088), (128, 1024)):
        assert replay(requests, [-1, 0, -1], block, None, tails=False).hit == whole
        found = replay(requests, [-1, 0, -1], block, None, tails=True)
        assert (found.hit, found.computed, found.by_tails) == (1099, 1300 - 1099, 1)
    small = replay(requests, [-1, 0, -1], 16, 50, tails=True)
    assert (small.hit, small.by_tails) == (50 * 16, 0), "a text's end goes first"


def test_a_block_that_all_have_makes_no_turns() -> None:
    """Such as a system prompt of just one name; nor does a prompt shorter than the text before."""
    requests = [Request(i, [0, 10 + i], 900, 50) for i in range(5)]
    assert parents(requests) == [-1] * 5
    grown = [Request(0, [0, 1], 1024, 500), Request(1, [0, 1, 2], 1100, 1)]
    assert parents(grown) == [-1, -1]


def chats(seed: int) -> tuple[list[Request], list[list[int]]]:
    """Synthetic: sessions of several turns in turn, some with one system prompt; and their tokens,
    prompt and answer."""
    random, names, made = Random(seed), dict[bytes, int](), list[tuple[Request, list[int]]]()
    system = [random.randrange(1000) for _ in range(NAME_TOKENS)]
    sessions = [system[: random.choice([0, NAME_TOKENS])] for _ in range(12)]
    for time_s in range(80):
        which = random.randrange(len(sessions))
        prompt = [
            *sessions[which],
            *(random.randrange(1000) for _ in range(random.randint(1, 900))),
        ]
        if len(sessions[which]) <= NAME_TOKENS:  # a first turn has a name of its own
            prompt += [random.randrange(1000) for _ in range(2 * NAME_TOKENS)]
        answer = [random.randrange(1000) for _ in range(random.randint(1, 700))]
        pages = []
        for end in range(NAME_TOKENS, len(prompt) + NAME_TOKENS, NAME_TOKENS):
            key = blake2b(repr(prompt[:end]).encode()).digest()
            pages.append(names.setdefault(key, len(names)))
        made.append((Request(time_s, pages, len(prompt), len(answer)), prompt + answer))
        sessions[which] = prompt + answer
    return [request for request, _ in made], [text for _, text in made]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [16, 128])
def test_names_and_lengths_say_what_tokens_do(seed: int, block: int) -> None:
    requests, texts = chats(seed)
    before = parents(requests)
    blocks: set[tuple[int, ...]] = set()
    ends: set[tuple[int, ...]] = set()
    plain = gained = 0
    for request, text in zip(requests, texts, strict=True):
        prompt = text[: request.tokens]
        hit = 0
        while hit + block < len(prompt) and tuple(prompt[: hit + block]) in blocks:
            hit += block
        plain += hit
        behind = range(hit, min(hit + block, len(prompt)))
        gained += max((end - hit for end in behind if tuple(prompt[:end]) in ends), default=0)
        end = end_of(request)
        blocks |= {tuple(text[:at]) for at in range(block, end + 1, block)}
        ends.add(tuple(text[:end]))
    assert replay(requests, before, block, None, tails=False).hit == plain
    assert replay(requests, before, block, None, tails=True).hit == plain + gained > plain


def test_the_command_reads_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, results = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 100, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 1300, "output_length": 10, "hash_ids": [1, 3, 4]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert run(capsys, "bench", "tails", "--trace", file, "--json", results).code == 0
    ratios = json.loads(results.read_text())["ratios"]
    assert ratios["gain_128_unlimited"] == pytest.approx(75 / 1024)
    assert ratios["less_128_unlimited"] == pytest.approx(75 / 276)
    file.write_text(file.read_text().replace("1300", '"many"'))
    with pytest.raises(BadArgumentError, match="line 2: input_length, output_length"):
        read(file)
