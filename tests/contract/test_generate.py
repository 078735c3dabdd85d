"""RemoteGenerateClient and GenerateServer: over TCP, with and without TLS, and in one process."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES, encode
from dynamo_lite.protocol.errors import DeadlineExceeded, Refused, Unavailable
from dynamo_lite.protocol.generate import (
    MAX_DELTA_BYTES,
    MAX_INPUT_BYTES,
    MAX_SUBMIT_BYTES,
    Accepted,
    Adapter,
    Cancel,
    Deltas,
    Hello,
    LogprobRows,
    RequestRefused,
    Submit,
    SubmitReply,
    TokenDelta,
    Welcome,
    decode_client_frame,
    decode_worker_frame,
)
from dynamo_lite.request_plane import connection
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.framing import (
    MAX_UNSENT_BYTES,
    FrameParser,
    frame,
    parse_address,
)
from tests.builders import endpoint_record, eventually, generate_request
from tests.contract.generating import Outputs, Setup, open_setup, tokens

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture(params=["tcp", "tls"])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        yield await open_setup(request.param, stack)


@pytest.fixture
async def remote() -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        yield await open_setup("tcp", stack)


# Every implementation


async def test_a_request_gets_its_deltas_one_batch_per_step(setup: Setup):
    for request_id in ("a", "b"):
        await setup.client.submit(setup.member, generate_request(request_id))
    assert set(setup.engine.running) == {"a", "b"}
    assert setup.server.in_flight == 2
    steps = [
        [tokens("a", 1), tokens("b", 2)],
        [tokens("a", 3, 4, finish="stop"), tokens("b", 5)],
        [tokens("b", 6, finish="length")],
    ]
    for step in steps:
        setup.server.deliver(step)
    await eventually(lambda: len(setup.outputs.batches) == 3)
    assert setup.outputs.batches == steps
    assert setup.server.in_flight == 0
    assert setup.outputs.lost == []


async def test_deltas_of_unknown_and_ended_requests_are_dropped(setup: Setup):
    await setup.client.submit(setup.member, generate_request("a"))
    setup.server.deliver([tokens("nobody", 1), tokens("a", 2, finish="stop")])
    setup.server.deliver([tokens("a", 3)])
    with pytest.raises(Refused, match="is already running"):
        for _ in range(2):
            await setup.client.submit(setup.member, generate_request("b"))
    setup.server.deliver([tokens("b", 4, finish="stop")])
    await eventually(lambda: len(setup.outputs.batches) == 2)
    assert setup.outputs.deltas == [tokens("a", 2, finish="stop"), tokens("b", 4, finish="stop")]
    await setup.client.submit(setup.member, generate_request("b"))


async def test_an_aborted_request_ends_at_once_and_in_the_engine(setup: Setup):
    for request_id in ("a", "b"):
        await setup.client.submit(setup.member, generate_request(request_id))
    await setup.client.abort(["a", "unknown"])
    setup.server.deliver([tokens("a", 1), tokens("b", 1)])
    await eventually(lambda: "a" in setup.engine.aborted)
    await eventually(lambda: bool(setup.outputs.deltas))
    assert setup.outputs.deltas == [tokens("b", 1)]
    assert setup.server.in_flight == 1
    assert setup.outputs.lost == []


@pytest.mark.parametrize(
    ("failure", "said", "elsewhere"),
    [
        (Refused("too long", elsewhere=True), "too long", True),
        (Refused("too long", elsewhere=False), "too long", False),
        (ZeroDivisionError("bug"), "internal error", True),
    ],
)
async def test_the_engines_refusal_reaches_the_client_and_a_bug_refuses_that_request_only(
    setup: Setup, failure: Exception, said: str, elsewhere: bool
):
    setup.engine.refusal = failure
    with pytest.raises(Refused, match=said) as caught:
        await setup.client.submit(setup.member, generate_request("a"))
    assert caught.value.elsewhere is elsewhere
    assert setup.server.in_flight == 0
    setup.engine.refusal = None
    await setup.client.submit(setup.member, generate_request("a"))


async def test_a_draining_worker_sends_new_requests_elsewhere(setup: Setup):
    await setup.client.submit(setup.member, generate_request("a"))
    setup.server.refuse_new("draining")
    with pytest.raises(Refused, match="draining") as caught:
        await setup.client.submit(setup.member, generate_request("b"))
    assert caught.value.elsewhere
    assert not await setup.server.wait_idle(0.01)
    setup.server.deliver([tokens("a", 1, finish="stop")])
    assert await setup.server.wait_idle(5)
    await eventually(lambda: setup.outputs.deltas == [tokens("a", 1, finish="stop")])


async def test_a_worker_that_closes_loses_each_running_request_once(setup: Setup):
    for request_id in ("a", "b", "c"):
        await setup.client.submit(setup.member, generate_request(request_id))
    setup.server.deliver([tokens("c", 1, finish="stop")])
    await eventually(lambda: bool(setup.outputs.deltas))
    await setup.stop_server()
    await eventually(lambda: bool(setup.outputs.lost))
    assert sorted(i for ids, _ in setup.outputs.lost for i in ids) == ["a", "b"]
    assert sorted(setup.engine.aborted) == ["a", "b"]
    with pytest.raises(Unavailable):
        await setup.client.submit(setup.member, generate_request("d"))


# Over TCP


async def test_a_registered_worker_is_connected_before_the_first_request(remote: Setup):
    assert not remote.client.is_connected(remote.member)
    remote.client.retain([remote.member])
    await eventually(lambda: remote.client.is_connected(remote.member), 5)
    [session] = remote.server._listener.sessions
    remote.client.retain([remote.member])
    await remote.client.submit(remote.member, generate_request("a"))
    assert remote.server._requests["a"].session is session
    remote.client.drop(remote.member, "tested")
    await eventually(lambda: not remote.client.is_connected(remote.member), 5)


async def test_a_worker_that_accepts_connections_and_says_nothing_is_not_connected():
    """As one that is frozen: its kernel accepts them."""
    silent, outputs = RawWorker(None), Outputs()
    async with silent.listening() as address, client_of(outputs) as client:
        member = endpoint_record(stream=address)
        client.retain([member])
        await eventually(lambda: client._connections[address].is_open)
        assert not client.is_connected(member)
        silent.reads.set()


@pytest.mark.parametrize("stream", [None, "nonsense", "127.0.0.1:1"])
async def test_a_member_without_reachable_stream_is_unavailable(remote: Setup, stream: str | None):
    with pytest.raises(Unavailable):
        await remote.client.submit(endpoint_record(stream=stream), generate_request("a"))


@pytest.mark.parametrize("extra", [-40, 1])
async def test_a_request_too_large_to_send_is_refused_for_good(remote: Setup, extra: int):
    request = generate_request("a", cache_salt="x" * (MAX_MESSAGE_BYTES + extra))
    await remote.client.submit(remote.member, generate_request("b"))
    with pytest.raises(Refused, match="bytes") as caught:
        await remote.client.submit(remote.member, request)
    assert not caught.value.elsewhere
    await remote.client.submit(remote.member, generate_request("a"))
    assert remote.server.in_flight == 2 and remote.outputs.lost == []


async def test_media_travel_with_their_request(setup: Setup):
    """As large as they may be, beside a text that is as large as without them."""
    inputs = bytes(MAX_INPUT_BYTES)
    request = generate_request("a", inputs=inputs, cache_salt="x" * (MAX_MESSAGE_BYTES - 400))
    await setup.client.submit(setup.member, request)
    assert setup.engine.running["a"].inputs == inputs
    setup.server.deliver([tokens("a", 7)])
    await eventually(lambda: setup.outputs.deltas == [tokens("a", 7)])


async def test_a_text_too_large_is_refused_by_the_worker_too(remote: Setup):
    request = generate_request("a", cache_salt="x" * MAX_MESSAGE_BYTES)
    payload = encode(Submit(request_id="a", request=encode(request)))
    reader, writer = await asyncio.open_connection(*parse_address(remote.server.stream_address))
    writer.write(frame(encode(Hello(client_id="raw"))) + frame(payload, MAX_SUBMIT_BYTES))
    parser, frames = FrameParser(), list[bytes]()
    async with asyncio.timeout(5):
        while len(frames) < 2:
            frames += parser.feed(await reader.read(1 << 16))
    reply = decode_worker_frame(frames[1])
    assert isinstance(reply, SubmitReply) and isinstance(reply.reply, RequestRefused)
    assert "beside its inputs" in reply.reply.reason and remote.engine.running == {}
    writer.close()


async def test_an_answer_that_does_not_come_cancels_the_request(remote: Setup):
    client = RemoteGenerateClient(
        "hasty", remote.outputs.on_deltas, remote.outputs.on_lost, request_timeout_s=0.05
    )
    remote.engine.gate = asyncio.Event()
    async with client:
        with pytest.raises(DeadlineExceeded):
            await client.submit(remote.member, generate_request("a"))
        remote.engine.gate.set()
        await eventually(lambda: "a" in remote.engine.aborted)
        assert await remote.server.wait_idle(5)


async def test_the_load_of_an_adapter_does_not_count_as_silence(remote: Setup):
    client = RemoteGenerateClient(
        "hasty", remote.outputs.on_deltas, remote.outputs.on_lost, request_timeout_s=0.05
    )
    remote.engine.gate = asyncio.Event()
    request = generate_request("a", adapter=Adapter(name="l", path="/l"))
    async with client:
        submitting = asyncio.create_task(client.submit(remote.member, request))
        await asyncio.wait({submitting}, timeout=0.2)
        assert not submitting.done()
        assert (remote.server.in_flight, remote.server.in_engine) == (1, 0)
        remote.engine.gate.set()
        await submitting
        assert remote.server.in_engine == 1


async def test_a_delta_before_the_answer_proves_acceptance(remote: Setup):
    remote.engine.gate = asyncio.Event()
    submitting = asyncio.create_task(remote.client.submit(remote.member, generate_request("a")))
    await eventually(lambda: remote.server.in_flight == 1)
    remote.server.deliver([tokens("a", 1)])
    await eventually(lambda: bool(remote.outputs.deltas))
    closing = asyncio.create_task(remote.server.__aexit__(None, None, None))
    await submitting
    await eventually(lambda: bool(remote.outputs.lost))
    assert [ids for ids, _ in remote.outputs.lost] == [["a"]]
    remote.engine.gate.set()
    await closing


async def test_a_worker_that_dies_before_the_answer_fails_the_submit_at_once(remote: Setup):
    remote.engine.gate = asyncio.Event()
    submitting = asyncio.create_task(remote.client.submit(remote.member, generate_request("a")))
    await eventually(lambda: remote.server.in_flight == 1)
    closing = asyncio.create_task(remote.server.__aexit__(None, None, None))
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable, match="broke"):
            await submitting
    remote.engine.gate.set()
    await closing
    assert remote.outputs.lost == []


async def test_a_step_is_split_and_a_delta_that_cannot_be_sent_fails_only_its_request(
    remote: Setup,
):
    """It is too large by itself, or would fill the connection."""
    for request_id in ("a", "b", "c", "d"):
        await remote.client.submit(remote.member, generate_request(request_id))
    big = LogprobRows(1, 1, bytes(MAX_MESSAGE_BYTES // 2), b"", b"")
    huge = LogprobRows(1, 1, bytes(MAX_DELTA_BYTES + 1), b"", b"")
    filling = LogprobRows(1, 1, bytes(MAX_DELTA_BYTES * 3 // 4), b"", b"")
    remote.server.deliver(
        [
            TokenDelta(request_id=request_id, token_ids=[1], prompt_logprobs=prompt)
            for request_id, prompt in (("a", filling), ("b", big), ("c", huge), ("d", filling))
        ]
    )
    remote.server.deliver([tokens("b", 2)])
    await eventually(lambda: len(remote.outputs.deltas) == 5)
    assert [delta.token_ids for delta in remote.outputs.deltas[:2]] == [[1], [1]]
    failed = [tokens(request_id, finish="error") for request_id in ("c", "d")]
    assert remote.outputs.deltas[2:] == [*failed, tokens("b", 2)]
    await eventually(lambda: sorted(remote.engine.aborted) == ["c", "d"])
    assert remote.server.in_flight == 2 and remote.outputs.lost == []


async def test_an_output_that_is_larger_than_other_messages_is_one_frame(remote: Setup):
    """What 20 prompt logprobs of 40,000 tokens are, and the first token with them."""
    rows, width = 40_000, 21
    rng = random.Random(1)
    prompt = LogprobRows(
        rows,
        width,
        rng.randbytes(8 * rows * width),
        rng.randbytes(4 * rows * width),
        rng.randbytes(8 * rows),
    )
    assert len(prompt.token_ids) + len(prompt.logprobs) > MAX_MESSAGE_BYTES
    first = TokenDelta(request_id="a", token_ids=[7], prompt_logprobs=prompt)
    await remote.client.submit(remote.member, generate_request("a"))
    remote.server.deliver([first, tokens("b", 1)])
    remote.server.deliver([tokens("a", 8, finish="stop")])
    await eventually(lambda: any(d.finish_reason is not None for d in remote.outputs.deltas))
    assert remote.outputs.deltas == [first, tokens("a", 8, finish="stop")]


async def test_connections_to_members_that_left_close_when_idle(remote: Setup):
    await remote.client.submit(remote.member, generate_request("a"))
    remote.client.retain([])
    remote.server.deliver([tokens("a", 1)])
    await eventually(lambda: len(remote.outputs.deltas) == 1)
    remote.client.retain([remote.member])
    remote.client.retain([])
    remote.server.deliver([tokens("a", 2, finish="stop")])
    await eventually(lambda: len(remote.outputs.deltas) == 2)
    await eventually(lambda: not remote.server._listener.sessions)
    await remote.client.submit(remote.member, generate_request("b"))
    assert remote.outputs.lost == []


async def test_a_worker_that_left_and_says_nothing_loses_its_requests(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "RETIRED_SILENCE_S", 0.3)
    await setup.client.submit(setup.member, generate_request("a"))
    setup.client.retain([])
    await eventually(lambda: bool(setup.outputs.lost))
    [(lost, why)] = setup.outputs.lost
    assert lost == ["a"] and "the worker left and sent nothing" in why


# A peer that is not ours


async def read_frame(reader: asyncio.StreamReader) -> Welcome | SubmitReply | Deltas:
    length = int.from_bytes(await reader.readexactly(4), "big")
    return decode_worker_frame(await reader.readexactly(length))


async def greet(setup: Setup) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that is welcome, with the client id "raw"."""
    host, _, port = setup.server.stream_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(frame(encode(Hello(client_id="raw"))))
    assert await read_frame(reader) == Welcome()
    return reader, writer


