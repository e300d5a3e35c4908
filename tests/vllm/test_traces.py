"""A load of a request with trace headers is a span below them; others are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.adapters.vllm.settings import Settings

from ..support.damaging import damage_piece
from ..support.paged_engine import TOKENS, Engine, Request

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="vLLM brings OpenTelemetry's SDK")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
trace = pytest.importorskip("opentelemetry.trace")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, page_tokens=TOKENS, dtype="float32")


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_load_is_a_span_of_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    spans, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    path = str(tmp_path / "0.pool")
    CXLPool.create(path, layout=LAYOUT, capacity="8MiB", threads=1, sketch=False).close()
    engine = Engine([path], Settings.model_validate({"load": load}))
    ids = list(range(30))

    def serve(name: str, headers: dict[str, str] | None) -> None:
        engine.join(Request(name, list(ids), trace_headers=headers))
        engine.settle()
        engine.step()
        engine.end(name)
        engine.step()

    serve("first", HEADERS)  # hits nothing
    serve("quiet", None)
    assert not spans.get_finished_spans()
    serve("traced", HEADERS)
    with CXLPool.open(path, threads=1) as pool:
        damage_piece(pool, page=2, layer=1)
    serve("damaged", HEADERS)
    engine.close()
    good, bad = spans.get_finished_spans()
    for span, name in ((good, "traced"), (bad, "damaged")):
        assert (span.name, span.attributes["gen_ai.request.id"]) == ("cxlkv.load", name)
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        seconds = (span.end_time - span.start_time) / 1e9
        assert span.attributes["cxlkv.seconds"] == pytest.approx(seconds)
    assert good.attributes["cxlkv.tokens"] == 28
    assert good.attributes["cxlkv.far_bytes"] == 28 * LAYOUT.token_bytes
    assert "cxlkv.failure" not in good.attributes
    assert (bad.attributes["cxlkv.tokens"], bad.attributes["cxlkv.failure"]) == (8, "corrupt")
    CXLPool.remove(Path(path))
