"""The RDMA link: one-sided READ and WRITE on reliable queue pairs, through pyverbs.

pyverbs is the distribution's (Debian: python3-pyverbs): it must be of the same rdma-core as the
system's libibverbs, and built for this Python. The region is registered for reading only, once;
each connection has a queue pair and a staging area of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import resource
import secrets
import time
from functools import cache
from ipaddress import IPv6Address, ip_address
from types import ModuleType
from typing import Annotated, NamedTuple, Protocol, cast

import numpy as np
from pydantic import Field

from cxlkv.arrays import Bytes
from cxlkv.errors import PeerError, RdmaError
from cxlkv.layout import format_bytes
from cxlkv.machine import lifetime
from cxlkv.transport import answers
from cxlkv.transport.base import chunk_records
from cxlkv.transport.far import Pieces
from cxlkv.transport.loopback import Call
from cxlkv.transport.messages import QueuePair, UseVerbs
from cxlkv.transport.wire import Deadline, Header

PORT = 1
GIDS_MAX = 64
WORK_MAX = 64  # requests that are posted at once, with one doorbell
PARTS_MAX = 16  # of one request
READS_MAX = 16  # that a queue pair has on their way
MESSAGE_BYTES_MAX = 1 << 20
ACK_TIMEOUT = 16  # 4.096 us * 2**16
RETRIES = 6  # so a peer is gone after 2 to 8 s; soft RDMA takes 7 for "without end"
RNR_TIMER = 12
SPIN_S, PAUSE_S = 0.001, 0.00005


_NO_DEVICE = (
    "this machine shows none. It needs the kernel's driver (soft RDMA over any network: modprobe "
    "rdma_rxe; rdma link add rxe0 type rxe netdev eth0), and in a container /dev/infiniband"
)


class _Closes(Protocol):
    def close(self) -> None: ...


class _Memory(_Closes, Protocol):
    """An MR."""

    lkey: int
    rkey: int


class _Request(Protocol):
    """A SendWR."""

    wr_id: int
    next_wr: _Request


class _Pyverbs(NamedTuple):
    """pyverbs' modules, which are untyped, and its exception."""

    addr: ModuleType
    cq: ModuleType
    device: ModuleType
    enums: ModuleType
    mr: ModuleType
    pd: ModuleType
    qp: ModuleType
    wr: ModuleType
    error: type[Exception]


@cache
def _pyverbs() -> _Pyverbs:
    """Raises RdmaError where it cannot be imported."""
    try:
        names = _Pyverbs._fields[:-1]
        modules = [importlib.import_module(f"pyverbs.{name}") for name in names]
        error = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    except (ImportError, OSError) as failed:
        raise RdmaError(
            f"RDMA needs pyverbs, which cannot be imported: {failed}. Install your distribution's "
            "python3-pyverbs (rdma-core), and use the Python that it was built for: it must be of "
            "the same rdma-core release as the system's libibverbs, and of this Python's minor "
            "version, so the one on PyPI seldom fits. In a virtual environment: link the folder "
            "pyverbs of /usr/lib/python3/dist-packages into its site-packages"
        ) from failed
    return _Pyverbs._make((*modules, error))


def device_names() -> list[str]:
    """The RDMA devices of this machine. Raises RdmaError without pyverbs."""
    v = _pyverbs()
    try:
        return [device.name.decode() for device in v.device.get_device_list()]
    except v.error:  # as it says on a machine without the drivers
        return []


Memory = tuple[
    Annotated[int, Field(ge=0, lt=1 << 63)],
    Annotated[int, Field(ge=0, lt=1 << 63)],
    Annotated[int, Field(ge=0, lt=1 << 32)],
]
"""Address, bytes, key."""


class Far(QueuePair):
    """What a server answers: its queue pair, and its two memories."""

    region: Memory
    staging: Memory


def far_of(header: Header, body: bytearray) -> Far:
    """The far end in an answer; JSON has no tuples."""
    lists = {name: tuple(of) for name, of in header.items() if isinstance(of, list)}
    return answers.checked(Far, header | lists)


