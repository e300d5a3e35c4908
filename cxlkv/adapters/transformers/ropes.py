"""Names the rotary frequencies of a pass, where these depend on how long the text is.

transformers has two such embeddings (modeling_rope_utils.dynamic_rope_update). LongRoPE turns all
keys of a pass whose last token is beyond original_max_position_embeddings by the long factors, else
by the short ones. Dynamic NTK makes new frequencies whenever a pass is longer than all before it,
and takes the first ones again for a pass below max_position_embeddings. Neither turns the keys that
are cached already, so a page is worth something only beside keys of the same frequencies.

A form is 16 bytes of the frequencies: two passes of one form turn keys in the same way.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

VOLATILE = ("inv_freq", "attention_scaling", "max_seq_len_cached")
"""Names of what a pass changes in such a module end so."""


def depends_on_length(module: torch.nn.Module) -> bool:
    """Whether it is a rotary embedding that a pass may change."""
    return any("dynamic" in kind or kind == "longrope" for kind in _kinds(module).values())


def _kinds(module: torch.nn.Module) -> dict[str | None, str]:
    """The module's ropes, by type of layer where these differ."""
    told = getattr(module, "rope_type", None)
    if isinstance(told, Mapping):
        return {str(layers): str(kind) for layers, kind in told.items()}
    return {None: told} if isinstance(told, str) else {}


def form_now(ropes: Iterable[torch.nn.Module]) -> bytes:
    """What turned the keys of the last pass."""
    found = hashlib.blake2b(digest_size=16, person=b"cxlkv.rope")
    for rope in ropes:
        for name, buffer in sorted(rope.named_buffers(recurse=False)):
            if "original" not in name:
                found.update(f"{name} {buffer.dtype}".encode())
                found.update(buffer.detach().cpu().view(torch.uint8).numpy().data)
        for layers in _kinds(rope):
            name = "attention_scaling" if layers is None else f"{layers}_attention_scaling"
            found.update(repr(getattr(rope, name, None)).encode())
    return found.digest()


@torch.no_grad()
def form_of(ropes: Sequence[torch.nn.Module], tokens: int) -> bytes:
    """What will turn the keys of a pass whose last token is number `tokens` of its text: copies of
    the modules are asked for it."""
    copies = [copy.deepcopy(rope, _shared(rope)) for rope in ropes]
    for rope in copies:
        like = next(rope.buffers())
        states = torch.zeros(1, 1, 1, dtype=torch.float32, device=like.device)
        positions = torch.tensor([[max(0, tokens - 1)]], device=like.device)
        for layers in _kinds(rope):
            rope(states, positions, **({} if layers is None else {"layer_type": layers}))
    return form_now(copies)


def _shared(rope: torch.nn.Module) -> dict[int, object]:
    config = getattr(rope, "config", None)
    return {id(config): config}
