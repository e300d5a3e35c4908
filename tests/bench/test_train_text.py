"""The byte-level model of bench/models: its samples, its training, and what was shipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv.bench.models.corpus import standard_library
from cxlkv.bench.sources import TEXT_MODEL, load

from . import train_text
from .train_text import Samples, Stage, Training


def test_no_file_is_both_learned_and_held_out() -> None:
    corpus = standard_library()
    assert not set(corpus.training) & {text for text in corpus.held_out if len(text) > 100}
    assert 0.03 < len(corpus.held_out) / len(corpus.training) < 0.3


def test_values_are_marked_where_they_stand_in_an_earlier_line() -> None:
    samples = Samples(standard_library().held_out)
    text, marks = samples.with_definitions(np.random.default_rng(3), 8192)
    assert len(text) == len(marks) == 8192
    assert marks.sum() >= 3 * train_text.VALUE_DIGITS
    for first in np.flatnonzero(marks[:-5] & marks[5:]):
        before, value = text[:first].tobytes(), text[first : first + 6].tobytes()
        name = before.rsplit(b"assert ", 1)[1].removesuffix(b" == ")
        assert name + b" = " + value in before


def test_copies_stand_behind_what_they_copy() -> None:
    samples = Samples((bytes(range(256)) * 64,))
    text = samples.with_copies(np.random.default_rng(3), 1024)
    other = samples.with_copies(np.random.default_rng(4), 1024)
    assert len(text) == 1024
    assert not np.array_equal(text, other)


def test_positions_jump_ahead_in_some_samples_and_never_back() -> None:
    samples = Samples(standard_library().held_out)
    rows = torch.cat([samples.batch(0, step)[1] for step in range(8)])
    steps = rows.diff(dim=1)
    assert (steps >= 1).all()
    assert (rows[:, 0] == 0).all()
    jumped = (steps > 1).any(dim=1)
    assert 0.2 < jumped.float().mean() < 0.8
    assert rows.max() < train_text.LONGEST


def test_earlier_bytes_are_seen_across_a_jump() -> None:
    """transformers would take a jump for the border between two packed samples."""
    torch.manual_seed(1)
    model = train_text.new_model()
    ids = torch.randint(256, (1, 64))
    places = torch.arange(64)[None] + 1000 * (torch.arange(64) >= 32)
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] + 1) % 256
    with torch.inference_mode():
        differs = train_text.losses(model, ids, places) != train_text.losses(model, changed, places)
    assert differs[0, 40:].any()


def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stages = (Stage(64, 2, 2, 1.0, 0.5, jumps=True), Stage(128, 1, 2, 0.5, 0.1))
    samples = Samples(standard_library().held_out[:3])
    monkeypatch.setattr(train_text, "STAGES", stages)
    monkeypatch.setattr(train_text, "SAVE_S", 0.0)

    def train(folder: Path, stop_at: tuple[int, int] | None) -> None:
        torch.manual_seed(train_text.SEED)
        training = Training(folder, samples)
        training.resume()
        if stop_at is not None:
            report = training.report

            def stop(of: Stage) -> None:
                report(of)
                if (training.stage, training.step) == stop_at:
                    raise KeyboardInterrupt

            monkeypatch.setattr(training, "report", stop)
        training.run()

    train(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", (1, 1))
    train(tmp_path / "parts", None)
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_the_shipped_model_looks_up_values_that_were_given_before() -> None:
    """Up to 2,000 bytes before, in text that it was not trained on; one in ten is chance."""
    model = load(TEXT_MODEL)
    assert train_text.recalled(model, standard_library().held_out, 2048, 6) > 0.4
    assert (TEXT_MODEL / "model.safetensors").stat().st_size <= 4_000_000
