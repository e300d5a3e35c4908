"""What guests of scenario rdma share: soft RDMA over their network card, a server, a client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cxlkv import CXLPool, KVLayout
from cxlkv.transport import Remote
from tests.qemu.guest import steps
from tests.qemu.guest.steps import DEVICE, Skip, command, load, wait_until

RXE = "rxe0"
ADDRESSES = {"suite": "10.77.0.9", "a": "10.77.0.10", "b": "10.77.0.11"}
PORT = 7777
SITE = "/run/site"
SECRET = Path("/run/secret")
SECRET_TEXT = b"both guests know this secret"
DEADLINE_S = 20.0


def bring_up(name: str) -> None:
    """Soft RDMA over the guest's network card, and pyverbs where Python finds it."""
    unpacked = os.environ["CXLKV_GUEST_RDMA"]
    verbs = f"{unpacked}/usr/lib/python3/dist-packages/pyverbs"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not Path(f"{verbs}/qp{suffix}").exists():
        raise Skip(f"the distribution's pyverbs is not built for this Python ({suffix})")
    load("rdma")
    folder = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
    command(f"cp -r {unpacked}{folder}/. {folder}/ && cp -r {unpacked}/etc/. /etc/")
    command(f"mkdir -p {SITE} && ln -sfn {verbs} {SITE}/pyverbs")
    sys.path.append(SITE)
    os.environ["PYTHONPATH"] += f":{SITE}"
    command(f"/guest/busybox ip addr add {ADDRESSES[name]}/24 dev {card()}")
    command("/guest/busybox ip link set lo up")
    command(f"/guest/busybox ip link set {card()} mtu 4500 up")
    command(f"{unpacked}/usr/bin/rdma link add {RXE} type rxe netdev {card()}")
    SECRET.write_bytes(SECRET_TEXT)
    SECRET.chmod(0o600)


def card() -> str:
    """The network card's name."""
    folder = Path("/sys/class/net")
    return wait_until(
        lambda: next((each.name for each in folder.iterdir() if each.name != "lo"), ""),
        "network card",
    )


@contextmanager
def server() -> Iterator[subprocess.Popen[str]]:
    """`cxlkv serve` of the device, as its user would start it."""
    address = f"{ADDRESSES['a']}:{PORT}"
    words = ["serve", DEVICE, "--listen", address, "--secret", str(SECRET), "--device", RXE]
    line = [sys.executable, "-m", "cxlkv.ops.cli", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        print(said, end="", flush=True)
        assert said.startswith("serves"), said
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> None:
    """End the process as its user would."""
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


@contextmanager
def connected(device: str | None = RXE) -> Iterator[Remote]:
    """From b to a; without a device by TCP alone."""
    address = f"{ADDRESSES['a']}:{PORT}"
    with Remote(address, SECRET_TEXT, device=device, deadline_s=DEADLINE_S) as remote:
        yield remote


@contextmanager
def near_pool(layout: KVLayout) -> Iterator[CXLPool]:
    with CXLPool.create("anonymous:", layout=layout, capacity="32MiB", threads=2) as pool:
        yield pool
        check(pool)


def check(pool: CXLPool) -> None:
    steps.check(pool)
    assert pool.stats()["pages_held"] == 0, pool.stats()
