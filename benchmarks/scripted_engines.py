"""A prefill and a decode engine of NixlConnector that compute nothing, in one process.

    python -m benchmarks.scripted_engines STEP_MS

Prints `ready PREFILL_PORT DECODE_PORT`. The prefill engine answers each request at once with
`kv_transfer_params`. The decode engine streams the first token at once and one more to every stream
at each step, as an engine does. It reads no more of a request than it has to: what an answer costs
here is taken from the cores of what is measured.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import cast

import uvloop

from dynamo_lite.runtime.process.death_signal import die_with_parent

MODEL = "scripted"
TOKENS = 64

_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
_PREFILLED = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": " token", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 600, "completion_tokens": 1, "total_tokens": 601},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(38))],
            "remote_engine_id": "c0ffee",
            "remote_request_id": "cmpl-1-0-1a2b3c4d",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": 600,
            "remote_prefill_cached_tokens": 0,
        },
    }
).encode()
_STREAMED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _event(data: bytes) -> bytes:
    payload = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(payload), payload)


_TOKEN = _event(
    json.dumps(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
            "usage": None,
        }
    ).encode()
)
_END = _event(b"[DONE]") + b"0\r\n\r\n"


def _whole(data: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(data) + data


class Steps:
    """Gives each stream one token a step."""

    def __init__(self, step_s: float):
        self._step_s = step_s
        #: Tokens that each stream still gets.
        self._left: dict[asyncio.WriteTransport, int] = {}

    def begin(self, transport: asyncio.WriteTransport) -> None:
        transport.write(_STREAMED + _TOKEN)
        self._left[transport] = TOKENS - 1

    def forget(self, transport: asyncio.WriteTransport) -> None:
        self._left.pop(transport, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            for transport, left in list(self._left.items()):
                if left > 1:
                    transport.write(_TOKEN)
                    self._left[transport] = left - 1
                else:
                    transport.write(_TOKEN + _END)
                    del self._left[transport]


class Connection(asyncio.Protocol):
    """One kept-alive connection; one request at a time."""

    def __init__(
        self,
        answer: Callable[[asyncio.WriteTransport], None],
        gone: Callable[[asyncio.WriteTransport], None],
    ):
        self._answer, self._gone = answer, gone
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0 or len(self._data) < end + 4 + _length(self._data[:end]):
            return
        if self._data.startswith(b"POST"):
            self._answer(self._transport)
        else:
            self._transport.write(_whole(_MODELS))
        self._data.clear()


def _length(head: bytearray) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def main(step_s: float) -> None:
    loop = asyncio.get_running_loop()
    steps = Steps(step_s)
    answers = (lambda transport: transport.write(_whole(_PREFILLED)), steps.begin)
    servers = [
        await loop.create_server(lambda to=to: Connection(to, steps.forget), "127.0.0.1", 0)
        for to in answers
    ]
    print("ready", *(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await steps.run()


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(main(float(sys.argv[1]) / 1000))
