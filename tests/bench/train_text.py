"""Trains the byte-level Llama of bench/models/text on the sources of Python's own library.

    nice python -m tests.bench.train_text --out FOLDER     43 minutes on one busy core
    python -m tests.bench.train_text --evaluate FOLDER     ten minutes

What it is for: keys and queries of a model that was trained on text and that really looks back
thousands of tokens, small enough to ship. A stopped run goes on where it was when started again.

To look far back is taught in three ways, as there is little time. A quarter of the samples have
segments copied to a random later place; a quarter have lines such as `name = 123456` and, anywhere
behind, `assert name == 123456`. And the first stages are short, which is cheap, but in half of
their samples positions jump ahead at random places, so that rotary distances of a long context
are known before the few long steps at the end come (PoSE, arXiv:2309.10400).
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from cxlkv.arrays import Bytes
from cxlkv.bench.models.corpus import Corpus, standard_library
from cxlkv.bench.sources import load

SEED = 1
LONGEST = 65_536
"""Positions jump up to here."""
WARM_UP_STEPS = 30
SAVE_S = 120.0
MUON_RATE = 0.02
ADAM_RATE = 3e-3
EVALUATED = 256
"""Bytes at the end of a held-out text whose loss counts."""
VALUE_DIGITS = 6


@dataclass(frozen=True)
class Stage:
    """Steps at one length. The rates go linearly from `rate` to `rate_end` times the highest."""

    tokens: int
    batch: int
    steps: int
    rate: float
    rate_end: float
    jumps: bool = False


STAGES = (
    Stage(512, 8, 1000, 1.0, 0.7, jumps=True),
    Stage(2048, 3, 150, 0.7, 0.35, jumps=True),
    Stage(8192, 1, 30, 0.35, 0.1),
    Stage(16384, 1, 4, 0.1, 0.05),
)


class Samples:
    """Draws training samples from files."""

    def __init__(self, files: tuple[bytes, ...]) -> None:
        whole = b"".join(files)
        self.text: Bytes = np.frombuffer(whole, np.uint8)
        self.words = sorted(set(re.findall(rb"\b[a-z]{3,8}\b", whole)))

    def draw(self, random: np.random.Generator, tokens: int) -> Bytes:
        """`tokens` bytes of text: half of them as they are, the others with something repeated."""
        kind = random.integers(4)
        if kind == 0:
            return self.with_copies(random, tokens)
        if kind == 1:
            return self.with_definitions(random, tokens)[0]
        return self.window(random, tokens)

    def window(self, random: np.random.Generator, tokens: int) -> Bytes:
        first = random.integers(len(self.text) - tokens)
        return self.text[first : first + tokens]

    def with_copies(self, random: np.random.Generator, tokens: int) -> Bytes:
        """Segments of 32 bytes to a quarter of all stand a second time, at any later place."""
        made = self.window(random, tokens).copy()
        for _ in range(2 + tokens // 1024):
            length = int(random.integers(32, min(512, tokens // 4)))
            source = int(random.integers(tokens - 2 * length))
            target = int(random.integers(source + length, tokens - length + 1))
            made[target : target + length] = made[source : source + length]
        return made

    def with_definitions(
        self, random: np.random.Generator, tokens: int
    ) -> tuple[Bytes, npt.NDArray[np.bool_]]:
        """Lines that give names values and, behind them, lines that need these; and bool [tokens]:
        which bytes are digits that stand in an earlier line."""
        lines = self.window(random, tokens).tobytes().splitlines(keepends=True)
        inserted: dict[int, list[tuple[bytes, int]]] = {}
        for _ in range(2 + tokens // 512):
            name = b"_".join(self.words[w] for w in random.integers(len(self.words), size=2))
            value = b"".join(b"%d" % digit for digit in random.integers(10, size=VALUE_DIGITS))
            first, second = sorted(random.integers(len(lines), size=2))
            inserted.setdefault(first, []).append((b"%s = %s\n" % (name, value), 0))
            used = (b"assert %s == %s\n" % (name, value), VALUE_DIGITS)
            inserted.setdefault(second, []).append(used)
        made, asked = bytearray(), bytearray()
        for place, line in enumerate(lines):
            for text, digits in (*inserted.get(place, ()), (line, 0)):
                made += text
                asked += bytes(len(text) - digits - 1) + b"\1" * digits + b"\0"
        marks = np.frombuffer(bytes(asked[:tokens]), np.bool_)
        return np.frombuffer(bytes(made[:tokens]), np.uint8), marks

    def batch(self, stage: int, step: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a step, int64 [batch, tokens]; the same for the same step."""
        of = STAGES[stage]
        random = np.random.default_rng([SEED, stage, step])
        ids = np.stack([self.draw(random, of.tokens) for _ in range(of.batch)]).astype(np.int64)
        places = np.tile(np.arange(of.tokens), (of.batch, 1))
        for row in range(of.batch if of.jumps else 0):
            if random.integers(2):
                at = np.sort(random.integers(1, of.tokens, size=3))
                to = np.sort(random.integers(LONGEST - of.tokens, size=3))
                if random.integers(2):  # nearer jumps as often as far ones
                    to //= 8
                places[row] += np.concatenate([[0], to])[
                    np.searchsorted(at, np.arange(of.tokens), side="right")
                ]
        return torch.from_numpy(ids), torch.from_numpy(places)