class _Device:
    """An open device, and how much of what it can is used."""

    def __init__(self, name: str):
        v = _pyverbs()
        names = device_names()
        if name not in names:
            there = f"there are {', '.join(names)}" if names else _NO_DEVICE
            raise RdmaError(f"no RDMA device {name!r}: {there}")
        try:
            self.context = v.device.Context(name=name)
            self.domain = v.pd.PD(self.context)
            has, port = self.context.query_device(), self.context.query_port(PORT)
        except v.error as error:
            raise RdmaError(f"the RDMA device {name} cannot be opened: {error}") from error
        self.name = name
        self.work = min(WORK_MAX, int(has.max_qp_wr))
        self.parts = min(PARTS_MAX, int(has.max_sge), int(has.max_sge_rd) or PARTS_MAX)
        self.reads = min(READS_MAX, int(has.max_qp_rd_atom), int(has.max_qp_init_rd_atom) or 1)
        self.message_bytes = min(MESSAGE_BYTES_MAX, int(port.max_msg_sz))
        self.mtu, self.lid = int(port.active_mtu), int(port.lid)
        self._gids = int(port.gid_tbl_len)

    def gid(self, local_host: str) -> tuple[int, str]:
        """Number and text of the address by which a peer reaches this device: that of the control
        connection, else the last one that is routed, else the last."""
        host = ip_address(local_host)
        wanted = IPv6Address(f"::ffff:{host}") if host.version == 4 else host
        found: list[tuple[int, IPv6Address]] = []
        for index in range(min(self._gids, GIDS_MAX)):
            with contextlib.suppress(_pyverbs().error, ValueError):
                gid = IPv6Address(str(self.context.query_gid(PORT, index).gid))
                if int(gid):
                    found.append((index, gid))
        if not found:
            raise RdmaError(f"{self.name} has no address (GID): is its network interface up?")
        # RoCE v1 and v2 have entries of the same address; v2, which is routed, comes later.
        same = [each for each in found if each[1] == wanted]
        routed = [each for each in found if not each[1].is_link_local]
        index, chosen = (same or routed or found)[-1]
        return index, str(chosen)

    def register(self, address: int, size: int, access: int) -> _Memory:
        v = _pyverbs()
        try:
            return cast(_Memory, v.mr.MR(self.domain, size, access, address=address))
        except v.error as error:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
            raise RdmaError(
                f"{self.name} does not register {format_bytes(size)} of memory: {error}. Locked "
                f"memory (ulimit -l) is {limit} here: raise it (ulimit -l unlimited; systemd: "
                "LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1). Files of fsdax cannot be "
                "registered at all: use a dax device, or /dev/shm"
            ) from error

    def close(self) -> None:
        _quietly(self.domain, self.context)