def submit_of(request_id: str) -> bytes:
    request = encode(generate_request(request_id))
    return frame(encode(Submit(request_id=request_id, request=request)))


async def test_a_malformed_request_is_refused_and_its_connection_goes_on(remote: Setup):
    """It would otherwise end the requests of all users of that frontend."""
    whole, other = encode(generate_request("b")), encode(generate_request("c"))
    async with asyncio.timeout(5):
        reader, writer = await greet(remote)
        writer.write(submit_of("a"))
        await read_frame(reader)
        for request in (b"", b"\xc1", whole[:-1], other):
            writer.write(frame(encode(Submit(request_id="b", request=request))))
            answer = await read_frame(reader)
            assert isinstance(answer, SubmitReply) and isinstance(answer.reply, RequestRefused)
            assert answer.request_id == "b" and not answer.reply.elsewhere
        writer.write(submit_of("b"))
        assert await read_frame(reader) == SubmitReply(request_id="b", reply=Accepted())
        assert list(remote.engine.running) == ["a", "b"] and remote.engine.aborted == []
    writer.close()


async def test_a_request_that_the_engine_is_slow_to_accept_holds_up_no_other_frame(remote: Setup):
    remote.engine.gate = asyncio.Event()
    async with asyncio.timeout(5):
        reader, writer = await greet(remote)
        writer.write(submit_of("a") + submit_of("b") + frame(encode(Cancel(request_ids=["a"]))))
        known = remote.server._requests
        await eventually(lambda: [i for i, one in known.items() if not one.ended] == ["b"])
        remote.engine.gate.set()
        replies = [await read_frame(reader), await read_frame(reader)]
        assert replies == [SubmitReply(request_id=i, reply=Accepted()) for i in ("a", "b")]
        await eventually(lambda: remote.engine.aborted == ["a"])
        assert list(remote.engine.running) == ["b"]
    writer.close()


