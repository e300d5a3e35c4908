"""`cxlkv info` on recorded machines: what it finds there, and where it says a pool should lie."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cxlkv.config import read_config
from cxlkv.errors import BadArgumentError
from cxlkv.layout import parse_bytes
from cxlkv.machine.devices import dax_devices_of
from cxlkv.machine.nodes import Access
from cxlkv.machine.suggestions import Place, lacking, suggest
from cxlkv.machine.topology import GIB
from cxlkv.ops import cli
from cxlkv.ops.info import Survey, as_dict, survey

from ..support.recorded import NAMES, plant_machine

REGION = "/sys/devices/platform/ACPI0017:00/root0/decoder0.0/region"


def at(name: str, tmp_path: Path) -> Survey:
    return survey(plant_machine(name, tmp_path))


def told(root: Path, *words: str) -> str:
    """What the command prints on the machine below `root`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cxlkv.ops.info.survey", partial(survey, root))
        done = CliRunner().invoke(cli.app, ["info", *words])
    assert done.exit_code == 0, done.output
    return done.output


def places(found: Survey) -> list[tuple[str, str, bool]]:
    """Where, how much, and whether it works without a command."""
    return [(place.where, place.capacity, not place.commands) for place in found.places]


# ---- where a pool should lie ----


def test_two_sockets_have_nothing_far_but_can_emulate_it(tmp_path: Path) -> None:
    found = at("two-sockets", tmp_path)
    assert places(found) == [
        ("/dev/shm/cxlkv.pool", "125GiB", True),
        ("numa:1", "210GiB", True),
    ]
    assert found.places[0].why == "no far memory here; processes share it"
    assert "emulate far memory: node 1 is another socket" in found.places[1].why
    assert found.missing == ()


def test_the_other_socket_is_the_one_that_this_process_does_not_run_on(tmp_path: Path) -> None:
    root = plant_machine("two-sockets", tmp_path)
    (root / "proc/self/status").write_text("Cpus_allowed_list: 32-40\nMems_allowed_list: 0-1\n")
    assert survey(root).places[1].where == "numa:0"


def test_a_cxl_node_without_cpus_is_the_place(tmp_path: Path) -> None:
    found = at("cxl-node", tmp_path)
    assert places(found) == [("numa:2", "111GiB", True), ("/dev/shm/cxlkv.pool", "95GiB", True)]
    best = found.places[0]
    assert best.yaml == ("where: numa:2", "capacity: 111GiB")
    assert "no CPUs, CXL region0 on mem0 as system RAM (kmem), 255 ns and 26 GB/s" in best.why
    assert [caution.split(":")[0] for caution in best.cautions] == [
        "memory of this process; for several processes",
        "demotion is on",
        "tiering by NUMA balancing is on",
        "all of it is movable",
    ]
    assert found.missing == ()


def test_memory_that_is_faster_than_the_cpus_own_is_no_far_memory(tmp_path: Path) -> None:
    """HBM of a CPU or a GPU is a node without CPUs, too; its tier is below that of DRAM."""
    root = plant_machine("cxl-node", tmp_path)
    tiers = root / "sys/devices/virtual/memory_tiering"
    (tiers / "memory_tier22").rename(tiers / "memory_tier2")
    assert survey(root).places[0].where == "/dev/shm/cxlkv.pool"


def test_the_fastest_of_two_far_nodes_comes_first(tmp_path: Path) -> None:
    found = at("cxl-node", tmp_path)
    node = replace(found.machine.nodes[1], node=3)
    machine = replace(found.machine, nodes=(*found.machine.nodes, node))
    slow, fast = (Access(0, (0,), each, each, 1000, 1000) for each in (300, 200))
    details = [
        replace(found.numa.nodes[1], node=number, accesses=(access,))
        for number, access in ((2, slow), (3, fast))
    ]
    numa = replace(found.numa, nodes=(found.numa.nodes[0], *details))
    assert [place.where for place in suggest(machine, numa, found.devices)][:2] == [
        "numa:3",
        "numa:2",
    ]


