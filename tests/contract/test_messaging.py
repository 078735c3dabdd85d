"""What every messaging must do; and what NATS must do when its server dies or is missing."""

import asyncio
import contextlib
import contextvars
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
    StartupError,
)
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.builders import eventually, loop_time
from tests.servers import PrivateServer
from tests.twins.servers import MemoryMessaging

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture
def few_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_lite.runtime.messaging.MAX_HANDLERS", 2)


@pytest.fixture(params=["memory", "nats"])
async def messaging(request: pytest.FixtureRequest, few_handlers: None) -> AsyncIterator[Messaging]:
    if request.param == "memory":
        async with MemoryMessaging() as memory:
            yield memory
        return
    async with NatsMessaging(request.getfixturevalue("nats_url")) as real:
        yield real


async def echo(payload: bytes) -> bytes:
    return b"echo " + payload


async def wait_for_connection(
    messaging: Messaging, connected: bool, timeout_s: float = 5.0
) -> None:
    await eventually(lambda: messaging.connected is connected, timeout_s)


async def test_a_request_is_answered(messaging: Messaging, namespace: str) -> None:
    assert messaging.connected
    async with messaging.serve(f"{namespace}.chat/completions-1a", echo):
        reply = await messaging.request(f"{namespace}.chat/completions-1a", b"hi", timeout_s=2)
        assert reply == b"echo hi"
    with pytest.raises(NoResponders):
        await messaging.request(f"{namespace}.chat/completions-1a", b"hi", timeout_s=2)


async def test_no_answer_ends_at_the_deadline(messaging: Messaging, namespace: str) -> None:
    async def silent(_: bytes) -> None:
        return None

    async with messaging.serve(f"{namespace}.s", silent):
        with pytest.raises(DeadlineExceeded):
            await messaging.request(f"{namespace}.s", b"", timeout_s=0.1)


async def test_a_notice_reaches_every_server(messaging: Messaging, namespace: str) -> None:
    got: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def first(payload: bytes) -> None:
        await got.put(("first", payload))

    async def second(payload: bytes) -> bytes:
        await got.put(("second", payload))
        return b"unwanted"

    subject = f"{namespace}.n"
    await messaging.publish(subject, b"nobody listens")
    async with messaging.serve(subject, first), messaging.serve(subject, second):
        await messaging.publish(subject, b"x")
        async with asyncio.timeout(5):
            assert {await got.get(), await got.get()} == {("first", b"x"), ("second", b"x")}


async def test_handlers_run_side_by_side_up_to_the_limit(
    messaging: Messaging, namespace: str
) -> None:
    running = most = 0
    full = asyncio.Event()
    go = asyncio.Event()

    async def handler(payload: bytes) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            full.set()
        await go.wait()
        running -= 1
        return payload

    async with messaging.serve(f"{namespace}.s", handler), asyncio.TaskGroup() as group:
        asked = [
            group.create_task(messaging.request(f"{namespace}.s", bytes([i]), timeout_s=5))
            for i in range(6)
        ]
        async with asyncio.timeout(5):
            await full.wait()
        go.set()
    assert [task.result() for task in asked] == [bytes([i]) for i in range(6)]
    assert most == 2


