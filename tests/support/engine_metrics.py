"""A process whose /metrics has what the adapters of all three engines export, all of it moving.

    python -m tests.support.engine_metrics

serves at a port that the first line names, until it is killed. The names and labels are the
adapters' own; the figures are made up, as no engine runs here.
"""

from __future__ import annotations

import threading

from prometheus_client import Counter, Gauge, start_http_server

from cxlkv.adapters.common import metrics
from cxlkv.adapters.common.metrics import HOST_STATES, LINKS, MOVES, Metrics
from cxlkv.adapters.lmcache import metrics as lmcache
from cxlkv.adapters.sglang import metrics as sglang
from cxlkv.adapters.vllm import counting as vllm

TICK_S = 0.1
OBJECT_ROOMS = {"bytes": {**metrics.STATES, **metrics.IN_COLD, **metrics.QUOTA}}


def main() -> None:
    of_vllm = Metrics(Counter, Gauge, vllm.PREFIX, ["engine"], vllm.COUNTS, vllm.CAPACITIES)
    made = [(of_vllm, vllm.COUNTS, tuple(vllm.KINDS), vllm.CAPACITIES)]
    for engine in (sglang, lmcache):
        counts = {**engine.COUNTS, **MOVES}
        shown = Metrics(Counter, Gauge, engine.PREFIX, ["rank"], counts, OBJECT_ROOMS)
        made.append((shown, counts, tuple(engine.KINDS), OBJECT_ROOMS))
    for shown, _, kinds, _ in made:
        shown.begin(["0"], kinds)
    server, _ = start_http_server(0, "127.0.0.1")
    print(server.server_port, flush=True)
    while True:
        for shown, counts, kinds, rooms in made:
            more, links = dict.fromkeys(counts, 10.0), dict.fromkeys(LINKS, 4096)
            shown.add(["0"], more, dict.fromkeys(kinds, 1), links)
            room = {unit: dict.fromkeys(states, 1 << 20) for unit, states in rooms.items()}
            shown.fill(["0"], "/dev/shm/a", room | {"hosts": dict.fromkeys(HOST_STATES, 1)})
        threading.Event().wait(TICK_S)


if __name__ == "__main__":
    main()