@pytest.mark.parametrize("reached", [True, False])
async def test_a_connection_that_closes_ends_what_the_engine_is_accepting(
    remote: Setup, reached: bool
):
    """Also where the task that hands it over has not run yet."""
    remote.engine.gate = asyncio.Event()
    async with asyncio.timeout(5):
        _, writer = await greet(remote)
        writer.write(submit_of("a"))
        if reached:
            await eventually(lambda: remote.server.in_flight == 1)
        else:  # malformed: disconnects in the turn of the event loop that reads both frames
            writer.write(frame(b"\xc1"))
        writer.close()
        await eventually(lambda: not remote.server._listener.sessions)
        assert await remote.server.wait_idle(5)
    assert remote.engine.running == {} and remote.engine.aborted == ["a"]
    remote.engine.gate.set()
    await remote.client.submit(remote.member, generate_request("a"))


# A worker that is not ours


class RawWorker:
    """Sends `welcome` to each connection, if there is one; reads what follows as soon as `reads` is
    set."""

    def __init__(self, welcome: Welcome | None):
        self._welcome = welcome
        self.reads = asyncio.Event()
        self.got: list[Hello | Submit | Cancel] = []

    async def on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._welcome is not None:
            writer.write(frame(encode(self._welcome)))
        await self.reads.wait()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int.from_bytes(await reader.readexactly(4), "big")
                self.got.append(decode_client_frame(await reader.readexactly(length)))
        writer.close()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Its address."""
        server = await asyncio.start_server(self.on_connection, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def client_of(outputs: Outputs, request_timeout_s: float = 5.0) -> RemoteGenerateClient:
    return RemoteGenerateClient(
        "impatient", outputs.on_deltas, outputs.on_lost, request_timeout_s=request_timeout_s
    )


async def test_a_worker_that_does_not_read_gets_no_second_large_request():
    """Each submit ends at its timeout, and what waits does not add up until the connection,
    and all that runs on it, is given up."""
    worker, outputs = RawWorker(Welcome()), Outputs()
    asks = 24
    assert asks * 4 << 20 > MAX_UNSENT_BYTES
    async with worker.listening() as address, client_of(outputs, request_timeout_s=0.2) as client:
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(raises(DeadlineExceeded, client.submit, address, f"r{number}"))
                for number in range(asks)
            ]
        assert len(asking) == asks
        worker.reads.set()
        await eventually(lambda: sum(isinstance(message, Cancel) for message in worker.got) == asks)
        submits = [message for message in worker.got if isinstance(message, Submit)]
        assert len(submits) <= 2
        assert outputs.lost == [] and outputs.batches == []


async def test_media_on_their_way_do_not_count_as_silence():
    """Of a request itself, and of those before it."""
    worker, outputs = RawWorker(Welcome()), Outputs()
    media = [generate_request(f"m{number}", inputs=b"x" * (6 << 20)) for number in range(2)]
    async with worker.listening() as address, client_of(outputs, request_timeout_s=0.05) as client:
        member = endpoint_record(stream=address)
        asking = [
            asyncio.create_task(client.submit(member, request))
            for request in [*media, generate_request("text")]
        ]
        await asyncio.wait(asking, timeout=0.5)
        assert not any(task.done() for task in asking)
        worker.reads.set()
        await eventually(lambda: sum(isinstance(message, Submit) for message in worker.got) == 3)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)


async def raises(error: type[Exception], submit: Any, address: str, request_id: str) -> None:
    large = generate_request(request_id, cache_salt="x" * (4 << 20))
    with pytest.raises(error):
        await submit(endpoint_record(stream=address), large)
