"""The Frontend's HTTP server: TLS as vLLM's arguments say, and limits on a request's head."""

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.services.frontend.http import HttpServer, url_of
from dynamo_lite.vllm.http_options import HttpOptions, TlsOptions, tls_options

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PATIENCE_S = 10.0


async def hello(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """ASGI; answers with the scheme it was asked over."""
    if scope["type"] == "lifespan":
        for state in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{state}.complete"})
        return
    body = scope["scheme"].encode()
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(options: HttpOptions) -> AsyncIterator[str]:
    with bind("127.0.0.1", 0) as sock:
        server = HttpServer(hello, sock, options)
        await server.start()
        try:
            yield url_of(sock, tls=options.tls is not None)
        finally:
            await server.stop(0.0)


async def test_an_app_that_fails_to_start_is_an_error_and_not_the_end_of_the_process(
    caplog: pytest.LogCaptureFixture,
):
    async def failing(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no tokenizer"})

    with bind("127.0.0.1", 0) as sock:
        server = HttpServer(failing, sock)
        with pytest.raises(StartupError, match="the HTTP app has failed to start"):
            await server.start()
        await server.stop(0.0)
    assert "no tokenizer" in caplog.text


class Issued:
    """Certificates of one authority, as files."""

    def __init__(self, folder: Path):
        self.folder, self.authority = folder, trustme.CA()
        self.authority.cert_pem.write_to_path(folder / "ca.pem")
        self.server = self.write("server")
        self.trust = ssl.create_default_context(cafile=folder / "ca.pem")

    def write(self, name: str, *, authority: trustme.CA | None = None) -> TlsOptions:
        issued = (authority or self.authority).issue_cert("127.0.0.1", "localhost")
        cert, key = (self.folder / f"{name}{suffix}.pem" for suffix in ("", "-key"))
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return TlsOptions(certfile=str(cert), keyfile=str(key))


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return Issued(tmp_path)


async def certificate_of(url: str) -> bytes:
    port = int(url.rpartition(":")[2])
    return (await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))).encode()


# TLS


async def test_clients_that_must_have_a_certificate(issued: Issued, tmp_path: Path):
    tls = replace(issued.server, ca_certs=str(tmp_path / "ca.pem"), cert_reqs=ssl.CERT_REQUIRED)
    mine, theirs = issued.write("client"), issued.write("stranger", authority=trustme.CA())
    async with serving(HttpOptions(tls=tls)) as url:
        for own, welcome in ((mine, True), (theirs, False), (None, False)):
            trust = ssl.create_default_context(cafile=tmp_path / "ca.pem")
            if own is not None:
                trust.load_cert_chain(own.certfile, own.keyfile)
            async with httpx.AsyncClient(verify=trust) as client:
                if welcome:
                    assert (await client.get(url)).text == "https"
                else:
                    with pytest.raises(httpx.TransportError):
                        await client.get(url)


async def test_a_certificate_that_is_replaced_is_served_without_a_restart(
    issued: Issued, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    later = issued.write("later")
    cert = Path(issued.server.certfile)

    def replace_with(source: str, target: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copy(source, copy)
        copy.rename(target)

    async with serving(HttpOptions(tls=replace(issued.server, refresh=True))) as url:
        first = await certificate_of(url)
        assert first == cert.read_bytes()
        # Half of a pair: the previous certificate stays in use.
        replace_with(later.certfile, cert)
        assert await certificate_of(url) == first
        assert "are not a matching PEM pair" in caplog.text
        assert "what was read before stays in use" in caplog.text
        assert later.keyfile and issued.server.keyfile
        replace_with(later.keyfile, Path(issued.server.keyfile))
        assert await certificate_of(url) == Path(later.certfile).read_bytes()


@pytest.mark.parametrize(
    "what", ["missing", "no key", "other key", "password", "ciphers", "authority"]
)
async def test_tls_that_is_not_set_up_right(issued: Issued, tmp_path: Path, what: str):
    tls, says = issued.server, ""
    match what:
        case "missing":
            tls, says = replace(tls, certfile=str(tmp_path / "none.pem")), "cannot be read"
        case "no key":
            tls, says = replace(tls, keyfile=None), "not a matching PEM pair"
        case "other key":
            tls, says = (
                replace(tls, keyfile=issued.write("other").keyfile),
                "not a matching PEM pair",
            )
        case "password":
            from cryptography.hazmat.primitives import serialization

            assert tls.keyfile
            key = serialization.load_pem_private_key(Path(tls.keyfile).read_bytes(), None)
            Path(tls.keyfile).write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.BestAvailableEncryption(b"secret"),
                )
            )
            says = "with an unencrypted key"
        case "ciphers":
            tls, says = replace(tls, ciphers="NONE-SUCH"), "No cipher"
        case "authority":
            tls, says = replace(tls, ca_certs=str(tmp_path / "none.pem")), "cannot be read"
    with bind("127.0.0.1", 0) as sock:
        with pytest.raises(StartupError, match=says):
            await HttpServer(hello, sock, HttpOptions(tls=tls)).start()


