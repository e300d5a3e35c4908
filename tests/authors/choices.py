"""What is compared of methods with a state of the sequence: tokens, weights, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.ndp.choosers import Choice
from cxlkv.ndp.methods import sampling
from tests.authors import states, theirs
from tests.authors.asked import FORCED, Asked
from tests.authors.checkouts import Checkouts
from tests.authors.states import AdaptiveSampling, Sides, choice

SHARE = 0.05
SEEDS = 100
BEST = 0.25
"""Share of the tokens that a promise's sample is drawn beside, and may have at most."""
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StateCheck:
    """union: a choice for each query head, or kv head of ours. first: tokens that neither side is
    asked about, and that are in. least: of the share of our tokens that theirs has, most: of the
    distance of outputs; None: they are not the same method."""

    name: str
    method: str
    repository: str
    function: str
    sides: Callable[[Checkouts, Asked, float], Sides]
    union: str = "query_head"
    first: int = FORCED
    least: float | None = None
    most: float = 0.01


CLUSTERKV, RETROINFER = states.CLUSTERKV, states.RETROINFER
HUB, MAGICPIG, SPARQ = states.HUB, theirs.MAGICPIG, states.SPARQ
GIVEN, START = states.clusters_given, states.clusters_same_start
RELEASED, ATTN = states.magicpig_released, "cluster_attn_out"
STATE_CHECKS = (
    StateCheck("clusters", "clusters", CLUSTERKV, ATTN, GIVEN, least=1),
    StateCheck("clusters_start", "clusters", CLUSTERKV, "build_cluster", START, least=0.95),
    StateCheck("clusters_group", "clusters", CLUSTERKV, "build_cluster", START, "kv_head"),
    StateCheck("clusters_own", "clusters", CLUSTERKV, "build_cluster", states.clusters_own),
    StateCheck(
        "retro", "retro", RETROINFER, "sparse_attention", states.retro_given, "kv_head", least=1
    ),
    StateCheck(
        "retro_own", "retro", RETROINFER, "segment_k_means", states.retro_own, "kv_head", least=0.99
    ),
    StateCheck("magicpig", "magicpig", MAGICPIG, "SimCache", states.magicpig, least=1),
    StateCheck("magicpig_group", "magicpig", MAGICPIG, "SimCache", states.magicpig, "kv_head"),
    StateCheck("magicpig_released", "magicpig", MAGICPIG, "SimCache", RELEASED),
    StateCheck("magicpig_hub", "magicpig", HUB, "MagicPig", states.magicpig_hub),
    StateCheck(
        "vattention", "vattention", HUB, "AdaptiveSamplingMasker", states.vattention, first=0
    ),
    StateCheck(
        "sparq_mean", "sparq_mean", SPARQ, "AnnAttention", states.sparq_mean, first=0, least=1
    ),
    StateCheck(
        "sparq_mean_group", "sparq_mean", SPARQ, "AnnAttention", states.sparq_mean, "kv_head", 0
    ),
)
"""Names say how: _start begins with the same keys, _group is a choice for all heads of a kv head,
_own what each side has made for itself, _released their own parameters."""


@dataclass(frozen=True)
class ChoicesCompared:
    """Comparison by query heads: the share of our tokens that theirs has, too; of the tokens that
    both have, the largest difference of weights, relative to theirs; tokens of ours and theirs,
    and distances of outputs from full attention's, over its length; and the distance between both.
    """

    same: Doubles
    weights: float
    tokens: tuple[float, float]
    errors: tuple[Doubles, Doubles]
    apart: Doubles


def compare_choices(check: StateCheck, folder: Checkouts, asked: Asked) -> ChoicesCompared:
    own = asked.alone if check.union == "query_head" else asked
    sides = check.sides(folder, own.rest if check.first else own, SHARE)
    both = [widened(one, own, check.first) for one in (sides.ours, sides.theirs)]
    ours, theirs = (torch.from_numpy(one.log_weights) for one in both)
    in_ours, in_theirs = ours > -torch.inf, theirs > -torch.inf
    # Tokens that are in by force are no choice of either.
    for chosen in (in_ours, in_theirs):
        chosen[:, : check.first] = False
    shared = in_ours & in_theirs
    full = output(own, None)
    outputs = [output(own, one) for one in both]
    if sides.output is not None:
        outputs[1] = sides.output.double()
    return ChoicesCompared(
        (shared.sum(1) / in_ours.sum(1).clamp(min=1)).double().numpy(),
        float(torch.expm1((ours - theirs)[shared]).abs().amax()) if shared.any() else 0.0,
        (float(in_ours.sum(1).double().mean()), float(in_theirs.sum(1).double().mean())),
        (distance(outputs[0], full, full), distance(outputs[1], full, full)),
        distance(outputs[0], outputs[1], full),
    )


