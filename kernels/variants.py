"""A variant is one configuration of a kernel: `variants()` lists them for the compile check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One way that the Python side launches a kernel for a usual shape."""

    name: str
    kernel: str  # the jit function's name in the module
    signature: dict[str, str]  # argument: Triton's type, "*bf16", "i32", "constexpr"
    constants: dict[str, object]
    num_warps: int
    num_stages: int = 1
