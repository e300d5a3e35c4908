"""Lists the devices that matter to a pool: CXL memory, dax devices, GPUs.

The kernel numbers them as it finds them: mem0 of this boot may be mem1 of the next. So each also
has its path, through which it was found (bus addresses, region), and a memory device its serial.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cxlkv.machine.sysfs import flag, names, number, path_below, read, target, target_name, trouble

# PCI classes: display controllers, and accelerators as the largest GPUs call themselves.
GPU_CLASSES = ("0x03", "0x12")
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x1a03": "ASPEED"}


@dataclass(frozen=True)
class CxlMemoryDevice:
    """One CXL memory device."""

    name: str  # "mem0": another one after another boot
    path: str  # through its bus addresses
    serial: str  # as the device says, "0x..."; "" if it does not
    ram_bytes: int | None
    pmem_bytes: int | None
    numa_node: int | None  # of the slot; None: none, or not known
    firmware: str
    driver: str  # "cxl_mem", or "" where none took it


@dataclass(frozen=True)
class CxlDecoder:
    """One address decoder: of the machine (root), a switch, or a memory device (endpoint)."""

    name: str
    path: str
    kind: str  # "root", "switch", "endpoint"
    size_bytes: int | None
    interleave_ways: int | None
    interleave_granularity_bytes: int | None
    targets: str  # the ports below it, in order
    mode: str  # of an endpoint's: "ram", "pmem", "none"
    region: str
    memory_device: str  # whose decoder it is, of an endpoint's
    ram_capable: bool | None


@dataclass(frozen=True)
class CxlRegion:
    """Memory of one device, or of several interleaved, mapped into the machine's addresses."""

    name: str
    path: str
    mode: str  # "ram", "pmem"
    size_bytes: int | None
    interleave_ways: int | None
    interleave_granularity_bytes: int | None
    targets: tuple[str, ...]  # the memory devices, in order; an unknown one is its decoder
    committed: bool | None  # the decoders carry it
    driver: str  # "cxl_region", or "" where it is disabled


@dataclass(frozen=True)
class DaxDevice:
    """One dax device: memory that is either mapped as a device or handed out as a node's."""

    name: str
    path: str
    file: str  # "/dev/dax0.0"
    file_trouble: str  # why this process cannot open the file: "absent", "no permission"; ""
    found_by: str  # "cxl_region", "hmem" (the firmware reserved it), "pmem", or "" if not known
    region: str  # the CXL region, where it is of one
    driver: str  # "device_dax", "kmem", or "" where none is bound: opening gives ENXIO
    size_bytes: int | None
    align_bytes: int | None
    target_node: int | None  # the node that its memory is, or would be, as system RAM
    numa_node: int | None  # the node that it is near


@dataclass(frozen=True)
class Gpu:
    """One GPU, or another device of a display or accelerator class."""

    address: str  # on the PCI bus
    path: str
    vendor: str
    numa_node: int | None
    driver: str
    lanes: int | None  # of its link, now
    lanes_most: int | None  # that it could have


@dataclass(frozen=True)
class Devices:
    """Result of probe_devices()."""

    cxl_memory_devices: tuple[CxlMemoryDevice, ...]
    cxl_decoders: tuple[CxlDecoder, ...]
    cxl_regions: tuple[CxlRegion, ...]
    dax_devices: tuple[DaxDevice, ...]
    gpus: tuple[Gpu, ...]