def widened(chosen: Choice, asked: Asked, first: int) -> Choice:
    """A row for each query head, and the first tokens in."""
    heads = asked.queries.shape[0] * asked.queries.shape[1]
    each = heads // len(chosen.log_weights)
    weights = np.pad(chosen.log_weights, ((0, 0), (first, 0))).repeat(each, axis=0)
    return chosen._replace(log_weights=weights)


def output(asked: Asked, chosen: Choice | None) -> Tensor:
    """[q_heads, dim]: attention to what is chosen, of a row for each query head; None: to all."""
    whole = asked.alone
    keys, values, queries = (one.double() for one in (whole.keys, whole.values, whole.queries))
    logits = asked.scale * queries @ keys.mT
    if chosen is not None:
        logits += torch.from_numpy(chosen.log_weights).double()[:, None]
    if chosen is not None and chosen.rows is not None:
        rows, each = chosen.rows, len(queries) // len(chosen.rows.k)
        k, v, counts = (
            torch.from_numpy(one).double().repeat_interleave(each, dim=0)
            for one in (rows.k, rows.v, rows.log_counts)
        )
        logits = torch.cat([logits, asked.scale * queries @ k.mT + counts[:, None]], dim=2)
        values = torch.cat([values, v], dim=1)
    return (logits.softmax(-1) @ values)[:, 0]


def distance(ours: Tensor, theirs: Tensor, full: Tensor) -> Doubles:
    found: Doubles = ((ours - theirs).norm(dim=-1) / full.norm(dim=-1)).numpy()
    return found


# ---- what a sample promises ----


@dataclass(frozen=True)
class Promise:
    """Samples that are as large as they have to be, ours and theirs: the share of draws and query
    heads whose sum of exp(logit) is right by EPSILON, tokens, and the median error of outputs; and
    the largest difference between sizes that both find of one draw.
    """

    within: tuple[float, float]
    tokens: tuple[float, float]
    errors: tuple[float, float]
    sizes: int


def promise(folder: Checkouts, asked: Asked, seeds: int = SEEDS) -> Promise:
    """Draw so many samples by both, beside the same best tokens."""
    own, masker = asked.alone, AdaptiveSampling.of(folder)
    full = output(own, None)
    found: list[list[tuple[float, float, float]]] = [[], []]
    tokens = own.keys.shape[1]
    most = int(2 * BEST * tokens)
    for seed in range(seeds):
        drawn = choice("vattention", seeded(own, seed), most, free=(FORCED, tokens))
        torch.manual_seed(seed)
        theirs = masker.draw(own, torch.from_numpy(drawn.log_weights == 0))
        for each, one in zip(found, (drawn, theirs), strict=True):
            errors = sums(own, one) / sums(own, None) - 1
            right = float((errors.abs() <= sampling.EPSILON).double().mean())
            count = float((one.log_weights > -np.inf).sum(1).mean())
            each.append((right, count, float(np.median(distance(output(own, one), full, full)))))
    (ours, theirs_), apart = np.mean(found, axis=1), sizes_apart(masker, own, seeds)
    return Promise((ours[0], theirs_[0]), (ours[1], theirs_[1]), (ours[2], theirs_[2]), apart)


def seeded(asked: Asked, seed: int) -> Asked:
    return Asked(asked.keys, asked.values, asked.queries, asked.scale, seed)


def sums(asked: Asked, chosen: Choice | None) -> Tensor:
    """Sum each query head's own exp(logit), over the largest."""
    logits = (asked.scale * asked.queries.double() @ asked.keys.double().mT)[:, 0]
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    if chosen is not None:
        weights *= torch.from_numpy(chosen.log_weights).double().exp()
    return weights.sum(1)


def sizes_apart(masker: AdaptiveSampling, asked: Asked, seeds: int) -> int:
    """Difference of the sample sizes of both, for logits drawn beside the best twentieth."""
    logits = (asked.scale * asked.queries @ asked.keys.mT)[:, 0].sort(dim=1, descending=True).values
    best = logits.shape[1] // 20
    rest, largest = logits.shape[1] - best, 0
    for seed in range(seeds):
        drawn = torch.randperm(rest, generator=torch.Generator().manual_seed(seed))
        known = torch.cat([logits[:, :best], logits[:, best + drawn[: rest // 40]]], dim=1)
        theirs = masker.size(known, best, rest)
        ours = [sampling.sample_size(one[None].numpy(), best, rest) for one in known]
        largest = max(largest, int((torch.tensor(ours) - theirs).abs().max()))
    return largest
