"""Layers of MLA (arXiv 2405.04434): one latent row a token, for all heads; values are a part of it.

Tensor-parallel ranks have equal rows, so one pool serves all of them, and engines of any number of
ranks. The first one saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cxlkv.errors import UnsupportedError

LATENT_KIND = "MLAAttentionSpec"
_INDEXER = "an indexer that chooses what a token sees (sparse MLA, as DeepSeek-V3.2 has)"
_COMPRESSED = "states of several tokens, padded rows or windows (as DeepSeek-V4 has)"


def are_latents(specs: Sequence[object]) -> bool:
    """Whether all layers keep latents; specs: as the engine has them, or their request rows."""
    return all(getattr(spec, "head_size_v", None) == 0 for spec in specs)


def refusal_of(kind: str, spec: object) -> str | None:
    """What a spec of MLA has that is not served; kind: the name of its class."""
    if "MLA" not in kind:
        return None
    role = getattr(spec, "cache_role", None)
    if getattr(role, "value", None) == "indexer" or getattr(spec, "is_index_group_leader", False):
        return _INDEXER
    padded = (getattr(spec, "alignment", None), getattr(spec, "model_version", None)) != (None,) * 2
    if kind != LATENT_KIND or padded or getattr(spec, "tokens_per_state", 1) != 1:
        return _COMPRESSED
    if getattr(spec, "state_content_bytes", None) is not None:
        return f"rows of {getattr(spec, 'cache_dtype_str', None)}"
    return None


def check_latents(kinds: Sequence[tuple[str, object]], remedy: str) -> None:
    """Raises UnsupportedError for latents that are kept in another way than one row a token."""
    for kind, spec in kinds:
        found = refusal_of(kind, spec)
        if found is not None:
            raise UnsupportedError(
                f"cxlkv: this model keeps latents ({kind}, MLA) with {found}, which are not "
                f"served: {remedy}"
            )


def check_encoding(encoding: str, specs: Sequence[object]) -> None:
    """Raises UnsupportedError for latents in fewer bits."""
    if encoding != "none" and any(are_latents([spec]) for spec in specs):
        raise UnsupportedError(
            f"cxlkv: latents (MLA) are not kept as {encoding}: leave out "
            '"encoding" and --kv-cache-dtype'
        )


def rope_concern(kinds: Iterable[str]) -> str | None:
    """kinds: of the model's rotary embedding. vLLM 0.32 takes a kernel for the plain one that reads
    the keys of latents as if they lay side by side."""
    if "default" not in kinds:
        return None
    return (
        "cxlkv: this model has latents (MLA) and no YaRN: vLLM's rotary kernel for CPUs turns keys "
        "by their place in a step, so tokens depend on how a prompt is cut, and change with a hit"
    )
