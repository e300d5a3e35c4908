"""What a pool should have of state checkpoints: a dictionary beside it.

The dictionary knows which pages are published (their names in the index) and which bytes each
checkpoint has. A match must end at the last token behind which it has both; what is read must be
those bytes, and K and V those of the text.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import CXLPool, KVLayout, LayerGroup, PoolFullError, Sequence, States
from cxlkv.errors import BadArgumentError
from cxlkv.pages import layer_places, places_of
from cxlkv.prefix import prefix_keys, root, tail_keys
from cxlkv.sequence.hit import Hit

Bytes = npt.NDArray[np.uint8]
Text = tuple[int, ...]
GOLDEN, ODD, WORD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, (1 << 64) - 1


def group(layers: int = 1, **more: object) -> LayerGroup:
    given = {"kv_heads": 2, "head_dim": 8, "dtype": "float32", **more}
    return LayerGroup(layers=layers, **given)  # type: ignore[arg-type]


def layout_of(page_tokens: int, state_bytes: int, *groups: LayerGroup) -> KVLayout:
    order = [index for index, one in enumerate(groups) for _ in range(one.layers)]
    states = States(state_bytes, 7)
    return KVLayout.of(list(groups), order, page_tokens=page_tokens, states=states)


def name(key: bytes, part: int, place: int = 0) -> bytes:
    """Of a page in the index: docs/reference/memory-layout.md."""
    words = np.frombuffer(key, np.uint64)
    first = int(words[0]) ^ (place + 1) * GOLDEN & WORD
    return np.array([first, int(words[1]) ^ part * ODD & WORD], np.uint64).tobytes()


def rows_of(text: Text, layer: int, kind: int, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """K or V, [tokens, heads, channels]: a token's follow from all tokens up to it."""
    past = np.array([hash(text[: end + 1]) % 1009 for end in range(len(text))], np.int64)
    place = np.arange(shape[0] * shape[1]) + 100 * layer + 50 * kind + 1
    return ((past[:, None] * place % 17 - 8) / 2).astype(np.float32).reshape(-1, *shape)


