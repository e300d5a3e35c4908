"""Pages scored by the code of those who published a method; each function says which.

What is no part of scoring is stood in for: CUDA streams, loggers, and clusterings of GPU libraries
by scikit-learn's. Sums that are CUDA or Triton kernels of theirs are written out here, and the
docstrings say so. Scores are those of logits, scale * q.k, where theirs leave the scale out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from cxlkv.ndp.methods import codebooks, lsh, shadow, sparq
from cxlkv.ndp.scorers import Floats
from tests.authors.asked import Answer, Asked
from tests.authors.checkouts import Checkouts, call

PAGE = 16
MAGICPIG = "Infini-AI-Lab/MagicPIG"


def quest(folder: Checkouts, asked: Asked) -> Answer:
    """forward() of evaluation/quest_attention.py, from the queries' signs to the bound."""
    ran = folder.run(
        "mit-han-lab/Quest",
        "evaluation/quest_attention.py",
        "forward",
        ("sign", "quantized_weight"),
        query_states=asked.rows,
        key_states=asked.repeated,
        self=SimpleNamespace(chunk_size=PAGE),
    )
    return Answer(asked.scale * ran.quantized_weight[0, :, 0, ::PAGE])  # a bound is its tokens'


def hub_quest(folder: Checkouts, asked: Asked) -> Answer:
    """compute_page_min_max() and quest_page_scores()."""
    theirs = folder.pieces(
        "xAlg-ai/sparse-attention-hub",
        "sparse_attention_hub/sparse_attention/research_attention/maskers/fixed/implementations/"
        "utils/quest_utils.py",
        ["compute_page_min_max", "quest_page_scores"],
    )
    pages = asked.keys.shape[1] // PAGE
    least, most = theirs.compute_page_min_max(asked.repeated, PAGE, pages)
    return Answer(asked.scale * theirs.quest_page_scores(asked.rows, least, most)[0, :, 0])


def arkvale(folder: Checkouts, asked: Asked) -> Answer:
    """_summarize_keys(); the sum over channels is a CUDA kernel, and written out."""
    theirs = folder.pieces(
        "pku-liang/ArkVale", "source/arkvale/infer_state.py", ["InferState._summarize_keys"]
    )
    keys = asked.alone.pages(PAGE).permute(1, 2, 0, 3)[None]
    own = SimpleNamespace(head_dim=keys.shape[-1])
    most, least = theirs._summarize_keys(own, keys)  # [1, pages, heads, dim]
    query = asked.rows[:, :, 0][:, None]
    bound = torch.maximum(query * most, query * least).sum(-1)
    return Answer(asked.scale * bound[0].T)


def arkvale_sphere(folder: Checkouts, asked: Asked) -> Answer:
    """The paper's sphere (section 5.2, equations 1 and 2): its code has none. The centre is the
    middle of the box around the keys, the radius the largest distance from it.
    """
    keys = asked.alone.pages(PAGE)
    centre = (keys.amax(2) + keys.amin(2)) / 2
    radius = (keys - centre[:, :, None]).norm(dim=-1).amax(-1)
    query = asked.rows[0]
    bound = (query * centre).sum(-1) + query.norm(dim=-1) * radius
    return Answer(asked.scale * bound)


def moba(folder: Checkouts, asked: Asked) -> Answer:
    """moba_attn_varlen_naive(), the gate before it is masked."""
    keys = asked.repeated[0].transpose(0, 1)
    ran = folder.run(
        "MoonshotAI/MoBA",
        "moba/moba_naive.py",
        "moba_attn_varlen_naive",
        ("key_gate_weight", "gate"),
        k_=keys,
        k=keys,
        q_=asked.rows[0].transpose(0, 1),
        batch_start=0,
        batch_end=len(keys),
        moba_chunk_size=PAGE,
    )
    return Answer(asked.scale * ran.gate[:, 0])


def ucm(folder: Checkouts, asked: Asked) -> Answer:
    """extract_block_repre() of ucm/sparse/esa; its C++ takes the product of all heads at once, of
    queries that start_retrieval() has averaged, and it is written out. One list for the layer."""
    theirs = folder.pieces(
        "ModelEngine-Group/unified-cache-management",
        "ucm/sparse/esa/esa.py",
        ["ReqStatePerLayer.extract_block_repre"],
    )
    blocks = asked.pages(PAGE).permute(1, 2, 0, 3)  # [blocks, size, heads, dim]
    own = SimpleNamespace(is_mla=False, v_cache=None, k_cache=blocks)
    means = call(theirs.extract_block_repre, own, torch.arange(len(blocks)))
    query = asked.queries.mean(1)
    return Answer(asked.scale * (means.flatten(1) @ query.flatten())[None])


