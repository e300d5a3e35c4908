"""`cxlkv bench vllm`: vLLM with and without us, time to the first token and decode speed."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from cxlkv.bench.cli import check_files, finish, say_load, show_doubts, table, wide_console
from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.vllm import running


def run_vllm(json_path: Path | None, csv_path: Path | None, quick: bool) -> SideBySide:
    """Raises SystemExit when an answer was wrong, or an engine failed."""
    check_files(json_path, csv_path)
    python = running.python_of_engines()
    console, result = wide_console(), SideBySide("vllm")
    size = running.QUICK if quick else running.Size()
    say_load(result, console)
    said, steps = len(result.notes), set[str]()
    with running.place_of_a_run() as place, console.status("vllm ...") as status:

        def say(text: str) -> None:
            status.update(f"{text} ...")
            step = text.partition(":")[0]
            if not console.is_terminal and step not in steps:  # where no status is shown
                steps.add(step)
                console.print(f"{step} ...", markup=False)

        say("making the model")
        running.run(result, running.programs_of(python, place, size), size, place, say)
    console.print(table(result))
    for version in sorted(set(result.versions.values())):
        console.print(version, soft_wrap=True, markup=False)
    for name, reason in result.missing.items():
        console.print(f"missing: {name}: {reason}", soft_wrap=True, markup=False)
    for note in result.notes[said:]:
        console.print(Text(note), soft_wrap=True)
    finish(result, console, json_path, csv_path)
    show_doubts(result, console)
    return result
