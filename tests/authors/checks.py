"""Which of their functions a method is held against, and what is compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cxlkv import Budget
from tests.authors import ours, theirs
from tests.authors.asked import Answer, Asked
from tests.authors.checkouts import Checkouts

SHARES = (0.05, 0.15)
MASS = 0.9
FIRST = 16
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """union: a list for each query head, kv head or layer. least: of the correlation, which says
    that both are the same method; 0 where they are not. mass: of lists in place of SHARES."""

    name: str
    method: str
    repository: str
    function: str
    theirs: Callable[[Checkouts, Asked], Answer]
    page_tokens: int = 1
    union: str = "query_head"
    least: float = 0.0
    mass: float | None = None

    @property
    def labels(self) -> list[str]:
        return [f"mass {self.mass:g}"] if self.mass else [f"{100 * share:g}" for share in SHARES]

    def budgets(self, pages: int) -> list[Budget]:
        union = "layer" if self.union == "layer" else "kv_head"
        if self.mass:
            return [Budget(mass=self.mass, sinks=0, recent=0, union=union)]
        counts = [math.ceil(share * pages) for share in SHARES]
        return [Budget(pages=count, sinks=0, recent=0, union=union) for count in counts]


QUEST, ARKVALE, MAGICPIG = "mit-han-lab/Quest", "pku-liang/ArkVale", theirs.MAGICPIG
MOBA, UCM = "MoonshotAI/MoBA", "ModelEngine-Group/unified-cache-management"
SHADOWKV, LOCKS, LOKI = "bytedance/ShadowKV", "Js-Hwang1/locks-kv", "hpcgroup/loki"
SPARQ, PQCACHE = "graphcore-research/llm-inference-research", "HugoZHL/PQCache"
CLUSTERKV, TOKENS = "sjtu-zhao-lab/ClusterKV", "pzs19/TokenSelect"
HUB = "xAlg-ai/sparse-attention-hub"
PAGE = theirs.PAGE
CHECKS = (
    Check("digest", "digest", QUEST, "forward", theirs.quest, PAGE, least=0.9999),
    Check("digest_hub", "digest", HUB, "quest_page_scores", theirs.hub_quest, PAGE, least=0.9999),
    Check("digest_arkvale", "digest", ARKVALE, "_summarize_keys", theirs.arkvale, PAGE),
    Check("ball", "ball", ARKVALE, "equations 1, 2", theirs.arkvale_sphere, PAGE, least=0.999),
    Check("ball_arkvale", "ball", ARKVALE, "_summarize_keys", theirs.arkvale, PAGE),
    Check("mean", "mean", MOBA, "moba_attn_varlen_naive", theirs.moba, PAGE, least=0.999),
    Check("mean_layer", "mean", UCM, "extract_block_repre", theirs.ucm, PAGE, "layer"),
    Check("shadow", "shadow", SHADOWKV, "ShadowKVCache", theirs.shadowkv, PAGE, least=0.99),
    Check("shadow_group", "shadow", SHADOWKV, "ShadowKVCache", theirs.shadowkv, PAGE, "kv_head"),
    Check("locks", "locks", LOCKS, "_rki4_score_torch_fp32", theirs.locks, PAGE),
    Check("loki", "loki", LOKI, "mask_attn_pca_topk", theirs.loki, least=0.999),
    Check("loki_own", "loki", LOKI, "compute_pca", theirs.loki_own),
    Check("sparq", "sparq", SPARQ, "SparseQ", theirs.sparq_tokens, least=0.9999),
    Check("sparq_group", "sparq", SPARQ, "SparseQ", theirs.sparq_tokens, 1, "kv_head"),
    Check("pq", "pq", PQCACHE, "decoding_attn_GQA_euc", theirs.pqcache, least=0.9999),
    Check("pq_group", "pq", PQCACHE, "decoding_attn_GQA_euc", theirs.pqcache, 1, "kv_head", 0.9999),
    Check("pq_own", "pq", PQCACHE, "compute_kmeans_worker", theirs.pqcache_own, least=0.99),
    Check("ivf", "ivf", CLUSTERKV, "cluster_attn_out", theirs.clusterkv),
    Check("lsh", "lsh", MAGICPIG, "SimCache", theirs.magicpig, least=0.9999),
    Check("lsh_released", "lsh", MAGICPIG, "SimCache", theirs.magicpig_released),
    Check("vote", "attention", TOKENS, "get_topk_tokens", theirs.tokenselect, 1, "layer", 0.999),
    Check("vote_released", "attention", TOKENS, "get_topk_tokens", theirs.unscaled, 1, "layer"),
    Check("mass", "attention", HUB, "OracleTopPMasker", theirs.top_p, least=0.9999, mass=MASS),
)
"""Names say how: _group is a list for all heads of a kv head, _own what each side has learned for
itself, _released their own parameters."""


@dataclass(frozen=True)
class Compared:
    """Comparison of lists: rank correlation of scores; the largest difference of scores in
    standard deviations of theirs, where scores are alike; shares of their pages that ours has too,
    and the attention that ours and theirs hold, for each budget.
    """

    correlation: Doubles
    difference: Doubles
    same: list[Doubles]
    mass: list[list[float]]


def compare(check: Check, folder: Checkouts, asked: Asked) -> Compared:
    own = asked.alone if check.union == "query_head" else asked
    answer = check.theirs(folder, own)
    right, pages = answer.scores.double().numpy(), answer.scores.shape[1]
    budgets = check.budgets(pages)
    found = ours.scores(check.method, own, check.page_tokens, budgets, answer.learned)
    same, held = [], []
    for at, budget in enumerate(budgets):
        wanted = answer.choice(budget.pages)
        least = np.where(wanted, right, np.inf).min(1, keepdims=True)
        same.append((found.chosen[at] & (right >= least)).sum(1) / found.chosen[at].sum(1))
        held.append([mass(own, one) for one in (found.chosen[at], wanted)])
    return Compared(
        np.array([rank_correlation(*rows) for rows in zip(found.of, right, strict=True)]),
        np.array([difference(*rows) for rows in zip(found.of, right, strict=True)]),
        same,
        held,
    )


def mass(asked: Asked, chosen: npt.NDArray[np.bool_]) -> float:
    """Attention of all query heads that chosen pages [lists, pages] hold, without the first
    tokens, which any budget has.
    """
    logits = asked.scale * asked.queries @ asked.keys.mT  # [kv_heads, group, tokens]
    logits[..., :FIRST] = -torch.inf
    shares = logits.double().softmax(-1).mean(1)
    shares = shares.reshape(len(shares), chosen.shape[1], -1).sum(-1)
    return float((shares.numpy() * chosen).sum(1).mean())


def ranks(numbers: Doubles) -> Doubles:
    """Ranks; equal numbers share the mean rank."""
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: Doubles = last - (counts + 1) / 2
    found: Doubles = middle[inverse]
    return found


def rank_correlation(ours: Doubles, theirs: Doubles) -> float:
    return float(np.corrcoef(ranks(ours), ranks(theirs))[0, 1])


def difference(ours: Doubles, theirs: Doubles) -> float:
    known = np.isfinite(ours) & np.isfinite(theirs)
    return float(np.abs(ours[known] - theirs[known]).max() / theirs[known].std())
