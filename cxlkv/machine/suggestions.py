"""Suggests where on this machine a pool should lie, why, and the configuration for it.

A pure choice over what topology.py, nodes.py and devices.py have read. In this order: memory
that nobody else uses (a dax device), memory that no CPU lives on (a node without CPUs), memory
that is there but needs a command first, and memory that every machine has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from cxlkv.layout import format_bytes
from cxlkv.machine.devices import CxlRegion, DaxDevice, Devices, dax_devices_of
from cxlkv.machine.nodes import NodeDetails, Numa
from cxlkv.machine.topology import GIB, MIB, SHARED_MEMORY_SMALL_BYTES, Advice, Machine, NumaNode

FOUND_BY = {
    "cxl_region": "a CXL region",
    "hmem": "memory that the firmware reserved",
    "pmem": "persistent memory",
    "": "memory of unknown origin",
}
WHOLE_DEVICE = "all"
# How much of what is free a pool gets: programs live in near memory, hardly any in far memory.
FAR_SHARE, NEAR_SHARE = 0.875, 0.5


@dataclass(frozen=True)
class Place:
    """One place for a pool. Run `commands` first, in this order."""

    where: str  # for CXLPool.from_config
    capacity: str
    kind: str  # "dax", "numa", "shared_memory", "anonymous"
    why: str
    path: str = ""  # of a device: its number may be another one after a boot
    lasting: str = ""  # the same place by the address of its hardware, for `where`
    commands: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def yaml(self) -> tuple[str, ...]:
        """Return the lines of the configuration, without the model's layout."""
        lines: tuple[str, ...] = (
            f"where: {_scalar(self.where)}",
            f"capacity: {_scalar(self.capacity)}",
        )
        if self.lasting:
            lines = (f"# where: {_scalar(self.lasting)} is the same after any boot", *lines)
        return (f"# {self.path}", *lines) if self.path else lines


def suggest(machine: Machine, numa: Numa, devices: Devices) -> list[Place]:
    """List places for a pool, the best first; the last ones exist on every machine."""
    far = [*_devices(devices), *_far_nodes(machine, numa, devices), *_unmapped(devices)]
    ready = [place for place in far if not place.commands]
    waiting = [place for place in far if place.commands]
    other_sockets = [] if far else list(_other_sockets(machine, numa))
    return [*ready, *waiting, _near(machine, bool(far)), *other_sockets]


def lacking(numa: Numa, devices: Devices) -> list[Advice]:
    """Say what prevents the use of this machine's far memory, and what to do about it."""
    return [*_lacking_devices(numa, devices), *_lacking_nodes(numa)]


def _lacking_devices(numa: Numa, devices: Devices) -> Iterator[Advice]:
    for device in devices.dax_devices:
        if not device.driver and device.size_bytes:  # the driver keeps a seed of size 0
            yield Advice(
                what=f"{device.file} has no driver: opening it gives ENXIO",
                why=f"its {format_bytes(device.size_bytes)} ({FOUND_BY[device.found_by]}) can be"
                " neither mapped nor used as RAM; a new CXL region waits for kmem, so it starts so",
                command=f"{_bind(device)}, or without daxctl: {_bind_by_hand(device)}",
            )
        elif device.driver == "device_dax" and device.file_trouble:
            yield Advice(
                what=f"{device.file} cannot be opened: {device.file_trouble}",
                why="the device has its driver, but this process cannot reach it",
                command=_open_file(device),
            )
    for device in _offline_ram(numa, devices):
        yield Advice(
            what=f"the memory of {device.name} (node {device.target_node}) is offline",
            why="it was given to the kernel as RAM, but the kernel does not hand it out",
            command=f"sudo daxctl online-memory {device.name}",
        )
    for name in _unclaimed(devices):
        yield Advice(
            what=f"CXL memory device {name} is in no region",
            why="its memory has no addresses, so nothing can use it",
            command=_create_region(devices, [name]),
        )


def _lacking_nodes(numa: Numa) -> Iterator[Advice]:
    forbidden = [each.node for each in numa.nodes if each.allowed is False]
    if forbidden:
        listed = ", ".join(map(str, forbidden))
        yield Advice(
            what=f"this process may not have memory of node {listed} (cpuset)",
            why="a pool cannot be bound to it",
            command=_allow_nodes(numa, forbidden),
        )


