"""One guest: a QEMU process in the hmem shape, its log, and its end.

The shared memory is NUMA node 1 of each guest, at 4 GiB, and the firmware calls it Soft Reserved:
so Linux makes /dev/dax0.0 of it, as of CXL memory that a BIOS has set up. Nothing is emulated by
traps there, so it is as fast as the guest's other memory. No KVM: not every machine lends it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from cxlkv.emulation.qemu.image import QEMU, Image

OWN_BYTES = 768 << 20  # and no more: the firmware's tables at its end must not be shared
CHECKOUT = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """A guest did not do what it was to do; the text says which, and its last lines."""


class Guest:
    """A guest that runs a module of `guest/` with its name as argument.

    memory: path of the file behind the shared memory, which all guests map. folder: shared with
    the guests as /shared.
    """

    def __init__(
        self, image: Image, folder: Path, name: str, module: str, memory: str, memory_bytes: int
    ):
        self.name = name
        self._killed = False
        self._folder = folder
        self._log = folder / f"{name}.log"
        self._status = folder / f"{name}.status"
        self._status.unlink(missing_ok=True)
        (folder / f"{name}.sh").write_text(_start_script(image, name, module))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["nice", QEMU, *_arguments(image, folder, name, memory, memory_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """As a power failure: at once, whatever it was doing."""
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
    lines = [
        *(f"export {key}={shlex.quote(value)}" for key, value in settings.items()),
        "mkdir -p /guest/bin",
        "cat >/guest/bin/daxctl <<'END'",
        "#!/bin/sh",
        f'LD_LIBRARY_PATH={shlex.quote(libraries)} exec {shlex.quote(str(daxctl))} "$@"',
        "END",
        "chmod +x /guest/bin/daxctl",
        f"cd {shlex.quote(str(CHECKOUT))}",
        f"exec {shlex.quote(sys.executable)} -m cxlkv.emulation.qemu.guest.{module} {name}",
    ]
    return "\n".join(lines) + "\n"


def _arguments(image: Image, folder: Path, name: str, memory: str, memory_bytes: int) -> list[str]:
    # "%0x100000000-1+0xefffffff": ordinary RAM (1) becomes Soft Reserved (0xefffffff) there.
    kernel_line = (
        f"console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr audit=0 tsc=reliable "
        f"no_timer_check memmap={memory_bytes >> 20}M%0x100000000-1+0xefffffff "
        f"cxlkv.guest={name}"
    )
    text = f"""
        -nodefaults -no-user-config -no-reboot -display none -serial stdio
        -M q35,hmat=on,max-ram-below-4g={OWN_BYTES >> 20}M
        -accel tcg,thread=multi -cpu max,-hypervisor -smp 2
        -m {(OWN_BYTES + memory_bytes) >> 20}M,slots=4,maxmem=8G
        -object memory-backend-ram,id=own,size={OWN_BYTES}
        -numa node,nodeid=0,memdev=own,cpus=0-1 -numa node,nodeid=1,memdev=far,initiator=0
        -numa dist,src=0,dst=1,val=20
        -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-latency,latency=80
        -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=99G
        -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=250
        -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=30G
        -device virtio-9p-pci,fsdev=host,mount_tag=host
        -device virtio-9p-pci,fsdev=shared,mount_tag=shared
    """
    escaped = str(folder).replace(",", ",,")
    shared = f"local,id=shared,path={escaped},security_model=none"
    return [
        *text.split(),
        *("-object", f"memory-backend-file,id=far,share=on,mem-path={memory},size={memory_bytes}"),
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-fsdev", shared),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", kernel_line),
    ]
