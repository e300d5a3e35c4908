"""What a guest boots: QEMU, a kernel with its modules, busybox and daxctl, fetched once by apt.

No disk image is made: the guest's files are the host's own, over 9p, and what it writes stays in
its memory. All that is fetched lies in one folder, which may be removed at any time.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

QEMU = "qemu-system-x86_64"
QEMU_MAJOR_MIN = 10  # what was tried; 7.2 in Debian 12 is too old for these kernels
# In the order of loading, after what they need.
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "dax_hmem", "device_dax")
# When a scenario asks for them: kmem would take the device at once.
MODULES_LATER = {
    "kmem": ("kmem",),
    "fsdax": ("crc32c_generic", "nd_e820", "nd_pmem", "ext4"),
    "rdma": ("virtio_net", "crc32_generic", "rdma_rxe", "ib_uverbs"),
}
# daxctl with the libraries that it needs beyond libc: not installed, only unpacked.
TOOLS = (
    "busybox-static daxctl libdaxctl1 libndctl6 libiniparser1 libjson-c5 libkmod2 libuuid1"
).split()
# RDMA's userland and `rdma`, for the Python of this release; not from backports, whose pyverbs and
# libibverbs need not be of one release.
RDMA = (
    "libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200 librdmacm1 python3-pyverbs "
    "iproute2 libmnl0 libbsd0 libcap2 libmd0"
).split()
BACKPORTS = {"bookworm": "bookworm-backports"}  # where a release's own QEMU and kernel are too old
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
INIT = Path(__file__).parent / "guest/init.sh"


class Missing(Exception):
    """What the guests need cannot be had here; the text says what and why."""


@dataclass(frozen=True)
class Image:
    """kernel and initrd to boot; tools, rdma: the folders that these were unpacked into."""

    kernel: Path
    initrd: Path
    tools: Path
    rdma: Path


def prepare(folder: Path) -> Image:
    """The image in `folder`, made if it is not there; raises Missing."""
    if not _qemu_is_there() and os.geteuid() != 0:
        raise Missing(f"{QEMU} {QEMU_MAJOR_MIN} or newer is missing; installing it needs root")
    folder.mkdir(parents=True, exist_ok=True)
    image = Image(folder / "vmlinuz", folder / "initrd.gz", folder / "tools", folder / "rdma")
    lists = [folder / "modules" / name for name in ("order", *MODULES_LATER)]
    unpacked = image.kernel.exists() and all(path.exists() for path in lists)
    folders = image.tools.exists() and image.rdma.exists()
    if not unpacked or not folders or not _qemu_is_there():
        apt = _Apt(folder / "apt")
        if not _qemu_is_there():
            apt.install("qemu-system-x86")
        if not image.tools.exists():
            _unpack(apt, TOOLS, image.tools, newer=True)
        if not image.rdma.exists():
            _unpack(apt, RDMA, image.rdma, newer=False)
        if not unpacked:
            _unpack_kernel(apt, folder)
    _write_initrd(image, folder / "modules")
    return image


def _qemu_is_there() -> bool:
    if shutil.which(QEMU) is None:
        return False
    said = subprocess.run([QEMU, "--version"], check=True, stdout=subprocess.PIPE, text=True)
    version = re.search(r"version (\d+)", said.stdout)
    return version is not None and int(version[1]) >= QEMU_MAJOR_MIN


class _Apt:
    """Debian's packages, by lists of our own: the machine's sources stay as they are."""

    def __init__(self, folder: Path):
        release = dict(
            line.split("=", 1)
            for line in Path("/etc/os-release").read_text().splitlines()
            if "=" in line
        )
        suite = release.get("VERSION_CODENAME", "").strip('"')
        if release.get("ID") != "debian" or not suite or shutil.which("apt-get") is None:
            raise Missing(
                f"Debian's apt is what fetches {QEMU} {QEMU_MAJOR_MIN} and a kernel; "
                "this is another system"
            )
        (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
        mirror = _mirror()
        backports = BACKPORTS.get(suite)
        suites = [(mirror, suite), (mirror, f"{suite}-updates")]
        suites.append((re.sub(r"/debian/?$", "/debian-security", mirror), f"{suite}-security"))
        if backports:
            suites.append((mirror, backports))
        sources = folder / "sources.list"
        sources.write_text(
            "".join(f"deb [signed-by={KEYRING}] {url} {name} main\n" for url, name in suites)
        )
        self._folder = folder.resolve()
        self._options = [f"-oDir::Etc::sourcelist={sources.resolve()}"]
        self._options += ["-oDir::Etc::sourceparts=/dev/null", "-oAPT::Sandbox::User=root"]
        self._options += [f"-oDir::State::lists={self._folder}/lists"]
        self._options += [f"-oDir::Cache={self._folder}", "-oAPT::Get::List-Cleanup=0"]
        self._newer = ["-t", backports] if backports else []
        self._run("apt-get", "update", "-q")

    def _run(self, *command: str, cwd: Path | None = None) -> str:
        tool, *rest = command
        done = subprocess.run(
            [tool, *self._options, *rest],
            cwd=cwd,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0 or "Failed to fetch" in done.stdout:
            lines = done.stdout.splitlines()
            why = [line for line in lines if line.startswith(("E:", "W: Failed"))] or lines[-1:]
            raise Missing(f"{' '.join(command)} failed: {' '.join(why[:1])}")
        return done.stdout

    def install(self, package: str) -> None:
        print(f"installing {package}", flush=True)
        self._run(
            "apt-get", "install", "-y", "-q", "--no-install-recommends", *self._newer, package
        )

    def unpack(self, package: str, into: Path, newer: bool = True) -> None:
        """Download a package and unpack it into a folder; nothing is installed."""
        print(f"fetching {package}", flush=True)
        fetched = self._folder / "fetched"
        shutil.rmtree(fetched, ignore_errors=True)
        fetched.mkdir()
        options = self._newer if newer else []
        self._run("apt-get", "download", "-q", *options, package, cwd=fetched)
        for file in fetched.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", file, into], check=True)
        shutil.rmtree(fetched)

    def kernel_package(self) -> str:
        text = self._run("apt-cache", "depends", *self._newer, "linux-image-amd64")
        found = re.search(r"Depends: (linux-image-\S+)", text)
        if found is None:
            raise Missing("linux-image-amd64 names no kernel")
        return found[1]


def _mirror() -> str:
    """This machine's own Debian mirror."""
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    text = sources.read_text() if sources.exists() else ""
    found = re.search(r"^URIs: *(\S+)", text, re.M)
    return found[1] if found else "http://deb.debian.org/debian"