def _bind(device: DaxDevice) -> str:
    return f"sudo daxctl reconfigure-device --mode=devdax {device.name}"


def _bind_by_hand(device: DaxDevice) -> str:
    """The same for machines without daxctl: the driver takes by itself only what it is told of."""
    driver = "/sys/bus/dax/drivers/device_dax"
    tell = "; ".join(f"echo {device.name} > {driver}/{name}" for name in ("new_id", "bind"))
    return f"sudo sh -c 'modprobe device_dax; {tell}'"


def _open_file(device: DaxDevice) -> str:
    if device.file_trouble == "absent":
        return f"docker run --device {device.file} ... (outside a container: sudo udevadm trigger)"
    return f"sudo setfacl -m u:$(id -un):rw {device.file}"


def _devices(devices: Devices) -> Iterator[Place]:
    """Dax devices, largest first: as they are, or after they got a driver or an open door."""
    usable = [each for each in devices.dax_devices if each.size_bytes and each.driver != "kmem"]
    for device in sorted(usable, key=lambda each: -(each.size_bytes or 0)):
        commands: tuple[str, ...] = ()
        state = "driver device_dax: only what maps it uses it, and no kernel moves it"
        if not device.driver:
            commands = (_bind(device),)
            state = "no driver is bound yet, so opening it gives ENXIO (no such device or address)"
        elif device.driver != "device_dax":
            continue  # a driver that we know nothing of
        elif device.file_trouble:
            commands = (_open_file(device),)
            state = f"driver device_dax, but {device.file} cannot be opened: {device.file_trouble}"
        yield Place(
            where=f"dax:{device.file}",
            capacity=WHOLE_DEVICE,
            kind="dax",
            path=device.path,
            lasting=_lasting(device, devices),
            why=f"{device.file}, {format_bytes(device.size_bytes or 0)} of "
            f"{_origin(device, devices)}; {state}",
            commands=commands,
        )


def _lasting(device: DaxDevice, devices: Devices) -> str:
    """The device's name by the bus address of a CXL device with its memory, where that means no
    other."""
    region = next((each for each in devices.cxl_regions if each.name == device.region), None)
    paths = {memory.name: memory.path for memory in devices.cxl_memory_devices}
    for name in region.targets if region else ():
        folder = paths.get(name, "").rpartition("/")[0]
        if folder and dax_devices_of(devices, folder) == [device]:
            return f"dax:{folder}"
    return ""


def _origin(device: DaxDevice, devices: Devices) -> str:
    region = next((each for each in devices.cxl_regions if each.name == device.region), None)
    if region is None or device.found_by != "cxl_region":
        return FOUND_BY[device.found_by]
    return f"CXL {region.name}{_interleaved(region)}"


def _interleaved(region: CxlRegion) -> str:
    if len(region.targets) < 2:
        return f" on {region.targets[0]}" if region.targets else ""
    step = region.interleave_granularity_bytes
    every = f" every {format_bytes(step)}" if step else ""
    return f", interleaved over {', '.join(region.targets)}{every}"


def _far_nodes(machine: Machine, numa: Numa, devices: Devices) -> Iterator[Place]:
    """Nodes with memory and without CPUs, the fastest to read first."""
    for node in sorted(_without_cpus(machine, numa), key=lambda each: _slowness(each, numa)):
        details = numa.of(node.node)
        ram = [each for each in devices.dax_devices if each.driver == "kmem"]
        device = next((each for each in ram if each.target_node == node.node), None)
        origin = f", {_origin(device, devices)} as system RAM (kmem)" if device else ""
        forbidden = details is not None and details.allowed is False
        yield Place(
            where=f"numa:{node.node}",
            capacity=_most(machine, node.free_bytes, FAR_SHARE),
            kind="numa",
            why=f"node {node.node} has {_size(node.free_bytes)} free and no CPUs{origin}"
            f"{_speed(details)}: the programs' own memory stays free for them",
            commands=(_allow_nodes(numa, [node.node]),) if forbidden else (),
            cautions=tuple(_cautions(numa, details)),
        )
    for device in _offline_ram(numa, devices):
        if any(node.node == device.target_node and node.total_bytes for node in machine.nodes):
            continue  # partly online: that part was named above
        size_bytes = device.size_bytes or 0
        yield Place(
            where=f"numa:{device.target_node}",
            capacity=_round(size_bytes * FAR_SHARE),
            kind="numa",
            why=f"node {device.target_node} would have {format_bytes(size_bytes)}"
            f" ({_origin(device, devices)}), but its memory is offline",
            commands=(f"sudo daxctl online-memory {device.name}",),
        )


