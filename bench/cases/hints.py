"""What hints find of the pages that layers of SmolLM2 choose, and what that saves over a link.

Texts of the lab, each token given, behind a prefix in a pool. First: of the best pages of each
layer, by exact scores of its own query, the share that each way to guess them finds beforehand.
Then: what a local tier leaves to be read over an emulated link of 20 GB/s within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cxlkv.adapters.transformers import CXLCache, Hints, LayerStep, layout_of
from cxlkv.adapters.transformers.attention import DecoderLayer, asked_query
from cxlkv.adapters.transformers.hints import layers_of
from cxlkv.bench.lab.texts import TEXTS
from cxlkv.bench.result import Result
from cxlkv.bench.style import BLUE, COLORS, GREEN, GREY, INK, ORANGE, canvas, plain
from cxlkv.bench.tables import medians, pivot
from cxlkv.demo import smollm2
from cxlkv.demo.full_attention import append_cache
from cxlkv.demo.text import inputs
from cxlkv.emulation.link import Link, emulate, marked
from cxlkv.emulation.profiles import Profile
from cxlkv.ndp.engine import Budget, Selection, pages_of_share
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens
from cxlkv.tiers.local import LocalTier

LINK = Profile(
    what="a link of 20 GB/s", source="made up: about PCIe 4.0 x16", standing="assumed",
    latency_ns=600, read_gb_per_s=20,
)  # fmt: skip
WAYS = {
    "chance": "chance",
    "ahead": "this layer's query",
    "pages": "this layer's pages",
    "last": "the step before",
    "two_before": "hint two layers before",
    "hint": "hint",
    "late": "hint behind the attention",
    "both": "hint and step before",
}
"""Ways to guess a layer's pages, seen from the layer before it."""
FORMS = {
    "none": "no local tier",
    "counted": "by counts, between steps",
    "last": "the step before, ahead",
    "hints": "hints, ahead",
}
Pages = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Size:
    """tiers: slots for so many of the units, under the first of the budgets."""

    texts: tuple[str, ...] = ("handbook", "argparse", "table", "log")
    prefix: int = 6500
    steps: int = 32
    shares: tuple[float, ...] = (0.05, 0.15)
    tiers: tuple[float, ...] = (0.1, 0.2)


QUICK = Size(texts=("handbook",), prefix=2000, steps=8)


@dataclass
class Found:
    """What a budget finds, by way: shares of the pages, and pages named for each one chosen:
    [layers], sums over heads and steps; NaN where a layer has none before it.
    """

    share: float
    layers: int
    found: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    named: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    chosen: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def add(self, way: str, layer: int, guess: Pages, wanted: Pages) -> None:
        """Both [kv_heads, pages]."""
        for kept, count in (
            (self.found, (guess & wanted).sum()),
            (self.named, guess.sum()),
            (self.chosen, wanted.sum()),
        ):
            kept.setdefault(way, np.zeros(self.layers))[layer] += count

    def add_chance(self, layer: int, wanted: Pages) -> None:
        """What as many pages, drawn from all, find on average."""
        for kept, count in (
            (self.found, (wanted.sum(1) ** 2 / wanted.shape[1]).sum()),
            (self.named, wanted.sum()),
            (self.chosen, wanted.sum()),
        ):
            kept.setdefault("chance", np.zeros(self.layers))[layer] += count

    def rates(self, way: str) -> npt.NDArray[np.float64]:
        """By layer."""
        with np.errstate(invalid="ignore"):
            return self.found[way] / self.chosen[way]

    def sizes(self, way: str) -> npt.NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            return self.named[way] / self.chosen[way]


