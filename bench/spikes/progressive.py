"""Spike for docs/decisions/0035: one code read to 2, 4 or 8 bits, against a code for each width.

    python bench/spikes/progressive.py FOLDER docs/decisions/data/0035-progressive.json

FOLDER: SmolLM2, as `cxlkv demo --prepare` prints it. Three questions: how far off the planes of a
code of 8 bits are, beside today's sketch and codes of 4 and 8 bits; how many tokens two stages read
when the first one is the upper 2 bits of what is stored; which planes attention needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from cxlkv.bench.lab import codes
from cxlkv.bench.lab.codes import Floats
from cxlkv.bench.lab.encodings import ATTENTION, Coder, causal
from cxlkv.bench.lab.texts import TEXTS
from cxlkv.bench.result import commit, machine
from cxlkv.demo.full_attention import divergence_from
from cxlkv.demo.text import inputs

PAGE, SHARE, SEED = 16, 0.05, 0
LENGTHS, QUERIES = (2048, 8192), 8
SAMPLE_BLOCKS = 8
BEND = np.float32(0.4)
Doubles = npt.NDArray[np.float64]
Row = dict[str, object]


class Watched(Coder):
    """Full attention that keeps all keys, and the queries of the last tokens of each length."""

    def keep(self, tokens: Tensor) -> None:
        self.keys: list[Floats] = []
        self.queries: list[dict[int, Floats]] = []
        self.model.set_attn_implementation(ATTENTION)
        self.chances(tokens, 1)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **more: object,
    ) -> tuple[Tensor, None]:
        self.keys.append(key[0].numpy().copy())
        groups = query[0].reshape(key.shape[1], -1, *query.shape[2:]).numpy()
        self.queries.append({n: groups[:, :, n - QUERIES : n].copy() for n in LENGTHS})
        return causal(query, key, value, scaling), None


# ---- how far off ----


def sketch(turned: Floats) -> Floats:
    """Today's codes of 2 bits, as they count: -1.5 to 1.5."""
    root = np.sqrt((turned.astype(np.float64) ** 2).mean(-1, keepdims=True))
    return (np.digitize(turned / np.where(root > 0, root, 1), [-1, 0, 1]) - 1.5).astype(np.float32)


def plane(turned: Floats) -> Floats:
    """The upper 2 bits of the code, as they count."""
    return ((codes.encode(turned, 8).codes >> 6) - 1.5).astype(np.float32)


def bent(turned: Floats, bits: int) -> Floats:
    """A code with two steps: half of its values are within BEND of the largest channel, the others
    outside. Of 4 bits its values are +-2, 6, 10, 14, 19, 25, 31, 37 fortieths of the largest; more
    bits halve each interval, so that it nests."""
    largest = np.abs(turned).max(-1, keepdims=True)
    size = np.abs(turned) / np.where(largest > 0, largest, 1)
    count = 1 << bits - 2
    inner = np.clip(np.floor(size / BEND * count), 0, count - 1) + 0.5
    outer = np.clip(np.floor((size - BEND) / (1 - BEND) * count), 0, count - 1) + 0.5
    values = np.where(size < BEND, inner * BEND, BEND * count + outer * (1 - BEND)) / count
    return np.asarray(np.where(turned < 0, -values, values) * largest, np.float32)


def bent_plane(turned: Floats) -> Floats:
    """The upper 2 bits of it, as they count in a sum of whole steps."""
    limit = BEND * np.abs(turned).max(-1, keepdims=True)
    return (np.digitize(turned / np.where(limit > 0, limit, 1), [-1, 0, 1]) - 1.5).astype(
        np.float32
    )


def plane_3(turned: Floats) -> Floats:
    """The upper 3 bits of the code, as they count."""
    return ((codes.encode(turned, 8).codes >> 5) - 3.5).astype(np.float32)


def projected_error(turned: Floats, counted: Floats) -> float:
    """Relative squared error with the gain of a row that makes it least."""
    dot = (turned.astype(np.float64) * counted).sum(-1)
    lengths = (turned.astype(np.float64) ** 2).sum(-1), (counted.astype(np.float64) ** 2).sum(-1)
    some = lengths[0] > 0
    return float((lengths[0] - dot**2 / lengths[1])[some].sum() / lengths[0].sum())


