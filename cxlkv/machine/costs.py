"""Estimates what a cached prefix costs to recompute, to fetch, and to attend to in place.

Arithmetic only, in seconds, bytes and tokens; docs/reference/costs.md has the formulas and says
where each number comes from. Requests and pages are scalars or arrays of one length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Doubles
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout
from cxlkv.numbers import is_real

TIERS = ("local", "far", "cold")
CHOICES = ("recompute", "fetch", "attend")  # of equals the first: it needs nothing of us
TOKENS_MAX = 1 << 24  # where the search for a break-even length ends

TierNames = str | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Speed of one tier: bytes of K and V a second, and latency_s for each operation.

    An operation is a call for a layer in local and far, a record in cold. write_bytes_per_s: None
    where it is not known. where: what was measured, for people.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    write_bytes_per_s: float | None = None
    where: str = ""

    def __post_init__(self) -> None:
        _check_rate("bytes_per_s", self.bytes_per_s)
        if self.write_bytes_per_s is not None:
            _check_rate("write_bytes_per_s", self.write_bytes_per_s)
        _check_number("latency_s", self.latency_s)


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Speed at which the engine recomputes keys and values.

    tokens_per_s: at the beginning of a context. context_half: the position at which attention
    takes as long as all else, so that prefill is half as fast there; infinite: not known.
    """

    tokens_per_s: float
    context_half: float = math.inf

    def __post_init__(self) -> None:
        _check_rate("tokens_per_s", self.tokens_per_s)
        if self.context_half != math.inf:
            _check_rate("context_half", self.context_half)

    def seconds(self, first: npt.ArrayLike, end: npt.ArrayLike) -> Doubles:
        """Seconds for tokens [first, end) of a context, those before `first` being there."""
        begins, ends = np.asarray(first, np.float64), np.asarray(end, np.float64)
        middle = (begins + ends) / 2
        return (ends - begins) * (1 + middle / self.context_half) / self.tokens_per_s

    @classmethod
    def measured(cls, points: Sequence[tuple[float, float]]) -> Prefill:
        """The rate by (tokens/s, prompt's tokens): one or two measurements of whole prompts.

        Two say how much attention adds.
        """
        for speed, context in points:
            _check_rate("tokens_per_s", speed)
            _check_number("context", context)
        if len(points) == 1:
            return cls(tokens_per_s=points[0][0])
        if len(points) != 2 or points[0][1] == points[1][1]:
            raise BadArgumentError(
                "prefill speeds: one, or two of prompts of different lengths (9000@4096)"
            )
        # A token of a prompt of C takes (1 + C / (2 half)) / speed on average: linear in C.
        (short_speed, short), (long_speed, long) = sorted(points, key=lambda point: point[1])
        slope = (1 / long_speed - 1 / short_speed) / (long - short)
        token_s = 1 / short_speed - slope * short
        if slope < 0 or token_s <= 0:
            raise BadArgumentError(
                f"prefill of {long_speed:g} tokens/s at {long:g} tokens and {short_speed:g} at "
                f"{short:g}: a longer prompt is computed more slowly, and never in fewer seconds "
                "than attention alone would explain; measure both again, in quiet"
            )
        return cls(
            tokens_per_s=1 / token_s, context_half=token_s / (2 * slope) if slope else math.inf
        )


@dataclass(frozen=True)
class Decision:
    """What to do with one request's cached prefix; seconds of each choice, inf: not possible."""

    choice: str
    seconds: dict[str, float]
    reason: str


@dataclass(frozen=True)
class Decisions:
    """The choices for many requests: choice[i] is an index in CHOICES, seconds [n, 3] in the same
    order."""

    choice: npt.NDArray[np.int64]
    seconds: Doubles
    cached_tokens: npt.NDArray[np.int64]
    tiers: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.choice)

    def __getitem__(self, index: int) -> Decision:
        seconds = dict(zip(CHOICES, map(float, self.seconds[index]), strict=True))
        choice = CHOICES[self.choice[index]]
        tokens, tier = int(self.cached_tokens[index]), self.tiers[index]
        others = [
            f"{format_seconds(seconds[name])} to {words}"
            for name, words in (
                ("fetch", "fetch"),
                ("attend", "attend to where they lie"),
                ("recompute", "recompute"),
            )
            if seconds[name] < math.inf
        ]
        taken = f"{', '.join(others[:-1])} and {others[-1]}"
        told = f"{tokens:,} tokens in the {tier} tier take {taken}"
        reason = f"{choice}: {told}, decoding included"
        return Decision(choice, seconds, reason if tokens else f"{choice}: nothing is cached")