def new_model() -> LlamaForCausalLM:
    """An untrained model of the shipped shape: 2.0 M weights."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=224,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def losses(model: LlamaForCausalLM, ids: Tensor, places: Tensor | None = None) -> Tensor:
    """Nats for each byte but the first: [batch, tokens - 1]."""
    # With a mask of ones transformers does not take jumps for borders between packed samples.
    ones = None if places is None else torch.ones_like(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, attention_mask=ones, position_ids=places, use_cache=False).logits
    return functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none"
    )


class Training:
    """A model with its optimizers, at some step; saved in a folder and taken up again there."""

    def __init__(self, folder: Path, samples: Samples) -> None:
        self.folder = folder
        self.samples = samples
        self.model = new_model()
        hidden = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if all(p is not h for h in hidden)]
        self.optimizers: tuple[tuple[torch.optim.Optimizer, float], ...] = (
            (torch.optim.Muon(hidden, lr=MUON_RATE, weight_decay=0.01), MUON_RATE),
            (torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95)), ADAM_RATE),
        )
        self.stage = self.step = 0
        self.spent_s = 0.0
        self.bits: list[float] = []

    @property
    def file(self) -> Path:
        return self.folder / "training.pt"

    def save(self) -> None:
        """Both the state to go on from and, rounded to bfloat16, the model itself."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "at": (self.stage, self.step, self.spent_s),
        }
        partial = self.file.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self.file)
        rounded = new_model()
        rounded.load_state_dict(self.model.state_dict())
        rounded.bfloat16().save_pretrained(self.folder)

    def resume(self) -> None:
        """Go on from what the folder holds, if it holds anything."""
        if self.file.exists():
            state = torch.load(self.file)
            self.model.load_state_dict(state["model"])
            for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.stage, self.step, self.spent_s = state["at"]

    def run(self) -> None:
        """All steps that are left, with a line now and then."""
        saved = time.monotonic()
        while self.stage < len(STAGES):
            of = STAGES[self.stage]
            began = time.monotonic()
            self.one_step(of)
            self.step += 1
            self.spent_s += time.monotonic() - began
            if self.step % max(1, of.steps // 40) == 0:
                self.report(of)
            if self.step == of.steps:
                self.stage, self.step = self.stage + 1, 0
            if self.step == 0 or time.monotonic() - saved >= SAVE_S:
                self.save()
                saved = time.monotonic()

    def one_step(self, of: Stage) -> None:
        share = of.rate + (of.rate_end - of.rate) * self.step / of.steps
        if self.stage == 0:
            share *= min(1.0, (self.step + 1) / WARM_UP_STEPS)
        ids, places = self.samples.batch(self.stage, self.step)
        loss = losses(self.model, ids, places).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()
        self.bits.append(loss.item() / math.log(2))

    def report(self, of: Stage) -> None:
        mean = sum(self.bits) / len(self.bits)
        self.bits.clear()
        print(
            f"{of.tokens:6d} tokens, step {self.step:4d} of {of.steps}, "
            f"{mean:.3f} bits a byte, {self.spent_s / 60:.1f} minutes",
            flush=True,
        )


@torch.inference_mode()
def bits_per_byte(
    model: LlamaForCausalLM, files: tuple[bytes, ...], context: int, longest: int, texts: int
) -> float:
    """Mean bits for the last 256 bytes of some texts, given `context` bytes before them.

    The texts end at the same places for each `context` up to `longest`: the starts of files that
    were held out, one of each.
    """
    ends = [text for text in files if len(text) >= longest + EVALUATED][:texts]
    total = 0.0
    for text in ends:
        end = longest + EVALUATED
        ids = torch.tensor(list(text[end - EVALUATED - context : end]))[None]
        total += losses(model, ids)[0, -EVALUATED:].mean().item() / math.log(2)
    return total / len(ends)


@torch.inference_mode()
def recalled(model: LlamaForCausalLM, files: tuple[bytes, ...], tokens: int, texts: int) -> float:
    """Share of right digits where held-out text of `tokens` bytes repeats a value given before."""
    samples = Samples(files)
    right, count = 0, 0
    for seed in range(texts):
        made, asked = samples.with_definitions(np.random.default_rng([SEED, 99, seed]), tokens)
        ids = torch.from_numpy(made.astype(np.int64))[None]
        with torch.autocast("cpu", torch.bfloat16):
            best = model(ids, use_cache=False).logits[0, :-1].argmax(-1)
        wanted = torch.from_numpy(asked[1:].copy())
        right += int((best == ids[0, 1:])[wanted].sum())
        count += int(wanted.sum())
    return right / max(1, count)


def evaluation(model: LlamaForCausalLM, corpus: Corpus) -> Iterator[str]:
    """Lines that say how good a model is, and whether it uses a long context."""
    for context in (256, 1024, 4096, 16384):
        bits = bits_per_byte(model, corpus.held_out, context, 16384, 16)
        yield f"bits a byte given {context:6,d} bytes, of held-out files: {bits:.3f}"
    for tokens, texts in ((1024, 64), (4096, 16), (16384, 4)):
        share = recalled(model, corpus.held_out, tokens, texts)
        yield f"digits of values given before, in {tokens:6,d} bytes: {share:.3f} right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--out", type=Path, help="train; folder for model and state")
    which.add_argument("--evaluate", type=Path, help="a folder with a model")
    arguments = parser.parse_args()
    # One thread: sums are then always added in the same order, so a run can be repeated.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    corpus = standard_library()
    size = sum(map(len, corpus.training)) / 1e6
    print(f"{size:.1f} MB to learn from; corpus {corpus.sha256}", flush=True)
    folder: Path = arguments.evaluate or arguments.out
    if arguments.out is not None:
        training = Training(folder, Samples(corpus.training))
        training.resume()
        training.run()
        training.file.unlink()
    for line in evaluation(load(folder), corpus):
        print(line, flush=True)


if __name__ == "__main__":
    main()
