"""Under which names the pages of an engine's rank are stored: all that makes them what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cxlkv.adapters.identity import namespace, weights_of
from cxlkv.objects import object_keys
from cxlkv.prefix import PageKeys


class Config(Protocol):
    """What is read of SGLang's HiCacheStorageConfig."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_rank: int
    dcp_size: int
    is_mla_model: bool
    model_name: str | None
    tp_lcm_size: int | None
    should_split_heads: bool
    extra_config: Mapping[str, object] | None


def words_of(config: Config, page: Mapping[str, object], salt: str) -> dict[str, object]:
    """What all ranks of an engine have in common. page: the shape of one, in the host's memory."""
    model = config.model_name or ""
    tag = (config.extra_config or {}).get("extra_backend_tag")
    shards = config.tp_lcm_size if config.should_split_heads else config.tp_size
    return {
        "engine": "sglang",
        "model": model,
        "weights": weights_of(model),
        "tag": tag,
        "mla": config.is_mla_model,
        "shards": 1 if config.is_mla_model else shards,
        "stages": config.pp_size,
        "context": [config.attn_cp_size, config.dcp_size],
        "salt": salt,
        **page,
    }


def suffixes_of(config: Config) -> list[str]:
    """Of the objects that are one page of this rank: one; or, where ranks of other engines have
    fewer heads each, one for each of theirs. MLA ranks have equal pages, and share them."""
    rest = f"pp{config.pp_rank}.cp{config.attn_cp_rank}.dcp{config.dcp_rank}"
    if config.is_mla_model:
        return [f".{rest}"]
    if not config.should_split_heads:
        return [f".tp{config.tp_rank}.{rest}"]
    parts = (config.tp_lcm_size or config.tp_size) // config.tp_size
    first = config.tp_rank * parts
    return [f".tp{first + part}.{rest}" for part in range(parts)]


class Names:
    """From SGLang's page hashes, which are of the tokens alone, to keys of objects."""

    def __init__(self, words: Mapping[str, object], suffixes: Sequence[str]):
        self.space = namespace(words)
        self.suffixes = list(suffixes)

    def keys(self, hashes: Sequence[str]) -> PageKeys:
        """Those of a page's objects one behind the other, page after page."""
        suffixes = self.suffixes
        return object_keys([name + end for name in hashes for end in suffixes], self.space)
