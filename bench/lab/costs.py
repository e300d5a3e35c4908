"""What methods cost beside quality: seconds to choose, to attend, and to summarise a context."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.adapters.transformers import LayerStep
from cxlkv.bench.lab.reading import Reader
from cxlkv.demo.forms import Form, FormsCache
from cxlkv.ndp.engine import Selection, same_pages
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens

COSTS = "costs.npz"
ROUNDS = 11
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Seconds of one sequence's step, of all layers, by one process as it was begun.

    tokens: of the context. append: of the context, once. full: attention to all pages, [rounds].
    rest: a step of the model without its attention, [rounds]. first: by methods, what the first
    choice took beyond a later one: its summaries, or its index. choose, attend: by methods,
    [shares, rounds].
    """

    shares: tuple[float, ...]
    tokens: int
    append: float
    full: Seconds
    rest: Seconds
    first: Mapping[str, float]
    choose: Mapping[str, Seconds]
    attend: Mapping[str, Seconds]

    def step(self, method: str, share: float) -> float:
        """To choose and to attend, the median."""
        at = self.shares.index(share)
        return float(np.median(self.choose[method][at] + self.attend[method][at]))

    def save(self, path: Path) -> None:
        arrays = {"shares": np.array(self.shares), "tokens": np.array(self.tokens)}
        arrays |= {"append": np.array(self.append), "full": self.full, "rest": self.rest}
        for name in self.choose:
            arrays[f"first {name}"] = np.array(self.first[name])
            arrays[f"choose {name}"] = self.choose[name]
            arrays[f"attend {name}"] = self.attend[name]
        unfinished = path.with_name(f".{path.name}.unfinished")
        with unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> Costs:
        with np.load(path, allow_pickle=False) as file:
            held = {name: np.asarray(file[name], np.float64) for name in file.files}

        def of(what: str) -> dict[str, Seconds]:
            return {key.split()[1]: held[key] for key in held if key.startswith(f"{what} ")}

        return cls(
            shares=tuple(held["shares"].tolist()),
            tokens=int(held["tokens"]),
            append=float(held["append"]),
            full=held["full"],
            rest=held["rest"],
            first={name: float(one) for name, one in of("first").items()},
            choose=of("choose"),
            attend=of("attend"),
        )


class Watch(FormsCache):
    """One row of full attention. Each layer's part and query [1, q_heads, dim] are kept, and the
    seconds that its attention takes."""

    parts: dict[int, tuple[LayerStep, Tensor]]
    attending: float = 0.0

    def attend(
        self, batch: Batch, part: LayerStep, queries: Tensor, picked: Selection | None
    ) -> Tensor:
        begin = time.perf_counter()
        out = super().attend(batch, part, queries, picked)
        self.attending += time.perf_counter() - begin
        self.parts[part.index] = part, queries.contiguous()
        return out

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        begin = time.perf_counter()
        picked = super().choose(part, queries)
        self.attending += time.perf_counter() - begin
        return picked

    def choose_with(self, form: Form) -> tuple[float, dict[int, Selection]]:
        """Seconds, and the choices of all layers without a window."""
        begin, batch = time.perf_counter(), self.apart[0].batch
        picked = {
            layer: self.choose_of(form.method, (form,), batch, part, queries, part.step.lengths)
            for layer, (part, queries) in self.parts.items()
            if part.window is None
        }
        return time.perf_counter() - begin, picked

    def attend_to(self, picked: Mapping[int, Selection]) -> float:
        """Seconds of all layers, which attend to all that they see where nothing is picked."""
        begin, batch = time.perf_counter(), self.apart[0].batch
        for layer, (part, queries) in self.parts.items():
            super().attend(batch, part, queries, picked.get(layer))
        return time.perf_counter() - begin


@torch.inference_mode()
def costs(
    reader: Reader,
    context: Tokens,
    token: Tensor,
    names: Sequence[str],
    shares: Sequence[float],
    append: float = 0.0,
    advance: Callable[[], None] = lambda: None,
) -> Costs:
    """Costs of each method at each share of the pages; methods take turns. append: seconds that
    the context took. advance: called ROUNDS + 1 times.
    """
    cache, rest = _watch(reader, context), []
    for _ in range(ROUNDS):
        begin, cache.attending = time.perf_counter(), 0.0
        reader.step(cache, token[None])
        rest.append(time.perf_counter() - begin - cache.attending)
    compile_all(reader, context, names)
    first = {name: cache.choose_with(Form(name, shares[0]))[0] for name in names}
    choose = {name: np.empty((len(shares), ROUNDS)) for name in names}
    attend = {name: np.empty((len(shares), ROUNDS)) for name in names}
    full = np.empty(ROUNDS)
    advance()
    for at in range(ROUNDS):
        full[at] = cache.attend_to({})
        for name in names:
            for number, share in enumerate(shares):
                choose[name][number, at], picked = cache.choose_with(Form(name, share))
                attend[name][number, at] = cache.attend_to(picked)
        advance()
    cache.release()
    more = {name: max(0.0, first[name] - float(np.median(choose[name][0]))) for name in names}
    counted = (tuple(shares), len(context), append, full, np.array(rest), more, choose, attend)
    return Costs(*counted)


def compile_all(reader: Reader, context: Tokens, names: Sequence[str]) -> None:
    """Methods that are compiled are, by a choice in another sequence."""
    layout = reader.pool.layout
    last = layout.windows.index(None)
    pages = context.fetch(last, same_pages(range(4), layout.kv_heads))
    keys, values = (np.asarray(each).reshape(layout.kv_heads, -1, each.shape[-1]) for each in pages)
    other = reader.pool.sequence()
    try:
        for layer in range(last + 1):
            other.append(layer, keys.swapaxes(0, 1).copy(), values.swapaxes(0, 1).copy())
        query = np.ones((layout.kv_heads, layout.head_dim), keys.dtype)
        for name in names:
            if name not in reader.others:
                other.select(last, query, budget=0.5, method=name)
    finally:
        other.release()


def _watch(reader: Reader, context: Tokens) -> Watch:
    forks = [context.fork()]
    cache = Watch(reader.pool, reader.model, [Form.full()], forks, others=reader.others)
    cache.parts = {}
    return cache