def shadowkv(folder: Checkouts, asked: Asked) -> Answer:
    """ShadowKVCache: landmarks and outliers by prefill_kv_cache(), the rest's order by
    get_retrieval_position_ids(), with as many outliers as ours learns to have. It divides by
    sqrt(128) whatever the dimension is."""
    heads, tokens, dim = asked.keys.shape
    group, pages = asked.queries.shape[1], tokens // PAGE
    theirs = folder.pieces(
        "bytedance/ShadowKV",
        "models/kv_cache.py",
        ["ShadowKVCache"],
        torch=Torch(cuda=SimpleNamespace(Stream=lambda: None)),
    )
    config = SimpleNamespace(
        num_hidden_layers=1,
        num_key_value_heads=heads,
        num_attention_heads=heads * group,
        hidden_size=heads * group * dim,
    )
    size, kind = tokens + PAGE, torch.float32
    own = theirs.ShadowKVCache(config, 1, size, "cpu", kind, sparse_budget=PAGE, chunk_size=PAGE)
    own.outlier_chunk, own.local_chunk = math.ceil(shadow.OUTLIERS * (pages - 1)), 1
    keys = torch.cat([asked.keys, asked.keys[:, -PAGE:]], dim=1)[None]
    own.prefill_kv_cache(keys, 0, keys)
    rest = own.k_landmark_idx[0, 0]  # [heads, pages - outliers]
    scores = torch.full((heads, pages), torch.inf)
    if group == 1:
        products = torch.einsum("hpd,hd->hp", own.k_landmark[0, 0], asked.queries[:, 0])
        scores.scatter_(1, rest, asked.scale * products)
    else:  # of which only the order comes out
        own.select_sets, own.selected_chunk_idx = rest.shape[1], torch.zeros_like(rest)[None, None]
        own.get_retrieval_position_ids(0, asked.queries.reshape(1, heads * group, 1, dim))
        order = -torch.arange(float(rest.shape[1])).expand(heads, -1)
        scores.scatter_(1, own.selected_chunk_idx[0, 0], order)
    return Answer(scores)