def test_a_device_without_a_driver_needs_the_command_first(tmp_path: Path) -> None:
    found = at("devdax-unbound", tmp_path)
    assert places(found) == [
        ("dax:/dev/dax0.0", "all", False),
        ("/dev/shm/cxlkv.pool", "31GiB", True),
    ]
    best = found.places[0]
    assert best.commands == ("sudo daxctl reconfigure-device --mode=devdax dax0.0",)
    assert best.path == f"{REGION}0/dax_region0/dax0.0"
    assert best.yaml[0] == f"# {best.path}"
    assert "ENXIO" in best.why
    # The seed device of size 0 has no driver either, and nobody needs to mend that.
    assert [item.what for item in found.missing] == [
        "/dev/dax0.0 has no driver: opening it gives ENXIO"
    ]
    assert best.commands[0] in found.missing[0].command
    for part in ("modprobe device_dax", "> /sys/bus/dax/drivers/device_dax/new_id", "device_dax/b"):
        assert part in found.missing[0].command


def test_an_interleaved_region_as_a_device_is_the_place(tmp_path: Path) -> None:
    """The largest device comes first, whatever its number is; then the memory nobody has mapped."""
    found = at("interleaved-devdax", tmp_path)
    assert places(found) == [
        ("dax:/dev/dax4.0", "all", True),
        ("dax:/dev/dax0.0", "all", True),
        ("dax:/dev/dax1.0", "all", False),
        ("/dev/shm/cxlkv.pool", "125GiB", True),
    ]
    assert "512 GiB of CXL region4, interleaved over mem1, mem0 every 4 KiB" in found.places[0].why
    assert "258 MiB of persistent memory" in found.places[1].why
    assert found.places[2].commands[0] == "sudo cxl create-region -t ram -d decoder0.1 -m mem2"
    assert [item.what for item in found.missing] == [
        "CXL memory device mem2 is in no region",
        "no huge pages for shared memory",
    ]


def test_a_device_has_a_name_that_lasts(tmp_path: Path) -> None:
    """By the address of a card with its memory; whatever its number, that means this device."""
    found = at("interleaved-devdax", tmp_path)
    cxl, pmem = found.places[:2]
    assert cxl.lasting == "dax:/sys/devices/pci0000:26/0000:26:00.0/0000:27:00.0"
    assert cxl.yaml[1] == f"# where: {cxl.lasting} is the same after any boot"
    assert cxl.yaml[2:] == ("where: dax:/dev/dax4.0", "capacity: all")
    assert pmem.lasting == ""
    devices = found.devices

    def named(folder: str) -> list[str]:
        return [device.name for device in dax_devices_of(devices, folder)]

    for memory in devices.cxl_memory_devices:
        in_region = memory.name in devices.cxl_regions[0].targets
        for folder in (memory.path, memory.path.rpartition("/")[0]):
            assert named(folder) == (["dax4.0"] if in_region else [])
    assert named(f"{REGION}4") == ["dax4.0"]
    assert named(f"{REGION}") == []  # a part of a name is none
    assert sorted(named("/sys/devices")) == ["dax0.0", "dax4.0"]


def test_memory_that_the_firmware_mapped_is_not_offered_again(tmp_path: Path) -> None:
    """A decoder with a size is in use, also where the kernel made no region of it."""
    root = plant_machine("interleaved-devdax", tmp_path)
    (root / "sys/bus/cxl/devices/region4").unlink()
    commands = [place.commands for place in survey(root).places]
    assert [c[0].rpartition(" ")[2] for c in commands if c] == ["mem2"]


def test_a_container_is_told_what_it_cannot_reach(tmp_path: Path) -> None:
    found = at("container", tmp_path)
    assert places(found) == [
        ("dax:/dev/dax0.0", "all", False),
        ("numa:2", "6GiB", False),
        ("anonymous:", "3584MiB", True),  # half of what its cgroup leaves
    ]
    device, node, rest = found.places
    assert "docker run --device /dev/dax0.0" in device.commands[0]
    assert "--cpuset-mems 0,2" in node.commands[0]
    assert rest.yaml == ('where: "anonymous:"', "capacity: 3584MiB")
    assert "/dev/shm has 64 MiB free only" in rest.why
    output = told(tmp_path)
    assert "CXL\n│   └── not known" in output  # hidden is not the same as none
    assert {item.path for item in found.unknown} == {"/sys/bus/cxl/devices", "/sys/bus/pci/devices"}


def test_memory_that_is_offline_needs_the_command_first(tmp_path: Path) -> None:
    found = at("offline-node", tmp_path)
    assert places(found)[0] == ("numa:1", "28GiB", False)
    assert found.places[0].commands == ("sudo daxctl online-memory dax0.0",)
    node = found.numa.nodes[1]
    assert (node.offline_blocks_count, node.allowed, node.tier) == (2, None, None)
    assert found.numa.nodes_offline == (2,)
    assert [item.what for item in found.missing] == [
        "the memory of dax0.0 (node 1) is offline",
        "no huge pages for shared memory",
    ]


