"""What the functions of others' methods must give, so that an error names the method and says what
is wanted. Those of this package have tests instead."""

from __future__ import annotations

import inspect
import operator

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout, Rotary
from cxlkv.ndp.counted import Watched, as_python
from cxlkv.ndp.engine import VirtualRows
from cxlkv.ndp.kinds import (
    AnyChooser,
    Arrays,
    Choice,
    Floats,
    Question,
    Scorer,
    Shape,
    summary_of,
    turns,
)
from cxlkv.ndp.names import is_built_in

Summaries = Floats | npt.NDArray[np.int8] | npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
TRIED_PAGES = 5
"""Pages of noise, each with a summary of its own."""
COUNTED_QUERIES = (1, 8)
TRIED = ((1, 1), (3, TRIED_PAGES), (1, 64))
"""Queries and pages of the calls of score()."""


def read_of(scorer: Scorer, shape: Shape, most: int, count: int) -> tuple[int | None, int]:
    """The bytes that score() reads of a summary of `most`, None where it returns them, and of so
    many parameters. Raises BadArgumentError."""
    of_summary, of_parameters = scorer.read_bytes(shape), scorer.parameter_bytes(shape, count)
    for name, given, of, room in (
        ("read_bytes", of_summary, "a summary", most),
        ("parameter_bytes", of_parameters, f"{count} parameters", 4 * count),
    ):
        try:
            wrong = not 0 <= operator.index(given) <= room  # type: ignore[arg-type]
        except TypeError:
            wrong = given is not None or name == "parameter_bytes"
        if wrong:
            raise BadArgumentError(
                f"method {scorer.name!r}: {name}() returns {given!r} of {of} of {room} bytes; "
                "wanted is the number of bytes that score() reads of them"
            )
    return of_summary, of_parameters


