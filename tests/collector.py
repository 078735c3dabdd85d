"""An OTLP collector on a port of this machine: OTLP over HTTP, spans kept to be asked for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Seen:
    """A span as it came. service: who sent it. start, end: nanoseconds since the epoch."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent: str
    start: int
    end: int
    kind: int
    failed: bool
    attributes: dict[str, Any]


class Collector:
    """requests: how many there were. paths: where they went."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._lock = threading.Lock()
        self.paths: set[str] = set()
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.paths.add(path)
            for sent in request.resource_spans:
                service = _values(sent.resource.attributes)["service.name"]
                for scope in sent.scope_spans:
                    self._seen += [_seen(service, span) for span in scope.spans]

    def spans(self, trace_id: str) -> list[Seen]:
        """Of one trace, in the order of their begin."""
        with self._lock:
            found = [span for span in self._seen if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.start)


def _seen(service: str, span: Span) -> Seen:
    return Seen(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.kind,
        span.status.code == 2,
        _values(span.attributes),
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, body)
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, name="collector")
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