def test_a_node_that_went_offline_whole_needs_the_command_first(tmp_path: Path) -> None:
    root = plant_machine("offline-node", tmp_path)
    nodes = root / "sys/devices/system/node"
    shutil.rmtree(nodes / "node1")
    (nodes / "online").write_text("0\n")
    assert survey(root).places[0].commands == ("sudo daxctl online-memory dax0.0",)


def test_a_machine_of_one_node_has_shared_memory(tmp_path: Path) -> None:
    found = at("laptop", tmp_path)
    assert places(found) == [("/dev/shm/cxlkv.pool", "4000MiB", True)]
    assert found.unknown == ()


def test_a_device_that_may_not_be_opened(tmp_path: Path) -> None:
    found = at("interleaved-devdax", tmp_path)
    closed = tuple(replace(d, file_trouble="no permission") for d in found.devices.dax_devices)
    devices = replace(found.devices, dax_devices=closed)
    best = suggest(found.machine, found.numa, devices)[0]
    assert best.where == "dax:/dev/dax4.0"
    assert best.commands == ("sudo setfacl -m u:$(id -un):rw /dev/dax4.0",)
    advice = lacking(found.numa, devices)[0]
    assert advice.what == "/dev/dax0.0 cannot be opened: no permission"
    assert "sudo setfacl -m u:$(id -un):rw /dev/dax0.0" in advice.command


@pytest.mark.parametrize("name", NAMES)
def test_the_suggested_lines_are_a_configuration(name: str, tmp_path: Path) -> None:
    """YAML reads them; and where the place is on every machine, from_config makes a pool."""
    layout = {"layers": 1, "kv_heads": 1, "head_dim": 64}
    for place in at(name, tmp_path).places:
        keys = yaml.safe_load("\n".join(place.yaml))
        assert keys == {"where": place.where, "capacity": place.capacity}
        assert place.capacity == "all" or parse_bytes(place.capacity) > 0
        if place.where.startswith(("anonymous:", "/")):
            read_config({**keys, "layout": layout})


# ---- what is found ----


def test_the_devices_are_read_with_their_paths(tmp_path: Path) -> None:
    devices = at("interleaved-devdax", tmp_path).devices
    memory = devices.cxl_memory_devices[1]
    assert (memory.name, memory.serial, memory.ram_bytes) == ("mem1", "0x9001", 256 * GIB)
    assert memory.path == "/sys/devices/pci0000:26/0000:26:00.0/0000:27:00.0/mem1"
    assert (memory.firmware, memory.numa_node, memory.pmem_bytes) == ("2.0", 0, None)
    region = devices.cxl_regions[0]
    assert (region.targets, region.interleave_ways) == (("mem1", "mem0"), 2)
    assert (region.committed, region.driver, region.mode) == (True, "cxl_region", "ram")
    assert region.interleave_granularity_bytes == 4096
    decoders = {each.name: each for each in devices.cxl_decoders}
    assert (decoders["decoder0.0"].kind, decoders["decoder0.0"].targets) == ("root", "1,2")
    assert decoders["decoder3.0"].memory_device == "mem1"
    assert decoders["decoder0.0"].memory_device == ""
    pmem, cxl = devices.dax_devices
    assert (pmem.found_by, pmem.region) == ("pmem", "")
    assert (cxl.found_by, cxl.region, cxl.driver) == ("cxl_region", "region4", "device_dax")
    assert (cxl.target_node, cxl.numa_node, cxl.align_bytes) == (2, None, 2 << 20)
    assert cxl.path == f"{REGION}4/dax_region4/dax4.0"


def test_nodes_and_gpus_are_read(tmp_path: Path) -> None:
    found = at("two-sockets", tmp_path / "two")
    assert [(g.vendor, g.numa_node, g.driver) for g in found.devices.gpus] == [
        ("ASPEED", None, ""),
        ("NVIDIA", 1, "nvidia"),
    ]
    assert found.numa.nodes[0].zones == ("DMA", "Normal")
    assert found.numa.nodes[0].accesses == (Access(0, (0,), 97, 97, 268000, 190000),)
    node = at("cxl-node", tmp_path / "cxl").numa.nodes[1]
    assert (node.tier, node.weight, node.zones, node.movable_only) == (22, 1, ("Movable",), True)
    assert [access.access_class for access in node.accesses] == [0, 1]


