"""A request's text, as the engine has it: what the scheduler's side reads of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class EngineRequest(Protocol):
    """What is read of the engine's own object for a request; it changes as the text grows."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None: ...


def hashes_of(
    request: EngineRequest, every: int, first: int, last: int | None = None
) -> list[bytes]:
    """The hashes that name blocks [first, last), as many as the engine has computed. It computes
    `every` hashes a block; the last of them names the block."""
    end = None if last is None else last * every
    return [bytes(one) for one in request.block_hashes[first * every + every - 1 : end : every]]
