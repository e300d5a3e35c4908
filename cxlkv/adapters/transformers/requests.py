"""CXLRequests shares prefixes between calls of generate(), one row of a CXLCache each.

    requests = CXLRequests(pool, model)
    with requests.begin(ids, mask) as cache:
        out = model.generate(ids, attention_mask=mask, past_key_values=cache)
        requests.keep(cache, out)

`load`, `store` and the rest of `PoolRequests` are there by themselves, too: `cache(names)`
gives the requests of these names to a model.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from cxlkv.adapters.common import checkpoints
from cxlkv.adapters.common.audits import WITHDRAWN, Audits, difference, is_withdrawn
from cxlkv.adapters.common.keys import block_keys, namespace, xor
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.common.steps import Step
from cxlkv.adapters.transformers.cache import CXLCache, Settings
from cxlkv.adapters.transformers.fed import UNSEEN, Fed, Row
from cxlkv.adapters.transformers.identity import Identity
from cxlkv.adapters.transformers.layouts import check_layout, layout_of, text_config
from cxlkv.adapters.transformers.pieces import pieces, read
from cxlkv.adapters.transformers.ropes import form_now, form_of
from cxlkv.adapters.transformers.sparse_prefill import is_long
from cxlkv.adapters.transformers.states import Bytes
from cxlkv.arrays import leading
from cxlkv.errors import (
    BadArgumentError,
    CorruptError,
    CXLKVError,
    PoolFullError,
    QuotaError,
    StaleError,
    UnsupportedError,
)
from cxlkv.numbers import is_whole
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys, chain, prefix_keys, root, whole_ids
from cxlkv.sequence import Hit
from cxlkv.sequence import Sequence as Tokens
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

if TYPE_CHECKING:
    from typing_extensions import Unpack


log = logging.getLogger("cxlkv")

MIXED = b""
"""The space of keys and values that were made in several."""

CHANGED = (
    "the pages that begin() found were made otherwise than this pass makes its own: the model, its "
    "adapters or its rope are others now. Change them before begin(), and where the rope depends "
    "on the length of the text, feed the rest of it in one pass (prefill_chunk_size=None). Or an "
    "audit has withdrawn them meanwhile: then call begin() again"
)
CHANGED_SINCE = (
    "the model is not as it was when the prompt was read, so nothing of it is published: change "
    "its weights and adapters before begin() or after its end; or an audit has withdrawn its pages"
)


UNSEEN_TOKENS = (
    "a part of the text is not published, as this model was not seen to read its tokens at their "
    "positions: it was given embeddings, other ids, other tensors or other positions (pass "
    "position_ids to model() for a padded batch), it read them under a budget or prefill_mass, or "
    "another model did"
)
WRONG = (
    "an audit found that a page or state of these prompts was not made as its key says, so what "
    "was computed behind it may be wrong: do it again; nothing is found this time"
)
NOT_FED = (
    "tokens: row {} is not what the model was seen to read: the cache was released or cut back, "
    "its rows were moved, or beam search returned others"
)


HEARD = ("input_ids", "attention_mask", "position_ids", "cache_position")
"""What a pass may be given as tensors: of others, such as token_type_ids, no key says anything."""


class Heard(NamedTuple):
    """What a pass is fed, int64 [rows, tokens], and at which positions [1 or rows, tokens]."""

    ids: Tensor
    positions: Tensor


class ModelKeys(PageKeys):
    """Keys that know their space: 16 bytes of all, beside the text, that makes keys and values."""

    space: bytes = MIXED

    @classmethod
    def of(cls, keys: PageKeys, space: bytes) -> ModelKeys:
        made = cls(keys.packed, keys.page_tokens, keys.strict)
        made.space = space
        return made

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice[int | None, int | None, int | None]) -> ModelKeys: ...

    def __getitem__(
        self, place: int | slice[int | None, int | None, int | None]
    ) -> bytes | ModelKeys:
        found = super().__getitem__(place)
        return ModelKeys.of(found, self.space) if isinstance(found, PageKeys) else found


class _RowsCache(CXLCache):
    """A cache of requests: which texts begin() made it for, what it was fed, and in which space its
    keys and values were made."""

    texts: Sequence[tuple[list[int], int]] = ()  # of each row, and the padding before it
    fed: Fed | None = None
    heard: Heard | None = None  # of the next pass
    passes: _Passes | None = None
    loaded = False  # whether all that is there was found in the pool
    runs: tuple[tuple[int, bytes | None], ...] = ()
    """(up to which token, padding included; space, None where it is not known)."""

    def _begin(
        self, mask: Tensor | None, batch: int, tokens: int, positions: Tensor | None = None
    ) -> Step:
        """generate() repeats the rows of its prompts for beams and samples, but not a cache's."""
        self.repeat_for(batch)
        heard, self.heard = self.heard, None
        step = super()._begin(mask, batch, tokens, positions)
        before = self.get_seq_length()
        if self.passes is not None:
            self._note(before + tokens, self.passes.space())
        told = heard is not None and heard.ids.shape == (batch, tokens)
        if self.fed is not None and heard is not None and told and not self._leaves_out(step):
            self.fed.add(before, heard.ids, heard.positions)
        return step

    def repeat_for(self, batch: int) -> None:
        """Repeat the rows that begin() made for a pass of so many."""
        rows = len(self.sequences)
        if rows == len(self.texts) and rows < batch and batch % rows == 0:
            self.batch_repeat_interleave(batch // rows)

    def _leaves_out(self, step: Step) -> bool:
        """Whether the pass may attend to less than all: what it makes is near what others would
        find, and no more."""
        if step.tokens == 1 and not step.first:
            return bool(self.budgets_of_selects)
        return self.prefill_mass is not None and bool(is_long(step).any())

    def _note(self, end: int, space: bytes) -> None:
        """A pass makes keys and values up to token `end` in this space."""
        before = self.runs[-1][1] if self.runs else None
        goes_on = before in (None, space)
        if self.loaded and not goes_on:
            raise BadArgumentError(CHANGED)
        self.loaded = False
        self.runs = (*(self.runs[:-1] if goes_on else self.runs), (end, space))

    def _start_from(self, sequences: Sequence[Tokens], seen: int) -> None:
        super()._start_from(sequences, seen)
        begins = (0, *(end for end, _ in self.runs))
        ends = ((min(end, seen), space) for end, space in self.runs)
        self.runs = tuple(run for begin, run in zip(begins, ends, strict=False) if begin < seen)
        if self.fed is not None:
            self.fed.resize(seen, len(sequences))

    def _pick_rows(self, rows: list[int]) -> None:
        if self.fed is not None and self.sequences:
            self.fed.pick(rows)
        super()._pick_rows(rows)

    def fed_row(self, row: int) -> Row:
        """What was fed to a row, without its padding."""
        assert self.fed is not None
        return self.fed.row(row, self.get_seq_length() - len(self.sequences[row]))


class _FoundRow(NamedTuple):
    """What a hit had of a row that is computed again: its tokens, pages and states, and from which
    token on it is computed."""

    tokens: int
    begins: int
    sequence: Tokens
    states: Bytes


class _Passes:
    """Says of each pass in which space it makes keys and values. The model is looked at in the
    first one; what the length decides is seen in each."""

    def __init__(self, look: Callable[[], tuple[bytes, Sequence[torch.nn.Module]]]) -> None:
        self._look = look
        self.model, self._space = b"", b""
        self._ropes: Sequence[torch.nn.Module] = ()

    def space(self) -> bytes:
        if not self.model:
            self.model, self._ropes = self._look()
            self._space = _space_of(self.model)
        return _space_of(self.model, form_now(self._ropes)) if self._ropes else self._space


class CXLRequests(PoolRequests):
    """Requests of a model over a pool, for calls of generate() that begin with the same text.

    Keys name the model as it is when they are made (its config, adapters and switches, a hash of
    all bytes of its weights, which are read again where they have changed: identity.py), the
    frequencies that turn them (ropes.py), the pool's layout and the salt. weights: what names them
    instead of that hash, which saves reading them. audit_hits: of every so many texts that begin()
    finds, one is audited (common/audits.py); 0: none.

    Where layers have states, begin() reads the prompts itself but for their last token, and
    publishes checkpoints on the way; every_tokens: also behind multiples of so many tokens.

    Raises GeometryError when the pool is laid out for another model, UnsupportedError for a model
    that also reads images or sounds, and for virtual tokens (prompt tuning): these have no token
    ids of their own.
    """

    def __init__(
        self,
        pool: CXLPool,
        model: torch.nn.Module,
        tiers: Tiers | None = None,
        *,
        salt: bytes = b"",
        weights: object = None,
        quota: Quota | None = None,
        audit_hits: int = 0,
        every_tokens: int | None = None,
    ):
        super().__init__(pool, tiers, quota)
        check_layout(pool.layout, layout_of(model))
        self._has_states = pool.layout.states is not None
        if every_tokens is not None and not is_whole(every_tokens, 1):
            raise BadArgumentError(f"every_tokens={every_tokens!r:.40}: tokens, 1 or more, or None")
        self._every_tokens = every_tokens
        if text_config(model) is not getattr(model, "config", None):
            raise UnsupportedError(
                f"{type(model).__name__} reads more than text, and CXLRequests finds prompts by "
                "their token ids, which are the same for every image: use a CXLCache without it"
            )
        self._model = model
        self._identity, self._unnamed = Identity(model, weights), weights is None
        self._words = {"layout": str(pool.layout), "salt": salt.hex()}
        self._audits, self._audited = Audits(audit_hits), dict[str, PageKeys]()
        self.audited_hits = 0
        self._unshared = b""  # a random space, once this model's own was withdrawn
        self._looked: set[bytes] = set()  # spaces whose marks below the pool were looked for
        self._look()  # may refuse
        self._rows: dict[str, tuple[_RowsCache, int, int]] = {}  # cache, row, rows when it was made
        self._loaded: dict[str, PageKeys | None] = {}  # of what load() found
        self._found: dict[str, Bytes] = {}  # states of what begin() found
        self._found_rows: dict[int, _FoundRow] = {}  # of a hit with states that is audited
        self._wanted: dict[int, list[int]] = {}  # behind which tokens which rows get checkpoints
        self._begun = 0
        self._decoder: torch.nn.Module = getattr(model, "get_decoder", lambda: model)()
        hook = self._decoder.register_forward_pre_hook(_hear, with_kwargs=True)
        weakref.finalize(self, hook.remove)

    def keys(self, ids: Sequence[int]) -> PageKeys:
        """Keys of the full pages of token ids, as a pass over all of them makes them now."""
        ids = whole_ids(ids).tolist()
        return self._keys(ids, self._space(len(ids)))

    def _keys(self, ids: Sequence[int], space: bytes) -> ModelKeys:
        size = self.pool.layout.page_tokens
        return ModelKeys.of(block_keys(list(prefix_keys(ids, size)), size, space), space)

    # ---- spaces ----

    def _look(self) -> tuple[bytes, Sequence[torch.nn.Module]]:
        """16 bytes of the model as it is now, which nobody else has where nobody may find its
        pages, and what turns its keys where the length decides that."""
        if _has_virtual_tokens(self._model):
            raise UnsupportedError(
                "the active adapter has virtual tokens, and CXLRequests finds prompts by the ids "
                "of their tokens, which these have not: use a CXLCache without it"
            )
        found = self._identity.now()
        if found.far and self._unnamed:
            raise BadArgumentError(f"{found.far[0]} is not in memory: say weights=, which name it")
        if found.doubts:
            self.fail("doubt", UnsupportedError(f"no pages are shared: {found.doubts[0]}"))
            return os.urandom(16), found.ropes
        space = namespace({"model": found.words, **self._words})
        cold = None if self.tiers is None or space in self._looked else self.tiers.cold
        self._looked.add(space)
        if is_withdrawn(self.pool, space, cold) and not self._unshared:
            log.warning(WITHDRAWN)
            self._unshared = os.urandom(16)
        return xor(space, self._unshared) if self._unshared else space, found.ropes

    def _space(self, tokens: int) -> bytes:
        """The key space of a pass now whose last token is number `tokens` of its text."""
        model, ropes = self._look()
        return _space_of(model, form_of(ropes, tokens) if ropes else b"")

    def _publishable(self, cache: _RowsCache) -> tuple[bytes, int]:
        """The space that the cache's tokens were made in, and the last of these, padding included;
        none when the model has changed since."""
        if not cache.runs or cache.passes is None or not cache.passes.model:
            return MIXED, 0
        if self._look()[0] != cache.passes.model:
            self.fail("changed", BadArgumentError(CHANGED_SINCE))
            return MIXED, 0
        end, space = cache.runs[0]
        return (space, end) if space else (MIXED, 0)

    # ---- rows ----

    def cache(
        self, names: Sequence[str], seen: int | None = None, **settings: Unpack[Settings]
    ) -> _RowsCache:
        """A cache whose rows are these requests, instead of one that had them before, which leaves
        the device. seen: how many tokens the model is to think were there, padding included."""
        if seen is not None and not is_whole(seen, 0, 2**31 - 1):
            raise BadArgumentError(f"seen={seen!r:.40}: a number of tokens, 0 or more")
        for name in names:
            self.sequences[name] = self.sequence(name)
            if name in self._rows:
                self._rows[name][0].leave_device()
        sequences = [self.sequences[name] for name in names]
        fed = [self._fed_row(name) for name in names]
        states = [self._states_of_row(name) for name in names] if self._has_states else []
        made = _RowsCache(self.pool, self._model, sequences=sequences, states=states, **settings)
        if seen is not None:
            made._start_from(made.sequences, seen)
        made.fed = Fed(fed, made.get_seq_length())
        if made.get_seq_length():
            spaces = {self._space_of_row(name) for name in names if len(self.sequences[name])}
            space = spaces.pop() if len(spaces) == 1 else MIXED
            made.runs = ((made.get_seq_length(), space),)
            made.loaded = bool(space) and not any(name in self._rows for name in names)
        made.passes = _Passes(self._look)
        for row, name in enumerate(names):
            self._rows[name] = made, row, len(names)
        return made

    def _states_of_row(self, request: str) -> Bytes | None:
        """The states behind all that the request has; None: not known."""
        if request not in self._rows or not (group := self._group(request)):
            return self._found.get(request)
        cache, place, _ = self._rows[request]
        return cache.states(place * len(group)) if cache.get_seq_length() else None

    def _fed_row(self, request: str) -> Row:
        """The row of all that the request has; load() gets keys, and no ids."""
        count = len(self.sequence(request))
        if request not in self._rows or not (group := self._group(request)):
            return Row(np.full(count, UNSEEN), np.arange(count))
        cache, place, _ = self._rows[request]
        row = cache.fed_row(place * len(group))
        return Row(row.ids[:count], row.positions[:count])

    def _space_of_row(self, request: str) -> bytes | None:
        """The key space of all that the request has; None: not known, or nothing."""
        if request not in self._rows:
            found = self._loaded.get(request)
            return found.space if isinstance(found, ModelKeys) else None
        runs = self._rows[request][0].runs
        return runs[0][1] if len(runs) == 1 else (MIXED if runs else None)

    def load(
        self,
        request: str,
        handle: bytes | None,
        tokens: int,
        keys: PageKeys | None = None,
        *,
        verify: bool = True,
    ) -> int:
        count = super().load(request, handle, tokens, keys, verify=verify)
        self._loaded[request] = None if keys is None else keys[: count // keys.page_tokens]
        return count

    def store(self, request: str, keys: PageKeys) -> int:
        """Store as PoolRequests does, but only what passes made in the space of these keys, of the
        tokens that the keys name, at their positions. Keys that are not this object's name no
        space, and only positions can be compared."""
        if request in self._rows and self._group(request):
            row = self._fed_row(request)
            tokens = row.placed
            if isinstance(keys, ModelKeys):
                cache = self._rows[request][0]
                space, end = self._publishable(cache)
                padding = cache.get_seq_length() - len(self.sequence(request))
                tokens = min(tokens, end - padding) if space == keys.space else 0
                tokens = min(tokens, self._agreed(request, row, keys))
            there = min(len(keys), len(self.sequence(request)) // keys.page_tokens)
            keys = keys[: max(0, tokens) // keys.page_tokens]
            self._count_unseen(len(keys) < there)
        return super().store(request, keys)

    def _agreed(self, request: str, row: Row, keys: ModelKeys) -> int:
        """How many tokens of the row these keys name. The ids of what load() found are not known:
        there the keys must be those that load() was given."""
        size, found = keys.page_tokens, self._loaded.get(request)
        blank = leading(row.ids == UNSEEN)
        known = blank // size
        told = keys[:0] if found is None else found[:known]
        if known and told != keys[:known]:
            return 0
        if blank % size or known > len(keys):
            return known * size
        before = xor(keys[known - 1], keys.space) if known else root(b"")
        own = chain(before, row.ids[blank:][: leading(row.ids[blank:] != UNSEEN)], size)
        given = keys.packed[known:] ^ np.frombuffer(keys.space, np.uint8)
        count = min(len(own), len(given))
        return (known + leading((own[:count] == given[:count]).all(1))) * size

    def _count_unseen(self, is_less: bool) -> None:
        if is_less:
            self.fail("unseen", BadArgumentError(UNSEEN_TOKENS))

    def _group(self, request: str) -> Sequence[Tokens]:
        """generate() may have made several rows of one, for beams and samples."""
        cache, row, rows = self._rows[request]
        size = len(cache.sequences) // rows
        return cache.sequences[row * size : (row + 1) * size]

    def sequence(self, request: str) -> Tokens:
        if request in self._rows and (group := self._group(request)):
            return group[0]
        return super().sequence(request)

    def release(self, request: str) -> None:
        if request in self._rows:
            for sequence in self._group(request):
                sequence.release()
            del self._rows[request]
        self._loaded.pop(request, None)
        self._audited.pop(request, None)
        self._found.pop(request, None)
        super().release(request)

    # ---- generate() ----

    @contextmanager
    def begin(
        self, ids: Tensor, mask: Tensor | None = None, **settings: Unpack[Settings]
    ) -> Iterator[CXLCache]:
        """A cache for generate(ids, attention_mask=mask): it has what is published of the prompts,
        and at the end their full pages are published and the cache is released: those of which the
        model was seen to read all tokens. With states it has read all but the last token.

        Rows of a batch advance together, so it goes on from where the least is known of a row: an
        other prompt beside known ones makes all of them be computed. settings as CXLCache takes
        them.

        Raises CorruptError where an audit found a wrong page or state: at the end, as what was
        generated may be wrong then; with states at the beginning.
        """
        texts = _texts(ids, mask)
        names = [f"row {self._begun + row}" for row in range(len(texts))]
        self._begun += len(texts)
        cache = self.cache(names, self._load(names, texts), **settings)
        cache.texts, seen = texts, cache.get_seq_length()
        there = [np.array(text[: max(0, seen - pad)], np.int64) for text, pad in texts]
        cache.fed = Fed([Row(ids, np.arange(len(ids))) for ids in there], seen)
        try:
            if self._has_states:
                self._read(cache, ids, mask)
            yield cache
        except PoolFullError as error:
            self.fail("full", error)
            raise
        finally:
            try:
                right = self._publish_prompts(cache, names)
            finally:
                for name in names:
                    self.release(name)
                cache.release()
        if not right:
            raise CorruptError(WRONG)

    def _publish_prompts(self, cache: _RowsCache, names: Sequence[str]) -> bool:
        """Whether no audit found a wrong page; else nothing is published."""
        if self._has_states:
            return True  # they were when they were read
        space, end = self._publishable(cache)
        there = [(name, *of) for name, of in zip(names, cache.texts, strict=True)]
        there = [(name, text, pad) for name, text, pad in there if end and self._group(name)]
        if not all(self._is_right(name, text) for name, text, _ in there):
            return False
        for name, text, pad in there:
            self._publish_seen(self.sequence(name), self._fed_row(name), text, end - pad, space)
        return True

    def _is_right(self, name: str, text: list[int]) -> bool:
        """Whether the row's audit, if there is one, finds no wrong page; else the model's space is
        withdrawn."""
        keys = self._audited.get(name)
        if keys is None:
            return True
        sequence, size = self.sequence(name), self.pool.layout.page_tokens
        if min(len(sequence), self._fed_row(name).agreed(text)) < len(keys) * size:
            return True
        self.audited_hits += 1
        if self.audit(keys, sequence, len(keys) - 1):
            return True
        self._withdraw()
        return False

    def _withdraw(self) -> None:
        log.warning(WITHDRAWN)
        self.withdraw(self._look()[0])
        self._unshared = os.urandom(16)

    def _audit_states(self, cache: _RowsCache, rows: Mapping[int, _FoundRow]) -> None:
        """Compare what a hit had with what was computed instead: its states, and its last full page
        of K and V. Raises CorruptError where they differ; the model's space is withdrawn then."""
        if self._publishable(cache)[1] < cache.get_seq_length():
            return
        for row, found in rows.items():
            text, own = cache.texts[row][0][: found.tokens], cache.sequences[row]
            if cache.fed_row(row).agreed(text) < found.tokens:
                continue
            self.audited_hits += 1
            wrong = cache.state_form.difference(found.states, cache.states(row))
            page = found.tokens // self.pool.layout.page_tokens - 1
            try:
                if not wrong and (page + 1) * self.pool.layout.page_tokens > found.begins:
                    wrong = difference(self.pool, found.sequence, own, page, page, 1)
            except CXLKVError as error:
                self.fail("stale", error)
            if wrong:
                self.fail("audit", CorruptError(f"an audited hit is wrong: {wrong}"))
                self._withdraw()
                raise CorruptError(WRONG)

    def _publish_seen(
        self, sequence: Tokens, row: Row, text: list[int], most: int, space: bytes
    ) -> int:
        """What the row was fed of a text, up to token `most`; returns how many pages are new."""
        there = min(len(text), len(sequence), max(0, most))
        agreed = min(there, row.agreed(text))
        self._count_unseen(agreed < there)
        return self._publish(sequence, self._keys(text[:agreed], space), 0)[0]

    def _load(self, names: list[str], texts: list[tuple[list[int], int]]) -> int:
        """Begins the requests; returns how many tokens, padding included, all rows have then."""
        page_tokens = self.pool.layout.page_tokens
        space = self._space(max(len(text) for text, _ in texts))
        if self._has_states:
            return self._load_states(names, texts, space)
        with ExitStack() as held:
            # The model needs a token to go on from, so the last one is never taken from a hit.
            keys = [self._keys(text, space)[: (len(text) - 1) // page_tokens] for text, _ in texts]
            hits = [held.enter_context(self.match(of)) for of in keys]
            seen = min(hit.tokens + pad for hit, (_, pad) in zip(hits, texts, strict=True))
            ends = [hit.tokens for hit in hits]
            counts = [max(0, seen - page_tokens - pad) for _, pad in texts]
            is_short = any(counts) and self._audits.is_due()
            if is_short:  # found anew: layers with windows may have given back what a cut would see
                cut = [
                    held.enter_context(self.match(of[: -(-count // page_tokens)]))
                    for of, count in zip(keys, counts, strict=True)
                ]
                is_short = all(hit.tokens >= count for hit, count in zip(cut, counts, strict=True))
                hits = cut if is_short else hits
            seen -= page_tokens if is_short else 0
            wanted = [max(0, seen - pad) for _, pad in texts]
            if any(wanted) and all(
                self.load(name, hit.handle if count else None, count, of) == count
                for name, hit, count, of in zip(names, hits, wanted, keys, strict=True)
            ):
                for name, end, count, of in zip(names, ends, wanted, keys, strict=True):
                    if is_short and count % page_tokens == 0 and end > count > 0:
                        self._audited[name] = of[: count // page_tokens + 1]
                return seen
        for name in names:
            self.release(name)
            self.load(name, None, 0)
        return 0

    def _load_states(
        self, names: list[str], texts: list[tuple[list[int], int]], space: bytes
    ) -> int:
        """_load() where all rows go on from a checkpoint, or from nothing."""
        self._found_rows = {}
        with ExitStack() as held:
            most = max(len(text) + pad for text, pad in texts) - 1
            hits, end, known = self._match_rows(texts, space, most, held)
            seen = end
            if any(hits) and self._audits.is_due():
                again, seen, _ = self._match_rows(texts, space, end - 1, held)
                self._hold_found(texts, hits, end, seen)
                hits = again
            counts = [max(0, seen - pad) for _, pad in texts]
            if any(counts) and all(
                self._load_row(name, hit, self._keys(text[:count], space))
                for name, hit, count, (text, _) in zip(names, hits, counts, texts, strict=True)
            ):
                self._want(texts, known, end)
                return seen
        for name in names:
            self.release(name)
            self.load(name, None, 0)
        self._want(texts, known, end if self._found_rows else 0)
        return 0

    def _match_rows(
        self, texts: list[tuple[list[int], int]], space: bytes, seen: int, held: ExitStack
    ) -> tuple[list[Hit], int, list[int]]:
        """Hits that end alike, padding included, within `seen` tokens; where that is, and of how
        many tokens of each row the pages are there."""
        known = list[int]()
        while True:
            hits = [
                held.enter_context(self._match_states(text[: max(0, seen - pad)], space))
                for text, pad in texts
            ]
            known = known or [hit.known_tokens for hit in hits]
            ends = [min(seen, hit.tokens + pad) for hit, (_, pad) in zip(hits, texts, strict=True)]
            if min(ends) == seen:
                return hits, seen, known
            seen = min(ends)

    def _hold_found(
        self, texts: list[tuple[list[int], int]], hits: list[Hit], end: int, seen: int
    ) -> None:
        """Keep what hits up to `end` have of the rows, which begin at `seen` instead."""
        for row, (hit, (_, pad)) in enumerate(zip(hits, texts, strict=True)):
            try:
                if hit and hit.tokens == end - pad:
                    states, begins = hit.read_states(), max(0, seen - pad)
                    self._found_rows[row] = _FoundRow(hit.tokens, begins, hit.sequence(), states)
            except (StaleError, CorruptError) as error:
                self._fail_states(error)

    def _match_states(self, text: list[int], space: bytes) -> Hit:
        return (self.quota or self.tiers or self.pool).match_prefix(text, space)

    def _want(self, texts: list[tuple[list[int], int]], known: list[int], seen: int) -> None:
        """Choose where the rows get checkpoints behind the first `seen` tokens; known: see Hit."""
        self._wanted = {}
        for row, ((text, pad), pages) in enumerate(zip(texts, known, strict=True)):
            hit, every = max(0, seen - pad), self._every_tokens
            for place in checkpoints.positions(len(text), hit, pages, every=every):
                self._wanted.setdefault(pad + place, []).append(row)

    def _load_row(self, name: str, hit: Hit, keys: ModelKeys) -> bool:
        """Begin a request with all of a hit, states too; False, and counted, when it cannot be."""
        count = hit.tokens
        if count:
            try:
                self._found[name] = hit.read_states()
            except (StaleError, CorruptError) as error:
                self._fail_states(error)
                return False
        return self.load(name, hit.handle if count else None, count, keys) == count

    def _fail_states(self, error: StaleError | CorruptError) -> None:
        self.fail("corrupt" if isinstance(error, CorruptError) else "stale", error)

    def _read(self, cache: _RowsCache, ids: Tensor, mask: Tensor | None) -> None:
        """Have the model read the prompts but for their last token, and publish on the way."""
        mask = torch.ones_like(ids) if mask is None else mask
        seen, last = cache.get_seq_length(), ids.shape[1] - 1
        wanted, rows = self._wanted, self._found_rows
        self._wanted, self._found_rows = {}, {}
        audited = {cache.texts[row][1] + found.tokens for row, found in rows.items()}
        stops = sorted(one for one in {*wanted, *audited, last} if one > seen)
        spans = pieces(seen, stops, cache.takes_pieces)

        def heard(end: int) -> None:
            if end in audited:
                self._audit_states(cache, rows)
            if end in wanted:
                self._publish_states(cache, wanted[end])

        try:
            read(self._decoder, cache, ids, mask, spans, heard)
        finally:
            for found in rows.values():
                found.sequence.release()

    def _publish_states(self, cache: _RowsCache, rows: Sequence[int]) -> None:
        """Publish what these rows of begin() have now, with checkpoints behind it."""
        space, end = self._publishable(cache)
        if end < cache.get_seq_length():
            return
        for row in rows:
            sequence, (text, _) = cache.sequences[row], cache.texts[row]
            self._publish_row(cache, row, text[: len(sequence)], space)

    def _publish_row(self, cache: _RowsCache, row: int, text: list[int], space: bytes) -> int:
        """Publish a row whose text this is, if the model was seen to read all of it."""
        sequence = cache.sequences[row]
        is_seen = cache.fed_row(row).agreed(text) == len(sequence) == len(text)
        self._count_unseen(not is_seen)
        if not is_seen or not text:
            return 0
        try:
            publisher = self.quota or self.pool
            return publisher.publish_prefix(sequence, text, space, states=cache.states(row))
        except (PoolFullError, QuotaError) as error:
            self.fail("quota" if isinstance(error, QuotaError) else "full", error)
            return 0

    def keep(self, cache: CXLCache, tokens: Tensor) -> int:
        """Publish what generate() made as well, so that the next turn of a talk finds it.

        tokens: what it returned, prompts included, from greedy decoding or samples. Returns how
        many pages are new. Raises BadArgumentError for tokens that the model was not seen to read,
        and under a budget, since what was made under one is an approximation that others must not
        find.
        """
        if not isinstance(cache, _RowsCache) or not cache.texts:
            raise BadArgumentError("keep() wants a cache of begin()")
        _check_kept(cache, tokens)
        space, end = self._publishable(cache)
        if not end:
            return 0
        new, size = 0, len(cache.sequences) // len(cache.texts)
        for index, sequence in enumerate(cache.sequences):
            prompt, pad = cache.texts[index // size]
            ids, row = tokens[index, pad:].tolist(), cache.fed_row(index)
            if ids[: len(prompt)] != prompt or row.agreed(ids) < len(sequence):
                raise BadArgumentError(NOT_FED.format(index))
            if not self._has_states:
                new += self._publish_seen(sequence, row, ids, end - pad, space)
            elif end >= cache.get_seq_length():
                new += self._publish_row(cache, index, ids[: len(sequence)], space)
        return new


def _check_kept(cache: _RowsCache, tokens: Tensor) -> None:
    budget = cache.budget
    if any(budget) if isinstance(budget, tuple) else budget:
        raise BadArgumentError("what was generated under a budget is an approximation")
    if tokens.ndim != 2 or len(tokens) != len(cache.sequences) or not len(tokens):
        raise BadArgumentError(
            f"tokens have shape {tuple(tokens.shape)}, the cache {len(cache.sequences)} rows: it "
            "was released, or beam search made more rows than it returned"
        )


def _hear(module: torch.nn.Module, args: tuple[object, ...], given: dict[str, object]) -> None:
    """Tell a model's cache, if it is one of requests, what each pass is fed."""
    cache = given.get("past_key_values")
    if not isinstance(cache, _RowsCache):
        return
    ids = args[0] if args else given.get("input_ids")
    if isinstance(ids, Tensor):
        cache.repeat_for(len(ids))
    cache.heard = None
    beside = [*args[1:], *(one for name, one in given.items() if name not in HEARD)]
    if isinstance(ids, Tensor) and not any(isinstance(one, Tensor) for one in beside):
        seen, places = cache.get_seq_length(), given.get("position_ids")
        if places is None:
            places = torch.arange(seen, seen + ids.shape[-1], device=ids.device)[None]
        if isinstance(places, Tensor) and places.shape in (ids.shape, (1, ids.shape[-1])):
            # Copies: a caller may write the next ones to the same tensors.
            cache.heard = Heard(ids.detach().long().clone(), places.detach().long().clone())


def _texts(ids: Tensor, mask: Tensor | None) -> list[tuple[list[int], int]]:
    """The ids of each row without padding, and how much padding is before them."""
    if ids.ndim != 2 or (mask is not None and mask.shape != ids.shape):
        shape = None if mask is None else tuple(mask.shape)
        raise BadArgumentError(f"ids {tuple(ids.shape)} and mask {shape}: both [rows, tokens]")
    if mask is not None and (mask[:, :-1].bool() & ~mask[:, 1:].bool()).any():
        raise BadArgumentError("the mask has padding on the right, or holes: pad on the left")
    pads = [0] * len(ids) if mask is None else (mask == 0).sum(1).tolist()
    return [(row[pad:].tolist(), pad) for row, pad in zip(ids, pads, strict=True)]


def _space_of(model: bytes, form: bytes = b"") -> bytes:
    return namespace({"model": model.hex(), "form": form.hex()})


def _has_virtual_tokens(model: torch.nn.Module) -> bool:
    """Whether PEFT puts learnt ones before each text."""
    active = getattr(model, "active_peft_config", None)
    return bool(getattr(active, "is_prompt_learning", False))
