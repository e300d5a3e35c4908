"""What `cxlkv lab encodings` found: a row for each encoding, as a result, a table and a picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from cxlkv.bench.lab.encodings import CodesPlan, Encoding
from cxlkv.bench.lab.run import load_arrays, path_of
from cxlkv.bench.lab.statistics import bootstrap
from cxlkv.bench.lab.units import Arrays
from cxlkv.bench.result import Result
from cxlkv.bench.style import BLUE, GREEN, GREY, INK, ORANGE, canvas, plain
from cxlkv.demo.text import inputs
from cxlkv.errors import BadArgumentError

Samples = npt.NDArray[np.float64]
FAMILIES = {"int": BLUE, "K int8": BLUE, "fp8": ORANGE, "kivi": GREEN, "progressive": INK}
DIVERGENCE_LEAST = 1e-6
"""What is below, in a picture, is drawn there."""


@dataclass(frozen=True)
class Row:
    """One encoding. Samples are texts, each the mean of its steps: loss, as a share over full
    attention's; divergence in nats a token; agreed, the share of steps. bits: of a channel, as it
    is stored. read: bits of an element in sight, without scales, and the squared error of outputs,
    [2] samples; NaN where all bits are read."""

    encoding: Encoding
    bits: float
    loss: Samples
    divergence: Samples
    agreed: Samples
    read: tuple[Samples, Samples]

    @property
    def is_read_in_part(self) -> bool:
        return bool(np.isfinite(self.read[0]).all())

    @property
    def bits_read(self) -> float:
        """Bits read a channel, mean of keys and values, with scales."""
        if not self.is_read_in_part:
            return self.bits
        return self.bits - 8 + float(np.mean(self.read[0]))

    @property
    def error(self) -> Samples:
        """Root mean square error of outputs, relative to the values' length."""
        return np.asarray(np.sqrt(self.read[1]), np.float64)


@dataclass(frozen=True)
class Findings:
    """Results of the texts read so far. full: full attention's loss, nats a token."""

    plan: CodesPlan
    texts: Sequence[str]
    full: Samples
    rows: Sequence[Row]
    notes: Sequence[str]


def find(folder: Path, plan: CodesPlan, model: Path) -> Findings:
    """Read what was found in the folder's texts so far. Raises BadArgumentError if it has none."""
    config = inputs.read_config(model).get_text_config(decoder=True)
    layers = int(config.num_hidden_layers)
    dim = int(getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads)
    texts = [name for name in plan.texts if path_of(folder, name).exists()]
    if not texts:
        raise BadArgumentError(f"{folder} holds no text that has been read")
    units = [load_arrays(path_of(folder, name)) for name in texts]
    full = np.array([unit["full"].mean() for unit in units], np.float64)
    rows = [
        Row(
            encoding,
            encoding.bits(dim, layers),
            np.array([unit["losses"][at].mean() for unit in units], np.float64) / full - 1,
            np.array([unit["divergences"][at].mean() for unit in units], np.float64),
            np.array([unit["agreed"][at].mean() for unit in units], np.float64),
            reads_of(units, at),
        )
        for at, encoding in enumerate(plan.encodings)
    ]
    commits = ", ".join(sorted({str(unit["commit"]) for unit in units}))
    notes = [
        f"model: {model.name} in float32, head_dim {dim}, {layers} layers",
        f"{len(texts)} of {len(plan.texts)} texts: {', '.join(texts)}",
        f"{plan.steps} tokens of each behind {plan.prefix}",
        f"measured at commit {commits}",
    ]
    return Findings(plan, texts, full, rows, notes)


def reads_of(units: Sequence[Arrays], at: int) -> tuple[Samples, Samples]:
    bits, errors = np.array([unit["reads"][at] for unit in units], np.float64).T
    return bits, errors