def errors(turned: Floats) -> dict[str, float]:
    """turned: rotated keys [..., dim]."""
    eight = codes.encode(turned, 8)
    found = {
        "sketch": projected_error(turned, sketch(turned)),
        "plane_2": projected_error(turned, plane(turned)),
        "bent_plane": projected_error(turned, bent_plane(turned)),
        "bent_4": codes.relative_error(bent(turned, 4), turned),
        "bent_8": codes.relative_error(bent(turned, 8), turned),
        "plane_3": projected_error(turned, plane_3(turned)),
        "planes_4": codes.relative_error(codes.decode(codes.upper_half(eight), 4), turned),
        "int4": codes.relative_error(codes.decode(codes.encode(turned, 4), 4), turned),
        "int8": codes.relative_error(codes.decode(eight, 8), turned),
    }
    symmetric = np.abs(turned).max(-1, keepdims=True) / 7
    whole = np.rint(turned / np.where(symmetric > 0, symmetric, 1)) * symmetric
    return found | {"whole_steps_4": codes.relative_error(whole.astype(np.float32), turned)}


# ---- two stages ----


def two_stage(
    turned: Floats, queries: Floats, counted: Floats, random: np.random.Generator
) -> Doubles:
    """docs/decisions/0011-sketch.md with one head's rotated keys [tokens, dim], rotated queries
    [group, dim] and codes as they count: for each of ZS the recall of the pages, and the shares of
    tokens, and of blocks of 16, that the second stage reads: [len(ZS), 3]."""
    tokens = len(turned) // PAGE * PAGE
    turned, counted = turned[:tokens], counted[:tokens]
    dot = (turned * counted).sum(-1)
    scales = np.where(dot > 0, (turned**2).sum(-1) / np.where(dot > 0, dot, 1), 0)
    true = (queries @ turned.T).max(0)
    guess = (queries @ counted.T).max(0) * scales
    pages = tokens // PAGE
    wanted = max(1, round(SHARE * pages))
    sample = random.choice(pages, SAMPLE_BLOCKS, replace=False)
    at = (sample[:, None] * PAGE + np.arange(PAGE)).ravel()
    error = np.sqrt((((true - guess)[at] / scales[at]) ** 2).mean())
    place = np.sort(guess.reshape(pages, PAGE).max(1))[-wanted]
    best = np.argsort(-true.reshape(pages, PAGE).max(1))[:wanted]
    found = []
    for z in ZS:
        read = guess + z * error * scales >= place
        scored = np.where(read, true, -np.inf).reshape(pages, PAGE).max(1)
        chosen = np.argsort(-scored)[:wanted]
        blocks = read.reshape(pages, PAGE).any(1).mean()
        found.append((np.isin(best, chosen).mean(), read.mean(), blocks))
    return np.array(found, np.float64)


def stages_of(heads: Sequence[tuple[Floats, Floats]]) -> Row:
    """heads: rotated keys, and rotated queries [group, queries, dim]. Means over all of them, at
    today's z for a recall of 0.98, and at the z that gives it."""
    found: Row = {}
    for name, coder in FIRST_STAGES.items():
        rows = []
        for turned, queries in heads:
            random, counted = np.random.default_rng(SEED), coder(turned)
            rows += [
                two_stage(turned, queries[:, at], counted, random) for at in range(queries.shape[1])
            ]
        means = np.mean(rows, axis=0)
        at_recall = [float(np.interp(RECALL, means[:, 0], of)) for of in (*means[:, 1:].T, ZS)]
        found[name] = {
            "at_z_2.33": dict(zip(FIGURES, means[ZS.index(2.33)].round(5).tolist(), strict=True)),
            "at_recall_0.98": dict(zip((*FIGURES[1:], "z"), np.round(at_recall, 5), strict=True)),
        }
    return found


ZS = (1.0, 1.5, 1.8, 2.0, 2.2, 2.33, 2.5, 2.7, 3.0, 3.5)
RECALL = 0.98
FIGURES = ("recall", "tokens", "blocks")
FIRST_STAGES = {
    "sketch": sketch,
    "plane_2": plane,
    "bent_plane": bent_plane,
    "plane_3": plane_3,
}


# ---- planes of attention ----


class ByMass(Coder):
    """Pages are read in 4 bits, keys in 8 where a page's share of attention is `keys_8` or more,
    values likewise; values of pages below `values_2` in 2. Shares are those of the scores in 4
    bits, the mean over the query heads of a kv head. bits: read, of keys and of values."""

    keys_8 = values_8 = values_2 = 0.0
    read: list[tuple[float, float]]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **more: object,
    ) -> tuple[Tensor, None]:
        tokens, out = key.shape[2], torch.empty_like(query[0])
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        group = query.shape[1] // key.shape[1]
        keys, values = planes_of(key[0]), planes_of(value[0])
        seen = (~later[:, ::PAGE]).float()
        for head in range(key.shape[1]):
            some = query[0, head * group : (head + 1) * group] * float(scaling or 1)
            four = (some @ keys[4][head].mT).masked_fill_(later, -torch.inf)
            by_page = four.softmax(-1).mean(0).reshape(tokens, -1, PAGE).sum(-1)
            heavy = (by_page >= self.keys_8).repeat_interleave(PAGE, dim=1)
            eight = (some @ keys[8][head].mT).masked_fill_(later, -torch.inf)
            weights = torch.where(heavy, eight, four).softmax(-1)
            best = (by_page >= self.values_8).repeat_interleave(PAGE, dim=1)
            least = (by_page < self.values_2).repeat_interleave(PAGE, dim=1)
            out[head * group : (head + 1) * group] = (
                (weights * best) @ values[8][head]
                + (weights * ~(best | least)) @ values[4][head]
                + (weights * least) @ values[2][head]
            )
            counts = [
                float((one[:, ::PAGE] * seen).sum() / seen.sum()) for one in (heavy, best, least)
            ]
            self.read.append((4 + 4 * counts[0], 4 + 4 * counts[1] - 2 * counts[2]))
        return out.transpose(0, 1)[None].contiguous(), None


