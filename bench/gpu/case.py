"""One case of the GPU suite: python -m cxlkv.bench.gpu.case CASE FOLDER [--seconds S] [--tiny].

Writes FOLDER/CASE.json after each part, so that a cut loses little. Exit status 77: what the case
measures is not there, and the last line says what.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cxlkv.bench.result import Result
from cxlkv.errors import UnsupportedError

NO_FIGURES = "no GPU: no figures"


class Progress:
    """What a case reports to, and asks for the time that is left."""

    def __init__(self, result: Result, path: Path, seconds: float, figures: bool):
        self.result, self._path, self._figures = result, path, figures
        self._end = time.monotonic() + seconds

    def save(self, part: str = "", figures: str = "") -> None:
        """Write what there is so far and say how far that is."""
        if not self._figures:  # what was timed on a CPU, or tiny, is no figure
            self.result.metrics.clear()
            self.result.ratios.clear()
        self.result.write(self._path)
        if part:
            print(f"{part}: {figures}" if figures and self._figures else part, flush=True)

    def left(self, part: str) -> bool:
        """Whether there is time for a part; noted when not."""
        if time.monotonic() < self._end:
            return True
        self.result.notes.append(f"out of time before: {part}")
        return False


Case = Callable[[Progress, torch.device, bool], None]


def _gather(progress: Progress, device: torch.device, tiny: bool) -> None:
    from cxlkv.bench.gpu import gather

    gather.run(progress, device, gather.TINY if tiny else gather.Size())


def _attend(progress: Progress, device: torch.device, tiny: bool) -> None:
    from cxlkv.bench.gpu import attend

    attend.run(progress, device, attend.TINY if tiny else attend.Size())


def _decode(progress: Progress, device: torch.device, tiny: bool) -> None:
    from cxlkv.bench.gpu import decode

    decode.run(progress, device, decode.TINY if tiny else decode.Size())


CASES: dict[str, Case] = {"gather": _gather, "attend": _attend, "decode": _decode}


def run(name: str, folder: Path, device: torch.device, seconds: float, tiny: bool) -> Result:
    """Run a case into folder/name.json. On a CPU it is tiny."""
    figures = device.type == "cuda" and not tiny
    result = Result(f"gpu {name}")
    if not figures:
        result.notes.append(NO_FIGURES if device.type != "cuda" else "tiny: no figures")
    progress = Progress(result, folder / f"{name}.json", seconds, figures)
    try:
        CASES[name](progress, device, tiny or device.type != "cuda")
    finally:
        progress.save()  # what was found before an error stays
    return result


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One case of the GPU suite.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tiny", action="store_true", help="to see that it is right: no figures")
    given = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = run(given.case, given.folder, device, given.seconds, given.tiny)
    except UnsupportedError as error:
        print(f"{type(error).__name__}: {error}")
        return 77
    for check, held in result.checks.items():
        if not held:
            print(f"does not hold: {check}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
