"""`cxlkv info` prints this machine as a tree, or as JSON, and where a pool should lie.

docs/reference/info.md explains the keys of the JSON and the exit codes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from cxlkv import _core
from cxlkv.emulation import link
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import format_bytes
from cxlkv.machine import numa_mode
from cxlkv.machine.devices import CxlRegion, DaxDevice, Devices, probe_devices
from cxlkv.machine.nodes import Access, NodeDetails, Numa, probe_nodes
from cxlkv.machine.suggestions import FOUND_BY, Place, lacking, suggest
from cxlkv.machine.sysfs import trouble
from cxlkv.machine.topology import (
    SHARED_MEMORY_HUGE,
    Advice,
    Machine,
    NumaNode,
    gives_huge_pages,
    missing,
    probe,
)
from cxlkv.ops.top import plain

# Of each, what is then not known; all else that cannot be read shows as "not known" in its place.
SOURCES = {
    "proc/meminfo": "how much memory there is",
    "proc/self/status": "which CPUs and nodes are allowed here",
    "sys/devices/system/node": "NUMA nodes",
    "sys/bus/cxl/devices": "CXL memory",
    "sys/bus/dax/devices": "dax devices",
    "sys/bus/pci/devices": "GPUs",
}
# Absent where the kernel has no such driver: then there is nothing to know, and nothing to say.
MAY_BE_ABSENT = {"sys/bus/cxl/devices", "sys/bus/dax/devices"}

WIDTH = 400  # of a tree's lines, which are not padded


@dataclass(frozen=True)
class Unknown:
    """What could not be found out."""

    path: str
    why: str  # "absent", "no permission" ...
    what: str


@dataclass(frozen=True)
class Survey:
    """All that `cxlkv info` says."""

    machine: Machine
    numa: Numa
    devices: Devices
    missing: tuple[Advice, ...]
    unknown: tuple[Unknown, ...]
    places: tuple[Place, ...]  # the best first
    kernels: str  # the instruction set that scoring uses in this process


def survey(root: Path = Path("/")) -> Survey:
    """Read all of the machine whose procfs and sysfs lie below `root`."""
    if not root.is_dir():
        raise BadArgumentError(f"{root} is not a folder: give one with a machine's proc and sys")
    machine, numa, devices = probe(root), probe_nodes(root), probe_devices(root)
    return Survey(
        machine=machine,
        numa=numa,
        devices=devices,
        missing=(*lacking(numa, devices), *missing(machine)),
        unknown=tuple(_unknown(root)),
        places=tuple(suggest(machine, numa, devices)),
        kernels=_core.isa(),
    )


def _unknown(root: Path) -> Iterator[Unknown]:
    for name, what in SOURCES.items():
        why = trouble(root / name)
        if why and not (why == "absent" and name in MAY_BE_ABSENT):
            yield Unknown(f"/{name}", why, what)


def emulated() -> str | None:
    """What this environment's pools lie behind, or on."""
    nodes = numa_mode.from_environment()
    try:
        return numa_mode.label(nodes) if nodes else link.labels()
    except UnsupportedError:  # no pool can be made then; the machine is told of all the same
        return f"{numa_mode.SCHEME}{','.join(map(str, nodes))}, which is not there"


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a tree.")] = False,
) -> None:
    """Say what this machine has for a pool, what is missing, and where a pool should lie.

    Exit code 0 however much of the machine is hidden: what could not be read is named.
    """
    found = survey()
    label = emulated()
    if as_json:
        typer.echo(json.dumps({**as_dict(found), "emulated": label}, indent=2))
        return
    Console(width=WIDTH).print(tree(found))  # its lines stay whole: paths are copied
    if label is not None:
        Console(soft_wrap=True).print(_line(f"Emulated ({numa_mode.VARIABLE}): {label}"))
    console = Console(soft_wrap=True)  # a command must stay in one piece to be copied
    for item in found.unknown:
        console.print(_line(f"Not known: {item.what} ({item.path}: {item.why})", "yellow"))
    for advice in found.missing:
        console.print(_line(f"Missing: {advice.what}", "yellow"))
        console.print(_line(f"  why:   {advice.why}\n  do:    {advice.command}"))
    for index, place in enumerate(found.places):
        console.print(_line("Place for a pool:" if index == 0 else "Or:", "bold"))
        console.print(_line("\n".join(_place_lines(place))))