class Book:
    """What a pool should have."""

    def __init__(self, pool: CXLPool, room: CXLPool | None = None) -> None:
        """room: where texts are written again, to compare hits with them."""
        self.pool, self.layout, self.room = pool, pool.layout, room or pool
        geometry = pool.pages.geometry
        places = layer_places(self.layout, geometry)
        windows = [self.layout.groups[one].window for one in self.layout.order]
        self.windows = {part: windows[layer] or 0 for layer, (part, *_) in enumerate(places)}
        self.states_part = len(self.windows)
        self.there: set[bytes] = set()
        self.states: dict[bytes, Bytes] = {}
        self.state_pages = 0  # of a checkpoint: as many as the first one took

    def key(self, text: Text) -> bytes:
        page_tokens = self.layout.page_tokens
        keys = prefix_keys(text, page_tokens)
        rest = text[len(keys) * page_tokens :]
        before = bytes(keys[-1]) if len(keys) else root(b"")
        return tail_keys(np.array(rest), before)[-1].tobytes() if rest else before

    def state_names(self, text: Text) -> set[bytes]:
        key = self.key(text)
        return {name(key, self.states_part, place) for place in range(self.state_pages)}

    def is_whole(self, text: Text) -> bool:
        return bool(self.state_pages) and self.state_names(text) <= self.there

    def full_pages(self, text: Text) -> list[set[int]]:
        """Parts that have each page of the text, as far as a search goes."""
        found: list[set[int]] = []
        for key in prefix_keys(text, self.layout.page_tokens):
            found.append(set())
            for part, window in self.windows.items():
                if name(key, part) in self.there:
                    found[-1].add(part)
                elif not window:
                    return found
        return found

    def has_pages(self, text: Text, full: list[set[int]]) -> bool:
        whole, filled = divmod(len(text), self.layout.page_tokens)
        for part, window in self.windows.items():
            first = 0
            if window and len(text) >= window:
                first = (len(text) - window + 1) // self.layout.page_tokens
            if any(part not in page for page in full[first:whole]) or len(full) < whole > first:
                return False
            is_full = whole < len(full) and part in full[whole]
            if filled and not is_full and name(self.key(text), part) not in self.there:
                return False
        return True

    def match(self, text: Text) -> int:
        full = self.full_pages(text)
        for end in range(len(text), 0, -1):
            if self.is_whole(text[:end]) and self.has_pages(text[:end], full):
                return end
        return 0

    def look(self) -> set[bytes]:
        """What the pool says that it has."""
        rows = self.pool.hotness.published().rows
        return {row["hash"].tobytes() for row in rows}

    # ---- what is done to the pool, and checked ----

    def append(self, sequence: Sequence, text: Text, first: int = 0) -> None:
        for layer, one in enumerate(self.layout.order):
            of = self.layout.groups[one]
            k = rows_of(text, layer, 0, (of.kv_heads, of.head_dim))[first:]
            v = rows_of(text, layer, 1, (of.kv_heads, of.value_head_dim or of.head_dim))[first:]
            sequence.append(layer, k, None if of.values == "key_prefix" else v)

    def grown(self, pool: CXLPool, text: Text) -> Sequence:
        sequence = pool.sequence()
        self.append(sequence, text)
        return sequence

    def publish(self, text: Text, states: Bytes | None, tail: bool = False) -> None:
        before, whole = self.there, states is not None and self.is_whole(text)
        sequence = self.grown(self.pool, text)
        try:
            self.pool.publish_prefix(sequence, text, tail=tail, states=states)
        except PoolFullError:
            self.there = self.look()
            gone = self.state_names(text) - self.there
            assert before <= self.there
            assert gone == self.state_names(text) - before
            raise
        finally:
            sequence.release()
        self.there = self.look()
        assert before <= self.there
        if states is None:
            return
        if not self.state_pages:
            key = self.key(text)
            while name(key, self.states_part, self.state_pages) in self.there:
                self.state_pages += 1
        assert self.is_whole(text)
        if not whole:
            self.states[self.key(text)] = states

    def check_hit(self, hit: Hit, text: Text) -> None:
        """The hit is of the whole text: what the next token sees of it."""
        np.testing.assert_array_equal(hit.read_states(), self.states[self.key(text)])
        got, wanted = hit.sequence(), self.grown(self.room, (*text, 1))
        assert len(got) == len(text)
        with suppress(PoolFullError):
            self.append(got, (*text, 1), len(text))
            self.compare(got, wanted)
        got.release()
        wanted.release()

    def compare(self, got: Sequence, wanted: Sequence) -> None:
        near = 0.05 if self.layout.is_encoded else 1e-5
        for layer, one in enumerate(self.layout.order):
            of = self.layout.groups[one]
            queries = np.linspace(-1, 1, 2 * of.kv_heads * of.head_dim, dtype=np.float32)
            queries = queries.reshape(2 * of.kv_heads, of.head_dim)
            found = got.attend(layer, queries), wanted.attend(layer, queries)
            for mine, right in zip(*found, strict=True):
                np.testing.assert_allclose(mine, right, near, near)

    def find(self, text: Text) -> Hit:
        hit = self.pool.match_prefix(text)
        assert hit.tokens == self.match(text), text
        if hit.tokens:
            self.check_hit(hit, text[: hit.tokens])
        else:
            with pytest.raises(BadArgumentError, match="no state checkpoint"):
                hit.read_states()
        return hit

    def forget(self, text: Text) -> None:
        """All that is under the text's keys, what is left of checkpoints, too."""
        keys = prefix_keys(text, self.layout.page_tokens, tail=True)
        gone = self.pool.forget(keys)
        parts = {name(key, part) for key in keys for part in self.windows}
        states = {
            name(key, self.states_part, place) for key in keys for place in range(self.state_pages)
        }
        left = self.look()
        assert left <= self.there
        assert self.there - left <= parts | states
        assert not left & parts
        assert len(self.there - left) == gone
        self.there = left

    def evict(self, pages: npt.NDArray[np.void]) -> None:
        numbers, generations = pages["page"].copy(), pages["generation"].copy()
        self.pool.records.forget(numbers, generations, False)
        self.there -= {row["hash"].tobytes() for row in pages}
        assert self.look() == self.there


def made(book: Book, number: int) -> Bytes:
    """A checkpoint that tells which one it is."""
    wanted = book.layout.states
    assert wanted
    return np.random.default_rng(number).integers(0, 256, wanted.bytes, np.uint8)


def rows_named(book: Book, names: set[bytes]) -> npt.NDArray[np.void]:
    """The published pages of these names."""
    rows = book.pool.hotness.published().rows
    return rows[[row["hash"].tobytes() in names for row in rows]]


def pieces(book: Book, page: int) -> dict[str, int]:
    """Where bytes of each kind lie in the pool's file that a page of states has."""
    geometry, layout = book.pool.pages.geometry, book.layout
    at = places_of(geometry, layer_places(layout, geometry)[0], np.array([page], np.uint32))
    kinds = {"digest": at.digests, "sketch": at.sketches, "keys": at.keys, "values": at.values}
    found = {kind: int(one[0]) for kind, one in kinds.items() if one is not None}
    extent, slot = divmod(page, geometry["slab_slots"])
    first = geometry["extents_offset"] + extent * geometry["extent_bytes"]
    found["header"] = first + slot * 64 + 8
    found["sums"] = first + geometry["checksums_offset"] + slot * geometry["checksum_bytes"] + 4
    found["descriptor"] = (
        geometry["descriptors_offset"] + extent * geometry["descriptors_bytes"] + slot * 64 + 21
    )
    return found