async def test_bad_messages_and_failing_handlers_do_not_stop_the_service(
    messaging: Messaging, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(payload: bytes) -> bytes:
        if payload == b"garbage":
            raise ProtocolError("not ours")
        if payload == b"bug":
            raise KeyError("bug")
        return payload

    subject = f"{namespace}.s"
    with caplog.at_level(logging.WARNING):
        async with messaging.serve(subject, handler):
            for _ in range(50):
                await messaging.publish(subject, b"garbage")
            await messaging.publish(subject, b"bug")
            assert await messaging.request(subject, b"fine", timeout_s=5) == b"fine"
    lines = [record for record in caplog.records if subject in record.getMessage()]
    assert len(lines) == 1
    assert "not ours" in lines[0].getMessage()


async def test_leaving_waits_for_running_handlers(messaging: Messaging, namespace: str) -> None:
    started = asyncio.Event()
    go = asyncio.Event()
    done = False

    async def handler(_: bytes) -> bytes:
        nonlocal done
        started.set()
        await go.wait()
        done = True
        return b"late"

    async def ask() -> bytes:
        return await messaging.request(f"{namespace}.s", b"", timeout_s=5)

    async with asyncio.TaskGroup() as group:
        async with messaging.serve(f"{namespace}.s", handler):
            answer = group.create_task(ask())
            async with asyncio.timeout(5):
                await started.wait()
            asyncio.get_running_loop().call_later(0.05, go.set)
        assert done
    assert answer.result() == b"late"


@pytest.mark.parametrize("where", ["body", "exit"])
async def test_a_cancelled_service_cancels_its_handlers(
    messaging: Messaging, namespace: str, where: str
) -> None:
    started = asyncio.Event()
    cancelled = asyncio.Event()

    async def handler(_: bytes) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10) as limit, messaging.serve(f"{namespace}.s", handler):
            await messaging.publish(f"{namespace}.s", b"")
            await started.wait()
            limit.reschedule(loop_time() + 0.1)
            if where == "body":
                await asyncio.Event().wait()
    assert cancelled.is_set()


async def test_an_oversized_message_is_refused(messaging: Messaging, namespace: str) -> None:
    with pytest.raises(ProtocolError):
        await messaging.publish(f"{namespace}.s", bytes((8 << 20) + 1))
    with pytest.raises(ProtocolError):
        await messaging.request(f"{namespace}.s", bytes((8 << 20) + 1), timeout_s=1)


who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


async def test_handlers_run_in_the_context_of_who_serves(
    messaging: Messaging, namespace: str
) -> None:
    async def tell(_: bytes) -> bytes:
        told = who.get()
        who.set("a handler")
        return told.encode()

    async def serve(stack: contextlib.AsyncExitStack) -> None:
        who.set("the server")
        await stack.enter_async_context(messaging.serve(f"{namespace}.s", tell))

    who.set("the sender")
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.create_task(serve(stack))
        for _ in range(2):
            assert await messaging.request(f"{namespace}.s", b"", timeout_s=5) == b"the server"


# NATS's own ways to fail


async def test_serving_waits_for_a_server_that_comes_back(nats_server: PrivateServer) -> None:
    async with NatsMessaging(nats_server.url) as messaging, contextlib.AsyncExitStack() as stack:
        await nats_server.kill()
        await wait_for_connection(messaging, False)
        entering = asyncio.create_task(stack.enter_async_context(messaging.serve("s", echo)))
        await nats_server.restart()
        await entering
        assert await messaging.request("s", b"1", timeout_s=5) == b"echo 1"


