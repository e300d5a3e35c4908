"""How much attention the best pages hold by keys of low rank: before and behind the rotation, by
components of a head or of all heads, learned or of the text, with channels weighed or alike.

    python bench/spikes/low_rank.py MODEL FILE

MODEL: a folder of SmolLM2-135M-Instruct. Decision 0039 has what it showed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoTokenizer

from cxlkv import Rotary
from cxlkv.adapters.transformers import layout_of
from cxlkv.bench.lab.texts import TEXTS
from cxlkv.bench.result import commit
from cxlkv.demo.text import inputs

TOKENS, PAGE, ASKED, SHARE = 2976, 16, 8, 0.05
TAUGHT, READ = "dialogue", ("handbook", "argparse")
seen: dict[int, tuple[Tensor, Tensor]] = {}


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **rest: object
) -> tuple[Tensor, None]:
    """Full attention, of which queries [heads, tokens, dim] and keys are kept."""
    seen[int(cast(int, module.layer_idx))] = query[0].double(), key[0].double()
    made = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return made.transpose(1, 2), None


def low(keys: Tensor, basis: Tensor, weights: Tensor, in_bytes: bool = False) -> Tensor:
    """Keys [heads, tokens, dim] by components [heads, dim, rank] of weighed channels."""
    made = (keys * weights) @ basis
    if in_bytes:
        size = made.abs().quantile(0.9995, dim=1, keepdim=True) * 1.5 / 127
        made = (made / size).round().clamp(-127, 127) * size
    return made @ basis.transpose(1, 2) / weights


def weights_of(
    queries: Tensor, heads: int, pairs: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
) -> Tensor:
    """The length that queries [q_heads, tokens, dim] have in each channel, of both of a pair the
    same: [kv_heads, 1, dim]."""
    squares = (queries**2).mean(1).reshape(heads, -1, queries.shape[2]).mean(1)
    first, second = pairs
    squares[:, first] = squares[:, second] = (squares[:, first] + squares[:, second]) / 2
    return squares.sqrt()[:, None]


def best(keys: Tensor, rank: int) -> Tensor:
    """The first components of each head, [heads, dim, rank]."""
    vectors: Tensor = torch.linalg.eigh(keys.transpose(1, 2) @ keys)[1]
    return vectors[..., -rank:]


def of_all_heads(keys: Tensor, rank: int, weights: Tensor) -> Tensor:
    """Keys by components of this text that all heads share, rank times heads many."""
    heads, tokens, dim = keys.shape
    rows = (keys * weights).transpose(0, 1).reshape(tokens, heads * dim)
    u, s, v = torch.linalg.svd(rows, full_matrices=False)
    made: Tensor = (u[:, : rank * heads] * s[: rank * heads]) @ v[: rank * heads]
    return made.reshape(tokens, heads, dim).transpose(0, 1) / weights


Turn = Callable[[Tensor], Tensor]


def turning(rotary: Rotary, positions: npt.NDArray[np.int64]) -> tuple[Turn, Turn]:
    """What turns keys back, and what turns them."""

    def before(keys: Tensor) -> Tensor:
        return torch.from_numpy(rotary.unrotate(keys.numpy(), positions)).double()

    def behind(keys: Tensor) -> Tensor:
        return torch.from_numpy(rotary.rotate(keys.numpy(), positions)).double()

    return before, behind


def mass(keys: Tensor, estimated: Tensor, queries: Tensor) -> float:
    """Attention that the best pages by the estimate hold, the first and the last two among them.
    queries [kv_heads, group, rows, dim]."""

    def shares(of: Tensor) -> Tensor:
        logits = torch.einsum("hgrd,htd->hgrt", queries, of) * of.shape[2] ** -0.5
        return torch.softmax(logits, -1).reshape(*logits.shape[:3], -1, PAGE).sum(-1)

    order = shares(estimated).mean(1)
    order[..., 0] = order[..., -2:] = 9
    chosen = order.topk(int(SHARE * order.shape[-1]), -1).indices
    held = shares(keys).gather(-1, chosen[:, None].expand(-1, queries.shape[1], -1, -1))
    return float(held.sum(-1).mean())


def main(model_folder: Path, file: Path) -> None:
    model = inputs.read_model(model_folder).float()  # type: ignore[no-untyped-call]
    tokenizer, layout = AutoTokenizer.from_pretrained(model_folder), layout_of(model)
    AttentionInterface.register("recorded", attention)
    model.set_attn_implementation("recorded")

    def read(name: str) -> dict[int, tuple[Tensor, Tensor]]:
        text = next(text for text in TEXTS if text.name == name).read()
        ids = tokenizer(text)["input_ids"][: TOKENS + PAGE]
        with torch.inference_mode():
            model(torch.tensor([ids]))
        return dict(seen)

    positions = np.arange(TOKENS)
    found: dict[str, dict[str, list[float]]] = {}
    taught = read(TAUGHT)
    for name in READ:
        text, held = read(name), defaultdict[str, list[float]](list)
        for layer, (queries, every) in text.items():
            keys, rotary = every[:, :TOKENS], layout.rotary_of(layer)
            assert rotary is not None

            before, behind = turning(rotary, positions)
            theirs, learned = (part[:, :TOKENS] for part in taught[layer])
            weighed = weights_of(theirs, len(keys), rotary.pairs)
            alike = torch.ones_like(weighed)
            asked = queries[:, TOKENS + PAGE - ASKED :].reshape(len(keys), -1, ASKED, keys.shape[2])
            made = {"exact": keys}
            for rank, (how, w) in product((4, 8, 16), (("alike", alike), ("weighed", weighed))):
                made[f"behind, {how}, {rank}"] = low(keys, best(learned * w, rank), w)
                own = before(keys)
                of_head = low(own, best(before(learned) * w, rank), w)
                made[f"before, {how}, {rank}"] = behind(of_head)
                made[f"before, all heads, {how}, {rank}"] = behind(of_all_heads(own, rank, w))
            for what, estimated in made.items():
                held[what].append(mass(keys, estimated, asked))
            own, before_learned = before(keys), before(learned)
            in_bytes = low(own, best(before_learned * weighed, 8), weighed, in_bytes=True)
            mine = weights_of(queries[:, TOKENS - 64 : TOKENS], len(keys), rotary.pairs)
            by_mine = low(own, best(before_learned * mine, 8), mine)
            for what, part in (("in bytes", in_bytes), ("by the text's last 64", by_mine)):
                held[f"before, weighed, 8, {what}"].append(mass(keys, behind(part), asked))
        found[name] = held
        for what, layers in held.items():
            print(f"{name:10} {what:32} {np.mean(layers):.4f}", flush=True)
    of = {"commit": commit(), "pages": SHARE, "mass of each layer": found}
    file.write_text(json.dumps(of, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
