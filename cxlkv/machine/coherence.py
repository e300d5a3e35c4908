"""Parses how a pool is shared and which host this is, and says what was certified."""

from __future__ import annotations

import os

from cxlkv.errors import BadArgumentError
from cxlkv.machine.certificate import certified_mode

SHARING = ("host", "hw_coherent", "software")  # by the core's number
DURABLE = ("process", "host")
HOSTS_MAX = 64
HOSTS_DEFAULT = 8
LEASE_S = 2.0
LEASE_MAX_S = 3600  # others believe no longer promise
HOST_VARIABLE = "CXLKV_HOST"

Sharing = tuple[int, int, int]  # the core's numbers of sharing and durable, and how many hosts
Host = tuple[int, bool, float]  # number, certified, lease_s


def parse_sharing(sharing: str, durable: str, hosts: int | None) -> Sharing:
    """Convert to the core's constants; raises BadArgumentError with what is allowed."""
    for name, value, known in (("sharing", sharing, SHARING), ("durable", durable, DURABLE)):
        if value not in known:
            raise BadArgumentError(f"{name}={value!r}: one of {', '.join(known)}")
    if sharing == "host" and hosts not in (None, 1):
        raise BadArgumentError(
            f"hosts={hosts} with sharing='host': one host only uses such a pool; say "
            "sharing='software', or 'hw_coherent' where the hardware keeps their caches coherent"
        )
    count = 1 if sharing == "host" else HOSTS_DEFAULT if hosts is None else hosts
    if not 1 <= count <= HOSTS_MAX:
        raise BadArgumentError(f"{count} hosts: outside 1 to {HOSTS_MAX}")
    return SHARING.index(sharing), DURABLE.index(durable), count


def parse_host(host: int | None, lease_s: float, path: str | None) -> Host | None:
    """Return this host's number, as given or from CXLKV_HOST; None if neither says.

    Where a litmus run has certified the memory below `path`, the host uses the cheaper flushes.
    """
    if host is None:
        text = os.environ.get(HOST_VARIABLE)
        if not text:
            return None
        if not text.isdecimal():
            raise BadArgumentError(f"{HOST_VARIABLE}={text!r}: the number of this host, from 0")
        host = int(text)
    if not 0 <= host < HOSTS_MAX:
        raise BadArgumentError(f"host={host}: outside 0 to {HOSTS_MAX - 1}")
    if not 0.01 <= lease_s <= LEASE_MAX_S:
        raise BadArgumentError(f"lease_s={lease_s}: outside 0.01 to {LEASE_MAX_S}")
    certified = path is not None and certified_mode(path).mode == "fast"
    return host, certified, lease_s


def flushes_of(sharing: str, path: str | None) -> str:
    """Say how a host that opens the pool now flushes, and why; "" where nothing is flushed."""
    if sharing != "software":
        return ""
    if path is None:
        return "strict: anonymous memory has no certificate"
    found = certified_mode(path)
    return f"{found.mode}: {found.reason}"
