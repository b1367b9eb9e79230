"""Draws docs/images/trace.svg from one real trace: ``python -m tests.triton.support.draw_trace FILE``.

A server with two places in its batch gets six requests at once; drawn is the trace of the one that waited longest, with
the span of the application that asked, as a collector got it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from inflight.client import Client, GenerateOptions
from tests.triton.support.otlp_sink import OtlpSink, Span
from tests.triton.support.servers import on_engine, run

REQUESTS, TOKENS = 6, 48
PHASES = {"tokenize", "queue", "prefill", "decode", "detokenize"}
WIDTH, LEFT, RIGHT, ROW = 960, 245, 100, 30
STYLE = """
    .paper { fill: #ffffff } .ink { fill: #1d2329 } .muted { fill: #4a5560 } .inside { fill: #ffffff }
    .grid { stroke: #e4e8ec } .application { fill: #9aa5b1 } .server { fill: #4a5560 }
    .queue { fill: #b3541e } .prefill { fill: #35618f } .decode { fill: #4f9d69 }
    .detokenize { fill: #b05f9e } .tokenize { fill: #6b7680 }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117 } .ink { fill: #e6ebf0 } .muted { fill: #aab4be }
      .grid { stroke: #262d35 } .application { fill: #5b6670 } .server { fill: #6b7680 }
    }
  """
SHOWN = {
    "inflight.prompt_tokens": "prompt tokens",
    "inflight.cached_tokens": "cached",
    "inflight.generated_tokens": "tokens",
    "inflight.steps": "steps",
    "inflight.calls": "calls",
    "inflight.busy_ms": "busy ms",
}


def export() -> list[Span]:
    """Return the spans of the trace that waited longest, the application's first, in order of their start."""
    with OtlpSink() as sink, tempfile.TemporaryDirectory() as scratch:
        settings = {"observability": {"trace_endpoint": sink.endpoint}, "batching": {"max_batch_size": 2}}
        for server in run(on_engine("pytorch", Path(scratch), **settings)):
            _ask_all(server.grpc, sink.endpoint)
            roots = [span for span in sink.spans if span.service == "application"]
            sink.wait(lambda: len(_finished(sink)) == REQUESTS)
            longest = max(_finished(sink), key=lambda one: sink.children(one)["queue"][0].end - one.start)
            (root,) = (span for span in roots if span.trace_id == longest.trace_id)
            children = [span for spans in sink.children(longest).values() for span in spans]
            return [root, longest, *sorted(children, key=lambda span: span.start)]
    raise AssertionError("the server did not start")


def _finished(sink: OtlpSink) -> list[Span]:
    return [span for span in sink.spans if span.is_server and set(sink.children(span)) >= PHASES]


def _ask_all(url: str, endpoint: str) -> None:
    provider = TracerProvider(resource=Resource.create({"service.name": "application"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint)))
    tracer = provider.get_tracer("application")
    options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True)

    def ask(client: Client, index: int) -> None:
        with tracer.start_as_current_span("answer a question"):
            list(client.stream(f"Question {index}: what is a paged KV cache?", options))

    with Client(url) as client, ThreadPoolExecutor(REQUESTS) as pool:
        client.generate("Hi", GenerateOptions(max_tokens=2), trace_context={"traceparent": f"00-{1:032x}-{1:016x}-00"})
        list(pool.map(lambda index: ask(client, index), range(REQUESTS)))


def draw(spans: list[Span]) -> str:
    """Return the spans as a waterfall, SVG; times are milliseconds from the first one's start."""
    began, total = spans[0].start, max(span.end for span in spans) - spans[0].start
    height = ROW * (len(spans) + 2)
    scale = (WIDTH - LEFT - RIGHT) / total
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="system-ui, sans-serif" font-size="13" role="img">',
            "  <title>The trace of one request: where its time went, stage by stage</title>",
            f"  <style>{STYLE}</style>",
            f'  <rect class="paper" width="{WIDTH}" height="{height}"/>',
            *_axis(total, scale, height),
            *(
                line
                for row, span in enumerate(spans)
                for line in _bar(span, min(row, 2), ROW * (row + 1), began, scale)
            ),
            "</svg>\n",
        ]
    )


def _axis(total: int, scale: float, height: int) -> Iterator[str]:
    step = next(one for one in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if one * 1e6 * 8 > total)
    for milliseconds in range(0, int(total / 1e6) + 1, step):
        x = LEFT + milliseconds * 1e6 * scale
        yield f'  <line x1="{x:.1f}" y1="24" x2="{x:.1f}" y2="{height - 20}" class="grid"/>'
        yield f'  <text x="{x:.1f}" y="16" text-anchor="middle" class="muted" font-size="11">{milliseconds} ms</text>'


def _bar(span: Span, depth: int, y: int, began: int, scale: float) -> Iterator[str]:
    x, width = LEFT + (span.start - began) * scale, max((span.end - span.start) * scale, 1.5)
    kind = span.name if span.name in PHASES else "server" if span.is_server else "application"
    facts = [f"{text} {span.attributes[name]:.3g}" for name, text in SHOWN.items() if name in span.attributes]
    label = ", ".join([f"{(span.end - span.start) / 1e6:.1f} ms", *facts])
    outside = width < 7 * len(label)
    beside = x + width + 6 if x + width + 7 * len(label) < WIDTH else x - 6
    place = f'x="{beside if outside else x + 6:.1f}"' + (' text-anchor="end"' if outside and beside < x else "")
    name = f"{span.service}: {span.name}" if depth < 2 else span.name
    yield f'  <text class="ink" x="{10 + 14 * depth}" y="{y + 19}">{escape(name)}</text>'
    yield f'  <rect x="{x:.1f}" y="{y + 5}" width="{width:.1f}" height="20" rx="2" class="{kind}"/>'
    shade = "ink" if outside else "inside"
    yield f'  <text {place} y="{y + 19}" font-size="11" class="{shade}">{escape(label)}</text>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(export()), encoding="utf-8")