def test_the_report_on_another_machine(tmp_path: Path) -> None:
    """For people: one tree, and the lines to copy in one piece."""
    root = plant_machine("cxl-node", tmp_path)
    output = told(root)
    # A console of 80 columns wraps the tree; what is to be copied stays whole.
    assert "\n  where: numa:2\n  capacity: 111GiB\n" in output
    for text in ("serial 0x7c1d000000a4", "driver kmem: system RAM, node 2", "tier: 22; weight: 1"):
        assert text in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize("name", NAMES)
def test_the_json_has_all_that_the_docs_promise(name: str, tmp_path: Path) -> None:
    root = plant_machine(name, tmp_path)
    report = json.loads(told(root, "--json"))
    text = (Path(__file__).parents[2] / "docs/reference/info.md").read_text()
    for key, value in report.items():
        assert f"`{key}`" in text, f"docs/reference/info.md does not explain {key}"
        for part in value if isinstance(value, list) else [value]:
            for inner in part if isinstance(part, dict) else ():
                assert f"`{inner}`" in text, f"info.md does not explain {key}: {inner}"
    assert report["places"][0]["yaml"][-2].startswith("where: ")


# ---- bad input ----


def test_an_empty_machine_gives_a_report_that_says_so(tmp_path: Path) -> None:
    found = survey(tmp_path)
    assert {item.why for item in found.unknown} == {"absent"}
    assert [item.what for item in found.unknown] == [
        "how much memory there is",
        "which CPUs and nodes are allowed here",
        "NUMA nodes",
        "GPUs",
    ]
    assert places(found) == [("anonymous:", "1GiB", True)]
    assert "Not known: NUMA nodes (/sys/devices/system/node: absent)" in told(tmp_path)


def test_a_root_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadArgumentError, match="is not a folder"):
        survey(tmp_path / "absent")


GARBAGE = (
    b"",
    b"\0\0\0\0",
    b"\xff\xfe garbage \x80",
    b"-",
    b"0-",
    b"99999-0,",
    b"0-99999999999999999999",
    b"9" * 5000,
    b"0x" + b"f" * 400,
    b"-1",
    b"\x1b[2J\x1b]0;title\x07",
    b"Node 0 MemTotal: many kB\nNode 9999999 , zone\n: :\n::::\n",
    b"a:\nb\n0::\0\n",
)


@pytest.mark.parametrize("name", NAMES)
def test_garbage_in_any_file_raises_nothing(name: str, tmp_path: Path) -> None:
    """Each file in turn holds nonsense, and then many of them at once."""
    root = plant_machine(name, tmp_path)
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    kept = {path: path.read_bytes() for path in files}
    seed = 8
    print("seed", seed)
    chance = random.Random(seed)
    for path in files:
        path.write_bytes(chance.choice(GARBAGE))
        json.dumps(as_dict(survey(root)))
        path.write_bytes(kept[path])
    for _ in range(20):
        for path in chance.sample(files, k=len(files) // 2):
            path.write_bytes(chance.choice(GARBAGE))
        assert survey(root).places
        output = told(root)
        assert "Place for a pool:" in output
        assert "\x1b" not in output


def test_a_name_with_a_zero_byte_in_it_is_no_file(tmp_path: Path) -> None:
    """The cgroup's own path names the next file to read."""
    root = plant_machine("container", tmp_path)
    (root / "proc/self/cgroup").write_bytes(b"0::/a\0b\n")
    assert survey(root).machine.memory.cgroup_limit_bytes == 8 * GIB


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_gone_raise_nothing(name: str, tmp_path: Path) -> None:
    """Masked one by one, by a circle of links that nobody can read, then all of them."""
    root = plant_machine(name, tmp_path)
    links = [path for path in root.rglob("*") if path.is_symlink()]
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in (*links, *files):
        path.unlink()
        path.symlink_to(path.name)
        assert survey(root).places
    assert [place.kind for place in survey(root).places] == ["anonymous"]


def test_this_machine() -> None:
    found = survey()
    assert found.machine.nodes == () or found.numa.nodes
    assert found.places[-1].capacity
    assert all(isinstance(place, Place) for place in found.places)
