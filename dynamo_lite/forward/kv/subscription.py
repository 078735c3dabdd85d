"""Follows the KV events that one stock vLLM engine publishes (`--kv-events-config`).

ZeroMQ reconnects by itself. After each connect the engine's blocks are replayed, if it has a
replay endpoint. After a disconnect the engine's blocks are unknown. Source of the frames: vLLM
0.32, `distributed/kv_events.py`, `ZmqEventPublisher`.
"""

import asyncio
import logging
from collections.abc import Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dynamo_lite.forward.kv.batches import Batches
from dynamo_lite.policy.routing.known_blocks import KnownBlocks
from dynamo_lite.runtime.log_limit import LogLimit

logger = logging.getLogger(__name__)

#: Batches that wait while this process is busy.
_MAX_WAITING = 100_000
_MAX_BATCH_BYTES = 64 << 20
#: vLLM looks for requests ten times a second.
_REPLAY_S = 5.0
#: A connection to a lost host is detected after this time.
_HEARTBEAT_MS = 5000
_END = b"\xff" * 8
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class KvSubscription:
    """number, name: of the engine. endpoint: where it publishes. replay: where it replays;
    None: nowhere."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        known: KnownBlocks,
        *,
        number: int,
        name: str,
        endpoint: str,
        replay: str | None,
    ):
        self._context, self._known = context, known
        self._number, self._name = number, name
        self._endpoint, self._replay_endpoint = endpoint, replay
        self._batches = Batches()
        self._followed = False
        #: One batch, or one replay, at a time.
        self._lock = asyncio.Lock()
        self._malformed = LogLimit()

    async def run(self) -> None:
        """Follows the events until it is cancelled."""
        socket = self._context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            monitor = socket.get_monitor_socket(_EVENTS)
            socket.connect(self._endpoint)
            async with asyncio.TaskGroup() as tasks:
                following = self._follow_connection(monitor)
                tasks.create_task(following, name=f"connection of {self._name}")
                tasks.create_task(self._follow_batches(socket), name=f"batches of {self._name}")
        finally:
            self._known.forget(self._number)
            socket.disable_monitor()
            socket.close(linger=0)

    async def _follow_connection(self, monitor: zmq.asyncio.Socket) -> None:
        try:
            while True:
                event = parse_monitor_message(await monitor.recv_multipart())["event"]
                async with self._lock:
                    self._begin()
                    if event == zmq.EVENT_DISCONNECTED:
                        logger.info("the KV events of engine %s are lost", self._name)
                    else:
                        logger.info("the KV events of engine %s are followed", self._name)
                        await self._replay(0)
        finally:
            monitor.close(linger=0)

    async def _follow_batches(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            async with self._lock:
                await self._on_batch(frames)
            await asyncio.sleep(0)

    async def _on_batch(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return self._note_malformed()
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        if self._batches.heard(number):
            self._begin()
            self._batches.heard(number)
        if self._batches.missing(number):
            self._known.batches["missing"] += 1
            await self._replay(self._batches.next)
        self._take(number, payload)

    def _begin(self) -> None:
        """Starts over: the blocks of the engine are unknown."""
        self._batches, self._followed = Batches(), False
        self._known.forget(self._number)

    def _take(self, number: int, payload: bytes) -> None:
        self._follow()
        before = self._batches.dropped
        changes = self._batches.take(number, payload)
        if self._batches.dropped > before:
            self._note_malformed()
        if changes is None:
            self._known.batches["seen"] += 1
            return
        self._known.batches["applied"] += 1
        if self._batches.block_size:
            self._known.changed(self._number, self._batches.block_size, changes)

    def _follow(self) -> None:
        if not self._followed:
            self._followed = True
            self._known.follow(self._number)

    async def _replay(self, start: int) -> None:
        """Takes all batches from this number on that the engine still has."""
        if self._replay_endpoint is None:
            return
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(_REPLAY_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 3 or len(frames[-2]) != 8:
                        return self._note_malformed()
                    if frames[-2] == _END:
                        return self._follow()
                    self._take(int.from_bytes(frames[-2], "big"), frames[-1])
        except TimeoutError:
            logger.warning("engine %s replays no KV events (%s)", self._name, self._replay_endpoint)
        finally:
            socket.close(linger=0)

    def _note_malformed(self) -> None:
        self._known.batches["malformed"] += 1
        if (held_back := self._malformed.allow()) is not None:
            more = f" ({held_back} more)" if held_back else ""
            logger.warning("KV events of engine %s cannot be used%s", self._name, more)
