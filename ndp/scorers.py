"""Scorers are ways to choose pages that are no part of the core: a class each, found by its name.

docs/adding-a-method.md says how one is written. numba compiles its two functions to C functions,
which the core calls from its threads, here or in a worker (native/src/ndp/select_scorer.c).
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.arrays import Array
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import KVLayout
from cxlkv.ndp import names as method_names
from cxlkv.ndp import trials
from cxlkv.ndp.engine import METHODS, Selection, same_pages
from cxlkv.ndp.kinds import Bytes as Bytes
from cxlkv.ndp.kinds import Floats as Floats
from cxlkv.ndp.kinds import Sample as Sample
from cxlkv.ndp.kinds import Scorer as Scorer
from cxlkv.ndp.kinds import Shape as Shape
from cxlkv.ndp.kinds import Words as Words
from cxlkv.ndp.kinds import summary_bytes as summary_bytes
from cxlkv.ndp.kinds import summary_of
from cxlkv.ndp.kinds import turns as turns

BY_MASS = ("auto", "exact", "attention")
"""The core's methods that find the pages that hold a share of the attention."""


def names() -> tuple[str, ...]:
    """Names of all installed scorers, in this package and others."""
    return method_names.known(method_names.scorers())


def add(scorer: Scorer) -> None:
    """Make a scorer known to this process by its name, in place of another one that was added or
    offered by it; not of one of this package. Raises BadArgumentError."""
    found = method_names.scorers()
    name = method_names.check(scorer, Scorer, method_names.known(method_names.choosers()))
    method_names.left_out.pop(name, None)
    if name in found and found[name] is not scorer:
        _editions[name] = _editions.get(name, 0) + 1
    found[name] = scorer


_editions: dict[str, int] = {}
"""How many scorers of a name were replaced: what the others summarised is not this one's, and a
worker does not know it."""


def of(name: str) -> Scorer:
    """Raises BadArgumentError for a name that no scorer has; UnsupportedError without numba. A name
    that was left out, and that another one has, check() refuses."""
    try:
        return method_names.scorers()[name]
    except KeyError:
        if method_names.chooser_of(name):
            raise UnsupportedError(
                f"method {name!r} chooses by a state of the sequence: nothing is learned beforehand"
            ) from None
        known = ", ".join((*METHODS, *names(), *method_names.known(method_names.choosers())))
        raise BadArgumentError(
            f"method {name!r}: use one of {known}; or is the package that has it not installed?"
        ) from None


def check(method: str) -> None:
    """Raises BadArgumentError where it is neither the core's, a chooser's nor a scorer's."""
    if method not in METHODS and not method_names.chooser_of(method):
        of(method.partition("=")[0])


def takes_mass(method: str) -> bool:
    """Whether a budget of mass can be met by it; for what check() has not refused."""
    if method in METHODS or method_names.chooser_of(method):
        return method in BY_MASS
    return of(method.partition("=")[0]).log_sums


# ---- compiled ----


@dataclass(frozen=True)
class Compiled:
    """C functions as the core takes them; kept: what they need."""

    code: _core.ScorerCode
    kept: tuple[object, ...]


@cache
def compiled(scorer: Scorer, shape: Shape, parameter_count: int = 0) -> Compiled:
    """By numba, for this CPU."""
    from cxlkv.ndp import compile as by_numba

    axes, dtype = summary_of(scorer, shape)
    size = summary_bytes(scorer, shape)
    read, learned = trials.read_of(scorer, shape, size, parameter_count)
    c_score = partial(by_numba.c_score, counted=read is None)
    made_by = {"summarise": partial(by_numba.c_summarise), "score": c_score}
    if not all(callable(getattr(scorer, name, None)) for name in made_by):
        raise BadArgumentError(
            f"method {scorer.name!r}: a scorer has summarise() and score(), both static"
        )
    trials.try_out(scorer, shape, parameter_count)
    made = []
    for name, compile_one in made_by.items():
        function = getattr(scorer, name)
        try:
            made.append(compile_one(function, shape, axes, dtype, parameter_count))
        except Exception as error:  # numba's, of many kinds
            raise BadArgumentError(
                f"method {scorer.name!r}: numba cannot compile {name}(): "
                f"{by_numba.reason(error, function)}"
            ) from error
    summarise, score = (each.address for each in made)
    code = _core.ScorerCode(size, read or 0, learned, scorer.log_sums, summarise, score)
    return Compiled(code, tuple(made))


