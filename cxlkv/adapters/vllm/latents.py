"""Layers of MLA (arXiv 2405.04434): one latent row a token, for all heads; values are a part of it.

Tensor-parallel ranks have equal rows, so one pool serves all of them, and engines of any number of
ranks. The first one saves.

An indexer (DeepSeek-V3.2, GLM-5) chooses what a token sees, by keys of its own: a layer of bytes
beside the latents. Its blocks are kept as they are, as each has all its keys before their scales.
vLLM calls no connector around it, so hits are there before the step, and it is saved behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cxlkv.errors import UnsupportedError

LATENT_KIND = "MLAAttentionSpec"
_BYTES = "torch.uint8"
_INDEXER = "an indexer that chooses what a token sees (sparse MLA, as DeepSeek-V3.2 has)"
_COMPRESSED = "states of several tokens, padded rows or windows (as DeepSeek-V4 has)"


def are_latents(specs: Sequence[object]) -> bool:
    """Whether all layers keep latents; specs: as the engine has them, or their request rows."""
    return all(getattr(spec, "head_size_v", None) == 0 for spec in specs)


def is_indexer(spec: object) -> bool:
    """Whether a layer keeps an indexer's keys."""
    return getattr(getattr(spec, "cache_role", None), "value", None) == "indexer"


def have_indexers(specs: Sequence[object]) -> bool:
    """Whether a model has some; specs: one of each group is enough."""
    return any(is_indexer(one) or getattr(one, "is_index_group_leader", False) for one in specs)


def refusal_of(kind: str, spec: object, in_pool: bool = False) -> str | None:
    """What a spec of MLA has that is not served; kind: the name of its class."""
    if "MLA" not in kind:
        return None
    if in_pool and have_indexers([spec]):
        return _INDEXER
    if is_indexer(spec) and (str(getattr(spec, "dtype", "")), _bytes(spec) % 2) != (_BYTES, 0):
        return f"an indexer that keeps {_bytes(spec)} numbers of {getattr(spec, 'dtype', None)}"
    padded = (getattr(spec, "alignment", None), getattr(spec, "model_version", None)) != (None,) * 2
    if kind != LATENT_KIND or padded or getattr(spec, "tokens_per_state", 1) != 1:
        return _COMPRESSED
    if getattr(spec, "state_content_bytes", None) is not None:
        return f"rows of {getattr(spec, 'cache_dtype_str', None)}"
    return None


def _bytes(spec: object) -> int:
    return int(getattr(spec, "head_size", 0))


def check_latents(kinds: Sequence[tuple[str, object]], remedy: str, in_pool: bool = False) -> None:
    """Raises UnsupportedError for latents that are kept in another way than one row a token."""
    for kind, spec in kinds:
        found = refusal_of(kind, spec, in_pool)
        if found is not None:
            by = " by attention in the pool" if found == _INDEXER else ""
            raise UnsupportedError(
                f"cxlkv: this model keeps latents ({kind}, MLA) with {found}, which are not "
                f"served{by}: {remedy}"
            )


def check_encoding(encoding: str, specs: Sequence[object]) -> None:
    """Raises UnsupportedError for latents in fewer bits."""
    if encoding != "none" and any(are_latents([spec]) for spec in specs):
        raise UnsupportedError(
            f"cxlkv: latents (MLA) are not kept as {encoding}: leave out "
            '"encoding" and --kv-cache-dtype'
        )


def check_audits(audit_hits: int, specs: Sequence[object]) -> None:
    """Raises UnsupportedError for audits of bytes: near ones need not be near numbers."""
    if audit_hits and have_indexers(specs):
        raise UnsupportedError(
            "cxlkv: audits compare numbers, and this model has indexers, which keep bytes: leave "
            'out "audit_hits"'
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
