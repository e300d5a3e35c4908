"""vLLM with and without us: time to the first token and decode speed, of a small random model or a
trained one (--model)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.vllm import running


def command(options: Options, say: Say) -> Shown:
    """Raises UnsupportedError where there is no environment with vLLM, or not the model."""
    python = running.python_of_engines()
    if options.model is not None:
        from cxlkv.bench.vllm import trained  # it needs torch

        return trained.command_of_budgets(options, say, python)
    result, size = SideBySide("vllm"), running.QUICK if options.quick else running.Size()
    with TemporaryDirectory(dir=running.SHARED, prefix="cxlkv-bench-vllm-") as made:
        say("making the model")
        place = Path(made)
        running.run(result, running.programs_of(python, place, size), size, place, say)
    return Shown(result, lines=result.who())
