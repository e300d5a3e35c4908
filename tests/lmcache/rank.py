"""One rank of two with LMCache's engine over a pool, in a process of its own.

python rank.py FOLDER RANK: it stores its text unless it is there, and reads it; says what it found
before, what it read, whether that is right, and how many pools there are.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402

engines = import_module("engines")
where, rank = Path(sys.argv[1]), int(sys.argv[2])
made = engines.make_engine(engines.config_of(where), engines.metadata_of(rank, 2))
was = made.fill(100 + rank)
tokens = engines.text(1, 6 * engines.CHUNK)
found = made.lookup(tokens)
if not found:
    made.store(tokens)
made.clear()
read = made.retrieve(tokens)
slots = made.slots(tokens)
right = all(torch.equal(a[:, slots], b[:, slots]) for a, b in zip(was, made.kept, strict=True))
print(found, read, right, len(list(where.glob("*.pool"))))
made.close()
