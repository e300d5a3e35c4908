"""Makes Triton's interpreter faster: it searches its language once, not at each call."""

from __future__ import annotations

import inspect
from functools import cache


@cache
def hasten() -> None:
    """Look up the names once. For each call of a function within a kernel, Triton lists and sorts
    all members of its language, which is a fifth of the time of a test of kernels. Triton still
    replaces the same members by the same functions."""
    import triton.language as tl
    from triton.runtime import interpreter

    packages = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    names = {
        package: [name for name, of in inspect.getmembers(package) if tl.core.is_builtin(of)]
        for package in packages
    }

    def patch_builtin(package: object, builder: object, scope: object) -> None:
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not what a call further out has replaced
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
