"""Workers' TCP ports with certificates: who gets a connection, and who gets one to whom."""

import asyncio
import logging
import shutil
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import uvloop

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DeadlineExceeded, Unavailable
from dynamo_lite.protocol.generate import Hello
from dynamo_lite.protocol.records import EndpointTransport
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.connection import Connection
from dynamo_lite.request_plane.dialing import Dialer
from dynamo_lite.request_plane.framing import frame, parse_address
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop, uncounted
from tests.builders import endpoint_record, eventually, generate_request
from tests.certificate_folders import expire, graph_folder, of, renew
from tests.contract.generating import Setup, open_setup, tokens

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture
def drops() -> Counter[str]:
    return Counter()


@pytest.fixture
async def worker(drops: Counter[str]) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        yield await open_setup("tls", stack, on_drop=lambda where: drops.update([where]))


async def refusal(
    setup: Setup,
    certificates: Certificates | None,
    *,
    tls: bool = True,
    component: str = "VllmWorker",
    on_drop: OnDrop = uncounted,
) -> str:
    """The error of a client whose request gets no answer."""
    member = endpoint_record(stream=setup.server.stream_address, tls=tls)
    outputs = setup.outputs
    async with RemoteGenerateClient(
        "stranger",
        outputs.on_deltas,
        outputs.on_lost,
        on_drop=on_drop,
        certificates=certificates,
        component=component,
    ) as client:
        with pytest.raises((Unavailable, DeadlineExceeded)) as caught:
            await client.submit(member, generate_request("a"))
    assert setup.engine.running == {} and setup.server.in_flight == 0
    return str(caught.value)


@pytest.mark.parametrize("name", ["VllmWorker", "PrefillWorker", "Router", "Operator", "Engine"])
async def test_another_component_gets_no_session(
    worker: Setup, drops: Counter[str], name: str, caplog: pytest.LogCaptureFixture
):
    assert "disconnected" in await refusal(worker, of(worker.folder, name))
    assert drops == Counter(certificate=1)
    [said] = [r.getMessage() for r in caplog.records if "is refused" in r.getMessage()]
    assert said.endswith(
        f"the client is refused: its certificate is of dynamo-lite://n/{name}, not of"
        " dynamo-lite://n/Frontend"
    )


