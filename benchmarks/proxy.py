"""The least that can stand before two vLLM engines: round-robin, pull or push.

    python -m benchmarks.proxy KIND PORT URL URL

It parses as little as it can, so that the engines behind it are what is measured.
For pull and push the first URL is the prefill engine's: it is asked for one token,
its answer says where the KV lies, and the decode engine is then told.
"""

import asyncio
import itertools
import json
import sys
import uuid
from typing import Any

_HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_FAILED = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
#: What the decode engine of a push is told; it must not read.
_PUSH_KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
)
_ASK_FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Proxy:
    def __init__(self, kind: str, ports: list[int]):
        self._kind, self._ports = kind, ports
        self._turns = itertools.cycle(ports)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /health"):
                writer.write(_HEALTHY)
                return
            body = await reader.readexactly(_length(head))
            path = head.split(b" ", 2)[1].decode()
            if self._kind == "round-robin":
                await _pass_on(next(self._turns), path, body, "", writer)
            else:
                await self._disaggregated(path, json.loads(body), writer)
        except (OSError, EOFError, KeyError, ValueError) as exc:
            print(f"{type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
            writer.write(_FAILED)
        finally:
            writer.close()

    async def _disaggregated(
        self, path: str, request: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        request_id = uuid.uuid4().hex
        first = {**request, "stream": False, "max_tokens": 1}
        first["kv_transfer_params"] = _ASK_FOR_PREFILL
        answer = await _ask(self._ports[0], path, json.dumps(first).encode(), request_id)
        params = json.loads(answer)["kv_transfer_params"]
        if self._kind == "push":
            params = {key: params[key] for key in _PUSH_KEYS}
        second = json.dumps({**request, "kv_transfer_params": params}).encode()
        await _pass_on(self._ports[1], path, second, request_id, writer)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise ValueError("a request without a length")


def _request(path: str, body: bytes, request_id: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n"
    )
    if request_id:
        head += f"X-Request-Id: {request_id}\r\n"
    return head.encode() + b"\r\n" + body


async def _ask(port: int, path: str, body: bytes, request_id: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request(path, body, request_id))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(head.split(b"\r\n", 1)[0].decode())
        return await reader.readexactly(_length(head))
    finally:
        writer.close()


async def _pass_on(
    port: int, path: str, body: bytes, request_id: str, client: asyncio.StreamWriter
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request(path, body, request_id))
        while part := await reader.read(1 << 16):
            client.write(part)
            await client.drain()
    finally:
        writer.close()


async def main(kind: str, port: int, urls: list[str]) -> None:
    ports = [int(url.rpartition(":")[2]) for url in urls]
    server = await asyncio.start_server(Proxy(kind, ports).serve, "127.0.0.1", port, limit=1 << 24)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
