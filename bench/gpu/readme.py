"""Fills README.md's part on the GPU from result files: python -m cxlkv.bench.gpu.readme [--check].

The results are folders that bench/gpu/suite.py wrote, one for each machine, under bench/results. No
figure is typed by hand: what stands between the two markers is made of the files alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from cxlkv.errors import BadArgumentError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "bench/results"
BEGIN, END = "<!-- gpu figures: begin -->", "<!-- gpu figures: end -->"
NONE = (
    "No figures of a GPU have been measured yet: "
    "`python3 bench/gpu/suite.py FOLDER` measures them where there is one."
)
ROWS = {
    "gather": {
        "gather_4k_to_h2d": "gather, 4 KiB pieces (16 tokens of a head), of the link's bandwidth",
        "gather_64k_to_h2d": "gather, 64 KiB pieces (16 tokens of a layer), of the same",
        "kernel_below_break_even_to_dma": "kernel copy below 28 KB a piece, the least, to the "
        "faster of cudaMemcpyBatchAsync and a loop of cudaMemcpyAsync",
        "dispatcher_to_better": "dispatcher to the better of kernel and DMA, the least",
    },
    "attend": {
        "attend_to_hbm": "sparse decode attention, of the memory's bandwidth, the least of all "
        "that read 256 MiB or more",
        "attend_10_32k_x1_to_sdpa": "attention to 10 % of 32K tokens, to torch's SDPA over all",
        "attend_10_128k_x1_to_sdpa": "the same of 128K tokens",
    },
    "decode": {
        "selected_32k_to_full": "decode step at 32K tokens, selected to full fetch",
        "selected_128k_to_full": "the same at 128K tokens",
    },
}
TIMES = {"gather": {"fragments_128": "128 fragments of 20 KB, until all of them are there"}}
ALTS = {
    "gather": "bandwidth of a gather, by the size of a piece",
    "attend": "time of decode attention, by context",
    "decode": "time of a decode step and its parts, by context",
}
"""What is shown of each case: ratios of speeds, then times; and what its picture is called."""

Found = Mapping[str, object]


def figures(root: Path) -> str:
    """The part between the markers: a table for each folder of results, or that there is none."""
    folders = sorted(path.parent for path in (root / RESULTS).glob("*/index.json"))
    tables = [table(root, folder) for folder in folders]
    return "\n\n".join(text for text in tables if text) or NONE


def table(root: Path, folder: Path) -> str:
    """One machine's; empty when nothing was measured there."""
    lines: list[str] = []
    pictures: list[str] = []
    for case, rows in ROWS.items():
        path = folder / f"{case}.json"
        found = read(path) if path.exists() else {}
        ratios, metrics = part(found, "ratios"), part(found, "metrics")
        lines += [f"| {what} | {number(ratios[n])} |" for n, what in rows.items() if n in ratios]
        for name, what in TIMES.get(case, {}).items():
            if name in metrics:
                metric = part(metrics, name)
                lines.append(f"| {what} | {number(metric['median'])} {metric['unit']} |")
        if metrics and (folder / f"{case}.png").exists():
            place = (folder / f"{case}.png").relative_to(root).as_posix()
            pictures.append(f"![{ALTS[case]}]({place})")
    if not lines:
        return ""
    index = read(folder / "index.json")
    seen = part(index, "environment")
    versions = f"torch {seen.get('torch')}, Triton {seen.get('triton')}"
    where = (folder / "summary.md").relative_to(root).as_posix()
    head = (
        f"{seen.get('gpu')}, {versions}, commit {str(index.get('commit'))[:12]} "
        f"([all of it]({where})); ratios are of speeds, medians of one run:"
    )
    return "\n\n".join([head, "\n".join(["| what | figure |", "|---|---|", *lines]), *pictures])


def read(path: Path) -> Found:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadArgumentError(f"{path} is no file of the GPU suite: {error}") from error
    if not isinstance(found, dict):
        raise BadArgumentError(f"{path} is no file of the GPU suite: not an object")
    return found


def part(found: Found, name: str) -> Found:
    value = found.get(name)
    return value if isinstance(value, dict) else {}


def number(value: object) -> str:
    if not isinstance(value, (int, float)):
        raise BadArgumentError(f"{value!r} is no figure")
    return f"{value:.3g}"


def filled(text: str, figures: str) -> str:
    """README's text with the part between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise BadArgumentError(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{before}{begin}\n{figures}\n{end}{after}"


def main(words: list[str], root: Path = ROOT) -> int:
    """Write README.md anew; with --check only say whether that would change it (status 1)."""
    if words not in ([], ["--check"]):
        raise SystemExit("usage: python -m cxlkv.bench.gpu.readme [--check]")
    readme = root / "README.md"
    text = readme.read_text()
    wanted = filled(text, figures(root))
    if words:
        print("README.md is up to date" if text == wanted else "README.md is not up to date")
        return int(text != wanted)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
