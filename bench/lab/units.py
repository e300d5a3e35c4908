"""The units of a run, each a text or a context of tasks, measured alone into arrays."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from cxlkv.bench.lab import peers
from cxlkv.bench.lab.costs import costs
from cxlkv.bench.lab.heads import WatchedCache
from cxlkv.bench.lab.hits import HotHits
from cxlkv.bench.lab.reading import Reader, stale_pages
from cxlkv.bench.lab.tasks import ITEMS, KINDS, Context, make_context, single_token_words
from cxlkv.bench.lab.texts import LEARNED_FROM, TEXTS, Text
from cxlkv.bench.result import emulation
from cxlkv.demo.forms import CONTROLS, Form
from cxlkv.demo.full_attention import keys_and_values
from cxlkv.demo.progress import tell
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import parse_share
from cxlkv.ndp import choosers, engine, scorers
from cxlkv.sequence import Sequence as Tokens

Array = (
    npt.NDArray[np.float32] | npt.NDArray[np.int64] | npt.NDArray[np.bool_] | npt.NDArray[np.str_]
)
Arrays = dict[str, Array]


class Advance(Protocol):
    """Counts steps that were made."""

    def __call__(self, steps: int = 1) -> None: ...


METHODS = ("exact", "two_stage", "digest", "random", "newest", "oracle")
SHARES = (0.02, 0.05, 0.10, 0.20)
REFERENCES = ("oracle", "newest", "random")
READ_STEPS, ITEM_STEPS = 40, 14
"""What reading a context and answering an item take, in steps of all forms, about."""
METHOD_TEXTS, METHOD_STEPS = 6, 64
"""A run of methods: texts, and as many contexts of tasks; steps behind each text's prefix."""
CHARACTERS_MOST = 5
"""Of no text here has a token more on average."""
CUE_TOKENS = 8
"""So many tokens of a passage are read before the model can know that it comes again."""


def every_form() -> tuple[Form, ...]:
    """All pages first, then each method at each budget; exact also with more for the first
    layers, exact and two_stage also among pages that were best in an earlier step."""
    first = [(0.10, 2, 1.0), (0.10, 4, 1.0), (0.05, 10, 0.20), (0.10, 10, 0.40)]
    more = {
        "exact": [
            Form("exact", 0.15),
            *(Form("exact", s, 1, 2, n, of) for s, n, of in first),
            *refreshed("exact", 32),
        ],
        "two_stage": [
            Form("two_stage", 0.15), *refreshed("two_stage", 8), *refreshed("two_stage", 32),
        ],
        "oracle": [Form("oracle", 0.15)],
    }  # fmt: skip
    forms = [Form.full()]
    for method in METHODS:  # rows of one method stand side by side: they are scored together
        forms += [*(Form(method, share) for share in SHARES), *more.get(method, [])]
    return tuple(forms)


def refreshed(method: str, steps: int) -> list[Form]:
    return [Form(method, share, refresh=steps) for share in (0.05, 0.15)]


def every_variant() -> tuple[Form, ...]:
    """Numbers of forced pages, with 5 % of all; other ways to one score for a group of heads."""
    forced = [(1, 1), (1, 2), (1, 4), (1, 8), (0, 2), (2, 2), (4, 2)]
    groups = [Form(method, share) for method in ("largest", "union") for share in (0.05, 0.10)]
    return (*(Form("exact", 0.05, sinks, recent) for sinks, recent in forced), *groups)


def known_methods(words: str) -> tuple[str, ...]:
    """All that there are, with the peers that are installed, or those that are named. Raises
    BadArgumentError for one that is not, UnsupportedError for a peer that is not installed."""
    if words == "all":
        found = [name for name in peers.NAMES if not peers.why_not(name)]
        core = ("exact", "two_stage", "sketch", "digest")
        return (*core, *scorers.names(), *choosers.names(), *found)
    names = tuple(filter(None, map(str.strip, words.split(","))))
    for name in names:
        if name not in peers.NAMES:
            scorers.check(name)
        elif reason := peers.why_not(name):
            raise UnsupportedError(reason)
    return names


def names_like(names: Sequence[str], patterns: Sequence[str], what: str) -> set[str]:
    """Those that are like a pattern (fnmatch); BadArgumentError for one that no name is like."""
    found = set[str]()
    for pattern in patterns:
        some = {name for name in names if fnmatchcase(name, pattern)}
        if not some:
            raise BadArgumentError(f"no {what} is like {pattern!r}: {'; '.join(names)}")
        found |= some
    return found


