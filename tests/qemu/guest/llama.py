"""The demo's model in numpy, for guests: torch takes minutes to load there. Attends in a pool."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cxlkv import KVLayout, Sequence

Array = npt.NDArray[np.float32]
PREFIX = "model.layers"


class Llama:
    """A Llama that classifies tokens, in float32, from a folder of save_pretrained()."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.layout = KVLayout(
            layers=config["num_hidden_layers"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            page_tokens=16,
            dtype="float32",
        )
        self._weights = read_weights(folder / "model.safetensors")
        self._epsilon = float(config["rms_norm_eps"])
        half = np.arange(0, self.layout.head_dim, 2) / self.layout.head_dim
        self._frequencies = float(config["rope_parameters"]["rope_theta"]) ** -half

    def read(self, sequence: Sequence, ids: npt.NDArray[np.int64]) -> Array:
        """Append tokens to the sequence; scores [classes] of the last one."""
        angles = (len(sequence) + np.arange(len(ids)))[:, None] * self._frequencies
        hidden: Array = self._weights["model.embed_tokens.weight"][ids]
        for layer in range(self.layout.layers):
            hidden = self._layer(sequence, layer, hidden, angles)
        normed = self._norm(hidden[-1:], "model.norm")
        scores: Array = self._times(normed, "score")[0] + self._weights["score.bias"]
        return scores

    def _layer(
        self, sequence: Sequence, layer: int, hidden: Array, angles: npt.NDArray[np.float64]
    ) -> Array:
        name, dim = f"{PREFIX}.{layer}", self.layout.head_dim
        normed = self._norm(hidden, f"{name}.input_layernorm")
        query, key, value = (
            self._times(normed, f"{name}.self_attn.{which}_proj").reshape(len(hidden), -1, dim)
            for which in "qkv"
        )
        sequence.append(layer, rotated(key, angles), value)
        attended = np.asarray(sequence.attend(layer, rotated(query, angles))[0])
        rows = attended.reshape(len(hidden), -1)
        hidden = hidden + self._times(rows, f"{name}.self_attn.o_proj")
        normed = self._norm(hidden, f"{name}.post_attention_layernorm")
        gate, up = (self._times(normed, f"{name}.mlp.{which}_proj") for which in ("gate", "up"))
        inner = gate / (1 + np.exp(-gate)) * up
        return hidden + self._times(inner, f"{name}.mlp.down_proj")

    def _norm(self, rows: Array, name: str) -> Array:
        mean = np.mean(rows * rows, axis=-1, keepdims=True)
        scale: Array = self._weights[f"{name}.weight"] / np.sqrt(mean + np.float32(self._epsilon))
        return rows * scale

    def _times(self, rows: Array, name: str) -> Array:
        found: Array = rows @ self._weights[f"{name}.weight"].T
        return found


def rotated(rows: Array, angles: npt.NDArray[np.float64]) -> Array:
    """Rotary positions on [tokens, heads, dim]; angles [tokens, dim / 2]."""
    cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    first, second = np.split(rows, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def read_weights(path: Path) -> dict[str, Array]:
    """A safetensors file of bfloat16, widened: the upper halves of float32."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        upper = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
        found[name] = upper.view(np.float32).reshape(entry["shape"])
    return found
