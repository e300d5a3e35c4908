"""Tokens chosen by the code of those who published a state of the sequence, and by ours beside it.

Each function says which code that is, and what ours is given to choose alike. Kernels that stand
between are written out: sums, gathers, a softmax.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cxlkv.errors import BadArgumentError
from cxlkv.ndp import choosers
from cxlkv.ndp.choosers import Arrays, Choice, Question
from cxlkv.ndp.engine import VirtualRows
from cxlkv.ndp.methods import clusters, loops, sampling
from cxlkv.ndp.methods.clusters import Clustered, Clusters, Retro
from cxlkv.ndp.scorers import Floats
from tests.authors.asked import FORCED, Asked
from tests.authors.checkouts import Checkouts
from tests.authors.theirs import Torch, sim_cache

CLUSTERKV, RETROINFER = "sjtu-zhao-lab/ClusterKV", "microsoft/RetrievalAttention"
SPARQ = "graphcore-research/llm-inference-research"
HUB, IN_HUB = "xAlg-ai/sparse-attention-hub", "sparse_attention_hub/sparse_attention/"
MASKERS = IN_HUB + "research_attention/maskers/sampling/implementations/"


@dataclass(frozen=True)
class Sides:
    """What ours and theirs choose, log-weights of each kv head or each query head. output
    [q_heads, dim]: of their code, where it has one."""

    ours: Choice
    theirs: Choice
    output: Tensor | None = None


def choice(
    name: str,
    asked: Asked,
    most: int,
    states: Sequence[Arrays] | None = None,
    free: tuple[int, int] | None = None,
) -> Choice:
    """Choice of a chooser of ours: `most` of the tokens [first, last) of `free`; others are in.
    states: None makes them of the keys.
    """
    chooser = choosers.of(name)
    assert chooser
    made = list(states or [chooser.state(asked.keys.numpy(), asked.values.numpy())])
    tokens = asked.keys.shape[1]
    first, last = free or (0, tokens)
    question = Question(
        queries=np.ascontiguousarray(asked.queries.numpy()),
        scale=asked.scale,
        tokens=tokens,
        first=first,
        last=last,
        most=most,
        seed=asked.seed,
    )
    found = chooser.choose(made, question)
    found.log_weights[:, :first] = found.log_weights[:, last:] = 0
    return found


def joined(every: Sequence[Choice]) -> Choice:
    """Join states of one kv head each."""
    rows = [(one.rows.k, one.rows.v, one.rows.log_counts) for one in every if one.rows]
    whole = VirtualRows(*map(np.concatenate, zip(*rows, strict=True))) if rows else None
    return Choice(np.concatenate([one.log_weights for one in every]), whole, 0)


def only(chosen: Tensor) -> Floats:
    """Log-weights of tokens that are chosen [lists, tokens]."""
    found: Floats = torch.zeros(chosen.shape).masked_fill(~chosen, -torch.inf).numpy()
    return found


# ---- clusters ----


@dataclass(frozen=True)
class Cells:
    """ClusterKV's state: centroids [1, kv_heads, n, dim], tokens [kv_heads, tokens] by their
    clusters, sizes [kv_heads, n].
    """

    centroids: Tensor
    tokens: Tensor
    sizes: Tensor

    @property
    def of_tokens(self) -> Tensor:
        """[kv_heads, tokens]"""
        each = [torch.arange(len(one)).repeat_interleave(one) for one in self.sizes]
        return torch.zeros_like(self.tokens).scatter_(1, self.tokens, torch.stack(each))


def cells(folder: Checkouts, asked: Asked, first: Tensor) -> Cells:
    """build_cluster() of clusterkv_utils, begun with the keys `first`; its kernels take a mean and
    count. As many rounds as ours has. Tokens of a cluster are in their order, as the accuracy code
    has them; its sort leaves that open."""
    heads, tokens, _ = asked.keys.shape
    kept: list[Tensor] = []

    def means(keys: Tensor, labels: Tensor, centroids: Tensor, *_: object) -> None:
        for head in range(heads):
            sums = torch.zeros_like(centroids[head]).index_add_(0, labels[head], keys[head])
            sizes = labels[head].bincount(minlength=len(sums))[:, None]
            centroids[head] = torch.where(sizes > 0, sums / sizes, centroids[head])

    def count(labels: Tensor, sizes: Tensor, *_: object) -> None:
        for head in range(heads):
            sizes[head] = labels[head].bincount(minlength=sizes.shape[1])

    theirs = folder.pieces(
        CLUSTERKV,
        "clusterkv/clusterkv_utils/__init__.py",
        ["build_cluster"],
        torch=Torch(randint=lambda *_: first, sort=partial(torch.sort, stable=True)),
        _kernels=SimpleNamespace(update_centroids=means, count_labels=count),
    )
    controller = SimpleNamespace(
        niter=clusters.ROUNDS - 1,
        max_seq_len=tokens,
        get_labels=lambda length: torch.zeros(heads, length, dtype=torch.int64),
        update_metadata=lambda layer, *found: kept.extend(found),
    )
    stream = SimpleNamespace(cuda_stream=None)
    keys = asked.keys.transpose(0, 1)
    theirs.build_cluster(controller, 0, keys, 0, len(first), stream)
    centroids, sizes, _, order = kept
    return Cells(centroids[None], order, sizes)


def clusterkv_choice(folder: Checkouts, asked: Asked, made: Cells, most: int) -> Choice:
    """cluster_attn_out() of the accuracy code, for each query head."""
    file, function = "accuracy/cluster_attention.py", "cluster_attn_out"
    group = asked.queries.shape[1]
    every = [one.repeat_interleave(group, dim=0) for one in (made.sizes, made.tokens)]
    sizes, tokens = every
    ran = folder.run(
        CLUSTERKV,
        file,
        function,
        ("c_dist", "sel_cluster_key_start"),
        query_states=asked.rows,
        key_centroids=made.centroids.repeat_interleave(group, dim=1),
        cluster_key_size=sizes,
        cluster_key_size_ps=sizes.cumsum(-1),
        token_budget=most,
        sink=0,
    )
    chosen = torch.zeros(tokens.shape, dtype=torch.bool)
    for head in range(len(tokens)):
        own = folder.run(
            CLUSTERKV,
            file,
            function,
            ("kv_h", "head_sel_key_indices 2"),
            h=head,
            num_key_value_groups=1,
            num_need_clusters=ran.num_need_clusters,
            cluster_key_indices=tokens,
            sel_cluster_key_start=ran.sel_cluster_key_start,
            sel_cluster_key_end=ran.sel_cluster_key_end,
        )
        chosen[head, own.head_sel_key_indices[:most]] = True
    return Choice(only(chosen), None, 0)


def places(asked: Asked, count: int) -> Tensor:
    """Places of the keys that ours begins with."""
    tokens = asked.keys.shape[1]
    return ((torch.arange(count) + 0.5) * tokens / count).long()


def clusters_given(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """Ours is given their clusters."""
    count = -(-asked.keys.shape[1] // Clusters.cluster_tokens)
    made = cells(folder, asked, places(asked, count))
    state = Clustered(
        made.of_tokens.numpy().astype(np.uint16),
        made.centroids[0].numpy(),
        np.zeros((*made.sizes.shape, 0), np.float32),
    )
    most = math.ceil(share * asked.keys.shape[1])
    right = clusterkv_choice(folder, asked, made, most)
    return Sides(choice("clusters", asked, most, [state]), right)


def clusters_same_start(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """Ours makes its own, of the same keys to begin with."""
    count = -(-asked.keys.shape[1] // Clusters.cluster_tokens)
    most = math.ceil(share * asked.keys.shape[1])
    made = cells(folder, asked, places(asked, count))
    right = clusterkv_choice(folder, asked, made, most)
    return Sides(choice("clusters", asked, most), right)


def clusters_own(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """Theirs begins with keys that are drawn, as its code does."""
    tokens = asked.keys.shape[1]
    draw = torch.Generator().manual_seed(asked.seed)
    first = torch.randint(0, tokens, (-(-tokens // Clusters.cluster_tokens),), generator=draw)
    most = math.ceil(share * tokens)
    right = clusterkv_choice(folder, asked, cells(folder, asked, first), most)
    return Sides(choice("clusters", asked, most), right)


# ---- clusters, and means of others ----


@dataclass(frozen=True)
class Segments:
    """RetroInfer's state: centroids and sums of values [kv_heads, n, dim], the cluster of each
    token [kv_heads, tokens], sizes [kv_heads, n].
    """

    centroids: Tensor
    values: Tensor
    of_tokens: Tensor
    sizes: Tensor


@lru_cache(maxsize=1)  # two checks ask, and the interpreter takes half a minute
def segments(folder: Checkouts, asked: Asked) -> Segments:
    """segment_k_means(), whose kernels Triton's interpreter runs, of keys less their mean."""
    heads, tokens, _ = asked.keys.shape
    count = tokens // Retro.cluster_tokens
    mean = asked.keys.mean(1, keepdim=True)
    theirs = triton_module(folder, RETROINFER, "cache_hub/kmeans.py")
    with np.errstate(invalid="ignore"):  # the mean of an empty cluster, which is not stored
        found = theirs.segment_k_means(asked.keys - mean, asked.values, count, clusters.ROUNDS)
    centroids, values, members, sizes = cast("tuple[Tensor, ...]", found)
    of_tokens = torch.zeros(heads, tokens, dtype=torch.int64)
    for head in range(heads):
        for cell, size in enumerate(sizes[head].tolist()):
            of_tokens[head, members[head, cell, :size].long()] = cell
    return Segments(centroids + mean, values, of_tokens, sizes.long())


