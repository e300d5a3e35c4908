"""Whole steps of two models in transformers by context, beside DynamicCache, and over links.

1 to 16 requests attend to all pages of a pool, and by budget. The trained model reads the demo's
handbook once; the random one has noise for keys and values, and goes further. Each request has its
own, of the same text. All forms read the same next tokens, and what they add is taken back, which
is not measured. Over emulated links one request goes, behind the trained model's longest context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cxlkv.adapters.transformers import CXLCache, layout_of
from cxlkv.bench.cases.decode_layers import DEVICES, Walk, all_threads, over_links
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.models.random_llama import noise_like, random_llama, random_words
from cxlkv.bench.result import Result, short
from cxlkv.bench.tables import medians, pivot
from cxlkv.demo import smollm2
from cxlkv.demo.answers.ask import handbook
from cxlkv.demo.full_attention import append_cache, divergence_from, keys_and_values
from cxlkv.demo.text import inputs
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool

SHARES = (0.15, 0.05)
CHUNK_TOKENS = 1024
"""The handbook is read by so many tokens at a time."""
DIVERGENCE_MOST = 0.02
"""In nats, of two forms of full attention in bfloat16, whose outputs round by up to 0.4 %. Rounding
makes some 0.001 of the random model, values in another order 1.9."""


@dataclass(frozen=True)
class Points:
    """What is measured of a model: each number of requests at each length; a sample is the mean of
    some steps."""

    contexts: tuple[int, ...]
    requests: tuple[int, ...]
    steps: int
    rounds: int


@dataclass(frozen=True)
class Size:
    trained: Points = Points((1024, 2048, 4096, 7000), (1, 4, 16), steps=4, rounds=5)
    devices: tuple[str, ...] = DEVICES
    link_rounds: int = 3
    random_model: str = "llama-160m"
    random: Points = Points((4096, 16384, 65536), (1,), steps=2, rounds=3)


QUICK = Size(
    trained=Points((512, 2048), (1, 4), steps=2, rounds=3),
    devices=("skhynix-niagara2",),
    link_rounds=1,
    random_model="llama-8m",
    random=Points((1024, 4096), (1,), steps=2, rounds=3),
)


@dataclass(frozen=True)
class Reader:
    """A model, its name in the figures, int64 [tokens], and keys and values of the first ones."""

    name: str
    model: PreTrainedModel
    tokens: Tensor
    held: DynamicCache


def run(result: Result, size: Size = Size()) -> None:
    """The figures of measure() and emulated(). Raises UnsupportedError where the trained model is
    not installed."""
    folder = smollm2.prepare(Console(quiet=True))
    with all_threads():
        reader = trained(folder, size.trained)
        tell(result, f"{smollm2.NAME} in {reader.model.dtype}")
        measure(result, size.trained, reader)
        emulated(result, size, reader)
        del reader
        reader = untrained(size.random_model, size.random)
        tell(result, f"{reader.name} with random weights in {reader.model.dtype}")
        measure(result, size.random, reader)


def tell(result: Result, model: str) -> None:
    result.notes.append(f"decode/steps: {model}".replace("torch.", ""))


def trained(folder: Path, points: Points) -> Reader:
    """SmolLM2 behind the handbook."""
    model = inputs.read_model(folder)
    tokens = inputs.read_tokens(folder, handbook()[0], model.config.vocab_size)
    return Reader("smollm2-135m", model, tokens, read(model, tokens[: max(points.contexts)]))


def untrained(name: str, points: Points) -> Reader:
    """A model that reads a few words, and takes noise for what it made of them and many more."""
    model, longest = random_llama(name), max(points.contexts)
    words = random_words(name, longest + points.steps)
    return Reader(name, model, words, noise_like(read(model, words[:CHUNK_TOKENS]), longest))


def measure(result: Result, points: Points, reader: Reader) -> None:
    """Metrics FORM_NAME_REQUESTSxTOKENS in ms a step: `all` pages, auto_PERCENT, `dynamic` as it
    is, `dynamic_masked`: with a mask that hides nothing, for which transformers packs the query
    heads of a kv head and does not repeat its keys; and FORM_slope_NAME_REQUESTS, between the
    shortest and the longest context. divergence_...: Kullback-Leibler from `dynamic`, in nats.
    Ratios FORM_to_dynamic_...: the faster of the two over ours."""
    for count in points.requests:
        ms = {one: at_point(result, points, reader, count, one) for one in points.contexts}
        slopes(result, ms, f"{reader.name}_{count}")


def at_point(
    result: Result, points: Points, reader: Reader, count: int, context: int
) -> Mapping[str, float]:
    """Medians in ms by form; what the forms held is gone before the next point."""
    point = f"{reader.name}_{count}x{short(context)}"
    with stage(reader, count, context, points.steps) as forms:
        check(result, forms, point)
        walks: dict[str, Walk] = {form: one.walk for form, one in forms.items()}
        samples = interleave_reported(walks, points.rounds)
        ms = result.times(samples, "ms/step", f"{{}}_{point}")
        fastest = min(ms["dynamic"], ms["dynamic_masked"])
        ours = [form for form, one in forms.items() if isinstance(one.cache, CXLCache)]
        result.ratios |= {f"{form}_to_dynamic_{point}": fastest / ms[form] for form in ours}
    return ms


def emulated(result: Result, size: Size, reader: Reader) -> None:
    """FORM_NAME-over-DEVICE_1xTOKENS, and late_ and FORM_clock_ of it: see over_links(). The
    clock's time is that of attention alone: the model's matrices lie in this machine's memory."""
    context, steps = max(size.trained.contexts), size.trained.steps
    with stage(reader, 1, context, steps) as forms:
        caches = [one.cache for one in forms.values() if isinstance(one.cache, CXLCache)]
        over_links(
            result,
            caches[0].pool,  # one cache for all forms
            {name: one.walk for name, one in forms.items() if one.cache is caches[0]},
            f"{reader.name}-over-{{}}_1x{short(context)}",
            parts=steps,
            rounds=size.link_rounds,
            devices=size.devices,
        )


