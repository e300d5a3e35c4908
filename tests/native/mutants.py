"""`make mutants`: each flush and fence left out in turn; on incoherent memory a seed must tell.

    python tests/native/mutants.py PROGRAM [SITE ...] [--seeds 4000]

PROGRAM is one of SOURCES, at any path. A site that no seed misses stands in REDUNDANT with the
reason, or the run fails; so does one that stands there and is missed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("x86", "arm64")
# Which file's sites a program is to tell.
SOURCES = {"test_visibility_incoherent": "visibility.c", "test_rpc_incoherent": "rpc.c"}
# Sites whose loss changes nothing that a test on these models could see, and why.
REDUNDANT = {
    "FLUSH_UNPIN_BEGIN_FENCE": "V6: needed where a load may be late, after a younger store is in "
    "memory; no load is late here, docs/models/publish.pml has it",
}


def sites(program: str) -> dict[str, int]:
    """Every site of flush.h that what the program tests uses, with its number."""
    text = (ROOT / "native/src/flush.h").read_text()
    names = re.findall(r"^    (FLUSH_[A-Z_]+),", text, re.M)
    used = (ROOT / "native/src" / SOURCES[Path(program).name]).read_text()
    return {
        name: number
        for number, name in enumerate(names)
        if name != "FLUSH_LOCAL" and (number == 0 or re.search(rf"\b{name}\b", used))
    }


def missed_at(program: str, number: int, arm64: int, seeds: int) -> str:
    """The first seed that fails without this site, "" when none does."""
    environment = {
        **os.environ,
        "CXLKV_SEEDS": str(seeds),
        "CXLKV_ARM64": str(arm64),
        "CXLKV_LEFT_OUT": str(number),
    }
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    seed = re.search(r"^seed (\d+)", done.stderr, re.M)
    if seed is None:
        raise SystemExit(f"{program} failed otherwise:\n{done.stderr[-2000:]}")
    return seed[1]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("program")
    arguments.add_argument("sites", nargs="*")
    arguments.add_argument("--seeds", type=int, default=4000)
    given = arguments.parse_args()
    wrong = 0
    for site, number in sites(given.program).items():
        if given.sites and site not in given.sites:
            continue
        began = time.monotonic()
        seeds = [missed_at(given.program, number, arm64, given.seeds) for arm64 in (0, 1)]
        found = [f"{m}, seed {s}" for m, s in zip(MODELS, seeds, strict=True) if s]
        expected = number != 0 and site not in REDUNDANT
        fine = bool(found) == expected
        wrong += not fine
        verdict = "; ".join(found) or REDUNDANT.get(site, "no seed fails")
        print(f"{'' if fine else 'WRONG '}{site}: {verdict} ({time.monotonic() - began:.1f} s)")
        sys.stdout.flush()
    print(f"{wrong} of these are not as they should be" if wrong else "all as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
