"""Traces: what a file may hold, and what each broken line is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cxlkv.bench.replay import caches, traces
from cxlkv.errors import BadArgumentError

GOOD = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0, 1]}\n'


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(GOOD + "\n" + '{"timestamp": 3000, "hash_ids": [0, 1, 7]}\n')
    first, second = traces.read(file)
    assert (first.time_s, list(first.pages)) == (0.0, [0, 1])
    assert (second.time_s, list(second.pages)) == (3.0, [0, 1, 7])
    assert traces.distinct([first, second]) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ("[1, 2]", "not a JSON object"),
        ('{"hash_ids": [1]}', "no 'timestamp'"),
        ('{"timestamp": 1}', "no 'hash_ids'"),
        ('{"timestamp": "1", "hash_ids": [1]}', "timestamp '1': milliseconds"),
        ('{"timestamp": -1, "hash_ids": [1]}', "timestamp -1: milliseconds"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "timestamp nan: milliseconds"),
        ('{"timestamp": 1, "hash_ids": 3}', "not a list of page names"),
        ('{"timestamp": 1, "hash_ids": [1.5]}', "page name 1.5"),
        ('{"timestamp": 1, "hash_ids": [-1]}', "page name -1"),
        ('{"timestamp": 1, "hash_ids": [5, 5]}', "twice in one prompt"),
        ('{"timestamp": 1, "hash_ids": [3, 1]}', "page 1 follows 3, and elsewhere 0"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(GOOD + line + "\n")
    with pytest.raises(BadArgumentError) as raised:
        traces.read(file)
    assert said in str(raised.value)
    assert f"{file}, line 2:" in str(raised.value)


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(GOOD.replace('": 0,', '": 9,') + GOOD)
    with pytest.raises(BadArgumentError, match="line 2: its timestamp is before"):
        traces.read(file)


def test_no_file_and_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(BadArgumentError, match="cannot be read as a trace"):
        traces.read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadArgumentError, match="cannot be read as a trace"):
        traces.read(tmp_path / "binary")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(BadArgumentError, match="no request in it"):
        traces.read(tmp_path / "empty")


@pytest.mark.parametrize("family", traces.FAMILIES)
def test_families_are_traces(family: str, tmp_path: Path) -> None:
    """The same of a seed, with chained names: what is written is read again."""
    requests = traces.FAMILIES[family](5, 600)
    assert requests == traces.FAMILIES[family](5, 600)
    file = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": 1000 * r.time_s, "hash_ids": list(r.pages)}) for r in requests
    ]
    file.write_text("\n".join(lines))
    assert [list(r.pages) for r in traces.read(file)] == [list(r.pages) for r in requests]


def test_production_trace_as_others_measured_it() -> None:
    """Hits of simple caches as they are known for this file, to the third digit."""
    path = Path(os.environ.get("CXLKV_TRACE", "mooncake_conversation_trace.jsonl"))
    if not path.is_file():
        pytest.skip("CXLKV_TRACE names no file: Mooncake's conversation trace is not here")
    requests = traces.read(path)
    asked = [page for request in requests for page in request.pages]
    assert (len(requests), len(asked), traces.distinct(requests)) == (12_031, 288_500, 182_790)
    best = sum(caches.belady(asked, 1827))
    assert round(best / len(asked), 3) == 0.246
    assert round(sum(caches.lru(asked, 1827)) / best, 2) == 0.21
    assert round(sum(caches.s3fifo(asked, 1827)) / best, 2) == 0.30
