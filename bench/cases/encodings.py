"""Select, attend and append of encoded pools beside plain ones: by encoding, shape and threads.

Everything is in DRAM and cold. `exact` chooses by all keys, `attend` reads all pages, `append` puts
a layer's tokens into a new sequence. A ratio is of medians of alternating runs: a plain pool's time
over that of the encoded pool; for append the plain pool has sketches, the encoded one none. To the
bound: the lower of a streaming read and of an arithmetic loop of the instructions that the kernels
multiply with. Rivals (bench/peers/kernels.py) take their turns by one thread where they are
installed; whole steps of a model are beside transformers' caches (bench/peers/cache_steps.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.table import Table

from cxlkv.bench.cases.decode_layers import (
    Decoding,
    Layers,
    Machine,
    Walk,
    clock_s,
    difference,
    layers_of,
    machine,
)
from cxlkv.bench.peers import cache_steps, kernels
from cxlkv.bench.peers.cache_steps import Points
from cxlkv.bench.peers.kernels import Given, Rival
from cxlkv.bench.result import Result, short
from cxlkv.bench.tables import pivot
from cxlkv.emulation.link import emulate
from cxlkv.machine.sizes import plan
from cxlkv.ndp.engine import Budget

ENCODINGS = ("none", "int8", "int4", "fp8_e4m3", "progressive")
NEAR = 0.03
"""The error that a near attend of a progressive pool is allowed."""
LINK = "astera-a1000-remote-socket"
"""The emulated device whose link reads 19.5 GB/s."""
CAPACITY_BYTES = 64 << 30
SHAPES = {
    "d128": Decoding(head_dim=128, kv_heads=2, group=4, tokens=131072),
    "d128-g16": Decoding(head_dim=128, kv_heads=2, group=16, tokens=131072),
    "d64": Decoding(head_dim=64, kv_heads=4, group=8, tokens=65536),
    "smollm2": Decoding(head_dim=64, kv_heads=3, group=3, tokens=7000, sequences=4),
}


BESIDE = {
    "exact_int8_to_numkong": ("score_numkong_int8", "score_numkong_int8_packed"),
    "exact_int8_to_q8_0": ("score_q8_0",),
    "exact_int4_to_q4_0": ("score_q4_0",),
    "exact_none_to_f16": ("score_f16",),
    "attend_int8_to_q8_0": ("attend_q8_0",),
    "attend_int4_to_q4_0": ("attend_q4_0",),
    "attend_none_to_f16": ("attend_f16",),
}
"""Ratios: of ours, to the fastest of a rival's forms."""
RIVAL_ERROR_MOST = 0.5
"""Relative root mean square that a rival's scores and outputs may be off by: numbers of something
else are off by 1.4. In f16 ggml sums values in f16, and noise sums up to little."""


@dataclass(frozen=True)
class Size:
    """Each shape with each number of threads."""

    shapes: tuple[str, ...] = tuple(SHAPES)
    tokens_most: int = 131072
    threads: tuple[int, ...] = (1, 2)
    walk_bytes: int = 128 << 20  # of keys at least, as codes of 4 bits: more than caches hold
    append_tokens: int = 4096
    rounds: int = 9
    region_bytes: int = 128 << 20
    share: float = 0.05
    steps: Points | None = field(default_factory=Points)


QUICK = Size(
    shapes=("d128",),
    tokens_most=16384,
    threads=(1,),
    rounds=3,
    walk_bytes=32 << 20,
    steps=Points(texts=1, steps=32, timed_behind=1000, rounds=3),
)


@contextmanager
def pools_of(shape: Decoding, size: Size, threads: int) -> Iterator[dict[str, Layers]]:
    """One for each encoding, on the same noise; the plain one has sketches, as by default."""
    with ExitStack() as stack:
        yield {
            encoding: stack.enter_context(
                layers_of(
                    shape,
                    seed=7,
                    encoding=encoding,
                    threads=threads,
                    more_tokens=size.append_tokens,
                )
            )
            for encoding in ENCODINGS
        }


def walk_of(layers: Layers, kind: str, share: float) -> Walk:
    """Attention to all pages, a near one, or a select by a method."""
    if kind == "attend":
        return layers.attend
    if kind == "near":
        return partial(layers.attend, error=NEAR)
    return partial(layers.select, Budget(share=share, sinks=0, recent=0), kind)


def bytes_read(layers: Layers, kind: str, share: float) -> int:
    """Bytes of keys, or keys and values, that one layer's walk reads."""
    name = "attended_bytes" if kind in ("attend", "near") else "scored_bytes"
    before = layers.pool.stats()[name]
    walk_of(layers, kind, share)()
    return (layers.pool.stats()[name] - before) // layers.shape.layers