def as_dict(found: Survey) -> dict[str, object]:
    """The JSON of a survey: what a machine has is one list each, of nodes, devices, places."""
    machine = asdict(found.machine)
    details = {each.node: asdict(each) for each in found.numa.nodes}
    nodes = [{**node, **details.get(node["node"], {})} for node in machine["nodes"]]
    settings = asdict(found.numa)
    del settings["nodes"]
    return {
        **machine,
        "nodes": nodes,
        "numa": settings,
        **asdict(found.devices),
        "kernels": found.kernels,
        "missing": [asdict(item) for item in found.missing],
        "unknown": [asdict(item) for item in found.unknown],
        "places": [{**asdict(place), "yaml": list(place.yaml)} for place in found.places],
    }


def tree(found: Survey) -> Tree:
    """The machine for a person."""
    machine = found.machine

    def none_at(path: str) -> list[str]:
        return ["not known"] if any(item.path == path for item in found.unknown) else ["none"]

    result = Tree(_line("This machine", "bold"))
    _add(result, "CPU", _cpu_lines(machine, found.kernels))
    _add(result, "memory", _memory_lines(machine))
    nodes = _add(result, "NUMA nodes", _numa_lines(found.numa))
    for node in machine.nodes:
        cpus = f"CPUs {ranges(node.cpus)}" if node.cpus else "no CPUs: memory only"
        free = f"{size(node.free_bytes)} free of {size(node.total_bytes)}"
        lines = _node_lines(node, found.numa.of(node.node))
        _add(nodes, f"node {node.node}: {free}, {cpus}", lines)
    cxl = _add(result, "CXL", _cxl_lines(found.devices) or none_at("/sys/bus/cxl/devices"))
    for region in found.devices.cxl_regions:
        _add(cxl, _region_title(region), [f"path {region.path}"])
    no_dax = [] if found.devices.dax_devices else none_at("/sys/bus/dax/devices")
    dax = _add(result, "dax devices", no_dax)
    for device in found.devices.dax_devices:
        _add(dax, device.file, _dax_lines(device))
    _add(result, "GPUs", _gpu_lines(found.devices) or none_at("/sys/bus/pci/devices"))
    return result


def _add(parent: Tree, title: str, lines: Sequence[str]) -> Tree:
    branch = parent.add(_line(title))
    for line in lines:
        branch.add(_line(line))
    return branch


def _line(text: str, style: str = "") -> Text:
    """Names and paths come from devices: nothing in them may steer the terminal."""
    return Text("\n".join(plain(line) for line in text.split("\n")), style=style)


def _cpu_lines(machine: Machine, kernels: str) -> list[str]:
    cpu = machine.cpu
    return [
        cpu.model or "model not known",
        f"cores allowed: {len(cpu.cores_allowed)}: {ranges(cpu.cores_allowed)}",
        f"instruction sets: {' '.join(cpu.isa) or 'none of interest'}",
        f"kernels in use: {kernels}",
        f"Linux {machine.kernel or 'not known'}",
    ]


def _memory_lines(machine: Machine) -> list[str]:
    memory, pages, shared = machine.memory, machine.huge_pages, machine.shared_memory
    return [
        f"{size(memory.available_bytes)} available of {size(memory.total_bytes)}",
        f"limit (cgroup): {limit(memory.cgroup_limit_bytes, memory.cgroup_usage_bytes)}",
        f"lockable: {limit(memory.memlock_bytes, None)}",
        *(
            f"huge pages of {format_bytes(pool.page_bytes)}: "
            f"{pool.free_count} free of {pool.total_count}"
            for pool in pages.pools
        ),
        f"transparent huge pages: {pages.transparent or 'not known'}; "
        f"shared memory: {pages.shared_memory or 'not known'}{_collapsed(machine)}",
        f"/dev/shm: {size(shared.free_bytes)} free of {size(shared.size_bytes)}",
    ]


def _collapsed(machine: Machine) -> str:
    """What a setting does not tell: from Linux 6.1 on a pool asks for huge pages by itself."""
    by_setting = machine.huge_pages.shared_memory in SHARED_MEMORY_HUGE
    return " (pools get them all the same)" if gives_huge_pages(machine) and not by_setting else ""


def _numa_lines(numa: Numa) -> list[str]:
    demotion = {True: "on", False: "off", None: "not known"}[numa.demotion_enabled]
    lines = [
        f"allowed here: {ranges(numa.nodes_allowed) or 'not known'}; demotion: {demotion}; "
        f"NUMA balancing: {_count(numa.balancing)}; new memory: {numa.auto_online or 'not known'}"
    ]
    if numa.nodes_offline:
        lines.append(f"possible, but offline: {ranges(numa.nodes_offline)}")
    return lines


def _node_lines(node: NumaNode, details: NodeDetails | None) -> list[str]:
    lines = [f"distances: {' '.join(map(str, node.distances)) or 'not known'}"]
    if details is None:
        return lines
    lines.append(
        f"tier: {_count(details.tier)}; weight: {_count(details.weight)}; "
        f"zones: {' '.join(details.zones) or 'not known'}"
    )
    lines += [_access_line(access) for access in details.accesses]
    if details.offline_blocks_count:
        lines.append(f"{details.offline_blocks_count} blocks of memory are offline")
    if details.allowed is False:
        lines.append("not allowed here (cpuset)")
    return lines


