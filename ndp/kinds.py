"""The two kinds of methods that are no part of the core, scorers and choosers: what one is, what it
is asked and what it gives. Methods stand on this alone; scorers.py and choosers.py use them.

docs/adding-a-method.md says how one is written.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError
from cxlkv.layout import Rotary
from cxlkv.ndp.engine import VirtualRows

SUMMARY_BYTES_MAX = 16384
SUMMARY_DTYPES = ("float32", "int8", "uint8", "uint16")
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]

# ---- scorers: by a summary of each page ----


@dataclass(frozen=True)
class Shape:
    """What a scorer is compiled for: tokens of a page, channels of a key."""

    tokens: int
    dim: int


class Sample(NamedTuple):
    """What a scorer learns from, of one layer and kv head.

    pages: keys of whole pages, drawn at random, float32 [n, tokens, dim]. queries: of the text's
    last tokens, of all query heads of the kv head, [m, dim]; None: not given. rotary: how the model
    turns both; None: not known. A scorer with `rotary` gets both from before the rotation.
    """

    pages: Floats
    queries: Floats | None
    rotary: Rotary | None


class Scorer:
    """One way to score pages, by a summary of each page and kv head.

    A subclass says its `name`, which no other method has, and has summary() and two static
    functions, which numba compiles in nopython mode: loops and arrays, no Python objects. They run
    on several threads at once; what they raise fails the select.

    summarise(keys, first, parameters, summary) fills the summary of a page: keys [tokens, dim] as
    attention sees them, the first of which is token `first` of its sequence.

    score(queries, scale, tokens, summaries, parameters, scores) fills scores [n, pages]: the
    higher, the more a page of `tokens` tokens matters to queries [n, dim], the logits of which are
    scale * q.k. summaries is [pages, *summary].
    """

    name: ClassVar[str]
    calibrated: ClassVar[bool] = False
    """Whether it needs calibrate() before its first use."""
    log_sums: ClassVar[bool] = False
    """Whether a score is the log of a page's sum of exp(logit). Pages are then chosen by their
    share of the attention, averaged over the query heads of a kv head, and budgets may be of mass;
    else by the best score of any query."""

    rotary: ClassVar[bool] = False
    """Whether it needs the layout's rotary embedding. `parameters` then begin with 2 * dim numbers
    of it, which rotate() and unrotate() of cxlkv.ndp.methods.rotary take, and learn() gets keys and
    queries from before the rotation."""

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        """Shape and dtype of a page's summary, a multiple of 8 bytes and 16 KiB at most; float32,
        int8, uint8 or uint16."""
        raise BadArgumentError(f"method {self.name!r}: a scorer has summary(), shape and dtype")

    def read_bytes(self, shape: Shape) -> int | None:
        """Bytes of a summary that score() reads; None: it depends on the queries, and score()
        returns how many it read of each for all of them together.
        """
        return summary_bytes(self, shape)

    def parameter_bytes(self, shape: Shape, count: int) -> int:
        """Bytes that score() reads of so many parameters."""
        return 4 * count

    def calibrate(self, keys: Floats) -> Floats:
        """What summarise() and score() get as `parameters`, one axis: of one layer and kv head, of
        which these are keys [n, dim]."""
        return np.empty(0, np.float32)

    def learn(self, sample: Sample) -> Floats:
        """calibrate() for what depends on more than the keys: which of them share a page, the
        queries that ask them."""
        return self.calibrate(sample.pages.reshape(-1, sample.pages.shape[2]))

    def parameter_count(self, shape: Shape) -> int | None:
        """How many numbers calibrate() returns, so that those of another model are refused; None:
        any number, which both functions then have to look at."""
        return None


def summary_of(scorer: Scorer, shape: Shape) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a summary. Raises BadArgumentError."""
    given = scorer.summary(shape)
    try:
        axes, dtype = given
        found = tuple(map(operator.index, axes)), np.dtype(dtype).name
    except (TypeError, ValueError):
        found = (), ""
    if found[1] not in SUMMARY_DTYPES:
        raise BadArgumentError(
            f"method {scorer.name!r}: summary() returns {given!r}; wanted are the shape and the "
            f"dtype of a summary, such as (2, {shape.dim}), np.float32: one of "
            f"{', '.join(SUMMARY_DTYPES)}"
        )
    return found


def summary_bytes(scorer: Scorer, shape: Shape) -> int:
    """Bytes of a page and kv head. Raises BadArgumentError where there are too many."""
    axes, dtype = summary_of(scorer, shape)
    found = int(np.prod(axes)) * np.dtype(dtype).itemsize
    if found % 8 or not 0 < found <= SUMMARY_BYTES_MAX:
        raise BadArgumentError(
            f"method {scorer.name!r}: a summary of {found} bytes for pages of {shape.tokens} "
            f"tokens and {shape.dim} channels; a multiple of 8 is wanted, {SUMMARY_BYTES_MAX} at "
            "most"
        )
    return found


def turns(rotary: Rotary | None, dim: int) -> Floats:
    """What parameters of a scorer with `rotary` begin with, [2 * dim]: the other channel of each
    channel's pair, and the radians a token by which it turns towards that."""
    others, radians = np.arange(dim, dtype=np.float32), np.zeros(dim, np.float32)
    if rotary is not None:
        first, second = rotary.pairs
        others[first], others[second] = second, first
        radians[second] = rotary.frequencies
        radians[first] = -radians[second]
    return np.concatenate([others, radians])


# ---- choosers: by a state of the sequence ----


class Question(NamedTuple):
    """What a list is chosen for.

    queries: float32 [kv_heads, n, dim]; a logit is scale * q.k. tokens: those of all states
    together. first, last: of these, [first, last) are to be chosen among, the others are attended
    to in any case. most: how many may be chosen for each kv head, 1 to last - first - 1. seed: of
    what is drawn, another one for each layer and position of the query.
    """

    queries: Floats
    scale: float
    tokens: int
    first: int
    last: int
    most: int
    seed: int


class Choice(NamedTuple):
    """log_weights: float32 [kv_heads, tokens], added to a token's logit; -inf: it is left out.
    Outside of [first, last) they are not looked at. rows: what stands for tokens that are left out,
    one set for each kv head: k [kv_heads, m, dim]. bytes_read: of the states."""

    log_weights: Floats
    rows: VirtualRows | None
    bytes_read: int


Arrays = tuple[npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.uint8], ...]
State = TypeVar("State", bound=Arrays)


class Chooser(Generic[State]):
    """One way to choose tokens, by states of runs of whole pages.

    A subclass says its `name` and has state() and choose(). Several threads call them, and neither
    changes a state. seed: of what is drawn at random.
    """

    name: ClassVar[str]

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed

    def state(self, keys: Floats, values: Floats) -> State:
        """Arrays of a run of pages, kept as long as a sequence has them; they depend on nothing
        else. keys [kv_heads, tokens, dim], values [kv_heads, tokens, value_dim]."""
        raise BadArgumentError(f"method {self.name!r} has no state(keys, values)")

    def choose(self, states: list[State], asked: Question) -> Choice:
        """states: of neighbouring runs, from the sequence's first token on."""
        raise BadArgumentError(f"method {self.name!r} has no choose(states, asked)")


AnyChooser = Chooser[Arrays]