def table_of(found: Findings) -> Table:
    table = Table(
        title=f"{len(found.texts)} texts, {found.plan.steps} tokens each behind "
        f"{found.plan.prefix}",
        caption="KL: nats a token, mean of the texts, and the worst; loss: over full attention's,\n"
        "mean, and what it is below with 95 % confidence; read: bits of an element in sight,\n"
        "without scales; off: an output's error, root mean square, over the values' length",
    )
    names = ("encoding", "bits", "KL", "worst", "loss", "below", "agrees", "read", "off")
    for name in names if any(row.is_read_in_part for row in found.rows) else names[:-2]:
        table.add_column(name, justify="left" if name == "encoding" else "right", no_wrap=True)
    for row in found.rows:
        loss = bootstrap(row.loss)
        read = (f"{row.read[0].mean():.2f}", f"{row.error.mean():.4f}")
        table.add_row(
            row.encoding.name,
            f"{row.bits:.2f}",
            f"{row.divergence.mean():.1e}",
            f"{row.divergence.max():.1e}",
            f"{100 * loss.mean:+.2f} %",
            loss.below(2),
            f"{100 * row.agreed.mean():.1f} %",
            *(read if row.is_read_in_part else ()),
        )
    return table


def result_of(found: Findings) -> Result:
    """The result file: samples are texts, in the order that a note has."""
    result = Result("lab-encodings")
    result.notes += found.notes
    result.measure("loss_full", list(found.full), "nats a token")
    for row in found.rows:
        name = re.sub(r"[^\w.]+", "_", row.encoding.name.replace(",", "")).strip("_")
        result.measure(f"bits_{name}", [row.bits], "bits a channel")
        result.measure(f"loss_{name}", list(row.loss), "share over full attention's")
        if len(row.loss) > 1:
            above = bootstrap(row.loss).high
            result.measure(f"loss_below_{name}", [above], "share, 95 % confidence")
        result.measure(f"divergence_{name}", list(row.divergence), "nats a token")
        result.measure(f"agreement_{name}", list(row.agreed), "share of tokens")
        if row.is_read_in_part:
            result.measure(f"read_{name}", list(row.read[0]), "bits of an element in sight")
            result.measure(f"error_{name}", list(row.error), "of the values' length")
    return result


def draw(path: Path, found: Findings) -> None:
    """Bits that are read against divergence, and against the loss with its bounds, of encodings of
    keys and values alike, in all layers, and of whole queries."""
    figure, panels = canvas(10, 4.4, 1, 2)
    hidden = ("only", "query", "dense", "by 32", "head")
    shown = [row for row in found.rows if not any(word in row.encoding.name for word in hidden)]
    shown.sort(key=lambda row: (row.bits_read, row.divergence.mean()))
    for at, row in enumerate(shown):
        color = next((c for n, c in FAMILIES.items() if row.encoding.name.startswith(n)), GREY)
        loss, divergence = bootstrap(row.loss), max(row.divergence.mean(), DIVERGENCE_LEAST)
        panels[0].plot(row.bits_read, divergence, "o", color=color, markersize=4)
        bounds = (loss.low, loss.high) if len(row.loss) > 1 else (loss.mean, loss.mean)
        below, above = (100 * abs(loss.mean - bound) for bound in bounds)
        panels[1].errorbar(
            row.bits_read, 100 * loss.mean, [[below], [above]], fmt="o", color=color, markersize=4,
            linewidth=0.8,
        )  # fmt: skip
        for axes, height in ((panels[0], divergence), (panels[1], 100 * loss.mean)):
            axes.annotate(
                row.encoding.name, (row.bits_read, height), (-5 if at % 2 else 5, -2), fontsize=6,
                textcoords="offset points", color=color, ha="right" if at % 2 else "left",
            )  # fmt: skip
    for axes, title in zip(
        panels, ("KL, nats a token", "loss over full attention's, %"), strict=True
    ):
        plain(axes, "bits read of a channel, scales included", title=title)
        axes.set_xlim(0.5, 18)
    panels[0].set_yscale("log")
    panels[1].set_yscale("symlog", linthresh=0.1)
    figure.savefig(path, dpi=130)
