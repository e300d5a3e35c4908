"""What block-sparse prefill costs a trained model: loss over dense prefill's, text by text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from cxlkv.adapters.transformers import CXLCache, layout_of
from cxlkv.bench.lab.statistics import bootstrap
from cxlkv.bench.lab.texts import TEXTS
from cxlkv.bench.result import Result
from cxlkv.demo.text import inputs
from cxlkv.pool import CXLPool

MASSES = (0.9, 0.95, 0.99)
Samples = list[float]


@dataclass(frozen=True)
class PrefillPlan:
    """Lengths are in tokens. prefix: at most, and it is prefilled in one pass; steps: how many of
    its last ones have a loss, and how many given ones behind it."""

    texts: tuple[str, ...] = tuple(text.name for text in TEXTS)
    prefix: int = 7000
    steps: int = 512

    @classmethod
    def quick(cls) -> PrefillPlan:
        """Too little to conclude from."""
        return cls(texts=("handbook", "argparse", "table"), prefix=3000, steps=128)


@dataclass(frozen=True)
class Reading:
    """Mean losses in nats a token: of the prefix's last tokens, and of those behind it, which are
    read with dense attention. attended: share of the blocks of causal attention."""

    inside: float
    behind: float
    attended: float


@dataclass
class Readings:
    """Results of the texts so far: dense prefill, and each mass."""

    texts: list[str] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    dense: list[Reading] = field(default_factory=list)
    sparse: dict[float, list[Reading]] = field(default_factory=lambda: {m: [] for m in MASSES})

    def relative(self, mass: float, of: str) -> Samples:
        """By which share the loss is higher than that of dense prefill, a sample a text."""
        pairs = zip(self.sparse[mass], self.dense, strict=True)
        return [getattr(one, of) / getattr(dense, of) - 1 for one, dense in pairs]


def measure(
    folder: Path, plan: PrefillPlan, tell: Callable[[Readings], None] = lambda readings: None
) -> Readings:
    """Read all texts with the model in a folder; tell is called behind each text."""
    model, tokenizer = inputs.read_model(folder), AutoTokenizer.from_pretrained(folder)
    layout = layout_of(model)
    capacity = (plan.prefix + plan.steps + 512) * layout.token_bytes * 4 // 3 + (64 << 20)
    found = Readings()
    model.set_attn_implementation("cxlkv")
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity) as pool:
        for text in TEXTS:
            if text.name not in plan.texts:
                continue
            tokens = read_tokens(tokenizer, text.read(), plan.prefix + plan.steps + 1)
            found.texts.append(text.name)
            found.prefixes.append(len(tokens) - plan.steps - 1)
            found.dense.append(read(model, pool, tokens, plan.steps, None))
            for mass, readings in found.sparse.items():
                readings.append(read(model, pool, tokens, plan.steps, mass))
            tell(found)
    return found


def read_tokens(tokenizer: Callable[[str], dict[str, list[int]]], text: str, most: int) -> Tensor:
    """The first tokens of a text, int64, `most` at most."""
    return torch.tensor(tokenizer(text[: 8 * most])["input_ids"][:most])


@torch.inference_mode()
def read(
    model: PreTrainedModel, pool: CXLPool, tokens: Tensor, steps: int, mass: float | None
) -> Reading:
    """A prefix with prefill_mass=mass, and the last `steps` + 1 of the tokens behind it."""
    prefix = len(tokens) - steps - 1
    cache = CXLCache(pool, model, prefill_mass=mass)
    try:
        inside = loss_of(model, cache, tokens[: prefix + 1], steps)
        cache.prefill_mass = None
        behind = loss_of(model, cache, tokens[prefix:], steps)
    finally:
        cache.release()
    counted = cache.counters
    attended = counted.prefill_blocks / counted.prefill_blocks_causal if mass else 1.0
    return Reading(inside, behind, attended)


def loss_of(model: PreTrainedModel, cache: CXLCache, tokens: Tensor, steps: int) -> float:
    """Read all tokens but the last: the mean loss of the last `steps`."""
    read = tokens[None, :-1]
    logits = model(input_ids=read, past_key_values=cache, logits_to_keep=steps).logits[0]
    chances = torch.log_softmax(logits.float(), dim=-1)
    losses: npt.NDArray[np.float32] = -chances.gather(1, tokens[-steps:, None]).numpy()
    return float(losses.mean())


def table_of(found: Readings) -> Table:
    table = Table(title=f"{len(found.texts)} texts, prefixes of {min(found.prefixes):,} tokens on")
    for name in ("prefill_mass", "loss inside", "below", "loss behind", "below", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    for mass, readings in found.sparse.items():
        inside, behind = (bootstrap(found.relative(mass, of)) for of in ("inside", "behind"))
        blocks = np.mean([one.attended for one in readings])
        cells = [
            word
            for loss in (inside, behind)
            for word in (f"{100 * loss.mean:+.2f} %", loss.below(2))
        ]
        table.add_row(f"{mass:g}", *cells, f"{100 * blocks:.1f} %")
    return table


def result_of(found: Readings) -> Result:
    """The result file: samples are texts."""
    result = Result("lab-prefill")
    result.notes.append(f"texts: {', '.join(found.texts)}")
    result.measure("prefix", list(found.prefixes), "tokens")
    for of in ("inside", "behind"):
        dense = [getattr(one, of) for one in found.dense]
        result.measure(f"loss_dense_{of}", dense, "nats a token")
        for mass in found.sparse:
            name = f"loss_{mass:g}_{of}"
            result.measure(name, found.relative(mass, of), "share over dense prefill's")
    for mass, readings in found.sparse.items():
        shares = [one.attended for one in readings]
        result.measure(f"attended_{mass:g}", shares, "share of blocks")
    return result
