"""Triton's interpreter without its search for what to replace at each call of a function."""

from __future__ import annotations

import inspect
from functools import cache


@cache
def hasten() -> None:
    """Its names are looked up once. Triton lists all members of its language, sorted, for each call
    of a function within a kernel, which is a fifth of the time of a test of kernels. What is
    replaced, and by what, stays Triton's."""
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
