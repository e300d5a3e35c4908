"""Where a model with states is worth a checkpoint of them.

A checkpoint may take as many bytes as K and V of thousands of tokens, and serves only texts that
agree with its own up to it. So one is taken where a text is likely to be met again, not at every
block: the choice of Marconi (Pan et al., MLSys 2025, arXiv 2411.19379), and the ends of turns.
"""

from __future__ import annotations

from cxlkv.errors import BadArgumentError
from cxlkv.numbers import is_whole

__all__ = ["positions"]


def positions(tokens: int, hit: int, known: int, *, every: int | None = None) -> list[int]:
    """Take checkpoints of a prompt behind these numbers of its tokens, which rise.

    hit: tokens of the match that it goes on from; known: Hit.known_tokens. One is at the end, less
    the last token, which is computed again by whoever has the same prompt; one where its text
    parted from others', which begin alike and have no checkpoint there. every: others at multiples
    of so many tokens. The end of a turn is the caller's. Raises BadArgumentError.
    """
    numbers = (tokens, hit, known, 1 if every is None else every)
    if not all(is_whole(one) for one in numbers) or numbers[3] == 0:
        raise BadArgumentError(f"tokens, hit, known, every {numbers!r:.80}: whole numbers")
    end = tokens - 1
    found = {end, known}
    if every:
        found.update(range(every, end, every))
    return sorted(one for one in found if hit < one <= end)