def run(result: Result, size: Size = Size()) -> None:
    """Metrics exact_E_SHAPE, attend_E_SHAPE, append_E_SHAPE in us a layer, by encoding E, and for
    `none` and `progressive` two_stage, for `progressive` near, an attend that may be off by
    NEAR; SHAPE ends in the number of threads. Ratios KIND_E_SHAPE, a plain pool's time
    over the encoded one's (two_stage over exact, near over attend), bytes_KIND_progressive_SHAPE,
    its bytes over those of exact or attend of int8, staged_to_exact_E_SHAPE, a plain pool's
    two_stage over exact of E, and bound_KIND_E_SHAPE. tokens_E_SHAPE: tokens a byte over those of a
    plain pool without sketches.
    link_KIND_E: the ratio by the clock of an emulated link, over the ratio of bytes;
    link_near_progressive and link_two_stage_progressive: the ratio itself. Metrics
    score_RIVAL_SHAPE and attend_RIVAL_SHAPE, and the ratios of BESIDE: a rival's time over ours."""
    for name in size.shapes:
        shape = SHAPES[name]
        shape = replace(shape, tokens=min(shape.tokens, size.tokens_most))
        shape = shape.walked(4 * size.walk_bytes)  # of bf16: codes of 4 bits are a quarter
        for threads in size.threads:
            point = f"{name}-{short(shape.tokens)}-t{threads}"
            with machine(size.region_bytes) as beside, pools_of(shape, size, threads) as pools:
                check(result, pools, point)
                rivals = rivals_of(result, pools["none"], point) if threads == 1 else {}
                measure(result, size, pools, point, beside, threads, rivals)
                if threads == size.threads[0]:
                    capacities(result, shape, name)
                    over_a_link(result, size, pools, name)
    if size.steps:
        cache_steps.run(result, size.steps)


def check(result: Result, pools: Mapping[str, Layers], point: str) -> None:
    """The largest difference from the plain pool's output, over the output's root mean square."""
    plain = pools["none"].attended()
    size = float(plain.float().square().mean().sqrt())
    for encoding, most in (("int8", 0.1), ("int4", 1.0), ("fp8_e4m3", 1.0), ("progressive", 0.1)):
        found = difference(pools[encoding].attended(), plain) / size
        result.checks[f"attend_{encoding}_{point}"] = found <= most


def rivals_of(result: Result, plain: Layers, point: str) -> dict[str, tuple[Rival, Given]]:
    """Those that are here, after a turn whose scores and outputs are looked at. Notes say which
    they are, and which are not."""
    given = Given(plain.shape, plain.keys, plain.values, plain.queries[0])
    wanted = {"score": given.scores, "attend": given.attended}
    notes, found = set[str](), dict[str, tuple[Rival, Given]]()
    for name, rival in kernels.forms(given):
        if isinstance(rival, str):
            notes.add(f"{name}: not measured, {rival}")
            continue
        notes.add(f"beside: {rival.version}, by one thread")
        rival.walk(given)
        error = rival.error(wanted[name.split("_", 1)[0]])
        result.measure(f"error_{name}_{point}", [error], "relative root mean square")
        result.checks[f"{name}_{point}"] = error <= RIVAL_ERROR_MOST
        found[name] = rival, given
    result.notes += sorted(notes.difference(result.notes))
    return found


def measure(
    result: Result,
    size: Size,
    pools: Mapping[str, Layers],
    point: str,
    beside: Machine,
    threads: int,
    rivals: Mapping[str, tuple[Rival, Given]],
) -> None:
    forms: dict[str, Walk] = {
        name: partial(rival.walk, given) for name, (rival, given) in rivals.items()
    }
    for encoding, pool in pools.items():
        forms |= {
            f"exact_{encoding}": walk_of(pool, "exact", size.share),
            f"attend_{encoding}": pool.attend,
            f"append_{encoding}": partial(pool.append, size.append_tokens),
        }
    planes = pools["progressive"]
    forms["two_stage_none"] = walk_of(pools["none"], "two_stage", size.share)
    forms["two_stage_progressive"] = walk_of(planes, "two_stage", size.share)
    forms["near_progressive"] = walk_of(planes, "near", size.share)
    samples, bounds = beside.take_turns(forms, size.rounds, "codes")
    us = result.times(samples, "us", f"{{}}_{point}")
    for name, forms_of in BESIDE.items():
        times = [us[form] for form in forms_of if form in us]
        if times:
            result.ratios[f"{name}_{point}"] = min(times) / us[name.split("_to_")[0]]
    for kind, plain in (("two_stage", "exact"), ("near", "attend")):
        result.ratios[f"{kind}_progressive_{point}"] = (
            us[f"{plain}_none"] / us[f"{kind}_progressive"]
        )
        if threads == size.threads[0]:
            ours, eights = (
                bytes_read(pool, how, size.share)
                for pool, how in ((planes, kind), (pools["int8"], plain))
            )
            result.ratios[f"bytes_{kind}_progressive_{point}"] = ours / eights
    shape = pools["none"].shape
    share = threads / len(beside.reading)
    for encoding in ENCODINGS[1:]:
        for kind in ("exact", "attend", "append"):
            ratio = us[f"{kind}_none"] / us[f"{kind}_{encoding}"]
            result.ratios[f"{kind}_{encoding}_{point}"] = ratio
        result.ratios[f"staged_to_exact_{encoding}_{point}"] = (
            us["two_stage_none"] / us[f"exact_{encoding}"]
        )
        layout = pools[encoding].pool.layout
        read_s = shape.sequences * shape.tokens * layout.stored_token_bytes / layout.layers / 2
        read_s /= bounds.read * share
        keys_s = shape.products / (bounds.keys * share)
        bound_s = {"exact": max(read_s, keys_s), "attend": 2 * max(read_s, keys_s)}
        for kind, least in bound_s.items():
            result.ratios[f"bound_{kind}_{encoding}_{point}"] = (
                1e6 * least / us[f"{kind}_{encoding}"]
            )


