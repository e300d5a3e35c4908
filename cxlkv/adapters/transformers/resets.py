"""Gives generate() its CXLCache back where the model drops it to read the text anew.

Phi-3 and PhiMoE do so in prepare_inputs_for_generation: a text that grows beyond the border of
their LongRoPE is fed again, all of it, to a cache that transformers would make. It is fed to the
CXLCache instead, whose rows begin anew.
"""

from __future__ import annotations

from functools import wraps
from typing import Protocol

import torch
from torch import Tensor
from transformers import GenerationMixin

NAME = "prepare_inputs_for_generation"


class Prepare(Protocol):
    """The method, as a function."""

    def __call__(
        self, model: object, input_ids: Tensor, *args: object, **given: object
    ) -> dict[str, object]: ...


class Restarts(Protocol):
    def restart(self) -> None: ...

    def get_seq_length(self) -> int: ...


def give_back(model: object, kind: type[Restarts]) -> None:
    """Has the class of such a model give back caches of this kind; a second time does nothing."""
    if not isinstance(model, torch.nn.Module):
        return
    inner = getattr(model, "get_base_model", lambda: model)()  # PEFT's wrapper
    if not hasattr(getattr(inner, "config", None), "original_max_position_embeddings"):
        return
    owner = next((one for one in type(inner).__mro__ if NAME in vars(one)), GenerationMixin)
    prepare: Prepare = vars(owner)[NAME]
    if owner is not GenerationMixin and not hasattr(prepare, "gives_back"):
        setattr(owner, NAME, _giving_back(prepare, kind))


def _giving_back(prepare: Prepare, kind: type[Restarts]) -> Prepare:
    @wraps(prepare)
    def prepared(
        model: object, input_ids: Tensor, *args: object, **given: object
    ) -> dict[str, object]:
        made = prepare(model, input_ids, *args, **given)
        cache, fed = given.get("past_key_values"), made.get("input_ids")
        if isinstance(cache, kind) and "past_key_values" not in made and isinstance(fed, Tensor):
            whole = fed.shape == input_ids.shape and fed.shape[1] > cache.get_seq_length()
            if whole:
                cache.restart()
                made["past_key_values"] = cache
        return made

    prepared.gives_back = True  # type: ignore[attr-defined]
    return prepared
