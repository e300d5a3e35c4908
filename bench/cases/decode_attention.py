"""Attention of a step for four models by context, beside torch's, and over emulated links.

One layer is timed, cold and on every CPU, with 1, 4 and 16 requests; a step is as many as the model
has, its matrices left out. Ours stores the step's token as well, torch's does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from cxlkv.bench.cases.decode_layers import (
    Decoding,
    Layers,
    Machine,
    Walk,
    all_threads,
    difference,
    layers_of,
    machine,
    over_links,
)
from cxlkv.bench.result import Result, short
from cxlkv.bench.tables import medians, pivot
from cxlkv.ndp.engine import Budget

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attend from queries [requests, kv_heads, group, dim] to keys and values [requests, kv_heads,
tokens, dim]: the group is the length of the query, as torch is many times slower with a query head
a row."""
METHODS = ("exact", "two_stage", "auto")
SHARES = (0.15, 0.05)
MODELS = {
    "135m": Decoding(layers=30, kv_heads=3, group=3, head_dim=64),  # SmolLM2-135M
    "1b": Decoding(layers=16, kv_heads=8, group=4, head_dim=64),  # Llama-3.2-1B
    "3b": Decoding(layers=28, kv_heads=8, group=3, head_dim=128),  # Llama-3.2-3B
    "8b": Decoding(layers=32, kv_heads=8, group=4, head_dim=128),  # Llama-3.1-8B
}


@dataclass(frozen=True)
class Size:
    """Every model with every number of requests at every length, but for what is too large; one of
    them with one request over each device."""

    models: tuple[str, ...] = tuple(MODELS)
    contexts: tuple[int, ...] = (2048, 8192, 32768, 131072)
    requests: tuple[int, ...] = (1, 4, 16)
    link_model: str = "8b"
    link_contexts: tuple[int, ...] = (8192, 32768, 131072)
    rounds: int = 5
    link_rounds: int = 3
    walk_bytes: int = 96 << 20  # of keys at least: three times what the caches hold here
    keys_most_bytes: int = 256 << 20  # of a layer
    region_bytes: int = 128 << 20


QUICK = Size(
    models=("135m", "8b"),
    contexts=(2048, 16384),
    requests=(1, 4),
    link_contexts=(2048, 16384),
    rounds=3,
    link_rounds=1,
)


def run(result: Result, size: Size = Size()) -> None:
    """Metrics FORM_MODEL_REQUESTSxTOKENS in ms a step: `all` pages, METHOD_PERCENT, sdpa, flex, and
    `floor`, what memory and arithmetic take for all pages; read_..., the share of all bytes that a
    form reads. FORM_MODEL-over-DEVICE_...: over an emulated link, FORM_clock_... by the device's
    clock alone, late_... the share of operations in which the host was slower than the device.
    Ratios FORM_to_torch_..., torch's faster form over ours."""
    flex = compiled_flex(result)
    with all_threads(), machine(size.region_bytes) as beside:
        for name, shape in points(size):
            with layers_of(shape.walked(size.walk_bytes), seed=7) as layers:
                measure(result, size, name, layers, beside, flex)
        beside.tell(result)
        for tokens in size.link_contexts:
            emulated(result, size, tokens)


def points(size: Size) -> Iterator[tuple[str, Decoding]]:
    for model in size.models:
        for count in size.requests:
            for tokens in size.contexts:
                shape = replace(MODELS[model], sequences=count, tokens=tokens)
                if shape.key_bytes <= size.keys_most_bytes:
                    yield model, shape


def compiled_flex(result: Result) -> Attention | None:
    """flex attention, which is fast only when it is compiled; None where it cannot be."""
    flex = torch.compile(flex_attention, dynamic=True)
    query, keys = torch.zeros(1, 1, 3, 64), torch.zeros(1, 1, 256, 64)
    try:
        with torch.no_grad():
            flex(query, keys, keys)
    except RuntimeError as error:  # no C++ compiler, or one that it does not take
        reason = str(error).strip().partition("\n")[0]
        result.notes.append(f"flex: not measured, it cannot be compiled here: {reason}")
        return None
    return flex


def forms_of(layers: Layers, methods: Sequence[str] = METHODS) -> dict[str, Walk]:
    """Ours: all pages, and by each budget and method."""
    forms: dict[str, Walk] = {"all": layers.decode}
    for share, method in product(SHARES, methods):
        forms[f"{method}_{100 * share:g}"] = partial(layers.decode, Budget(share=share), method)
    return forms


def measure(
    result: Result,
    size: Size,
    name: str,
    layers: Layers,
    beside: Machine,
    flex: Attention | None,
) -> None:
    """One model with some requests of one length."""
    shape, count = layers.shape, MODELS[name].layers
    point = f"{name}_{shape.sequences}x{short(shape.tokens)}"
    ours, theirs = forms_of(layers), torch_forms(result, layers, point, flex)
    samples, bounds = beside.take_turns({**ours, **theirs}, size.rounds, shape.dtype)
    steps = {form: [count * s for s in seconds] for form, seconds in samples.items()}
    ms = result.times(steps, "ms/step", f"{{}}_{point}")
    result.measure(f"floor_{point}", [1e3 * count * bounds.attend_s(shape)], "ms/step")
    for share, method in product(SHARES, METHODS):
        read = layers.read_share(Budget(share=share), method)
        result.measure(f"read_{method}_{100 * share:g}_{point}", [read], "share of K and V")
    fastest = min(ms[form] for form in theirs)
    result.ratios |= {f"{form}_to_torch_{point}": fastest / ms[form] for form in ours}


def torch_forms(
    result: Result, layers: Layers, point: str, flex: Attention | None
) -> dict[str, Walk]:
    """torch's attention over copies in the shape that it likes best; a check that all agree."""
    shape = layers.shape
    queries = layers.queries.view(shape.sequences, shape.kv_heads, shape.group, shape.head_dim)
    one = [part.transpose(0, 1)[None] for part in (layers.keys, layers.values)]
    copies = [
        tuple(part.repeat(shape.sequences, 1, 1, 1) for part in one) for _ in range(shape.layers)
    ]
    ours = layers.attended()
    known: dict[str, Attention] = {"sdpa": torch.nn.functional.scaled_dot_product_attention}
    if flex is not None:
        known["flex"] = flex
    forms: dict[str, Walk] = {}
    for name, attention in known.items():

        def call(layer: int, attention: Attention = attention) -> Tensor:
            with torch.no_grad():
                return attention(queries, *copies[layer])

        result.checks[f"{name}_agrees_{point}"] = difference(call(0), ours) < 0.02
        forms[name] = partial(layers.walk, call)
    return forms


def emulated(result: Result, size: Size, tokens: int) -> None:
    """One request over each device that we know."""
    model = MODELS[size.link_model]
    with layers_of(replace(model, tokens=tokens).walked(size.walk_bytes), seed=8) as layers:
        over_links(
            result,
            layers.pool,
            forms_of(layers, ("two_stage", "auto")),
            f"{size.link_model}-over-{{}}_1x{short(tokens)}",
            parts=layers.shape.layers,
            parts_of_step=model.layers,
            rounds=size.link_rounds,
        )


def tables(result: Result) -> list[Table]:
    ours = [f"{method}_{100 * share:g}" for share, method in product(SHARES, METHODS)]
    forms = ("all", *ours, "sdpa", "flex", "floor")
    return pivot("cxlkv bench decode/attention, ms a step", medians(result), forms)


def draw(result: Result, path: Path) -> None:
    from cxlkv.bench.pictures import over_contexts

    over_contexts(result, "attention of a step", path)