def _without_cpus(machine: Machine, numa: Numa) -> Iterator[NumaNode]:
    """Nodes without CPUs, but not those in a faster tier than the CPUs' own memory: that is HBM, of
    a CPU or of a GPU."""
    tiers = {each.node: each.tier for each in numa.nodes if each.tier is not None}
    near = [tiers[node.node] for node in machine.nodes if node.cpus and node.node in tiers]
    with_cpus = {each.node for each in numa.nodes if each.has_cpus}
    with_cpus |= {node.node for node in machine.nodes if node.cpus}
    for node in machine.nodes:
        slow = not near or tiers.get(node.node, max(near)) >= min(near)
        if with_cpus and node.node not in with_cpus and node.total_bytes and slow:
            yield node


def _slowness(node: NumaNode, numa: Numa) -> tuple[int, int]:
    """Sorted by what the firmware says; without HMAT by the distance to the nearest other node."""
    details = numa.of(node.node)
    latencies = (
        [a.read_latency_ns for a in details.accesses if a.read_latency_ns] if details else []
    )
    others = [distance for distance in node.distances if distance > 10]
    return (min(latencies, default=1 << 30), min(others, default=1 << 30))


def _speed(details: NodeDetails | None) -> str:
    for access in details.accesses if details else ():
        if access.read_latency_ns and access.read_bandwidth_mb_per_s:
            bandwidth = access.read_bandwidth_mb_per_s / 1000
            return f", {access.read_latency_ns} ns and {bandwidth:g} GB/s as the firmware says"
    return ""


def _cautions(numa: Numa, details: NodeDetails | None) -> Iterator[str]:
    node = "NODE" if details is None else details.node
    yield f"memory of this process; for several processes: numa:{node}:/dev/shm/cxlkv.pool"
    if numa.demotion_enabled:
        yield (
            "demotion is on: the kernel fills such nodes with cold pages of others "
            "(echo 0 | sudo tee /sys/kernel/mm/numa/demotion_enabled)"
        )
    if numa.balancing is not None and numa.balancing & 2:
        yield (
            "tiering by NUMA balancing is on: the kernel moves hot pages to faster nodes "
            "(sudo sysctl kernel.numa_balancing=0)"
        )
    if details is not None and details.movable_only:
        yield (
            "all of it is movable: what pins memory for long (RDMA, cudaHostRegister) "
            "has the kernel move it to another node first"
        )


def _offline_ram(numa: Numa, devices: Devices) -> list[DaxDevice]:
    """Devices that are system RAM by their driver, while none of their memory is handed out."""
    found = []
    for device in devices.dax_devices:
        if device.driver == "kmem" and device.target_node is not None:
            details = numa.of(device.target_node)
            absent = device.target_node in numa.nodes_offline
            if absent or (details is not None and details.offline_blocks_count > 0):
                found.append(device)
    return found


def _unclaimed(devices: Devices) -> list[str]:
    """CXL memory devices with volatile memory that no region uses."""
    claimed = {name for region in devices.cxl_regions for name in region.targets}
    # A decoder with a size is in use, also where the firmware set it up and there is no region.
    claimed |= {each.memory_device for each in devices.cxl_decoders if each.size_bytes}
    known = all(region.targets for region in devices.cxl_regions)
    if not known or any(not name.startswith("mem") for name in claimed if name):
        return []  # a region whose devices cannot be read may be on any of them
    return [
        each.name
        for each in devices.cxl_memory_devices
        if each.ram_bytes and each.name not in claimed
    ]


