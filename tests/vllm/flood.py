"""Clients that send what a Frontend should not have to suffer from; a process of its own.

`python -m tests.vllm.flood URL KIND COUNT BYTES` prints, as JSON, how many were
answered with each status ("none": the connection ended without an answer).
"""

import asyncio
import json
import socket
import sys
from collections import Counter
from urllib.parse import urlsplit

_CHUNK = 64 << 10
#: What is sent piece by piece.
_IN_PIECES = ("slow", "length")


def body(kind: str, size: int) -> tuple[str, bytes]:
    """Path and JSON of at most `size` bytes."""
    if kind == "bad messages":
        start, item, end = b'{"model":"tiny","messages":[', b"{},", b"{}]}"
        return "/v1/chat/completions", start + item * ((size - 64) // len(item)) + end
    if kind == "slow reader":
        return "/v1/completions", b'{"model":"tiny","prompt":"a","stream":true,"max_tokens":1000}'
    start, item, end = b'{"model":"tiny","prompt":"', b"a b", b'"}'
    return "/tokenize", start + item * ((size - 64) // len(item)) + end


async def ask(url: str, kind: str, size: int) -> str:
    """Sends until there is an answer. slow: a byte now and then; slow reader: reads its tokens a
    byte now and then, so that the Frontend holds them.

    Without asyncio's streams: after a failed write they drop what has come. A server that has
    refused the rest resets the connection some seconds after its answer, which a process that gets
    no processor for as long still finds in its socket.
    """
    host = urlsplit(url)
    address = host.hostname or "", host.port or 80
    if kind == "slow reader":
        return await read_slowly(address)
    if kind in _IN_PIECES:
        path, whole = "/v1/completions", b""
    else:
        path, whole = body(kind, size)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(whole) or size}\r\n\r\n"
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        sending = asyncio.create_task(send(sock, kind, head.encode() + whole, size))
        try:
            status = (await loop.sock_recv(sock, len("HTTP/1.1 413"))).split()
            return status[1].decode() if len(status) > 1 else "none"
        except ConnectionError:
            return "none"
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def read_slowly(address: tuple[str, int]) -> str:
    path, whole = body("slow reader", 0)
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least that there is
        await loop.sock_connect(sock, address)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(whole)}\r\n\r\n"
        await loop.sock_sendall(sock, head.encode() + whole)
        status = (await loop.sock_recv(sock, len("HTTP/1.1 200"))).split()[-1].decode()
        while status == "200" and await loop.sock_recv(sock, 1):
            await asyncio.sleep(0.1)
    return status


async def send(sock: socket.socket, kind: str, begin: bytes, size: int) -> None:
    """begin: the whole request, or its head, after which `size` bytes are sent in pieces."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, begin)
    if kind not in _IN_PIECES:
        return
    chunk = b" " * (1 if kind == "slow" else _CHUNK)
    for _ in range(0, size, len(chunk)):
        await loop.sock_sendall(sock, chunk)
        if kind == "slow":
            await asyncio.sleep(0.1)


async def main(url: str, kind: str, count: int, size: int) -> None:
    print("begun", flush=True)
    answers = await asyncio.gather(*(ask(url, kind, size) for _ in range(count)))
    print(json.dumps(Counter(answers)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