async def test_one_of_another_graph_gets_no_session(
    worker: Setup, drops: Counter[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Of another authority, and of another namespace whose authority is the same."""
    other = of(graph_folder(tmp_path / "other"), "Frontend")
    seen: list[str] = []
    said = await refusal(worker, other, on_drop=seen.append)
    assert f"its certificate is not valid under {tmp_path}/other/ca.pem: " in said
    assert seen == ["certificate"]
    # Also if it takes every server.
    shutil.copy(worker.folder / "ca.pem", tmp_path / "other" / "trusted.pem")
    bold = tmp_path / "other" / "ca.pem"
    own = bold.read_bytes()
    bold.write_bytes(own + (worker.folder / "ca.pem").read_bytes())
    assert "disconnected" in await refusal(worker, other)
    await eventually(lambda: drops["certificate"] == 1)
    assert f"its certificate is not valid under {worker.folder}/ca.pem: " in caplog.text
    for key in ("ca.pem", "ca-key.pem"):
        shutil.copy(worker.folder / key, tmp_path / key)
    graph_folder(tmp_path, "n2")
    caplog.clear()
    # Of the same authority: only the names tell.
    assert "not of dynamo-lite://n2/VllmWorker" in await refusal(
        worker, of(tmp_path, "Frontend", "n2")
    )


async def test_a_client_without_a_certificate_gets_no_session(
    worker: Setup, drops: Counter[str], caplog: pytest.LogCaptureFixture
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    place = parse_address(worker.server.stream_address)
    reader, writer = await asyncio.open_connection(*place, ssl=context)
    with suppress(OSError):
        writer.write(frame(encode(Hello(client_id="stranger"))))
        assert await reader.read() == b""
    writer.transport.abort()
    await eventually(lambda: drops["certificate"] == 1)
    assert "the client is refused: it shows no certificate" in caplog.text
    # Nor one that speaks no TLS.
    assert "disconnected" in await refusal(worker, None, tls=False)


@pytest.mark.parametrize("kind", ["expired", "component", "no certificates"])
async def test_a_client_sends_nothing_to_who_is_not_a_worker_of_its_graph(worker: Setup, kind: str):
    own, component, expected = of(worker.folder, "Frontend"), "VllmWorker", ""
    seen: list[str] = []
    if kind == "expired":
        serving = worker.folder / "VllmWorker.pem"
        good = serving.read_bytes()
        expire(worker.folder, "VllmWorker")
        # A worker that still uses it: the check at its own reload keeps the old one.
        bad = serving.read_bytes()
        serving.write_bytes(good)
        pair = worker.folder / "pair.pem"
        pair.write_bytes(bad + (worker.folder / "VllmWorker-key.pem").read_bytes())
        contexts = worker.server._listener._certificates
        assert contexts is not None
        contexts.server().load_cert_chain(pair)
        expected = f"not valid under {worker.folder}/ca.pem: certificate has expired"
    elif kind == "component":
        component = "Mine"
        expected = "its certificate is of dynamo-lite://n/VllmWorker, not of dynamo-lite://n/Mine"
    else:
        own = None
        expected = "it wants TLS, and this process has no certificates"
    said = await refusal(worker, own, component=component, on_drop=seen.append)
    assert expected in said
    assert seen == ([] if own is None else ["certificate"])


async def test_requests_go_to_other_hosts_over_tls_only():
    record = EndpointTransport(nats_tcp="s", stream="10.0.0.9:1")
    dialer = Dialer("c", None, "", uncounted)
    connection = Connection(record, dialer, lambda _: None, lambda _a, _b: None)
    with pytest.raises(Unavailable, match="on another host, and its record says: without TLS"):
        await connection.opened()


async def test_new_certificates_are_used_by_new_connections_and_old_ones_go_on(
    worker: Setup, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    await worker.client.submit(worker.member, generate_request("a"))
    # The whole authority is another one.
    shutil.rmtree(worker.folder)
    graph_folder(worker.folder)
    await worker.client.submit(worker.member, generate_request("b"))
    worker.server.deliver([tokens("a", 1), tokens("b", 2)])
    await eventually(lambda: len(worker.outputs.deltas) == 2)
    worker.client.drop(worker.member, "a new connection")
    await eventually(lambda: bool(worker.outputs.lost))
    await worker.client.submit(worker.member, generate_request("c"))
    assert "were read again" in caplog.text
    # A pair that does not match is not used.
    renew(worker.folder, "Router")
    shutil.copy(worker.folder / "Router-key.pem", worker.folder / "VllmWorker-key.pem")
    worker.client.drop(worker.member, "a new connection")
    await worker.client.submit(worker.member, generate_request("d"))
    assert "VllmWorker-key.pem are not a matching PEM pair" in caplog.text


async def _closed_at_once(readers: Sequence[asyncio.StreamReader]) -> None:
    async with asyncio.timeout(20):
        for reader in readers:
            with suppress(ConnectionError):
                assert await reader.read() == b""


@pytest.mark.parametrize("kind", ["tcp", "tls"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_without_a_hello_are_bounded_and_keep_no_peer_out(
    loop: Callable[[], asyncio.AbstractEventLoop], kind: str, monkeypatch: pytest.MonkeyPatch
):
    """With TLS they are in their handshakes. A stranger connects and says nothing. It displaces its
    own connections, and not those of another address, which were there first."""
    most = 32
    monkeypatch.setattr("dynamo_lite.request_plane.listener.MAX_UNGREETED", most)
    for at in ("framing", "listener"):  # no handshake and no Hello is missed meanwhile
        monkeypatch.setattr(f"dynamo_lite.request_plane.{at}.FIRST_FRAME_TIMEOUT_S", 60.0)
    drops: Counter[str] = Counter()

    async def flood() -> None:
        async with AsyncExitStack() as stack:
            count = {"on_drop": lambda where: drops.update([where])}
            setup = await open_setup(kind, stack, **count)
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
        runner.run(asyncio.wait_for(flood(), 40))


def test_tls_works_on_the_event_loop_of_the_processes():
    """uvloop has a TLS implementation of its own."""

    async def talk() -> None:
        async with AsyncExitStack() as stack:
            drops: Counter[str] = Counter()
            setup = await open_setup("tls", stack, on_drop=lambda where: drops.update([where]))
            await setup.client.submit(setup.member, generate_request("a"))
            setup.server.deliver([tokens("a", *range(1000))])
            await eventually(lambda: bool(setup.outputs.deltas))
            setup.server.deliver([tokens("a", finish="stop")])
            assert setup.engine.running.pop("a")
            assert "disconnected" in await refusal(setup, of(setup.folder, "Router"))
            await eventually(lambda: drops["certificate"] == 1)
            await setup.client.submit(setup.member, generate_request("b"))
            await setup.stop_server()
            await eventually(lambda: bool(setup.outputs.lost))

    uvloop.run(asyncio.wait_for(talk(), 20))
