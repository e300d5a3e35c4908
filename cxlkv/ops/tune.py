"""`cxlkv tune` measures what this machine's choices are made from, and keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cxlkv.errors import BadArgumentError
from cxlkv.ops.console import JsonFile, needing, step


def tune(
    json_file: JsonFile = None,
    pool: Annotated[
        Path | None, typer.Option(help="A pool: what far memory costs is measured in it.")
    ] = None,
    cold: Annotated[
        Path | None, typer.Option(help="Where a cold file is or will be: its disk is measured.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Only by what way pages get into the GPU faster.")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(help="Only this machine's memory, as a profile of this name for emulation."),
    ] = None,
) -> None:
    """Measure on this machine what reading, writing, scoring and attending cost, for method "auto"
    and `cxlkv advise`. What was measured of the GPU, or of all else, is kept; what is emulated
    (CXLKV_EMULATE) is shown only."""
    from cxlkv.bench import cli
    from cxlkv.bench.calibrate import rates
    from cxlkv.bench.result import Result, check_clock
    from cxlkv.ndp.tuning import Tuning, default_path, read, this_machine, write

    if profile is not None:
        if pool or cold or gpu:
            raise BadArgumentError("--profile goes without --pool, --cold and --gpu")
        tune_profile(profile, json_file)
        return
    check_clock("tune")
    console = cli.wide_console()
    result, path = Result("tune"), default_path()
    result.notes += filter(None, [cli.load_warning()])
    if gpu:
        if pool or cold:
            raise BadArgumentError("--gpu goes without --pool and --cold")
        with needing("gpu", "tune --gpu"):
            from cxlkv.bench.calibrate import copies
        with step("measuring the GPU; a minute"):
            constants = copies.run(result)
        found = replace(read(path), machine=this_machine(), gpu=constants)
    else:
        with step("measuring; half a minute"):
            costs = rates.run(result, rates.LAYOUT, pool=pool, cold=cold)
            result.checks["measured"] = True
            found = Tuning(this_machine(), costs, read(path).gpu)
    cli.show(result, console, json_file)  # ends it where a check failed: nothing is written then
    if result.emulated:
        console.print(f"not kept: emulated ({result.emulated}); {path} has the machine's")
        return
    write(found, path)
    console.print(f"written: {path}", soft_wrap=True)


def tune_profile(name: str, json_file: Path | None) -> None:
    """`cxlkv tune --profile`: into the user's own profiles, for CXLKV_EMULATE and emulate()."""
    from cxlkv.bench import cli
    from cxlkv.bench.calibrate import profile
    from cxlkv.bench.result import Result
    from cxlkv.emulation import profiles

    console, result = cli.wide_console(), Result("tune", over_links=False)
    profiles.check_new(profiles.own_path(), name)
    result.notes += filter(None, [cli.load_warning()])
    with step("measuring; half a minute"):
        found = profile.run(result)
    cli.show(result, console, json_file)  # ends it where a check failed: nothing is written then
    profiles.write(profiles.own_path(), name, found)
    console.print(f"written: {name} in {profiles.own_path()}", soft_wrap=True)
