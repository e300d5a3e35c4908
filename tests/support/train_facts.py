"""Trains the small Llama of cxlkv/demo/model: `python -m tests.support.train_facts --out PATH`.

The model has to find one fact among 16,384 tokens (see `task`). Two things make this cheap enough
for one core. First, the embedding table is learned in factors (a row for a key plus a row for a
value), and multiplied out at the end, so that the shipped checkpoint is an ordinary Llama.
Second, a curriculum: short contexts with few facts until the model answers, then longer ones.
A model trained to 4,096 tokens forgets at 16,384, for softmax spreads its weight over more
fillers; some hundred steps at each of these lengths sharpen it.

All of it takes some twenty minutes on one core. It needs torch and transformers, which a plain
install of the package leaves out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForTokenClassification

from cxlkv.demo.task import FACT_KEYS, FILLERS, VALUES, VOCABULARY_SIZE, Context, make_context

HIDDEN = 128
QUERY_HEADS = 4
KV_HEADS = 2
HEAD_DIM = HIDDEN // QUERY_HEADS
AVERAGE_DECAY = 0.9
SEED = 1
# Contexts for training have seeds above this one, those for evaluation below it.
FIRST_TRAINING_SEED = 1_000_000
STEPS_PER_STAGE_MAX = 10_000


@dataclass(frozen=True)
class Stage:
    """Training at one length: until `accuracy` (a moving average), or for all of `steps`.

    The learning rate goes linearly from `rate` to `rate_end` over `steps`.
    """

    tokens: int
    facts: int
    batch: int
    questions: int
    steps: int = STEPS_PER_STAGE_MAX
    accuracy: float = 2.0
    rate: float = 2e-3
    rate_end: float = 2e-3


STAGES = (
    Stage(64, 8, 64, 8, accuracy=0.98),
    Stage(128, 32, 64, 32, accuracy=0.98),
    Stage(256, 64, 32, 64, accuracy=0.98),
    Stage(512, 128, 16, 64, accuracy=0.98),
    Stage(1024, 128, 8, 64, accuracy=0.98),
    Stage(2048, 256, 4, 64, accuracy=0.98),
    Stage(4096, 256, 2, 128, accuracy=0.98),
    Stage(4096, 256, 1, 128, steps=60, rate=5e-4, rate_end=5e-4),
    Stage(8192, 256, 1, 128, steps=120, rate=5e-4, rate_end=5e-4),
    Stage(16384, 256, 1, 256, steps=200, rate=5e-4, rate_end=5e-5),
)


class Factors(nn.Module):
    """The embedding table in the factors that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(0.5 * torch.randn(FACT_KEYS, HIDDEN))
        self.values = nn.Parameter(0.5 * torch.randn(VALUES, HIDDEN))
        self.asks = nn.Parameter(0.5 * torch.randn(HIDDEN))
        self.fillers = nn.Parameter(0.5 * torch.randn(FILLERS, HIDDEN))

    def table(self) -> Tensor:
        """The table multiplied out, in the order of the token ids: [VOCABULARY_SIZE, HIDDEN]."""
        facts = self.keys[:, None] + self.values[None]
        return torch.cat([facts.flatten(0, 1), self.keys + self.asks, self.fillers])


@dataclass(frozen=True)
class Batch:
    """Contexts of one length, with as many questions each."""

    tokens: Tensor
    questions: Tensor
    answers: Tensor

    @classmethod
    def stack(cls, contexts: list[Context]) -> Batch:
        """The contexts one above the other."""
        return cls(
            torch.from_numpy(np.stack([context.tokens for context in contexts])),
            torch.from_numpy(np.stack([context.questions for context in contexts])),
            torch.from_numpy(np.stack([context.answers for context in contexts])),
        )


