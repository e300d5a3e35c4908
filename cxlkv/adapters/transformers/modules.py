"""Looks through a model's modules for all that makes its keys and values, but for the numbers.

A line of text for each module's class and each of its plain attributes, as adapters, switches and
scales are, and each tensor's name and shape. LoRA layers of PEFT count as their base layer where no
adapter takes part, and else with those adapters only that do. What a pass itself changes in rotary
embeddings is left out: ropes.py names it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Set
from enum import Enum
from functools import partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from cxlkv.adapters.transformers import ropes
from cxlkv.adapters.transformers.layouts import config_words

IGNORED = {
    *vars(torch.nn.Module()),  # parameters, buffers and modules are walked, hooks looked at
    "_is_hf_initialized",
    "_compiled_call_impl",
    "gradient_checkpointing",
    # plans for several devices, loading and saving
    *("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_skip_keys_device_placement"),
    *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules"),
    *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"),
    *("_keys_to_ignore_on_save", "all_tied_weights_keys", "loss_type", "loss_function"),
    # where a model came from or lies, and what generate() is told
    *("name_or_path", "generation_config", "hf_device_map", "warnings_issued"),
    *("prepare_inputs_for_generation", "base_model_prepare_inputs_for_generation"),
    # accelerate moves weights and results; the modules' own forward is beneath
    *("_hf_hook", "_old_forward"),
    # PEFT: what it was told, beside what its layers do; what they keep of the weights
    *("peft_config", "_hf_peft_config_loaded", "_caches", "_dora_cache"),
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
KNOWN_HOOKS = ("accelerate.", "cxlkv.", "transformers.")
"""Modules whose hooks leave results as they are."""
PLAIN_MODULES = (
    "_thread",
    "_weakref",
    "builtins",
    "functools",
    "logging",
    "re",
    "threading",
    "torch",
)
"""Modules of whose objects only the class counts."""
PLAIN = (bool, int, float, complex, str, bytes, Enum, np.generic, torch.dtype)


def global_hooks() -> list[Mapping[int, object]]:
    """Hooks of all modules."""
    return [getattr(torch.nn.modules.module, f"_global{kind}") for kind in HOOKS]


class Kept:
    """Modules as they are: classes, attributes and tensors, but for the numbers in these; hooks."""

    def __init__(
        self, modules: Iterable[torch.nn.Module], hooks: Iterable[Mapping[int, object]] = ()
    ):
        self._modules = [*modules]
        self._attributes: list[tuple[object, object]] = [(one, dict(one)) for one in hooks]
        for module in self._modules:
            own = vars(module)
            self._attributes.append((own, {name: _copy(value) for name, value in own.items()}))
        self._classes_and_tensors = _classes_and_tensors(self._modules)

    def still(self) -> bool:
        try:
            same = all(now == before for now, before in self._attributes)
        except RuntimeError:  # a tensor is there now, which is neither equal nor not
            return False
        return same and _classes_and_tensors(self._modules) == self._classes_and_tensors


class Walk:
    """Collects a line for each module and attribute, and all tensors by name.

    far: names of tensors without memory.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.far: list[str] = []
        self.ropes: list[torch.nn.Module] = []  # whose frequencies the length decides
        self.doubts: list[str] = []  # why nobody must find pages of this model
        self._configs: dict[int, str] = {}
        self._seen: dict[int, object] = {}  # objects, held so that no other gets their place
        self._modules: list[torch.nn.Module] = []
        self._told: list[Mapping[int, object]] = []  # hooks
        self._kept = Kept(())
        self._opaque = False  # whether there is something that has no such copy

    def model(self, model: torch.nn.Module) -> None:
        for hooks in global_hooks():
            self._hooks("every module", hooks)
        inner = self._unwrapped(model)
        config = getattr(inner, "config", None)
        self._configs[id(config)] = ""  # that one has a word of its own
        self._module("", inner)
        self._kept = Kept(self._modules, self._told)

    def still(self) -> bool:
        """Whether another walk would find the same, but for numbers in the tensors."""
        return not self._opaque and bool(self._modules) and self._kept.still()

    def _unwrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model without torch.compile's and LoRA's wrappers, which leave results as they
        are."""
        model = getattr(model, "_orig_mod", model)
        tuner = getattr(model, "base_model", None)
        lora = _peft("peft.tuners.lora.model")
        if lora is None or tuner is None or type(tuner) is not lora.LoraModel:
            return model
        for wrapper in (model, tuner):
            for kind in HOOKS:
                self._hooks(type(wrapper).__name__, getattr(wrapper, kind))
        inner: torch.nn.Module = tuner.model
        return inner

    def _module(self, path: str, module: torch.nn.Module) -> None:
        if id(module) in self._seen:
            self.lines.append(f"{path} again")
            return
        self._seen[id(module)] = module
        self._modules.append(module)
        own = vars(module)
        for kind in HOOKS:
            if own[kind]:
                self._hooks(path, own[kind])
        adapters = _adapters_of(module)
        if adapters == []:
            self._module(path, own["_modules"]["base_layer"])
            return
        self.lines.append(f"{path} {_name(type(module))}")
        moves = ropes.depends_on_length(module)
        if moves:
            self.ropes.append(module)
        for name, value in own.items():
            if name in IGNORED or (moves and name.endswith(ropes.VOLATILE)):
                continue
            if name == "forward":
                self._hooks(path, {0: value})
            if adapters is not None:
                value = _lora_attribute(name, value, adapters)
            self._attribute(f"{path}.{name}", value)
        if adapters is None and "ALora" in str(own.get("lora_variant")):
            text = "has an aLoRA adapter, whose part in a token hangs on later tokens"
            self.doubts.append(f"{path} {text}")
        if module.training and _drops(module):
            self.doubts.append(f"{path} drops out at random: call model.eval()")
        for group in ("_parameters", "_buffers"):
            for name, tensor in own[group].items():
                if tensor is not None and not (moves and name.endswith(ropes.VOLATILE)):
                    self._tensor(f"{path}.{name}", tensor)
        for name, child in own["_modules"].items():
            if child is not None:
                if adapters is None or name == "base_layer":
                    self._module(f"{path}.{name}", child)
                else:
                    self._parts(f"{path}.{name}", child, adapters)

    def _parts(self, path: str, parts: torch.nn.Module, adapters: list[str]) -> None:
        """What some adapters have in one of a LoRA layer's dicts."""
        self._modules.append(parts)
        children = {**parts._modules, **parts._parameters, **parts._buffers}
        for place, adapter in enumerate(adapters):
            part = children.get(adapter)
            if isinstance(part, torch.nn.Module):
                self._module(f"{path}.{place}", part)
            elif part is not None:
                self._tensor(f"{path}.{place}", part)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):  # a subclass that has its numbers in others
            names, told = tensor.__tensor_flatten__()
            self._attribute(path, told)
            for name in names:
                self._tensor(f"{path}.{name}", getattr(tensor, name))
            return
        for name, value in vars(tensor).items():  # bitsandbytes keeps scales there
            if name not in IGNORED:
                self._attribute(f"{path}.{name}", value)
        if tensor.is_meta:
            self.far.append(path.lstrip("."))
            self.lines.append(f"{path} {tuple(tensor.shape)} {tensor.dtype}")
            return
        self.lines.append(f"{path} {tuple(tensor.shape)} {tensor.dtype}")
        self.tensors.append((path, tensor))

    def _hooks(self, path: str, hooks: Mapping[int, object]) -> None:
        """What unknown code does to results is not known, even if it is the same code."""
        self._told.append(hooks)
        for hook in hooks.values():
            name = _name(hook)
            if not name.startswith(KNOWN_HOOKS):
                self.lines.append(f"{path} hook {name}")
                self.doubts.append(
                    f"{path or 'the model'} has the hook {name}, and what that does is not known"
                )

    def _attribute(self, path: str, value: object) -> None:
        if value is None or isinstance(value, PLAIN):
            self.lines.append(f"{path} {value!r}")
        elif isinstance(value, Tensor):
            self._opaque = True
            self._tensor(path, value)
        elif isinstance(value, torch.nn.Module):
            self._module(path, value)
        elif isinstance(value, PreTrainedConfig):
            if id(value) not in self._configs:
                self._opaque = True
                self._configs[id(value)] = repr(sorted(config_words(value).items()))
            self.lines.append(f"{path} {self._configs[id(value)]}")
        elif isinstance(value, np.ndarray):
            self._opaque = True
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            self.lines.append(f"{path} {value.dtype} {value.shape} {digest}")
        elif id(value) in self._seen:
            self.lines.append(f"{path} again")
        else:
            self._object(path, value)

    def _object(self, path: str, value: object) -> None:
        """A container, or an object: what is in it."""
        self._seen[id(value)] = value
        if isinstance(value, Mapping):
            for name in sorted(value, key=repr):
                self._attribute(f"{path}[{name!r}]", value[name])
        elif isinstance(value, Set):
            self.lines.append(f"{path} {sorted(map(repr, value))}")
        elif isinstance(value, (list, tuple)):
            for place, item in enumerate(value):
                self._attribute(f"{path}[{place}]", item)
        elif isinstance(value, partial):
            self.lines.append(f"{path} {_name(value)}")
            self._attribute(path, [value.args, value.keywords])
        else:
            self.lines.append(f"{path} {_name(value)}")
            if isinstance(value, type) or type(value).__module__ in PLAIN_MODULES:
                return
            for name, item in sorted(getattr(value, "__dict__", {}).items()):
                self._opaque = True
                if name not in IGNORED:
                    self._attribute(f"{path}.{name}", item)


