"""Opens each rank's pool, with the layout, place and size that it needs, or refuses.

Each rank of tensor and pipeline parallelism has a pool of its own, of its shard, or several, as
ranks of a larger number would have them. A path is made from the model's namespace, so that several
models and engines may use one folder: equal ones find each other's prefixes there, others another
file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from cxlkv.adapters.common import pools
from cxlkv.adapters.common.identity import model_words, rope_kinds
from cxlkv.adapters.common.keys import namespace
from cxlkv.adapters.common.settings import UNSHARED, PoolSettings
from cxlkv.adapters.vllm import states
from cxlkv.adapters.vllm.groups import BlockGroup, are_whole
from cxlkv.adapters.vllm.latents import LATENT_KIND, are_latents, check_latents, is_indexer
from cxlkv.errors import BadArgumentError, PoolMissingError, UnsupportedError
from cxlkv.layout import FP8, KVLayout, parse_bytes
from cxlkv.machine.regions import ALL, is_device, parse_place
from cxlkv.pool import CXLPool

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPES_OF_THE_CONFIG = {
    "default",
    "linear",
    "llama3",
    "yarn",
    "dynamic",
    "ntk",
    "mrope",
    "deepseek_yarn",
}
"""Kinds of rope that vLLM makes from the model's config alone (rotary_embedding/ of 0.32)."""
DRAFTERS = ("ngram", "suffix")
"""Ways to speculate that need no layers."""
AS_COMPUTED = ("auto", "bfloat16", "float16", "half", "float32", "float")
"""Words of --kv-cache-dtype for K and V that are numbers as a model makes them."""
FP8_CACHES = ("fp8", "fp8_e4m3")
PLAIN_KINDS = (
    *("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"),
    *("RequestRowSpec", LATENT_KIND, states.KIND),
)
"""Kinds of layers with K and V of each token, with its latent, or with states."""
WITHOUT_US = "start vLLM without --kv-transfer-config"
ENGINES_FORM = 'leave out "attention" in kv_connector_extra_config'
"""What serves a model whose attention the pool cannot compute."""


