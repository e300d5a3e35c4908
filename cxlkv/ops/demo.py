"""`cxlkv demo` shows the whole way once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cxlkv.bench.result import check_clock
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import encodings_of, parse_share
from cxlkv.ops.console import JsonFile, needing
from cxlkv.sizes import parse_tokens


def demo(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model of Hugging Face, with tokenizer.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file (UTF-8) for --model.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Length of the context: 16K of --tiny, or 4K of --text."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="How pages are chosen: exact, digest, two_stage; of --text, several with commas."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Shares of the pages for --text, such as 2%,5%,10%.")
    ] = None,
    dense_layers: Annotated[
        int, typer.Option(help="Of --text: so many layers, the first ones, attend to all pages.")
    ] = 0,
    encoding: Annotated[
        str,
        typer.Option(help="SmolLM2's K and V are in int8, int4, fp8_e4m3, progressive; int8,int4."),
    ] = "none",
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="The small model that is in the package, offline."),
    ] = False,
    handover: Annotated[
        bool,
        typer.Option("--handover", help="One process reads, another one answers; no picture."),
    ] = False,
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="Only convert SmolLM2, once, and print its folder."),
    ] = False,
    json_file: JsonFile = None,
    picture: Annotated[Path, typer.Option(help="Draw the result into this file.")] = Path(
        "cxlkv-demo.png"
    ),
) -> None:
    """Show the whole way once: a model answers questions from pages in a pool.

    SmolLM2-135M reads a document of 7,000 tokens and answers, beside full attention and beside
    random pages, in two minutes on two idle cores. Where it is not installed, and with --tiny or
    --tokens, the small model in the package answers. With --model and --text: perplexity and
    agreement with full attention, for each --method at each --budget. With --handover: one process
    reads the context, another one answers from its pages. Exit code 1 if a check does not hold.
    """
    if prepare:
        return print_folder()
    check_options(model, text, method, budget, dense_layers, tiny, handover)
    check_encoding(encoding, model, tokens, method, tiny, handover)
    with needing("demo", "the demo"):
        from cxlkv.demo import handover as handing_over
        from cxlkv.demo.text.measure import METHODS, SHARES, Wanted
        from cxlkv.demo.text.run import run as run_text
    length = None if tokens is None else parse_tokens(tokens)
    if handover:
        passed = handing_over.run(json_file, length)
    elif model is not None and text is not None:
        methods = tuple(dict.fromkeys(map(str.strip, method.split(",")))) if method else METHODS
        rows = Wanted(methods, shares_of(budget) if budget else SHARES, dense_layers)
        passed = run_text(model, text, length, rows, json_file, picture)
    else:
        folder = None if tiny or tokens or method else model_if_there(encoding)
        passed = run_questions(folder, length, method, encoding, json_file, picture)
    if not passed:
        raise typer.Exit(1)


def run_questions(
    folder: Path | None,
    tokens: int | None,
    method: str | None,
    encoding: str,
    json_file: Path | None,
    picture: Path,
) -> bool:
    """Of SmolLM2 in its folder, or of the small model."""
    from cxlkv.demo.answers.run import run as run_answers
    from cxlkv.demo.measure import Plan
    from cxlkv.demo.run import run

    if folder is None:
        return run(json_path=json_file, picture=picture, plan=Plan.of(tokens, method))
    return run_answers(folder, json_file, picture, encoding=encoding)


def print_folder() -> None:
    with needing("demo", "the demo"):
        from cxlkv.demo import smollm2
    print(smollm2.prepare())


def check_options(
    model: Path | None,
    text: Path | None,
    method: str | None,
    budget: str | None,
    dense_layers: int,
    tiny: bool,
    handover: bool,
) -> None:
    """Raises BadArgumentError for options that do not go together, and as check_clock()."""
    check_clock("the demo")
    if dense_layers and model is None:
        raise BadArgumentError("--dense-layers goes with --model and --text")
    if (model is None) != (text is None) or (budget is not None and model is None):
        raise BadArgumentError("--model and --text go together, and --budget with them")
    if handover and (model is not None or method is not None):
        raise BadArgumentError("--handover goes with --tokens and --json only")
    if tiny and (model is not None or handover):
        raise BadArgumentError("--tiny goes without --model and --handover")


def check_encoding(encoding: str, *others: object) -> None:
    """Raises BadArgumentError where it is none, or the demo is another than SmolLM2's."""
    if encodings_of(encoding) != ("none", "none") and any(others):
        raise BadArgumentError(
            "--encoding goes with the demo of SmolLM2: --json and --picture only"
        )


def model_if_there(encoding: str) -> Path | None:
    """The folder of SmolLM2; None where it is not installed, which is said."""
    from cxlkv.demo.smollm2 import prepare

    try:
        return prepare(Console())
    except UnsupportedError as missing:
        if encoding != "none":
            raise
        print(f"{missing}\nThe small model in the package answers instead.")
        return None


def shares_of(text: str) -> tuple[float, ...]:
    """Of "2%,5%" or "0.02,0.05"."""
    return tuple(
        sorted({parse_share(word, "a --budget, a share of the pages") for word in text.split(",")})
    )