def capacities(result: Result, shape: Decoding, name: str) -> None:
    """Tokens a byte, by the records of whole pools without sketches."""
    sizes = {
        e: plan(shape.layout.encoded(e), CAPACITY_BYTES, sketch=False).record_bytes
        for e in ENCODINGS
    }
    for encoding in ENCODINGS[1:]:
        result.ratios[f"tokens_{encoding}_{name}"] = sizes["none"] / sizes[encoding]


def over_a_link(result: Result, size: Size, pools: Mapping[str, Layers], name: str) -> None:
    """By the clock of the link: what it takes where the device bounds everything."""
    for kind in ("exact", "attend"):
        seconds: dict[str, float] = {}
        for encoding, pool in pools.items():
            with emulate(pool.pool, LINK, mode="virtual") as link:
                seconds[encoding] = clock_s(link, walk_of(pool, kind, size.share))
        for encoding in ENCODINGS[1:]:
            layout = pools[encoding].pool.layout
            bytes_ratio = layout.token_bytes / layout.stored_token_bytes
            found = seconds["none"] / seconds[encoding] / bytes_ratio
            result.ratio(f"link_{kind}_{encoding}_{name}", found, link.label)
        planes, fewer = pools["progressive"], {"exact": "two_stage", "attend": "near"}[kind]
        with emulate(planes.pool, LINK, mode="virtual") as link:
            took = clock_s(link, walk_of(planes, fewer, size.share))
        result.ratio(f"link_{fewer}_progressive_{name}", seconds["none"] / took, link.label)


def points(result: Result) -> list[str]:
    """SHAPE-TOKENS-tTHREADS, as they were measured."""
    prefix = "attend_none_"
    return [name.removeprefix(prefix) for name in result.metrics if name.startswith(prefix)]


def tables(result: Result) -> list[Table]:
    """Ratios by shape and number of threads, and by shape alone; then those to rivals."""
    kinds = ("exact", "attend", "append")
    speeds = [f"{kind}_{encoding}" for encoding in ENCODINGS[1:] for kind in kinds]
    speeds += ["two_stage_progressive", "near_progressive"]
    bounds = [f"bound_{kind}_{encoding}" for encoding in ENCODINGS[1:] for kind in kinds[:2]]
    read = ["bytes_two_stage_progressive", "bytes_near_progressive"]
    return [
        *pivot("times as fast as a plain pool", result.ratios, speeds),
        *pivot("of what memory and arithmetic allow", result.ratios, bounds),
        *pivot(
            "tokens a byte, of a plain pool's",
            result.ratios,
            [f"tokens_{encoding}" for encoding in ENCODINGS[1:]],
        ),
        *pivot("bytes read, of int8's", result.ratios, read),
        *pivot("times as fast as others, by one thread", result.ratios, tuple(BESIDE)),
        *cache_steps.tables(result),
    ]


def draw(result: Result, path: Path) -> None:
    """Bits of a channel against tokens a second, over a plain pool's."""
    from cxlkv.bench.style import BLUE, INK, ORANGE, canvas, plain

    found = points(result)
    bits = {"none": 16.0, "int8": 8.13, "int4": 4.13}
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure, panels = canvas(3.2 * columns, 2.8 * rows, rows, columns, shared="xy")
    for axes, point in zip(panels, found, strict=False):
        for kind, color in (("attend", BLUE), ("exact", ORANGE)):
            ratios = [1.0, *(result.ratios[f"{kind}_{e}_{point}"] for e in ("int8", "int4"))]
            label = "attend to all" if kind == "attend" else "select by all keys"
            axes.plot(list(bits.values()), ratios, "o-", color=color, label=label)
        by_bytes = [16 / b for b in bits.values()]
        axes.plot(list(bits.values()), by_bytes, ":", color=INK, label="as many fewer bytes")
        plain(axes, "bits a channel", "tokens/s over bf16's", title=point)
    panels[0].invert_xaxis()  # of all: it is shared
    panels[0].legend(frameon=False, labelcolor=INK, loc="upper left", fontsize=8)
    figure.savefig(path, dpi=150)
