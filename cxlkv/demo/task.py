"""The demo's task: facts scattered in a long filler text, then questions about them.

A fact is one token that stands for a (key, value) pair; a question is one token that names a
key; the answer is the value that the context's fact gives to this key. All else is filler. A
context holds a key at most once, so each question has exactly one right answer. Nothing but
finding the one token among thousands answers it, which is why the task shows whether a selection
of pages kept the pages that matter.

Token ids, in order:

    0     .. 8191   facts:     key * VALUES + value
    8192  .. 8447   questions: FACT_KEYS * VALUES + key
    8448  .. 8959   fillers

Questions are not part of the context. A reader asks each of them as one token right behind the
context (on a fork of its cache), or all of them one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cxlkv.arrays import Tokens

FACT_KEYS = 256
"""Keys that a fact may have, hence the most facts that a context can hold."""
VALUES = 32
"""Values that a fact may give to its key, hence the answers there are."""
FILLERS = 512
"""Tokens that mean nothing."""

FIRST_QUERY = FACT_KEYS * VALUES
FIRST_FILLER = FIRST_QUERY + FACT_KEYS
VOCABULARY_SIZE = FIRST_FILLER + FILLERS


@dataclass(frozen=True)
class Context:
    """A context and questions about it."""

    tokens: Tokens
    """The context's token ids, shape [tokens]."""
    questions: Tokens
    """Query token ids, shape [questions]."""
    answers: Tokens
    """The right value for each question, from 0 to VALUES - 1, shape [questions]."""


def make_context(seed: int, tokens: int, facts: int, questions: int) -> Context:
    """A context of `tokens` tokens with `facts` facts at random places, the same for a seed.

    Up to `facts` questions ask for distinct keys in random order; more than that start over
    with the same keys. ValueError where the sizes do not fit.
    """
    if not 1 <= facts <= FACT_KEYS:
        raise ValueError(f"{facts} facts: must be from 1 to {FACT_KEYS}, a key for each")
    if tokens < facts:
        raise ValueError(f"{facts} facts do not fit in {tokens} tokens")
    if questions < 0:
        raise ValueError(f"{questions} questions: must not be negative")
    random = np.random.default_rng(seed)
    keys = random.permutation(FACT_KEYS)[:facts]
    values = random.integers(VALUES, size=facts)
    context = random.integers(FIRST_FILLER, VOCABULARY_SIZE, size=tokens)
    context[random.choice(tokens, size=facts, replace=False)] = keys * VALUES + values
    # A second shuffle is not needed: the facts' places are random already, and in random order.
    asked = np.arange(questions) % facts
    return Context(context, FIRST_QUERY + keys[asked], values[asked])
