"""What a module's `variants()` lists: one configuration of a kernel, as the compile check wants."""

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
