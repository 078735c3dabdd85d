"""The simulated NATS server, spoken to by hand where the shipped clients are too polite."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from tests.sim.servers import SimNats
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.servers.nats_protocol import CommandReader, Publish, header
from tests.simulation.servers.nats_subjects import Subjects

CONNECT = b'CONNECT {"verbose":false,"no_responders":true,"headers":true}\r\n'


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self.writer = reader, writer

    async def say(self, text: bytes) -> bytes:
        """What the server answers, up to its PONG or its end."""
        self.writer.write(text + b"PING\r\n")
        heard = b""
        async with asyncio.timeout(5):
            while not heard.endswith(b"PONG\r\n"):
                line = await self._reader.readline()
                if not line:
                    return heard
                heard += line
        return heard.removesuffix(b"PONG\r\n")


async def connect(nats: SimNats) -> Client:
    client = Client(*await asyncio.open_connection("nats", 4222))
    assert (await client.say(CONNECT)).startswith(b"INFO {")
    return client


@pytest.fixture
async def client(nats_server: SimNats, loop: VirtualLoop) -> AsyncIterator[Client]:
    client = await connect(nats_server)
    yield client
    client.writer.close()


async def test_every_subscription_of_a_subject_gets_a_message(client: Client):
    assert await client.say(b"SUB a.* 1\r\nSUB a.b 2\r\nSUB a.> 3\r\nSUB a.c 4\r\n") == b""
    heard = await client.say(b"PUB a.b r.1 2\r\nhi\r\n")
    assert sorted(heard.split(b"hi\r\n"))[1:] == [
        b"MSG a.b %d r.1 2\r\n" % sid for sid in (1, 2, 3)
    ]


async def test_a_limited_subscription_ends_by_itself(client: Client):
    await client.say(b"SUB a 1\r\nUNSUB 1 2\r\n")
    publish = b"PUB a 1\r\nx\r\n"
    assert await client.say(publish * 3) == b"MSG a 1 1\r\nx\r\n" * 2
    await client.say(b"SUB a 2\r\nUNSUB 2\r\n")
    assert await client.say(publish) == b""


async def test_who_asks_nobody_is_told_and_nobody_else(nats_server: SimNats, client: Client):
    other = await connect(nats_server)
    await client.say(b"SUB inbox.* 7\r\n")
    await other.say(b"SUB inbox.* 8\r\n")
    told = await client.say(b"PUB nobody inbox.1 0\r\n\r\n")
    assert told == b"HMSG inbox.1 7 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    assert await other.say(b"") == b""
    assert await client.say(b"PUB nobody 0\r\n\r\n") == b""
    other.writer.close()


async def test_headers_go_through_as_they_are(client: Client):
    await client.say(b"SUB a 1\r\n")
    headers = b"NATS/1.0\r\nX: \xff\r\n\r\n"
    sizes = b"%d %d" % (len(headers), len(headers) + 4)
    frame = sizes + b"\r\n" + headers + b"body\r\n"
    assert await client.say(b"HPUB a " + frame) == b"HMSG a 1 " + frame


async def test_a_verbose_client_hears_ok(client: Client):
    said = await client.say(b'CONNECT {"verbose":true}\r\nSUB a 1\r\nPUB a 0\r\n\r\n')
    assert said == b"+OK\r\n+OK\r\nMSG a 1 0\r\n\r\n+OK\r\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HELLO\r\n", b"Unknown Protocol Operation"),
        (b"PUB a x\r\n", b"Unknown Protocol Operation"),
        (b"SUB\r\n", b"Unknown Protocol Operation"),
        (b"CONNECT {\r\n", b"Unknown Protocol Operation"),
        (b"PUB a %d\r\n" % (MAX_MESSAGE_BYTES + 1), b"Maximum Payload Violation"),
        (b"SUB a group 1\r\n", b"queue groups are not simulated"),
    ],
)
async def test_who_breaks_the_protocol_is_told_and_thrown_out(
    nats_server: SimNats, client: Client, said: bytes, why: bytes
):
    assert await client.say(said) == b"-ERR '%s'\r\n" % why
    assert nats_server.server.clients == {}


def test_commands_are_found_wherever_the_stream_is_cut():
    said = b"PING\r\nPUB a b 3\r\n\r\nx\r\nHPUB a 4 5\r\nhhhhx\r\nPONG\r\n"
    whole = CommandReader(100).feed(said)
    assert whole[1:3] == [Publish("a", "b", b"", b"\r\nx"), Publish("a", "", b"hhhh", b"x")]
    reader = CommandReader(100)
    assert [command for i in range(len(said)) for command in reader.feed(said[i : i + 1])] == whole


@pytest.mark.parametrize(
    ("pattern", "reached", "not_reached"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "a.c"]),
        ("a.*", ["a.b"], ["a", "a.b.c", "b.b"]),
        ("*.b", ["a.b"], ["b", "a.c", "a.b.c"]),
        ("a.*.c", ["a.b.c"], ["a.b.d", "a.c", "a.b.c.d"]),
        ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
        (">", ["a", "a.b"], []),
    ],
)
def test_patterns_reach_what_they_should(pattern: str, reached: list[str], not_reached: list[str]):
    subjects: Subjects[str] = Subjects()
    subjects.add(pattern, "s")
    assert [subjects.matching(subject) for subject in reached] == [["s"]] * len(reached)
    assert not any(subjects.matching(subject) for subject in not_reached)
    subjects.remove(pattern, "s")
    assert not any(subjects.matching(subject) for subject in reached)


def test_a_header_is_found_by_its_name():
    headers = b"NATS/1.0\r\nOther: 1\r\nNats-Msg-Id:  a:b \r\n\r\n"
    assert header(headers, "Nats-Msg-Id") == "a:b"
    assert header(headers, "Missing") is None
    assert header(b"", "Nats-Msg-Id") is None
