"""Every code block of README and docs/ runs as it stands there.

In an environment with an engine (`make test-vllm`, for one) those run that need it, elsewhere all
others.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from .support.pages import (
    ROOT,
    RUN,
    SHOWN,
    Block,
    Step,
    as_reader,
    blocks,
    has_module,
    lacking,
    pages,
)

ENGINE = next((one for one in ("vllm", "sglang", "lmcache") if has_module(one)), None)
ENGINES = {"vllm", "sglang", "lmcache"}


def here(block: Block) -> bool:
    wanted = ENGINES & set(block.needs)
    return ENGINE in wanted if ENGINE else True


PAGES = {
    str(page.relative_to(ROOT)): found
    for page in pages()
    if (found := [one for one in blocks(page) if one.language in RUN and here(one)])
}


def test_fences_say_what_they_are() -> None:
    for block in (one for page in pages() for one in blocks(page)):
        assert block.language in SHOWN | RUN | {"json"}, f"{block.name}: {block.language!r}"
        if block.language == "python":
            ast.parse(block.code)
        elif block.language == "yaml":
            assert yaml.safe_load(block.code) is not None, block.name


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_as_they_stand(page: str, tmp_path: Path) -> None:
    steps, left_out = list[Step](), list[str]()
    for block in PAGES[page]:
        why = [said for need in block.needs if (said := lacking(need))]
        if why:
            left_out.append(f"{block.name}: {why[0]}")
        elif block.language != "yaml" or block.title:
            step: Step = {
                "name": block.name,
                "language": block.language,
                "title": block.title,
                "code": block.code,
            }
            steps.append(step)
    print(*left_out, sep="\n")
    said = as_reader(steps, tmp_path) if steps else ""
    assert said == "", said
    if not steps and left_out:
        pytest.skip("; ".join(left_out))
