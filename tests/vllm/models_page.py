"""Which model, which form, which flag: each is started, and what a refusal says is done.

    python -m tests.vllm.models_page

writes the table of docs/engines/vllm-models.md; tests/vllm/test_models.py holds the page to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..support.processes import ROOT
from .engines import BLOCK_TOKENS, VOCABULARY_SIZE
from .forked import Life, Nursery, Tokens
from .tiny_models import HYBRIDS, KINDS, lacks, tiny

PAGE = ROOT / "docs/engines/vllm-models.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->"
HEAD = ("model", '`"attention": "engine"` (default)', '`"attention": "pool"`')
FORMS: dict[str, dict[str, object]] = {"engine": {}, "pool": {"attention": "pool"}}
# What a refusal may name that makes the same form serve the model, and the settings that are it.
REMEDIES: dict[str, dict[str, object]] = {
    "--enable-prefix-caching": {"enable_prefix_caching": True},
    "--no-async-scheduling": {"async_scheduling": False},
}
OTHER_FORM = {'leave out "attention"': "engine", 'write "attention": "pool"': "pool"}
# Models that vLLM does not run on CPUs, and why attention in the pool refuses them: as
# test_schedules.py finds it.
WITHOUT_KERNELS = {
    "Jamba": "attention in the pool has no states (MambaSpec)",
    "Kimi-Linear": "attention in the pool has no states (MambaSpec)",
    "DeepSeek-V3.2, GLM-5": "attention to latents in the pool has no indexers",
}
PROMPT_TOKENS, NEW_TOKENS = 200, 8


class Tried(NamedTuple):
    """refused: what the engine said, None: it serves; remedies: with which it was started."""

    refused: str | None
    remedies: tuple[str, ...] = ()

    @property
    def cell(self) -> str:
        if self.refused is not None:
            return f"refused: {self.refused.split(': ')[2]}"  # behind it is the remedy
        return " ".join(["served", *(f"with `{name}`" for name in self.remedies)])


class Kind:
    """One kind of model, of which engines are forked."""

    def __init__(self, nursery: Nursery, kind: str, folder: Path):
        self._nursery, self._kind, self._folder = nursery, kind, folder
        self._model = tiny(kind, folder / kind)
        self._prompt = np.random.default_rng(1).integers(1, VOCABULARY_SIZE, PROMPT_TOKENS).tolist()
        self._pools = 0

    def row(self) -> str:
        """Row of the table; raises AssertionError where a remedy does not help, or tokens differ
        from those of vLLM alone.
        """
        tried = [self.follow(form) for form in FORMS]
        return f"| {' | '.join([self._kind, *(each.cell for each in tried)])} |"

    def follow(self, form: str) -> Tried:
        """Start the form, and do what refusals say until it serves, or none of it is left."""
        remedies: list[str] = []
        while (refused := self.serve(form, remedies)) is not None:
            assert refused.startswith("UnsupportedError: cxlkv: "), refused
            for word, other in OTHER_FORM.items():
                if word in refused:
                    named = [name for name in REMEDIES if name in refused]
                    assert self.serve(other, named) is None, refused
                    return Tried(refused)
            found = [name for name in REMEDIES if name in refused and name not in remedies]
            if not found:
                assert refused.endswith("start vLLM without --kv-transfer-config"), refused
                return Tried(refused)
            remedies.append(found[0])
        return Tried(None, tuple(remedies))

    def serve(self, form: str, remedies: list[str]) -> str | None:
        """None where the tokens are those of vLLM alone, also from the pool; or why it refuses."""
        settings = {name: value for each in remedies for name, value in REMEDIES[each].items()}
        self._pools += 1
        where = self._folder / f"{self._kind}{self._pools}"
        where.mkdir()
        ours = {"where": f"{where}/", "capacity": "32MiB", **FORMS[form]}
        life = self._life(ours, settings)
        said = next(life.hear())
        if "error" in said:
            life.kill()
            return str(said["error"])
        block = HYBRIDS.get(self._kind, (BLOCK_TOKENS, {}))[0]
        hit = (PROMPT_TOKENS - 1) // block * block
        found = [self._tokens(life, cached) for cached in (0, hit)]
        life.end()
        assert found == [self._alone(settings)] * 2
        return None

    def _alone(self, settings: dict[str, object]) -> Tokens:
        life = self._life(None, settings).ready()
        found = self._tokens(life, 0)
        life.end()
        return found

    def _life(self, ours: dict[str, object] | None, settings: dict[str, object]) -> Life:
        given = HYBRIDS.get(self._kind, (BLOCK_TOKENS, {}))[1]
        return self._nursery.life(ours, **{"model": str(self._model), **given, **settings})

    def _tokens(self, life: Life, cached: int) -> Tokens:
        life.forget()
        (done,) = life.generate([self._prompt], NEW_TOKENS)
        assert done["cached"] == cached
        return done["tokens"]


def rows(folder: Path) -> Iterator[str]:
    """All rows; those of WITHOUT_KERNELS as test_schedules.py finds them."""
    with Nursery(folder / "none", folder) as nursery:
        for kind in KINDS:
            before = [row for row in table(PAGE.read_text()) if row.startswith(f"| {kind} |")]
            yield before[0] if lacks(kind) else Kind(nursery, kind, folder).row()
    for kind, cause in WITHOUT_KERNELS.items():
        yield f"| {kind} | bytes equal | refused: {cause} |"


def table(text: str) -> list[str]:
    """The rows of the page, by which test_models.py goes."""
    return text.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]


def page(text: str, rows: list[str]) -> str:
    before, begin, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|---|", *rows]
    return f"{before}{begin}{''.join(f'{line}{chr(10)}' for line in lines)}{END}{after}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(page(PAGE.read_text(), list(rows(Path(made)))))
