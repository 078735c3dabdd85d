"""Runs `dynamo-lite join` beside a scripted engine, in a process of its own."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from tests.process.command import ROOT, Serving
from tests.scripted import ScriptedEngine


class Joining(Serving):
    """A running `dynamo-lite join`."""

    async def joined(self) -> dict[str, str]:
        """What it says once it has registered the engine."""
        line = await asyncio.to_thread(self.wait_line, "joined http://")
        return dict(word.split("=", 1) for word in line.split()[2:])

    async def ended(self) -> int:
        return await asyncio.to_thread(self.end)


@contextlib.contextmanager
def joining(engine: ScriptedEngine, *place: str) -> Iterator[Joining]:
    """place: options that say where etcd is."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "dynamo_lite.cli.cli", "join", "--url", engine.url),
            *("--role", engine.role, "--protocol", "nixl"),
            *("--lease-ttl-s", "2", "--health-interval-s", "0.1", *place),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Joining(process, ROOT)
    try:
        yield running
    finally:
        process.kill()
        running.end()