@dataclass(frozen=True)
class Form:
    """A way to go on behind a context: tokens int64 [requests, steps]."""

    model: PreTrainedModel
    cache: DynamicCache | CXLCache
    after: Tensor
    budget: Budget | None = None
    is_masked: bool = False

    def walk(self) -> float:
        """Seconds a step."""
        return self._steps()[0]

    def chances(self) -> Tensor:
        """Log-probabilities behind the last step, float32 [requests, words]."""
        return torch.log_softmax(self._steps()[1].float(), dim=-1)

    @torch.inference_mode()
    def _steps(self) -> tuple[float, Tensor]:
        is_ours = isinstance(self.cache, CXLCache)
        self.model.set_attn_implementation("cxlkv" if is_ours else "sdpa")
        if isinstance(self.cache, CXLCache):
            self.cache.budget = self.budget
        requests, steps = self.after.shape
        before = self.cache.get_seq_length()
        began = perf_counter()
        for step in range(steps):
            mask = None
            if self.is_masked:
                mask = torch.ones(requests, 1, 1, before + step + 1, dtype=torch.bool)
            logits = self.model(
                input_ids=self.after[:, step : step + 1],
                past_key_values=self.cache,
                attention_mask=mask,
            ).logits[:, -1]
        took = (perf_counter() - began) / steps
        self.cache.crop(-steps)
        return took, logits


@contextmanager
def stage(reader: Reader, requests: int, context: int, steps: int) -> Iterator[dict[str, Form]]:
    """All forms, each request with a copy of the first tokens that the model has read."""
    model, held = reader.model, reader.held
    after = reader.tokens[context : context + steps].repeat(requests, 1)
    layout = layout_of(model)
    tokens = requests * (context + steps + layout.page_tokens)
    # Digests and sketches are up to 0.16 of the keys and values.
    capacity = int(layout.token_bytes * tokens * 1.25) + (64 << 20)
    dynamic = DynamicCache()
    for index, held_layer in enumerate(keys_and_values(held)):
        copies = [one[None, :, :context].repeat(requests, 1, 1, 1) for one in held_layer]
        dynamic.update(copies[0], copies[1], index)
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity, huge="try") as pool:
        sequences = [pool.sequence() for _ in range(requests)]
        for sequence in sequences:
            append_cache(sequence, held, context)
        ours = CXLCache(pool, model, sequences=sequences)
        forms = {
            "dynamic": Form(model, dynamic, after),
            "dynamic_masked": Form(model, dynamic, after, is_masked=True),
            "all": Form(model, ours, after),
        }
        for share in SHARES:
            forms[f"auto_{100 * share:g}"] = Form(model, ours, after, Budget(share=share))
        yield forms


@torch.inference_mode()
def read(model: PreTrainedModel, tokens: Tensor) -> DynamicCache:
    """Full attention over int64 [tokens]."""
    cache = DynamicCache()
    model.set_attn_implementation("sdpa")
    for chunk in torch.split(tokens, CHUNK_TOKENS):
        model(input_ids=chunk[None], past_key_values=cache, logits_to_keep=1)
    return cache


def check(result: Result, forms: Mapping[str, Form], point: str) -> None:
    """All forms of full attention foretell the same; of the others it is measured."""
    wanted = forms["dynamic"].chances()
    for name, form in forms.items():
        if name == "dynamic":
            continue
        diverged = float(divergence_from(wanted, form.chances()).max())
        result.measure(f"divergence_{name}_{point}", [diverged], "nats")
        if form.budget is None:
            result.checks[f"{name}_agrees_{point}"] = diverged < DIVERGENCE_MOST


def slopes(result: Result, ms: Mapping[int, Mapping[str, float]], name: str) -> None:
    """What 1,000 tokens more cost a step."""
    contexts: Sequence[int] = sorted(ms)
    if len(contexts) > 1:
        first, last = contexts[0], contexts[-1]
        for form, longest in ms[last].items():
            slope = 1e3 * (longest - ms[first][form]) / (last - first)
            result.measure(f"{form}_slope_{name}", [slope], "ms/1000 tokens")


def tables(result: Result) -> list[Table]:
    ours = ["all", *(f"auto_{100 * share:g}" for share in SHARES)]
    forms = [*ours, "dynamic", "dynamic_masked"]
    return pivot("cxlkv bench decode/steps, ms a step", medians(result), forms)


def draw(result: Result, path: Path) -> None:
    from cxlkv.bench.pictures import over_contexts

    over_contexts(result, "a step of a model", path)
