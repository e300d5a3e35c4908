"""A variant is one configuration of a kernel: `variants()` lists them for the compile check."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Variant:
    """One way that the Python side launches a kernel for a usual shape."""

    name: str
    kernel: str  # the jit function's name in the module
    signature: dict[str, str]  # argument: Triton's type, "*bf16", "i32", "constexpr"
    constants: dict[str, object]
    num_warps: int
    num_stages: int = 1


def variant(
    name: str,
    kernel: triton.JITFunction,
    types: dict[str, str],
    constants: dict[str, object],
    num_warps: int,
    num_stages: int = 1,
) -> Variant:
    """types: the names of arguments, with spaces between, and Triton's type of these."""
    kinds = {argument: kind for names, kind in types.items() for argument in names.split()}
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {argument: kinds[argument] for argument in kernel.arg_names}
    return Variant(name, kernel.__name__, signature, constants, num_warps, num_stages)
