"""CXLPool, a pool of K and V, is used through sequences. base.py creates, opens and closes it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv._core import reclaim
from cxlkv.errors import BadArgumentError
from cxlkv.ndp import scorers
from cxlkv.ndp.worker import WorkerUse, worker_use
from cxlkv.numbers import is_whole, seconds
from cxlkv.pool.base import Pool
from cxlkv.prefix import PageKeys, key_hashes, prefix_keys, root, tail_keys, whole_ids
from cxlkv.sequence import Batch, Hit, Sequence


class CXLPool(Pool, stores="K and V"):
    """A KV cache in far memory, shared by the processes and threads of a host.

    It is used through sequences: one of them serves one writer at a time.
    """

    def _hashes(self, keys: Iterable[str | bytes], strict: bool) -> bytes:
        return key_hashes(cast("Iterable[bytes]", keys), strict, either=True)

    def use_worker(self, use: str = "if_there", *, deadline_s: float | None = None) -> WorkerUse:
        """Let `cxlkv ndp-worker`, a process near the memory, select and attend for this process.

        "if_there": what the worker does not answer right and in time is done here, as long as that
        is so, and the worker is looked for again. "only": raises WorkerError then. "none": all is
        done here again. deadline_s: how long an answer may take (default: 50 ms, and what reading
        at 500 MB/s would take). The results are the same. Raises BadArgumentError for an anonymous
        pool, which no other process can open.
        """
        if use not in _core.WORKER_USES:
            raise BadArgumentError(f"use {use!r}: one of {', '.join(_core.WORKER_USES)}")
        limit_s = 0.0 if deadline_s is None else seconds("deadline_s", deadline_s)
        _core.pool_use_worker(self._handle, use, limit_s)
        return self.worker

    @property
    def worker(self) -> WorkerUse:
        """How this process's calls of the worker went so far."""
        return worker_use(self._handle)

    def calibrate(
        self,
        method: str,
        of: Sequence | npt.NDArray[np.float32],
        queries: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Let a method of docs/methods.md that learns from keys do so, from a text in this pool, or
        give it what it learned before: float32 [layers, kv_heads, n], which is returned. queries:
        those of the text's last tokens, as attention had them, [layers, rows, q_heads, dim], for a
        method that learns from them, too; transformers' LastQueries keeps them.

        It is for this process; `--methods` of `cxlkv ndp-worker` and `cxlkv serve` takes a file
        that numpy.save made of it. Raises BadArgumentError for another method, and for a sequence
        without a whole page.
        """
        scorers.check(method)
        scorer = scorers.of(method)
        if not scorer.calibrated:
            raise BadArgumentError(f"method {method!r} learns nothing: it needs no calibration")
        if isinstance(of, np.ndarray):
            found = of
        else:
            found = scorers.learned(scorer, self.layout, of.fetch, queries, len(of))
        scorers.use(self._handle, self.layout, scorer, found)
        return found

    def _load_method(self, word: str) -> str:
        """Load a method that a Server offers to its peers: see scorers.load()."""
        return scorers.load(self._handle, self.layout, word)

    def sequence(self) -> Sequence:
        """A new, empty sequence."""
        self._make_huge_pages()
        return Sequence(self._handle, self.layout, _core.sequence_create(self._handle))

    def batch(self, sequences: Sequences[Sequence]) -> Batch:
        """Sequences to work on in one call; each at most once."""
        return Batch(self._handle, self.layout, sequences)

    def adopt(self, handle: bytes) -> Sequence:
        """The sequence that a handle names, sharing its pages; raises StaleError, CorruptError."""
        if not isinstance(handle, bytes):
            raise BadArgumentError(f"a handle is bytes, not {type(handle).__name__}")
        return Sequence(self._handle, self.layout, _core.sequence_adopt(self._handle, handle))

    def publish(
        self,
        seq: Sequence,
        keys: Iterable[bytes],
        tokens_per_key: int,
        *,
        strict: bool = True,
        states: npt.NDArray[np.uint8] | None = None,
    ) -> int:
        """Make complete pages of `seq` findable by match(), in every process of the pool.

        Key i stands for all tokens before (i + 1) * tokens_per_key. Pages stay until forget(),
        whoever releases them. Returns how many were not published before: of equal keys the first
        copy stays, and a page is published under one key only, the first. strict=False: only
        match(strict=False) finds them, for keys that do not name all text before their page, as
        those of content_keys(). Raises BadArgumentError for a sequence that goes on from such
        pages, unless strict=False. states: the checkpoint behind all tokens of the keys, which end
        a page; see publish_prefix().
        """
        if not is_whole(tokens_per_key, 1):
            raise BadArgumentError(f"{tokens_per_key} tokens a key: at least 1")
        if not isinstance(seq, Sequence):
            raise BadArgumentError(f"a sequence is wanted, not {type(seq).__name__}")
        if seq not in self:
            raise BadArgumentError("the sequence is of another pool")
        hashes = key_hashes(keys, strict)
        end = len(hashes) // 16 * tokens_per_key
        if states is not None:
            self._check_states(states, end)
        if states is not None and (end % self.layout.page_tokens or not strict):
            raise BadArgumentError(
                f"states behind {end} tokens: keys of all text before them, that end a page of "
                f"{self.layout.page_tokens}; publish_prefix() takes any number of tokens"
            )
        published = _core.publish(seq._handle, hashes, tokens_per_key, not strict)
        if states is not None:
            published += self._publish_states(seq, end, hashes[-16:], states)
        return published

    def match(self, keys: Iterable[bytes], *, lease_s: float = 60.0, strict: bool = True) -> Hit:
        """The longest published prefix of `keys`, held for `lease_s`; its tokens may be 0.

        strict=False: of what was published so. Its K and V are those of the same tokens at the same
        place of a text (positions are in K), but may have been computed behind other text: an
        approximation, to be mended by whoever asks for it (CacheBlend, arXiv 2405.16444; EPIC,
        arXiv 2410.15332). hit.strict tells, and what goes on from it is no source for a strict
        publish().
        """
        single = isinstance(keys, PageKeys) and keys.page_tokens == self.layout.page_tokens
        hashes = key_hashes(keys, strict)
        found = _core.match(self._handle, hashes, lease_s, single=single, content=not strict)
        return Hit(self._handle, self.layout, *found, strict)

    def publish_prefix(
        self,
        seq: Sequence,
        token_ids: npt.ArrayLike,
        salt: bytes = b"",
        *,
        tail: bool = False,
        states: npt.NDArray[np.uint8] | None = None,
    ) -> int:
        """publish() by chained hashes of the token ids, a page each; salt keeps tenants apart.

        tail=True: the tokens behind the last full page too, copied to a page of their own (of each
        part), so that a text that goes on loses none. That costs a whole page for at most
        page_tokens - 1 tokens, and once the text's next page is published only texts that part from
        it within that page still find it; so it is asked for where it pays: long pages, and texts
        that are known to go on. prefix_keys(ids, page_tokens, salt, tail=True) names it to
        forget(). Raises PoolFullError when there is no page for it; the full ones are published
        then.

        states: uint8 [layout.states.bytes], the checkpoint of a model with states behind the last
        of the ids; the tail goes with it. In such a pool texts are found up to a checkpoint only.
        """
        tokens, ids = self.layout.page_tokens, whole_ids(token_ids)
        if states is not None:
            self._check_states(states, len(ids))
        keys = prefix_keys(ids, tokens, salt)
        published = self.publish(seq, keys, tokens)
        rest = ids[len(keys) * tokens :]
        key = before = keys[-1] if len(keys) else root(salt)
        if len(rest) and (tail or states is not None):
            key = tail_keys(rest, before)[-1].tobytes()
            copy = partial(_core.publish_tail, seq._handle, len(ids), before, key)
            published += reclaim.retry(copy, self._handle, seq._parts)
        if states is not None:
            published += self._publish_states(seq, len(ids), key, states)
        return published

    def _publish_states(
        self, seq: Sequence, tokens: int, key: bytes, states: npt.NDArray[np.uint8]
    ) -> int:
        store = partial(_core.publish_states, seq._handle, tokens, key, states)
        return reclaim.retry(store, self._handle, lambda: self.records.state_pages)

    def _check_states(self, states: npt.NDArray[np.uint8], tokens: int) -> None:
        wanted = self.layout.states
        if wanted is None:
            raise BadArgumentError("the pool's layout has no states: KVLayout(states=)")
        given: object = states
        right = isinstance(given, np.ndarray) and given.dtype == np.uint8
        if not right or states.shape != (wanted.bytes,) or not tokens:
            raise BadArgumentError(
                f"states behind {tokens} tokens: an array of uint8 [{wanted.bytes}], and one token "
                "or more"
            )

    def match_prefix(
        self, token_ids: npt.ArrayLike, salt: bytes = b"", *, lease_s: float = 60.0
    ) -> Hit:
        """match() for what publish_prefix() published, tails too: the longest that agrees."""
        ids = whole_ids(token_ids)
        hashes = key_hashes(prefix_keys(ids, self.layout.page_tokens, salt))
        found = _core.match(self._handle, hashes, lease_s, single=True, ids=ids, root=root(salt))
        return Hit(self._handle, self.layout, *found)