def triton_module(folder: Checkouts, repository: str, file: str) -> ModuleType:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise BadArgumentError(
            "kernels in Triton are run by its interpreter: set TRITON_INTERPRET=1"
        )
    return folder.module(repository, file)


def retroinfer_choice(folder: Checkouts, asked: Asked, made: Segments, share: float) -> Choice:
    """sparse_attention() of retroinfer_cache: the clusters that it retrieves, and those that it
    estimates. Its softmax, its gathers and its attention are kernels."""
    heads, group, dim = asked.queries.shape
    count = made.sizes.shape[1]
    wholly = max(round(share * count), 1)
    estimated = min(round(clusters.ESTIMATED * count), count - wholly)

    def softmax(queries: Tensor, centroids: Tensor, *others: object) -> None:
        products = queries.reshape(heads, group, dim) @ centroids.mT
        out = others[3]
        assert isinstance(out, Tensor)
        out.copy_((asked.scale * products).softmax(-1))

    whole = retroinfer_namespace(made, heads, group, wholly, estimated)
    theirs = folder.pieces(
        RETROINFER,
        "cache_hub/retroinfer_cache.py",
        ["retroinfer_cache.sparse_attention"],
        batch_gemm_softmax=softmax,
        gather_copy_vectors=lambda *_: None,
        gather_copy_and_concat=lambda *_: None,
        gather_copy_and_scatter=lambda *_: None,
        weighted_flash_decoding=attention_of_nothing(heads * group * dim),
    )
    whole.head_dim = dim
    theirs.sparse_attention(whole, asked.rows.transpose(1, 2), 0, 0)
    order = whole.cI
    retrieved = torch.zeros(heads, count, dtype=torch.bool)
    retrieved.scatter_(1, order[:, :wholly], True)
    rest = order[:, wholly:, None].expand(-1, -1, dim)
    sizes = made.sizes.float().gather(1, order[:, wholly:])
    rows = VirtualRows(
        made.centroids.gather(1, rest).numpy(),
        (made.values.gather(1, rest) / sizes[..., None]).numpy(),
        sizes.log().numpy(),
    )
    return Choice(only(retrieved.gather(1, made.of_tokens)), rows, 0)


