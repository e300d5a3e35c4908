"""One guest: a QEMU process in one of four shapes, its log, and its end.

Far memory is a NUMA node without CPUs at 4 GiB, and the firmware calls it Soft Reserved: so Linux
makes /dev/dax0.0 of it, as of CXL memory that a BIOS has set up. Nothing is emulated by traps
there, so it is as fast as the guest's other memory. No KVM: not every machine lends it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.qemu.image import QEMU, Image

OWN_BYTES = 768 << 20  # and no more: the firmware's tables at its end must not be shared
FAR_AT = 4 << 30
NODE_BYTES = 512 << 20  # of each node with a CPU, in `two_nodes`
FAR_BYTES = 256 << 20
PMEM_BYTES = 128 << 20
SECOND_BYTES = 128 << 20  # of a second far memory, behind the persistent one
CHECKOUT = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """A guest did not do what it was to do; the text says which, and its last lines."""


@dataclass(frozen=True)
class Shape:
    """What a guest has: QEMU's arguments, and words for the kernel's command line."""

    arguments: tuple[str, ...]
    kernel_words: str


def shared_memory(path: str, memory_bytes: int) -> Shape:
    """One node with two CPUs; far memory in the file at `path`, which all guests map."""
    text = f"""
        -M q35,hmat=on,max-ram-below-4g={OWN_BYTES >> 20}M
        -m {(OWN_BYTES + memory_bytes) >> 20}M,slots=4,maxmem=8G
        -object memory-backend-ram,id=own,size={OWN_BYTES}
        -numa node,nodeid=0,memdev=own,cpus=0-1 -numa node,nodeid=1,memdev=far,initiator=0
        -numa dist,src=0,dst=1,val=20
        {_hmat(0, 0, 80, 99)} {_hmat(0, 1, 250, 30)}
    """
    far = f"memory-backend-file,id=far,share=on,mem-path={path},size={memory_bytes}"
    return Shape((*text.split(), "-object", far), _soft_reserved(memory_bytes))


def own_memory() -> Shape:
    """Two CPUs and memory that nobody else sees."""
    return Shape(("-M", "q35", "-m", f"{OWN_BYTES >> 20}M"), "")


def networked(shape: Shape, folder: Path, name: str, peer: str) -> Shape:
    """The same with a network card, whose cable ends at the guest `peer`: datagrams between two
    sockets, so either end may die and come back. Soft RDMA takes a peer with its own card's address
    for itself."""
    ends = (("local", name), ("remote", peer))
    cable = "".join(f",{end}.type=unix,{end}.path={folder / whose}.net" for end, whose in ends)
    card = f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:{ord(name[0]):02x}"
    network = ("-netdev", f"dgram,id=net{cable}", "-device", card)
    return Shape((*shape.arguments, *network), shape.kernel_words)


def two_nodes() -> Shape:
    """Nodes 0 and 1 with a CPU each, far memory as nodes 2 and 4, persistent memory (legacy) as
    node 3."""
    text = f"""
        -M q35,hmat=on,max-ram-below-4g={2 * NODE_BYTES >> 20}M
        -m {(2 * NODE_BYTES + FAR_BYTES + PMEM_BYTES + SECOND_BYTES) >> 20}M,slots=4,maxmem=8G
        -object memory-backend-ram,id=m0,size={NODE_BYTES}
        -object memory-backend-ram,id=m1,size={NODE_BYTES}
        -object memory-backend-ram,id=m2,size={FAR_BYTES}
        -object memory-backend-ram,id=m3,size={PMEM_BYTES}
        -object memory-backend-ram,id=m4,size={SECOND_BYTES}
        -numa node,nodeid=0,memdev=m0,cpus=0 -numa node,nodeid=1,memdev=m1,cpus=1
        -numa node,nodeid=2,memdev=m2,initiator=0 -numa node,nodeid=3,memdev=m3,initiator=0
        -numa node,nodeid=4,memdev=m4,initiator=0
        -numa dist,src=0,dst=1,val=21 -numa dist,src=0,dst=2,val=24 -numa dist,src=1,dst=2,val=34
        -numa dist,src=0,dst=3,val=24 -numa dist,src=1,dst=3,val=34 -numa dist,src=2,dst=3,val=40
        -numa dist,src=0,dst=4,val=24 -numa dist,src=1,dst=4,val=34 -numa dist,src=2,dst=4,val=40
        -numa dist,src=3,dst=4,val=40
        {_hmat(0, 0, 90, 99)} {_hmat(1, 1, 90, 99)} {_hmat(0, 1, 150, 50)} {_hmat(1, 0, 150, 50)}
        {_hmat(0, 2, 250, 30)} {_hmat(1, 2, 320, 20)} {_hmat(0, 3, 250, 30)} {_hmat(1, 3, 320, 20)}
        {_hmat(0, 4, 250, 30)} {_hmat(1, 4, 320, 20)}
    """
    pmem = f"memmap={PMEM_BYTES >> 20}M!{FAR_AT + FAR_BYTES:#x}"
    second = _soft_reserved(SECOND_BYTES, FAR_AT + FAR_BYTES + PMEM_BYTES)
    return Shape(tuple(text.split()), f"{_soft_reserved(FAR_BYTES)} {pmem} {second}")


def fake_nodes() -> Shape:
    """One node of which the kernel makes two, as on any server without far memory."""
    return Shape(("-M", "q35", "-m", f"{2 * NODE_BYTES >> 20}M"), "numa=fake=2")


def _soft_reserved(memory_bytes: int, at: int = FAR_AT) -> str:
    """Ordinary RAM (1) becomes Soft Reserved (0xefffffff) there."""
    return f"memmap={memory_bytes >> 20}M%{at:#x}-1+0xefffffff"


def _hmat(initiator: int, target: int, latency_ns: int, bandwidth_gb_per_s: int) -> str:
    where = f"-numa hmat-lb,initiator={initiator},target={target},hierarchy=memory"
    return (
        f"{where},data-type=access-latency,latency={latency_ns} "
        f"{where},data-type=access-bandwidth,bandwidth={bandwidth_gb_per_s}G"
    )


class Guest:
    """A guest that runs a module of `guest/` with its name as argument.

    folder: shared with the guests as /shared.
    """

    def __init__(self, image: Image, folder: Path, name: str, module: str, shape: Shape):
        self.name = name
        self._killed = False
        self._folder = folder
        self._log = folder / f"{name}.log"
        self._status = folder / f"{name}.status"
        self._status.unlink(missing_ok=True)
        (folder / f"{name}.sh").write_text(_start_script(image, name, module))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["nice", QEMU, *_arguments(image, folder, name, shape)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """Kill it at once, whatever it was doing, like a power failure."""
        self._killed = True
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """All of its CPUs stand still when this returns."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def has_ended(self) -> bool:
        """Whether it has powered off, or was killed; raises Failed when its script ended badly."""
        if self._process.poll() is None:
            return False
        status = self._status.read_text().strip() if self._status.exists() else "none"
        if status != "0" and not self._killed:
            raise Failed(f"guest {self.name}: exit status {status}\n{self.last_lines()}")
        return True

    def last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").replace("\r", "").splitlines()
        return "\n".join(f"  {self.name}| {line}" for line in lines[-40:])


