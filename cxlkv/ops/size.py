"""`cxlkv size` says how large a pool must be for a model and so many tokens, or what one holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout, LayerGroup, format_bytes, parse_bytes
from cxlkv.machine.sizes import CHECKPOINTS, Plan, parse_tokens, plan, plan_for
from cxlkv.ops.console import AsJson, columns, print_json
from cxlkv.ops.models import layout_of_model
from cxlkv.ops.top import plain

Model = Annotated[
    str,
    typer.Argument(
        help="A model's folder, its config.json, or its name in the cache of Hugging Face; smollm2."
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(help="Tokens of a request: 5000, 32K (of 1024), 1M.", show_default="32K"),
]
Encoding = Annotated[
    str,
    typer.Option(
        help="Of them, in fewer bits: int8, int4, fp8_e4m3, progressive; or of each: int8,int4."
    ),
]
Requests = Annotated[int, typer.Option(help="Requests that are held at once.", min=1)]


VLLM_BLOCK_TOKENS = 128  # its --block-size on CPUs, unless it is given: a block is a page


@dataclass(frozen=True)
class Sizes:
    """What is told: a pool as create() makes it, and one without sketches, or without encoding."""

    model: str
    layout: KVLayout
    tokens: int
    requests: int
    pool: Plan
    other: Plan
    of_vllm: Plan | None  # the pool that vLLM makes for prefixes; None: it makes none
    capacity: str | None  # if it was given


def size(
    model: Model,
    tokens: Tokens = None,
    requests: Requests = 1,
    capacity: Annotated[
        str | None, typer.Option(help="Instead of --tokens: a pool's size, e.g. 8GiB.")
    ] = None,
    encoding: Encoding = "none",
    as_json: AsJson = False,
) -> None:
    """Say how large a pool must be for a model, or how many tokens a capacity holds.

    Reads a config only: no weights, no network. The last line is the command that makes that pool.
    """
    if tokens is not None and capacity is not None:
        raise BadArgumentError("--tokens and --capacity: one follows from the other, give one")
    layout = layout_of_model(model).encoded(encoding)
    beside, sketch = layout.encoded("none"), layout.is_encoded
    blocks, of_vllm = layout_of_vllm(layout), None
    if capacity is None:
        count = parse_tokens(tokens or "32K")
        pool = plan_for(layout, count, requests)
        other = plan_for(beside, count, requests, sketch=sketch)
        if blocks is not None:
            of_vllm = plan_for(blocks, count, requests, sketch=False)
    else:
        pool = plan(layout, parse_bytes(capacity))
        other = plan(beside, parse_bytes(capacity), sketch=sketch)
        if blocks is not None:
            of_vllm = plan(blocks, parse_bytes(capacity), sketch=False)
        count = pool.tokens(requests)
    found = Sizes(model, layout, count, requests, pool, other, of_vllm, capacity)
    if as_json:
        print_json(as_dict(found))
        return
    console = Console(soft_wrap=True)  # a command must stay in one piece to be copied
    for line in lines(found):
        console.print(Text(plain(line)))


def layout_of_vllm(layout: KVLayout) -> KVLayout | None:
    """Layout of the pool in which vLLM keeps prefixes with its own attention: its blocks, with all
    tokens of all layers. None: of such layers it is not computed.
    """
    first, *others = (replace(group, layers=1, window=None) for group in layout.groups)
    if layout.is_encoded or first.values != "own" or any(group != first for group in others):
        return None
    return KVLayout.of([replace(first, layers=layout.layers)], page_tokens=VLLM_BLOCK_TOKENS)


def as_dict(found: Sizes) -> dict[str, object]:
    """The JSON; numbers are bytes, tokens and counts."""
    layout, of_vllm = found.layout, found.of_vllm
    return {
        "model": found.model,
        "layers": layout.layers,
        "dtype": _dtypes(layout),
        "page_tokens": layout.page_tokens,
        "groups": [
            {
                "kind": kind_of(group).partition(" ")[0].lower(),
                "layers": group.layers,
                "window": group.window,
                "kv_heads": group.kv_heads,
                "head_dim": group.head_dim,
                "value_head_dim": group.value_head_dim,
                "token_bytes": group.token_bytes,
                "stored_token_bytes": group.stored_token_bytes,
                "bytes": group_bytes(group, found),
            }
            for group in layout.groups
        ],
        "encoding": layout.encoding,
        "token_bytes": layout.token_bytes,
        "stored_token_bytes": layout.stored_token_bytes,
        "page_bytes": found.pool.record_bytes,
        "state_bytes": layout.states.bytes if layout.states else 0,
        "state_pages": found.pool.state_pages,
        "tokens": found.tokens,
        "requests": found.requests,
        "pages": found.pool.pages,
        "capacity_bytes": found.pool.capacity_bytes,
        "without_encoding" if layout.is_encoded else "without_sketches": _plan(found.other, found),
        "prefixes_of_vllm": None if of_vllm is None else _plan(of_vllm, found),
    }


def _dtypes(layout: KVLayout) -> str:
    return " and ".join(dict.fromkeys(group.dtype for group in layout.groups))


def _plan(plan: Plan, found: Sizes) -> dict[str, int]:
    return {
        "page_tokens": plan.layout.page_tokens,
        "tokens": plan.tokens(found.requests),
        "page_bytes": plan.record_bytes,
        "pages": plan.pages,
        "capacity_bytes": plan.capacity_bytes,
    }


def lines(found: Sizes) -> Iterator[str]:
    """The same for a person, at 80 columns."""
    layout, pool = found.layout, found.pool
    dtype = _dtypes(layout) + f" kept as {layout.encoding}" * layout.is_encoded
    kind = f"{layout.layers} layers, {dtype}, pages of {layout.page_tokens} tokens"
    yield f"{found.model}: {kind}"
    yield ""
    held = held_text(found.tokens, found.requests)
    groups = layout.groups
    rows = [
        (
            f"{group.layers} {kind_of(group)}",
            f"{group.kv_heads} x {group.head_dim}",
            format_bytes(group.stored_token_bytes),
            format_bytes(group_bytes(group, found)),
        )
        for group in groups
    ]
    total = sum(group_bytes(group, found) for group in groups)
    rows.append(("all", "", format_bytes(layout.stored_token_bytes), format_bytes(total)))
    yield from columns(("layers", "heads", "a token", held), rows)
    yield ""
    yield f"A pool of {format_bytes(pool.capacity_bytes)} holds {held}."
    if layout.is_encoded:
        yield f"With K and V as the model makes them: {more_text(found.other, found)}."
    elif found.of_vllm is not None:
        blocks = f"{found.of_vllm.layout.page_tokens} tokens"
        yield f"vLLM that keeps prefixes, in blocks of {blocks}: {more_text(found.of_vllm, found)}."
    else:
        yield "What vLLM keeps of such layers is not computed: docs/engines/vllm-models.md."
    if layout.states is not None:
        pages = f"{pool.state_pages} pages" if pool.state_pages > 1 else "a page"
        size = format_bytes(layout.states.bytes)
        yield f"A checkpoint of states has {size}, {pages}; each request has {CHECKPOINTS}."
    if any(group.window for group in groups):
        yield "Layers with a window keep the last tokens of each request."
    beside = "digests, sketches" if layout.sketches(None) else "digests"
    yield f"A page has {format_bytes(pool.record_bytes)} with its {beside} and checksums."
    yield ""
    yield f"Make it: {create_command(found)}"


def more_text(plan: Plan, found: Sizes) -> str:
    """What was not asked for: tokens of the capacity, or the capacity of the tokens."""
    if found.capacity is not None:
        return held_text(plan.tokens(found.requests), found.requests)
    return f"{format_bytes(plan.capacity_bytes)}"


def held_text(tokens: int, requests: int) -> str:
    text = f"{tokens:,} tokens"
    return text if requests == 1 else f"{requests} x {text}"


def kind_of(group: LayerGroup) -> str:
    """full, window N, MLA, or indexer: keys alone."""
    name = "MLA" if group.values == "key_prefix" else "full"
    name = "indexer" if name == "MLA" and group.value_head_dim == 1 else name
    return name if group.window is None else f"window {group.window:,}"


def group_bytes(group: LayerGroup, found: Sizes) -> int:
    """K and V that the group's layers keep of all requests, in the pool."""
    seen = found.tokens if group.window is None else min(found.tokens, group.window)
    return found.requests * seen * group.stored_token_bytes


def create_command(found: Sizes) -> str:
    """`cxlkv pool create` of the pool that was told."""
    capacity = found.capacity or f"{found.pool.capacity_bytes >> 20}MiB"
    model = quote(found.model)
    words = [f"cxlkv pool create /dev/shm/my.pool --model {model} --capacity {capacity}"]
    if found.layout.is_encoded:
        words.append(f"--encoding {found.layout.encoding}")
    return " ".join(words)
