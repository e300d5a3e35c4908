"""Prefill in one vLLM, decode in another with a pool of its own: pages come over TCP, by `cxlkv
serve`. Links are cut and hang, engines and servers are killed, pools are full: tokens are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool

from ..support.cable import Cable
from ..support.processes import Child
from ..support.waiting import until
from .servers import CACHED, Server, Servers, free_port, served_while_killed, texts
from .test_metrics import TOKEN_BYTES

PULLED = "vllm:cxlkv_pulled_tokens_total"
HIT = "vllm:cxlkv_hit_tokens_total"
LINKS = "vllm:cxlkv_link_bytes_total"  # of which there is only the remote pool's here
SERVE = """
import cxlkv.transport.loopback
from cxlkv.ops.cli import app
cxlkv.transport.loopback._boot = lambda: ""  # as from another machine: no file is read
app()
"""


class Far:
    """The pools of one engine's ranks, served by a process each, behind a cable each; who uses them
    may know their addresses before there is anything."""

    def __init__(self, servers: Servers, ranks: int = 1):
        self._folder, self._stack = servers.folder, servers.stack
        self.place = self._folder / "there"
        self.place.mkdir()
        self._ports = [free_port() for _ in range(ranks)]
        cables = [Cable(f"127.0.0.1:{port}") for port in self._ports]
        self.cables = [self._stack.enter_context(cable) for cable in cables]
        self._secret = self._folder / "secret"
        self._secret.write_bytes(b"a secret of the tests")
        self._secret.chmod(0o600)
        self.processes: list[Child] = []

    def extra(self, capacity: str = "64MiB", name: str = "here") -> dict[str, object]:
        """Settings of the side that looks there."""
        addresses = [cable.address for cable in self.cables]
        where = self._folder / f"{name}.pool"
        told = {"remote": addresses, "remote_secret": str(self._secret), "deadline_s": 10}
        return {"where": str(where), "capacity": capacity, **told}

    def own(self) -> dict[str, object]:
        """Settings of the engine whose pools these are."""
        return {"where": f"{self.place}/", "capacity": "64MiB"}

    def serve(self) -> None:
        """Once the pools are there."""
        for path, port in zip(sorted(self.place.glob("*.pool")), self._ports, strict=True):
            words = ["serve", path, "--listen", f"127.0.0.1:{port}", "--secret", self._secret]
            self.processes.append(self._stack.enter_context(Child("-c", SERVE, *words)))
            assert self.processes[-1].hear().startswith("serves")


def in_ms(found: Sequence[tuple[object, float, float]], new: int) -> str:
    first, last = (np.median([one[at] for one in found]) for at in (1, 2))
    return f"{first * 1e3:.0f} ms to the first token, {(last - first) / (new - 1) * 1e3:.1f} each"


def check(path: Path) -> None:
    with CXLPool.open(path, threads=1) as pool:
        report, stats = pool.admin.check(deep=True), pool.stats()
        assert report["clean"], report["problems"]
        assert stats["pages_held"] == 0, stats


def ready(*engines: Server) -> None:
    until(lambda: all(engine.is_ready() for engine in engines), within_s=600)


def until_it_comes(proxy: Server, decode: Server) -> None:
    """The remote pool is there, once or again: tried with a new text each time, as the engine has
    a cache of its own, too."""
    seeds = count(100)

    def comes() -> bool:
        before = decode.figure(PULLED)
        proxy.complete(texts(next(seeds), 1)[0])
        return decode.figure(PULLED) > before

    until(comes)


@pytest.mark.timeout(1200)
def test_prefill_there_and_decode_here(
    servers: Servers, record_property: Callable[[str, object], None]
) -> None:
    far = Far(servers)
    alone = servers.engine("alone")
    prefill = servers.engine("prefill", "kv_producer", far.own())
    decode = servers.engine("decode", "kv_consumer", far.extra())
    small = servers.engine("small", "kv_consumer", far.extra("5MiB", "small"))
    ready(alone, prefill, decode, small)
    far.serve()
    (cable,) = far.cables
    prompts = texts(1, 8)
    wanted = [alone.complete(prompt) for prompt in prompts]
    proxy = servers.proxy(prefill, decode)
    until_it_comes(proxy, decode)
    before = decode.figure(PULLED)
    found = [proxy.complete(prompt) for prompt in prompts]
    assert [one[0] for one in found] == [one[0] for one in wanted]
    assert decode.figure(PULLED) - before == CACHED * len(prompts)
    said = f"one engine {in_ms(wanted, 24)}; two, by TCP, {in_ms(found, 24)}"
    record_property("show", said)

    # The link: computed in time, and found again once it is mended.
    for number, act in enumerate((Cable.cut, Cable.hang)):
        one, two, three = texts(20 + number, 3)
        cable.after(100_000, act)
        assert proxy.complete(one)[0] == alone.complete(one)[0]
        assert proxy.complete(two)[0] == alone.complete(two)[0]
        cable.mend()
        until_it_comes(proxy, decode)
        assert proxy.complete(three)[0] == alone.complete(three)[0]
    assert decode.figure("vllm:cxlkv_failures_total") >= 2

    # A pool that holds a few of them.
    proxy_small = servers.proxy(prefill, small)
    for _ in range(2):
        assert [proxy_small.complete(prompt)[0] for prompt in prompts] == [w[0] for w in wanted]
    assert small.figure(PULLED) >= 8 * CACHED

    # Who decodes is killed; who prefills; who serves.
    long, other, new = texts(2, 3)
    assert served_while_killed(proxy, decode, long, 400) == alone.whole(long, 400)
    assert proxy.complete(other)[0] == alone.complete(other)[0]
    prefill.kill()
    before = small.figure(PULLED)
    assert proxy_small.complete(other)[0] == alone.complete(other)[0]
    assert small.figure(PULLED) - before == CACHED, "what it had published is served on"
    for process in far.processes:
        process.kill()
    assert proxy_small.complete(new)[0] == alone.complete(new)[0]
    small.kill()
    for path in (servers.folder / "small.pool", servers.folder / "here.pool"):
        check(path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("prefilling", "decoding"), [(2, 1), (1, 2)])
def test_another_number_of_ranks(servers: Servers, prefilling: int, decoding: int) -> None:
    """Pages are joined, or taken apart, by heads; each rank has a link of its own."""
    far = Far(servers, prefilling)
    ranks = "--tensor-parallel-size"
    pools = servers.folder / "here"  # one for each rank
    pools.mkdir()
    here = {**far.extra(), "where": f"{pools}/"}
    alone = servers.engine("alone")
    prefill = servers.engine("prefill", "kv_producer", far.own(), ranks, prefilling)
    decode = servers.engine("decode", "kv_consumer", here, ranks, decoding)
    ready(alone, prefill, decode)
    far.serve()
    prompts = texts(1, 4)
    wanted = [alone.complete(prompt)[0] for prompt in prompts]
    proxy = servers.proxy(prefill, decode)
    assert [proxy.complete(prompt)[0] for prompt in prompts] == wanted
    assert decode.figure(PULLED) == decode.figure(HIT) == CACHED * len(prompts)
    far.cables[-1].cut()
    new = texts(3, 1)[0]
    assert proxy.complete(new)[0] == alone.complete(new)[0]
    assert decode.figure(PULLED) == CACHED * len(prompts)


@pytest.mark.timeout(1200)
def test_both_attend_in_their_pools(servers: Servers) -> None:
    """What comes is adopted where it lies; what does not come is computed."""
    far = Far(servers)
    attention = {"attention": "pool"}
    alone = servers.engine("alone")
    prefill = servers.engine(
        "prefill", "kv_producer", {**far.own(), **attention}, "--no-async-scheduling"
    )
    decode = servers.engine(
        "decode", "kv_consumer", {**far.extra(), **attention}, "--no-async-scheduling"
    )
    ready(alone, prefill, decode)
    far.serve()
    proxy = servers.proxy(prefill, decode)
    until_it_comes(proxy, decode)
    before = decode.figure(PULLED)
    prompts = texts(1, 4)
    for prompt in prompts:
        assert proxy.complete(prompt)[0] == alone.complete(prompt)[0]
    pulled = decode.figure(PULLED)
    assert pulled - before == CACHED * len(prompts)
    assert decode.figure(LINKS) >= pulled * TOKEN_BYTES  # and what is beside K and V
    for number, act in enumerate((Cable.cut, Cable.hang)):
        one, two = texts(20 + number, 2)
        far.cables[0].after(100_000, act)
        assert proxy.complete(one)[0] == alone.complete(one)[0]
        far.cables[0].mend()
        until_it_comes(proxy, decode)
        assert proxy.complete(two)[0] == alone.complete(two)[0]
    prefill.kill()
    decode.kill()
    check(servers.folder / "here.pool")
