"""A span of OpenTelemetry for each load of a request that came with trace headers.

vLLM hands these on where it traces, and has set a provider then in the engine's processes; without
headers nothing is imported and nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Trace:
    """The trace of one load of so many tokens, from when it is made until end()."""

    headers: Mapping[str, str]
    request: str
    tokens: int
    began_ns: int = field(default_factory=time.time_ns)

    def end(self, attributes: Mapping[str, str | int | float]) -> None:
        """End the span; attributes: beside the request's name and its seconds. Never raises:
        tracing must not make serving fail."""
        with suppress(Exception):
            self._emit(attributes)

    def _emit(self, attributes: Mapping[str, str | int | float]) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended_ns = time.time_ns()
        seconds = (ended_ns - self.began_ns) / 1e9
        span = trace.get_tracer("cxlkv").start_span(
            "cxlkv.load",
            context=TraceContextTextMapPropagator().extract(self.headers),
            start_time=self.began_ns,
            attributes={"gen_ai.request.id": self.request, "cxlkv.seconds": seconds, **attributes},
        )
        span.end(ended_ns)
