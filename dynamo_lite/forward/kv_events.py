"""Follows the KV events that stock vLLM engines publish (`--kv-events-config`).

ZeroMQ reconnects by itself. After each connect the engine's blocks are replayed, if it has a
replay endpoint. After a disconnect the engine's blocks are unknown. Source of the frames: vLLM
0.32, `distributed/kv_events.py`, `ZmqEventPublisher`.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dynamo_lite.forward.engines import KnownEngine, KnownEngines
from dynamo_lite.forward.known_blocks import KnownBlocks
from dynamo_lite.forward.tokenizer import Tokenizer
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.protocol.kv import KvChange
from dynamo_lite.routing.engine_cache import EngineCache
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: Limit on the blocks of one engine: more than fit into any device.
_MAX_BLOCKS = 1 << 23
#: Batches that wait while this process is busy.
_MAX_WAITING = 100_000
_MAX_BATCH_BYTES = 64 << 20
#: vLLM looks for requests ten times a second.
_REPLAY_S = 5.0
#: A connection to a lost host is detected after this time.
_HEARTBEAT_MS = 5000
_END = b"\xff" * 8
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class EngineKv:
    """The KV blocks that engines publish, and the tokeniser of the prompts that are compared with
    them. Async context manager: follows the engines that are there when it is entered, and those of
    `follow` until they leave."""

    def __init__(self, engines: KnownEngines, upstream: Upstream):
        self.known = KnownBlocks()
        self.tokenizer = Tokenizer(upstream, engines, self.known)
        self._engines = engines
        self._tasks = OwnedTasks()
        self._followed: dict[KnownEngine, asyncio.Task[None]] = {}
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> Self:
        for engine in self._engines.all:
            self.follow(engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()
        self._context.destroy(linger=0)

    def follow(self, engine: KnownEngine) -> None:
        """Does nothing for an engine that publishes no events."""
        if engine.options.kv_events is not None:
            subscription = KvSubscription(self._context, self.known, engine)
            self._followed[engine] = self._tasks.start(
                subscription.run(engine.options.kv_events), name=f"KV events of {engine.name}"
            )

    def leave(self, engine: KnownEngine) -> None:
        if (task := self._followed.pop(engine, None)) is not None:
            task.cancel()


class Batches:
    """The blocks that one process of an engine holds, according to its batches so far.

    An engine numbers its batches from 0 on. A subscriber may miss some (it came late, or was too
    slow), and gets them by a replay; a replay may contain batches that also come by the
    subscription.
    """

    def __init__(self) -> None:
        #: Number of the next batch.
        self.next = 0
        #: Events that could not be used.
        self.dropped = 0
        self._heard = -1
        self._cache = EngineCache(self._on_drop)

    @property
    def block_size(self) -> int:
        """In tokens; 0 until it is known."""
        return self._cache.block_size

    def heard(self, number: int) -> bool:
        """Takes the number of a batch of the subscription. Returns whether another process
        begins with it, because numbers only grow. Then everything before it must be forgotten."""
        restarted = number <= self._heard
        self._heard = number
        return restarted

    def take(self, number: int, payload: bytes) -> Sequence[KvChange] | None:
        """The changes of a batch; None if it is known already.

        After missing or malformed batches the changes begin with `KvCleared`, because the removed
        blocks are not known.
        """
        if number < self.next:
            return None
        changes = self._cache.clear() if number > self.next and len(self._cache) else []
        self.next = number + 1
        try:
            changes += self._cache.take(payload)
        except ValueError:
            self.dropped += 1
            return self._cache.clear()
        return changes if len(self._cache) <= _MAX_BLOCKS else self._cache.clear()

    def _on_drop(self) -> None:
        self.dropped += 1


class KvSubscription:
    def __init__(self, context: zmq.asyncio.Context, known: KnownBlocks, engine: KnownEngine):
        self._context, self._known = context, known
        self._number, self._name = engine.number, engine.name
        self._replay_endpoint = engine.options.kv_replay
        self._batches = Batches()
        self._followed = False
        #: One batch, or one replay, at a time.
        self._lock = asyncio.Lock()
        self._malformed = LogLimit()

    async def run(self, endpoint: str) -> None:
        """Follows the events until it is cancelled. endpoint: where the engine publishes."""
        socket = self._context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            monitor = socket.get_monitor_socket(_EVENTS)
            socket.connect(endpoint)
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
        if number > self._batches.next:
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
