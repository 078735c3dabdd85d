"""The Forwarder's HTTP server: limits, headers, other routes, odd clients, HTTPS on both sides."""

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from dynamo_lite.forward import http
from dynamo_lite.forward.client import Client
from dynamo_lite.runtime.tls import server_context
from tests.builders import eventually
from tests.external import Certificates
from tests.forwarding import COMPLETION, TEXT, Rig, rig, told
from tests.scripted import Fault, Leg

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@asynccontextmanager
async def connected(
    r: Rig, request: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of its own, with this request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]))
    try:
        writer.write(request)
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def raw(r: Rig, request: bytes, *, until: bytes = b"") -> bytes:
    """What comes back, until the connection is closed or `until` has come."""
    async with asyncio.timeout(10), connected(r, request) as (reader, _):
        return await (reader.readuntil(until) if until else reader.read())


def post(body: bytes, *fields: str, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    if not fields:
        fields = (f"Content-Length: {len(body)}",)
    lines = [f"POST {path} HTTP/{version}", "Host: x", *fields, "Connection: close"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def encoded(**fields: object) -> bytes:
    return json.dumps({**COMPLETION, **fields}).encode()


async def test_large_bodies_are_refused_before_any_engine_is_asked():
    async with rig(max_body_bytes=1000) as r:
        assert await r.text(prompt="x" * 800) == TEXT
        asked = len(r.fleet.legs)
        answer = await raw(r, post(b"", "Content-Length: 100000"))
        assert answer.startswith(b"HTTP/1.1 413") and b"max-body-bytes" in answer
        chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
        answer = await raw(r, post(chunk * 3, "Transfer-Encoding: chunked"))
        assert answer.startswith(b"HTTP/1.1 413")
        assert len(r.fleet.legs) == asked


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "BODY_S", 0.2)
    async with rig() as r:
        answer = await raw(r, post(b"{", "Content-Length: 100"))
        assert answer.startswith(b"HTTP/1.1 408")
        assert r.fleet.legs == []


async def test_bodies_that_do_not_come_leave_memory_for_others():
    body = post(encoded(prompt="x" * 800))
    async with rig(max_body_bytes=1000) as r:

        async def status(wanted: bytes) -> bool:
            return (await raw(r, body)).startswith(b"HTTP/1.1 " + wanted)

        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                part = post(b"x" * 990, "Content-Length: 1000")
                await stack.enter_async_context(connected(r, part))
            await eventually(lambda: status(b"503"))
        await eventually(lambda: status(b"200"))


async def test_a_connection_without_a_request_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http, "_KEEP_ALIVE_S", 0.2)
    async with rig() as r:
        assert b'{"ok":true}' in await raw(r, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_odd_requests_reach_no_engine():
    long, many = [f"X-Long: {'x' * 20_000}"], [f"X-{n}: 1" for n in range(200)]
    async with rig() as r:
        for fields in (long, many):
            answer = await raw(r, post(b"", *fields, "Content-Length: 0"))
            assert answer.startswith(b"HTTP/1.0 400")
        for target in ("http://10.0.0.9:1/v1/completions", "*"):
            answer = await raw(r, post(b"{}", path=target))
            assert answer.startswith((b"HTTP/1.1 405", b"HTTP/1.0 400"))
        for route in ("/v1/completions", "/tokenize"):
            headers = {"content-encoding": "gzip"}
            status, answer = await r.ask(
                data=gzip.compress(encoded()), headers=headers, route=route
            )
            assert status == 415 and "gzip" in answer["error"]["message"]
        for charset in ("charset=utf-7", "charset=utf-8; charset=utf-7", "charset*=utf-8''utf-7"):
            headers = {"content-type": f"multipart/form-data; boundary=x; {charset}"}
            status, answer = await r.ask(data=b"--x--\r\n", headers=headers, route="/v1/audio/x")
            assert status == 415 and "utf-7" in answer["error"]["message"]
        # Its own route is not the engines'.
        async with r.session.get(f"{r.url}/health") as answer:
            assert answer.status == 200
        assert r.fleet.legs == []


async def test_chunked_bodies_expectations_and_old_clients():
    async with rig() as r:
        body = encoded()
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        answer = await raw(r, post(chunked, "Transfer-Encoding: chunked"))
        assert answer.startswith(b"HTTP/1.1 200") and TEXT.encode() in answer
        answer = await raw(r, post(body, f"Content-Length: {len(body)}", "Expect: 100-continue"))
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
        answer = await raw(r, post(encoded(stream=True), version="1.0"))
        assert answer.startswith(b"HTTP/1.0 200") and answer.endswith(b"data: [DONE]\n\n")
        # Two requests, one after the other on one connection.
        one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        answer = await raw(r, one % (len(body), body) + post(body))
        assert answer.count(b"HTTP/1.1 200") == 2 == answer.count(TEXT.encode())


async def test_an_answer_to_head_has_no_body():
    """Else the next one on the connection would begin with it."""
    async with rig() as r:
        lines = "HTTP/1.1\r\nHost: x\r\n"
        both = f"HEAD /health {lines}\r\nGET /health {lines}Connection: close\r\n\r\n".encode()
        _, _, rest = (await raw(r, both)).partition(b"\r\n\r\n")
        assert rest.startswith(b"HTTP/1.1 200 ")


async def test_other_routes_pass_as_they_are():
    async with rig() as r:
        headers = {"authorization": "Bearer k", "x-custom": "a", "x-client": "1"}
        async with r.session.get(f"{r.url}/v1/models?a=b%20c", headers=headers) as answer:
            assert await answer.json() == {"passed": "/v1/models?a=b%20c", "body": None}
        leg = r.fleet.legs[-1]
        assert leg.engine in r.decode and leg.method == "GET"
        assert leg.headers["authorization"] == "Bearer k" and leg.headers["x-custom"] == "a"
        assert leg.headers["host"] == r.decode[0].address
        headers = {"accept-encoding": "gzip"}
        assert await r.ask({"prompt": "p"}, route="/tokenize", headers=headers) == (
            200,
            {"passed": "/tokenize", "body": {"prompt": "p"}},
        )
        assert "accept-encoding" not in r.fleet.legs[-1].headers
        # A file is no JSON, and is not looked into.
        async with r.session.post(f"{r.url}/v1/audio", data=b"\x00\xff") as answer:
            assert answer.status == 400
        assert r.fleet.legs[-1].raw == b"\x00\xff"
        assert r.answered == {("passed", ""): 2}


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("http://{engine}/v1/models/?a=b", "/v1/models/?a=b"),
        ("http://{engine}//other.example/", "/other.example/"),
        ("http://{engine}0/", "http://{engine}0/"),
        ("https://other.example/", "https://other.example/"),
    ],
)
async def test_a_redirect_of_an_engine_to_itself_leads_here(location: str, shown: str):
    """A client may not reach the engine's address, which such a redirect contains."""

    async def redirect(request: web.BaseRequest, leg: Leg) -> web.StreamResponse:
        return web.Response(status=307, headers={"location": location.format(engine=name)})

    async with rig() as r:
        name = r.decode[0].address
        r.decode[0].answer = redirect  # type: ignore[method-assign]
        async with r.session.get(f"{r.url}/docs", allow_redirects=False) as answer:
            assert answer.status == 307
            assert answer.headers["location"] == shown.format(engine=name)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_nothing_is_upgraded(method: str):
    """The engine gets a plain request, with its body."""
    async with rig() as r:
        body = b"" if method == "GET" else json.dumps({"prompt": "p"}).encode()
        fields = ["Connection: Upgrade, X-Hop", "Upgrade: websocket", "X-Hop: 1"]
        head = [f"{method} /v1/realtime HTTP/1.1", "Host: x", *fields]
        head.append(f"Content-Length: {len(body)}")
        request = "\r\n".join(head).encode() + b"\r\n\r\n" + body
        answer = await raw(r, request, until=b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        leg = r.fleet.legs[-1]
        assert leg.raw == body
        assert not {"connection", "upgrade", "x-hop"} & {name.lower() for name in leg.headers}


async def test_a_mistake_of_ours_is_500_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with rig() as r:

        def fail(*_: object) -> None:
            raise RuntimeError("ours")

        monkeypatch.setattr(r.placer, "place", fail)
        status, answer = await r.ask()
        assert status == 500 and "ours" not in str(answer)
        assert "ours" in caplog.text
        assert [one.outcome for one in told(r)] == ["failed"]


async def test_both_legs_have_the_clients_key_and_are_not_asked_to_compress():
    async with rig() as r:
        named = {"x-prefiller-host-port": "10.0.0.9:1", "accept-encoding": "gzip"}
        await r.ask(headers={"authorization": "Bearer k", **named})
        assert [leg.headers["authorization"] for leg in r.fleet.legs] == ["Bearer k"] * 2
        assert not any(name in leg.headers for leg in r.fleet.legs for name in named)


async def test_a_client_that_reads_slowly_gets_all_and_is_not_buffered(
    monkeypatch: pytest.MonkeyPatch,
):
    full, waiting = asyncio.Event(), 0
    push = Client.push

    def watched(client: Client, data: bytes) -> bool:
        nonlocal waiting
        room = push(client, data)
        transport = client._request.transport
        assert transport is not None
        waiting = max(waiting, transport.get_write_buffer_size())
        if not room:
            full.set()
        return room

    monkeypatch.setattr(Client, "push", watched)
    async with rig() as r, asyncio.timeout(60):
        r.decode[0].tokens = tokens = 4000
        # Together more than what the connection's buffers take.
        r.decode[0].text = lambda number: "x" * 2000  # type: ignore[method-assign]
        request = post(encoded(max_tokens=tokens, stream=True))
        async with connected(r, request) as (reader, _):
            await full.wait()
            events = _body(await reader.read()).count(b'data: {"')
        assert events == tokens
        # One read of the engine's socket beyond the limit at most.
        assert waiting < 1 << 20


async def test_a_client_that_reads_nothing_does_not_keep_its_leg():
    async with rig(idle_timeout_s=2.0) as r, asyncio.timeout(90):
        r.decode[0].tokens = tokens = 4000
        # Together more than what the buffers of both connections take.
        r.decode[0].text = lambda number: "x" * 10_000  # type: ignore[method-assign]
        with socket.create_connection(("127.0.0.1", int(r.url.rpartition(":")[2]))) as client:
            client.sendall(post(encoded(max_tokens=tokens, stream=True)))
            await eventually(lambda: r.decode[0].legs, 60)
            await r.decode[0].legs[0].aborted.wait()
        await eventually(lambda: r.parts.stats.ended["client gone"] == 1, 60)


@pytest.mark.parametrize("grace_s", [0.0, 0.1, 5.0])
async def test_a_drain_finishes_what_is_open_within_its_grace(grace_s: float):
    async with rig() as r:
        hold = asyncio.Event()
        r.decode[0].faults.append(Fault(hold=hold))
        asked = asyncio.create_task(r.text())
        await eventually(lambda: r.decode[0].legs, 5)
        stopping = asyncio.create_task(r.server.stop(grace_s))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            if grace_s > 1:
                hold.set()
                assert await asked == TEXT
            else:
                with pytest.raises(aiohttp.ClientError):
                    await asked
                await r.decode[0].legs[0].aborted.wait()
            await stopping


def _body(answer: bytes) -> bytes:
    """Of an answer in chunks, whose borders may be anywhere in an event."""
    at = answer.index(b"\r\n\r\n") + 4
    parts: list[bytes] = []
    while at < len(answer):
        end = answer.index(b"\r\n", at)
        start, size = end + 2, int(answer[at:end], 16)
        parts.append(answer[start : start + size])
        at = start + size + 2
    return b"".join(parts)


# HTTPS


@pytest.mark.parametrize("name", ["nixl", "sglang"])
async def test_both_sides_speak_https(
    certificates: Certificates, name: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    async with rig(name, https=certificates, ca_file=str(certificates.folder / "ca.pem")) as r:
        assert r.url.startswith("https://")
        assert await r.text() == TEXT
        assert (await r.stream()).endswith(b"data: [DONE]\n\n")
        assert r.answered == {("disaggregated", ""): 2}
        # Clients without TLS are not served.
        async with aiohttp.ClientSession() as plain:
            with pytest.raises(aiohttp.ClientError):
                await plain.get(r.url.replace("https:", "http:") + "/health")
        assert await r.text() == TEXT
    assert caplog.records == []
    assert server_context(*certificates.files()).minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("trusted", ["stranger", None, "ca"])
async def test_an_engine_whose_certificate_is_not_trusted_gets_nothing(
    certificates: Certificates, trusted: str | None
):
    """Nor does one that has a certificate for another name."""
    ca_file = None if trusted is None else str(certificates.folder / f"{trusted}.pem")
    async with rig(https=certificates, ca_file=ca_file) as r:
        if trusted == "ca":
            await r.decode[0].stop()
            r.decode[0].tls = server_context(*certificates.files("misnamed"))
            await r.decode[0].start()
            for _ in range(2):
                await r.check()
        assert (await r.ask())[0] == 503
        assert r.fleet.legs == []
        assert "certificate" in r.engines.all[1].trouble.lower()