def try_out(scorer: Scorer, shape: Shape, parameter_count: int) -> None:
    """Run a scorer's functions as Python, on noise: compiled, they say nothing of an index out of
    bounds. Raises BadArgumentError."""
    if is_built_in(scorer):
        return
    axes, dtype = summary_of(scorer, shape)
    random = np.random.default_rng(1)
    parameters = random.standard_normal(parameter_count).astype(np.float32)
    if scorer.rotary:
        parameters[: 2 * shape.dim] = turns(Rotary.of(1e4, shape.dim // 2 * 2), shape.dim)
    made = np.zeros((TRIED_PAGES, *axes), dtype)
    for page, summary in enumerate(made):
        keys = random.standard_normal((shape.tokens, shape.dim)).astype(np.float32)
        first = page * shape.tokens
        _call(scorer, "summarise", "a page of noise", keys, first, parameters, summary)
    for count, pages in TRIED:
        for factor, what in ((1, "noise"), (0, "zeros")):
            noise = random.standard_normal((count, shape.dim))
            queries = (factor * noise).astype(np.float32)
            scores = np.full((count, pages), np.nan, np.float32)
            of = f"{count} queries of {what} and {pages} pages"
            summaries = made[np.arange(pages) % TRIED_PAGES]
            scale = shape.dim**-0.5
            own = (queries, scale, shape.tokens, summaries, parameters, scores)
            _call(scorer, "score", of, *own)
            if np.isnan(scores).any():
                raise BadArgumentError(
                    f"method {scorer.name!r}: score() leaves a score unset, or makes it NaN, with "
                    f"{of}; it fills scores [queries, pages], what it returns is ignored"
                )
    for count in COUNTED_QUERIES:
        queries = random.standard_normal((count, shape.dim)).astype(np.float32)
        hold_reads(scorer, shape, queries, made[:1], parameters)


def reads(
    scorer: Scorer, shape: Shape, queries: Floats, summaries: Summaries, parameters: Floats
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes that score() reads of a summary and of the parameters, counted, as Python; and those
    that the scorer says it reads."""
    of_pages, learned = Watched.of(summaries), Watched.of(parameters)
    scores = np.empty((len(queries), len(summaries)), np.float32)
    with np.errstate(all="ignore"):
        asked = queries, shape.dim**-0.5, shape.tokens, of_pages, learned, scores
        returned = as_python(getattr(scorer, "score"))(*asked)  # noqa: B009
    said, of_parameters = read_of(scorer, shape, summaries[0].nbytes, len(parameters))
    counted = -(-of_pages.bytes_read // len(summaries)), learned.bytes_read
    return counted, (operator.index(returned) if said is None else said, of_parameters)


def hold_reads(
    scorer: Scorer, shape: Shape, queries: Floats, summaries: Summaries, parameters: Floats
) -> None:
    """Raises BadArgumentError where score() reads more than the scorer says. What only runs
    compiled is believed."""
    try:
        counted, said = reads(scorer, shape, queries, summaries, parameters)
    except Exception as error:
        if scorer.read_bytes(shape) is None and isinstance(error, TypeError):
            raise BadArgumentError(
                f"method {scorer.name!r}: read_bytes() returns None, so that score() is to return "
                f"how many bytes of a summary it read: {error}"
            ) from error
        return
    for name, of, found, own in zip(
        ("read_bytes", "parameter_bytes"), ("a summary", "the parameters"), counted, said,
        strict=True,
    ):  # fmt: skip
        if found > own:
            raise BadArgumentError(
                f"method {scorer.name!r}: score() reads {found} bytes of {of} for {len(queries)} "
                f"queries and says {own}: {name}() is to return as many, or, of a summary, None, "
                "and score() how many they are"
            )


def _call(scorer: Scorer, name: str, of: str, *given: object) -> None:
    """of: what is given, in words."""
    function = getattr(scorer, name)
    if inspect.ismethod(function):
        raise BadArgumentError(
            f"method {scorer.name!r}: {name}() takes no self: @staticmethod is wanted above it"
        )
    try:
        with np.errstate(all="ignore"):
            function(*given)
    except Exception as error:
        raise BadArgumentError(
            f"method {scorer.name!r}: {name}() fails on {of}, as Python: "
            f"{type(error).__name__}: {error}"
        ) from error


# ---- choosers ----


def state_of(
    chooser: AnyChooser, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]
) -> Arrays:
    """State of a run of pages. Raises BadArgumentError where it is not arrays."""
    given: object = chooser.state(keys, values)
    if isinstance(given, tuple) and all(isinstance(each, np.ndarray) for each in given):
        return given
    raise _wrong(chooser, "state() returns", given, "a tuple of numpy arrays: (array,) of one")


def choice_of(
    chooser: AnyChooser, layout: KVLayout, states: list[Arrays], asked: Question
) -> Choice:
    """What is chosen. Raises BadArgumentError where it is not as documented: a NaN among the
    log-weights would leave a token out, whole numbers would take all tokens, and more tokens than
    the budget has would look better than a method that keeps to it."""
    given: object = chooser.choose(states, asked)
    if not isinstance(given, Choice):
        raise _wrong(chooser, "choose() returns", given, "Choice(log_weights, rows, bytes_read)")
    if is_built_in(chooser):
        return given
    weights, rows, heads = given.log_weights, given.rows, (layout.kv_heads,)
    _check_floats(chooser, "log_weights", weights, (*heads, asked.tokens))
    among = weights[:, asked.first : asked.last]
    _check_numbers(chooser, "log_weights", among)
    chosen = int(np.count_nonzero(among > -np.inf, axis=1).max(initial=0))
    if chosen > asked.most:
        raise BadArgumentError(
            f"method {chooser.name!r}: the Choice has {chosen:,} tokens of a kv head in [first, "
            f"last); the budget has {asked.most:,}, the `most` of the Question"
        )
    if rows is not None:
        if not isinstance(rows, VirtualRows):
            raise _wrong(chooser, "rows of the Choice are", rows, "VirtualRows(k, v, log_counts)")
        if np.ndim(rows.log_counts) != 2:
            wanted = f"float32 [{layout.kv_heads}, m]"
            raise _wrong(chooser, "rows.log_counts of the Choice is", rows.log_counts, wanted)
        m = np.shape(rows.log_counts)[1:2]
        dims = {"log_counts": (), "k": (layout.head_dim,), "v": (layout.value_head_dim,)}
        for name, dim in dims.items():
            _check_floats(chooser, f"rows.{name}", getattr(rows, name), (*heads, *m, *dim))
        _check_numbers(chooser, "rows.log_counts", rows.log_counts)
        there = rows.log_counts > -np.inf
        _check_numbers(chooser, "rows.k", rows.k[there])
        _check_numbers(chooser, "rows.v", rows.v[there])
    if not isinstance(given.bytes_read, (int, np.integer)):
        raise _wrong(chooser, "bytes_read is", given.bytes_read, "a number of bytes")
    return given


def _check_floats(chooser: AnyChooser, name: str, given: object, shape: tuple[int, ...]) -> None:
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f" or given.shape != shape:
        raise _wrong(chooser, f"{name} of the Choice is", given, f"float32 {list(shape)}")


def _check_numbers(chooser: AnyChooser, name: str, given: npt.NDArray[np.float32]) -> None:
    if not given.max(initial=-np.inf) < np.inf:
        raise BadArgumentError(
            f"method {chooser.name!r}: {name} of the Choice has NaN or +inf, by choose() or by the "
            "keys and values of the sequence"
        )


def _wrong(chooser: AnyChooser, what: str, given: object, wanted: str) -> BadArgumentError:
    said = repr(given) if given is None or np.isscalar(given) else type(given).__name__
    if isinstance(given, np.ndarray):
        said = f"an array, {given.dtype} {list(given.shape)}"
    return BadArgumentError(f"method {chooser.name!r}: {what} {said}; wanted is {wanted}")
