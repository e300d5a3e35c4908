"""The command `cxlkv` as it is installed, run in this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from cxlkv.ops import cli


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *words: object) -> Ended:
    """How it ended, and what it printed."""
    capsys.readouterr()  # what was printed before is not its own
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, words)])
    code = ended.value.code
    return Ended(code if isinstance(code, int) else 0, *capsys.readouterr())
