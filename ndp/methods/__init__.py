"""Scorers and choosers of this package; the docstring of each class says where it comes from."""

from __future__ import annotations

from cxlkv.ndp.kinds import Scorer
from cxlkv.ndp.methods.ball import Ball
from cxlkv.ndp.methods.clusters import Clusters, Retro
from cxlkv.ndp.methods.codebooks import IVF, PQ
from cxlkv.ndp.methods.fier import Fier
from cxlkv.ndp.methods.gaussian import Gaussian, Locks
from cxlkv.ndp.methods.loki import Loki
from cxlkv.ndp.methods.low_rank import LowRank
from cxlkv.ndp.methods.lsh import LSH
from cxlkv.ndp.methods.mean import Mean
from cxlkv.ndp.methods.mean_std import MeanStd
from cxlkv.ndp.methods.sampling import MagicPIG, SparQMean, VAttention
from cxlkv.ndp.methods.shadow import Shadow
from cxlkv.ndp.methods.sparq import SparQ

SCORERS: tuple[type[Scorer], ...] = (
    Mean,
    MeanStd,
    Ball,
    Gaussian,
    Locks,
    Fier,
    SparQ,
    Loki,
    LowRank,
    PQ,
    IVF,
    LSH,
    Shadow,
)
CHOOSERS = (Clusters, Retro, MagicPIG, VAttention, SparQMean)