@dataclass(frozen=True)
class Plan:
    """What is measured. Lengths are in tokens; distances from the passage to its copy.

    prefix: at most; a shorter text has less in front of its steps.
    variants: forms that read nothing on their own; only what they would keep is measured.
    part: where these are not all forms, what those were asked for by. timed: methods whose time to
    choose is measured, too.
    """

    texts: tuple[str, ...] = tuple(text.name for text in TEXTS)
    prefix: int = 7000
    steps: int = 512
    watched_every: int = 64
    passage: int = 64
    distances: tuple[int, ...] = (1000, 2000, 3000, 4000, 5000, 6000)
    copies: int = 2  # of each text, so that the texts together have every distance
    contexts: int = 25
    context_tokens: int = 6000
    seed: int = 1
    forms: tuple[Form, ...] = field(default_factory=every_form)
    variants: tuple[Form, ...] = field(default_factory=every_variant)
    part: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()

    @classmethod
    def quick(cls) -> Plan:
        """A few minutes: too little to conclude anything from."""
        return cls(
            texts=("handbook", "argparse", "table"),
            prefix=2000,
            steps=48,
            watched_every=24,
            distances=(1000,),
            copies=1,
            contexts=2,
            context_tokens=1500,
        )

    def only(self, patterns: Sequence[str]) -> Plan:
        """Forms and variants whose names match a pattern (fnmatch), and all pages.

        Raises BadArgumentError for a pattern that no name is like.
        """
        found = names_like([form.name for form in (*self.forms, *self.variants)], patterns, "form")
        forms = tuple(one for one in self.forms if one.method == "full" or one.name in found)
        variants = tuple(one for one in self.variants if one.name in found)
        return replace(self, forms=forms, variants=variants, part=tuple(patterns))

    def of_methods(self, names: Sequence[str], budgets: str, texts: int = METHOD_TEXTS) -> Plan:
        """Each method at each share of the pages ("0.05,0.15"), beside random, newest and best
        ones, and all; of fewer texts, steps and items, so that all methods are measured in less
        than two hours. Raises BadArgumentError, and UnsupportedError over an emulated link."""
        if label := emulation():
            raise UnsupportedError(f"methods are timed here, not over {label}: unset CXLKV_EMULATE")
        words = budgets.split(",")
        shares = list(dict.fromkeys(parse_share(word, "a share of the pages") for word in words))
        forms = [Form.full()]
        for name in dict.fromkeys((*names, *REFERENCES)):
            forms += [Form(name, share) for share in shares]
        part = (*names, *(f"{100 * share:g} %" for share in shares))
        plan = replace(
            self, copies=1, forms=tuple(forms), variants=(), part=part, timed=tuple(names)
        )
        return plan.shorter(texts, min(self.steps, METHOD_STEPS))

    def shorter(self, texts: int | None, steps: int | None = None) -> Plan:
        """Only so many texts, contexts of tasks, and steps behind each text's prefix."""
        plan = self
        if texts is not None:
            plan = replace(plan, texts=self.texts[:texts], contexts=min(texts, self.contexts))
        if steps is not None:
            watched = min(self.watched_every, steps // 2)
            plan = replace(plan, steps=steps, watched_every=watched)
        return plan

    def behind(self, prefix: int) -> Plan:
        """The same behind as many tokens of each text, of those that have so many."""
        texts = tuple(
            text.name
            for text in TEXTS
            if text.name in self.texts
            and len(text.read(CHARACTERS_MOST * prefix)) == CHARACTERS_MOST * prefix
        )
        if not texts:
            raise BadArgumentError(f"no text has {prefix:,} tokens")
        return replace(self, prefix=prefix, texts=texts)

    def units(self) -> dict[str, int]:
        """Each unit's name and how many steps of the model it takes."""
        copies = self.copies * self.passage
        texts = {f"text-{name}": READ_STEPS + self.steps + copies for name in self.texts}
        tasks = READ_STEPS + ITEMS * ITEM_STEPS
        return texts | {f"tasks-{number}": tasks for number in range(self.contexts)}

    def distances_of(self, text: str, prefix: int) -> tuple[int, ...]:
        """How far from its passage each copy in a text stands: near and far ones in every text,
        none farther than the prefix is long."""
        apart = len(self.distances) // self.copies
        first = self.texts.index(text) % apart
        return tuple(min(distance, prefix) for distance in self.distances[first::apart])


class Runner:
    """Measures units of a plan, with one model and one pool."""

    def __init__(
        self, reader: Reader, tokenizer: PreTrainedTokenizerBase, plan: Plan, console: Console
    ) -> None:
        self.console = console
        self.reader = reader
        self.tokenizer = tokenizer
        self.plan = plan

    def prepare(self, path: Path) -> None:
        """Methods that learn do so, from a text that is not measured; path: where what the timed
        ones cost is written, if it is not there."""
        chosen = {form.method for form in self.plan.forms} - {*engine.METHODS, *CONTROLS, "full"}
        chosen -= {*choosers.names(), *peers.NAMES}
        learning = [name for name in sorted(chosen) if scorers.of(name).calibrated]
        times = bool(self.plan.timed) and not path.exists()
        if not learning and not times:
            return
        # A long text takes minutes to read: where nothing is learned from it, any will do.
        known = {text.name: text for text in TEXTS}
        text = LEARNED_FROM if learning else known[self.plan.texts[0]]
        tokens = self.tokens(text, self.plan.prefix)
        cache, _ = self.reader.read(tokens)
        begin = time.perf_counter()
        with self.reader.context(cache, len(tokens)) as context:
            appended = time.perf_counter() - begin
            queries = self.reader.last_queries(context, tokens) if learning else None
            for name in learning:
                tell(self.console, f"{name} learns")
                self.reader.pool.calibrate(name, context, queries)
            if times:
                tell(self.console, "timing methods")
                shares = sorted({form.share for form in self.plan.forms if form.method != "full"})
                timed = (self.plan.timed, shares, appended)
                costs(self.reader, context, tokens[-1], *timed).save(path)

    def run(self, unit: str, advance: Advance) -> Arrays:
        kind, name = unit.split("-", 1)
        seed = zlib.crc32(unit.encode())
        if kind == "tasks":
            return self.tasks(int(name), seed, advance)
        return self.text(next(text for text in TEXTS if text.name == name), seed, advance)

    def check(self) -> dict[str, str]:
        """What each text of the plan is, as a digest; before hours go by, an error for a text or a
        tokenizer that cannot be measured with."""
        plan, found = self.plan, {}
        for text in TEXTS:
            if text.name not in plan.texts:
                continue
            read = text.read()
            tokens = len(self.tokens(text, plan.prefix + plan.steps + 1))
            if tokens < plan.steps + 1 + max(plan.passage, min(plan.distances)):
                raise BadArgumentError(
                    f"the text {text.name} has {tokens} tokens for this model: too few"
                )
            found[text.name] = hashlib.sha256(read.encode()).hexdigest()[:12]
        single_token_words(self.tokenizer)
        return found

    def tokens(self, text: Text, most: int) -> Tensor:
        """The first tokens of a text, int64, `most` at most."""
        # Of no text here does a token have eight characters on average.
        ids = self.tokenizer(text.read(8 * most))["input_ids"]
        return torch.tensor(ids[:most], dtype=torch.int64)

    def text(self, text: Text, seed: int, advance: Advance) -> Arrays:
        """Teacher-forced steps behind a prefix, copies of passages, and what heads keep."""
        plan, reader = self.plan, self.reader
        tokens = self.tokens(text, plan.prefix + plan.steps + 1)
        prefix = len(tokens) - plan.steps - 1
        distances = plan.distances_of(text.name, prefix)
        cache, full = reader.read(tokens[:-1], plan.steps)
        advance(READ_STEPS)
        with reader.context(cache, prefix) as context:
            forms, held = (*plan.forms, *plan.variants), list(keys_and_values(cache))
            watched = WatchedCache(
                reader.pool, reader.model, forms, context.fork(), held, seed, reader.others
            )
            hits = HotHits(plan.forms, reader.pool.layout)
            try:
                steps = reader.compare(
                    context,
                    plan.forms,
                    tokens[prefix:],
                    full,
                    seed,
                    advance,
                    lambda at: self.watch(watched, at, tokens[prefix + at]),
                    hits if plan.timed else None,
                )
            finally:
                watched.release()
            stale = stale_pages(context, held, reader.pool.layout.page_tokens)
            keep(cache, prefix)
            copies = [
                self.copy(context, cache, tokens[:prefix], distance, seed, advance)
                for distance in distances
            ]
        return {
            "dtype": np.array(reader.pool.layout.dtype),
            "windows": np.array([window or 0 for window in reader.pool.layout.windows]),
            "full": steps.full,
            "losses": steps.losses,
            "divergences": steps.divergences,
            "agreed": steps.agreed,
            "scored": steps.scored,
            "fetched": steps.fetched,
            "sketched": steps.sketched,
            "kept": steps.kept,
            "hits": hits.found(),
            "prefix": np.array(prefix),
            "stale": np.array(stale),
            "mass": np.stack(watched.mass),
            "error": np.stack(watched.error),
            "attainable": np.stack(watched.attainable),
            "recall": np.stack(watched.recall),
            "distances": np.array(distances),
            "copy_full": np.stack([full for full, _ in copies]),
            "copy": np.stack([losses for _, losses in copies]),
        }

    def watch(self, cache: WatchedCache, at: int, token: Tensor) -> None:
        """Full attention reads on in the pool; now and then all forms are asked what they keep."""
        cache.watched = at % self.plan.watched_every == 0
        self.reader.step(cache, token[None])

    def copy(
        self,
        context: Tokens,
        cache: DynamicCache,
        tokens: Tensor,
        distance: int,
        seed: int,
        advance: Advance,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Losses of the second occurrence of a passage behind its first tokens: of full attention
        [passage - cue], of forms [forms, passage - cue]."""
        passage = tokens[len(tokens) - distance :][: self.plan.passage]
        full = self.reader.read_on(cache, passage[:-1], len(passage) - 1)
        keep(cache, len(tokens))
        forms, own = self.plan.forms, seed + distance
        steps = self.reader.compare(context, forms, passage, full, own, advance)
        advance()
        return steps.full[CUE_TOKENS - 1 :], steps.losses[:, CUE_TOKENS - 1 :]

    def tasks(self, number: int, seed: int, advance: Advance) -> Arrays:
        """Which candidate each form finds most likely: right [1 + forms, items], full first."""
        words = single_token_words(self.tokenizer)
        made = self.fitting(number, words)
        tokens = torch.tensor(self.tokenizer(made.text)["input_ids"])
        cache, _ = self.reader.read(tokens)
        advance(READ_STEPS)
        right = np.zeros((1 + len(self.plan.forms), len(made.items)), np.bool_)
        with self.reader.context(cache, len(tokens)) as context:
            for at, item in enumerate(made.items):
                asked = torch.tensor(
                    self.tokenizer(item.question, add_special_tokens=False)["input_ids"]
                )
                candidates = torch.tensor(item.candidates)
                wanted = self.reader.read_on(cache, asked, 1)[0, candidates]
                keep(cache, len(tokens))
                right[0, at] = int(wanted.argmax()) == item.right
                rows = self.reader.rows(context, self.plan.forms, seed + at)
                try:
                    for token in asked:
                        logits = self.reader.step(rows, token.repeat(len(self.plan.forms)))
                finally:
                    rows.release()
                right[1:, at] = (logits[:, candidates].argmax(-1) == item.right).numpy()
                advance(ITEM_STEPS)
        kinds = np.array([KINDS.index(item.kind) for item in made.items])
        return {"right": right, "kinds": kinds, "tokens": np.array(len(tokens))}

    def fitting(self, number: int, words: Mapping[str, int]) -> Context:
        """A context of about plan.context_tokens tokens, with sentences of one of the texts."""
        prose = [text for text in TEXTS if "prose" in text.kind and "German" not in text.kind]
        text = prose[number % len(prose)].read().replace("\n", " ")
        sentences = [one.strip() + "." for one in text.split(". ") if 20 < len(one) < 400]
        # Contexts of one text begin at different places of it.
        first = (number // len(prose)) * 40 % max(1, len(sentences) // 3)
        taken, tokens = [], 0
        for sentence in [*sentences[first:], *sentences[:first]]:
            taken.append(sentence)
            tokens += len(self.tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
            if tokens >= self.plan.context_tokens:
                break
        return make_context(taken, dict(words), 1000 * self.plan.seed + number)


def keep(cache: DynamicCache, tokens: int) -> None:
    """Only the first so many; transformers takes how many to remove, as a negative number."""
    cache.crop(tokens - cache.get_seq_length())
