"""Mooncake's store: a segment of this process, a master on loopback, copies without a network."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from .serving import UNIT_BYTES, Bytes, Objects, Store, Team, Wanted, mapped, must

LOOPBACK = "127.0.0.1"
PACKAGE = "mooncake-transfer-engine-non-cuda"
START_S = 20.0
Lists = tuple[list[str], list[int], list[int]]
"""Names, addresses and sizes of a call's objects."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class Client:
    """With its segment and its master: memory of this process, or a mounted file."""

    def __init__(
        self, module: ModuleType, given: Objects, payload: Bytes, out: Bytes, file: Path | None
    ) -> None:
        self.given, self.payload, self.out, self.file = given, payload, out, file
        port = free_port()
        self.master = start_master(port)
        self.store = module.MooncakeDistributedStore()
        # Twice the payload fits: the master evicts what makes a segment nearly full.
        segment = (5 * given.bytes // 2 + (64 << 20)) >> 24 << 24
        code = self.store.setup(
            f"{LOOPBACK}:{free_port()}",
            "P2PHANDSHAKE",
            segment if file is None else 0,
            64 << 20,
            "tcp",
            "",
            f"{LOOPBACK}:{port}",
        )
        must(code == 0, f"setup gave {code}")
        if file is not None:
            with file.open("wb") as made:
                made.truncate(segment)
            answer = self.store.mount_segment(str(file), segment, 0, "tcp")
            must(answer.get("ret", 0) == 0, f"mount_segment gave {answer}")
        for array in (payload, out):
            code = self.store.register_buffer(array.ctypes.data, array.nbytes)
            must(code == 0, f"register_buffer gave {code}")
        self.names = [f"object-{index}" for index in range(given.count)]
        team = Team(given.threads)
        calls = [self.lists(call, payload) for call in given.calls()]
        self.first_s = team.each(self.put_batch, calls)
        team.close()
        # Once with other names, too: so all of the segment that may be used is touched.
        for names, addresses, sizes in calls:
            self.put_batch(([f"other-{name}" for name in names], addresses, sizes))

    def empty(self) -> None:
        self.store.remove_all(force=True)

    def lists(self, call: list[int], array: Bytes) -> Lists:
        size, base = self.given.object_bytes, array.ctypes.data
        names = [self.names[index] for index in call]
        return names, [base + index * size for index in call], [size] * len(call)

    def put_batch(self, call: Lists) -> None:
        codes = self.store.batch_put_from(*call)
        must(not any(codes), f"batch_put_from gave {codes}")

    def put_each(self, call: Lists) -> None:
        for one in zip(*call, strict=True):
            code = self.store.put_from(*one)
            must(code == 0, f"put_from gave {code}")

    def get_batch(self, call: Lists) -> None:
        codes = self.store.batch_get_into(*call)
        must(codes == call[2], f"batch_get_into gave {codes}")

    def get_each(self, call: Lists) -> None:
        for name, address, size in zip(*call, strict=True):
            code = self.store.get_into(name, address, size)
            must(code == size, f"get_into gave {code}")

    def ranges(self, wanted: Wanted, at_once: bool) -> tuple[float, int]:
        """The lists that it takes are made before the clock starts."""
        pieces: list[dict[int, tuple[list[int], list[int]]]] = []
        done = 0
        for layer, pages in enumerate(wanted):
            if not at_once or not pieces:
                pieces.append({})
            for page in pages:
                to, start = pieces[-1].setdefault(page, ([], []))
                to.append(done * UNIT_BYTES)
                start.append(layer * UNIT_BYTES)
                done += 1
        base = self.out.ctypes.data
        calls = [
            (
                [base],
                [[self.names[page] for page in call]],
                [[to for to, _ in call.values()]],
                [[start for _, start in call.values()]],
                [[[UNIT_BYTES] * len(to) for to, _ in call.values()]],
            )
            for call in pieces
        ]
        began = time.perf_counter()
        codes = [self.store.get_into_ranges(*call) for call in calls]
        seconds = time.perf_counter() - began
        flat = [code for call in codes for buffer in call for ranges in buffer for code in ranges]
        must(all(code == UNIT_BYTES for code in flat), f"get_into_ranges gave {flat[:8]}")
        return seconds, done * UNIT_BYTES

    def close(self) -> None:
        self.empty()
        self.store.close()
        self.master.terminate()
        self.master.wait()
        if self.file is not None:
            self.file.unlink()


def start_master(port: int, **more: int) -> subprocess.Popen[bytes]:
    """Returns when it listens. more: options of it by name, as client_ttl=2."""
    program = Path(sys.executable).parent / "mooncake_master"
    options = {"rpc_address": LOOPBACK, "rpc_port": port, "metrics_port": free_port(), **more}
    command = [str(program), *(f"-{name}={value}" for name, value in options.items())]
    master = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    until = time.monotonic() + START_S
    while time.monotonic() < until and master.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) == 0:
                return master
        time.sleep(0.05)
    master.kill()
    raise RuntimeError(f"mooncake_master does not listen (exit code {master.wait()})")


class Mooncake(Store):
    """batch: batch_put_from and batch_get_into, and get_into_ranges of all layers in one call.
    single: put_from and get_into, and get_into_ranges once a layer, as decoding needs it. Both in a
    segment of the process's own memory; file_batch in a mounted file, which others may share."""

    forms: ClassVar = {
        "batch": ("first", "put", "get", "ranges"),
        "single": ("put", "get", "ranges"),
        "file_batch": ("first", "put", "get", "ranges"),
    }

    def __init__(self) -> None:
        os.environ["MC_STORE_MEMCPY"] = "1"
        os.environ["MC_TCP_BIND_ADDRESS"] = LOOPBACK
        self.version = metadata.version(PACKAGE)
        self.module = importlib.import_module("mooncake.store")

    def open_objects(self, given: Objects) -> None:
        self.given, self.team = given, Team(given.threads)
        payload, out = mapped(given.payload), mapped(given.out, writable=True)
        own = Client(self.module, given, payload, out, None)
        file = Client(self.module, given, payload, out, Path(given.folder) / "mooncake")
        self.stores = {"batch": own, "single": own, "file_batch": file}

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[float, int]:
        store, single = self.stores[form], form == "single"
        if case == "first":
            return store.first_s, self.given.bytes
        if case == "ranges":
            return store.ranges(wanted, at_once=not single)
        if case == "put":
            store.empty()
            put = store.put_each if single else store.put_batch
            calls = [store.lists(call, store.payload) for call in self.given.calls()]
            return self.team.each(put, calls), self.given.bytes
        get = store.get_each if single else store.get_batch
        calls = [store.lists(call, store.out) for call in self.given.calls(self.given.order())]
        return self.team.each(get, calls), self.given.bytes

    def close(self) -> None:
        self.team.close()
        for store in set(self.stores.values()):
            store.close()
        self.stores.clear()


PEER = Mooncake