def probe_devices(root: Path = Path("/")) -> Devices:
    """Read the devices of the machine whose sysfs lies below `root`."""
    cxl, dax = root / "sys/bus/cxl/devices", root / "sys/bus/dax/devices"
    pci = root / "sys/bus/pci/devices"
    addresses = names(pci, r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
    return Devices(
        cxl_memory_devices=tuple(
            _memory_device(root, cxl / name) for name in names(cxl, r"mem[0-9]+")
        ),
        cxl_decoders=tuple(
            _decoder(root, cxl / name) for name in names(cxl, r"decoder[0-9]+\.[0-9]+")
        ),
        cxl_regions=tuple(_region(root, cxl / name) for name in names(cxl, r"region[0-9]+")),
        dax_devices=tuple(
            _dax_device(root, dax / name) for name in names(dax, r"dax[0-9]+\.[0-9]+")
        ),
        gpus=tuple(
            _gpu(root, pci / name)
            for name in sorted(addresses)
            if read(pci / name / "class").startswith(GPU_CLASSES)
        ),
    )


def dax_devices_of(devices: Devices, folder: str) -> list[DaxDevice]:
    """DAX devices at or below a folder of sysfs, or with memory of a CXL device that is there.

    So a PCI address names its dax device, whatever numbers the kernel gave on the way.
    """

    def below(path: str) -> bool:
        return f"{path}/".startswith(f"{folder}/")

    memory = {each.name for each in devices.cxl_memory_devices if below(each.path)}
    regions = {each.name for each in devices.cxl_regions if memory & set(each.targets)}
    return [
        each
        for each in devices.dax_devices
        if below(each.path) or (each.found_by == "cxl_region" and each.region in regions)
    ]


def _path(root: Path, device: Path) -> str:
    """The device's own place in sysfs; that of its link where this leads nowhere."""
    return path_below(root, target(device) or root.resolve() / device.relative_to(root))


def _memory_device(root: Path, device: Path) -> CxlMemoryDevice:
    return CxlMemoryDevice(
        name=device.name,
        path=_path(root, device),
        serial=read(device / "serial"),
        ram_bytes=number(device / "ram/size"),
        pmem_bytes=number(device / "pmem/size"),
        numa_node=number(device / "numa_node"),
        firmware=read(device / "firmware_version"),
        driver=target_name(device / "driver"),
    )


def _decoder(root: Path, device: Path) -> CxlDecoder:
    return CxlDecoder(
        name=device.name,
        path=_path(root, device),
        kind=read(device / "devtype").removeprefix("cxl_decoder_"),
        size_bytes=number(device / "size"),
        interleave_ways=number(device / "interleave_ways"),
        interleave_granularity_bytes=number(device / "interleave_granularity"),
        targets=read(device / "target_list"),
        mode=read(device / "mode"),
        region=read(device / "region"),
        memory_device=_memory_device_behind(root, device.name),
        ram_capable=flag(device / "cap_ram"),
    )


def _region(root: Path, device: Path) -> CxlRegion:
    targets = []
    for name in names(device, r"target[0-9]+"):
        decoder = read(device / name)
        if decoder:
            targets.append(_memory_device_behind(root, decoder) or decoder)
    return CxlRegion(
        name=device.name,
        path=_path(root, device),
        mode=read(device / "mode"),
        size_bytes=number(device / "size"),
        interleave_ways=number(device / "interleave_ways"),
        interleave_granularity_bytes=number(device / "interleave_granularity"),
        targets=tuple(targets),
        committed=flag(device / "commit"),
        driver=target_name(device / "driver"),
    )


def _memory_device_behind(root: Path, decoder: str) -> str:
    """decoder3.0 lies in the folder of its port, endpoint3, and that one's uport is mem0."""
    if not re.fullmatch(r"decoder[0-9]+\.[0-9]+", decoder):
        return ""
    folder = target(root / "sys/bus/cxl/devices" / decoder)
    name = target_name(folder.parent / "uport") if folder else ""
    return name if re.fullmatch(r"mem[0-9]+", name) else ""  # a switch's uport is no memory


def _dax_device(root: Path, device: Path) -> DaxDevice:
    path = _path(root, device)
    parts = path.split("/")
    regions = [part for part in parts if re.fullmatch(r"region[0-9]+", part)]
    found_by = ""
    if any(re.fullmatch(r"ndbus[0-9]+", part) for part in parts):
        found_by, regions = "pmem", []  # the nvdimm drivers count regions of their own
    elif any(re.fullmatch(r"hmem\.[0-9]+", part) for part in parts):
        found_by = "hmem"
    elif regions:
        found_by = "cxl_region"
    return DaxDevice(
        name=device.name,
        path=path,
        file=f"/dev/{device.name}",
        file_trouble=_file_trouble(root / "dev" / device.name),
        found_by=found_by,
        region=regions[0] if regions else "",
        driver=target_name(device / "driver"),
        size_bytes=number(device / "size"),
        align_bytes=number(device / "align"),
        target_node=number(device / "target_node"),
        numa_node=number(device / "numa_node"),
    )


def _file_trouble(file: Path) -> str:
    """Asked by name only: opening a device without a driver is ENXIO, whoever asks."""
    if not os.path.lexists(file):
        return trouble(file)
    return "" if os.access(file, os.R_OK | os.W_OK) else "no permission"


def _gpu(root: Path, device: Path) -> Gpu:
    vendor = read(device / "vendor")
    return Gpu(
        address=device.name,
        path=_path(root, device),
        vendor=VENDORS.get(vendor, vendor),
        numa_node=number(device / "numa_node"),
        driver=target_name(device / "driver"),
        lanes=number(device / "current_link_width"),
        lanes_most=number(device / "max_link_width"),
    )
