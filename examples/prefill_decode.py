"""Prefill here, decode there: a proxy before two vLLM engines that share a pool.

    python prefill_decode.py --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000

A request goes to the first engine with max_tokens=1: when that is answered, K and V of its prompt
are in the pool. Then it goes to the second as it is, which hits them. An engine that is not there
costs nothing but its own part: without the first the second computes the prompt, and without the
second the first one serves the request. docs/engines/vllm.md says how the engines are started.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

PATHS = ("/v1/completions", "/v1/chat/completions")
ANSWERS_ONLY = ("stream", "stream_options", "min_tokens", "n", "best_of", "max_completion_tokens")
CONNECT_S = 2.0
PREFILL_S = 30.0  # a prefill that takes longer is given up, and the other engine computes
PAUSE_S = 5.0  # for so long an engine that was not there is not asked to prefill
GONE = (ClientError, asyncio.TimeoutError, OSError)

log = logging.getLogger("prefill_decode")


class Proxy:
    def __init__(self, session: ClientSession, prefill: str, decode: str):
        self._session, self._prefill, self._decode = session, prefill, decode
        self._asks_from_s = 0.0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self._bring(request.path, body)
        for engine in (self._decode, self._prefill):
            try:
                limit = ClientTimeout(total=None, sock_connect=CONNECT_S)
                url = engine + request.path
                answer = await self._session.post(url, json=body, timeout=limit)
                first = await answer.content.readany()
            except GONE as error:
                log.warning("%s does not answer: %r", engine, error)
                continue
            if answer.status < 500 or engine is self._prefill:
                return await self._hand_on(request, answer, first)
            answer.close()
        raise web.HTTPBadGateway(text="no engine answers")

    async def _bring(self, path: str, body: dict[str, object]) -> None:
        """The prompt's K and V into the pool; nothing is lost when that fails."""
        if time.monotonic() < self._asks_from_s:
            return
        asked = {name: value for name, value in body.items() if name not in ANSWERS_ONLY}
        asked["max_tokens"] = 1
        try:
            url = self._prefill + path
            limit = ClientTimeout(total=PREFILL_S, sock_connect=CONNECT_S)
            async with self._session.post(url, json=asked, timeout=limit) as answer:
                await answer.read()
        except GONE as error:
            self._asks_from_s = time.monotonic() + PAUSE_S
            log.warning("%s does not prefill: %r", self._prefill, error)

    async def _hand_on(
        self, request: web.Request, answer: ClientResponse, first: bytes
    ) -> web.StreamResponse:
        """From now on the client has a part of it, so that no other engine can serve it."""
        kind = answer.headers.get("Content-Type", "application/json")
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
        async with answer:
            await response.prepare(request)
            await response.write(first)
            async for some in answer.content.iter_any():
                await response.write(some)
        await response.write_eof()
        return response


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prefill", required=True, help="URL of the engine with kv_producer")
    parser.add_argument("--decode", required=True, help="URL of the engine with kv_consumer")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    async with ClientSession() as session:
        proxy = Proxy(session, given.prefill, given.decode)
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post(path, proxy.serve) for path in PATHS])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", given.port).start()
        print(f"serving http://127.0.0.1:{given.port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