class _Queue:
    """A queue pair with its completions, not connected yet."""

    def __init__(self, device: _Device, access: int, local_host: str):
        v = _pyverbs()
        self._device, self._access = device, access
        self._gid_index, self._gid = device.gid(local_host)
        self.psn = secrets.randbits(24)
        try:
            self.completions = v.cq.CQ(device.context, 2 * device.work)
            has = v.qp.QPCap(
                max_send_wr=device.work,
                max_recv_wr=1,
                max_send_sge=device.parts,
                max_recv_sge=1,
            )
            wanted = v.qp.QPInitAttr(
                qp_type=v.enums.IBV_QPT_RC,
                scq=self.completions,
                rcq=self.completions,
                cap=has,
                sq_sig_all=0,
            )
            self.pair = v.qp.QP(device.domain, wanted, v.qp.QPAttr())
        except v.error as error:
            raise RdmaError(f"{device.name} gives no queue pair: {error}") from error

    def words(self) -> Header:
        """What the peer needs to know of it."""
        return {
            "qp": int(self.pair.qp_num),
            "psn": self.psn,
            "gid": self._gid,
            "lid": self._device.lid,
            "mtu": self._device.mtu,
            "reads": self._device.reads,
        }

    def connect(self, peer: QueuePair) -> None:
        """Raises RdmaError when the peer's words lead nowhere."""
        v = _pyverbs()
        reads = min(self._device.reads, peer.reads)
        try:
            attr = v.qp.QPAttr(port_num=PORT)
            attr.qp_access_flags = self._access
            self.pair.to_init(attr)
            attr.path_mtu = min(self._device.mtu, peer.mtu)
            attr.dest_qp_num, attr.rq_psn = peer.qp, peer.psn
            attr.max_dest_rd_atomic, attr.min_rnr_timer = reads, RNR_TIMER
            gid = v.addr.GID(IPv6Address(peer.gid).exploded)
            route = v.addr.GlobalRoute(dgid=gid, sgid_index=self._gid_index)
            attr.ah_attr = v.addr.AHAttr(port_num=PORT, is_global=1, gr=route, dlid=peer.lid)
            self.pair.to_rtr(attr)
            attr.sq_psn, attr.max_rd_atomic = self.psn, reads
            attr.timeout, attr.retry_cnt, attr.rnr_retry = ACK_TIMEOUT, RETRIES, RETRIES
            self.pair.to_rts(attr)
        except (v.error, ValueError) as error:
            raise RdmaError(f"no queue pair between {self._gid} and {peer.gid}: {error}") from error

    def run(self, work: list[_Request], deadline: Deadline) -> None:
        """Posts chained requests, whose last one asks for a completion, and waits for it."""
        v = _pyverbs()
        try:
            self.pair.post_send(work[0])
            began = time.monotonic()
            while True:
                count, done = self.completions.poll(2)
                for each in done if count else ():
                    if each.status != v.enums.IBV_WC_SUCCESS:
                        raise PeerError(f"RDMA failed: {_status(each.status)}")
                    if each.wr_id == work[-1].wr_id:
                        return
                deadline.left()
                if time.monotonic() - began > SPIN_S:
                    time.sleep(PAUSE_S)
        except v.error as error:
            raise PeerError(f"RDMA failed: {error}") from error

    def close(self) -> None:
        """Nothing arrives by it any more."""
        _quietly(self.pair, self.completions)


class VerbsLink:
    """The client's Link: a queue pair, and a buffer that its device knows."""

    name = "verbs"

    def __init__(
        self, device: str, call: Call, record_bytes: int, local_host: str, deadline: Deadline
    ):
        access = _pyverbs().enums.IBV_ACCESS_LOCAL_WRITE
        self.buffer: Bytes = np.zeros(chunk_records(record_bytes) * record_bytes, np.uint8)
        self._device = _Device(device)
        self._queue: _Queue | None = None
        self._memory: _Memory | None = None
        self._posted = 0
        try:
            self._memory = self._device.register(_address(self.buffer), self.buffer.size, access)
            self._queue = _Queue(self._device, access, local_host)
            self._far = call({"op": "verbs", **self._queue.words()}, deadline, far_of)
            self._queue.connect(self._far)
        except BaseException:
            self.close()
            raise

    def read(self, pieces: Pieces, deadline: Deadline) -> None:
        self._run(_pyverbs().enums.IBV_WR_RDMA_READ, pieces, self._far.region, deadline)

    def write(self, pieces: Pieces, deadline: Deadline) -> None:
        self._run(_pyverbs().enums.IBV_WR_RDMA_WRITE, pieces, self._far.staging, deadline)

    def _run(
        self, opcode: int, pieces: Pieces, memory: tuple[int, int, int], deadline: Deadline
    ) -> None:
        """One request for each far run: it has so many parts in the buffer, and so many bytes."""
        v, limits = _pyverbs(), self._device
        address, size, far_key = memory
        assert self._queue is not None
        assert self._memory is not None
        if len(pieces.far) and int((pieces.far + pieces.size).max()) > size:
            raise PeerError("the peer's memory is smaller than its pool says")
        pieces = pieces.halved(limits.message_bytes)
        near_key = self._memory.lkey
        base = _address(self.buffer)
        parts = [
            v.wr.SGE(base + near, length, near_key)
            for near, length in zip(pieces.near.tolist(), pieces.size.tolist(), strict=True)
        ]
        cuts = pieces.cuts(limits.parts, limits.message_bytes)
        starts = pieces.far[cuts[:-1]].tolist()
        for first in range(0, len(starts), limits.work):
            last = min(first + limits.work, len(starts))
            work: list[_Request] = []
            for index in range(first, last):
                flags = v.enums.IBV_SEND_SIGNALED if index + 1 == last else 0
                some = parts[cuts[index] : cuts[index + 1]]
                self._posted += 1
                request = v.wr.SendWR(
                    wr_id=self._posted,
                    opcode=opcode,
                    num_sge=len(some),
                    sg=some,
                    send_flags=flags,
                )
                request.set_wr_rdma(far_key, address + starts[index])
                if work:
                    work[-1].next_wr = request
                work.append(request)
            self._queue.run(work, deadline)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        if self._memory is not None:
            _quietly(self._memory)
        self._queue, self._memory = None, None
        self._device.close()

    def leave(self) -> None:
        """The kernel has one queue pair for both processes."""
        lifetime.keep_for_ever(self)