@dataclass
class _Uses:
    """Scorers in a pool. by_word: what a method that was asked for is, and its number there; kept:
    by numbers, the memory that the core reads as long as the pool is open."""

    by_word: dict[str, tuple[Scorer, int]] = field(default_factory=dict)
    kept: dict[int, tuple[object, ...]] = field(default_factory=dict)


_uses: WeakKeyDictionary[_core.Handle, _Uses] = WeakKeyDictionary()
_adding = threading.Lock()


def _after_fork() -> None:
    """Another thread of the parent may have had the lock."""
    global _adding
    _adding = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def number_of(pool: _core.Handle, layout: KVLayout, word: str) -> int:
    """By what the core knows a scorer of this pool; it is added where it is new there. word: its
    name, or "name=file" with what it has learned.

    Raises BadArgumentError for an unknown name, and for one that has to learn first.
    """
    name, _, path = word.partition("=")
    scorer, used = of(name), _uses.get(pool)
    if used is not None and word in used.by_word:
        known, number = used.by_word[word]
        if known is scorer:
            return number
    check(name)
    if path:
        return use(pool, layout, scorer, _read(Path(path)), word)
    if scorer.calibrated:
        raise BadArgumentError(
            f"method {name!r} learns from keys first: pool.calibrate({name!r}, a sequence of them)"
        )
    return use(pool, layout, scorer, None)


def load(pool: _core.Handle, layout: KVLayout, word: str) -> str:
    """The name by which a scorer is known in this pool from now on, with what it has learned; word
    and errors as of number_of()."""
    name, _, path = word.partition("=")
    check(name)
    if path:
        use(pool, layout, of(name), _read(Path(path)))
    else:
        number_of(pool, layout, name)
    return name