class Guesses:
    """Sees the layers' inputs and what they choose, and makes every guess beforehand."""

    def __init__(self, model: PreTrainedModel, found: Sequence[Found]) -> None:
        self.found = found
        self._layers = layers_of(model)
        self._inputs: list[tuple[Tensor, dict[str, object]]] = [(Tensor(), {})] * len(self._layers)
        self._middles = [Tensor()] * len(self._layers)
        self._queries: dict[int, Tensor] = {}
        self._last: dict[tuple[int, int], Pages] = {}
        self._before: dict[int, Pages] = {}  # by share: what the layer before chose

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                enter, attended = partial(self._enter, number), partial(self._attended, number)
                norm = cast(torch.nn.Module, layer.post_attention_layernorm)
                hooks.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(norm.register_forward_pre_hook(attended).remove)
            yield

    def _enter(
        self, number: int, layer: object, args: tuple[Tensor, ...], given: dict[str, object]
    ) -> None:
        self._inputs[number] = (args[0], given)

    def _attended(self, number: int, norm: object, args: tuple[Tensor, ...]) -> None:
        self._middles[number] = args[0]

    def choose(self, batch: Batch, layer: int, queries: Tensor, starts: object) -> None:
        """A layer has its own query [1, q_heads, dim]: how good were the guesses?"""
        guesses = {}
        if layer:
            states, given = self._inputs[layer - 1]
            guesses["ahead"] = self._queries[layer - 1]
            guesses["hint"] = self._asked(layer, states, given)
            guesses["late"] = self._asked(layer, self._middles[layer - 1], given)
        if layer > 1:
            guesses["two_before"] = self._asked(layer, *self._inputs[layer - 2])
        for at, found in enumerate(self.found):
            self._compare(at, found, batch, layer, queries, guesses, starts)
        self._queries[layer] = queries

    def _asked(self, layer: int, states: Tensor, given: dict[str, object]) -> Tensor:
        return asked_query(cast(DecoderLayer, self._layers[layer]), states, given)[:, :, 0]

    def _compare(
        self,
        at: int,
        found: Found,
        batch: Batch,
        layer: int,
        queries: Tensor,
        guesses: dict[str, Tensor],
        starts: object,
    ) -> None:
        budget = Budget(share=found.share)

        def best(query: Tensor) -> Pages:
            picked = batch.select(layer, query, starts, budget, "exact")  # type: ignore[arg-type]
            return free_pages(batch, layer, picked, budget)

        wanted = best(queries)
        named = {way: best(query) for way, query in guesses.items()}
        last = self._last.get((at, layer))
        if last is not None:
            named["last"] = np.zeros_like(wanted)
            width = min(last.shape[1], wanted.shape[1])
            named["last"][:, :width] = last[:, :width]
        if layer:
            named["pages"] = self._before[at]
        if layer and last is not None:
            named["both"] = named["hint"] | named["last"]
        for way, pages in named.items():
            found.add(way, layer, pages, wanted)
        found.add_chance(layer, wanted)
        self._last[at, layer] = self._before[at] = wanted


def free_pages(batch: Batch, layer: int, picked: Selection, budget: Budget) -> Pages:
    """What is chosen of one sequence [kv_heads, pages], without the forced pages."""
    count = batch.sequences[0].page_count(layer)
    pages = np.zeros((picked.pages.shape[1], count + 1), np.bool_)
    np.put_along_axis(pages, picked.pages[0], True, axis=1)  # padding goes to the last column
    return pages[:, budget.sinks : count - budget.recent]


class Watched(CXLCache):
    """A cache whose queries a Guesses sees, before a layer chooses."""

    guesses: Guesses

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        assert self._batch is not None
        self.guesses.choose(self._batch, part.index, queries, part.step.starts)
        return super().choose(part, queries)


class LastOnly(Hints):
    """Hints without a guess: what a layer chose last."""

    def _give(self, layer: int, query: Tensor | None, budgets: Sequence[Budget]) -> None:
        super()._give(layer, None, budgets)


@dataclass
class Moved:
    """Milliseconds a step of the emulated link: within it, and ahead of what needs them."""

    in_step: float
    ahead: float
    accuracy: float
    logits: Tensor
    label: str