class VerbsHost:
    """The server's device, with the pool's region registered for reading from afar."""

    def __init__(self, device: str, address: int, size: int):
        v = _pyverbs()
        self._device = _Device(device)
        self._address, self._size = address, size
        try:
            self._region = self._device.register(address, size, v.enums.IBV_ACCESS_REMOTE_READ)
        except BaseException:
            self._device.close()
            raise

    def door(self, asked: UseVerbs, staging: Bytes, local_host: str) -> VerbsDoor:
        """A queue pair for one peer, connected to its own."""
        region = (self._address, self._size, self._region.rkey)
        return VerbsDoor(self._device, region, asked, staging, local_host)

    def close(self) -> None:
        """The region's key is of no use to anybody from now on."""
        _quietly(self._region)
        self._device.close()

    def leave(self) -> None:
        """Leave the door to the parent, in a forked child."""
        lifetime.keep_for_ever(self)


class VerbsDoor:
    """The server's Door: a queue pair and a staging area that one peer may write to."""

    def __init__(
        self,
        device: _Device,
        region: tuple[int, int, int],
        asked: UseVerbs,
        staging: Bytes,
        local_host: str,
    ):
        enums = _pyverbs().enums
        local, read, write = (
            enums.IBV_ACCESS_LOCAL_WRITE,
            enums.IBV_ACCESS_REMOTE_READ,
            enums.IBV_ACCESS_REMOTE_WRITE,
        )
        self._staging = device.register(_address(staging), staging.size, local | write)
        self._answer: Header = {
            "region": list(region),
            "staging": [_address(staging), staging.size, self._staging.rkey],
        }
        try:
            self._queue = _Queue(device, local | read | write, local_host)
            self._answer |= self._queue.words()
            self._queue.connect(asked)
        except BaseException:
            _quietly(self._staging)
            raise

    def answer(self) -> Header:
        return self._answer

    def close(self) -> None:
        self._queue.close()
        _quietly(self._staging)

    def leave(self) -> None:
        lifetime.keep_for_ever(self)


def _status(number: int) -> str:
    """A completion's, in the words of the verbs."""
    enums = _pyverbs().enums
    names = [name for name in dir(enums) if re.fullmatch(r"IBV_WC_\w+_ERR", name)]
    return next((name for name in names if getattr(enums, name) == number), f"status {number}")


def _address(memory: Bytes) -> int:
    return cast(int, memory.__array_interface__["data"][0])


def _quietly(*objects: _Closes) -> None:
    """Closes what may be gone already, as after an unplugged device."""
    for each in objects:
        with contextlib.suppress(_pyverbs().error):
            each.close()
