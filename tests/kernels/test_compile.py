"""Every kernel compiles for the GPUs of three generations, with no GPU at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TARGETS = (80, 90, 100)
# What one block of threads may have: a kernel with more compiles, and fails when it is launched.
SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# ptxas at times parks a value or two that no loop touches; more, and a kernel is too large.
SPILLED_BYTES_MAX = 32
# Each thread's loads of 16 bytes in flight at once, which is what keeps a link full.
WIDE = {
    ("copies_triton", f"fragments {words} x 16 B"): loads for words, loads in ((2048, 8), (512, 4))
}
PROCESSES = 2
SCRIPT = Path(__file__).with_name("compile_kernels.py")


@dataclass(frozen=True)
class Compiled:
    """What compile_kernels.py says of a variant on one target."""

    module: str
    variant: str
    target: int
    registers: int = 0
    shared: int = 0
    spilled: int = 0  # bytes stored and loaded again
    wide_loads: int = 0  # of 16 bytes
    wide_stores: int = 0
    wide_copies: int = 0  # of 16 bytes to shared memory, under way while the kernel works
    error: str = ""

    def faults(self) -> Iterator[str]:
        if self.error:
            yield self.error
        if self.spilled > SPILLED_BYTES_MAX:
            yield f"{self.spilled} bytes are spilled: a smaller tile, or more warps"
        if self.shared > SHARED_BYTES_MAX[self.target]:
            yield (
                f"{self.shared} bytes of shared memory, where a block has at most "
                f"{SHARED_BYTES_MAX[self.target]}: the launch would fail"
            )
        if self.module == "attend_codes_triton" and not self.wide_copies:
            yield "no copies of 16 bytes: words of codes are loaded one by one"
        wide = WIDE.get((self.module, self.variant))
        if wide is not None and (self.wide_loads, self.wide_stores) != (wide, wide):
            yield (
                f"{self.wide_loads} loads and {self.wide_stores} stores of 16 bytes, "
                f"wanted {wide} of each"
            )


def compile_all(cache: Path) -> list[Compiled]:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(index), str(PROCESSES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(PROCESSES)
    ]
    try:
        printed = [process.communicate() for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    for process, (_, errors) in zip(running, printed, strict=True):
        assert process.returncode == 0, errors
    return [Compiled(**json.loads(line)) for output, _ in printed for line in output.splitlines()]


def table(rows: list[Compiled]) -> list[str]:
    """A line for each variant: what it takes on each target, in the order of TARGETS."""
    variants: dict[tuple[str, str], list[Compiled]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.target):
        variants[row.module, row.variant].append(row)
    lines = [
        f"{len(variants)} kernels compiled for "
        + ", ".join(f"sm_{target}" for target in TARGETS)
        + ": registers a thread, bytes of shared memory, loads of 16 bytes, bytes spilled"
    ]
    for (module, variant), on in sorted(variants.items()):
        columns = [
            ("/".join(str(row.registers) for row in on), 11),
            ("/".join(str(row.shared) for row in on), 20),
            ("/".join(str(row.wide_loads) for row in on), 8),
            ("/".join(str(row.spilled) for row in on), 6),
        ]
        name = f"{module}: {variant}"
        lines.append(f"  {name:<47}" + "".join(f" {text:>{width}}" for text, width in columns))
    return lines


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_and_fits(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A kernel that spills is slow, one that loads its 16 bytes one by one is, too, and one that
    takes too much shared memory cannot be launched: the interpreter shows none of it."""
    rows = compile_all(tmp_path)
    record_property("show", "\n".join(table(rows)))
    names = {(row.module, row.variant) for row in rows}
    assert len(rows) == len(names) * len(TARGETS), "two variants of a module have one name"
    assert names >= WIDE.keys()
    faults = [
        f"{row.module}: {row.variant}, sm_{row.target}: {fault}"
        for row in rows
        for fault in row.faults()
    ]
    assert not faults, "\n".join(faults)