class Torch:
    """torch, with what stands for some of its names."""

    def __init__(self, **own: object) -> None:
        vars(self).update(own)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def loki(folder: Checkouts, asked: Asked) -> Answer:
    """mask_attn_pca_topk() by the components of compute_pca(), an eighth of them. Ours is given the
    same."""
    pca = import_module("sklearn.decomposition").PCA
    count = -(-asked.keys.shape[-1] // 8)
    fit = folder.pieces(
        "hpcgroup/loki", "pca_analysis/pca.py", ["compute_pca"], PCA=pca, print=lambda *words: None
    )
    parts = []
    for head in range(len(asked.keys)):
        tensors = asked.keys[None, None]
        parts.append(torch.from_numpy(fit.compute_pca(0, head, tensors, "")[1]))
    whole = torch.stack(parts).repeat_interleave(asked.queries.shape[1], dim=0)[None]
    components = whole.transpose(2, 3)
    ran = folder.run(
        "hpcgroup/loki",
        "methods/pca_topk/utils.py",
        "mask_attn_pca_topk",
        ("key_states_pca", "attn_weights_s_hat"),
        key_states=asked.repeated,
        query_states=asked.rows,
        pca_comps_full=components,
        pca_comps=components[..., :count],
        head_dim=asked.keys.shape[-1],
        attention_mask=None,
        methods=SimpleNamespace(LOGGER=None),
    )
    learned = components[0, :: asked.queries.shape[1], :, :count].mT.flatten(1)
    return Answer(torch.log_softmax(ran.attn_weights_s_hat[0, :, 0], -1), learned.float().numpy())


def loki_own(folder: Checkouts, asked: Asked) -> Answer:
    """The same, and ours learns its own components."""
    return replace(loki(folder, asked), learned=None)


def sparq_tokens(folder: Checkouts, asked: Asked) -> Answer:
    """SparseQ, with as many channels as ours, the scores of a group's heads added up as
    AnnAttention does."""
    theirs = folder.pieces(
        "graphcore-research/llm-inference-research",
        "llminference/methods/ann_attention.py",
        ["gather", "SparseQ"],
        cast=lambda kind, value: value,
    )
    rank = -(-asked.keys.shape[-1] // sparq.PART)
    score = theirs.SparseQ(SimpleNamespace(rank=rank))
    found = call(score, asked.queries[None, :, :, None], asked.keys[None, :, None])
    total = found[0, :, :, 0].sum(1)
    return Answer(torch.log_softmax(total, -1) if asked.queries.shape[1] == 1 else total)


def pqcache(folder: Checkouts, asked: Asked) -> Answer:
    """decoding_attn_GQA_euc(), the weights by code, of codebooks that compute_kmeans_worker()
    learns from these keys: 8 of 64 words, in 10 rounds. Ours is given the same codebooks."""
    k_means = import_module("sklearn.cluster").KMeans
    heads, tokens, dim = asked.keys.shape
    spaces, words, part = codebooks.SUBSPACES, codebooks.WORDS, dim // codebooks.SUBSPACES
    centroids = torch.empty(1, heads, spaces, words, part)
    codes = torch.empty(1, heads, spaces, tokens, dtype=torch.int64)
    first = np.random.default_rng(asked.seed).choice(tokens, words, replace=False)
    for head in range(heads):
        for space in range(spaces):
            ran = folder.run(
                "HugoZHL/PQCache",
                "vq_method/retrieval_based/multi_core_compressor_v2.py",
                "compute_kmeans_worker",
                ("km", "result"),
                KMeans=k_means,
                xb_array=asked.keys[head, :, space * part : (space + 1) * part].numpy(),
                init_cent_idx=first,
                cent_cnt=words,
                max_iter=codebooks.ROUNDS,
            )
            centroids[0, head, space] = torch.from_numpy(ran.result.cluster_centers_)
            codes[0, head, space] = torch.from_numpy(ran.result.labels_)
    return pq_answer(folder, asked, centroids, codes)


def pq_answer(folder: Checkouts, asked: Asked, centroids: Tensor, codes: Tensor) -> Answer:
    heads, tokens, dim = asked.keys.shape
    spaces, part = centroids.shape[2], centroids.shape[4]
    theirs = folder.pieces(
        "HugoZHL/PQCache",
        "vq_method/retrieval_based/retrieval_based_compressor.py",
        ["repeat"],
    )
    ran = folder.run(
        "HugoZHL/PQCache",
        "vq_method/retrieval_based/pq_search.py",
        "PqBasedSearchCompressor.decoding_attn_GQA_euc",
        ("query_trans", "dummy_score 2"),
        repeat=theirs.repeat,
        query=asked.rows,
        bsz=1,
        n_heads=heads * asked.queries.shape[1],
        kv_head=heads,
        num_key_value_groups=asked.queries.shape[1],
        n_subvec_per_head=spaces,
        subvec_d=part,
        dim=dim,
        n_topk_candidate=tokens,
        self=SimpleNamespace(gpu_centroids=centroids, gpu_code_book=codes),
    )
    learned = centroids[0].flatten(1).numpy()
    if asked.queries.shape[1] == 1:
        return Answer(torch.log_softmax(asked.scale * ran.dummy_weight[0], -1), learned)
    return Answer(ran.dummy_score[0, :, 0], learned)


def pqcache_own(folder: Checkouts, asked: Asked) -> Answer:
    """The same, and ours learns its own codebooks, of the same keys."""
    return replace(pqcache(folder, asked), learned=None)


def clusterkv(folder: Checkouts, asked: Asked) -> Answer:
    """build_cluster() and the distances of cluster_attn_out(): a token has its cluster's. As many
    clusters as ours has; scikit-learn's k-means in place of pylibraft's."""
    k_means = import_module("sklearn.cluster").KMeans
    cells = codebooks.CELLS

    def fit(_: object, keys: Tensor) -> tuple[Tensor, None, None]:
        found = k_means(cells, n_init=1, max_iter=codebooks.ROUNDS, random_state=asked.seed)
        return torch.from_numpy(found.fit(keys.numpy()).cluster_centers_), None, None

    file = "accuracy/cluster_attention.py"
    theirs = folder.pieces("sjtu-zhao-lab/ClusterKV", file, ["build_cluster"], fit=fit)
    centroids, members, clusters, *_ = theirs.build_cluster(
        asked.keys[None], cells, False, None, 1, "none"
    )
    ran = folder.run(
        "sjtu-zhao-lab/ClusterKV",
        file,
        "cluster_attn_out",
        ("c_dist", "c_dist"),
        query_states=asked.rows,
        key_centroids=centroids,
    )
    of_token = torch.empty_like(members).scatter_(1, members, clusters.long())
    scores = ran.c_dist[0, :, 0].gather(1, of_token)
    scores = torch.log_softmax(asked.scale * scores, -1)
    return Answer(scores, centroids[0].flatten(1).numpy())


def sim_cache(
    folder: Checkouts, asked: Asked, planes: Floats, bits: int, window: Tensor, until: str
) -> SimpleNamespace:
    """select_kv_cache() of MagicPIG's SimCache, then the names of update() from the queries' hash
    values to `until`. planes [dim, tables * bits]; window [kv_heads, 1, dim]: the key of the token
    that it keeps beside those that it hashes."""
    heads, tokens, dim = asked.keys.shape
    file = "evaluations/RULER/pred/cache_ref.py"
    theirs = folder.pieces(MAGICPIG, file, ["SimCache.select_kv_cache"])
    names = (
        *("selected_key_cache", "selected_value_cache", "avg_key", "key_hashcode"),
        *("unselected_key_cache", "unselected_value_cache"),
    )
    own = SimpleNamespace(
        key_cache=[torch.cat([asked.keys, window], dim=1)[None]],
        value_cache=[torch.zeros(1, heads, tokens + 1, dim)],
        hash_matrix=[torch.from_numpy(planes).expand(1, heads, -1, -1)],
        K=bits,
        L=planes.shape[1] // bits,
        num_kh=heads,
        num_qh=heads,
        head_dim=dim,
        sparse=0.0,
        **{name: [] for name in names},
    )
    theirs.select_kv_cache(own, 0, 0, 1)
    return folder.run(
        MAGICPIG,
        file,
        "SimCache.update",
        ("q", until),
        query_states=asked.rows,
        layer_idx=0,
        repeat_kv=lambda codes, count: codes,
        self=own,
    )


def magicpig(
    folder: Checkouts, asked: Asked, tables: int = lsh.TABLES, bits: int = lsh.BITS
) -> Answer:
    """select_kv_cache() and update() of SimCache: in how many tables a token has the query's hash
    value, by ours' projections and of keys less their own mean. It samples those of two and more.
    """
    heads, _, dim = asked.keys.shape
    planes = np.random.default_rng(asked.seed).standard_normal((tables * bits, dim))
    matrix = planes.astype(np.float32).T.copy()
    ran = sim_cache(folder, asked, matrix, bits, asked.keys[:, -1:], "mask")
    same = (ran.q_hashcode == ran.k_hashcode).sum(-1)[0]
    assert ((same >= 2) == ran.mask[0]).all(), "their mask is of two tables and more"
    mean = ran.self.avg_key[0][0, :, 0].numpy()
    learned = np.concatenate([mean, np.tile(planes.ravel(), (heads, 1))], axis=1)
    return Answer(same.float(), learned.astype(np.float32) if tables == lsh.TABLES else None)


def magicpig_released(folder: Checkouts, asked: Asked) -> Answer:
    """The same with its 150 tables of 10 bits."""
    return magicpig(folder, asked, 150, 10)


def locks(folder: Checkouts, asked: Asked) -> Answer:
    """_write_pre() and _write_post() of rki4_build.py, and rki4_score_torch.py: keys of a page
    from 8 components in 4 bits and a mean in 8."""
    heads, tokens, dim = asked.keys.shape
    root, pages, rank = "src/locks/selection/", tokens // PAGE, 8
    given = {"IBITS": 4, "QMAX": 7, "QMIN": -8, "RNK": rank, "_MUC": False}
    build = folder.pieces(
        "Js-Hwang1/locks-kv",
        root + "rki4_build.py",
        ["_write_pre", "_pack_ibit", "_write_post"],
        **given,
    )
    score = folder.pieces(
        "Js-Hwang1/locks-kv",
        root + "rki4_score_torch.py",
        ["_unpack_ibit", "_rki4_score_torch_fp32"],
        **given,
    )
    place, half = (1, pages, heads), torch.bfloat16
    state = SimpleNamespace(
        page=PAGE,
        tagw=8,
        G=1,
        n_sel_hi=torch.tensor([pages]),
        score_h=torch.zeros(1, heads, 1, pages),
        pp_v4=torch.zeros(*place, rank, dim // 2, dtype=torch.uint8),
        pp_vs=torch.zeros(*place, rank, dtype=half),
        pp_c8=torch.zeros(*place, PAGE, rank, dtype=torch.int8),
        pp_cs=torch.zeros(*place, PAGE, dtype=half),
        pp_mu8=torch.zeros(*place, dim, dtype=torch.int8),
        pp_mus=torch.zeros(place, dtype=half),
        pp_tag=torch.zeros(*place, 8, dtype=half),
    )
    tag, mean, apart, gram = build._write_pre(state, asked.pages(PAGE).permute(1, 2, 0, 3))
    sizes, vectors = torch.linalg.eigh(gram.flatten(0, 1))
    layer, each = torch.zeros(pages, dtype=torch.int64), torch.arange(pages)
    build._write_post(state, mean, apart, sizes, vectors, tag, layer, each)
    score._rki4_score_torch_fp32(
        state,
        0,
        asked.rows[:, :, 0],
        each[None].int(),
        1,
        asked.scale,
        pages,
        heads,
        1,
        dim,
        PAGE,
        *(vars(state)[f"pp_{name}"][0] for name in ("v4", "vs", "c8", "cs", "mu8", "mus")),
    )
    return Answer(torch.log_softmax(state.score_h[0, :, 0], -1))


def tokenselect(folder: Checkouts, asked: Asked, scale: float | None = None) -> Answer:
    """get_topk_tokens(), its vote over all heads: the products, a Triton kernel in bfloat16, are
    written out, of head h with kv head h // group (the kernel takes h % kv_heads); of queries that
    are scaled as attention is. One list for the layer."""
    heads, tokens, dim = asked.keys.shape
    file = "patcher/token_retrieval.py"

    def product(query: Tensor, keys: Tensor, _: Tensor, scores: Tensor, *more: object) -> None:
        scores.copy_(torch.einsum("hd,htd->ht", query, keys.repeat_interleave(group, dim=0)))

    group = asked.queries.shape[1]
    ran = folder.run(
        "pzs19/TokenSelect",
        file,
        "TokenRetriever.get_topk_tokens",
        ("num_q_heads", "scores 2"),
        query_fingerprints=(asked.queries * (asked.scale if scale is None else scale)).flatten(),
        token_fingerprints=asked.keys,
        indices=torch.arange(tokens),
        paged_matmul=product,
        self=SimpleNamespace(head_dim=dim, num_kv_heads=heads, device="cpu"),
    )
    return Answer(ran.scores.float()[None])


def unscaled(folder: Checkouts, asked: Asked) -> Answer:
    """The same of queries as they are, which is what its code does."""
    return tokenselect(folder, asked, 1.0)


def top_p(folder: Checkouts, asked: Asked, mass: float = 0.9) -> Answer:
    """OracleTopPMasker of the sparse-attention hub: Twilight's own is a CUDA kernel."""
    file = (
        "sparse_attention_hub/sparse_attention/research_attention/maskers/fixed/implementations/"
        "oracle_top_p.py"
    )
    names = ("_compute_exp_attention_scores", "_compute_top_p_thresholds")
    theirs = folder.pieces(
        "xAlg-ai/sparse-attention-hub",
        file,
        [f"OracleTopPMasker.{name}" for name in names],
        _get_num_key_value_groups=lambda queries, keys: 1,
        repeat_kv=lambda keys, groups: keys,
    )
    keys, query = asked.repeated, asked.rows
    none = torch.zeros(1, keys.shape[1], 1, keys.shape[2])
    scores = theirs._compute_exp_attention_scores(None, keys, query, none, None, asked.scale)
    least = theirs._compute_top_p_thresholds(None, scores, mass)
    shares = scores / scores.sum(-1, keepdim=True)
    return Answer(shares.log()[0, :, 0], chosen=(scores >= least)[0, :, 0])
