"""The queues of the simulated NATS server: the in-memory twin behind calls."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.queue.base import QueueConfig, QueueDepth
from dynamo_lite.simulation.loop.loop import VirtualLoop
from dynamo_lite.simulation.loop.process import SimProcess
from dynamo_lite.simulation.servers.memory_queue import MemoryBroker, MemoryJob, MemoryQueue
from dynamo_lite.simulation.servers.server import Connection, at_once


class Stream:
    """One queue. first: added to its sequences, so that a stream that was lost and made
    again uses none twice; jobs: delivered, and not yet ended."""

    def __init__(self, queue: MemoryQueue, first: int):
        self.queue = queue
        self.first = first
        self.jobs: dict[tuple[int, int], MemoryJob] = {}


class Streams:
    """What one server has in its memory. Calls are made in the server's process."""

    def __init__(self, loop: VirtualLoop, process: SimProcess):
        self._loop = loop
        self._process = process
        self._broker = MemoryBroker()
        self._streams: dict[str, Stream] = {}
        self._pulls: dict[Connection, dict[asyncio.Task[None], None]] = {}
        self._operations: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "push": self._push,
            "delete": self._delete,
            "depth": self._depth,
            "ack": self._ack,
            "nak": self._nak,
            "term": self._term,
            "extend": self._extend,
        }

    def __contains__(self, operation: str) -> bool:
        return operation in self._operations

    def call(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Raises LookupError when there is no such stream, and what the queue raises."""
        return self._operations[operation](*arguments)

    def payloads(self, name: str) -> list[bytes]:
        """Of all jobs on a queue, for whoever checks it."""
        stream = self._streams.get(name)
        return [] if stream is None else stream.queue.payloads()

    def pull(
        self,
        connection: Connection,
        number: int,
        name: str,
        expires_s: float,
        lanes: Sequence[Lane],
    ) -> None:
        """Sends ("job", number, ...) or ("no job", number) when there is one, or time is over.

        lanes: in the order in which they are looked at.
        """
        stream = self._streams.get(name)
        if stream is None:
            connection.send(("no stream", number))
            return
        task = self._process.spawn(
            self._await_job(connection, number, stream, expires_s, lanes), f"pull {name}"
        )
        mine = self._pulls.setdefault(connection, {})
        mine[task] = None
        task.add_done_callback(lambda task: mine.pop(task, None))

    def left(self, connection: Connection) -> None:
        """Its open pulls end; what it holds waits for the end of its ack_wait."""
        for task in list(self._pulls.pop(connection, ())):
            task.cancel()

    async def _await_job(
        self,
        connection: Connection,
        number: int,
        stream: Stream,
        expires_s: float,
        lanes: Sequence[Lane],
    ) -> None:
        job = await stream.queue.pull_in_order(lanes, expires_s)
        if job is None:
            connection.send(("no job", number))
            return
        stream.jobs[job.sequence, job.deliveries] = job
        told = (job.payload, job.sequence + stream.first, job.deliveries, job.lane)
        connection.send(("job", number, *told), loosely=True)

    def _open(self, name: str, subject: str, config: QueueConfig) -> int:
        """Returns what is another number whenever the stream was lost."""
        queue = MemoryQueue(self._broker, stream=name, subject=subject, config=config)
        at_once(queue.__aenter__())
        if name not in self._streams:
            self._streams[name] = Stream(queue, int(self._process.wall() * 1e6))
        return self._streams[name].first

    def _push(self, name: str, payload: bytes, message_id: str, lane: Lane) -> int:
        stream = self._streams[name]
        pushing = stream.queue.push(payload, message_id=message_id, lane=lane)
        return at_once(pushing) + stream.first

    def _delete(self, name: str, sequence: int) -> bool:
        stream = self._streams[name]
        return at_once(stream.queue.delete(sequence - stream.first))

    def _depth(self, name: str) -> QueueDepth:
        return at_once(self._streams[name].queue.depth())

    def _ack(self, name: str, sequence: int, deliveries: int) -> None:
        at_once(self._end(name, sequence, deliveries).ack())

    def _nak(self, name: str, sequence: int, deliveries: int, delay_s: float) -> None:
        at_once(self._end(name, sequence, deliveries).nak(delay_s=delay_s))

    def _term(self, name: str, sequence: int, deliveries: int) -> None:
        at_once(self._end(name, sequence, deliveries).term())

    def _extend(self, name: str, sequence: int, deliveries: int) -> None:
        stream = self._streams[name]
        job = stream.jobs.get((sequence - stream.first, deliveries))
        if job is not None:
            at_once(job.extend())

    def _end(self, name: str, sequence: int, deliveries: int) -> MemoryJob:
        """The job that an answer is about; one that is over takes it, and does nothing."""
        stream = self._streams[name]
        key = (sequence - stream.first, deliveries)
        job = stream.jobs.get(key)
        if job is None:
            raise BrokerUnavailable(f"job {sequence} is not known")
        return job
