"""`dynamo-lite sidecar` in a process of its own, in front of scripted engines."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.builders import eventually
from tests.external import Certificates
from tests.forwarding import COMPLETION, TEXT, Asked, asked_engines, trusting
from tests.process.command import DYNAMO_LITE, run
from tests.scripted import Fault
from tests.started import Started


class Sidecar(Started):
    last_signal = signal.SIGKILL


class Running(Asked):
    """A sidecar with its engines. process: what it prints and how it ends."""

    process: Sidecar

    @property
    def header(self) -> dict[str, str]:
        return {"x-prefiller-host-port": self.prefill[0].address}

    def streams(self) -> "asyncio.Task[Any]":
        """A request for a stream, whose decode leg is held until the event is set."""
        body = {**COMPLETION, "stream": True}
        return asyncio.create_task(
            self.session.post(f"{self.url}/v1/completions", json=body, headers=self.header)
        )

    async def stops(self) -> None:
        self.process.signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait_line, "draining")


@asynccontextmanager
async def sidecar(*arguments: str, https: Certificates | None = None) -> AsyncIterator[Running]:
    """It is ready; on the way out it must be gone. https: of the sidecar alone."""
    async with AsyncExitStack() as stack:
        made = await asked_engines(stack, "nixl", 1, 1, None)
        made["session"] = await stack.enter_async_context(trusting(https))
        decode = ("--decode", made["decode"][0].url)
        process = Sidecar([*DYNAMO_LITE, "sidecar", "--port", "0", *decode, *arguments])
        stack.enter_context(process)
        url = (await asyncio.to_thread(process.wait_line, "ready http")).split()[1]
        b = Running(**made, url=url)
        b.process = process

        async def ready() -> bool:
            async with b.session.get(f"{url}/ready") as answer:
                return answer.status == 200

        await eventually(ready, 20)
        yield b
        await b.fleet.ends_well()


async def test_it_serves_https_and_drains(certificates: Certificates):
    """A stream that is open at SIGTERM is finished."""
    cert, key = map(str, certificates.files())
    options = ("--protocol", "nixl", "--tls-cert", cert, "--tls-key", key)
    async with sidecar(*options, https=certificates) as b:
        assert b.url.startswith("https://")
        assert await b.text(b.header) == TEXT
        assert len(b.prefill[0].legs) == len(b.decode[0].legs) == 1
        hold = asyncio.Event()
        b.decode[0].faults.append(Fault(hold=hold))
        asked = b.streams()
        await eventually(lambda: len(b.decode[0].legs) >= 2, 20)
        await b.stops()
        hold.set()
        async with await asked as answer:
            assert (await answer.read()).endswith(b"[DONE]\n\n")
        assert await asyncio.to_thread(b.process.end) == 0


async def test_a_second_signal_ends_it_at_once():
    """Of another kind, too."""
    async with sidecar() as b:
        b.decode[0].faults.append(Fault(hold=asyncio.Event()))
        asked = b.streams()
        await eventually(lambda: b.decode[0].legs, 20)
        await b.stops()
        b.process.signal(signal.SIGINT)
        assert await asyncio.to_thread(b.process.end) == 130
        with pytest.raises(aiohttp.ClientError):
            await asked
        async with asyncio.timeout(5):
            await b.decode[0].legs[0].aborted.wait()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tls-cert", "none.pem", "--tls-key", "none.pem"], "tls-cert=none.pem cannot be read"),
        (["--prefiller-https", "--ca-file", "none.pem"], "ca=none.pem cannot be read"),
    ],
)
def test_unreadable_files_are_named(arguments: list[str], said: str):
    ended = run("sidecar", *arguments)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr and "Traceback" not in ended.stderr
