"""The project's tests of pool, select and attend, with pools on node 1: python -m ... NAME."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import pytest

from cxlkv import CXLPool
from tests.qemu.guest.placement import NODES, pages_by_node
from tests.qemu.guest.steps import command, end_parts, part

NODE = 1
# Files, and which of their tests. Of NDP those of the guests' best instruction set, with one type
# of element; vectors are slow in an emulated CPU, so the longest tests are left out.
SUITES = {
    "the pool suite": (["tests/test_pool.py", "tests/test_sequence.py"], "not torch"),
    "the select and attend suite": (
        ["tests/ndp/test_ndp.py"],
        "avx2 and (float32 or not (shapes or nan or latent))"
        " and not (whole_numbers or windows or latent or 33-40-70)",
    ),
}
CLOSE = CXLPool.close
Where = str | os.PathLike[str]
P = ParamSpec("P")


def on_node(
    create: Callable[Concatenate[Where, P], CXLPool],
) -> Callable[Concatenate[Where, P], CXLPool]:
    """create(), but what would lie anywhere in memory lies on the node."""

    def create_on_node(where: Where, /, *args: P.args, **kwargs: P.kwargs) -> CXLPool:
        place = os.fspath(where)
        if place == "anonymous:":
            place = f"numa:{NODE}"
        elif place.startswith("/dev/shm/"):
            place = f"numa:{NODE}:{place}"
        return create(place, *args, **kwargs)

    return create_on_node


def run(files: list[str], chosen: str) -> None:
    pages: Counter[int] = Counter()

    def close_counted(pool: CXLPool) -> None:
        """In place of close(): the pages of all pools that are open."""
        pages.update(pages_by_node("/dev/shm/cxlkv-test"))
        CLOSE(pool)

    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly and not gpu", "-k", chosen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CXLPool, "create", on_node(CXLPool.create))
        patch.setattr(CXLPool, "close", close_counted)
        status = pytest.main([*options, *files])
    print(f"pages by node: {dict(pages)}", flush=True)
    assert status == 0, f"pytest ended with {status!r}"
    assert set(pages) == {NODE}, pages


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes minutes to load over 9p
    print(f"nodes: {(NODES / 'online').read_text().strip()}", flush=True)
    with part(f"pools on nodes, {sys.argv[1]}"):
        command("python3 -m tests.support.numa_guest")
    for name, (files, chosen) in SUITES.items():
        with part(f"{name} on node {NODE}, {sys.argv[1]}"):
            run(files, chosen)
    end_parts()


if __name__ == "__main__":
    main()
