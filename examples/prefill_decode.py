"""Prefill here, decode there: a proxy before two vLLM engines that share a pool.

    python examples/prefill_decode.py --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000

Needs: aiohttp, and the engines as docs/engines/vllm-hosts.md starts them. The first one gets each
request with max_tokens=1: then K and V of its prompt are in the pool, where the second one, which
answers, finds them. Without the first the second computes all; without that, the first answers.
"""

import argparse
import asyncio
import time

from aiohttp import ClientError, ClientSession, ClientTimeout, web

ANSWERS_ONLY = {"stream", "stream_options", "min_tokens", "n", "best_of", "max_completion_tokens"}
PREFILL, DECODE = (ClientTimeout(total=limit_s, sock_connect=2) for limit_s in (30, None))
PAUSE_S = 5  # for so long an engine that was not there is not asked to prefill
GONE = (ClientError, asyncio.TimeoutError, OSError)

parser = argparse.ArgumentParser()
for engine in ("--prefill", "--decode"):
    parser.add_argument(engine, required=True, help="its URL")
parser.add_argument("--port", type=int, default=8080)
given = parser.parse_args()
pauses = {"until_s": 0.0}


async def serve(request: web.Request) -> web.StreamResponse:
    body, path = await request.json(), request.path
    read = {k: v for k, v in body.items() if k not in ANSWERS_ONLY} | {"max_tokens": 1}
    async with ClientSession() as session:
        try:
            if time.monotonic() >= pauses["until_s"]:
                await (await session.post(given.prefill + path, json=read, timeout=PREFILL)).read()
        except GONE as error:  # nothing is lost
            pauses["until_s"] = time.monotonic() + PAUSE_S
            print(f"{given.prefill} does not prefill: {error!r}")
        for url in (given.decode, given.prefill):
            response = web.StreamResponse()
            try:
                async with session.post(url + path, json=body, timeout=DECODE) as answer:
                    if answer.status >= 500 and url == given.decode:
                        continue
                    response.set_status(answer.status)
                    response.content_type = answer.content_type
                    async for some in answer.content.iter_any():
                        await response.prepare(request)  # a second time does nothing
                        await response.write(some)
                    return response
            except GONE as error:
                if response.prepared:  # the client has a part: no other engine can serve it
                    raise
                print(f"{url} does not answer: {error!r}")
    raise web.HTTPBadGateway(text="no engine answers")


app = web.Application(client_max_size=1 << 28)
app.add_routes([web.post(f"/v1/{path}", serve) for path in ("completions", "chat/completions")])
web.run_app(app, host="127.0.0.1", port=given.port)