def _unpack(apt: _Apt, packages: list[str], into: Path, newer: bool) -> None:
    made = into.with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    for package in packages:
        apt.unpack(package, made, newer)
    made.rename(into)


def _unpack_kernel(apt: _Apt, folder: Path) -> None:
    """Keeps the kernel and the few modules that a guest loads, plain, as insmod wants them."""
    whole, modules = folder / "kernel", folder / "modules"
    for old in (whole, modules):
        shutil.rmtree(old, ignore_errors=True)
    apt.unpack(apt.kernel_package(), whole)
    found = {re.sub(r"\.ko.*", "", p.name).replace("-", "_"): p for p in whole.rglob("*.ko*")}
    modules.mkdir()
    order = _load(MODULES, found, modules, [])
    for purpose, names in MODULES_LATER.items():
        later = _load(names, found, modules, list(order))[len(order) :]
        (modules / purpose).write_text("".join(f"{name}\n" for name in later))
    next(whole.glob("boot/vmlinuz-*")).rename(folder / "vmlinuz")
    (modules / "order").write_text("".join(f"{name}\n" for name in order))
    shutil.rmtree(whole)


def _load(
    names: tuple[str, ...], found: dict[str, Path], modules: Path, order: list[str]
) -> list[str]:
    """Copies modules and what they need; `order` grows so that each comes after its needs."""
    for name in names:
        if name not in found or f"{name}.ko" in order:
            continue  # built into the kernel, or there already
        packed = found[name].read_bytes()
        module = lzma.decompress(packed) if found[name].suffix == ".xz" else packed
        needs = re.search(rb"\0depends=([^\0]*)\0", module)
        if needs and needs[1]:
            wanted = needs[1].decode().replace("-", "_").split(",")
            _load(tuple(wanted), found, modules, order)
        (modules / f"{name}.ko").write_bytes(module)
        order.append(f"{name}.ko")
    return order


def _write_initrd(image: Image, modules: Path) -> None:
    files = {f"modules/{path.name}": path.read_bytes() for path in sorted(modules.iterdir())}
    files["busybox"] = next(image.tools.rglob("bin/busybox")).read_bytes()
    files["init"] = INIT.read_bytes()
    archive = b"".join(
        [
            _cpio_entry("modules", b"", stat.S_IFDIR | 0o755),
            *(_cpio_entry(name, data, stat.S_IFREG | 0o755) for name, data in files.items()),
            _cpio_entry("TRAILER!!!", b"", 0),
        ]
    )
    image.initrd.write_bytes(gzip.compress(archive, 1))


def _cpio_entry(name: str, data: bytes, mode: int) -> bytes:
    """One file of an archive in the kernel's "newc" format: 13 hexadecimal numbers, name, bytes."""
    encoded = name.encode() + b"\0"
    numbers = [0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0]
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + encoded
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)
