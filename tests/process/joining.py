"""Runs `dynamo-lite join` beside a scripted engine, in a process of its own."""

import asyncio
import signal

from tests.process.command import DYNAMO_LITE
from tests.scripted import ScriptedEngine
from tests.started import Started


class Joining(Started):
    """place: options that say where etcd is."""

    last_signal = signal.SIGKILL

    def __init__(self, engine: ScriptedEngine, *place: str):
        super().__init__(
            [
                *(*DYNAMO_LITE, "join", "--url", engine.url),
                *("--role", engine.role, "--protocol", "nixl"),
                *("--lease-ttl-s", "2", "--health-interval-s", "0.1", *place),
            ]
        )

    async def joined(self) -> dict[str, str]:
        """What it says once it has registered the engine."""
        line = await asyncio.to_thread(self.wait_line, "joined http://")
        return dict(word.split("=", 1) for word in line.split()[2:])

    async def ended(self) -> int:
        return await asyncio.to_thread(self.end)