@dataclass(frozen=True)
class Ranks:
    """Ranks of one engine: (tensor-parallel size, pipeline-parallel size), and which one this
    is. copies: so many tensor-parallel ranks, side by side, keep the same and have one pool.
    split: so many pools share a rank's kv heads."""

    tensor: int = 1
    pipeline: int = 1
    rank: int = 0  # pipeline rank * tensor + tensor-parallel rank
    copies: int = 1
    split: int = 1

    @property
    def count(self) -> int:
        return self.tensor * self.pipeline

    @property
    def shards(self) -> int:
        """Pools of a pipeline stage."""
        return self.tensor // self.copies * self.split

    @property
    def pools(self) -> int:
        return self.shards * self.pipeline

    @property
    def own(self) -> range:
        """Numbers of this rank's pools."""
        first = self.rank // self.copies * self.split
        return range(first, first + self.split)

    def shard(self, number: int) -> tuple[int, int, int, int]:
        """What the pool of this number keeps, as KVLayout has it."""
        return (number % self.shards, self.shards, number // self.shards, self.pipeline)

    @property
    def saves(self) -> bool:
        """Whether this one does, for those that keep the same."""
        return self.rank % self.copies == 0


def pool_path(where: str, words: Mapping[str, object], ranks: Ranks, number: int) -> str:
    """Where the pool of this number lies, for a place that the user named.

    A folder gets a name of the model's; a file's name gets the number, when there are several.
    """
    shard = f"{number}of{ranks.pools}"
    name = namespace({"name": "pool", **words}).hex()[:16]
    path = pools.path_for(where, f"cxlkv-vllm-{name}-{shard}.pool", str(words.get("model", "")))
    if path != where or ranks.pools == 1:
        return path
    place = parse_place(where).path
    if is_device(str(place)) or where.startswith("dax:"):
        raise UnsupportedError(
            f"{where}: {ranks.pools} shards need a pool each, and a device holds one: make a file "
            "system on it, or give its NUMA node and a folder, like numa:1:/dev/shm/"
        )
    return f"{where}.{shard}"


def make_or_open(
    path: str,
    layout: KVLayout,
    capacity: str | int | None,
    ranks: Ranks,
    wanted_tokens: int,
    *,
    sketch: bool | None = False,
    shared: PoolSettings = UNSHARED,
) -> CXLPool:
    """One of this rank's pools; says where it is and what it holds. Raises GeometryError for
    another's.

    wanted_tokens: of the longest request; a pool that cannot hold one is worth a warning.
    """
    own = capacity if capacity in (None, ALL) else parse_bytes(capacity) // ranks.pools
    pool, made = pools.make_or_open(
        CXLPool, path, layout, own, parts=ranks.pools, sketch=sketch, shared=shared
    )
    shard, shards, stage, _ = layout.shard
    number = stage * shards + shard
    found = pools.measure(pool.admin.overview(), made, tokens_of(pool), number, ranks.pools)
    pools.say(found, wanted_tokens)
    pools.bring_in(pool, shared.huge)  # else the first texts that are saved pay for it
    return pool


def open_all(paths: Sequence[str], shared: PoolSettings = UNSHARED) -> list[CXLPool]:
    """All ranks' pools, for the scheduler, as the host that the workers are, which have made them
    before."""
    found: list[CXLPool] = []
    try:
        for path in paths:
            found.append(open_one(path, shared))
    except PoolMissingError as error:
        for pool in found:
            pool.close()
        raise PoolMissingError(
            f"{error}. The workers make the pools, on their own machine: ranks on several machines "
            "are not served yet"
        ) from error
    return found


def open_one(path: str, shared: PoolSettings) -> CXLPool:
    return cast("CXLPool", pools.open_shared(path, shared, threads=1))


def tokens_of(pool: CXLPool) -> int:
    """Tokens that a pool has room for."""
    geometry = pool.pages.geometry
    return geometry["page_count"] // geometry["part_count"] * pool.layout.page_tokens


# ---- what the engine says of itself ----


def ranks_of(
    vllm_config: object, specs: Sequence[object], rank: int = 0, shards: int | None = None
) -> Ranks:
    """specs: of the layers. shards: as in Settings. Raises BadArgumentError for shards that cannot
    be, UnsupportedError for parallelism that splits a request's tokens."""
    parallel = _of(vllm_config, "parallel_config")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(str(getattr(parallel, name, 1))) > 1:
            raise UnsupportedError(f"cxlkv does not serve {name} > 1 yet: leave it out")
    tensor = _number(parallel, "tensor_parallel_size")
    pipeline = _number(parallel, "pipeline_parallel_size")
    copies = _copies(vllm_config, specs, tensor)
    split = 1 if shards is None else _split(vllm_config, specs, tensor // copies, shards)
    return Ranks(tensor, pipeline, rank % (tensor * pipeline), copies, split)


def _split(vllm_config: object, specs: Sequence[object], ranks: int, shards: int) -> int:
    """Pools of each of so many ranks that keep different heads, where `shards` have all heads."""
    split, rest = divmod(shards, ranks)
    heads = {int(getattr(spec, "num_kv_heads", 0)) for spec in specs}  # of a rank
    if rest or (split > 1 and any(count % split for count in heads)):
        of_layers = " or ".join(str(count * ranks) for count in sorted(heads))
        raise BadArgumentError(
            f'"shards": {shards}: it must be a multiple of the {ranks} ranks that keep different '
            f"kv heads, and divide the {of_layers} kv heads of a layer: leave it out, or give such "
            "a number"
        )
    if split == 1:
        return 1
    if any(not hasattr(spec, "num_kv_heads") for spec in specs):
        raise UnsupportedError(f'cxlkv: "shards": {shards} with states is not served: leave it out')
    if drafts_with_layers(vllm_config):
        raise UnsupportedError(
            f'cxlkv: "shards": {shards} with a drafter that has layers is not served: leave it out'
        )
    return split


def _copies(vllm_config: object, specs: Sequence[object], tensor: int) -> int:
    """How many tensor-parallel ranks, side by side, keep the same: all of latents, and of fewer kv
    heads than ranks those that have one head. Layers of another number of heads share nothing."""
    if are_latents(specs):
        return tensor
    arch = getattr(_of(vllm_config, "model_config"), "model_arch_config", None)
    unlike = getattr(arch, "per_layer_overrides", None) or getattr(
        vllm_config, "speculative_config", None
    )
    if arch is None or unlike or {getattr(one, "num_kv_heads", None) for one in specs} != {1}:
        return 1
    return max(1, tensor // _number(arch, "total_num_kv_heads"))


def _of(value: object, name: str) -> object:
    return getattr(value, name)


def _number(value: object, name: str) -> int:
    return int(str(getattr(value, name)))


def check_groups(kinds: Sequence[tuple[str, object]], in_pool: bool = False) -> None:
    """kinds: (class name, the spec) of layers of each group; raises UnsupportedError by name."""
    names = [name for name, _ in kinds]
    check_latents(kinds, WITHOUT_US)
    check_kinds(names, in_pool)
    if in_pool:
        if set(names) != {"RequestRowSpec"}:
            raise UnsupportedError(
                "cxlkv: attention in the pool, but the layers do not know of it: vLLM has not "
                "loaded the plugin cxlkv, or its attention was not chosen. Install cxlkv where "
                "vLLM is; if VLLM_PLUGINS is set, name it there; on a GPU add "
                "--attention-backend CUSTOM"
            )
        return
    if set(names) <= {states.KIND}:
        has = f"states alone ({states.KIND}), " if names else ""
        raise UnsupportedError(
            f"cxlkv: this model has {has}no layer with K and V, which is not served: {WITHOUT_US}"
        )


def group_of(kind: str, spec: object) -> BlockGroup:
    """What the name of its class and the spec of a group say of its blocks."""
    size = _number(spec, "block_size")
    if kind == "SlidingWindowSpec":
        return BlockGroup(size, _number(spec, "sliding_window"))
    if kind == "ChunkedLocalAttentionSpec":
        return BlockGroup(size, _number(spec, "attention_chunk_size"), chunked=True)
    return BlockGroup(size, state=kind == states.KIND)


def layer_specs(spec: object) -> list[object]:
    """The specs of a group's layers that differ; of most groups one."""
    found: list[object] = []
    for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
        found += [one] * (one not in found)
    return found


def check_kinds(names: Sequence[str], in_pool: bool) -> None:
    """names: of the specs of layers, as the model has them; raises UnsupportedError for kinds that
    no setting of the engine turns into served ones, with what else serves such a model."""
    for name in names:
        if name not in PLAIN_KINDS:
            raise UnsupportedError(
                f"cxlkv: this model has layers ({name}) that are not served: {WITHOUT_US}"
            )
        if in_pool and name == states.KIND:
            raise UnsupportedError(
                f"cxlkv: attention in the pool has no states ({name}): {ENGINES_FORM}"
            )
        if in_pool and name == "ChunkedLocalAttentionSpec":
            raise UnsupportedError(
                f"cxlkv: attention in the pool has no attention in chunks ({name}): {ENGINES_FORM}"
            )


def kept_as(cache_dtype: str, wanted: str) -> str:
    """The encoding of a pool for an engine with this --kv-cache-dtype: fp8's bytes are kept as they
    are, else it is what the settings want. Raises UnsupportedError, BadArgumentError."""
    if cache_dtype in AS_COMPUTED:
        return wanted
    if cache_dtype not in FP8_CACHES:
        raise UnsupportedError(
            f"cxlkv: --kv-cache-dtype {cache_dtype} is not served, only {', '.join(FP8_CACHES)} "
            "and auto"
        )
    if wanted not in ("none", FP8):
        raise BadArgumentError(
            f'"encoding": "{wanted}" with --kv-cache-dtype {cache_dtype}: the pool keeps the bytes '
            "of such an engine as they are. Leave out one of the two"
        )
    return FP8


def check_caches(
    layers: Mapping[str, object], cache_dtype: str = "auto", in_pool: bool = False
) -> None:
    """layers: the engine's, by name; raises UnsupportedError for caches of several kinds or of
    another one than cache_dtype, and where attention is in the pool, for fp8 with scales."""
    kinds = sorted({str(_of(layer, "kv_cache_dtype")) for layer in layers.values()})
    if len(kinds) > 1:
        raise UnsupportedError(
            f"cxlkv: layers with caches of {' and '.join(kinds)} (kv_cache_dtype_skip_layers) are "
            "not served: give all of them one"
        )
    if kinds and kept_as(kinds[0], "none") != kept_as(cache_dtype, "none"):
        raise UnsupportedError(
            f"cxlkv: the checkpoint makes caches of {kinds[0]} where --kv-cache-dtype is "
            f"{cache_dtype}: write --kv-cache-dtype {kinds[0]}"
        )
    for name, layer in layers.items() if in_pool and kinds[0] in FP8_CACHES else ():
        scales = (_of(layer, "_k_scale_float"), _of(layer, "_v_scale_float"))
        if scales != (1.0, 1.0):
            raise UnsupportedError(
                f"cxlkv: {name} has calibrated scales of fp8, {scales[0]} of K and {scales[1]} of "
                'V, and attention in the pool has none: write "attention": "engine", which hands '
                "bytes over as they are, or use a checkpoint without scales"
            )


def hash_concern(algorithm: str, environment: Mapping[str, str]) -> str | None:
    """Block hashes that differ from process to process find nobody's prefixes."""
    if "xxhash" not in algorithm or environment.get("PYTHONHASHSEED"):
        return None
    return (
        f"cxlkv: --prefix-caching-hash-algo {algorithm} begins at random in each process, so no "
        "other engine, and not this one after a restart, will find its prefixes: set "
        "PYTHONHASHSEED to the same number everywhere, or use sha256"
    )


def words_of(
    vllm_config: object,
    kinds: Sequence[tuple[str, object]],
    packing: str,
    encoding: str = "none",
    identity: str = "",
    shards: int | None = None,
) -> dict[str, object]:
    """Everything that makes K and V what they are, but the salt: see keys.namespace(). kinds: as in
    check_groups(); shards: as in Settings.

    Read from files and settings, never from the engine's own config, which models may change while
    they are loaded: scheduler and workers must find the same words.
    """
    model, cache = _of(vllm_config, "model_config"), _of(vllm_config, "cache_config")
    load = _of(_of(vllm_config, "load_config"), "load_format")
    # Object storage: vLLM has a folder with its descriptions only.
    source = str(getattr(model, "model_weights", "") or _of(model, "model"))
    revision = cast("str | None", _of(model, "revision"))
    given, kinds = kinds, [one for one in kinds if one[0] != states.KIND]
    ranks, spec = ranks_of(vllm_config, [one for _, one in given], 0, shards), kinds[0][1]
    # Random weights differ from one number of ranks to another.
    is_alone = ranks.copies == ranks.split == 1
    seed = str(_of(model, "seed")) + ("" if is_alone else f" of {ranks.tensor} ranks")
    groups = sorted({_group_words(*kind, ranks.split) for kind in kinds}, key=str)
    if len(kinds) == 1 and are_whole([group_of(*kinds[0])]) and not is_indexer(spec):
        groups = []
    return {
        "engine": "vllm",
        **model_words(source, revision, identity),
        "random": seed if "dummy" in str(load) else None,
        "dtype": str(_of(model, "dtype")),
        "quantization": str(_of(model, "quantization")),
        "cache_dtype": str(_of(cache, "cache_dtype")),
        "hash": str(_of(cache, "prefix_caching_hash_algo")),
        "overrides": _overrides(getattr(model, "hf_overrides", None)),
        "windows": not getattr(model, "disable_sliding_window", False),
        "processor": getattr(model, "mm_processor_kwargs", None),
        "length": _length(model),
        "page_tokens": _number(spec, "block_size"),
        "heads": _number(spec, "num_kv_heads") // ranks.split,
        "head_dim": _number(spec, "head_size"),
        "shards": (ranks.shards, ranks.pipeline),
        "packing": packing,
        "encoding": encoding,
        # These only where they are, or keys would not be what they were without them.
        **({"groups": groups} if groups else {}),
        **states.words_of(given, cache),
        **_drafter_words(vllm_config),
    }


def drafts_with_layers(vllm_config: object) -> bool:
    said = getattr(vllm_config, "speculative_config", None)
    return said is not None and getattr(said, "method", None) not in DRAFTERS


def _drafter_words(vllm_config: object) -> dict[str, object]:
    """Words of the model that drafts, where it has layers: these are in the pool, too."""
    if not drafts_with_layers(vllm_config):
        return {}
    said = _of(vllm_config, "speculative_config")
    model, ranks = getattr(said, "draft_model_config", None), _of(said, "draft_parallel_config")
    if model is None:
        return {}
    words = {
        **model_words(str(model.model), cast("str | None", model.revision)),
        "method": str(_of(said, "method")),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "shards": _number(ranks, "tensor_parallel_size"),
    }
    return {"drafter": words}


def _group_words(kind: str, spec: object, split: int) -> tuple[object, ...]:
    group = group_of(kind, spec)
    shape = (_number(spec, "num_kv_heads") // split, _number(spec, "head_size"))
    indexer = ("indexer",) if is_indexer(spec) else ()
    return (group.block_tokens, group.window, group.chunked, *shape, *indexer)


def are_identified(words: Mapping[str, object]) -> bool:
    """Whether something says which weights an engine has; else it shares nothing."""
    drafter = cast("dict[str, object]", words.get("drafter", words))
    if words["random"] is None and drafter["weights"] is None:
        return False
    return words["weights"] is not None or words["random"] is not None


def _overrides(given: object) -> object:
    """What hf_overrides change in the model's config; a user's function is named by its code, and
    the code that it calls is not seen."""
    if not callable(given):
        return given or None
    code = getattr(given, "__code__", None)
    name = f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', type(given))}"
    return (name, None if code is None else (code.co_code.hex(), repr(code.co_consts)))


def _length(model: object) -> object:
    """What of max_model_len is in K: with LongRoPE, vLLM takes the long factors for all texts of an
    engine that may have long ones. No other rope of it reads this number."""
    config = cast("PretrainedConfig", _of(model, "hf_text_config")).to_dict()
    kinds = set(rope_kinds(config))
    if kinds <= ROPES_OF_THE_CONFIG:
        return None
    longest = int(str(_of(model, "max_model_len")))
    short = config.get("original_max_position_embeddings")
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        short = rope.get("original_max_position_embeddings", short)
    if kinds - ROPES_OF_THE_CONFIG == {"longrope"} and isinstance(short, int):
        return "long" if longest > short else "short"
    return longest
