"""python storing.py FOLDER KIND LAYOUT: an engine that stores a text for each line it reads.

It says the text's number when SGLang's backup thread has stored it.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from types import ModuleType

tests = sys.modules["tests"] = ModuleType("tests")  # a package of others may have this name, too
tests.__path__ = [str(Path(__file__).resolve().parent.parent)]

from tests.sglang.hicache import Engine  # noqa: E402
from tests.sglang.test_killed import PAGES, pages_of, text_of  # noqa: E402

engine = Engine(*sys.argv[1:])
print("ready", flush=True)
for number in count():
    sys.stdin.readline()
    saved = engine.save(text_of(number, engine), {"kv": pages_of(number, engine)})
    assert saved == PAGES * engine.page_tokens
    print(number, flush=True)