def attention_of_nothing(size: int) -> object:
    def attend(*_: object, return_softmax_lse: bool, **more: object) -> object:
        out = torch.zeros(size)
        return (out, out) if return_softmax_lse else out

    return attend


def retroinfer_namespace(
    made: Segments, heads: int, group: int, wholly: int, estimated: int
) -> SimpleNamespace:
    """What sparse_attention() reads of the cache, and where it writes."""
    count = made.sizes.shape[1]
    nothing = SimpleNamespace(batch_access=lambda: None, sync=lambda: None)
    names = (
        *("gemm_o", "norm", "sum", "es_centroids", "es_value_sum", "es_cluster_size"),
        *("execution_buffer_keys", "execution_buffer_values", "valid_lengths", "static_stride"),
        *("list_stride", "cache_stride", "execution_stride", "buffer_size"),
    )
    lists = (
        *("value_sum", "cluster_size", "steady_zone_keys", "steady_zone_values", "list_keys"),
        *("list_values", "cache_keys", "cache_values", "miss_unit_idices", "miss_unit_sizes"),
        *("miss_unit_sizes_cumsum", "miss_num_units", "hit_unit_idices", "hit_unit_sizes"),
        *("hit_unit_sizes_cumsum", "hit_num_units", "update_buffer_indices"),
        *("update_unit_sizes", "update_cache_indices", "update_num_units"),
    )
    dim = made.centroids.shape[2]
    most = wholly + estimated
    return SimpleNamespace(
        **dict.fromkeys(names),
        **{name: [None] for name in lists},
        centroids=[made.centroids],
        centroids_mask=[made.sizes == 0],
        softmax_o=torch.empty(heads, group, count),
        dist=torch.empty(heads, count),
        cV=torch.empty(heads, most),
        cI=torch.empty(heads, most, dtype=torch.int64),
        cluster_ids=torch.empty(heads, wholly, dtype=torch.int64),
        static_len_tensor=torch.zeros(1),
        wave_buffer=[nothing],
        batch_size=1,
        batch_groups=heads,
        group_size=group,
        num_heads=heads * group,
        n_centroids=count,
        nprobe=wholly,
        es_cluster_num=estimated,
        max_compute_cluster_num=most,
        DTYPE_MIN=torch.finfo(torch.float32).min,
        RSQRT_DIM=dim**-0.5,
    )


