"""The picture of the demo's answers: which pages each question chose, and what each form cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from cxlkv.bench.style import BLUE, GREY, INK, ORANGE, canvas, plain
from cxlkv.demo.answers.ask import Asked

BINS = 110  # columns of the strips
WORDS = {"full": "all pages", "selected": "chosen pages", "random": "random pages"}
LOOKS = {"full": GREY, "selected": BLUE, "random": ORANGE}


def draw(path: Path, title: str, asked: Sequence[Asked], tokens: int, page_tokens: int) -> None:
    """Write the picture; its format is that of the path's suffix."""
    figure, panels = canvas(
        10.5, 3.2 + 0.34 * len(asked), 2, heights=(0.34 * len(asked) + 0.6, 2.2)
    )
    figure.suptitle(title, color=INK, fontsize=13)
    draw_strips(panels[0], asked, tokens, page_tokens)
    draw_costs(panels[1], asked)
    figure.savefig(path, dpi=150)


def draw_strips(axes: Axes, asked: Sequence[Asked], tokens: int, page_tokens: int) -> None:
    """A row a question: which parts of the document it read more often than the others did, and
    where the answer is. What all of them read, such as the newest pages, says nothing of one."""
    pages = -(-tokens // page_tokens)
    edges = np.linspace(0, pages, BINS + 1).round().astype(int)
    rows = []
    for one in asked:
        counts = np.pad(one.chosen, (0, max(0, pages - len(one.chosen))))[:pages]
        sums = np.add.reduceat(counts.astype(float), edges[:-1])
        rows.append(sums / max(sums.sum(), 1.0))
    more = np.clip(rows - np.mean(rows, axis=0), 0, None)
    shades = more / np.maximum(more.max(axis=1, keepdims=True), 1e-9)
    axes.imshow(shades, aspect="auto", cmap="Blues", extent=(0, tokens, len(asked), 0), vmin=0)
    for at, one in enumerate(asked):
        axes.plot(one.question.at, at + 0.5, "v", color=ORANGE, markersize=7, clip_on=False)
    labels = [f"{one.question.question}  {mark(one, 'selected')}" for one in asked]
    axes.set_yticks(np.arange(len(asked)) + 0.5, labels, fontsize=8.5)
    plain(axes, "token; dark: read more than for the other questions; triangle: the answer")
    axes.grid(visible=False)


def mark(asked: Asked, form: str) -> str:
    return "right" if asked.question.is_right(asked.answers[form].text) else "wrong"


def draw_costs(axes: Axes, asked: Sequence[Asked]) -> None:
    """Bars of right answers, keys and values read a token, and tokens a second, by form."""
    figures = {form: figures_of(asked, form) for form in LOOKS}
    names = ("right answers", "MB of keys and values read a token", "tokens a second")
    for group in range(len(names)):
        most = max(figures[form][group] for form in LOOKS) or 1.0
        for at, form in enumerate(LOOKS):
            value = figures[form][group]
            left = group * 4 + at
            axes.bar(
                left, value / most, 0.86, color=LOOKS[form], label=WORDS[form] if not group else ""
            )
            axes.text(left, value / most + 0.03, f"{value:.3g}", ha="center", color=INK, fontsize=9)
    axes.set_xticks([1, 5, 9], names)
    axes.set_yticks([])
    axes.set_ylim(0, 1.25)
    plain(axes)
    axes.grid(visible=False)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.25))


def figures_of(asked: Sequence[Asked], form: str) -> tuple[float, float, float]:
    """Right answers, MB read a token, tokens a second."""
    answers = [one.answers[form] for one in asked]
    steps = sum(answer.steps for answer in answers)
    read = sum(answer.bytes_scored + answer.bytes_read for answer in answers)
    right = sum(one.question.is_right(one.answers[form].text) for one in asked)
    return right, read / steps / 1e6, steps / sum(answer.seconds for answer in answers)
