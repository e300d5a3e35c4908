"""A prompt is read in pieces that end where a checkpoint of the states is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache


def pieces(seen: int, stops: Sequence[int], at_once: bool) -> list[tuple[int, int]]:
    """From and to which token each pass goes, behind the first `seen`, so that one ends at each of
    the stops, which rise. at_once=False: of several tokens only the first pass of a text may be."""
    found = []
    for stop in stops:
        if at_once or seen == 0:
            found.append((seen, stop))
        else:
            found += [(at, at + 1) for at in range(seen, stop)]
        seen = stop
    return found


def positions_of(mask: Tensor) -> Tensor:
    """Places of tokens in their texts, [rows, tokens], as generate() gives them to a model."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def read(
    decoder: torch.nn.Module,
    cache: Cache,
    ids: Tensor,
    mask: Tensor,
    spans: Sequence[tuple[int, int]],
    heard: Callable[[int], None],
) -> None:
    """Have a model read ids [rows, tokens], mask alike, into the cache; heard() gets the end of
    each of the spans when it was read."""
    positions = positions_of(mask)
    for start, end in spans:
        decoder(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        heard(end)
