"""`cxlkv doctor` tries, before the first start, what a server will do, and names what mends it.

`cxlkv info` describes a machine; here a pool is really made. docs/how-to/doctor.md has the checks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cxlkv.errors import CXLKVError
from cxlkv.layout import parse_bytes
from cxlkv.ops import doctor_engine, doctor_machine
from cxlkv.ops.console import AsJson, print_json, step
from cxlkv.ops.doctor_findings import STATES, Ask, Finding, of_error
from cxlkv.ops.doctor_trial import trial
from cxlkv.ops.top import plain

# By the name of what is found when a check itself fails.
CHECKS: tuple[tuple[str, Callable[[Ask], Iterator[Finding]]], ...] = (
    ("engine", doctor_engine.engine),
    ("compiler", doctor_engine.compiler),
    ("plugin", doctor_engine.plugin),
    ("engine memory", doctor_engine.memory),
    ("place", doctor_machine.place),
    ("dax", doctor_machine.dax),
    ("room", doctor_machine.room),
    ("pool", trial),
    ("locked memory", doctor_machine.locked),
    ("numa", doctor_machine.numa),
    ("link", doctor_machine.links),
    ("port", doctor_engine.ports),
    ("left-overs", doctor_machine.left_overs),
)
COLOURS = {"error": "red", "warning": "yellow"}


def doctor(
    engine: Annotated[
        str | None,
        typer.Argument(help=f"What will use the pool: {', '.join(doctor_engine.ENGINES)}."),
    ] = None,
    where: Annotated[
        str, typer.Option(help="The pool's place, as in the engine's settings.")
    ] = "/dev/shm/",
    capacity: Annotated[
        str | None, typer.Option(help="Its size, such as 8GiB; the engines' share if not given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try what a server will do with a pool here, and say what is wrong and what mends it.

    The engine is imported, in a process of its own, and a small pool is made, filled, measured and
    removed; nothing else is changed. Exit code 0 if there are warnings at most, 1 if something is
    wrong, 2 for a wrong option.
    """
    if engine is not None and engine not in doctor_engine.ENGINES:
        raise typer.BadParameter(f"{engine!r} is none of {', '.join(doctor_engine.ENGINES)}")
    try:
        size = None if capacity is None else parse_bytes(capacity)
    except CXLKVError as error:
        raise typer.BadParameter(str(error), param_hint="--capacity") from error
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
    try:
        with step(f"{f'importing {engine}, ' if engine else ''}trying a pool of up to 64 MiB"):
            found = examine(Ask(engine, where, size))
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print_json({"findings": [asdict(each) for each in found]})
    else:
        console = Console(soft_wrap=True)  # a command must stay in one piece to be copied
        for line in lines(found):
            console.print(line)
    raise typer.Exit(any(each.state == "error" for each in found))


def examine(ask: Ask) -> list[Finding]:
    """What all checks find, errors first."""
    found: list[Finding] = []
    for name, check in CHECKS:
        try:
            for each in check(ask):
                found.append(each)
        except (CXLKVError, OSError) as error:
            found.append(of_error(name, error, "a server fails in the same way"))
    return sorted(found, key=lambda each: STATES.index(each.state))


def lines(found: list[Finding]) -> Iterator[Text]:
    for each in found:
        line = f"{each.state:9}{each.name:14} {plain(each.seen)}"
        yield Text(line, style=COLOURS.get(each.state, ""))
        if each.why:
            yield Text(f"{'':9}why: {plain(each.why)}")
        if each.command:
            yield Text(f"{'':9}do:  {plain(each.command)}")
