"""`cxlkv pool` makes, finds, watches, checks and removes pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cxlkv._core import FORMAT_VERSION
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.machine.regions import parse_place
from cxlkv.ops.console import AsJson, HostNumber, print_json, table
from cxlkv.ops.gc import collect, find_garbage
from cxlkv.ops.info import ranges
from cxlkv.ops.top import plain, run
from cxlkv.pool import Pool
from cxlkv.stats import Overview, find, pool_folders

pool_app = typer.Typer(help="Make, find, watch, check and remove pools.", no_args_is_help=True)

Folders = Annotated[
    list[str] | None,
    typer.Argument(help="Where to look: folders and what is below, or files.", show_default=False),
]
PoolPath = Annotated[Path, typer.Argument(help="The pool's file, e.g. /dev/shm/pool.cxlkv.")]


@pool_app.command()
def create(
    path: PoolPath,
    capacity: Annotated[str, typer.Option(help="Size, e.g. 2GiB; all of a device: all.")],
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels of a head.")] = None,
    page_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a page: 16 if not given.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the stored keys and values: bf16 if not given.")
    ] = None,
    object_bytes: Annotated[
        str | None, typer.Option(help="Instead: a pool of objects up to this size, e.g. 2MiB.")
    ] = None,
    sharing: Annotated[
        str, typer.Option(help="host; or between hosts: software, hw_coherent.")
    ] = "host",
    hosts: Annotated[int | None, typer.Option(help="How many hosts may share it.")] = None,
    host: HostNumber = None,
    huge: Annotated[
        str | None,
        typer.Option(help="Touch all memory now; huge pages: try, require (or fail), never."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite what lies there, unless it is a pool.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Overwrite a pool that nobody uses, with all that it holds."
        ),
    ] = False,
) -> None:
    """Make a pool for one model's KV cache, or for objects that are stored by their keys."""
    if parse_place(path).path is None:
        node = "" if str(path) == "anonymous:" else f"{path}:"
        raise BadArgumentError(
            f"{path} is memory without a name, and ends with this command: name a file, as "
            f"{node}/dev/shm/my.pool"
        )
    shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    layout = layout_of(object_bytes, shape, {"page_tokens": page_tokens, "dtype": dtype})
    with Pool.create(
        path,
        layout=layout,
        capacity=capacity,
        sharing=sharing,
        hosts=hosts,
        host=host,
        huge=huge,
        force=force,
        replace=replace,
    ) as pool:
        Console().print(table(str(path), pool.stats()))


def layout_of(
    object_bytes: str | None, shape: Mapping[str, int | None], more: Mapping[str, int | str | None]
) -> KVLayout:
    """Of objects, or of K and V: then all of a shape is needed; what is None was not given."""
    given = {name: value for name, value in {**shape, **more}.items() if value is not None}
    missing = [f"--{name.replace('_', '-')}" for name in shape if name not in given]
    if object_bytes is None and missing:
        raise BadArgumentError(f"{', '.join(missing)} missing: or --object-bytes, for objects")
    if object_bytes is None:
        return KVLayout(**given)  # type: ignore[arg-type]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise BadArgumentError(f"{names}: of K and V; a pool of objects has --object-bytes alone")
    return KVLayout.objects(object_bytes)


@pool_app.command()
def inspect(path: PoolPath, host: HostNumber = None, as_json: AsJson = False) -> None:
    """Say what a pool stores, where its parts lie, and how many pages are in which state."""
    with Pool.open(path, host=host) as pool:
        described, stats = pool.describe(), pool.stats()
    layout = cast("KVLayout", described.pop("layout"))
    geometry = cast("dict[str, int]", described.pop("geometry"))
    if as_json:
        stored = {**asdict(layout), "object_bytes": layout.object_bytes}
        print_json({**described, "layout": stored, "geometry": geometry, "stats": stats})
        return
    console = Console()
    of: dict[str, object] = {"page_tokens": layout.page_tokens}
    groups = layout.groups
    if layout.object_bytes is not None:
        of = {"stores": "objects, one to a page", "object_bytes": layout.object_bytes}
        groups = ()
        del described["sketch"]
        geometry = {name: number for name, number in geometry.items() if number}  # what it has
    of |= {"shard": layout.shard, "model_id": layout.model_id}
    console.print(table(str(path), {**described, **of}))
    for index, group in enumerate(groups):
        layers = [layer for layer, group_of in enumerate(layout.order) if group_of == index]
        console.print(table(f"layer group {index}", {**asdict(group), "layers": ranges(layers)}))
    console.print(table("where its parts lie", geometry))
    console.print(table("pages now", stats))


