"""A pool on a dax device, served to another machine over soft RDMA: python -m ... suite|a|b.

suite: the tests of the transport, over verbs in one guest. Guest a serves, b pulls, pushes and
selects. Then the server's process is killed, then all of a, which comes back, then b.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from cxlkv import Budget, CXLPool
from cxlkv.emulation.qemu.guest.steps import (
    DEVICE,
    LAYOUT,
    SHARED,
    Skip,
    append,
    assert_holds,
    bind_device,
    command,
    end_parts,
    load,
    part,
    say,
    token_ids,
    wait_for,
    wait_until,
)
from cxlkv.errors import PeerError, StaleError
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.transport import Remote, pull, push
from cxlkv.transport.far import Pieces
from cxlkv.transport.wire import Deadline

RXE = "rxe0"
ADDRESSES = {"suite": "10.77.0.9", "a": "10.77.0.10", "b": "10.77.0.11"}
PORT = 7777
SITE = "/run/site"
SECRET = Path("/run/secret")
SECRET_TEXT = b"both guests know this secret"
TOKENS = 40 * LAYOUT.page_tokens
OF_A, OF_B = 1, 2  # seeds of published texts
DEADLINE_S = 20.0
GONE_S = 120.0  # keep-alive alone takes 15 s, and an emulated clock may be fast


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
    cards = Path("/sys/class/net")
    card = wait_until(
        lambda: next((each.name for each in cards.iterdir() if each.name != "lo"), ""),
        "network card",
    )
    command(f"/guest/busybox ip addr add {ADDRESSES[name]}/24 dev {card}")
    command(f"/guest/busybox ip link set lo up; /guest/busybox ip link set {card} mtu 4500 up")
    command(f"{unpacked}/usr/bin/rdma link add {RXE} type rxe netdev {card}")
    SECRET.write_bytes(SECRET_TEXT)
    SECRET.chmod(0o600)


def run_suite() -> None:
    os.environ |= {"CXLKV_TEST_RDMA": RXE, "CXLKV_TEST_RDMA_HOST": ADDRESSES["suite"]}
    # Servers and clients in processes of their own die between the other two guests.
    chosen = "verbs and not (command or killed or stopped or comes_back)"
    options = ["-v", "-p", "no:cacheprovider", "-k", chosen, "--tb", "short"]
    status = pytest.main([*options, "tests/test_transport.py"])
    assert status == 0, f"pytest ended with {status!r}"


def keys_of(seed: int) -> PageKeys:
    return prefix_keys(token_ids(seed, TOKENS), LAYOUT.page_tokens)


def publish(pool: CXLPool, seed: int) -> None:
    sequence = pool.sequence()
    append(sequence, seed, TOKENS)
    pool.publish_prefix(sequence, token_ids(seed, TOKENS))
    sequence.release()


def assert_found(pool: CXLPool, seed: int) -> None:
    """The whole text, matched and compared byte for byte."""
    with pool.match_prefix(token_ids(seed, TOKENS)) as hit:
        sequence = hit.sequence()
    assert_holds(sequence, seed, TOKENS)
    sequence.release()


def check(pool: CXLPool) -> None:
    report = pool.check(deep=True)
    assert report["clean"], report["problems"]
    assert pool.stats()["pages_held"] == 0, pool.stats()


@contextmanager
def server() -> Iterator[subprocess.Popen[str]]:
    """`cxlkv serve` of the device, as its user would start it."""
    address = f"{ADDRESSES['a']}:{PORT}"
    words = ["serve", DEVICE, "--listen", address, "--secret", str(SECRET), "--device", RXE]
    line = [sys.executable, "-m", "cxlkv.cli", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        print(said, end="", flush=True)
        assert said.startswith("serves"), said
        try:
            yield process
        finally:
            process.kill()


# ---- guest a ----


def first_life() -> None:
    bind_device()
    with CXLPool.create(DEVICE, layout=LAYOUT, capacity="all", force=True) as pool:
        publish(pool, OF_A)
        with server() as process:
            say("a serves")
            wait_for("b has pulled and pushed")
            assert_found(pool, OF_B)
            wait_for("b reads on")
            process.send_signal(signal.SIGKILL)
            process.wait()
            say("the server is dead")
            wait_for("b saw its end")
            wait_until(lambda: pool.stats()["pages_held"] == 0, "end of what b held")
            check(pool)
        with server():
            say("a serves again")
            wait_for("never: the power fails")


def second_life() -> None:
    bind_device()
    with CXLPool.open(DEVICE, layout=LAYOUT) as pool:
        for seed in (OF_A, OF_B):
            assert_found(pool, seed)
        with server() as process:
            say("a is back")
            wait_until(lambda: pool.stats()["pages_held"] > 0, "match of b")
            wait_for("b is dead")
            began = time.monotonic()
            wait_until(lambda: pool.stats()["pages_held"] == 0, "end of what b held")
            took_s = time.monotonic() - began
            print(f"b's pages came back after {took_s:.1f} s", flush=True)
            assert took_s < GONE_S
            check(pool)
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0


# ---- guest b ----


@contextmanager
def near_pool() -> Iterator[CXLPool]:
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="32MiB", threads=2) as pool:
        yield pool
        check(pool)


@contextmanager
def connected() -> Iterator[Remote]:
    address = f"{ADDRESSES['a']}:{PORT}"
    with Remote(address, SECRET_TEXT, device=RXE, deadline_s=DEADLINE_S) as remote:
        yield remote


def pull_push_select() -> None:
    with near_pool() as pool, connected() as remote:
        moved = pull(remote, pool, keys_of(OF_A))
        print(moved, flush=True)
        assert (moved.tokens, moved.damaged, moved.stale) == (TOKENS, 0, 0)
        assert_found(pool, OF_A)
        publish(pool, OF_B)
        assert push(remote, pool, keys_of(OF_B)).tokens == TOKENS
        q = np.random.default_rng(5).standard_normal((1, 4, LAYOUT.head_dim), np.float32)
        with remote.match(keys_of(OF_A)) as far, pool.match(keys_of(OF_A)) as near:
            sequence = near.sequence()
            for layer in range(LAYOUT.layers):
                there = remote.select(far, layer, q.astype(np.float16), Budget(pages=5))
                here = sequence.select(layer, q.astype(np.float16), Budget(pages=5))
                np.testing.assert_array_equal(there.pages, here.pages)
                np.testing.assert_array_equal(there.scores, here.scores)
            sequence.release()


def figures() -> None:
    """Of each path, beside a bare READ of as many bytes. Functional: all is emulated."""
    lines: list[str] = []

    def time_ms(name: str, act: Callable[[], object], size: int = 0) -> None:
        act()
        took = []
        for _ in range(5):
            began = time.perf_counter()
            act()
            took.append(time.perf_counter() - began)
        rate = f", {size / median(took) / 2**20:.1f} MiB/s" if size else ""
        lines.append(f"{name}: {median(took) * 1e3:.1f} ms{rate}")

    with near_pool() as pool, connected() as remote:
        size = pull(remote, pool, keys_of(OF_A)).bytes
        hit = remote.match(keys_of(OF_A))
        link = remote._link
        assert link is not None

        def bare(count: int) -> Callable[[], None]:
            pieces = Pieces(*(np.array([number]) for number in (0, 0, count)))
            return lambda: link.read(pieces, Deadline(DEADLINE_S))

        def pulled() -> None:
            pool.forget(keys_of(OF_A))
            pull(remote, pool, keys_of(OF_A))

        q = np.zeros((1, 4, LAYOUT.head_dim), np.float16)
        time_ms("bare READ of 64 bytes", bare(64))
        time_ms("match", lambda: remote.match(keys_of(OF_A)).release())
        time_ms("select", lambda: remote.select(hit, 0, q, Budget(pages=5)))
        time_ms(f"bare READ of {size >> 10} KiB", bare(size), size)
        time_ms("the same as packed records", lambda: remote.read(hit.pages, hit.generations), size)
        time_ms("the same pulled into a pool", pulled, size)
    (SHARED / "figures").write_text("\n".join(lines))


def read_until_it_ends(step: str) -> None:
    """Pulls on and on, until the far end is gone: an error in time, and all is whole here."""
    with connected() as remote:
        rounds = 0
        try:
            while True:
                with near_pool() as pool:
                    began = time.monotonic()
                    pull(remote, pool, keys_of(OF_A))
                    assert_found(pool, OF_A)
                if not rounds:
                    say(step)
                rounds += 1
        except (PeerError, StaleError) as error:
            took_s = time.monotonic() - began
            print(f"after {rounds} pulls, in {took_s:.1f} s: {error}", flush=True)
            assert took_s < 3 * DEADLINE_S


def peer() -> None:
    wait_for("a serves")
    with part("pull, push and select between two machines"):
        pull_push_select()
    with part("figures, functional only"):
        figures()
    say("b has pulled and pushed")
    with part("the server's process is killed while it is read"):
        read_until_it_ends("b reads on")
        say("b saw its end")
        wait_for("a serves again")
    with part("the serving machine is killed while it is read"):
        read_until_it_ends("b reads on again")
        say("b saw a's end")
    wait_for("a is back")
    with part("a machine that came back is read again"), near_pool() as pool, connected() as remote:
        assert pull(remote, pool, keys_of(OF_A)).tokens == TOKENS
        assert_found(pool, OF_A)
    with connected() as remote:
        remote.match(keys_of(OF_A), lease_s=3600)
        say("b holds")
        while True:  # until the power fails
            remote.match(keys_of(OF_B)).release()


def main(name: str) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes minutes to load over 9p
    is_back = name == "a" and (SHARED / "a is dead").exists()
    with part(f"soft RDMA comes up in {name}{', again' if is_back else ''}"):
        bring_up(name)
    if name == "suite":
        with part("the transport's tests over verbs"):
            run_suite()
    elif name == "b":
        peer()
    elif is_back:
        with part("what a dead machine held comes back"):
            second_life()
    else:
        first_life()
    end_parts()


if __name__ == "__main__":
    main(sys.argv[1])
