"""`cxlkv demo` shows the whole way once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cxlkv.bench.result import check_clock
from cxlkv.errors import BadArgumentError
from cxlkv.layout import encodings_of, parse_share
from cxlkv.machine.sizes import parse_tokens
from cxlkv.ops.console import JsonFile, needing

PICTURE = Path("cxlkv-demo.png")


def demo(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model of Hugging Face, with tokenizer.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file (UTF-8) for --model.")] = None,
    tokens: Annotated[str | None, typer.Option(help="So many tokens of --text: 4K.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="How pages are chosen for --text: exact,digest,two_stage."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Shares of the pages for --text, such as 2%,5%,10%.")
    ] = None,
    encoding: Annotated[
        str,
        typer.Option(help="SmolLM2's K and V are in int8, int4, fp8_e4m3, progressive; int8,int4."),
    ] = "none",
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="Only convert SmolLM2, once, and print its folder."),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Show the whole way once: a model answers questions from pages in a pool.

    SmolLM2-135M reads a document of 7,000 tokens and answers, beside full attention and beside
    random pages, in two minutes on two idle cores. With --model and --text: perplexity and
    agreement with full attention, for each --method at each --budget. Exit code 1 if a check does
    not hold. The result is drawn into cxlkv-demo.png, or beside the file of --json.
    """
    if prepare:
        return print_folder()
    of_text = {"--tokens": tokens, "--method": method, "--budget": budget}
    check_options(model, text, encoding, of_text)
    with needing("demo", "the demo"):
        from cxlkv.demo import smollm2
        from cxlkv.demo.answers.run import run as run_answers
        from cxlkv.demo.text.measure import METHODS, SHARES, Wanted
        from cxlkv.demo.text.run import run as run_text
    picture = json_file.with_suffix(".png") if json_file is not None else PICTURE
    if model is not None and text is not None:
        length = None if tokens is None else parse_tokens(tokens)
        methods = tuple(dict.fromkeys(map(str.strip, method.split(",")))) if method else METHODS
        rows = Wanted(methods, shares_of(budget) if budget else SHARES)
        passed = run_text(model, text, length, rows, json_file, picture)
    else:
        folder = smollm2.prepare(Console())
        passed = run_answers(folder, json_file, picture, encoding=encoding)
    if not passed:
        raise typer.Exit(1)


def print_folder() -> None:
    with needing("demo", "the demo"):
        from cxlkv.demo import smollm2
    print(smollm2.prepare())


def check_options(
    model: Path | None, text: Path | None, encoding: str, of_text: Mapping[str, object]
) -> None:
    """Raises BadArgumentError for options that do not go together, and as check_clock()."""
    check_clock("the demo")
    if (model is None) != (text is None):
        raise BadArgumentError("--model and --text go together")
    given = [name for name, value in of_text.items() if value]
    if model is None and given:
        raise BadArgumentError(f"{given[0]} goes with --model and --text")
    if encodings_of(encoding) != ("none", "none") and model is not None:
        raise BadArgumentError("--encoding goes with SmolLM2: without --model and --text")


def shares_of(text: str) -> tuple[float, ...]:
    """Parse "2%,5%" or "0.02,0.05"."""
    return tuple(
        sorted({parse_share(word, "a --budget, a share of the pages") for word in text.split(",")})
    )