@pool_app.command()
def check(
    path: PoolPath,
    deep: Annotated[bool, typer.Option(help="Read every page and verify its CRCs.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="First mend damaged pages that nobody holds.")
    ] = False,
    host: HostNumber = None,
    as_json: AsJson = False,
) -> None:
    """Look for damage; exit code 1 if there is any that is left."""
    with Pool.open(path, host=host) as pool:
        report = pool.admin.check(deep=deep, repair=repair)
    if as_json:
        print_json(report)
    else:
        console = Console(soft_wrap=True)
        for line in report["repairs"]:
            console.print(Text(f"repaired: {line}", style="green"))
        for problem in report["problems"]:
            console.print(Text(str(problem), style="red"))
        console.print(f"{len(report['problems'])} problems" if report["problems"] else "clean")
    if not report["clean"]:
        raise typer.Exit(1)


@pool_app.command("hosts")
def list_hosts(path: PoolPath, host: HostNumber = None, as_json: AsJson = False) -> None:
    """The hosts of a shared pool: which are there, silent, fenced or gone, and what they own."""
    with Pool.open(path, host=host) as pool:
        rows = [asdict(row) for row in pool.admin.hosts()]
    if as_json:
        print_json(rows)
        return
    made = Table(title=f"hosts of {path}")
    for name in rows[0]:
        made.add_column(name)
    for row in rows:
        if row["state"] != "unused":
            made.add_row(*(str(value) for value in row.values()))
    Console().print(made)


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
    host: HostNumber = None,
) -> None:
    """Declare a silent host dead: its epoch ends, what it published stays.

    With --confirmed-off others may take all that it owned.
    """
    with Pool.open(path, host=host) as pool:
        pool.admin.fence(dead, confirmed_off=confirmed_off)
        after = pool.admin.hosts()[dead]
    Console().print(f"host {dead}: {after.state}, epoch {after.epoch}, {after.extents} extents")


@pool_app.command()
def remove(
    path: PoolPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a pool and all that is in it."""
    if not yes:
        typer.confirm(f"Remove the pool {path} and all that is in it?", abort=True)
    Pool.remove(path)


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
        print_json({"pools": [asdict(overview) for overview in found]})
    else:
        Console().print(pool_table(found) if found else "No pools.")


def pool_table(found: Sequence[Overview]) -> Table:
    """A line for each pool; used pages are those that are not free."""
    result = Table("path", "state", "model", "size", "pages used", "processes")
    for overview in found:
        used = overview.pages_total - overview.pages.get("free", 0)
        pids = [str(process.pid) for process in overview.processes if process.alive]
        result.add_row(
            Text(plain(overview.path), overflow="fold"),
            Text(plain(f"{overview.state}: {overview.detail}".rstrip(": "))),
            Text(plain(overview.model_id)),
            format_bytes(overview.bytes),
            f"{used} of {overview.pages_total}" if overview.pages_total else "",
            " ".join(pids),
        )
    return result


@pool_app.command()
def gc(
    places: Folders = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    idle_s: Annotated[
        float | None,
        typer.Option(help="Also pools that nobody has used for so many seconds.", min=0),
    ] = None,
) -> None:
    """Remove what is provably nobody's: half-made pools, and host states without a pool.

    Looks in /dev/shm and the hugetlbfs mounts unless told where. A pool in use is never removed,
    nor a file of another user.
    """
    console = Console(soft_wrap=True)
    found = find_garbage(places or pool_folders(), idle_s)
    for item in found:
        console.print(Text(f"{item.path}: {format_bytes(item.bytes)}, {item.why}"))
    if not found:
        console.print("Nothing is left over.")
    if dry_run or not found:
        return
    if not yes:
        typer.confirm(f"Clean up these {len(found)}?", abort=True)
    for item in found:
        if not collect(item, idle_s):
            console.print(Text(f"{item.path}: gone, or in use again: left alone"))


@pool_app.command()
def top(
    places: Folders = None,
    interval_s: Annotated[float, typer.Option(help="Seconds between frames.", min=0.01)] = 2,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch pools, their processes and what these do; q ends it. Nothing is opened or changed."""
    run(places or pool_folders(), interval_s, once, Console())
