"""`cxlkv demo` shows the whole way once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cxlkv.errors import BadArgumentError
from cxlkv.ops.console import JsonFile, needing


def demo(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a causal model of Hugging Face, with tokenizer.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file (UTF-8) for --model.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Length of the context: 16384, or 4096 of --text.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="How pages are chosen: exact, digest, two_stage; not with --model."),
    ] = None,
    handover: Annotated[
        bool,
        typer.Option("--handover", help="One process reads, another one answers; no picture."),
    ] = False,
    json_file: JsonFile = None,
    picture: Annotated[Path, typer.Option(help="Draw the result into this file.")] = Path(
        "cxlkv-demo.png"
    ),
) -> None:
    """Show the whole way once, on the small model that is in the package, or on one of yours.

    Offline. The packaged model takes about a minute, with --tokens 65536 some minutes. With --model
    and --text: perplexity, and agreement with full attention, at each budget. With --handover: one
    process reads the context, another one answers from its pages. Exit code 1 if a check does not
    hold.
    """
    if (model is None) != (text is None) or (method is not None and model is not None):
        raise BadArgumentError("--model and --text go together, and without --method")
    if handover and (model is not None or method is not None):
        raise BadArgumentError("--handover goes with --tokens and --json only")
    with needing("demo", "the demo"):
        from cxlkv.demo import handover as handing_over
        from cxlkv.demo.measure import Plan
        from cxlkv.demo.run import run
        from cxlkv.demo.text.run import run as run_text
    if handover:
        passed = handing_over.run(json_file, tokens)
    elif model is None or text is None:
        passed = run(json_path=json_file, picture=picture, plan=Plan.of(tokens, method))
    else:
        passed = run_text(model, text, tokens, json_path=json_file, picture=picture)
    if not passed:
        raise typer.Exit(1)
