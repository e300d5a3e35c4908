"""Names everything that makes the bytes of SGLang's pages, for keys and for the pool's file.

    space  = H(engine, host memory, shards, stage, salt)      16 bytes
    key    = H(space, SGLang's hash of a page + which shard)

SGLang hashes a page's tokens with all text before them, and with the request's LoRA and cache salt.
The pool's file is named by all but the salt: ranks and tenants share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cxlkv.adapters.common.identity import has_rope, model_words
from cxlkv.adapters.common.keys import namespace, unshared
from cxlkv.errors import BadArgumentError, UnsupportedError

Words = dict[str, object]

OF_THE_SERVER = (
    "revision",
    "load_format",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "json_model_override_args",
    "speculative_algorithm",
    "speculative_draft_model_revision",
)
OF_EACH_RANK = ("MambaPoolHost", "MHATokenToKVPoolHost")
"""Host pools that hold a rank's own part, also where K and V of the model are the same on all."""


class Config(Protocol):
    """What is read of SGLang's HiCacheStorageConfig."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    model_name: str | None
    tp_lcm_size: int | None
    should_split_heads: bool
    extra_config: Mapping[str, object] | None


def engine_words(config: Config, server: object | None, version: str, identity: str = "") -> Words:
    """The words that name the model as this engine runs it. server: SGLang's arguments, None where
    it has none. identity: as in PoolSettings.

    Raises BadArgumentError when SGLang names no model, UnsupportedError for LongRoPE.
    """
    path = str(getattr(server, "model_path", None) or config.model_name or "")
    if not path:
        raise BadArgumentError(
            "cxlkv: SGLang does not say which model this is, so another's pages could be found: "
            "give --model-path"
        )
    if has_rope(path, "longrope"):
        raise UnsupportedError(
            f"cxlkv: {path} has LongRoPE, and SGLang takes its factors by the longest text of a "
            "batch: K of one text differs from run to run. Leave out --hicache-storage-backend"
        )
    is_random = "dummy" in str(getattr(server, "load_format", None))
    return {
        "engine": "sglang",
        "version": version,
        **model_words(path, _revision(server, "revision"), identity),
        "draft": _draft_words(server),
        "server": {name: str(getattr(server, name, None)) for name in OF_THE_SERVER},
        "random": str(getattr(server, "random_seed", None)) if is_random else None,
        "tag": (config.extra_config or {}).get("extra_backend_tag"),
    }


def _revision(server: object | None, name: str) -> str | None:
    found = getattr(server, name, None)
    return None if found is None else str(found)


def _draft_words(server: object | None) -> Words | None:
    draft = getattr(server, "speculative_draft_model_path", None)
    if not draft:
        return None
    return model_words(str(draft), _revision(server, "speculative_draft_model_revision"))


def are_identified(engine: Words) -> bool:
    """Whether something says which weights an engine has, its draft model's too."""
    models = [engine, engine["draft"]] if isinstance(engine["draft"], dict) else [engine]
    return engine["random"] is not None or all(one["weights"] is not None for one in models)


class Shards:
    """Which part of each page this rank has. A page of it is one object, or, with split heads, one
    for each rank of an engine that has as many as `count`.

    count: of all ranks; numbers: this rank's own; sharing_ranks: that put objects of their own into
    one pool, for each page of text. Raises UnsupportedError where ranks have parts of other kinds,
    and where SGLang has the first rank alone store what differs by rank.
    """

    def __init__(self, config: Config, kinds: set[str], parts: int):
        """kinds: names of the host pool's class and of those that it derives from."""
        if config.dcp_size > 1:
            raise UnsupportedError(
                "cxlkv: ranks that share the tokens of a page among them (decode context parallel) "
                "are not served: leave out --hicache-storage-backend"
            )
        own = not config.is_mla_model or bool(kinds & set(OF_EACH_RANK))
        if config.is_mla_model and "MHATokenToKVPoolHost" in kinds and config.tp_size > 1:
            raise UnsupportedError(
                "cxlkv: K and V of the draft model differ by rank, and with a dynamic backend "
                "SGLang lets rank 0 alone store them: use a draft model with MLA, or leave "
                "out --hicache-storage-backend"
            )
        self.count = config.tp_size * parts if own else 1
        first = config.tp_rank * parts if own else 0
        self.numbers = list(range(first, first + parts))
        self.sharing_ranks = self.count * config.attn_cp_size
        self.stage = {"pp_rank": config.pp_rank, "pp_size": config.pp_size}
        self._context = (config.attn_cp_rank, config.attn_cp_size)

    def file_words(self) -> Words:
        return {"shards": self.count, **self.stage, "contexts": self._context[1]}

    def words(self) -> Words:
        return {**self.file_words(), "context": self._context[0]}


def space_of(engine: Words, host: Words, shards: Shards, salt: str) -> bytes:
    """The namespace of the keys of one stage and tenant, in one host pool's objects; of this run
    alone, where nothing says which weights the engine has."""
    space = namespace({"engine": engine, "host": host, **shards.words(), "salt": salt})
    return space if are_identified(engine) else unshared(space)


def file_name(engine: Words, host: Words, shards: Shards) -> str:
    """File name of the pool that all ranks and engines of one model share in a folder; stages of a
    pipeline have other layers, and another file."""
    words = {"name": "pool", "engine": engine, "host": host, **shards.file_words()}
    side = "" if host["pool"] == "kv" else f"-{host['pool']}"
    return f"cxlkv-sglang-{namespace(words).hex()[:16]}{side}.pool"