def _create_region(devices: Devices, memory_devices: list[str]) -> str:
    roots = [each.name for each in devices.cxl_decoders if each.kind == "root"]
    capable = [each.name for each in devices.cxl_decoders if each.ram_capable]
    decoder = next(iter([*(name for name in capable if name in roots), *roots]), "decoder0.0")
    return f"sudo cxl create-region -t ram -d {decoder} -m {' '.join(memory_devices)}"


def _unmapped(devices: Devices) -> Iterator[Place]:
    """CXL memory without a region: the dax device is made with it, and its number known then.

    The kernel takes the smallest one that is free.
    """
    used = {int(device.name[3:].partition(".")[0]) for device in devices.dax_devices}
    for name in _unclaimed(devices)[:1]:
        size_bytes = next(d.ram_bytes for d in devices.cxl_memory_devices if d.name == name)
        yield Place(
            where=f"dax:/dev/dax{next(each for each in count() if each not in used)}.0",
            capacity=WHOLE_DEVICE,
            kind="dax",
            why=f"CXL memory device {name} has {_size(size_bytes)} that no region uses; "
            "the device that the commands make may have another number",
            commands=(_create_region(devices, [name]), "cxlkv info"),
        )


def _near(machine: Machine, has_far: bool) -> Place:
    """Memory that every machine has."""
    shared = machine.shared_memory
    room_bytes = shared.size_bytes if shared.free_bytes is None else shared.free_bytes
    why = "works at once, but takes the programs' own memory" if has_far else "no far memory here"
    if room_bytes is not None and room_bytes >= SHARED_MEMORY_SMALL_BYTES:
        capacity = _most(machine, room_bytes, NEAR_SHARE)
        return Place("/dev/shm/cxlkv.pool", capacity, "shared_memory", f"{why}; processes share it")
    room = "" if room_bytes is None else f"/dev/shm has {format_bytes(room_bytes)} free only"
    return Place(
        where="anonymous:",
        capacity=_most(machine, None, NEAR_SHARE),
        kind="anonymous",
        why=f"{why}, and {room or 'the size of /dev/shm is not known'}: memory of this process"
        " alone",
    )


def _other_sockets(machine: Machine, numa: Numa) -> Iterator[Place]:
    """Another socket's memory in the role of far memory, on a server of several."""
    allowed = set(machine.cpu.cores_allowed)
    with_both = [node for node in machine.nodes if node.cpus and node.total_bytes]
    with_both.sort(key=lambda node: -len(allowed & set(node.cpus)))  # the first is this process's
    for node in with_both[1:]:
        details = numa.of(node.node)
        if details is not None and details.allowed is False:
            continue
        busy = " (its CPUs are allowed here: leave them idle)" if allowed & set(node.cpus) else ""
        yield Place(
            where=f"numa:{node.node}",
            capacity=_most(machine, node.free_bytes, FAR_SHARE),
            kind="numa",
            why=f"to emulate far memory: node {node.node} is another socket{busy}",
            cautions=tuple(_cautions(numa, details)),
        )


def _most(machine: Machine, free_bytes: int | None, share: float) -> str:
    """The given share of what is free there and what this process may still have."""
    memory = machine.memory
    limits = [each for each in (free_bytes, memory.available_bytes) if each is not None]
    if memory.cgroup_limit_bytes is not None:
        limits.append(max(0, memory.cgroup_limit_bytes - (memory.cgroup_usage_bytes or 0)))
    return _round(min(limits) * share) if limits else "1GiB"


def _round(wanted_bytes: float) -> str:
    if wanted_bytes >= 4 * GIB:
        return f"{int(wanted_bytes // GIB)}GiB"
    return f"{max(1, int(wanted_bytes // MIB))}MiB"


def _allow_nodes(numa: Numa, wanted: list[int]) -> str:
    nodes = ",".join(str(node) for node in sorted({*numa.nodes_allowed, *wanted}))
    return f"docker run --cpuset-mems {nodes} ... (systemd: AllowedMemoryNodes={nodes})"


def _size(value_bytes: int | None) -> str:
    return "an unknown amount" if value_bytes is None else format_bytes(value_bytes)


def _scalar(text: str) -> str:
    """Quote text that YAML would take for something else."""
    plain = re.fullmatch(r"[\w/][\w/.:+-]*", text) and not text.endswith(":")
    return text if plain else json.dumps(text)
