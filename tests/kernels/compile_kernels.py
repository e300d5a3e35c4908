"""Compiles every n-th variant of all kernels, for GPUs that need not be there; run by
test_compile.py, as `compile_kernels.py INDEX COUNT`, and prints a JSON line for each.

A process of its own, because TRITON_INTERPRET must not be set when the kernels are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cxlkv import kernels
from cxlkv.kernels.variants import Variant

TARGETS = (80, 90, 100)


def listed() -> Iterator[tuple[ModuleType, Variant]]:
    for found in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda found: found.name):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        for variant in module.variants() if hasattr(module, "variants") else []:
            yield module, variant


def number(pattern: str, log: str) -> int:
    """What ptxas says of a kernel: 0 for what it leaves out."""
    return sum(int(count) for count in re.findall(pattern, log))


def compiled(module: ModuleType, variant: Variant, target: int) -> dict[str, object]:
    kernel = getattr(module, variant.kernel)
    names = kernel.arg_names
    given = variant.signature.keys() | variant.constants.keys()
    if given != set(names):
        raise ValueError(f"the variant names {sorted(given)}, the kernel {sorted(names)}")
    signature = {
        name: "constexpr" if name in variant.constants else variant.signature[name]
        for name in names
    }
    # As at a launch: tensors begin on 16 bytes. Nothing is known of numbers.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    # TRITON_DUMP_PTXAS_LOG=1 makes Triton print what `ptxas -v` wrote, if it runs: two variants
    # may be the same code, so nothing is to come from the cache (TRITON_ALWAYS_COMPILE=1).
    with contextlib.redirect_stdout(io.StringIO()) as log:
        built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    if "Used" not in log.getvalue():
        raise ValueError(f"ptxas did not say how many registers there are: {log.getvalue()!r}")
    ptx = built.asm["ptx"]
    wide = r"\.global(?:\.\w+)*\.(?:v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]32|v4\.[bfsu]64)"
    return {
        "registers": number(r"Used (\d+) registers", log.getvalue()),
        "spilled": number(r"(\d+) bytes spill (?:stores|loads)", log.getvalue()),
        "shared": built.metadata.shared,
        "wide_loads": len(re.findall(r"\bld" + wide, ptx)),
        "wide_stores": len(re.findall(r"\bst" + wide, ptx)),
        "wide_copies": len(re.findall(r"\bcp\.async\.\w+\.shared\.global .*, 0x10,", ptx)),
    }


def main(index: int, count: int) -> None:
    jobs = [(module, variant, target) for module, variant in listed() for target in TARGETS]
    for module, variant, target in jobs[index::count]:
        row: dict[str, object] = {
            "module": module.__name__.rpartition(".")[2],
            "variant": variant.name,
            "target": target,
        }
        try:
            row |= compiled(module, variant, target)
        except Exception as error:  # a kernel that fails hides none of the others
            row["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
