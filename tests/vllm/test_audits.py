"""Audited hits in a running engine: weights that differ where identity takes no samples share keys,
which an audit finds out. The engine's tokens are right all the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import MakeEngine
from .engines import Engine
from .test_prefixes import CACHED, folder_in
from .test_weights import NOTHING, serve

NAME = "model.safetensors"


def other_rows(folder: Path) -> None:
    """Gives the model other embeddings, but for rows at the beginning, middle and end: 4 KiB at
    each of these places are all that names a tensor (docs/engines/vllm.md)."""
    import torch
    from safetensors.torch import load_file, save_file

    size = (folder / NAME).stat().st_size
    tensors = load_file(folder / NAME)
    rows = tensors["model.embed_tokens.weight"]
    torch.manual_seed(3)
    sampled = 4096 // (rows.element_size() * rows.shape[1]) + 1
    for first, last in ((sampled, len(rows) // 2 - sampled), (len(rows) // 2 + sampled, -sampled)):
        rows[first:last] = torch.randn_like(rows[first:last]) * 0.12
    save_file(tensors, folder / NAME, {"format": "pt"})
    assert (folder / NAME).stat().st_size == size


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("attention", ["engine", "pool"])
def test_an_audit_finds_weights_that_identity_does_not_tell_apart(
    make_engine: MakeEngine, model: Path, tmp_path: Path, attention: str, processes: bool
) -> None:
    """Right pages pass. Behind those of other weights the request is computed again; then nobody
    finds any of them."""
    _, extra = folder_in(tmp_path)
    settings = {**extra, "attention": attention}
    folder = tmp_path / "model"
    shutil.copytree(model, folder)

    def engine(**more: object) -> Engine:
        ours = {**settings, **more} if more else None
        made = make_engine(ours, model=str(folder), processes=processes and "audit_hits" in more)
        return made

    first = engine(audit_hits=1)
    before, cached = serve(first)
    assert cached == NOTHING
    first.forget()
    tokens, cached = serve(first)
    assert tokens == before
    assert 0 < sum(cached) < sum(CACHED)
    assert "not made as its key says" not in first.log()
    first.end()
    other_rows(folder)
    stock = engine()
    right, second = serve(stock)[0], serve(stock, 2)[0]
    stock.end()
    assert right != before
    blind = engine(salt="")
    tokens, cached = serve(blind)
    assert cached == CACHED, "the keys are the same"
    assert tokens != right
    blind.end()
    auditing = engine(audit_hits=1)
    tokens, cached = serve(auditing)
    assert tokens == right
    assert sum(cached) > 0
    assert "not made as its key says" in auditing.log()
    auditing.forget()
    assert serve(auditing, 2) == (second, NOTHING)
    auditing.forget()
    assert serve(auditing, 2)[0] == second
    auditing.end()
    fresh = engine(salt="")
    for cached in (NOTHING, CACHED):  # the second time what it has stored itself
        assert serve(fresh) == (right, cached)
        fresh.forget()
    fresh.end()
