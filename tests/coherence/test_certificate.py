"""A certificate gives mode fast where all of it holds, and strict with the reason otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from cxlkv.errors import BadArgumentError, CorruptError
from cxlkv.machine import certificate
from cxlkv.machine.certificate import Certificate, certified_mode


def made_for(region: Path) -> Certificate:
    """What a run of two hosts over this region would give."""
    machine = certificate.this_machine()
    return {
        "label": "two hosts",
        "when": "2026-01-01T00:00:00+00:00",
        "commit": "0" * 40,
        "hosts": 2,
        "role": "a",
        "flush": "clwb",
        "machine": machine,
        "other_machine": machine,
        "regions": [
            {"path": str(region), "inode": 1, "identity": certificate.region_identity(region)}
        ],
        "tests": [
            {
                "test": test,
                "first": 0,
                "second": 0,
                "rounds": rounds,
                "raced": 1,
                "violations": 0,
                "first_violation": "",
            }
            for test, rounds in certificate.ROUNDS_NEEDED.items()
        ],
        "rounds": sum(certificate.ROUNDS_NEEDED.values()),
        "violations": 0,
    }


@pytest.fixture
def region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "pool.cxlkv"


def place(region: Path) -> Path:
    return certificate.default_path(certificate.region_identity(region))


def test_a_certificate_that_holds_gives_fast(region: Path) -> None:
    certificate.write(place(region), made_for(region))
    assert certified_mode(region).mode == "fast"
    assert str(place(region)) in certified_mode(region).reason
    region.write_bytes(b"made since")
    assert certified_mode(region).mode == "fast"
    given = region.parent / "elsewhere.json"
    assert certified_mode(region, given).mode == "strict"
    certificate.write(given, made_for(region))
    assert certified_mode(region, given).mode == "fast"


def change(**fields: object) -> Callable[[dict[str, object]], None]:
    return lambda content: content.update(fields)


def of_machine(**fields: object) -> Callable[[dict[str, object]], None]:
    return change(machine={**certificate.this_machine(), **fields})


def in_test(number: int, **fields: object) -> Callable[[dict[str, object]], None]:
    return lambda content: cast(list[dict[str, object]], content["tests"])[number].update(fields)


def add_region(content: dict[str, object]) -> None:
    content["regions"] = 2 * cast(list[object], content["regions"])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (of_machine(id="another"), "another machine: id"),
        (of_machine(cpu="another"), "another machine: cpu"),
        (of_machine(flushes=["clflush"]), "another machine: flushes"),
        (change(regions=[]), "another region"),
        (change(regions=[{"identity": {"kind": "dax"}}]), "another region"),
        (change(violations=3), "3 violations"),
        (in_test(2, violations=1), "violations"),
        (in_test(1, rounds=9_999), "9999 rounds of store buffering"),
        (change(tests=[]), "0 rounds of message passing"),
        (add_region, "0 rounds of message passing, regions 0 and 1"),
        (change(hosts=1), "1 host, 2 are wanted"),
        (change(version=0), "version 0"),
        (change(what="a shopping list"), "no cxlkv litmus certificate"),
        (change(tests=5), "shape"),
        (change(machine="this one"), "shape"),
        (change(hosts="two"), "shape"),
    ],
)
def test_what_does_not_hold_is_strict(
    region: Path, spoil: Callable[[dict[str, object]], None], reason: str
) -> None:
    """Written with a right hash: only what it says is wrong."""
    content: dict[str, object] = {
        "what": certificate.WHAT,
        "version": certificate.VERSION,
        **json.loads(json.dumps(made_for(region))),
    }
    spoil(content)
    content["sha256"] = certificate._hash(content)
    place(region).parent.mkdir(parents=True)
    place(region).write_text(json.dumps(content))
    found = certified_mode(region)
    assert found.mode == "strict"
    assert reason in found.reason
    assert "cxlkv bench litmus --region" in found.reason


def test_one_host_is_enough_when_one_is_asked_for(region: Path) -> None:
    one = made_for(region)
    one["hosts"] = 1
    certificate.write(place(region), one)
    assert certified_mode(region).mode == "strict"
    assert certified_mode(region, hosts=1).mode == "fast"


def test_a_missing_or_damaged_file_is_strict(region: Path) -> None:
    assert certified_mode(region).mode == "strict"
    assert "there is none" in certified_mode(region).reason
    certificate.write(place(region), made_for(region))
    text = place(region).read_text()
    changed = text.replace('"raced": 1', '"raced": 2')
    assert changed != text
    for damaged in (changed, "", "[]", "\0" * 100, *(text[:size] for size in range(0, 1500, 37))):
        place(region).write_text(damaged)
        assert certified_mode(region).mode == "strict"
    place(region).write_text(changed)
    assert "changed since" in certified_mode(region).reason
    with pytest.raises(CorruptError, match="changed since"):
        certificate.read(place(region))
    place(region).unlink()
    place(region).mkdir()
    assert certified_mode(region).mode == "strict"


def test_the_state_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for state in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        found = certificate.default_path({"kind": "x"})
        assert found.parent == tmp_path / ".local/state/cxlkv"
    assert found != certificate.default_path({"kind": "y"})


def test_files_of_one_file_system_are_one_memory(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    identity = certificate.region_identity(there)
    assert identity == certificate.region_identity(tmp_path / "not" / "yet")
    assert identity != certificate.region_identity("/proc/self/status")


def test_a_dax_device_is_named_by_its_place(tmp_path: Path) -> None:
    """/dev/null stands for the node; what the kernel says about its number is a made tree."""
    device = tmp_path / "sys/devices/ACPI0017:00/root0/decoder0.0/region0/dax_region0/dax0.0"
    device.mkdir(parents=True)
    (device / "size").write_text("268435456\n")
    bus = tmp_path / "sys/bus/dax"
    bus.mkdir(parents=True)
    (device / "subsystem").symlink_to(bus)
    number = os.stat("/dev/null").st_rdev
    link = tmp_path / f"sys/dev/char/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)
    found = certificate.region_identity("/dev/null", tmp_path)
    assert found == {"kind": "dax", "sysfs": str(device.resolve()), "bytes": "268435456"}
    (device / "subsystem").unlink()
    with pytest.raises(BadArgumentError, match="no dax device"):
        certificate.region_identity("/dev/null", tmp_path)
    assert "no dax device" in certified_mode("/dev/null").reason


@pytest.mark.parametrize(
    ("cpuinfo", "cpu", "flushes"),
    [
        ("model name\t: A CPU\nflags\t\t: fpu clflush clwb\n", "A CPU", ["clflush", "clwb"]),
        (
            "Features\t: fp dcpop\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
            "implementer 0x41 part 0xd4f",
            ["dcpop"],
        ),
    ],
)
def test_a_machine_is_named_on_both_architectures(
    tmp_path: Path, cpuinfo: str, cpu: str, flushes: list[str]
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "etc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    (tmp_path / "etc/machine-id").write_text("0123\n")
    found = certificate.this_machine(tmp_path)
    assert (found["cpu"], found["flushes"]) == (cpu, flushes)
    assert "0123" not in found["id"]
    (tmp_path / "etc/machine-id").write_text("4567\n")
    assert certificate.this_machine(tmp_path)["id"] != found["id"]
