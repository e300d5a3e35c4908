"""What the Python of a peer's own environment runs: `PYTHON bench/peers NAME`.

There is no cxlkv in that environment, so this folder is found as the package `peers`. It comes last
on the path, and this folder itself not at all: its files are named like what they import.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if Path(path).resolve() != here), str(here.parent)]
    serving = import_module(f"{here.name}.serving")
    sys.exit(serving.serve(import_module(f"{here.name}.{sys.argv[1]}").PEER))