async def test_an_outage_raises_at_once_and_ends_by_itself(
    nats_server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it is, and again. Subscriptions come along, those of others too."""
    told: asyncio.Queue[bool] = asyncio.Queue()
    async with (
        NatsMessaging(nats_server.url) as messaging,
        NatsMessaging(nats_server.url) as server,
        server.serve("s", echo),
        asyncio.timeout(20),
    ):
        with messaging.watch_connection(told.put_nowait):
            for outage_s in (0.0, 0.3, 1.5):
                await nats_server.kill()
                assert await told.get() is False
                started = loop_time()
                with pytest.raises(BrokerUnavailable):
                    await messaging.publish("s", b"")
                with pytest.raises(BrokerUnavailable):
                    await messaging.request("s", b"", timeout_s=5)
                assert loop_time() - started < 1.5 and not messaging.connected
                await wait_for_connection(server, False)
                await asyncio.sleep(outage_s)
                await nats_server.restart()
                began = loop_time()
                assert await told.get() is True
                await wait_for_connection(server, True)
                assert messaging.connected and loop_time() - began < 1.5
                assert await messaging.request("s", b"again", timeout_s=5) == b"echo again"
        await messaging.client.flush()
    lines = [
        r.getMessage() for r in caplog.records if r.name == "dynamo_lite.runtime.nats.messaging"
    ]
    assert sum("disconnected" in line for line in lines) == 6
    assert len(lines) <= 15
    assert told.empty()


async def test_a_reply_goes_to_an_inbox_only(nats_server: PrivateServer) -> None:
    """A user may not send with our rights what it may not send itself."""
    async with NatsMessaging(nats_server.url) as messaging, messaging.serve("s", echo):
        client = messaging.client
        told, inbox = [await client.subscribe(to) for to in ("jobs", "_INBOX_mine.1")]
        for subscription in (told, inbox):
            await client.publish("s", b"hi", reply=subscription.subject)
        assert (await inbox.next_msg(timeout=5)).data == b"echo hi"
        assert told.pending_msgs == 0


async def test_a_frozen_broker_is_noticed_and_the_way_back_is_quick(
    nats_server: PrivateServer,
) -> None:
    async with NatsMessaging(nats_server.url) as messaging, messaging.serve("s", echo):
        nats_server.freeze()
        await wait_for_connection(messaging, False)
        # Connections are accepted meanwhile, but nothing is said.
        await asyncio.sleep(2.5)
        assert not messaging.connected
        nats_server.thaw()
        began = loop_time()
        await wait_for_connection(messaging, True)
        assert loop_time() - began < 1.5
        assert await messaging.request("s", b"x", timeout_s=5) == b"echo x"


async def test_a_broker_that_hangs_with_unread_messages_is_left_for_another(
    nats_server: PrivateServer, other_nats_server: PrivateServer
) -> None:
    both = nats_server, other_nats_server
    hosts = {server.url.removeprefix("nats://"): server for server in both}
    async with NatsMessaging("nats://" + ",".join(hosts)) as messaging:
        connected = messaging.client.connected_url
        assert connected is not None
        # The other server may take over between two looks at `connected`.
        told: asyncio.Queue[bool] = asyncio.Queue()
        with messaging.watch_connection(told.put_nowait):
            hosts[connected.netloc].freeze()
            for _ in range(4):
                await messaging.publish("s", bytes(7 << 20))
            async with asyncio.timeout(10):
                assert await told.get() is False
                assert await told.get() is True
        assert messaging.client.connected_url != connected


class FakeNats:
    """A server that greets, and answers each PING.

    after_ping: takes the number of the connection and its writer; returns whether to hang up.
    """

    def __init__(
        self, after_ping: Callable[[int, asyncio.StreamWriter], Awaitable[bool]] | None = None
    ):
        self._after_ping = after_ping
        self.commands: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        number = len(self.connections)
        writer.write(b'INFO {"max_payload": 8388608}\r\n')
        while line := await reader.readline():
            self.commands.append(line.split()[0][:5])  # a payload is a line, too
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
                if self._after_ping is not None and await self._after_ping(number, writer):
                    break
        writer.close()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[NatsMessaging]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with NatsMessaging(f"nats://127.0.0.1:{port}") as messaging:
                yield messaging


@pytest.mark.parametrize("error", ["Maximum Connections Exceeded", "Authorization Violation"])
async def test_a_server_that_throws_us_out_is_asked_again(error: str) -> None:
    opened: list[NatsMessaging] = []

    async def throw_out(number: int, writer: asyncio.StreamWriter) -> bool:
        if number < 3:
            await eventually(lambda: opened and opened[0].client.is_connected)
            writer.write(f"-ERR '{error}'\r\n".encode())
        return number < 3

    server = FakeNats(throw_out)
    async with server.client() as messaging:
        opened.append(messaging)
        await eventually(lambda: len(server.connections) == 3, 5)
        await wait_for_connection(messaging, True)


async def test_a_service_waits_until_the_server_has_its_subscription() -> None:
    """The PING that confirms it is behind it on the wire."""
    server = FakeNats()
    async with server.client() as messaging, messaging.serve("s", echo):
        assert server.commands == [b"CONNE", b"PING", b"SUB", b"PING"]


async def test_a_server_that_resets_the_connection_after_its_greeting_costs_no_task() -> None:
    """Otherwise each such attempt leaves a task that sends PINGs for ever."""
    served = asyncio.Event()

    async def reset(number: int, writer: asyncio.StreamWriter) -> bool:
        if 1 < number < 4:
            raw = writer.get_extra_info("socket")
            # Closing sends RST.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return number < 4 and (number > 1 or served.is_set())

    server = FakeNats(reset)
    async with server.client() as messaging, messaging.serve("s", echo):
        served.set()
        await eventually(lambda: len(server.connections) == 4, 20)
        await wait_for_connection(messaging, True, 20)


def test_a_server_that_resets_the_connection_with_its_greeting_is_asked_again() -> None:
    """On the event loop of the services, where a write to such a connection fails otherwise."""
    info, accepted = b'INFO {"max_payload": 8388608}\r\n', list[socket.socket]()

    def serve(listener: socket.socket) -> None:
        for number in range(5):
            connection, _ = listener.accept()
            connection.sendall(info)
            if 0 < number < 4:  # closing sends RST
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
                continue
            accepted.append(connection)
            with contextlib.suppress(ConnectionResetError):  # the client aborts it at its end
                while data := connection.recv(4096):
                    connection.sendall(b"PONG\r\n" * data.count(b"PING"))
                    if number == 0 and b"PING" in data:
                        connection.close()
                        break

    async def asked(port: int) -> None:
        async with NatsMessaging(f"nats://127.0.0.1:{port}") as messaging:
            await eventually(lambda: len(accepted) == 2, 20)
            await wait_for_connection(messaging, True, 20)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(20)
        served = pool.submit(serve, listener)
        uvloop.run(asked(listener.getsockname()[1]))
        served.result()
        accepted[-1].close()


async def test_a_service_that_is_given_up_leaves_no_subscription_at_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The UNSUB does not overtake the SUB, which waits until the server reads on."""
    server, reads_on = FakeNats(), asyncio.Event()
    async with server.client() as messaging:
        client: Any = messaging.client
        monkeypatch.setattr(client._transport, "drain", reads_on.wait)
        await messaging.publish("s", b"x")
        await asyncio.sleep(0)  # the flusher begins, and waits until there is room
        serving = asyncio.create_task(messaging.serve("s", echo).__aenter__())
        await eventually(lambda: any(part.startswith(b"SUB") for part in client._pending))
        serving.cancel()
        await asyncio.wait([serving])
        reads_on.set()
        await eventually(lambda: {b"SUB", b"UNSUB"} <= set(server.commands))
        assert len(server.connections) == 1
        assert server.commands.index(b"SUB") < server.commands.index(b"UNSUB")


async def test_a_close_that_is_cancelled_leaves_no_task(nats_server: PrivateServer) -> None:
    messaging = await NatsMessaging(nats_server.url).__aenter__()
    with pytest.raises(NoResponders):  # starts the task of its inbox
        await messaging.request("s", b"", timeout_s=5)
    closing = asyncio.create_task(messaging.__aexit__())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()


@pytest.mark.parametrize("how", ["request", "flush"])
async def test_a_cancel_that_comes_with_the_answer_is_not_lost(
    nats_server: PrivateServer, how: str
) -> None:
    """Otherwise a task that sends requests in a loop would not end."""
    async with NatsMessaging(nats_server.url) as messaging, messaging.serve("s", echo):
        client: Any = messaging.client

        async def ask() -> None:
            while True:
                await (
                    client.request("s", b"x", timeout=5) if how == "request" else client.flush(5)
                )

        asking = asyncio.create_task(ask())
        awaited: list[asyncio.Future[Any]] = []
        while not awaited:
            await asyncio.sleep(0)
            awaited = list(client._resp_map.values()) if how == "request" else client._pongs
        [answer] = awaited
        answer.add_done_callback(lambda _: asking.cancel())
        await asyncio.wait([asking], timeout=5)
        assert asking.cancelled()
        assert await messaging.request("s", b"again", timeout_s=5) == b"echo again"


async def test_a_cancel_that_comes_while_it_flushes_is_not_lost(nats_server: PrivateServer) -> None:
    async with NatsMessaging(nats_server.url) as messaging:
        client: Any = messaging.client
        flushing = asyncio.create_task(client._flush_pending(force_flush=True))
        asyncio.get_running_loop().call_soon(flushing.cancel)
        with pytest.raises(asyncio.CancelledError):
            await flushing


async def test_the_pong_of_a_cancelled_flush_does_not_end_the_reading(
    nats_server: PrivateServer,
) -> None:
    async with NatsMessaging(nats_server.url) as messaging, messaging.serve("s", echo):
        client: Any = messaging.client
        flushing = asyncio.create_task(client.flush(5))
        while not client._pongs:
            await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.wait([flushing], timeout=5)
        assert flushing.cancelled()
        await client.flush(5)
        assert await messaging.request("s", b"again", timeout_s=5) == b"echo again"


async def test_a_service_whose_end_is_cancelled_leaves_no_subscription(
    nats_server: PrivateServer,
) -> None:
    async with NatsMessaging(nats_server.url) as messaging:
        client: Any = messaging.client

        async def serve() -> None:
            async with messaging.serve("s", echo):
                served.set()
                await leave.wait()

        served, leave = asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(serve())
        await served.wait()
        leave.set()
        while not client._pongs:  # the end waits for the server
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving], timeout=5)
        assert serving.cancelled()
        assert all(subscription.subject != "s" for subscription in client._subs.values())
        with pytest.raises(NoResponders):
            await messaging.request("s", b"", timeout_s=5)


