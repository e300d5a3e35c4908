"""What the guests in QEMU play back is what this vLLM asks and decides: tests/qemu/guest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.qemu.guest.recording import Event, Matched, read

from ..support.processes import ROOT
from .record import CONVERSATIONS


def first_turn(events: Sequence[Event]) -> list[Matched]:
    """What was asked before any answer was part of a text."""
    asked = [event for event in events if isinstance(event, Matched)]
    return [event for event in asked if event.request.endswith(".0")]


def test_the_recording_is_of_this_engine(vllm_is_there: None, tmp_path: Path) -> None:
    """Answers of the random model, and with them the later turns, may differ from CPU to CPU. If
    this fails: the command in record.py records anew."""
    path = tmp_path / "again.json"
    subprocess.run([sys.executable, "-m", "tests.vllm.record", str(path)], check=True, cwd=ROOT)
    again, there = read(path), read()
    assert replace(again, texts={}, served=[], found=[]) == replace(
        there, texts={}, served=[], found=[]
    )
    for name in ("served", "found"):
        asked = first_turn(getattr(again, name))
        assert asked == first_turn(getattr(there, name))
        assert len(asked) == CONVERSATIONS
    for event in asked:
        whole = event.local + event.found
        count = whole // there.block_tokens
        assert again.texts[event.request][:count] == there.texts[event.request][:count]
