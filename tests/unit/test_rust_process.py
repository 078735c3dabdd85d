"""The process of the Rust frontend, with scripts in its place."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.services.frontend.http import url_of
from dynamo_lite.vllm.frontend.rust_process import RustProcess
from tests.builders import eventually

LOGGER = "dynamo_lite.vllm.frontend.rust_process"

#: Serves HTTP on the inherited socket; SIGTERM ends it.
SERVER = """#!/usr/bin/env python3
import http.server, socket, sys
fd = int(sys.argv[2].partition("=")[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(STATUS)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=fd)
server.serve_forever()
"""


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = [stack.enter_context(bind("127.0.0.1", 0)) for _ in range(3)]
        for sock in found:
            sock.listen()
        yield found


def process(folder: Path, text: str, sockets: list[socket.socket], **options: Any) -> RustProcess:
    path = folder / "vllm-rs"
    path.write_text(text)
    path.chmod(0o755)
    http, inputs, outputs = sockets
    arguments = {"model_tag": "m"}
    rust = RustProcess(path, http=http, inputs=inputs, outputs=outputs, arguments=arguments)
    vars(rust).update(options)
    return rust


async def test_a_start_that_fails_is_reported_with_its_last_lines(
    tmp_path: Path, sockets: list[socket.socket]
):
    async with process(tmp_path, "#!/bin/sh\necho 'no such model'\nexit 2\n", sockets) as rust:
        with pytest.raises(StartupError, match=r"ended with code 2: no such model"):
            await rust.wait_ready(url_of(sockets[0]))
    async with process(tmp_path, SERVER.replace("STATUS", "503"), sockets) as rust:
        with pytest.raises(StartupError, match="503"):
            await rust.wait_ready(url_of(sockets[0]))
    (tmp_path / "vllm-rs").unlink()
    http, inputs, outputs = sockets
    missing = RustProcess(
        tmp_path / "vllm-rs", http=http, inputs=inputs, outputs=outputs, arguments={}
    )
    with pytest.raises(StartupError, match="cannot start"):
        async with missing:
            pass


#: Takes one connection and breaks it.
BREAKS = """#!/usr/bin/env python3
import signal, socket, sys
fd = int(sys.argv[2].partition("=")[2])
connection, _ = socket.socket(fileno=fd).accept()
connection.recv(1)
LAST
"""
RESET = (
    "connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + 7 * [0]));"
    "connection.close()"
)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (f"{RESET}; sys.exit(3)", "vllm-rs ended with code 3"),
        ("connection.close(); sys.exit(3)", "vllm-rs ended with code 3"),
        (f"{RESET}; signal.pause()", "vllm-rs is not ready: its health request failed: ReadError"),
        ("connection.send(b'x' * 200000); signal.pause()", "its health request failed: Remote"),
    ],
)
async def test_a_health_request_that_breaks_fails_the_start(
    tmp_path: Path, sockets: list[socket.socket], last: str, said: str
):
    options = {"end_s": 0.1} if "pause" in last else {}
    async with process(tmp_path, BREAKS.replace("LAST", last), sockets, **options) as rust:
        with pytest.raises(StartupError, match=said):
            await rust.wait_ready(url_of(sockets[0]))


async def test_its_death_is_a_failure_and_its_drain_is_none(
    tmp_path: Path, sockets: list[socket.socket]
):
    async with process(tmp_path, SERVER.replace("STATUS", "200"), sockets) as rust:
        await rust.wait_ready(url_of(sockets[0]))
        running = asyncio.create_task(rust.run(url_of(sockets[0])))
        os.kill(rust.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="vllm-rs ended with code -9"):
            await running
    async with process(tmp_path, SERVER.replace("STATUS", "200"), sockets) as rust:
        await rust.wait_ready(url_of(sockets[0]))
        running = asyncio.create_task(rust.run(url_of(sockets[0])))
        await rust.drain(5.0)
        await running


QUICK = {"period_s": 0.1, "answer_s": 0.5}


async def test_a_stopped_process_is_unhealthy_until_it_goes_on(
    tmp_path: Path, sockets: list[socket.socket]
):
    patient = {**QUICK, "most_failures": 1000}
    async with process(tmp_path, SERVER.replace("STATUS", "200"), sockets, **patient) as rust:
        await rust.wait_ready(url_of(sockets[0]))
        running = asyncio.create_task(rust.run(url_of(sockets[0])))
        os.kill(rust.pid, signal.SIGSTOP)
        await eventually(lambda: "has not answered" in rust.unhealthy)
        os.kill(rust.pid, signal.SIGCONT)
        await eventually(lambda: not rust.unhealthy)
        await rust.drain(5.0)
        await running


async def test_a_process_that_stays_stopped_is_killed(tmp_path: Path, sockets: list[socket.socket]):
    async with process(tmp_path, SERVER.replace("STATUS", "200"), sockets, **QUICK) as rust:
        await rust.wait_ready(url_of(sockets[0]))
        running = asyncio.create_task(rust.run(url_of(sockets[0])))
        os.kill(rust.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="vllm-rs was killed: timeout"):
            await running
        await eventually(lambda: rust.ended)


async def test_a_process_that_reports_an_error_is_unhealthy(
    tmp_path: Path, sockets: list[socket.socket]
):
    async with process(tmp_path, SERVER.replace("STATUS", "503"), sockets, **QUICK) as rust:
        with pytest.raises(RuntimeError, match="vllm-rs was killed: it answered 503"):
            await rust.run(url_of(sockets[0]))


async def test_its_lines_go_to_the_log_with_their_levels(
    tmp_path: Path, sockets: list[socket.socket], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, LOGGER)
    script = r"""#!/bin/sh
printf '\033[0;36m(RustFrontend pid=1)\033[0m \033[33mWARNING\033[0m \033[90m11-22 13:34:20\033[0m [a.rs:1] careful\n'
echo '(RustFrontend pid=1) ERROR 11-22 13:34:20 [b.rs:2] broken'
echo 'plain words'
"""  # noqa: E501
    async with process(tmp_path, script, sockets) as rust:
        with pytest.raises(StartupError):
            await rust.wait_ready(url_of(sockets[0]))
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == LOGGER]
    assert lines == [
        ("WARNING", "vllm-rs: [a.rs:1] careful"),
        ("ERROR", "vllm-rs: [b.rs:2] broken"),
        ("INFO", "vllm-rs: plain words"),
    ]
