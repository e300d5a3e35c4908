"""Engines behind the proxy of examples/: one prefills, one decodes, either may be killed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cxlkv import CXLPool

from ..support.waiting import until
from .servers import CACHED, Servers, served_while_killed, texts


@pytest.mark.timeout(900)
def test_prefill_here_and_decode_there(
    servers: Servers, record_property: Callable[[str, object], None]
) -> None:
    """The one who decodes hits what the other has computed. Without either, the other serves."""
    path = servers.folder / "shared.pool"
    shared = {"where": str(path), "capacity": "64MiB", "sharing": "software", "hosts": 4}
    alone = servers.engine("alone")
    prefill = servers.engine("prefill", "kv_producer", {**shared, "host": 1})
    decode = servers.engine("decode", "kv_consumer", {**shared, "host": 2})
    spare = servers.engine("spare", "kv_consumer", {**shared, "host": 3})
    engines = (alone, prefill, decode, spare)
    until(lambda: all(engine.is_ready() for engine in engines), within_s=600)
    prompts = texts(1, 8)
    wanted, first_s, whole_s = zip(*(alone.complete(prompt) for prompt in prompts), strict=True)
    proxy = servers.proxy(prefill, decode)
    found, proxy_first_s, proxy_whole_s = zip(*map(proxy.complete, prompts), strict=True)
    assert found == wanted
    assert decode.figure("vllm:cxlkv_hit_tokens_total") == CACHED * len(prompts)
    assert prefill.figure("vllm:generation_tokens_total") == len(prompts)
    figures = [np.median(one) * 1000 for one in (first_s, whole_s, proxy_first_s, proxy_whole_s)]
    record_property(
        "show",
        "to the first token {:.0f} ms, to the last {:.0f} ms, by one engine; {:.0f} and {:.0f} ms "
        "by two".format(*figures),
    )

    long, other = texts(2, 2)
    assert served_while_killed(proxy, decode, long, 400) == alone.whole(long, 400)
    assert proxy.complete(other)[0] == alone.complete(other)[0]

    proxy = servers.proxy(prefill, spare)
    prefill.kill()
    assert proxy.complete(prompts[0])[0] == wanted[0]
    assert spare.figure("vllm:cxlkv_hit_tokens_total") == CACHED
    new = texts(3, 1)[0]
    assert proxy.complete(new)[0] == alone.complete(new)[0]
    with CXLPool.open(path, host=0, threads=1) as pool:
        assert pool.admin.check(deep=True)["clean"]
