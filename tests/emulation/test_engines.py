"""The guests' engine: what one host serves of vLLM's recorded requests the other finds, and what is
not right is seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from cxlkv.adapters.vllm.loading import BlockMemory, Load
from cxlkv.adapters.vllm.settings import read_settings
from tests.qemu.guest.engine import Engine
from tests.qemu.guest.recording import Matched, read, write

from ..support.damaging import damage_piece

RECORDING = read()
FOUND = sum(event.found for event in RECORDING.found if isinstance(event, Matched))


class MakeEngine(Protocol):
    def __call__(self, host: int) -> Engine: ...


@pytest.fixture
def make_engine(shm_path: Path) -> Iterator[MakeEngine]:
    with ExitStack() as ending:

        def make(host: int) -> Engine:
            given = {"where": str(shm_path), "capacity": "24MiB", "sharing": "software"}
            settings = read_settings({**given, "hosts": 2, "host": host, "lease_s": 1})
            engine = Engine(RECORDING, settings)
            ending.callback(engine.close)
            return engine

        yield make


def check_idle(engine: Engine) -> None:
    report, stats = engine.pool.admin.check(deep=True), engine.pool.stats()
    assert report["clean"], report["problems"]
    assert stats["pages_held"] == stats["pages_borrowed"] == stats["pages_withdrawn"] == 0, stats


def test_a_host_finds_what_the_other_serves(make_engine: MakeEngine) -> None:
    one, other = make_engine(0), make_engine(1)
    one.serve("a")
    assert one.missing("a") == 0 < FOUND
    with pytest.raises(AssertionError, match="tokens, not"):
        other.find("b")
    check_idle(other)
    other.serve("b")
    for engine in (one, other):
        assert engine.find("a") == engine.find("b", saves=True) == FOUND
        assert not engine.failures
        check_idle(engine)
    one.forget("b")
    assert other.missing("b") > 0 == other.missing("a")


def test_a_wrong_byte_is_seen(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no CRC tells of: behind the copy."""
    engine = make_engine(0)
    engine.serve("a")
    bring = Load._bring

    def bring_wrongly(self: Load, layer: int, own: BlockMemory) -> None:
        bring(self, layer, own)
        last = self.parts[-1].blocks[0][-1]
        assert isinstance(own.keys, np.ndarray)
        own.keys[last, 0, 0, 0] += layer == 1

    monkeypatch.setattr(Load, "_bring", bring_wrongly)
    with pytest.raises(AssertionError, match=r"block \d+ is wrong"):
        engine.find("a")


def test_what_is_damaged_is_computed_again_and_saved(make_engine: MakeEngine) -> None:
    engine = make_engine(0)
    engine.serve("a")
    for page in range(0, engine.pool.stats()["pages_total"], 9):
        damage_piece(engine.pool, page, 1)
    assert engine.find("a", saves=True) == FOUND  # each is saved anew before later turns ask for it
    assert engine.failures["corrupt"] > 0


def test_no_engine_is_imported() -> None:
    """They load for minutes in a guest."""
    text = (
        "import sys; import tests.qemu.guest.engine; "
        "sys.exit(', '.join(sys.modules.keys() & {'torch', 'vllm', 'transformers'}) or 0)"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(RECORDING, tmp_path / "again.json")
    assert read(tmp_path / "again.json") == RECORDING
