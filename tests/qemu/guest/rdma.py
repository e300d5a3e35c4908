"""A pool on a dax device, served to another machine over soft RDMA: python -m ... suite|a|b.

Guest a serves, b pulls, pushes and selects; the link between them is cut. Then the server's
process is killed, then all of a, which comes back, then b. suite: the tests of the transport, over
verbs in one guest.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from statistics import median
from threading import Event, Thread

import numpy as np
import pytest

from cxlkv import Budget, CXLPool
from cxlkv.errors import PeerError, StaleError
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.transport import pull, push
from cxlkv.transport.far import Pieces
from cxlkv.transport.wire import Deadline
from tests.qemu.guest.far_answers import pull_and_answer, read_and_serve
from tests.qemu.guest.soft_rdma import (
    ADDRESSES,
    DEADLINE_S,
    RXE,
    bring_up,
    card,
    check,
    connected,
    end,
    near_pool,
    server,
)
from tests.qemu.guest.steps import (
    DEVICE,
    LAYOUT,
    SHARED,
    bind_device,
    command,
    end_parts,
    found,
    part,
    publish,
    say,
    token_ids,
    wait_for,
    wait_until,
)

TOKENS = 40 * LAYOUT.page_tokens
OF_A, OF_B = 1, 2  # seeds of published texts
CUT_S = 1.0  # may be borne by what RDMA and TCP send again
GONE_S = 120.0  # keep-alive alone takes 15 s, and an emulated clock may be fast


def run_suite() -> None:
    os.environ |= {"CXLKV_TEST_RDMA": RXE, "CXLKV_TEST_RDMA_HOST": ADDRESSES["suite"]}
    # Servers and clients in processes of their own die between the other two guests.
    chosen = "(verbs or no_device) and not (command or killed or stopped or comes_back)"
    options = ["-v", "-p", "no:cacheprovider", "-k", chosen, "--tb", "short"]
    status = pytest.main([*options, "tests/transport/test_transport.py"])
    assert status == 0, f"pytest ended with {status!r}"


def keys_of(seed: int) -> PageKeys:
    return prefix_keys(token_ids(seed, TOKENS), LAYOUT.page_tokens)


# ---- guest a ----


def first_life() -> None:
    bind_device()
    with part("the demo's model reads for another machine"):
        read_and_serve()
    with CXLPool.create(DEVICE, layout=LAYOUT, capacity="all", force=True, replace=True) as pool:
        publish(pool, OF_A, TOKENS).release()
        with server() as process:
            say("a serves")
            wait_for("b has pulled and pushed")
            found(pool, OF_B, TOKENS).release()
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
            found(pool, seed, TOKENS).release()
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
            end(process)


# ---- guest b ----


def pull_push_select() -> None:
    with near_pool(LAYOUT) as pool, connected() as remote:
        moved = pull(remote, pool, keys_of(OF_A))
        print(moved, flush=True)
        assert (moved.tokens, moved.damaged, moved.stale) == (TOKENS, 0, 0)
        found(pool, OF_A, TOKENS).release()
        publish(pool, OF_B, TOKENS).release()
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


def figures(device: str | None) -> list[str]:
    """Figures of each path, beside a bare read of as many bytes. Functional: all is emulated."""
    lines: list[str] = []

    def time_ms(name: str, act: Callable[[], object], size: int = 0) -> None:
        act()
        took = []
        for _ in range(5):
            began = time.perf_counter()
            act()
            took.append(time.perf_counter() - began)
        rate = f", {size / median(took) / 2**20:.1f} MiB/s" if size else ""
        lines.append(f"{remote.link}: {name}: {median(took) * 1e3:.1f} ms{rate}")

    with near_pool(LAYOUT) as pool, connected(device) as remote:
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
        time_ms("bare read of 64 bytes", bare(64))
        time_ms("match", lambda: remote.match(keys_of(OF_A)).release())
        time_ms("select", lambda: remote.select(hit, 0, q, Budget(pages=5)))
        time_ms(f"bare read of {size >> 10} KiB", bare(size), size)
        time_ms("the same as packed records", lambda: remote.read(hit.pages, hit.generations), size)
        time_ms("the same pulled into a pool", pulled, size)
    return lines


def cut_link(told: Event, limit_s: float | None) -> Thread:
    """The card's link is down until `told`, or for so long at most."""

    def act() -> None:
        command(f"/guest/busybox ip link set {card()} down")
        told.wait(limit_s)
        command(f"/guest/busybox ip link set {card()} up")

    thread = Thread(target=act, daemon=True)
    thread.start()
    return thread


def read_over_cuts() -> None:
    """A short cut is borne, one that lasts is an error in time; then all goes on."""
    with connected() as remote:
        for limit_s in (CUT_S, None):
            told = Event()
            cable, pulls = cut_link(told, limit_s), 0
            while cable.is_alive():
                began = time.monotonic()
                try:
                    with near_pool(LAYOUT) as pool:
                        pull(remote, pool, keys_of(OF_A))
                        found(pool, OF_A, TOKENS).release()
                    pulls += 1
                except PeerError as error:
                    took_s = time.monotonic() - began
                    print(f"cut: after {took_s:.1f} s: {error}", flush=True)
                    assert took_s < 3 * DEADLINE_S
                    told.set()
            print(f"cut for {limit_s or 'long'}: {pulls} pulls came through", flush=True)
            assert told.is_set() == (limit_s is None)
            with near_pool(LAYOUT) as pool:
                assert pull(remote, pool, keys_of(OF_A)).tokens == TOKENS
                found(pool, OF_A, TOKENS).release()


def read_until_it_ends(step: str) -> None:
    """Pulls on and on, until the far end is gone: an error in time, and all is whole here."""
    with connected() as remote:
        rounds = 0
        try:
            while True:
                with near_pool(LAYOUT) as pool:
                    began = time.monotonic()
                    pull(remote, pool, keys_of(OF_A))
                    found(pool, OF_A, TOKENS).release()
                if not rounds:
                    say(step)
                rounds += 1
        except (PeerError, StaleError) as error:
            took_s = time.monotonic() - began
            print(f"after {rounds} pulls, in {took_s:.1f} s: {error}", flush=True)
            assert took_s < 3 * DEADLINE_S


def peer() -> None:
    wait_for("a serves what it has read")
    with part("the demo's model answers from pages of another machine"):
        pull_and_answer()
    wait_for("a serves")
    with part("pull, push and select between two machines"):
        pull_push_select()
    with part("figures, functional only"):
        lines = [line for device in (RXE, None) for line in figures(device)]
        (SHARED / "figures").write_text("\n".join(lines))
    say("b has pulled and pushed")
    with part("the link is cut while it is read"):
        read_over_cuts()
    say("b has a link again")
    with part("the server's process is killed while it is read"):
        read_until_it_ends("b reads on")
        say("b saw its end")
        wait_for("a serves again")
    with part("the serving machine is killed while it is read"):
        read_until_it_ends("b reads on again")
        say("b saw a's end")
    wait_for("a is back")
    with (
        part("a machine that came back is read again"),
        near_pool(LAYOUT) as pool,
        connected() as remote,
    ):
        assert pull(remote, pool, keys_of(OF_A)).tokens == TOKENS
        found(pool, OF_A, TOKENS).release()
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