@pytest.mark.parametrize(
    ("owner", "step"), [(TcpTransport, "connect"), (Client, "_process_connect_init")]
)
async def test_leaving_while_it_reconnects_leaves_no_task_behind(
    nats_server: PrivateServer, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str
) -> None:
    """The cancel comes together with the server's answer, and nats-py loses it."""
    real, reached = getattr(owner, step), asyncio.Event()

    async def loses_a_cancel(*args: Any, **options: Any) -> None:
        reached.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(5)
        await real(*args, **options)

    before = asyncio.all_tasks()
    async with NatsMessaging(nats_server.url) as messaging:
        monkeypatch.setattr(owner, step, loses_a_cancel)
        client: Any = messaging.client
        client._transport._io_writer.transport.abort()
        await reached.wait()
    assert asyncio.all_tasks() == before
    assert not client.is_connected


async def test_a_connection_that_breaks_as_it_is_closed_leaves_no_task_behind(
    nats_server: PrivateServer,
) -> None:
    def breaks() -> None:
        raise ConnectionResetError("Connection lost")

    before = asyncio.all_tasks()
    async with NatsMessaging(nats_server.url) as messaging:
        with pytest.raises(NoResponders):
            await messaging.request("s", b"", timeout_s=5)
        client: Any = messaging.client
        client._transport.close = breaks
    left = asyncio.all_tasks() - before
    assert not [task for task in left if "_wait_for_msgs" in repr(task)]


async def test_a_missing_server_is_named_without_credentials() -> None:
    messaging = NatsMessaging("nats://me:secret@127.0.0.1:1", connect_timeout_s=0.3)
    with pytest.raises(StartupError, match=r"nats://127\.0\.0\.1:1") as failure:
        await messaging.__aenter__()
    assert "secret" not in str(failure.value)
    assert not messaging.connected
    with pytest.raises(BrokerUnavailable):
        await messaging.publish("s", b"")
