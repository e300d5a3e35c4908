"""The litmus run between two guests on one dax device, and its certificates: python -m ... a|b.

All guests run on one coherent machine, so it can find nothing: this proves that it runs on the
driver, that two hosts meet, and that their certificates are read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cxlkv import CXLPool
from cxlkv.bench.cases import litmus
from cxlkv.errors import BadArgumentError
from cxlkv.machine.certificate import (
    ROUNDS_NEEDED,
    certified_mode,
    default_path,
    read,
    region_identity,
)
from tests.qemu.guest.steps import (
    DEVICE,
    LAYOUT,
    SHARED,
    bind_device,
    command,
    refusal,
)

ROUNDS = max(ROUNDS_NEEDED.values())


def play(role: str) -> None:
    before = certified_mode(DEVICE)
    assert before.mode == "strict", before
    command(
        f"python3 -m cxlkv.ops.cli bench litmus --region {DEVICE} --role {role} "
        f"--rounds {ROUNDS} --json {SHARED}/litmus-{role}.json"
    )
    certificate = read(default_path(region_identity(DEVICE)))
    assert (certificate["hosts"], certificate["violations"]) == (2, 0), certificate
    for region in certificate["regions"]:
        assert region["identity"]["kind"] == "dax", region
    after = certified_mode(DEVICE)
    print(f"{after.mode}: {after.reason}", flush=True)
    assert after.mode == "fast", after
    assert certified_mode(DEVICE, hosts=3).mode == "strict"
    assert certified_mode("/dev/shm").mode == "strict"


def main(role: str) -> None:
    bind_device()
    play(role)
    if role == "b":
        return
    CXLPool.create(DEVICE, layout=LAYOUT, capacity="all", force=True, replace=True).close()
    text = refusal(BadArgumentError, lambda: litmus.run([Path(DEVICE)], role, ROUNDS, meet_s=1))
    assert "holds a pool" in text
    CXLPool.remove(DEVICE)


if __name__ == "__main__":
    main(sys.argv[1])
