"""Spans on their way to a collector, and a process that traces nothing."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo_lite.protocol.trace import TraceContext, new_trace
from dynamo_lite.runtime import tracing
from dynamo_lite.runtime.tracing import Tracer, TracingOptions, check_endpoint, open_tracer
from tests.builders import eventually
from tests.collector import collecting
from tests.ports import reserved_port

NAMES = {"namespace": "t", "component": "Frontend", "instance": "Frontend-0"}


async def test_spans_arrive_as_they_were_recorded_when_the_tracer_is_closed():
    now, wall = time.monotonic(), time.time()
    root = new_trace()
    work = root.child()
    with collecting() as collector:
        async with open_tracer(TracingOptions(endpoint=collector.url), **NAMES) as tracer:
            tracer.record("work", work, root.span_id, now - 2, now - 1, attributes={"a": 1})
            tracer.record_child("part", work, now - 1.5, now - 1.75)
            note = ["noted", root.trace_id, "00000000000000cc", root.span_id, now, now]
            tracer.record_notes([[*note, "consumer", {"b": True}]])
            tracer.record("root", root, "", now - 3, now, kind="server", error="broken")
        assert collector.paths == {"/v1/traces"}
        spans = {span.name: span for span in collector.spans(root.trace_id)}
    assert {name: span.parent for name, span in spans.items()} == {
        "root": "",
        "work": root.span_id,
        "part": work.span_id,
        "noted": root.span_id,
    }
    assert (spans["root"].span_id, spans["work"].span_id) == (root.span_id, work.span_id)
    assert spans["noted"].span_id == "00000000000000cc"
    assert spans["work"].attributes == {"a": 1} and spans["noted"].attributes == {"b": True}
    assert {span.service for span in spans.values()} == {"Frontend"}
    assert [name for name, span in spans.items() if span.failed] == ["root"]
    # OTLP's numbers: internal 1, server 2, consumer 5.
    kinds = {name: span.kind for name, span in spans.items()}
    assert kinds == {"root": 2, "work": 1, "part": 1, "noted": 5}
    assert spans["work"].end - spans["work"].start == pytest.approx(1e9, abs=1e6)
    assert spans["part"].end == spans["part"].start, "it does not end before it begins"
    assert spans["root"].end / 1e9 == pytest.approx(wall, abs=60)


async def test_a_cancelled_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch):
    before = set(threading.enumerate())
    making, go_on, made = threading.Event(), threading.Event(), threading.Event()
    load = tracing._load

    def held(options: TracingOptions, source: dict[str, str]) -> Any:
        making.set()
        assert go_on.wait(10)
        loaded = load(options, source)
        made.set()
        return loaded

    monkeypatch.setattr(tracing, "_load", held)
    tracer = open_tracer(TracingOptions(endpoint="http://127.0.0.1:1"), **NAMES)
    starting = asyncio.create_task(tracer.__aenter__())
    assert await asyncio.to_thread(making.wait, 10)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()
    assert await asyncio.to_thread(made.wait, 10)

    def left() -> list[str]:
        return [one.name for one in threading.enumerate() if one not in before]

    await eventually(lambda: not [name for name in left() if not name.startswith("asyncio")])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that is away is waited for a short time."""
    monkeypatch.setattr(tracing, "_FLUSH_S", 0.2)


@pytest.mark.usefixtures("impatient")
async def test_a_dead_collector_harms_nothing(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "opentelemetry")
    options = TracingOptions(endpoint=f"http://127.0.0.1:{reserved_port()}")
    async with open_tracer(options, **NAMES) as tracer:
        for _ in range(5000):  # more than the queue takes
            tracer.record("lost", new_trace(), "", 0.0, 1.0)
    tracer.record("late", new_trace(), "", 0.0, 1.0)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.usefixtures("impatient")
async def test_telling_a_span_does_not_wait_for_the_collector():
    """It is up, and never answers."""
    done = asyncio.Event()

    async def never_answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        options = TracingOptions(endpoint=f"http://127.0.0.1:{port}")
        async with asyncio.timeout(30), open_tracer(options, **NAMES) as tracer:
            for _ in range(5000):
                tracer.record("lost", new_trace(), "", 0.0, 1.0)
        done.set()


@pytest.mark.parametrize(("ratio", "share"), [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)])
async def test_a_share_of_the_traces_begins_here(ratio: float, share: float):
    tracer = Tracer(ratio, cast("Any", None), lambda _: None)
    begun = [tracer.begin(None) for _ in range(2000)]
    assert sum(context is not None for context in begun) / 2000 == pytest.approx(share, abs=0.1)
    client = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
    mine = tracer.begin(client)
    assert mine is not None and mine.trace_id == client.trace_id
    assert mine.span_id != client.span_id
    assert tracer.begin(TraceContext(client.trace_id, client.span_id, sampled=False)) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:4318", "expected http://HOST:PORT"),
        ("localhost", "expected http://HOST:PORT"),
        ("", "expected http://HOST:PORT"),
        ("grpc://127.0.0.1:4317", "expected http://HOST:PORT"),
        ("http://host:4317", "4318"),
        ("http://:4318", "expected http://HOST:PORT"),
        ("http://me:secret@host:port", "Port could not be cast"),
        ("http://host:99999", "Port out of range"),
        ("http://[::1", "Invalid IPv6"),
        ("http://me:secret@host:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("http://host:4318?key=1", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_a_bad_endpoint_is_named(url: str, said: str):
    assert said in (wrong := check_endpoint(url) or "") and "secret" not in wrong


def test_who_does_not_trace_loads_no_tracing_library():
    code = (
        "import sys\n"
        "import dynamo_lite.serve.services.decode_worker\n"
        "import dynamo_lite.serve.services.prefill_worker\n"
        "import dynamo_lite.serve.services.frontend.frontend, dynamo_lite.runtime.process.host\n"
        "import dynamo_lite.disagg.decode.scheduler\n"
        "import dynamo_lite.disagg.prefill.scheduler\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "[]", done.stderr
