"""`cxlkv pool` makes, finds, watches, checks and removes pools."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.text import Text

from cxlkv._core import FORMAT_VERSION
from cxlkv.errors import BadArgumentError, BusyError
from cxlkv.layout import KVLayout, format_bytes, parse_bytes
from cxlkv.machine.hosts import Host
from cxlkv.machine.regions import is_striped, parse_place
from cxlkv.numbers import SECONDS_MAX
from cxlkv.ops.console import AsJson, LayoutText, columns, finite, pairs, print_json, step
from cxlkv.ops.gc import collect, find_garbage
from cxlkv.ops.info import ranges
from cxlkv.ops.models import layout_of_model, layout_of_text
from cxlkv.ops.top import as_dict, encoding_text, model_name, model_text, none_found, plain, run
from cxlkv.pool import Pool
from cxlkv.stats import Overview, find, inspect, pool_folders

WATCH_S = 5.0

pool_app = typer.Typer(help="Make, find, watch, check and remove pools.", no_args_is_help=True)

Folders = Annotated[
    list[str] | None,
    typer.Argument(help="Where to look: folders and what is below, or files.", show_default=False),
]
Capacity = Annotated[str | None, typer.Option(help="Size, e.g. 2GiB; all of a device: all.")]
Model = Annotated[
    str | None,
    typer.Option(help="Whose K and V: a folder, a config.json or a name, as of `cxlkv size`."),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        help="Keep keys and values in fewer bits: int8, int4, fp8_e4m3, progressive; or of each: "
        "int8,int4.",
        show_default="none",
    ),
]
PoolPath = Annotated[Path, typer.Argument(help="The pool's file, e.g. /dev/shm/pool.cxlkv.")]


@pool_app.command()
def create(
    path: PoolPath,
    capacity: Annotated[str, typer.Option(help="Size, e.g. 2GiB; all of a device: all.")],
    model: Model = None,
    layout: LayoutText = None,
    encoding: Encoding = None,
    sharing: Annotated[
        str, typer.Option(help="host; or between hosts: software, hw_coherent.")
    ] = "host",
    hosts: Annotated[int | None, typer.Option(help="How many hosts may share it.")] = None,
    huge: Annotated[
        str | None,
        typer.Option(help="Touch all memory now; huge pages: try, require (or fail), never."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Overwrite a file or device that holds no pool."),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Overwrite a pool that nobody uses, with all that it holds."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a pool for one model's KV cache, or for objects that are stored by their keys.

    `cxlkv size` says how large it must be. A pool that is there is never overwritten
    unless --replace says so.
    """
    check_named(path)
    made_for = layout_of(model, layout)
    if encoding is not None:
        made_for = made_for.encoded(encoding)
    with step(f"touching all of {capacity}") if huge else nullcontext():
        pool = Pool.create(
            path,
            layout=made_for,
            capacity=capacity,
            sharing=sharing,
            hosts=hosts,
            huge=huge,
            force=force,
            replace=replace,
        )
    with pool:
        found = pool.admin.overview()
    tell_made(found, 0 if capacity == "all" else parse_bytes(capacity), as_json)


def tell_made(found: Overview, asked_bytes: int, as_json: bool) -> None:
    """What a new pool has room for; one of objects is counted in pages."""
    of_tokens = {"model": model_name(found), "tokens": found.tokens} if found.tokens else {}
    if as_json:
        print_json(
            {"path": found.path, "bytes": found.bytes, "pages": found.pages_total, **of_tokens}
        )
        return
    room = f"{found.pages_total:,} pages"
    room = f"{found.tokens:,} tokens in {room}" if found.tokens else room
    room += f", {encoding}" if (encoding := encoding_text(found)) else ""
    size = format_bytes(found.bytes)
    if format_bytes(asked_bytes) != size and found.bytes < asked_bytes:
        size += f" of {format_bytes(asked_bytes)} (whole extents)"
    line = f"{plain(found.path)}: made, {size}, for {room}"
    Console(soft_wrap=True).print(Text(line))


def check_named(path: Path) -> None:
    """Raises BadArgumentError for memory that would end with this command."""
    if parse_place(path).path is None:
        node = "" if str(path) == "anonymous:" else f"{path}:"
        raise BadArgumentError(
            f"{path} is memory without a name, and ends with this command: name a file, as "
            f"{node}/dev/shm/my.pool"
        )


def layout_of(model: str | None, layout: str | None) -> KVLayout:
    """Layout of objects, of a model, or of a shape's numbers; None: not set."""
    if (model is None) == (layout is None):
        raise BadArgumentError(
            "whose K and V? For example: --model smollm2 --capacity 1GiB; or --layout, one of the "
            "two, for another shape, and for objects"
        )
    return layout_of_model(model) if model is not None else layout_of_text(str(layout))