def _classes_and_tensors(modules: list[torch.nn.Module]) -> list[object]:
    found: list[object] = [type(module) for module in modules]
    for module in modules:
        found += map(id, module._parameters.values())
        found += map(id, module._buffers.values())
    return found


def _copy(value: object) -> object:
    """Copy a value with all its containers; tensors and objects are the same ones."""
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return set(value) if isinstance(value, set) else value


def _name(value: object) -> str:
    """Name of a function or class, else of its class."""
    if isinstance(value, partial):
        return _name(value.func)
    if not hasattr(value, "__qualname__"):
        value = type(value)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _drops(module: torch.nn.Module) -> bool:
    """Whether dropout of more than 0 is part of it."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    shares = (value for name, value in vars(module).items() if "dropout" in name)
    return any(isinstance(share, float) and share > 0 for share in shares)


# ---- PEFT's LoRA ----


def _peft(name: str) -> ModuleType | None:
    """A module of PEFT, where a model may have parts of it."""
    return sys.modules.get(name)


def _adapters_of(module: torch.nn.Module) -> list[str] | None:
    """Adapters that take part in a LoRA layer; None: no such layer, or one with others, too."""
    lora = _peft("peft.tuners.lora.layer")
    if lora is None or not isinstance(module, lora.LoraLayer):
        return None
    if module.disable_adapters or module.merged:
        return None if module.disable_adapters and module.merged else []  # it unmerges then
    there = {*module.lora_A, *module.lora_embedding_A}
    active = [name for name in module.active_adapters if name in there]
    variants = {type(module.lora_variant.get(name)).__name__ for name in active}
    return active if all(name == "NoneType" or "Dora" in name for name in variants) else None


def _lora_attribute(name: str, value: object, adapters: list[str]) -> object:
    """What such a layer's attribute says of these adapters; their names say nothing."""
    if name in ("_active_adapter", "adapter_layer_names", "other_param_names", "kwargs"):
        return None
    if isinstance(value, dict):
        return [value.get(adapter) for adapter in adapters]
    return value