def of_each_head(name: str, asked: Asked, right: Choice, states: Sequence[Arrays]) -> Choice:
    """Choose as many tokens of each kv head as theirs has."""
    every = []
    for head, (theirs, state) in enumerate(zip(right.log_weights, states, strict=True)):
        most = int((theirs > -np.inf).sum())
        every.append(choice(name, asked.head(head), most, [state]))
    return joined(every)


def retro_given(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """Ours is given their clusters."""
    made = segments(folder, asked)
    right = retroinfer_choice(folder, asked, made, share)
    means = made.values / made.sizes.clamp(min=1)[..., None]
    tokens = made.of_tokens.numpy().astype(np.uint16)[:, None]
    parts = zip(tokens, made.centroids.numpy()[:, None], means.numpy()[:, None], strict=True)
    return Sides(of_each_head("retro", asked, right, [Clustered(*one) for one in parts]), right)


def retro_own(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """Ours makes its own, of the same keys to begin with, in as many rounds."""
    right = retroinfer_choice(folder, asked, segments(folder, asked), share)
    return Sides(of_each_head("retro", asked, right, states_of("retro", asked)), right)


def states_of(name: str, asked: Asked) -> list[Arrays]:
    """A state for each kv head."""
    chooser = choosers.of(name)
    assert chooser
    keys, values = asked.keys.numpy(), asked.values.numpy()
    return [chooser.state(keys[[head]], values[[head]]) for head in range(len(keys))]


# ---- samples ----


def magicpig_choice(folder: Checkouts, asked: Asked, planes: Floats, bits: int) -> Choice:
    """select_kv_cache() and update() of SimCache, for each query head. planes [dim, tables *
    bits]. The token that it keeps for a window is the mean key, which changes no mean."""
    whole = asked.alone
    mean = whole.keys.mean(1, keepdim=True)
    ran = sim_cache(folder, whole, planes, bits, mean, "attn_unselected 5")
    weights = -torch.log(ran.weight[0, :, 0] + loops.LEAST)
    drawn = weights.masked_fill(~ran.mask[0, :, 0], -torch.inf)
    return Choice(drawn.numpy(), None, 0)


def magicpig(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """The same tables, all of them: neither has a budget."""
    dim = asked.keys.shape[2]
    right = magicpig_choice(folder, asked, sampling.planes_of(1, dim), loops.BITS)
    return Sides(choice("magicpig", asked, asked.keys.shape[1]), right)


def magicpig_released(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """Theirs has its 150 tables of 10 bits, ours its own, as many as have so many tokens."""
    dim = asked.keys.shape[2]
    planes = np.random.default_rng(asked.seed).standard_normal((dim, 150 * 10)).astype(np.float32)
    right = magicpig_choice(folder, asked, planes, 10)
    return Sides(of_each_head("magicpig", asked, right, states_of("magicpig", asked)), right)


def magicpig_hub(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """MagicPig of the sparse-attention hub, with 75 tables of 8 bits and its own projections."""
    theirs = folder.pieces(HUB, MASKERS + "magic_pig.py", ["MagicPig"], SamplingMasker=Masker)
    config = SimpleNamespace(
        lsh_l=loops.TABLES, lsh_k=loops.BITS, center=True, packing="int64", seed=asked.seed
    )
    masker, meta = theirs.MagicPig(config), dict[str, object]()
    both = masker._center_KQ(asked.repeated, asked.rows, meta, 0)
    keys, queries = masker._transform_for_mips(*both)
    chances = masker._compute_probabilities(keys, queries)
    hits = masker._compute_lsh_matches(keys, queries, meta, 0)
    weights = -(chances.log().masked_fill(hits == 0, torch.inf))[0, :, 0]
    right = Choice(weights.numpy(), None, 0)
    return Sides(of_each_head("magicpig", asked, right, states_of("magicpig", asked)), right)


class Masker:
    """What maskers of the hub derive from."""

    def __init__(self, config: object) -> None:
        self.config = config

    def _extract_tensor_dimensions(self, keys: Tensor, queries: Tensor) -> SimpleNamespace:
        return SimpleNamespace(
            batch_size=queries.shape[0],
            num_heads=queries.shape[1],
            seq_len_queries=queries.shape[2],
            seq_len_keys=keys.shape[2],
        )


@dataclass(frozen=True)
class AdaptiveSampling:
    """AdaptiveSamplingMasker of the sparse-attention hub, by vAttention's authors, with our bounds
    and base."""

    theirs: SimpleNamespace
    masks: SimpleNamespace

    @classmethod
    def of(cls, folder: Checkouts) -> AdaptiveSampling:
        masks = folder.pieces(HUB, IN_HUB + "utils/mask.py", ["Mask"], warnings=warnings)
        sums = folder.pieces(
            HUB,
            IN_HUB + "utils/mask_attention_utils.py",
            ["apply_inv_mask_sum", "create_sampling_mask_with_per_head_budget"],
            Mask=masks.Mask,
        )
        ours = folder.pieces(
            HUB,
            MASKERS + "adaptive_sampling.py",
            ["AdaptiveSamplingMasker"],
            SamplingMasker=Masker,
            Mask=masks.Mask,
            norm=SimpleNamespace(ppf=NormalDist().inv_cdf),
            _get_num_key_value_groups=lambda queries, keys: 1,
            repeat_kv=lambda keys, groups: keys,
            **vars(sums),
        )
        config = SimpleNamespace(
            base_rate_sampling=sampling.BASE,
            epsilon=sampling.EPSILON,
            delta=sampling.DELTA,
            init_offset=FORCED,
            local_offset=0,
        )
        return cls(ours.AdaptiveSamplingMasker(config), masks)

    def size(self, logits: Tensor, chosen: int, rest: int) -> Tensor:
        """_compute_adaptive_budget() of what sample_size() gets, for each query."""
        weights = (logits.double() - logits.double().amax(1, keepdim=True)).exp()
        drawn = weights[:, chosen:]
        whole = weights[:, :chosen].sum(1) + rest * drawn.mean(1)
        found: Tensor = self.theirs._compute_adaptive_budget(drawn.std(1), whole, rest)
        return found

    def draw(self, asked: Asked, best: Tensor) -> Choice:
        """add_mask() of tokens `best` [q_heads, tokens] that are in already, by torch's seed."""
        shape = (1, len(best), 1, best.shape[1])
        before = self.masks.Mask.create_mask_from_dense_mask(
            shape=shape, mask=best.float().reshape(shape), dtype=torch.float32
        )
        whole = asked.alone
        keys, values = whole.keys[None], whole.values[None]
        made = self.theirs.add_mask(
            keys, asked.rows, values, None, asked.scale, 0.0, {}, previous_mask=before
        )
        chances = made.get_dense_mask()[0, :, 0]
        return Choice((-chances.log()).masked_fill(chances == 0, -torch.inf).numpy(), None, 0)


def vattention(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """Theirs has the best tokens of ours, and draws as many as its bounds ask for."""
    most = math.ceil(share * asked.keys.shape[1])
    ours = choice("vattention", asked, most, free=(FORCED, asked.keys.shape[1]))
    best = torch.from_numpy(ours.log_weights == 0)
    torch.manual_seed(asked.seed)
    return Sides(ours, AdaptiveSampling.of(folder).draw(asked, best))


# ---- the mean value ----


def sparq_mean(folder: Checkouts, asked: Asked, share: float) -> Sides:
    """AnnAttention with the mean value in place of the rest; the newest 16 tokens are in by force,
    as its code has them."""
    file, tokens = "llminference/methods/ann_attention.py", asked.keys.shape[1]
    heads, group, dim = asked.queries.shape
    index = folder.pieces(
        SPARQ, "llminference/methods/sparse_attention.py", ["score_to_mask", "causal_index"]
    )
    names = ["gather", "LowRank", "SparseQ", "AnnAttention"]
    more = {"cast": lambda kind, value: value, "partial": partial, "sparse_attention": index}
    theirs = folder.pieces(SPARQ, file, names, **more)
    score, most = theirs.SparseQ.Settings(), math.ceil(share * tokens)
    score.rank = -(-dim // sampling.PART)
    settings = SimpleNamespace(
        k=most - 1, local_k=FORCED - 1, reallocate_to_mean_value=True, score=score
    )
    ann = theirs.AnnAttention(settings, heads, dim)
    ann.debug_indices = []
    mask = torch.zeros(1, heads * group, 1, tokens)
    output, _ = ann(asked.rows, asked.keys[None], asked.values[None], mask)
    chosen = torch.zeros(heads, tokens, dtype=torch.bool)
    chosen.scatter_(1, ann.debug_indices[0][0, :, 0, 0], True)
    ours = choice("sparq_mean", asked, most - FORCED, free=(0, tokens - FORCED))
    return Sides(ours, Choice(only(chosen), None, 0), output[0, :, 0])