def _start_script(image: Image, name: str, module: str) -> str:
    """What the guest's init runs: the Python that runs here, with the files that it would find."""
    libraries = ":".join(sorted({str(p.parent) for p in image.tools.resolve().rglob("*.so.*")}))
    daxctl = next(image.tools.resolve().rglob("bin/daxctl"))
    path = [str(CHECKOUT), *os.environ.get("PYTHONPATH", "").split(":")]
    settings = {
        "PATH": f"/guest/bin:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": ":".join(str(Path(p).resolve()) for p in path if p),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": "/run",
        "TERM": "dumb",
    }
    settings["CXLKV_GUEST_RDMA"] = str(image.rdma.resolve())
    lines = [
        *(f"export {key}={shlex.quote(value)}" for key, value in settings.items()),
        "mkdir -p /guest/bin",
        "cat >/guest/bin/daxctl <<'END'",
        "#!/bin/sh",
        f'LD_LIBRARY_PATH={shlex.quote(libraries)} exec {shlex.quote(str(daxctl))} "$@"',
        "END",
        "chmod +x /guest/bin/daxctl",
        f"cd {shlex.quote(str(CHECKOUT))}",
        f"exec {shlex.quote(sys.executable)} -m tests.qemu.guest.{module} {name}",
    ]
    return "\n".join(lines) + "\n"


def _arguments(image: Image, folder: Path, name: str, shape: Shape) -> list[str]:
    kernel_line = (
        f"console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr audit=0 tsc=reliable "
        f"no_timer_check {shape.kernel_words} cxlkv.guest={name}"
    )
    text = """
        -nodefaults -no-user-config -no-reboot -display none -serial stdio
        -accel tcg,thread=multi -cpu max,-hypervisor -smp 2
        -device virtio-9p-pci,fsdev=host,mount_tag=host
        -device virtio-9p-pci,fsdev=shared,mount_tag=shared
    """
    escaped = str(folder).replace(",", ",,")
    shared = f"local,id=shared,path={escaped},security_model=none"
    return [
        *shape.arguments,
        *text.split(),
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-fsdev", shared),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", kernel_line),
    ]
