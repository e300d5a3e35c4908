"""Handover turns a cache's rows into bytes, from which another process decodes.

    data = hand_over(cache, model)              # in process A, behind its prefill
    cache = take_over(data, pool, model)        # in process B, which opened the same pool

The bytes, little-endian: a header {magic, version, rows, tokens so far with padding, 16 bytes that
name the model}, for each row its handle with its length before it and its states, if the model has
any, and a CRC32 of all that. Pages are not copied, only named; a handle takes each row's open tail
along as a page.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from cxlkv.adapters.common.keys import namespace
from cxlkv.adapters.transformers.cache import CXLCache, Settings
from cxlkv.adapters.transformers.identity import Identity
from cxlkv.adapters.transformers.layouts import check_layout, layout_of
from cxlkv.adapters.transformers.ropes import form_of
from cxlkv.adapters.transformers.states import Bytes
from cxlkv.errors import BadArgumentError, CXLKVError, StaleError
from cxlkv.layout import States
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence as Tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAGIC, OF_ONE_SEQUENCE = b"CKVC", b"CKVH"
VERSION = 2
HEADER = struct.Struct("<4sIIQ16s")
LENGTH = struct.Struct("<I")
CRC = struct.Struct("<I")


def hand_over(cache: CXLCache, model: torch.nn.Module) -> bytes:
    """Bytes by which any process with the pool open goes on where this cache stands.

    Valid while the cache's rows are not released and their process (of another host: its machine)
    lives: keep the cache until the other side has taken over. A second one is as good as the first
    until the cache has grown; then the first may be stale, where a cache.fork() would have kept it.
    The text is not in it: its receiver needs the token ids from elsewhere.

    Raises BadArgumentError for an empty cache, UnevenError where a pass failed half way,
    PoolFullError when there is no page for a row's open tail.
    """
    if not cache.sequences:
        raise BadArgumentError("the cache is empty: run the prompt through the model first")
    check_layout(cache.pool.layout, layout_of(model))
    tokens = cache.get_seq_length()
    header = (MAGIC, VERSION, len(cache.sequences), tokens, name_of(model, tokens))
    parts = [HEADER.pack(*header)]
    for row, sequence in enumerate(cache.sequences):
        handle = sequence.handle
        parts += [LENGTH.pack(len(handle)), handle]
        if cache.pool.layout.states is not None:
            parts.append(cache.states(row).tobytes())
    body = b"".join(parts)
    return body + CRC.pack(zlib.crc32(body))


def take_over(
    data: bytes, pool: CXLPool, model: torch.nn.Module, **settings: Unpack[Settings]
) -> CXLCache:
    """The cache that hand_over() was called with, of its own from now on; settings as CXLCache's.

    Any number of processes may take over from the same bytes. Raises StaleError when the bytes are
    damaged, of another pool, or of rows that were released since, also by the death of their
    process; then the prompt must be read again. BadArgumentError when the model has another config
    or other weights than the one that read the prompt, GeometryError as CXLCache. All rows or none.
    """
    tokens, name, handles, states = _read(data, pool.layout.states)
    check_layout(pool.layout, layout_of(model))
    if name != name_of(model, tokens):
        raise BadArgumentError(
            "the prompt was read by another model: config, dtype or weights differ, or which "
            "adapters are on, or what longer texts made of its rope. Load the same one and switch "
            "the same adapters on, or read the prompt with this one"
        )
    rows: list[Tokens] = []
    try:
        for handle in handles:
            rows.append(pool.adopt(handle))
        if max(len(row) for row in rows) > tokens:
            raise StaleError("these bytes are no hand-over: a row is longer than all of them")
        cache = CXLCache(pool, model, sequences=rows, states=states, **settings)
    except CXLKVError:
        for row in rows:
            row.release()
        raise
    cache._start_from(rows, tokens)
    return cache


def _read(data: bytes, kept: States | None) -> tuple[int, bytes, list[bytes], list[Bytes]]:
    """(tokens, the model's name, the rows' handles, their states); raises StaleError for what is no
    hand-over."""
    if not isinstance(data, bytes):
        raise BadArgumentError(f"a hand-over is bytes, not {type(data).__name__}")
    if data.startswith(OF_ONE_SEQUENCE):
        raise BadArgumentError(
            "this is the handle of a sequence: CXLCache(pool, model, sequences=[pool.adopt(it)])"
        )
    end = len(data) - CRC.size
    if end < HEADER.size or not data.startswith(MAGIC):
        raise StaleError(f"these {len(data)} bytes are no hand-over")
    if zlib.crc32(data[:end]) != CRC.unpack_from(data, end)[0]:
        raise StaleError("the hand-over was cut or changed on its way: send it again")
    _, version, count, tokens, name = HEADER.unpack_from(data)
    if version != VERSION:
        raise StaleError(
            f"the hand-over has version {version}, this cxlkv reads {VERSION}: install the same "
            "release on both sides"
        )
    handles, states = list[bytes](), list[Bytes]()
    at, state_bytes = HEADER.size, kept.bytes if kept else 0
    while at + LENGTH.size <= end:
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + size
        handles.append(data[at - size : at])
        at += state_bytes
        if kept is not None and at <= end:
            states.append(np.frombuffer(data, np.uint8, state_bytes, at - state_bytes))
    if at != end or count != len(handles) or not handles:
        raise StaleError("these bytes are no hand-over: its rows do not fit its length")
    return tokens, name, handles, states


def name_of(model: torch.nn.Module, tokens: int) -> bytes:
    """16 bytes of what the model is now, and of how it turns keys behind so many tokens.

    Not all of the weights are read, as CXLRequests does: a hand-over is to take no longer for a
    larger model.
    """
    found = Identity(model, sampled=True).now()
    if found.far:
        raise BadArgumentError(
            f"{found.far[0]} is not in memory, so the model cannot be told from another: hand over "
            "each row's handle, cache.sequences[row].handle, and see to it yourself"
        )
    form = form_of(found.ropes, tokens).hex() if found.ropes else ""
    return namespace({"model": found.words, "form": form})
