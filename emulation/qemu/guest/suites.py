"""The project's tests of pool, select and attend, with pools on node 1: python -m ... NAME."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from cxlkv import CXLPool
from cxlkv.emulation.qemu.guest.placement import BIND, NODES, pages_by_node, set_policy
from cxlkv.emulation.qemu.guest.steps import end_parts, part

NODE = 1
# Files, and which of their tests. Of NDP those of the guests' best instruction set, with one type
# of element; vectors are slow in an emulated CPU, so the longest tests are left out.
SUITES = {
    "the pool suite": (["tests/test_pool.py", "tests/test_sequence.py"], "not torch"),
    "the select and attend suite": (
        ["tests/test_ndp.py"],
        "avx2 and (float32 or not (shapes or nan or latent))"
        " and not (whole_numbers or windows or latent or 33-40-70)",
    ),
}
CLOSE = CXLPool.close


def close_counted(pages: Counter[int], pool: CXLPool) -> None:
    """In place of close(): each pool of a test tells where its pages lie, as long as they do."""
    pages.update(pages_by_node())
    CLOSE(pool)


def run(files: list[str], chosen: str) -> None:
    pages: Counter[int] = Counter()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "-k", chosen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CXLPool, "close", lambda pool: close_counted(pages, pool))
        status = pytest.main([*options, *files])
    print(f"pages by node: {dict(pages)}", flush=True)
    assert status == 0, f"pytest ended with {status!r}"
    assert set(pages) == {NODE}, pages


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes minutes to load over 9p
    print(f"nodes: {(NODES / 'online').read_text().strip()}", flush=True)
    set_policy(BIND, (NODE,))
    for name, (files, chosen) in SUITES.items():
        with part(f"{name} on node {NODE}, {sys.argv[1]}"):
            run(files, chosen)
    end_parts()


if __name__ == "__main__":
    main()
