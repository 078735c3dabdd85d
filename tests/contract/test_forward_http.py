"""The Forwarder's HTTP server: limits, headers, other routes, odd clients."""

import asyncio
import gzip
import json
import socket

import aiohttp
import pytest

from dynamo_lite.forward import http
from dynamo_lite.forward.client import Client
from tests.builders import eventually
from tests.forwarding import COMPLETION, TEXT, Rig, rig
from tests.scripted import Fault

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def raw(r: Rig, request: bytes, *, until: bytes = b"") -> bytes:
    """What comes back on a connection of its own, until it is closed or `until` has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]))
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            if until:
                return await reader.readuntil(until)
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def post(body: bytes, *fields: str, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", *fields, "Connection: close"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


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


async def test_stopping_without_a_grace_disconnects_at_once():
    async with rig() as r:
        r.decode[0].faults.append(Fault(hold=asyncio.Event()))
        asked = asyncio.create_task(r.ask())
        await eventually(lambda: r.decode[0].legs, 5)
        async with asyncio.timeout(5):
            await r.server.stop(0.0)
            with pytest.raises(aiohttp.ClientError):
                await asked
            await r.decode[0].legs[0].aborted.wait()


async def test_large_heads_are_refused():
    async with rig() as r:
        for fields in ([f"X-Long: {'x' * 20_000}"], [f"X-{n}: 1" for n in range(200)]):
            answer = await raw(r, post(b"", *fields, "Content-Length: 0"))
            assert answer.startswith(b"HTTP/1.0 400")
        assert r.fleet.legs == []


async def test_compressed_bodies_are_refused():
    async with rig() as r:
        data = gzip.compress(json.dumps(COMPLETION).encode())
        status, answer = await r.ask(data=data, headers={"content-encoding": "gzip"})
        assert status == 415 and "gzip" in answer["error"]["message"]
        status, _ = await r.ask(data=data, headers={"content-encoding": "gzip"}, route="/tokenize")
        assert status == 415
        assert r.fleet.legs == []


async def test_chunked_bodies_expectations_and_old_clients():
    async with rig() as r:
        body = json.dumps(COMPLETION).encode()
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        answer = await raw(r, post(chunked, "Transfer-Encoding: chunked"))
        assert answer.startswith(b"HTTP/1.1 200") and TEXT.encode() in answer
        length = f"Content-Length: {len(body)}"
        answer = await raw(r, post(body, length, "Expect: 100-continue"))
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
        streamed = json.dumps({**COMPLETION, "stream": True}).encode()
        answer = await raw(r, post(streamed, f"Content-Length: {len(streamed)}", version="1.0"))
        assert answer.startswith(b"HTTP/1.0 200") and answer.endswith(b"data: [DONE]\n\n")


async def test_requests_of_one_connection_follow_each_other():
    async with rig() as r:
        body = json.dumps(COMPLETION).encode()
        one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        two = (one % (len(body), body)) + post(body, f"Content-Length: {len(body)}")
        answer = await raw(r, two)
        assert answer.count(b"HTTP/1.1 200") == 2 == answer.count(TEXT.encode())


async def test_other_routes_pass_as_they_are():
    async with rig() as r:
        headers = {"authorization": "Bearer k", "x-custom": "a", "x-client": "1"}
        async with r.session.get(f"{r.url}/v1/models?a=b%20c", headers=headers) as answer:
            assert await answer.json() == {"passed": "/v1/models?a=b%20c", "body": None}
        leg = r.fleet.legs[-1]
        assert leg.engine in r.decode and leg.method == "GET"
        assert leg.headers["authorization"] == "Bearer k" and leg.headers["x-custom"] == "a"
        assert leg.headers["host"] == r.decode[0].url.removeprefix("http://")
        async with r.session.post(f"{r.url}/tokenize", json={"prompt": "p"}) as answer:
            assert await answer.json() == {"passed": "/tokenize", "body": {"prompt": "p"}}
        # A file is no JSON, and is not looked into.
        async with r.session.post(f"{r.url}/v1/audio", data=b"\x00\xff") as answer:
            assert answer.status == 400
        assert r.fleet.legs[-1].raw == b"\x00\xff"
        assert r.answered == {("passed", ""): 2}


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


async def test_engines_are_not_asked_to_compress():
    async with rig() as r:
        headers = {"accept-encoding": "gzip"}
        status, _ = await r.ask(headers=headers)
        assert status == 200
        status, _ = await r.ask(route="/tokenize", headers=headers)
        assert status == 200
        assert len(r.fleet.legs) == 3
        assert not any("accept-encoding" in leg.headers for leg in r.fleet.legs)


async def test_a_route_that_is_no_path_is_refused():
    async with rig() as r:
        for target in ("http://10.0.0.9:1/v1/completions", "*"):
            answer = await raw(r, post(b"{}", "Content-Length: 2", path=target))
            assert answer.startswith((b"HTTP/1.1 405", b"HTTP/1.0 400"))
        assert r.fleet.legs == []


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


async def test_its_own_routes_are_not_the_engines():
    async with rig() as r:
        async with r.session.get(f"{r.url}/health") as answer:
            assert answer.status == 200
        assert r.fleet.legs == []


async def test_both_legs_have_the_clients_key():
    async with rig() as r:
        await r.ask(headers={"authorization": "Bearer k", "x-prefiller-host-port": "10.0.0.9:1"})
        assert [leg.headers["authorization"] for leg in r.fleet.legs] == ["Bearer k"] * 2
        assert not any("x-prefiller-host-port" in leg.headers for leg in r.fleet.legs)


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
    tokens = 4000
    async with rig() as r, asyncio.timeout(60):
        r.decode[0].tokens = tokens
        # Together more than what the connection's buffers take.
        r.decode[0].text = lambda number: "x" * 2000  # type: ignore[method-assign]
        body = json.dumps({**COMPLETION, "max_tokens": tokens, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]))
        try:
            writer.write(post(body, f"Content-Length: {len(body)}"))
            await full.wait()
            events = _body(await reader.read()).count(b'data: {"')
        finally:
            writer.close()
        assert events == tokens
        # One read of the engine's socket beyond the limit at most.
        assert waiting < 1 << 20


async def test_a_client_that_reads_nothing_does_not_keep_its_leg():
    tokens = 4000
    async with rig(idle_timeout_s=2.0) as r, asyncio.timeout(90):
        r.decode[0].tokens = tokens
        # Together more than what the buffers of both connections take.
        r.decode[0].text = lambda number: "x" * 10_000  # type: ignore[method-assign]
        body = json.dumps({**COMPLETION, "max_tokens": tokens, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", int(r.url.rpartition(":")[2]))) as client:
            client.sendall(post(body, f"Content-Length: {len(body)}"))
            await eventually(lambda: r.decode[0].legs, 60)
            await r.decode[0].legs[0].aborted.wait()
        await eventually(lambda: r.forwarding.stats.gone == 1, 60)


async def test_a_drain_finishes_what_is_open():
    async with rig() as r:
        hold = asyncio.Event()
        r.decode[0].faults.append(Fault(hold=hold))
        asked = asyncio.create_task(r.text())
        await eventually(lambda: r.decode[0].legs, 5)
        stopping = asyncio.create_task(r.server.stop(5.0))
        await asyncio.sleep(0)
        hold.set()
        assert await asked == TEXT
        await stopping


async def test_a_drain_ends_what_takes_longer():
    async with rig() as r:
        hold = asyncio.Event()
        r.decode[0].faults.append(Fault(hold=hold))
        asked = asyncio.create_task(r.text())
        await eventually(lambda: r.decode[0].legs, 5)
        async with asyncio.timeout(5):
            await r.server.stop(0.1)
            with pytest.raises(aiohttp.ClientError):
                await asked
            await r.decode[0].legs[0].aborted.wait()


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
