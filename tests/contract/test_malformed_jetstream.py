"""Answers of JetStream's API that cannot be read, on a real nats-server: an impostor gives them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from dynamo_lite.disagg.queue import jetstream
from dynamo_lite.disagg.queue.base import QueueConfig, QueueOptions
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.disagg.queue.topology import check_queue, shared_settings
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import BrokerUnavailable, StartupError
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.retry import retry_while_unavailable
from dynamo_lite.serve.embedded import EmbeddedNats
from tests.servers import private_server

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

CONFIG = QueueConfig()
STREAM, SUBJECT = names.prefill_stream("n"), names.prefill_jobs_subject("n")
CREATED = "2026-01-01T00:00:00.000000001Z"
INFO, CREATE = "STREAM.INFO", "CONSUMER.DURABLE.CREATE"
DELETE, PUSH = "STREAM.MSG.DELETE", "push"

STATE = {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": 0, "consumer_count": 1}
STREAM_CONFIG = {"name": STREAM, "storage": "memory", "metadata": shared_settings(CONFIG)}
CONSUMER = {
    "stream_name": STREAM,
    "name": "prefill_workers",
    "created": CREATED,
    "config": {},
    "num_pending": 0,
}
GOOD: dict[str, Any] = {
    INFO: {"config": STREAM_CONFIG, "state": STATE, "created": CREATED},
    CREATE: CONSUMER,
    DELETE: {"success": True},
    PUSH: {"stream": STREAM, "seq": 1},
}
#: Malformed in the same way, whatever was asked.
NO_ANSWER = (b"", b"junk", b"\xff\xfe", b"null", b"7", b"[]", b'{"error": 7}', b'{"error": {}}')
NESTED = b'{"config":' + b"[" * 100_000


class ServerOnly(EmbeddedNats):
    """Without JetStream, so its API's subjects are free."""

    def _command(self) -> list[str]:
        command = super()._command()
        config = Path(command[-1])
        lines = config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if not line.startswith("jetstream")))
        return command


class Impostor:
    """Answers as JetStream. instead: other answers, by the name of the request."""

    def __init__(self, url: str):
        self.url = url
        self.instead: dict[str, bytes] = {}

    async def answer(self, message: Msg) -> None:
        asked = message.subject.removeprefix("$JS.API.")
        name = next((name for name in GOOD if asked.startswith(name)), PUSH)
        await message.respond(self.instead.get(name, json.dumps(GOOD[name]).encode()))

    def open(self) -> JetStreamQueue:
        return JetStreamQueue(self.url, "n", CONFIG)


@asynccontextmanager
async def impostor(directory: Path) -> AsyncIterator[Impostor]:
    async with (
        private_server(ServerOnly, directory) as server,
        NatsMessaging(server.url) as messaging,
    ):
        made = Impostor(server.url)
        for subject in ("$JS.API.>", SUBJECT):
            await messaging.client.subscribe(subject, cb=made.answer)
        await messaging.client.flush()
        yield made


@pytest.fixture
async def js(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Impostor]:
    async def once(call: Any) -> Any:
        return await retry_while_unavailable(call, within_s=0.0)

    monkeypatch.setattr(jetstream, "retry_while_unavailable", once)
    async with impostor(tmp_path) as made:
        yield made


#: In place of a value: the field is left out.
GONE = object()


def changed(name: str, value: Any, *path: str) -> bytes:
    """A good answer with another value in one field."""
    answer = part = json.loads(json.dumps(GOOD[name]))
    for key in path[:-1]:
        part = part[key]
    if value is GONE:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return json.dumps(answer).encode()


async def test_a_queue_that_cannot_be_read_is_not_opened(js: Impostor):
    wrong = [
        *((INFO, answer) for answer in (*NO_ANSWER, NESTED)),
        (INFO, changed(INFO, GONE, "config")),
        (INFO, changed(INFO, GONE, "state", "last_seq")),
        (INFO, changed(INFO, 7, "config")),
        (INFO, changed(INFO, [7], "config", "metadata")),
        (INFO, changed(INFO, "many", "config", "num_replicas")),
        (INFO, changed(INFO, 7, "created")),
        (INFO, changed(INFO, "then", "created")),
        *((CREATE, answer) for answer in NO_ANSWER),
        (CREATE, changed(CREATE, GONE, "stream_name")),
        (CREATE, changed(CREATE, 7, "config")),
    ]
    for name, answer in wrong:
        js.instead = {name: answer}
        try:
            async with js.open():
                pytest.fail(f"opened in spite of {answer!r} to {name}")
        except StartupError as exc:
            assert isinstance(exc.__cause__, BrokerUnavailable)


async def test_the_queue_of_a_broker_that_begins_to_answer_nonsense_is_unavailable(js: Impostor):
    async with js.open() as queue:
        for answer in (*NO_ANSWER, b"{}"):
            js.instead = {DELETE: answer}
            with pytest.raises(BrokerUnavailable):
                await queue.delete(1)
        wrong = [changed(INFO, "7", "state", name) for name in ("messages", "bytes")]
        for answer in (*NO_ANSWER, changed(INFO, GONE, "state"), *wrong):
            js.instead = {INFO: answer}
            with pytest.raises(BrokerUnavailable):
                await queue.depth()
        js.instead = {}
        assert (await queue.depth()).jobs == 0


async def test_a_push_with_an_unreadable_confirmation_may_have_queued_the_job(js: Impostor):
    async with js.open() as queue:
        for answer in (
            *NO_ANSWER,
            changed(PUSH, GONE, "seq"),
            changed(PUSH, "1", "seq"),
            changed(PUSH, None, "seq"),
        ):
            js.instead = {PUSH: answer}
            with pytest.raises(BrokerUnavailable):
                await queue.push(b"x", message_id="1")
        js.instead = {}
        assert await queue.push(b"x", message_id="1") == 1


async def test_a_check_leaves_unreadable_answers_to_the_start_of_the_queue(js: Impostor):
    async with NatsMessaging(js.url) as messaging:
        for answer in (*NO_ANSWER, changed(INFO, GONE, "config")):
            js.instead = {INFO: answer}
            await check_queue(messaging, "n", QueueOptions())
