"""Every kernel compiles for the GPUs of three generations, with no GPU at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

TARGETS = (80, 90, 100)
PROCESSES = 2
SCRIPT = Path(__file__).with_name("compile_kernels.py")


def compile_all(cache: Path) -> list[dict[str, object]]:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DUMP_PTXAS_LOG": "1"}
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
    for process, (_, errors) in zip(running, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(line) for output, _ in printed for line in output.splitlines()]


def table(rows: list[dict[str, object]]) -> list[str]:
    """A line for each variant: what it takes on each target, in the order of TARGETS."""
    variants: dict[tuple[str, str], dict[int, dict[str, object]]] = defaultdict(dict)
    for row in rows:
        variants[str(row["module"]), str(row["variant"])][int(str(row["target"]))] = row
    lines = [
        f"{len(variants)} kernels compiled for "
        + ", ".join(f"sm_{target}" for target in TARGETS)
        + ": registers a thread, bytes of shared memory, loads of 16 bytes, bytes spilled"
    ]
    for (module, variant), on in sorted(variants.items()):
        figures = [
            "/".join(str(on.get(target, {}).get(key, "?")) for target in TARGETS)
            for key in ("registers", "shared", "wide_loads", "spilled")
        ]
        name = f"{module}: {variant}"
        columns = zip(figures, (11, 20, 8, 6), strict=True)
        lines.append(f"  {name:<47}" + "".join(f" {text:>{width}}" for text, width in columns))
    return lines


def test_every_kernel_compiles_and_spills_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A kernel that spills is slow, and one that loads its 16 bytes one by one is, too: neither
    shows in the interpreter."""
    rows = compile_all(tmp_path)
    record_property("show", "\n".join(table(rows)))
    names = {(row["module"], row["variant"]) for row in rows}
    assert len(rows) == len(names) * len(TARGETS), "two variants of a module have one name"
    assert [row for row in rows if "error" in row] == []
    assert [row for row in rows if row["spilled"]] == []
    copies = [row for row in rows if "16 B" in str(row["variant"])]
    assert len(copies) == 4 * len(TARGETS), "fragments and pages, large and small tiles"
    for row in copies:
        words = int(str(row["variant"]).split()[1])
        loads = {2048: 8, 512: 4}[words]  # of each thread, all before its first store
        assert (row["wide_loads"], row["wide_stores"]) == (loads, loads), row