def planes_of(rows: Tensor) -> dict[int, Tensor]:
    """What the planes of codes stand for, by bits; those of 2 with the gain that errs least."""
    turned = codes.rotate(rows.numpy())
    eight, counted = codes.encode(turned, 8), plane(turned)
    gain = (turned * counted).sum(-1, keepdims=True) / (counted**2).sum(-1, keepdims=True)
    found = {
        8: codes.decode(eight, 8),
        4: codes.decode(codes.upper_half(eight), 4),
        2: counted * gain,
    }
    return {bits: torch.from_numpy(codes.unrotate(some)) for bits, some in found.items()}


CHOICES = (
    (0.0, 0.0, 0.0),
    (2.0, 2.0, 0.0),
    (0.02, 2.0, 0.0),
    (0.005, 0.05, 0.0),
    (0.005, 0.05, 0.001),
    (0.002, 0.05, 0.002),
)
"""keys_8, values_8, values_2: first all in 8 bits, then all in 4."""


def planes(folder: Path, names: Sequence[str], tokens: int, steps: int) -> list[Row]:
    coder = ByMass(inputs.read_model(folder))
    found = []
    for name in names:
        ids = ids_of(folder, name, tokens + 1)
        full, wanted = coder.chances(ids[:-1], steps), ids[-steps:, None]
        loss = float(-full.gather(1, wanted).mean())
        for coder.keys_8, coder.values_8, coder.values_2 in CHOICES:
            coder.read = []
            coder.model.set_attn_implementation(ATTENTION)
            chances = coder.chances(ids[:-1], steps)
            coder.model.set_attn_implementation(coder.own)
            read = np.array(coder.read).mean(0)
            row: Row = {
                "text": name,
                "keys_8": coder.keys_8,
                "values_8": coder.values_8,
                "values_2": coder.values_2,
                "bits_keys": round(float(read[0]), 3),
                "bits_values": round(float(read[1]), 3),
                "divergence": float(f"{float(divergence_from(full, chances).mean()):.4g}"),
                "loss": round(float(-chances.gather(1, wanted).mean()) / loss - 1, 6),
            }
            print(row, file=sys.stderr, flush=True)
            found.append(row)
    return found


def ids_of(folder: Path, name: str, count: int) -> Tensor:
    text = next(text for text in TEXTS if text.name == name).read()
    return torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:count])


def stages(folder: Path) -> tuple[Row, Row]:
    """How far off, and two stages, of the model's keys and of drawn ones."""
    coder = Watched(inputs.read_model(folder))
    coder.keep(ids_of(folder, "reference-a", max(LENGTHS)))
    turned = [codes.rotate(keys) for keys in coder.keys]
    rows: Row = {"model": errors(np.concatenate([keys[:, :2048] for keys in turned], axis=1))}
    found: Row = {}
    for tokens in LENGTHS:
        heads = [
            (turned[layer][head, :tokens], codes.rotate(coder.queries[layer][tokens][head]))
            for layer in range(len(turned))
            for head in range(len(turned[layer]))
        ]
        found[f"model_{tokens}"] = stages_of(heads)
    random = np.random.default_rng(SEED)
    drawn = random.normal(size=(4, 32768, 128)).astype(np.float32)
    asked = random.normal(size=(4, 1, 8, 128)).astype(np.float32)
    rows["gaussian_128"] = errors(drawn[0])
    found["gaussian_32768"] = stages_of(list(zip(drawn, asked, strict=True)))
    return rows, found


def main() -> None:
    """Makes what the file lacks."""
    folder, path = Path(sys.argv[1]), Path(sys.argv[2])
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    found |= {"machine": machine(), "commit": commit(), "seed": SEED}
    if "two_stage" not in found:
        found["errors"], found["two_stage"] = stages(folder)
        path.write_text(json.dumps(found, indent=1))
    if "planes" not in found:
        found["planes"] = planes(folder, ("handbook", "argparse", "table", "german"), 1024, 512)
        path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
