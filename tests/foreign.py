"""What a client tries at NATS that may not read, ask or end anything of a graph."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explain
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.health import Heartbeat, Leave
from dynamo_lite.protocol.permissions import all_permissions
from dynamo_lite.protocol.prefill import (
    Claim,
    Done,
    FirstToken,
    RemotePrefillRequest,
)
from dynamo_lite.protocol.routing import PickRequest
from dynamo_lite.runtime.nats.messaging import NatsMessaging

_LANES = ("short", "urgent")
#: A process on a busy machine answers within it.
_SILENCE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Try:
    """At one server. subjects: of the graph, to which messages are sent. listens: whether it
    subscribes to them, too, and to all. records: a stream that the user may make, with which it
    records the graph's messages; empty: none."""

    url: str
    namespace: str
    subjects: list[str]
    user: str = ""
    password: str = ""
    inbox: str = "_INBOX"
    listens: bool = True
    records: str = ""


@dataclass(kw_only=True)
class Heard:
    refused: bool = False
    #: Subjects and payloads of what was not its own.
    messages: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    #: Payloads of the replies that processes have sent.
    answers: list[bytes] = field(default_factory=list[bytes])
    #: Number of messages in the stream that it has made.
    recorded: int = 0


def subjects(namespace: str, ids: Iterable[str]) -> list[str]:
    """All that the graph's components send to, without JetStream's. ids: leases, engines and the
    last parts of endpoints' subjects, each in place of what differs between processes."""
    patterns = {
        subject
        for one in all_permissions(namespace).values()
        for subject in (*one.publish, *one.subscribe)
        if not subject.startswith("$")
    }
    several = (*ids, *_LANES)
    return sorted({pattern.replace("*", each) for pattern in patterns for each in several})


def forged() -> list[bytes]:
    """One of each kind, as a process of the graph sends it."""
    attempt = "a1"
    return [
        b"",
        encode(Claim(attempt=attempt, claim=1, writer_lease_id=1)),
        encode(Done(attempt=attempt, outcome="failed")),
        encode(Done(attempt=attempt, claim=1, outcome="abandoned")),
        encode(FirstToken(attempt=attempt, request_id="r1", token_id=1)),
        encode(Leave(lease_id=1)),
        encode(
            RemotePrefillRequest(
                engine_id="e1",
                request_id="r1",
                prompt_token_ids=[1, 2],
                num_computed_tokens=0,
                block_ids=[1],
                deadline=1e9,
                attempt=attempt,
            )
        ),
        encode(Explain()),
        encode(Heartbeat(lease_id=1, number=1 << 40, ok=False)),
        encode(PickRequest(client=1, request_id="r1", prompt_token_ids=[1], candidates=[1])),
        encode(
            GenerateRequest(
                request_id="r1",
                prompt_token_ids=[1],
                sampling=b"\x80",
                arrival_time=1.0,
            )
        ),
    ]


async def tries(what: Try) -> Heard:
    """Raises TimeoutError when the server does not answer."""
    async with asyncio.timeout(60):
        login = f"{what.user}:{what.password}@" if what.user else ""
        scheme, _, place = what.url.partition("://")
        query = f"?inbox={what.inbox}"
        try:
            async with NatsMessaging(f"{scheme}://{login}{place}{query}") as messaging:
                return await _all(messaging.client, what)
        except StartupError:
            return Heard(refused=True)


async def _all(client: Client, what: Try) -> Heard:
    own, heard = set(forged()), Heard()

    async def hear(message: Msg) -> None:
        if message.data not in own:
            heard.messages.append((message.subject, message.data))

    async def be_answered(message: Msg) -> None:
        no_responders = (message.headers or {}).get("Status") == "503"
        by_the_broker = message.data.startswith(b'{"') and b'"stream"' in message.data
        if not no_responders and not by_the_broker:
            heard.answers.append(message.data)

    if what.records:
        await _record(client, what)
    for subject in (*what.subjects, ">", "_INBOX.>", "$JS.>") if what.listens else ():
        await client.subscribe(subject, cb=hear)
    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=be_answered)
    for subject in what.subjects:
        for payload in own:
            await client.publish(subject, payload, reply=inbox)
    await client.flush()
    await asyncio.sleep(_SILENCE_S)  # nothing is to come
    if what.records:
        info = await _ask(client, f"STREAM.INFO.{what.records}")
        heard.recorded = info.get("state", {}).get("messages", 0)
        await _ask(client, f"STREAM.DELETE.{what.records}")
    return heard


async def _record(client: Client, what: Try) -> None:
    """Makes a stream that copies the graph's jobs and records its messages."""
    config = {
        **{"name": what.records, "storage": "memory"},
        "sources": [{"name": names.prefill_stream(what.namespace)}],
        "subjects": [f"{what.namespace}_{name}.>" for name in ("engine", "kv", "health")],
    }
    made = await _ask(client, f"STREAM.CREATE.{what.records}", config)
    assert "error" not in made, made


async def _ask(client: Client, what: str, config: object = None) -> dict[str, dict[str, int]]:
    asked = b"" if config is None else json.dumps(config).encode()
    try:
        return json.loads((await client.request(f"$JS.API.{what}", asked, timeout=2)).data)
    except NatsError:
        return {"error": {}}