@dataclass(frozen=True)
class Verdict:
    """Whether a tier pays for a hit of so many tokens, and from which length on.

    recompute_s and what follows from it are None while the prefill speed is not known.
    pays_from: tokens, None: at no length up to TOKENS_MAX. prefill_tokens_per_s: an engine that
    is slower than this, on average over such a prompt, gains. reads_per_write: how often what is
    written must be read back for writing it to pay; None: no number does, or it is not known.
    """

    tier: str
    tokens: int
    read_s: float
    prefill_tokens_per_s: float
    recompute_s: float | None
    pays: bool | None
    pays_from: int | None
    reads_per_write: float | None
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs of this machine. A tier that is None is absent, or was not measured.

    score_bytes_per_s: bytes of keys in sight over the time of a select; attend_bytes_per_s: of K
    and V; step_latency_s: of a layer's select and attend, whatever their size. engine_...: the same
    where the engine decodes, once K and V are fetched or recomputed; None: as near the data.
    link_bytes_per_s: from this host's memory to the GPU, None: the engine computes in this memory.
    emulated: what stood for the pools' memory, "" if nothing did; not for the cold tier's.
    """

    local: Tier | None = None
    far: Tier | None = None
    cold: Tier | None = None
    score_bytes_per_s: float | None = None
    attend_bytes_per_s: float | None = None
    step_latency_s: float = 0.0
    engine_score_bytes_per_s: float | None = None
    engine_attend_bytes_per_s: float | None = None
    engine_step_latency_s: float = 0.0
    link_bytes_per_s: float | None = None
    prefill: Prefill | None = None
    emulated: str = ""

    def __post_init__(self) -> None:
        for name in ("score", "attend", "engine_score", "engine_attend", "link"):
            if getattr(self, rate := f"{name}_bytes_per_s") is not None:
                _check_rate(rate, getattr(self, rate))
        for name in ("step_latency_s", "engine_step_latency_s"):
            _check_number(name, getattr(self, name))

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that have costs."""
        return tuple(name for name in TIERS if getattr(self, name) is not None)

    def decide(
        self,
        layout: KVLayout,
        *,
        tokens: int,
        cached_tokens: int,
        tier: str,
        decode_tokens: int = 0,
        share: float = 1.0,
    ) -> Decision:
        """Choose the cheapest way for one request; see decide_all()."""
        return self.decide_all(
            layout,
            tokens=[tokens],
            cached_tokens=[cached_tokens],
            tier=tier,
            decode_tokens=[decode_tokens],
            share=share,
        )[0]

    def decide_all(
        self,
        layout: KVLayout,
        *,
        tokens: npt.ArrayLike,
        cached_tokens: npt.ArrayLike,
        tier: TierNames,
        decode_tokens: npt.ArrayLike = 0,
        share: npt.ArrayLike = 1.0,
    ) -> Decisions:
        """Choose the cheapest way for each request: a prompt of `tokens`, `cached_tokens` of them a
        prefix that lies in `tier`, then decode_tokens to decode.

        share: of the pages that a step attends to, as in Budget, whichever way is taken. Every
        token behind the prefix, of the prompt or decoded, is a step: near the data, or where the
        engine has what was fetched or recomputed. What else all three ways have in common is left
        out. Raises BadArgumentError.
        """
        prompts = _whole("tokens", tokens)
        cached = _whole("cached_tokens", cached_tokens)
        decoded = _whole("decode_tokens", decode_tokens)
        shares = np.asarray(share, np.float64)
        if not np.all((shares > 0) & (shares <= 1)):
            raise BadArgumentError(f"share is {shares}: outside (0, 1]")
        arrays = np.broadcast_arrays(np.atleast_1d(prompts), cached, decoded, shares)
        prompts, cached, decoded = (array.astype(np.int64) for array in arrays[:3])
        if np.any(cached > prompts):
            worst = int(np.argmax(cached > prompts))
            raise BadArgumentError(
                f"cached_tokens is {cached[worst]}, more than the prompt's {prompts[worst]} tokens"
            )
        names = (tier,) * len(prompts) if isinstance(tier, str) else tuple(tier)
        if len(names) != len(prompts):
            raise BadArgumentError(f"tier has {len(names)} names for {len(prompts)} requests")
        steps = prompts - cached + decoded
        fetch = self.read_seconds(layout, cached, names)
        attend = self.attend_seconds(layout, cached, names, steps, arrays[3])
        decode = self.decode_seconds(layout, cached, steps, arrays[3])
        recompute = self.recompute_seconds(0, cached)
        seconds = np.stack([recompute + decode, fetch + decode, attend], axis=1)
        return Decisions(np.argmin(seconds, axis=1), seconds, cached, names)

    def read_seconds(self, layout: KVLayout, tokens: npt.ArrayLike, tier: TierNames) -> Doubles:
        """Seconds to copy a prefix of `tokens` out of `tier`, to the GPU where there is a link."""
        wanted = _whole("tokens", tokens)
        if isinstance(tier, str):
            return self._read_seconds(layout, wanted, tier)
        names = np.array(tier)
        result = np.zeros(wanted.shape)
        for name in dict.fromkeys(tier):
            here = names == name
            result[here] = self._read_seconds(layout, wanted[here], name)
        return result

    def _read_seconds(self, layout: KVLayout, tokens: npt.NDArray[np.int64], tier: str) -> Doubles:
        known = self.tier(tier)
        if tier == "cold":
            return self._cold_seconds(layout, tokens) + self._read_seconds(layout, tokens, "far")
        calls = np.where(tokens > 0, layout.layers, 0)
        read_s = stored_bytes(layout, tokens) / known.bytes_per_s
        if self.link_bytes_per_s is not None:  # both go on at the same time: the slower one counts
            read_s = np.maximum(read_s, kv_bytes(layout, tokens) / self.link_bytes_per_s)
        return calls * known.latency_s + read_s

    def _cold_seconds(self, layout: KVLayout, tokens: npt.NDArray[np.int64]) -> Doubles:
        """Seconds from the file to the pool."""
        known = self.tier("cold")
        read = stored_bytes(layout, tokens) / known.bytes_per_s
        return _records(layout, tokens) * known.latency_s + read

    def attend_seconds(
        self,
        layout: KVLayout,
        tokens: npt.ArrayLike,
        tier: TierNames,
        steps: npt.ArrayLike,
        share: npt.ArrayLike = 1.0,
    ) -> Doubles:
        """Seconds to attend to a prefix of `tokens` in place, `steps` times, at least once.

        Once, since an engine computes the last token of a prompt whatever is cached. What lies in
        a file is read into the pool before.
        """
        wanted = _whole("tokens", tokens)
        total = np.maximum(1, _whole("steps", steps)) * self.step_seconds(layout, wanted, share)
        in_file = np.array(tier) == "cold"
        if in_file.any():
            total = total + np.where(in_file, self._cold_seconds(layout, wanted), 0.0)
        return np.asarray(total)

    def decode_seconds(
        self,
        layout: KVLayout,
        tokens: npt.ArrayLike,
        steps: npt.ArrayLike,
        share: npt.ArrayLike = 1.0,
    ) -> Doubles:
        """Seconds of `steps`, at least one, where the engine has a prefix of `tokens` itself; 0
        where no rate is known, as attending in place is no choice then."""
        if self.attend_bytes_per_s is None or self.score_bytes_per_s is None:
            return np.zeros(np.shape(tokens))
        own = self
        if self.engine_attend_bytes_per_s is not None and self.engine_score_bytes_per_s is not None:
            own = replace(
                self,
                score_bytes_per_s=self.engine_score_bytes_per_s,
                attend_bytes_per_s=self.engine_attend_bytes_per_s,
                step_latency_s=self.engine_step_latency_s,
            )
        rows = layout.encoded("none") if layout.is_encoded else layout  # as fetch gives them
        return np.maximum(1, _whole("steps", steps)) * own.step_seconds(rows, tokens, share)

    def step_seconds(
        self, layout: KVLayout, tokens: npt.ArrayLike, share: npt.ArrayLike = 1.0
    ) -> Doubles:
        """Seconds to select (unless all is attended to) and attend to `tokens` in place, once."""
        wanted = _whole("tokens", tokens)
        part = np.asarray(share, np.float64)
        if self.attend_bytes_per_s is None or self.score_bytes_per_s is None:
            return np.where(wanted > 0, math.inf, 0.0)
        held = stored_bytes(layout, wanted)
        keys = held * key_share(layout)
        calls = np.where(wanted > 0, layout.layers, 0)
        scored = np.where(part < 1, keys / self.score_bytes_per_s, 0.0)
        attended = part * held / self.attend_bytes_per_s
        return np.asarray(scored + attended + calls * self.step_latency_s)

    def recompute_seconds(self, first: npt.ArrayLike, end: npt.ArrayLike) -> Doubles:
        """Seconds to prefill tokens [first, end) again. Raises BadArgumentError without a speed."""
        return self._prefill().seconds(first, end)

    def value(
        self,
        tokens: npt.ArrayLike,
        depth_tokens: npt.ArrayLike,
        page_bytes: npt.ArrayLike,
        tier: str,
    ) -> Doubles:
        """Seconds that a hit saves a page; negative where recomputing is faster.

        tokens: of the page; depth_tokens: before it in its sequence: deeper pages are worth more,
        as they are attended from longer contexts; page_bytes: of its K and V. The latency of calls
        is shared by the pages of a request and left out; a cold page is an operation of its own.
        """
        counts, depths = np.asarray(tokens, np.float64), np.asarray(depth_tokens, np.float64)
        sizes = np.asarray(page_bytes, np.float64)
        for name, given in (("tokens", counts), ("depth_tokens", depths), ("page_bytes", sizes)):
            if not (given >= 0).all():  # a NaN fails this, too
                raise BadArgumentError(f"{name}: numbers, 0 or more")
        known, prefill = self.tier(tier), self._prefill()
        byte_s = self._byte_s(known)
        operation_s = 0.0
        if tier == "cold":
            byte_s = 1 / known.bytes_per_s + self._byte_s(self.tier("far"))
            operation_s = known.latency_s
        # Prefill.seconds() of each page, arranged so that pages of one size take two passes.
        token_s = counts / prefill.tokens_per_s
        first = token_s * (1 + counts / 2 / prefill.context_half) - sizes * byte_s - operation_s
        return np.asarray(first + token_s / prefill.context_half * depths)

    def pays_from(self, layout: KVLayout, tier: str) -> int | None:
        """Tokens (whole pages) from which a hit in `tier` is read faster than it is recomputed.

        None: at no length up to TOKENS_MAX. With each page more reading takes at most as much
        longer as with the one before, recomputing at least as much: so a tier that pays at one
        length pays at all longer ones.
        """

        def pays(pages: int) -> bool:
            tokens = pages * layout.page_tokens
            read = float(self.read_seconds(layout, tokens, tier))
            return read < float(self.recompute_seconds(0, tokens))

        low, high = 0, TOKENS_MAX // layout.page_tokens
        if not pays(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high * layout.page_tokens

    def verdict(self, layout: KVLayout, tier: str, tokens: int) -> Verdict:
        """Say whether `tier` pays off for hits of `tokens`."""
        if int(_whole("tokens", tokens)) < 1:
            raise BadArgumentError("tokens is 0: a hit has at least 1")
        read_s = float(self.read_seconds(layout, tokens, tier))
        fastest = tokens / read_s
        if self.prefill is None:
            sentence = (
                f"the {tier} tier pays when your engine prefills {tokens:,} tokens more slowly "
                f"than at {fastest:,.0f} tokens/s: a hit of them takes {format_seconds(read_s)} "
                "to read"
            )
            return Verdict(tier, tokens, read_s, fastest, None, None, None, None, sentence)
        recompute_s = float(self.recompute_seconds(0, tokens))
        begins = self.pays_from(layout, tier)
        took = (
            f"a hit of {tokens:,} tokens takes {format_seconds(read_s)} to read and "
            f"{format_seconds(recompute_s)} to recompute"
        )
        pays = read_s < recompute_s
        word = "pays here:" if pays else "does not pay here because"
        never = f"it pays at no length up to {TOKENS_MAX:,} tokens"
        length = never if begins is None else f"it pays from {begins:,} tokens on"
        reads = self._reads_per_write(layout, tier, tokens, recompute_s - read_s)
        sentence = f"the {tier} tier {word} {took}; {length}"
        return Verdict(tier, tokens, read_s, fastest, recompute_s, pays, begins, reads, sentence)

    def _reads_per_write(
        self, layout: KVLayout, tier: str, tokens: int, saved_s: float
    ) -> float | None:
        rate = self.tier(tier).write_bytes_per_s
        if rate is None or saved_s <= 0:
            return None
        return float(stored_bytes(layout, tokens)) / rate / saved_s

    def _prefill(self) -> Prefill:
        if self.prefill is None:
            raise BadArgumentError(
                "the prefill speed is not known: measure your engine's, in tokens/s; it cannot be "
                "measured without the model"
            )
        return self.prefill

    def _byte_s(self, tier: Tier) -> float:
        """Reading and the link go on at the same time, layer by layer: the slower one counts."""
        rates = [tier.bytes_per_s]
        if self.link_bytes_per_s is not None:
            rates.append(self.link_bytes_per_s)
        return 1 / min(rates)

    def tier(self, name: str) -> Tier:
        """Return one tier's costs; raises BadArgumentError when it has none."""
        known = {"local": self.local, "far": self.far, "cold": self.cold}
        if name not in known:
            raise BadArgumentError(f"tier is {name!r}: one of {', '.join(TIERS)}")
        found = known[name]
        if found is None:
            how = " with --cold PATH" if name == "cold" else ""
            raise BadArgumentError(
                f"tier {name}: its costs are not known; `cxlkv tune`{how} measures them"
            )
        return found


def kv_bytes(layout: KVLayout, tokens: npt.ArrayLike) -> Doubles:
    """Bytes of K and V, as the model makes them, of a prefix of `tokens`: of a layer with a window,
    its end only."""
    return _bytes_of(layout, tokens, layout.token_bytes)


def stored_bytes(layout: KVLayout, tokens: npt.ArrayLike) -> Doubles:
    """Bytes that the same takes in the pool."""
    return _bytes_of(layout, tokens, layout.stored_token_bytes)


def _bytes_of(layout: KVLayout, tokens: npt.ArrayLike, token_bytes: int) -> Doubles:
    wanted = np.asarray(tokens, np.float64)
    total = np.zeros(wanted.shape)
    for group in layout.groups:
        seen = wanted if group.window is None else np.minimum(wanted, group.window)
        total = total + group.layers * (token_bytes / layout.layers) * seen
    return total


def key_share(layout: KVLayout) -> float:
    """Share of the bytes of K and V in the pool that are keys."""
    return layout.stored_key_bytes / layout.stored_token_bytes


def _records(layout: KVLayout, tokens: npt.NDArray[np.int64]) -> Doubles:
    """Records that hold a prefix: one a page for each group of layers."""
    total = np.zeros(tokens.shape)
    for group in layout.groups:
        seen = tokens if group.window is None else np.minimum(tokens, group.window)
        total = total + np.ceil(seen / layout.page_tokens)
    return total


def format_seconds(seconds: float) -> str:
    """Seconds for a person, with three digits: 12.5 us, 3.1 ms, 2.4 s."""
    for scale, unit in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _check_rate(name: str, value: object) -> None:
    """A finite number above 0."""
    if not is_real(value) or value == 0:
        raise BadArgumentError(f"{name} is {value!r}: a number above 0 is wanted")


def _check_number(name: str, value: object) -> None:
    """A finite number, 0 or more."""
    if not is_real(value):
        raise BadArgumentError(f"{name} is {value!r}: a number, 0 or more, is wanted")


def _whole(name: str, value: npt.ArrayLike) -> npt.NDArray[np.int64]:
    given = np.asarray(value)
    if given.size and (given.dtype.kind not in "iu" or int(given.min()) < 0):
        raise BadArgumentError(f"{name} is {given}: whole numbers, 0 or more, are wanted")
    return given.astype(np.int64)
