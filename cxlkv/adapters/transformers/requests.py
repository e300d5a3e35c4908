"""CXLRequests shares prefixes between calls of generate(), one row of a CXLCache each.

    requests = CXLRequests(pool, model)
    with requests.begin(ids, mask) as cache:
        out = model.generate(ids, attention_mask=mask, past_key_values=cache)
        requests.keep(cache, out)

`load`, `store` and the rest of `PoolRequests` are there by themselves, too: `cache(names)`
gives the requests of these names to a model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cxlkv.adapters.common.keys import block_keys, namespace
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.transformers.cache import CXLCache, Settings
from cxlkv.adapters.transformers.layouts import check_layout, config_words, layout_of, text_config
from cxlkv.adapters.transformers.steps import Step
from cxlkv.errors import BadArgumentError, PoolFullError, UnsupportedError
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.sequence import Sequence as Tokens
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _RowsCache(CXLCache):
    """A cache that knows whether its rows still go on with the texts that it was made for."""

    texts: Sequence[tuple[list[int], int]] = ()  # of each row, and the padding before it
    known, beams = True, False

    def _begin(
        self, mask: Tensor | None, batch: int, tokens: int, positions: Tensor | None = None
    ) -> Step:
        """generate() repeats the rows of its prompts for beams and samples, but not a cache's."""
        rows = len(self.sequences)
        if rows == len(self.texts) and rows < batch and batch % rows == 0:
            self.batch_repeat_interleave(batch // rows)
        return super()._begin(mask, batch, tokens, positions)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.beams = True
        size = max(1, len(self.sequences) // max(1, len(self.texts)))
        if any(row // size != at // size for at, row in enumerate(beam_idx.tolist())):
            self.known = False  # another prompt's row, which no beam search takes
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.known = False
        super().batch_select_indices(indices)

    def release(self) -> None:
        self.known = False
        super().release()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        longest = max((pad + len(text) for text, pad in self.texts), default=0)
        self.known = self.known and self.get_seq_length() >= longest


class CXLRequests(PoolRequests):
    """Requests of a model over a pool, for calls of generate() that begin with the same text.

    Keys name the model's config, its weights (a hash, made here once: make another CXLRequests when
    they change), the pool's layout and the salt. weights: what names them instead, which saves
    reading them. Raises GeometryError when the pool is laid out for another model, UnsupportedError
    for a model that also reads images or sounds: these have no token ids of their own.
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
    ):
        super().__init__(pool, tiers, quota)
        check_layout(pool.layout, layout_of(model))
        if text_config(model) is not getattr(model, "config", None):
            raise UnsupportedError(
                f"{type(model).__name__} reads more than text, and CXLRequests finds prompts by "
                "their token ids, which are the same for every image: use a CXLCache without it"
            )
        self._model = model
        words = {
            "config": config_words(model),
            "dtype": str(getattr(model, "dtype", None)),
            "weights": hash_of(model) if weights is None else weights,
            "layout": str(pool.layout),
            "salt": salt.hex(),
        }
        self._space = namespace(words)
        self._rows: dict[str, tuple[_RowsCache, int, int]] = {}  # cache, row, rows when it was made
        self._begun = 0

    def keys(self, ids: Sequence[int]) -> PageKeys:
        """Of the full pages of token ids."""
        size = self.pool.layout.page_tokens
        return block_keys(list(prefix_keys(ids, size)), size, self._space)

    # ---- rows ----

    def cache(
        self, names: Sequence[str], seen: int | None = None, **settings: Unpack[Settings]
    ) -> _RowsCache:
        """A cache whose rows are these requests, instead of one that had them before. seen: how
        many tokens the model is to think were there, padding included."""
        for name in names:
            self.sequences[name] = self.sequence(name)
        sequences = [self.sequences[name] for name in names]
        made = _RowsCache(self.pool, self._model, sequences=sequences, **settings)
        if seen is not None:
            made._start_from(made.sequences, seen)
        for row, name in enumerate(names):
            self._rows[name] = made, row, len(names)
        return made

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
        super().release(request)

    # ---- generate() ----

    @contextmanager
    def begin(
        self, ids: Tensor, mask: Tensor | None = None, **settings: Unpack[Settings]
    ) -> Iterator[CXLCache]:
        """A cache for generate(ids, attention_mask=mask): it has what is published of the prompts,
        and at the end their full pages are published and the cache is released.

        Rows of a batch advance together, so it goes on from where the least is known of a row: an
        other prompt beside known ones makes all of them be computed. settings as CXLCache takes
        them.
        """
        texts = _texts(ids, mask)
        names = [f"row {self._begun + row}" for row in range(len(texts))]
        self._begun += len(texts)
        cache = self.cache(names, self._load(names, texts), **settings)
        cache.texts = texts
        try:
            yield cache
        except PoolFullError as error:
            self.fail("full", error)
            raise
        finally:
            for name, (text, _) in zip(names, texts, strict=True):
                if cache.known:
                    self.store(name, self.keys(text))
                self.release(name)
            cache.release()

    def _load(self, names: list[str], texts: list[tuple[list[int], int]]) -> int:
        """Begins the requests; returns how many tokens, padding included, all rows have then."""
        page_tokens = self.pool.layout.page_tokens
        with ExitStack() as held:
            # The model needs a token to go on from, so the last one is never taken from a hit.
            keys = [self.keys(text)[: (len(text) - 1) // page_tokens] for text, _ in texts]
            hits = [held.enter_context(self.match(of)) for of in keys]
            seen = min(hit.tokens + pad for hit, (_, pad) in zip(hits, texts, strict=True))
            wanted = [max(0, seen - pad) for _, pad in texts]
            if any(wanted) and all(
                self.load(name, hit.handle if count else None, count, of) == count
                for name, hit, count, of in zip(names, hits, wanted, keys, strict=True)
            ):
                return seen
        for name in names:
            self.release(name)
            self.load(name, None, 0)
        return 0

    def keep(self, cache: CXLCache, tokens: Tensor) -> int:
        """Publish what generate() made as well, so that the next turn of a talk finds it.

        tokens: what it returned, prompts included, from greedy decoding or samples. Returns how
        many pages are new. Raises BadArgumentError for beams, since the rows' texts are not known
        then, and under a budget, since what was made under one is an approximation that others
        must not find.
        """
        if not isinstance(cache, _RowsCache) or not cache.texts:
            raise BadArgumentError("keep() wants a cache of begin()")
        _check_kept(cache, tokens)
        new, size = 0, len(cache.sequences) // len(cache.texts)
        for row, sequence in enumerate(cache.sequences):
            prompt, pad = cache.texts[row // size]
            ids = tokens[row, pad:].tolist()
            if ids[: len(prompt)] != prompt or len(ids) < len(sequence):
                raise BadArgumentError(f"tokens: row {row} is not what the cache was made with")
            new += self._publish(sequence, self.keys(ids[: len(sequence)]), 0)[0]
        return new


def _check_kept(cache: _RowsCache, tokens: Tensor) -> None:
    budget = cache.budget
    if any(budget) if isinstance(budget, tuple) else budget:
        raise BadArgumentError("what was generated under a budget is an approximation")
    if cache.beams:
        raise BadArgumentError("after beam search it is not known which text a row holds")
    if not cache.known or not cache.sequences:
        raise BadArgumentError("the cache was released, or cut back into its prompts")
    if tokens.ndim != 2 or len(tokens) != len(cache.sequences):
        raise BadArgumentError(
            f"tokens have shape {tuple(tokens.shape)}, the cache {len(cache.sequences)} rows"
        )


def _texts(ids: Tensor, mask: Tensor | None) -> list[tuple[list[int], int]]:
    """Of each row its ids without padding, and how much of that is before them."""
    if ids.ndim != 2 or (mask is not None and mask.shape != ids.shape):
        shape = None if mask is None else tuple(mask.shape)
        raise BadArgumentError(f"ids {tuple(ids.shape)} and mask {shape}: both [rows, tokens]")
    if mask is not None and (mask[:, :-1].bool() & ~mask[:, 1:].bool()).any():
        raise BadArgumentError("the mask has padding on the right, or holes: pad on the left")
    pads = [0] * len(ids) if mask is None else (mask == 0).sum(1).tolist()
    return [(row[pad:].tolist(), pad) for row, pad in zip(ids, pads, strict=True)]


def hash_of(model: torch.nn.Module) -> str:
    """Of all bytes of all weights, as they are now; on as many CPUs as there are."""
    weights = sorted(model.state_dict().items())
    for name, weight in weights:
        if weight.is_meta:
            raise BadArgumentError(f"{name} is not in memory: say weights=, which name them")
    found = hashlib.sha256()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        digests = threads.map(_digest, [weight for _, weight in weights])
        for (name, weight), digest in zip(weights, digests, strict=True):
            found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + digest)
    return found.hexdigest()


def _digest(weight: Tensor) -> bytes:
    flat = weight.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()
