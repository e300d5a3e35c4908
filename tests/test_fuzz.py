"""What the fuzzers of tests/fuzz_readers.py once found, read again, and some new inputs.

The C readers' inputs are replayed by the C tests: tests/native/*/fuzz_*.c.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fuzz_readers
from tests.fuzz_readers import READERS, SAVED

INPUTS = 40


@pytest.mark.parametrize("name", READERS)
def test_inputs_that_were_found_and_new_ones(name: str, tmp_path: Path, seed: int) -> None:
    reader = READERS[name](tmp_path)
    for path in sorted((SAVED / name).glob("*")):
        reader.read(path.read_bytes())
    assert fuzz_readers.fuzz(name, INPUTS, seed, tmp_path / "found") == 0


def test_what_a_reader_lets_out_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: fuzz_readers.ColdReader, data: bytes) -> None:
        raise KeyError("of ours")

    monkeypatch.setattr(fuzz_readers.ColdReader, "read", fails)
    assert fuzz_readers.fuzz("cold", 2, 1, tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"crash-1-0", "crash-1-1"}
    assert "KeyError: 'of ours'" in capsys.readouterr().out