def test_arguments_that_would_do_nothing_are_mistakes():
    for key, value in (
        ("ssl-keyfile", "k"),
        ("ssl-ca-certs", "c"),
        ("ssl-cert-reqs", 2),
        ("ssl-ciphers", "x"),
        ("enable-ssl-refresh", True),
    ):
        with pytest.raises(ConfigError, match=f"{key}: does nothing without ssl-certfile"):
            tls_options({key: value})
    with pytest.raises(ConfigError, match="ssl-cert-reqs: needs ssl-ca-certs"):
        tls_options({"ssl-certfile": "c", "ssl-cert-reqs": 2})
    assert tls_options({}) is None


# The end


async def test_a_stop_that_is_cancelled_in_each_of_its_steps_still_ends_the_server(issued: Issued):
    reached, over = asyncio.Event(), asyncio.Event()

    async def deaf(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            return await send({"type": "lifespan.startup.complete"})
        reached.set()
        await over.wait()

    tls = replace(issued.server, refresh=True)
    async with httpx.AsyncClient(verify=issued.trust) as client, asyncio.timeout(PATIENCE_S):
        with bind("127.0.0.1", 0) as sock:
            server = HttpServer(deaf, sock, HttpOptions(tls=tls))
            await server.start()
            asked = asyncio.create_task(client.get(url_of(sock, tls=True)))
            await reached.wait()
            stopping = asyncio.create_task(server.stop(PATIENCE_S))
            for _ in range(2):
                await asyncio.sleep(0)
                stopping.cancel()
            await asyncio.wait({stopping})
        left = {task.get_name() for task in asyncio.all_tasks()}
        over.set()
        with pytest.raises(httpx.TransportError):
            await asked
    assert stopping.cancelled() and not left & {"http-stop", "http-ticks", "tls-refresh"}


# Heads


def exchange(url: str, *sent: bytes) -> bytes:
    """What the server says until it closes, which may be before all was sent."""
    said = b""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE_S) as sock:
        with contextlib.suppress(ConnectionError):
            for part in sent:
                sock.sendall(part)
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(4096):
                said += part
    return said


@pytest.mark.parametrize(
    "head",
    [
        pytest.param([b"a%d: b\r\n" % i for i in range(50)], id="many"),
        pytest.param([b"a: " + 5000 * b"b" + b"\r\n"], id="large"),
        pytest.param([b"a: ", *[400 * b"b"] * 50], id="endless"),
    ],
)
async def test_a_head_beyond_the_limits_is_refused(head: list[bytes]):
    async with serving(HttpOptions(max_headers=20, max_head_bytes=4096)) as url:
        start = b"GET / HTTP/1.1\r\nhost: x\r\n"
        answer = await asyncio.to_thread(exchange, url, start, *head, b"\r\n")
        assert answer.startswith(b"HTTP/1.1 400") and answer.endswith(b"too many or too large.")
        async with httpx.AsyncClient() as client:
            assert (await client.get(url)).status_code == 200


# The access log


async def test_paths_whose_requests_are_not_logged(caplog: pytest.LogCaptureFixture):
    options = HttpOptions(quiet_paths=frozenset({"/health"}), log_level="info")
    logger = logging.getLogger("uvicorn.access")
    async with serving(options) as url, httpx.AsyncClient() as client:
        for path in ("/health", "/health?a=b", "/other", "/long/" + 20_000 * "x"):
            await client.get(url + path)
        said = [record.getMessage() for record in caplog.records if record.name == logger.name]
        assert ["/other" in line for line in said] == [True, False]
        assert "/long/" in said[1] and len(said[1]) < 2000
    assert not logger.filters