def _read(path: Path) -> Floats:
    """Does not wait for a FIFO, and believes no size that a file's header says."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            return np.asarray(np.load(file, allow_pickle=False), np.float32)
    except (OSError, ValueError, TypeError, EOFError, MemoryError) as error:
        raise BadArgumentError(
            f"{path}: {error}; numpy.save writes what pool.calibrate() returns"
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def use(
    pool: _core.Handle,
    layout: KVLayout,
    scorer: Scorer,
    parameters: Floats | None,
    word: str | None = None,
) -> int:
    """parameters: [layers, kv_heads, n], or None. word: what it is called in this pool, its name if
    None; the last call of a name is what it means. Raises BadArgumentError for another shape."""
    shape, count = Shape(layout.page_tokens, layout.head_dim), 0
    if parameters is not None:
        _check_learned(scorer, shape, (layout.layers, layout.kv_heads), parameters)
    if scorer.rotary:
        parameters = _behind_turns(scorer, layout, parameters)
    if parameters is not None:
        parameters = np.ascontiguousarray(parameters, np.float32)
        count = parameters.shape[2]
    made = compiled(scorer, shape, count)
    number = _number(scorer, made.code.summary_bytes, parameters)
    with _adding:
        known = _uses.setdefault(pool, _Uses())
        if number not in known.kept:
            _core.pool_add_scorer(pool, number, scorer.name, made.code, parameters)
            known.kept[number] = (made, parameters)
        known.by_word[word or scorer.name] = (scorer, number)
    return number


def _behind_turns(scorer: Scorer, layout: KVLayout, learned: Floats | None) -> Floats:
    """[layers, kv_heads, n]. Raises BadArgumentError where the layout does not say the rotation."""
    for layer, window in enumerate(layout.windows):
        if window is None and layout.rotary_of(layer) is None:
            raise BadArgumentError(
                f"method {scorer.name!r} asks how the model turns its keys, which the pool's "
                f"layout does not say of layer {layer}: create it with layout_of(model), or with "
                "KVLayout(..., rotary=Rotary.of(theta, channels))"
            )
    own = np.stack([turns(layout.rotary_of(n), layout.head_dim) for n in range(layout.layers)])
    both = np.repeat(own[:, None], layout.kv_heads, axis=1)
    return both if learned is None else np.concatenate([both, learned], axis=2, dtype=np.float32)


def _number(scorer: Scorer, summary_bytes: int, parameters: Floats | None) -> int:
    """The same in all processes that have the same scorer installed, and what it learned."""
    edition, source = _editions.get(scorer.name, 0), method_names.source_of(scorer)
    number = zlib.crc32(f"{scorer.name} {edition} {summary_bytes} {source}".encode())
    if parameters is not None:
        number = zlib.crc32(parameters.tobytes(), number)
    return number or 1


def _check_learned(scorer: Scorer, shape: Shape, axes: tuple[int, int], parameters: Floats) -> None:
    wanted = scorer.parameter_count(shape)
    given = parameters.shape
    if len(given) == 3 and given[:2] == axes and wanted in (None, given[2]):
        return
    numbers = "n" if wanted is None else f"{wanted} numbers"
    raise BadArgumentError(
        f"method {scorer.name!r}: what it learned has shape {given}, wanted [{axes[0]} layers, "
        f"{axes[1]} kv heads, {numbers}]: learn it with this layout, by pool.calibrate()"
    )


CALIBRATED_TOKENS = 16384
"""Tokens of a sequence, in pages drawn at random, for each layer and kv head."""


def learned(
    scorer: Scorer,
    layout: KVLayout,
    fetch: Callable[[int, Selection], tuple[Array, Array]],
    queries: Floats | None,
    tokens: int,
) -> Floats:
    """[layers, kv_heads, n], of a layer with a window by the pages in it. fetch: of a sequence of
    so many tokens. queries: of its last ones, [layers, rows, q_heads, dim]. Raises
    BadArgumentError without a whole page."""
    if queries is not None:
        _check_queries(layout, queries, tokens)
    random = np.random.default_rng(0)
    found = []
    end = -(-tokens // layout.page_tokens)
    for layer, window in enumerate(layout.windows):
        first = 0 if window is None else max(0, tokens + 1 - window) // layout.page_tokens
        picked = same_pages(range(first, end), layout.kv_heads)
        pages = np.asarray(fetch(layer, picked)[0])[0, :, :-1]  # the last one may not be full
        if not pages.shape[1]:
            raise BadArgumentError(f"method {scorer.name!r} learns from two pages or more")
        count = -(-CALIBRATED_TOKENS // layout.page_tokens)
        some = np.sort(random.permutation(pages.shape[1])[:count])
        asked = None if queries is None else (queries[layer], tokens - queries.shape[1])
        samples = _samples(scorer, layout, layer, (pages[:, some], first + some), asked)
        try:
            found.append([scorer.learn(sample) for sample in samples])
        except (ArithmeticError, LookupError, ValueError, np.linalg.LinAlgError) as error:
            read = len(some) * layout.page_tokens
            raise BadArgumentError(
                f"method {scorer.name!r} learns nothing from {read} tokens: {error}"
            ) from error
    return np.array(found, np.float32)


def _check_queries(layout: KVLayout, queries: Floats, tokens: int) -> None:
    shape = np.shape(queries)
    wanted = len(shape) == 4 and shape[0] == layout.layers and shape[3] == layout.head_dim
    if not wanted or not 1 <= shape[1] <= tokens or not shape[2] or shape[2] % layout.kv_heads:
        raise BadArgumentError(
            f"queries {shape}: wanted are those of the last of {tokens} tokens, [{layout.layers} "
            f"layers, rows, a multiple of {layout.kv_heads} heads, {layout.head_dim} channels]"
        )


def _samples(
    scorer: Scorer,
    layout: KVLayout,
    layer: int,
    pages: tuple[Array, npt.NDArray[np.int64]],
    queries: tuple[Floats, int] | None,
) -> list[Sample]:
    """Samples of each kv head. pages: [kv_heads, n, tokens, dim] and their numbers; queries:
    [rows, q_heads, dim] and the position of the first.
    """
    rotary, (some, numbers) = layout.rotary_of(layer), pages
    keys = np.asarray(some).astype(np.float32)
    asked: list[Floats | None] = [None] * layout.kv_heads
    back = rotary if scorer.rotary else None
    if back is not None:
        at = (numbers[:, None] * layout.page_tokens + np.arange(layout.page_tokens)).ravel()
        keys = back.unrotate(keys.reshape(len(keys), -1, keys.shape[3]), at).reshape(keys.shape)
    if queries is not None:
        rows, first = queries
        by_head = rows.astype(np.float32).swapaxes(0, 1)  # [q_heads, rows, dim]
        if back is not None:
            by_head = back.unrotate(by_head, first + np.arange(len(rows)))
        asked = list(by_head.reshape(layout.kv_heads, -1, layout.head_dim))
    return [Sample(*each, rotary) for each in zip(keys, asked, strict=True)]
