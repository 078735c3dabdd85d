"""The start of an embedded server: its port, and the cause when it fails."""

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.embedded import EmbeddedServer

LISTENS = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))"
STAYS = f"{LISTENS}; time.sleep(60)"


class Server(EmbeddedServer):
    """A program of these tests."""

    name = "server"
    script = STAYS

    def _command(self) -> list[str]:
        return [sys.executable, "-c", self.script, str(self.port)]

    async def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.close()
            return True
        return False


async def test_a_port_that_another_server_has_is_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{taken}: "):
            async with Server(tmp_path, taken):
                pass


async def test_a_silent_end_is_not_explained_by_an_earlier_start(tmp_path: Path):
    server = Server(tmp_path)
    server.script = "print('[FTL] no space left'); raise SystemExit(1)"
    with pytest.raises(StartupError, match="ends: no space left"):
        await server.restart()
    server.script = "raise SystemExit(1)"
    with pytest.raises(StartupError) as failure:
        await server.restart()
    assert "no space left" not in str(failure.value)