@pool_app.command("inspect")
def inspect_pool(path: PoolPath, as_json: AsJson = False) -> None:
    """Say what a pool stores, where its parts lie, and how many pages are in which state.

    Of a shared pool also its hosts: which are there, silent, fenced or gone, and what they own.
    """
    with Pool.open(path) as pool:
        huge, looked_at = pool.admin.huge_looked_at()  # first: describe() tells of what was touched
        described, stats = pool.describe(), pool.stats()
        tokens = pool.admin.overview().tokens
        members = [] if described["sharing"] == "host" else [asdict(row) for row in watched(pool)]
    if described["page_kind"] == "thp" and 2 * huge < looked_at:
        described["page_kind"] = "4KiB"
    layout = cast("KVLayout", described.pop("layout"))
    geometry = cast("dict[str, int]", described.pop("geometry"))
    if as_json:
        stored = {**asdict(layout), "object_bytes": layout.object_bytes}
        stored["encoding"] = layout.encoding
        pages = {"huge_bytes": huge, "huge_looked_at_bytes": looked_at}
        of_pool = {**described, **pages, "tokens": tokens, "layout": stored, "members": members}
        print_json({**of_pool, "geometry": geometry, "stats": stats})
        return
    console = Console(soft_wrap=True)  # paths stay in one piece
    of: dict[str, object] = {
        "bytes": geometry["region_bytes"],
        "tokens": f"{tokens:,}",
        "page_tokens": layout.page_tokens,
    }
    groups = layout.groups
    if layout.object_bytes is not None:
        of = {"stores": "objects, one to a page", "object_bytes": layout.object_bytes}
        if layout.object_limit:
            of |= {"stores": "objects, in slots", "slot": layout.page_tokens}
        of = {"bytes": geometry["region_bytes"], **of}
        groups = ()
        del described["sketch"]
        geometry = {name: number for name, number in geometry.items() if number}  # what it has
    of |= {"shard": layout.shard, "model_id": layout.model_id}
    of["huge_pages"] = f"{format_bytes(huge)} of {format_bytes(looked_at)} looked at"
    told = [*pairs(str(path), {**described, **of})]
    for index, group in enumerate(groups):
        layers = [layer for layer, group_of in enumerate(layout.order) if group_of == index]
        shown = {**asdict(group), "layers": ranges(layers)}
        shown["rotary"] = group.rotary and group.rotary.summary
        told += pairs(f"layer group {index}", shown)
    told += pairs("where its parts lie", geometry)
    stats["other_processes"] = stats.pop("processes") - 1  # this one has it open, too
    used = {name: value for name, value in stats.items() if value or name == "pages_free"}
    told += pairs("pages now, and what was counted", used)
    told += host_lines(members)
    for line in told:
        console.print(Text(plain(line)))


