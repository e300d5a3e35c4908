"""Identities: what makes K and V what they are counts, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cxlkv.adapters.common import weights
from cxlkv.adapters.common.identity import config_words, has_rope, model_words

from ...support.weight_files import TENSOR_BYTES, change, gguf, safetensors


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("kind", "make"), [("safetensors", safetensors), ("gguf", gguf)])
@pytest.mark.parametrize(
    "offset",
    [-1, -TENSOR_BYTES // 2, -TENSOR_BYTES, -TENSOR_BYTES - 1, -2 * TENSOR_BYTES],
)
def test_a_changed_byte_where_each_tensor_is_sampled_is_another_model(
    tmp_path: Path, kind: str, make: Callable[[Path], Path], offset: int
) -> None:
    path = make(tmp_path / f"model.{kind}")
    before = model_words(str(tmp_path))
    assert before["weights"] is not None
    assert model_words(str(tmp_path)) == before
    change(path, offset)
    assert model_words(str(tmp_path))["weights"] != before["weights"]


def test_copies_are_one_model_whatever_their_times(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    safetensors(tmp_path / "a/model.safetensors")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b/model.safetensors", ns=(1, 1))
    one, other = (model_words(str(tmp_path / name)) for name in "ab")
    assert one["weights"] == other["weights"]


def test_a_file_is_sampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = safetensors(tmp_path / "model.safetensors")
    sampled: list[Path] = []
    sample = weights._sampled

    def counted(file: Path) -> str:
        sampled.append(file)
        return sample(file)

    monkeypatch.setattr(weights, "_sampled", counted)
    weights.digests([path])
    weights.digests([path])
    assert len(sampled) == 2, "a file that has just changed may change again within one tick"
    monkeypatch.setattr(weights, "SETTLED_NS", -1)
    found = [weights.digests([path]) for _ in range(3)]
    assert len(sampled) == 3
    assert found[0] == found[1] == found[2] == [sample(path)]
    change(path, -1)
    assert weights.digests([path]) != found[0]
    weights._cache_file().write_text("{ damaged")
    assert weights.digests([path]) == [sample(path)]


@pytest.mark.parametrize("size", [0, 1, 1 << 40])
def test_a_damaged_file_identifies_nothing(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
    assert model_words(str(tmp_path))["weights"] is None
    for cut in (3, 30, 100):
        path = gguf(tmp_path / "model.gguf")
        path.write_bytes(path.read_bytes()[:cut])
        assert model_words(str(path))["weights"] is None


def test_a_header_longer_than_a_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf(tmp_path / "model.gguf", words=1000)
    whole = weights._sampled(path)
    monkeypatch.setattr(weights, "GGUF_HEADER_BYTES", (64, 1 << 10, 1 << 20))
    assert weights._sampled(path) == whole


def test_other_formats_and_places_identify_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"1")
    for model in (str(tmp_path), "s3://bucket/model", "org/model-that-is-not-here"):
        assert model_words(model)["weights"] is None
        stated = model_words(model, identity="release 7")
        assert stated["weights"] == {"identity": "release 7"}
    path = gguf(tmp_path / "one.gguf")
    assert model_words(str(path))["weights"] is not None


def test_a_hub_name_is_what_its_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub/models--org--model"
    for commit in ("a" * 40, "b" * 40):
        folder = hub / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        safetensors(folder / "model.safetensors", count=1 if commit[0] == "a" else 2)
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = model_words("org/model")
    assert found["weights"] == model_words("org/model", "a" * 40)["weights"] is not None
    assert found["weights"] != model_words("org/model", "b" * 40)["weights"]


def test_descriptions_and_code_count(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors")
    config: dict[str, object] = {"model_type": "llama", "rms_norm_eps": 1e-6}
    found = []
    for file, text in (
        ("config.json", json.dumps(config)),
        ("config.json", json.dumps({**config, "rms_norm_eps": 0.3})),
        ("adapter_config.json", '{"lora_alpha": 16}'),
        ("adapter_config.json", '{"lora_alpha": 32}'),
        ("preprocessor_config.json", '{"size": 224}'),
        ("modeling_own.py", "x = 1"),
        ("modeling_own.py", "x = 2"),
    ):
        (tmp_path / file).write_text(text)
        found.append(model_words(str(tmp_path)))
    assert all(a != b for at, a in enumerate(found) for b in found[:at])
    for file in ("generation_config.json", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    assert model_words(str(tmp_path)) == found[-1]


def test_lengths_count_where_a_rope_depends_on_them() -> None:
    def words(kind: str, length: int) -> dict[str, object]:
        rope = {"rope_type": kind, "rope_theta": 1e4}
        text = {"model_type": "t", "rope_parameters": rope, "max_position_embeddings": length}
        return config_words({"model_type": "both", "text_config": text})

    assert words("default", 1024) == words("default", 2048)
    for kind in ("dynamic", "longrope", "yarn", "unheard of"):
        assert words(kind, 1024) != words(kind, 2048)


def test_the_kind_of_a_rope_is_found_in_older_and_newer_configs(tmp_path: Path) -> None:
    for rope in ({"type": "longrope"}, {"rope_type": "longrope"}):
        for name in ("rope_scaling", "rope_parameters"):
            (tmp_path / "config.json").write_text(json.dumps({name: rope}))
            assert has_rope(str(tmp_path), "longrope")
            assert not has_rope(str(tmp_path), "yarn")
