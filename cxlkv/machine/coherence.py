"""Parses how a pool is shared and which host this is, and says what was certified."""

from __future__ import annotations

import os
from collections.abc import Sequence

from cxlkv.errors import BadArgumentError
from cxlkv.machine.certificate import certified_mode
from cxlkv.numbers import is_real, is_whole

SHARING = ("host", "hw_coherent", "software")  # by the core's number
DURABLE = ("process", "host")
HOSTS_MAX = 64
HOSTS_DEFAULT = 8
LEASE_S = 2.0
LEASE_MAX_S = 3600  # others believe no longer promise
HOST_VARIABLE = "CXLKV_HOST"
AUTO = "auto"  # for a host's number: a free one

Sharing = tuple[int, int, int]  # the core's numbers of sharing and durable, and how many hosts
Host = tuple[int, bool, float]  # number, certified, lease_s
HostNumber = int | str | None  # as users write it: a number, AUTO, or what CXLKV_HOST says


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
    if not is_whole(count, 1, HOSTS_MAX):
        raise BadArgumentError(f"{count} hosts: outside 1 to {HOSTS_MAX}")
    return SHARING.index(sharing), DURABLE.index(durable), count


def parse_host(
    host: HostNumber, lease_s: float, path: str | None, here: Sequence[int] = ()
) -> list[Host]:
    """List the hosts that this process may be, in the order in which to try them: one if `host` or
    CXLKV_HOST gives a number, none if neither is set. "auto" tries all numbers, and first those
    that are `here`, which this machine has used: its processes must be one host.

    Where a litmus run has certified the memory below `path`, the host uses the cheaper flushes.
    """
    name = "host" if host is not None else HOST_VARIABLE
    host = named_host(host)
    if not is_real(lease_s, 0.01, LEASE_MAX_S):
        raise BadArgumentError(f"lease_s={lease_s!r:.40}: outside 0.01 to {LEASE_MAX_S}")
    if host is None:
        return []
    if isinstance(host, str) and host.isdecimal() and len(host) < 10:
        host = int(host)
    if isinstance(host, str) and host == AUTO:
        wanted = [*here, *(number for number in range(HOSTS_MAX) if number not in here)]
    elif is_whole(host, 0, HOSTS_MAX - 1):
        wanted = [host]
    else:
        wrong = f"outside 0 to {HOSTS_MAX - 1}"
        if not isinstance(host, int):
            wrong = f"the number of this host, from 0, or {AUTO}"
        raise BadArgumentError(f"{name}={host!r:.40}: {wrong}")
    certified = path is not None and certified_mode(path).mode == "fast"
    return [(number, certified, lease_s) for number in wanted]


def named_host(host: HostNumber) -> HostNumber:
    """Return what names this host: `host`, or CXLKV_HOST where that is None."""
    return host if host is not None else os.environ.get(HOST_VARIABLE) or None


def flushes_of(sharing: str, path: str | None) -> str:
    """Say how a host that opens the pool now flushes, and why; "" where nothing is flushed."""
    if sharing != "software":
        return ""
    if path is None:
        return "strict: anonymous memory has no certificate"
    found = certified_mode(path)
    return f"{found.mode}: {found.reason}"
