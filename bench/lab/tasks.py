"""Questions with one right answer of sixteen, after RULER (Hsieh et al., COLM 2024, section 3).

Each answer is one token, so that one set of logits ranks all candidates. What RULER calls single
and multi-key needles, variable tracking and common words are planted in plain text here, which is
filler; a context has several of them, spread over its length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from cxlkv.errors import BadArgumentError

CANDIDATES = 16
KINDS = ("one_key", "four_keys", "two_names", "variable", "common_word")
WORDS = """
apple bridge candle desert engine forest garden hammer island jacket kitchen ladder market needle
orange pencil quarter river silver table umbrella valley window yellow anchor basket castle
diamond eagle feather guitar harbor insect jungle kettle lemon mirror nature ocean palace queen
rabbit saddle temple uniform village wagon circle bottle button carpet copper cotton dragon finger
flower golden honey iron jewel knife lake metal morning mountain mouse novel oil paper piano
pillow planet pocket potato powder prince ring road rope salt school sheep shoulder silk sister
smoke snake soap spring square stone storm stream sugar summer sword theater thunder tiger tower
train tunnel turtle velvet violin wall water wheat wheel winter wolf wood wool
""".split()
CITIES = """Lisbon Vienna Dublin Oslo Madrid Warsaw Athens Prague Helsinki Brussels Budapest Rome
Paris London Berlin Geneva Boston Chicago Denver Seattle Toronto Cairo Delhi Tokyo""".split()


@dataclass(frozen=True)
class Item:
    """What is read behind the context, and the first tokens of what could come next."""

    kind: str
    question: str
    candidates: tuple[int, ...]
    right: int
    """Index in candidates."""


@dataclass(frozen=True)
class Context:
    text: str
    items: tuple[Item, ...]


def single_token_words(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Words that are one token behind a space, and that token."""
    found = {}
    for word in dict.fromkeys(WORDS):
        ids = tokenizer(" " + word, add_special_tokens=False)["input_ids"]
        if len(ids) == 1:
            found[word] = int(ids[0])
    if len(found) < 2 * CANDIDATES:
        raise BadArgumentError(f"the tokenizer has only {len(found)} of our words as one token")
    return found


def make_context(filler: Sequence[str], words: dict[str, int], seed: int) -> Context:
    """Sentences of `filler`, and between them what the items ask for."""
    rng = random.Random(seed)
    planted: list[str] = []
    asked: list[tuple[str, str, str, list[str]]] = []  # kind, question, answer, near misses
    for make in MAKERS:
        make(rng, sorted(words), planted, asked)
    places = sorted(rng.sample(range(1, len(filler)), len(planted)))
    rng.shuffle(planted)
    sentences = list(filler)
    for place, sentence in zip(reversed(places), planted, strict=True):
        sentences.insert(place, sentence)
    answers = [answer for _, _, answer, _ in asked]
    items = [item_of(rng, words, answers, *one) for one in asked]
    return Context(" ".join(sentences), tuple(items))


def item_of(
    rng: random.Random,
    words: dict[str, int],
    answers: Sequence[str],
    kind: str,
    question: str,
    answer: str,
    near: list[str],
) -> Item:
    """Near misses are candidates, then the answers of other items, then words that are drawn, to
    sixteen in all."""
    chosen = list(dict.fromkeys([answer, *near, *answers]))
    others = [word for word in sorted(words) if word not in chosen]
    chosen += rng.sample(others, CANDIDATES - len(chosen))
    rng.shuffle(chosen)
    return Item(kind, question, tuple(words[word] for word in chosen), chosen.index(answer))


Planted = list[str]
Asked = list[tuple[str, str, str, list[str]]]
Maker = Callable[[random.Random, list[str], Planted, Asked], None]


def one_key(rng: random.Random, words: list[str], planted: Planted, asked: Asked) -> None:
    """One fact of its kind in the context."""
    kind = ONE_KEYS[len([a for a in asked if a[0] == "one_key"]) % len(ONE_KEYS)]
    answer = rng.choice(words)
    planted.append(f"{kind} is {answer}.")
    asked.append(("one_key", f"\n\nRemember the text above. {kind} is", answer, []))


ONE_KEYS = (
    "The secret password of the old library",
    "The favourite word of the ship's captain",
    "The code word for the northern gate",
)


def four_keys(rng: random.Random, words: list[str], planted: Planted, asked: Asked) -> None:
    """Four facts that differ by a key; one is asked for, the others' answers are candidates."""
    cities, answers = rng.sample(CITIES, 4), rng.sample(words, 4)
    role = ROLES[len([a for a in asked if a[0] == "four_keys"]) % len(ROLES)]
    planted += [f"The {role} for {c} is {a}." for c, a in zip(cities, answers, strict=True)]
    question = f"\n\nRemember the text above. The {role} for {cities[0]} is"
    asked.append(("four_keys", question, answers[0], answers[1:]))


ROLES = ("special magic word", "radio call sign")


def two_names(rng: random.Random, words: list[str], planted: Planted, asked: Asked) -> None:
    """A value that stands behind both of its names; so does another one."""
    answer, other = rng.sample(words, 2)
    for first, second, word in (("red", "blue", answer), ("round", "square", other)):
        planted.append(
            f"The content of the {first} box is {word}. The content of the {second} box is the "
            f"content of the {first} box, so the {second} box has {word}."
        )
    question = "\n\nRemember the text above. The content of the blue box is"
    asked.append(("two_names", question, answer, [other]))


def variable(rng: random.Random, words: list[str], planted: Planted, asked: Asked) -> None:
    """A value that is to be followed from one name to another, in sentences far apart; so can be
    another one."""
    answer, other = rng.sample(words, 2)
    for first, second, word in (("A", "B", answer), ("X", "Y", other)):
        planted += [
            f"The value of variable {first} is {word}.",
            f"The value of variable {second} is the value of variable {first}.",
        ]
    question = "\n\nRemember the text above. The value of variable B is"
    asked.append(("variable", question, answer, [other]))


def common_word(rng: random.Random, words: list[str], planted: Planted, asked: Asked) -> None:
    """Lists of words in which one word appears three times as often as any other."""
    drawn = rng.sample(words, 8)
    for _ in range(3):
        some = [drawn[0]] * 3 + drawn[1:]
        rng.shuffle(some)
        planted.append("Words on the list: " + ", ".join(some) + ".")
    question = "\n\nRemember the lists above. The word that is on the list most often is"
    asked.append(("common_word", question, drawn[0], drawn[1:]))


MAKERS: tuple[Maker, ...] = (
    *(one_key, one_key, one_key, four_keys, four_keys),
    *(two_names, variable, common_word),
)
ITEMS = len(MAKERS)
