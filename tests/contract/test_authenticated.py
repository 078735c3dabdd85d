"""Peers without the graph's secret, and with another one: over NATS, the queue, TCP and NIXL."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path

import pytest
import uvloop
from dynamo_lite.runtime.own_certificate import make_certificate

from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import BrokerUnavailable, DeadlineExceeded, Unavailable
from dynamo_lite.request_plane import listener
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.framing import FIRST_FRAME_TIMEOUT_S, parse_address
from dynamo_lite.runtime.authenticated import AuthenticatedMessaging
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Handler, Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.secret import GraphSecret
from tests.builders import endpoint_record, eventually, generate_request, graph_secret
from tests.contract.generating import Setup, open_setup, tokens

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture
async def nats(nats_url: str) -> AsyncIterator[NatsMessaging]:
    async with NatsMessaging(nats_url) as messaging:
        yield messaging


@pytest.fixture(params=["none", "another"])
def stranger(request: pytest.FixtureRequest, nats: NatsMessaging, tmp_path: Path) -> Messaging:
    if request.param == "none":
        return nats
    return AuthenticatedMessaging(nats, graph_secret(tmp_path / "another"))


@pytest.fixture
def secret(tmp_path: Path) -> GraphSecret:
    return graph_secret(tmp_path / "secret")


class Recording(NatsMessaging):
    """Keeps the replies as they are sent."""

    def __init__(self, url: str):
        super().__init__(url)
        self.replies: list[bytes] = []

    def serve(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, subject: str, handler: Handler
    ) -> AbstractAsyncContextManager[None]:
        async def handle(payload: bytes) -> bytes | None:
            if (reply := await handler(payload)) is not None:
                self.replies.append(reply)
            return reply

        return super().serve(subject, handle)


async def test_a_strangers_messages_are_dropped_and_counted(
    nats: NatsMessaging, stranger: Messaging, secret: GraphSecret, namespace: str
):
    drops: Counter[str] = Counter()
    ours = AuthenticatedMessaging(nats, secret, lambda where: drops.update([where]))
    taken: list[bytes] = []

    async def take(payload: bytes) -> bytes:
        taken.append(payload)
        return b"yes"

    subject = f"{namespace}.s"
    async with ours.serve(subject, take):
        with pytest.raises(DeadlineExceeded):
            await stranger.request(subject, b"a forged message", timeout_s=0.2)
        await stranger.publish(subject, b"a forged message")
        await eventually(lambda: drops["unauthentic"] == 2)
        assert await ours.request(subject, b"ours", timeout_s=5) == b"yes"
    assert taken == [b"ours"]


async def test_a_reply_answers_one_request_only(
    nats: NatsMessaging, nats_url: str, secret: GraphSecret, namespace: str
):
    """A reply that a listener recorded answers no other request, and not the same one again; a
    forged one answers none."""
    drops: Counter[str] = Counter()
    ours = AuthenticatedMessaging(nats, secret, lambda where: drops.update([where]))
    recorder = AuthenticatedMessaging(recording := Recording(nats_url), secret)
    subject, other = f"{namespace}.s", f"{namespace}.o"

    async def answer(payload: bytes) -> bytes:
        return b"about " + payload

    async def replay(_: bytes) -> bytes:
        return recording.replies[0]

    async with recording, recorder.serve(subject, answer):
        for payload in (b"one", b"one", b""):
            assert await ours.request(subject, payload, timeout_s=5) == b"about " + payload
    assert len(set(recording.replies)) == 3

    async def forge(_: bytes) -> bytes:
        return b"x" * 40

    forged = f"{namespace}.f"
    async with nats.serve(subject, replay), nats.serve(other, replay), nats.serve(forged, forge):
        refused = ((subject, b"one"), (subject, b"two"), (other, b"one"), (forged, b"m"))
        for where, payload in refused:
            with pytest.raises(BrokerUnavailable, match="not authentic"):
                await ours.request(where, payload, timeout_s=5)
    assert drops == Counter(unauthentic=len(refused))


async def test_a_message_is_of_no_use_on_another_subject(
    nats: NatsMessaging, secret: GraphSecret, namespace: str
):
    ours, heard = AuthenticatedMessaging(nats, secret), asyncio.Queue[bytes]()
    taken: list[bytes] = []

    async def record(payload: bytes) -> None:
        await heard.put(payload)

    async def take(payload: bytes) -> None:
        taken.append(payload)

    async with nats.serve(f"{namespace}.a", record), ours.serve(f"{namespace}.b", take):
        await ours.publish(f"{namespace}.a", b"for a")
        await nats.publish(f"{namespace}.b", await heard.get())
        await ours.publish(f"{namespace}.b", b"for b")
        await eventually(lambda: taken)
    assert taken == [b"for b"]


async def test_a_strangers_job_is_removed_and_the_next_one_pulled(
    nats_url: str, namespace: str, secret: GraphSecret, tmp_path: Path
):
    drops: Counter[str] = Counter()
    stream, subject = names.prefill_stream(namespace), names.prefill_jobs_subject(namespace)
    another = graph_secret(tmp_path / "another")

    def queue(secret: GraphSecret | None = None) -> JetStreamQueue:
        return JetStreamQueue(
            nats_url,
            stream=stream,
            subject=subject,
            secret=secret,
            on_drop=lambda where: drops.update([where]),
        )

    async with queue(secret) as ours, queue(another) as theirs, queue() as plain:
        await theirs.push(b"forged", message_id="1")
        await plain.push(b"forged", message_id="2")
        await ours.push(b"ours", message_id="3")
        job = await ours.pull(timeout_s=5)
        assert job is not None and job.payload == b"ours"
        await job.ack()
        assert await ours.pull(timeout_s=0.1) is None

        async def empty() -> bool:
            return (await ours.depth()).total == 0

        await eventually(empty)
    assert drops["unauthentic"] == 2


@pytest.fixture
async def worker() -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        yield await open_setup("tls", stack)


async def refusal(setup: Setup, on_drop: OnDrop = uncounted, **security: object) -> str:
    fields = {"certificate": setup.member.transport.certificate} | security
    secret = fields.pop("secret", None)
    member = endpoint_record(stream=setup.server.stream_address, **fields)  # type: ignore[arg-type]
    outputs = setup.outputs
    async with RemoteGenerateClient(
        "stranger",
        outputs.on_deltas,
        outputs.on_lost,
        secret=secret,  # type: ignore[arg-type]
        on_drop=on_drop,
    ) as client:
        with pytest.raises((Unavailable, DeadlineExceeded)) as caught:
            await client.submit(member, generate_request("a"))
    return str(caught.value)


async def test_a_client_without_the_secret_gets_no_session(worker: Setup, tmp_path: Path):
    assert "disconnected" in await refusal(worker)
    another = graph_secret(tmp_path / "another")
    assert "disconnected" in await refusal(worker, secret=another)
    assert worker.engine.running == {} and worker.server.in_flight == 0
    await worker.client.submit(worker.member, generate_request("ours"))
    assert set(worker.engine.running) == {"ours"}


async def test_a_client_sends_nothing_to_a_worker_with_another_certificate(worker: Setup):
    dropped: list[str] = []
    said = await refusal(worker, dropped.append, certificate=make_certificate().fingerprint)
    assert "certificate" in said
    assert dropped == ["certificate"]
    assert "cannot reach" in await refusal(worker, certificate=None) or worker.engine.running == {}
    assert worker.engine.running == {}


async def test_a_client_sends_no_request_to_a_worker_without_the_secret(secret: GraphSecret):
    async with AsyncExitStack() as stack:
        setup = await open_setup("tcp", stack)
        dropped: list[str] = []
        said = await refusal(setup, dropped.append, secret=secret)
        assert "does not have this graph's secret" in said
        assert dropped == ["secret"]
        assert setup.engine.running == {}


async def _closed_at_once(readers: Sequence[asyncio.StreamReader]) -> None:
    """Sooner than a handshake or a Hello would be missed."""
    async with asyncio.timeout(FIRST_FRAME_TIMEOUT_S / 2):
        for reader in readers:
            with suppress(ConnectionError):
                assert await reader.read() == b""


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_handshakes_are_bounded_in_number_and_keep_no_peer_out(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
):
    """A stranger connects and says nothing. It displaces its own connections, and not those of
    another address, which were there first."""
    most = 32
    monkeypatch.setattr(listener, "MAX_UNGREETED", most)
    drops: Counter[str] = Counter()

    async def flood() -> None:
        async with AsyncExitStack() as stack:
            count = {"on_drop": lambda where: drops.update([where])}
            setup = await open_setup("tls", stack, **count)
            place = parse_address(setup.server.stream_address)

            async def connect(source: str) -> asyncio.StreamReader:
                made = await asyncio.open_connection(*place, local_addr=(source, 0))
                stack.callback(made[1].close)
                return made[0]

            peer = await connect("127.0.0.1")
            strangers = [await connect("127.0.0.2") for _ in range(3 * most)]
            await _closed_at_once(strangers[: 2 * most + 1])
            assert drops == Counter(stream=2 * most + 1)
            await setup.client.submit(setup.member, generate_request("a"))
            assert not any(reader.at_eof() for reader in (peer, *strangers[2 * most + 2 :]))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(flood(), 20))


def test_tls_works_on_the_event_loop_of_the_processes():
    """uvloop has a TLS implementation of its own."""

    async def talk() -> None:
        async with AsyncExitStack() as stack:
            setup = await open_setup("tls", stack)
            await setup.client.submit(setup.member, generate_request("a"))
            setup.server.deliver([tokens("a", *range(1000))])
            await setup.outputs.until(lambda: bool(setup.outputs.deltas))
            await setup.client.submit(setup.member, generate_request("b"))
            await setup.stop_server()
            await setup.outputs.until(lambda: bool(setup.outputs.lost))

    uvloop.run(asyncio.wait_for(talk(), 20))
