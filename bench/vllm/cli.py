"""`cxlkv bench vllm`: vLLM with and without us, time to the first token and decode speed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.vllm import running


def command(options: Options, say: Say) -> Shown:
    """Raises UnsupportedError where there is no environment with vLLM."""
    python = running.python_of_engines()
    result, size = SideBySide("vllm"), running.QUICK if options.quick else running.Size()
    with TemporaryDirectory(dir=running.SHARED, prefix="cxlkv-bench-vllm-") as made:
        place = Path(made)
        say("making the model")
        running.run(result, running.programs_of(python, place, size), size, place, say)
    return Shown(result, lines=result.who())