@pool_app.command()
def check(
    path: PoolPath,
    deep: Annotated[bool, typer.Option(help="Read every page and verify its CRCs.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="First mend damaged pages that nobody holds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look for damage; exit code 1 if there is any that is left.

    Where hosts share the pool, each checks its own pages.
    """
    with Pool.open(path) as pool:
        stats = pool.stats()
        elsewhere = stats["pages_elsewhere"]
        pages = stats["pages_total"] - elsewhere
        with step(f"reading {pages:,} pages") if deep else nullcontext():
            report = pool.admin.check(deep=deep, repair=repair)
    if as_json:
        print_json({**report, "pages_elsewhere": elsewhere})
    else:
        console = Console(soft_wrap=True)
        for line in report["repairs"]:
            console.print(Text(f"repaired: {line}", style="green"))
        for problem in report["problems"]:
            console.print(Text(str(problem), style="red"))
        console.print(f"{len(report['problems'])} problems" if report["problems"] else "clean")
        if elsewhere:
            left_out = f"{elsewhere:,} pages of other hosts, or of none, were not looked at"
            console.print(f"{left_out}: CXLKV_HOST=N cxlkv pool check PATH, on each host")
    if not report["clean"]:
        raise typer.Exit(1)


def host_lines(members: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """A line for each host that uses a shared pool."""
    used = [dict(row) for row in members if row["state"] != "unused"]
    for row in used:
        row["silent_s"] = f"{'' if row.pop('seen') else '> '}{row['silent_s']}"
    if used:
        yield "hosts"
        yield from columns(tuple(used[0]), [tuple(map(str, row.values())) for row in used])


def watched(pool: Pool) -> list[Host]:
    """The hosts, as soon as each was seen to beat or has been silent for a lease; after WATCH_S at
    the latest."""
    until_s = time.monotonic() + WATCH_S
    while True:
        found = pool.admin.hosts()
        if time.monotonic() > until_s or all(row.state != "unseen" for row in found):
            return found
        time.sleep(0.02)


@pool_app.command()
def fence(
    path: PoolPath,
    dead: Annotated[int, typer.Argument(metavar="DEAD", help="The number of the dead host.")],
    confirmed_off: Annotated[
        bool,
        typer.Option(
            "--confirmed-off", help="Its machine certainly does not run: others may have its pages."
        ),
    ] = False,
) -> None:
    """Declare a silent host dead: its epoch ends, what it published stays.

    With --confirmed-off others may take all that it owned.
    """
    with Pool.open(path) as pool:
        pool.admin.fence(dead, confirmed_off=confirmed_off)
        after = pool.admin.hosts()[dead]
    Console().print(f"host {dead}: {after.state}, epoch {after.epoch}, {after.extents} extents")


@pool_app.command()
def remove(
    path: PoolPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a pool and all that is in it, or what is left of a damaged one."""
    found = removable(path)
    size = format_bytes(found.bytes)
    if not yes:
        told = "a damaged pool" if found.state == "damaged" else "the pool"
        typer.confirm(f"Remove {told} {plain(found.path)}, {size}, with all its data?", abort=True)
    Pool.remove(path)
    kept = os.path.lexists(found.path) or is_striped(found.path)
    after = "what it lay in keeps its size" if kept else f"{size} are free again"
    line = f"{plain(found.path)}: removed, {after}"
    Console(soft_wrap=True).print(Text(line))


def removable(path: Path) -> Overview:
    """The pool, before anybody is asked. Raises what Pool.remove() would: for a path where nothing
    is or something else, and for a pool in use."""
    place = parse_place(path).path
    if place is None:
        raise BadArgumentError(f"{path} is memory without a name, which ends with its process")
    found = inspect(place)
    if found.state == "live":
        pids = ", ".join(str(process.pid) for process in found.processes if process.alive)
        users = f" by {pids}" if pids else ""
        raise BusyError(f"{place} is in use{users}: stop these processes first, then remove it")
    return found


@pool_app.command()
def upgrade(
    path: Annotated[str, typer.Argument(help="The pool's file or device, or dax:A+B.")],
) -> None:
    """Make a pool of an older release one of this release's format, and keep all that it holds.

    Nobody may have it open meanwhile, on any host. May be run again after it was stopped.
    """
    before = Pool.upgrade(path)
    after = FORMAT_VERSION
    what = f"has format version {after}" if before == after else f"{before} is now {after}"
    Console(soft_wrap=True).print(Text(f"{path}: {what}"))


@pool_app.command("list")
def list_pools(places: Folders = None, as_json: AsJson = False) -> None:
    """Find pools and what failures left of some; nothing is opened or changed.

    Looks in /dev/shm and the hugetlbfs mounts unless told where.
    """
    found = find(places or pool_folders())
    if as_json:
        print_json({"pools": [as_dict(overview) for overview in found]})
        return
    console = Console(soft_wrap=True)  # a path stays in one piece
    for line in pool_lines(found):
        console.print(Text(line))
    if not found:
        console.print(Text(none_found(places or pool_folders())))


def share_text(part: int, whole: int) -> str:
    """In per cent: 0 % and 100 % are said of nothing and of all only."""
    if not whole:
        return ""
    if part and 100 * part < whole:
        return "<1 %"
    return f"{100 * part // whole} %"


def pool_lines(found: Sequence[Overview]) -> Iterator[str]:
    """A line for each pool, its path at the end."""
    rows = []
    for overview in found:
        pids = [str(process.pid) for process in overview.processes if process.alive]
        rows.append(
            (
                overview.state,
                plain(model_text(overview)),
                format_bytes(overview.bytes),
                f"{overview.tokens:,}" if overview.tokens else "",
                share_text(overview.pages_used, overview.pages_total),
                " ".join(pids),
                plain(overview.path),
            )
        )
    told = columns(("state", "model", "size", "tokens", "used", "processes", "path"), rows)
    if rows:
        yield next(told)
    for overview, line in zip(found, told, strict=False):
        yield line
        if overview.detail:
            yield f"    {plain(overview.detail)}"


@pool_app.command()
def gc(
    places: Folders = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    idle_s: Annotated[
        float | None,
        typer.Option(
            help="Also pools that nobody has used for so many seconds.", min=0, callback=finite
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove what is provably nobody's: half-made pools, and host states without a pool.

    Looks in /dev/shm and the hugetlbfs mounts unless told where. A pool in use is never removed,
    nor a file of another user. --json does not ask: without --yes it only lists.
    """
    console = Console(soft_wrap=True, quiet=as_json)
    found = find_garbage(places or pool_folders(), idle_s)
    for item in found:
        console.print(Text(f"{item.path}: {format_bytes(item.bytes)}, {item.why}"))
    if not found:
        console.print("Nothing is left over.")
    only_said = as_json and not yes
    if found and not yes and not as_json:
        typer.confirm(f"Clean up these {len(found)}?", abort=True)
    left = [item for item in found if only_said or not collect(item, idle_s)]
    for item in () if only_said else left:
        console.print(Text(f"{item.path}: gone, or in use again: left alone"))
    if as_json:
        rows = [{**asdict(item), "why": item.why, "collected": item not in left} for item in found]
        print_json({"found": rows})


@pool_app.command()
def top(
    places: Folders = None,
    interval_s: Annotated[
        float,
        typer.Option(help="Seconds between frames.", min=0.01, max=SECONDS_MAX, callback=finite),
    ] = 2,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch pools, their processes and what these do; q ends it. Nothing is opened or changed.

    Without a terminal it prints frame after frame; with --json one frame, as `cxlkv pool list`
    has it, with each process's command and bytes a second.
    """
    run(places or pool_folders(), interval_s, once, as_json, Console())
