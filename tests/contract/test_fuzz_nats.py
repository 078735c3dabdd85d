"""A publisher on the real broker that keeps to NATS's own protocol, and to nothing else."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.drops import counted
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.hostile import Spoiler

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

HEADERS = (
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0\r\nStatus: 503\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: x\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe: \x00\r\n\r\n",
    b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n",
    b"NATS/1.0\r\n",
    b"\r\n\r\n",
    b"junk",
)
REPLIES = (
    b"",
    b"x",
    b"\xff\xfe",
    b">",
    b"a.*",
    b"a" * 1000,
    b"$JS.ACK.x",
    b"$JS.ACK." + b"9." * 40,
)


class Publisher:
    """Speaks NATS by hand; a server that has enough of it hangs up, and is called again."""

    def __init__(self, url: str):
        host, _, port = url.removeprefix("nats://").rpartition(":")
        self._address = host, int(port)
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, lines: bytes) -> bool:
        """Whether the server has read it and is still there."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
            self._writer.write(b'CONNECT {"verbose":false,"headers":true,"protocol":1}\r\n')
        try:
            self._writer.write(lines + b"PING\r\n")
            async with asyncio.timeout(5):
                while (line := await self._reader.readline()) != b"PONG\r\n":
                    if not line:
                        raise ConnectionResetError
        except ConnectionError:
            await self.close()
            return False
        return True

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


def hpub(subject: str, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    sizes = b"%d %d" % (len(headers), len(headers) + len(payload))
    return b"HPUB %s %s %s\r\n%s%s\r\n" % (subject.encode(), reply, sizes, headers, payload)


def pub(subject: str, reply: bytes, payload: bytes) -> bytes:
    return b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply, len(payload), payload)


@asynccontextmanager
async def publisher(url: str) -> AsyncIterator[Publisher]:
    hostile = Publisher(url)
    try:
        yield hostile
    finally:
        await hostile.close()


async def test_hostile_messages_on_a_subject_leave_the_connection_alone(
    nats_url: str, namespace: str
):
    rng, subject = Random(1), names.claim_subject(namespace, "e1")
    spoiler, drops, turns = Spoiler(rng), Counter[str](), list[bool]()

    async def handle(payload: bytes) -> bytes:
        if payload != b"true":
            raise ProtocolError("not true")
        return b"heard"

    def drop(where: str) -> None:
        drops[where] += 1

    async with (
        NatsMessaging(nats_url, on_drop=drop) as messaging,
        messaging.serve(subject, counted(handle, "claim", drop)),
        publisher(nats_url) as hostile,
    ):
        with messaging.watch_connection(turns.append):
            for _ in range(150):
                payload, reply = spoiler.spoil(b"true"), rng.choice(REPLIES)
                if rng.random() < 0.6:
                    headers = rng.choice(HEADERS)
                    headers = spoiler.spoil(headers) if rng.random() < 0.3 else headers
                    await hostile.send(hpub(subject, reply, headers, payload))
                else:
                    await hostile.send(pub(subject, reply, payload))
            assert await messaging.request(subject, b"true", timeout_s=5) == b"heard"
            assert await hostile.send(pub(subject, b"", bytes(MAX_MESSAGE_BYTES - 64)))
            assert await messaging.request(subject, b"true", timeout_s=5) == b"heard"
        assert turns == []
        assert drops["claim"] > 50 and drops["nats"] > 5


async def test_hostile_jobs_are_delivered_like_others_and_can_be_ended(
    nats_url: str, namespace: str
):
    """None of them holds up what comes after it, or passes for the broker's own word."""
    rng, subject = Random(2), names.prefill_jobs_subject(namespace)
    spoiler = Spoiler(rng)
    queue = JetStreamQueue(nats_url, namespace, QueueConfig(max_jobs=400))
    async with queue, publisher(nats_url) as hostile:
        for number in range(60):
            headers = rng.choice(HEADERS)
            headers = spoiler.spoil(headers) if rng.random() < 0.3 else headers
            reply = rng.choice((b"", b"x", b"$JS.ACK.x"))
            await hostile.send(hpub(subject, reply, headers, b"hostile"))
            if number % 20 == 0:
                await queue.push(b"true", message_id=f"true-{number}")
        true = 0
        async with asyncio.timeout(30):
            # A job whose headers this client cannot read goes to no worker until its life ends.
            while true < 3 or (await queue.depth()).jobs > 6:
                if (job := await queue.pull(timeout_s=1)) is not None:
                    true += job.payload == b"true"
                    await job.ack()