class Reader:
    """A model, and a pool that has one text's prefix at a time."""

    def __init__(self, model: PreTrainedModel, pool: CXLPool, size: Size) -> None:
        self.model, self.pool, self.size = model, pool, size

    @torch.inference_mode()
    def prefilled(self, tokens: Tensor) -> Tokens:
        self.model.set_attn_implementation("sdpa")
        cache, sequence = DynamicCache(), self.pool.sequence()
        self.model(input_ids=tokens[None, : self.size.prefix], past_key_values=cache)
        append_cache(sequence, cache)
        self.model.set_attn_implementation("cxlkv")
        return sequence

    @torch.inference_mode()
    def steps(self, cache: CXLCache, tokens: Tensor, between: Callable[[], object]) -> Tensor:
        """Read what is behind the prefix, a token a step; the last step's logits."""
        for at in range(self.size.prefix, self.size.prefix + self.size.steps):
            logits = self.model(input_ids=tokens[None, at : at + 1], past_key_values=cache).logits
            between()
        assert isinstance(logits, Tensor)
        return logits

    def guess(self, context: Tokens, tokens: Tensor, found: Sequence[Found]) -> None:
        share = self.size.shares[0]
        cache = Watched(self.pool, self.model, share, sequences=[context.fork()])
        cache.guesses = Guesses(self.model, found)
        with cache.guesses.hooked():
            self.steps(cache, tokens, lambda: None)
        cache.release()

    def move(self, context: Tokens, tokens: Tensor, form: str, part: float) -> Moved:
        """One form of the local tier, with slots for this part of the prefix's units."""
        layout = self.pool.layout
        cache = CXLCache(self.pool, self.model, self.size.shares[0], sequences=[context.fork()])
        unit_bytes = layout.token_bytes // layout.layers * layout.page_tokens
        units = self.size.prefix // layout.page_tokens * layout.layers
        with ExitStack() as stack:
            between: Callable[[], object] = lambda: None  # noqa: E731
            hints = None
            if form != "none":
                tier = stack.enter_context(LocalTier(self.pool, int(part * units) * unit_bytes))
                if form == "counted":
                    between = tier.step
                else:
                    kind = Hints if form == "hints" else LastOnly
                    hints = stack.enter_context(kind(self.model, cache, tier, wait=True))
            link = stack.enter_context(emulate(self.pool, LINK, mode="virtual"))
            logits = self.steps(cache, tokens, between)
            accuracy = float(hints.stats()["accuracy"]) if hints else 1.0
        cache.release()
        steps = self.size.steps
        times = (ms_of(link, "attend") / steps, ms_of(link, "promote") / steps)
        return Moved(*times, accuracy, logits, link.label)


def ms_of(link: Link, kind: str) -> float:
    """Milliseconds of all operations of a kind, one behind the other."""
    latency_s = link.operations[kind] * link.profile.latency_ns / 1e9
    return 1e3 * (latency_s + link.bytes[kind] / (1e9 * link.profile.read_gb_per_s))


def run(result: Result, size: Size = Size()) -> None:
    """found_WAY_N: share of the best N % of pages that a way finds, a sample a layer; size_both_N:
    pages that the union names, for one that is chosen. in_step_FORM_N, ahead_FORM_N: milliseconds
    a step over the link with a tier of N % of the units, a sample a text."""
    folder = smollm2.prepare()
    model = inputs.read_model(folder)
    vocabulary_size, count = int(model.config.vocab_size), size.prefix + size.steps
    texts = [
        inputs.read_tokens(folder, text.read(), vocabulary_size)[:count]
        for text in TEXTS
        if text.name in size.texts
    ]
    measure(result, size, model, texts)


def measure(result: Result, size: Size, model: PreTrainedModel, texts: Sequence[Tensor]) -> None:
    """The same of any model and texts, int64 [prefix + steps] each."""
    layout = layout_of(model)
    found = [Found(share, layout.layers) for share in size.shares]
    moved: dict[str, list[Moved]] = {}
    capacity = int(2 * (size.prefix + size.steps) * layout.token_bytes) + (64 << 20)
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity) as pool:
        reader = Reader(model, pool, size)
        for tokens in texts:
            context = reader.prefilled(tokens)
            reader.guess(context, tokens, found)
            without = reader.move(context, tokens, "none", 0)
            moved.setdefault("none", []).append(without)
            same = True
            for part in size.tiers:
                for form in ("counted", "last", "hints"):
                    one = reader.move(context, tokens, form, part)
                    moved.setdefault(f"{form}_{100 * part:g}", []).append(one)
                    same &= torch.equal(one.logits, without.logits)
            result.checks["same_outputs"] = result.checks.get("same_outputs", True) and same
            context.release()
    tell(result, size, found, moved)


