"""What the demo's model answers about a context, token by token, in a pool: in guests and outside.

Each answer chooses the next question, so that a wrong one changes all that follow.
"""

from __future__ import annotations

from pathlib import Path

from cxlkv import CXLPool, Sequence
from cxlkv.demo import task
from tests.qemu.guest.llama import Llama

MODEL = Path(task.__file__).parent / "model"
SEEDS = (101, 102)
TOKENS = 1021  # the last page is not full: a tail goes along
FACTS, STEPS = 128, 32


def prefilled(model: Llama, pool: CXLPool, seed: int) -> Sequence:
    sequence = pool.sequence()
    model.read(sequence, task.make_context(seed, TOKENS, FACTS, 0).tokens)
    return sequence


def answers(model: Llama, sequence: Sequence, seed: int) -> list[int]:
    """Greedily, STEPS of them."""
    questions = task.make_context(seed, TOKENS, FACTS, FACTS).questions
    found: list[int] = []
    at = 0
    for step in range(STEPS):
        found.append(int(model.read(sequence, questions[at : at + 1]).argmax()))
        at = (at + 1 + step + found[-1]) % len(questions)
    return found


def answers_alone(seed: int) -> list[int]:
    """What one process answers, without any other."""
    model = Llama(MODEL)
    with CXLPool.create("anonymous:", layout=model.layout, capacity="8MiB") as pool:
        return answers(model, prefilled(model, pool, seed), seed)
