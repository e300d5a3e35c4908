"""What a Hugging Face config says of a model's rotary embedding; needs neither torch nor weights.

The frequencies are those of transformers' modeling_rope_utils: default, linear, llama3
(meta-llama/llama-models) and yarn (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cxlkv.errors import CXLKVError
from cxlkv.layout import Rotary

# Models of which all layers turn keys, and how they pair channels. Of others nothing is said: a
# wrong description would have methods choose other pages, and no one would see it.
HALVES = (
    *("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),
)
NEIGHBOURS = ("cohere", "glm", "glm4")
Numbers = Mapping[str, object]


def rotary_of(config: object, head_dim: int, windowed: bool = False) -> Rotary | None:
    """The rotation of layers with a window, or of those that see all; None where it is not known.

    config: of the part that generates text.
    """
    name = getattr(config, "model_type", "")
    if name not in (*HALVES, *NEIGHBOURS):
        return None
    said = _said(config, "sliding_attention" if windowed else "full_attention")
    if said is None:
        return None
    make = _FORMS.get(str(said.get("rope_type", said.get("type", "default"))))
    try:
        part = said.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
        channels = int(head_dim * _number(part, 1.0))
        theta = _number(said["rope_theta"])
        longest = _number(getattr(config, "max_position_embeddings", None), 0.0)
        own = [theta ** (-i / channels) for i in range(0, channels, 2)]
        if make is None or not own:
            return None
        return Rotary(tuple(make(own, said, theta, longest)), name in NEIGHBOURS)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, CXLKVError):
        return None


def _said(config: object, kind: str) -> Numbers | None:
    """transformers 5 has all in rope_parameters, by kind of layer where they differ; 4 has
    rope_theta, rope_scaling, and rope_local_base_freq of layers with a window."""
    given = getattr(config, "rope_parameters", None)
    if isinstance(given, Mapping):
        own = given.get(kind, given)
        return own if isinstance(own, Mapping) and "rope_theta" in own else None
    local = getattr(config, "rope_local_base_freq", None)
    if local is not None and kind == "sliding_attention":
        return {"rope_theta": local}
    theta, scaling = getattr(config, "rope_theta", None), getattr(config, "rope_scaling", None)
    if theta is None:
        return None
    return {**(scaling if isinstance(scaling, Mapping) else {}), "rope_theta": theta}


def _number(value: object, default: float | None = None) -> float:
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _default(own: list[float], said: Numbers, theta: float, longest: float) -> list[float]:
    return own


def _linear(own: list[float], said: Numbers, theta: float, longest: float) -> list[float]:
    return [each / _number(said["factor"]) for each in own]


def _llama3(own: list[float], said: Numbers, theta: float, longest: float) -> list[float]:
    factor, low, high = (
        _number(said[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    before = _number(said["original_max_position_embeddings"])

    def scaled(each: float) -> float:
        turns = before * each / (2 * math.pi)  # over the length that it was trained with
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        return (1 - smooth) * each / factor + smooth * each

    return [scaled(each) for each in own]


def _yarn(own: list[float], said: Numbers, theta: float, longest: float) -> list[float]:
    factor = _number(said["factor"])
    before = _number(said.get("original_max_position_embeddings"), longest)

    def pair(turns: float) -> float:
        return len(own) * math.log(before / (turns * 2 * math.pi)) / math.log(theta)

    first, last = (
        pair(_number(said.get("beta_fast"), 32.0)),
        pair(_number(said.get("beta_slow"), 1.0)),
    )
    if said.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(own) - 1)
    last += 0.001 if first == last else 0.0

    def scaled(i: int, each: float) -> float:
        slow = min(1.0, max(0.0, (i - first) / (last - first)))
        return slow * each / factor + (1 - slow) * each

    return [scaled(i, each) for i, each in enumerate(own)]


Form = Callable[[list[float], Numbers, float, float], list[float]]
_FORMS: dict[str, Form] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