def tell(result: Result, size: Size, found: Sequence[Found], moved: dict[str, list[Moved]]) -> None:
    for one in found:
        percent = f"{100 * one.share:g}"
        for way in WAYS:
            rates = one.rates(way)
            result.measure(f"found_{way}_{percent}", rates[~np.isnan(rates)].tolist(), "share")
        sizes = one.sizes("both")
        result.measure(f"size_both_{percent}", sizes[~np.isnan(sizes)].tolist(), "times the pages")
    for name, texts in moved.items():
        unit, label = "ms of link a step", texts[0].label
        result.measure(f"in_step_{name}", [one.in_step for one in texts], unit, label)
        result.measure(f"ahead_{name}", [one.ahead for one in texts], unit, label)
        if name.startswith(("last", "hints")):
            result.measure(f"accuracy_{name}", [one.accuracy for one in texts], "share of guesses")
    pages = pages_of_share(size.shares[0], -(-size.prefix // 16))
    result.notes += [
        f"texts: {', '.join(size.texts)}; {size.steps} steps behind {size.prefix} tokens",
        f"the link is emulated: bytes of K and V as counted, at {LINK.read_gb_per_s:g} GB/s and "
        f"{LINK.latency_ns:g} ns an operation, one behind the other; choosing is near the data",
        f"steps over the link attend to {pages} pages of each layer and kv head",
    ]


def tables(result: Result) -> list[Table]:
    """Found pages by way and percent, and the link's time by form and percent of the units."""
    label = next((result.label_of(n) for n in result.metrics if n.startswith("in_step_")), None)
    return [
        *pivot("share found beforehand, mean over layers", means(result), ("found",)),
        *pivot(marked("ms of link a step", label), medians(result), ("in_step", "ahead")),
    ]


def means(result: Result) -> dict[str, float]:
    return {name: fmean(metric.samples) for name, metric in result.metrics.items()}


def draw(result: Result, path: Path) -> None:
    """Found pages by layer, and the link's time by form."""
    figure, (left, right) = canvas(11, 4.6, 1, 2)
    lines = {"both": BLUE, "hint": GREEN, "last": ORANGE, "ahead": INK, "chance": GREY}
    share = min((n.rpartition("_")[2] for n in result.metrics if n.startswith("found_")), key=float)
    layers = len(result.metrics[f"found_chance_{share}"].samples)
    for way, color in lines.items():
        shares = [100 * share for share in result.metrics[f"found_{way}_{share}"].samples]
        left.plot(range(layers - len(shares), layers), shares, color=color, label=WAYS[way])
    left.set_ylim(0, 100)
    left.legend(
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        ncols=2,
        loc="center",
        bbox_to_anchor=(0.55, 0.34),
    )
    plain(left, "layer", "%", f"of a layer's best {share} % of pages, found beforehand")
    names = [n.removeprefix("in_step_") for n in result.metrics if n.startswith("in_step_")]
    times = [result.metrics[f"in_step_{name}"].median for name in names]
    labels = []
    for name in names:
        form, _, percent = name.partition("_")
        labels.append(FORMS[form] + (f", tier of {percent} %" if percent else ""))
    ahead = [result.metrics[f"ahead_{name}"].median for name in names]
    right.barh(labels[::-1], times[::-1], color=BLUE, label="within the step")
    right.barh(labels[::-1], ahead[::-1], left=times[::-1], color=COLORS[0], label="ahead")
    right.set_xlim(0, 1.35 * max(times))
    right.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right")
    plain(right, "ms a step", "", "K and V over 20 GB/s (emulated)", grid="x")
    figure.savefig(path, dpi=150)
