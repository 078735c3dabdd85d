"""The ZeroMQ sockets between this process and vLLM's Rust frontend.

The Rust frontend adopts two listening sockets. This process connects to them as an engine
does: a DEALER for requests, with the engine's rank as its identity, and a PUSH for outputs.
The sockets are Unix sockets in a private directory: a process that reaches them could answer
requests.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.serial_utils import bytestr

logger = logging.getLogger(__name__)

_BACKLOG = 16
#: The engine's rank as vLLM encodes it: two bytes, little-endian.
_IDENTITY = (0).to_bytes(2, "little")


class RustSockets:
    """Context manager: leaving it closes the sockets. inputs, outputs: for the Rust frontend."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="dynamo-lite-")))
        self._paths = folder / "inputs", folder / "outputs"
        context = zmq.asyncio.Context()
        self._stack.callback(context.destroy, linger=0)
        self._requests = context.socket(zmq.DEALER)
        self._requests.identity = _IDENTITY
        # Not an asyncio socket: its sends never wait, because nothing limits its queue.
        self._results = zmq.Context(context).socket(zmq.PUSH)
        self._stack.callback(self._results.close, linger=0)
        for sock in (self._requests, self._results):
            sock.set_hwm(0)
        self.inputs, self.outputs = (
            self._stack.enter_context(_listener(path)) for path in self._paths
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def connect(self, ready: EngineCoreReadyResponse) -> None:
        """Introduces this process as the engine."""
        for sock, path in zip((self._requests, self._results), self._paths, strict=True):
            sock.connect(f"ipc://{path}")
        await self._requests.send(msgspec.msgpack.encode(ready))

    def send(self, frames: Sequence[bytestr]) -> None:
        """Sends one message. Never blocks."""
        self._results.send_multipart(frames, zmq.NOBLOCK)

    async def run(self, take: Callable[[list[bytes]], None]) -> None:
        """Passes each received message to `take`, until it is cancelled."""
        while True:
            frames = await self._requests.recv_multipart()
            try:
                take(frames)
            except Exception:
                logger.exception("a message of the Rust frontend could not be handled")


def _listener(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(_BACKLOG)
    return sock
