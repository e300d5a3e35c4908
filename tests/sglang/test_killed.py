"""An engine that is killed while SGLang's backup thread stores: what it had stored is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cxlkv import ObjectPool
from cxlkv.arrays import Bytes

from ..conftest import audit
from ..support.stores import payload
from .hicache import Engine, page_bytes

PROGRAM = Path(__file__).with_name("storing.py")
PAGES = 12


def text_of(number: int, engine: Engine) -> list[int]:
    tokens = PAGES * engine.page_tokens
    return list(range(number * tokens, (number + 1) * tokens))


def pages_of(number: int, engine: Engine) -> list[Bytes]:
    size = page_bytes(engine.host)
    return [payload(f"{number}", size, page) for page in range(PAGES)]


@pytest.mark.parametrize(
    ("kind", "layout", "texts"), [("mha", "page_first", 4), ("mla", "layer_first", 1)]
)
def test_a_killed_engine_loses_nothing(folder: str, kind: str, layout: str, texts: int) -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), folder, kind, layout],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as killed:
        assert killed.stdin is not None
        assert killed.stdout is not None
        said = [killed.stdout.readline().strip()]
        for _ in range(texts):
            print(file=killed.stdin, flush=True)
            said.append(killed.stdout.readline().strip())
        print(file=killed.stdin, flush=True)  # it has begun with another one, perhaps
        killed.kill()
    assert said == ["ready", *map(str, range(texts))]
    engine = Engine(folder, kind, layout)
    for number in range(texts + 1):
        text, pages = text_of(number, engine), pages_of(number, engine)
        tokens, found = engine.fetch(text)
        assert tokens == len(text) or number == texts
        for one, right in zip(found["kv"], pages, strict=False):
            assert np.array_equal(one, right)
        assert engine.save(text, {"kv": pages}) == len(text)
        assert engine.fetch(text)[0] == len(text)
    assert not any(engine.backend.counting.failures.values())
    with ObjectPool.open(str(engine.backend.store.cache().pool.path)) as pool:
        audit(pool)
    engine.close()