def new_model() -> LlamaForTokenClassification:
    """An untrained model of the demo's shape."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=131_072,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        bos_token_id=None,
        eos_token_id=None,
    )
    config.num_labels = VALUES
    model = LlamaForTokenClassification(config)  # type: ignore[no-untyped-call]
    model.train(False)  # in training it would drop a tenth of what is scored
    return model


def logits(model: LlamaForTokenClassification, table: Tensor, batch: Batch, forked: bool) -> Tensor:
    """The model's scores of the values for each question: [batch, questions, VALUES].

    `forked` questions see the context and themselves, each as if it stood alone behind the
    context; otherwise a question sees those before it as well.
    """
    (_, tokens), (_, questions) = batch.tokens.shape, batch.questions.shape
    context = DynamicCache()
    model.model(inputs_embeds=functional.embedding(batch.tokens, table), past_key_values=context)
    among = torch.ones(questions, questions).tril()
    after = torch.arange(questions)
    if forked:
        among, after = torch.eye(questions), torch.zeros_like(after)
    seen = torch.cat([torch.ones(questions, tokens), among], dim=1).bool()
    scores: Tensor = model(
        inputs_embeds=functional.embedding(batch.questions, table),
        past_key_values=context,
        position_ids=(tokens + after)[None],
        attention_mask=seen[None, None],
    ).logits
    return scores


def batches(stage_index: int, stage: Stage) -> Iterator[Batch]:
    """The stage's training batches; no two contexts of a run have the same seed."""
    seed = FIRST_TRAINING_SEED * (stage_index + 1)
    for step in range(stage.steps):
        seeds = range(seed + step * stage.batch, seed + (step + 1) * stage.batch)
        yield Batch.stack(
            [make_context(s, stage.tokens, stage.facts, stage.questions) for s in seeds]
        )


def train_stage(
    model: LlamaForTokenClassification,
    factors: Factors,
    optimizer: torch.optim.Optimizer,
    stage_index: int,
    stage: Stage,
) -> None:
    """Train in place until the stage ends, and print progress."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    average = 0.0
    started_s = time.monotonic()
    for step, batch in enumerate(batches(stage_index, stage)):
        for group in optimizer.param_groups:
            group["lr"] = stage.rate + (stage.rate_end - stage.rate) * step / stage.steps
        # The demo asks each question on a fork; every other step keeps chains of them right too.
        scores = logits(model, factors.table(), batch, forked=step % 2 == 0)
        loss = functional.cross_entropy(scores.flatten(0, 1), batch.answers.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        right = (scores.argmax(-1) == batch.answers).float().mean().item()
        average = AVERAGE_DECAY * average + (1 - AVERAGE_DECAY) * right
        done = average >= stage.accuracy or step == stage.steps - 1
        if done or step % (20 if stage.tokens >= 4096 else 100) == 0:
            print(
                f"{stage.tokens:6d} tokens, step {step:5d}, loss {loss.item():.4f}, "
                f"right {average:.3f}, {time.monotonic() - started_s:.0f} s",
                flush=True,
            )
        if done:
            return


def export(model: LlamaForTokenClassification, factors: Factors, path: Path) -> None:
    """Writes the model, rounded to bfloat16, as a plain Llama checkpoint to the folder."""
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(factors.table())
    rounded = new_model()
    rounded.load_state_dict(model.state_dict())
    rounded.bfloat16().save_pretrained(path)


@torch.no_grad()
def accuracy(model: LlamaForTokenClassification, tokens: int, seeds: range) -> float:
    """Share of right answers, 32 questions for each seed's context of 256 facts."""
    right = 0.0
    for seed in seeds:
        batch = Batch.stack([make_context(seed, tokens, FACT_KEYS, 32)])
        scores = logits(model, model.model.embed_tokens.weight, batch, forked=True)
        right += (scores.argmax(-1) == batch.answers).float().mean().item()
    return right / len(seeds)


def main() -> None:
    """Trains through all stages; the folder holds a usable checkpoint after each of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    path: Path = parser.parse_args().out
    # One thread: sums are then always added in the same order, so a run can be repeated.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = new_model()
    factors = Factors()
    model.model.embed_tokens.requires_grad_(False)
    learned = [p for p in model.parameters() if p.requires_grad] + list(factors.parameters())
    optimizer = torch.optim.AdamW(learned, lr=STAGES[0].rate, betas=(0.9, 0.95))
    for stage_index, stage in enumerate(STAGES):
        train_stage(model, factors, optimizer, stage_index, stage)
        export(model, factors, path)
    exported: LlamaForTokenClassification = LlamaForTokenClassification.from_pretrained(
        path, dtype=torch.float32
    )  # its rounded weights widened
    for tokens in (1024, 4096, 8192, 16384):
        print(f"{tokens:6d} tokens: {accuracy(exported, tokens, range(8)):.3f} right", flush=True)


if __name__ == "__main__":
    main()