def _access_line(access: Access) -> str:
    read, write = (
        f"{_measure(latency_ns)} ns, {_measure(bandwidth_mb_per_s)} MB/s"
        for latency_ns, bandwidth_mb_per_s in (
            (access.read_latency_ns, access.read_bandwidth_mb_per_s),
            (access.write_latency_ns, access.write_bandwidth_mb_per_s),
        )
    )
    nodes = ranges(access.initiators) or "?"
    return f"access{access.access_class} from node {nodes}: read {read}; write {write}"


def _cxl_lines(devices: Devices) -> list[str]:
    lines = [
        f"{each.name}: serial {each.serial or 'not known'}, RAM {size(each.ram_bytes)}, "
        f"persistent {size(each.pmem_bytes)}, near node {_count(each.numa_node)}, "
        f"firmware {each.firmware or 'not known'}, {each.driver or 'no driver'}, {each.path}"
        for each in devices.cxl_memory_devices
    ]
    lines += [
        f"{each.name}: {each.kind or '?'}, {size(each.size_bytes)}"
        + _interleave(each.interleave_ways, each.interleave_granularity_bytes)
        + (f", {each.region}" if each.region else "")
        for each in devices.cxl_decoders
        if each.kind == "root" or each.size_bytes  # the unused ones are many
    ]
    return lines


def _region_title(region: CxlRegion) -> str:
    state = {True: "committed", False: "not committed", None: "state not known"}[region.committed]
    return (
        f"{region.name}: {region.mode or 'mode not known'}, {size(region.size_bytes)} on "
        f"{', '.join(region.targets) or 'unknown devices'}"
        f"{_interleave(region.interleave_ways, region.interleave_granularity_bytes)}, {state}, "
        f"{'enabled' if region.driver else 'disabled'}"
    )


def _interleave(ways: int | None, granularity_bytes: int | None) -> str:
    if ways is None or ways < 2:
        return ""
    return f", {ways} ways every {size(granularity_bytes)}"


def _dax_lines(device: DaxDevice) -> list[str]:
    driver = {
        "device_dax": "driver device_dax: it can be mapped",
        "kmem": f"driver kmem: system RAM, node {_count(device.target_node)}",
        "": "no driver: opening it gives ENXIO",
    }.get(device.driver, f"driver {device.driver}")
    if not device.size_bytes and not device.driver:
        driver = "no memory: from such a seed the driver makes further devices"
    return [
        f"{size(device.size_bytes)} in units of {size(device.align_bytes)}, {driver}",
        f"from {FOUND_BY[device.found_by]}{f' ({device.region})' if device.region else ''}; "
        f"node as RAM {_count(device.target_node)}, near node {_count(device.numa_node)}",
        f"path {device.path}",
    ]


def _gpu_lines(devices: Devices) -> list[str]:
    return [
        f"{each.address}: {each.vendor or 'vendor not known'}, near node {_count(each.numa_node)}, "
        f"{each.driver or 'no driver'}, {_count(each.lanes)} of {_count(each.lanes_most)} lanes"
        for each in devices.gpus
    ]


def _place_lines(place: Place) -> Iterator[str]:
    for line in place.yaml:
        yield f"  {line}"
    yield f"  why:   {place.why}"
    if place.kind == "shared_memory":
        yield "  size:  half of what is free; a server that is told none takes a quarter"
    for command in place.commands:
        yield f"  first: {command}"
    if place.where.startswith(("/", "dax:")):  # else it ends with its process
        yield f"  make:  cxlkv pool create {place.where} --capacity {place.capacity} --model MODEL"
    for caution in place.cautions:
        yield f"  note:  {caution}"


def _measure(value: int | None) -> str:
    return "?" if value is None else str(value)


def _count(value: int | None) -> str:
    return "not known" if value is None else str(value)


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers, runs of them shortened: 0-4 6-10 12."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return " ".join("-".join(map(str, run)) for run in runs)


def size(value_bytes: int | None) -> str:
    """A size that may not be known."""
    return "not known" if value_bytes is None else format_bytes(value_bytes)


def limit(limit_bytes: int | None, usage_bytes: int | None) -> str:
    """A limit that may not be known, and how much of it is used."""
    if limit_bytes is None:
        return "no limit known"
    used = "" if usage_bytes is None else f", {format_bytes(usage_bytes)} used"
    return f"{format_bytes(limit_bytes)}{used}"
