"""Follows the KV events of all engines that publish any."""

import asyncio
from typing import Self

import zmq.asyncio

from dynamo_lite.forward.engines import KnownEngine, KnownEngines
from dynamo_lite.forward.kv.subscription import KvSubscription
from dynamo_lite.policy.routing.known_blocks import KnownBlocks
from dynamo_lite.runtime.tasks import OwnedTasks


class KvEventFollower:
    """Async context manager: follows the engines that are there when it is entered, and those of
    `follow` until they leave."""

    def __init__(self, engines: KnownEngines, known: KnownBlocks):
        self._engines, self._known = engines, known
        self._tasks = OwnedTasks()
        self._followed: dict[KnownEngine, asyncio.Task[None]] = {}
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> Self:
        for engine in self._engines.all:
            self.follow(engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()
        self._context.destroy(linger=0)

    def follow(self, engine: KnownEngine) -> None:
        """Does nothing for an engine that publishes no events."""
        endpoint = engine.options.kv_events
        if endpoint is None:
            return
        subscription = KvSubscription(
            self._context,
            self._known,
            number=engine.number,
            name=engine.name,
            endpoint=endpoint,
            replay=engine.options.kv_replay,
        )
        self._followed[engine] = self._tasks.start(
            subscription.run(), name=f"KV events of {engine.name}"
        )

    def leave(self, engine: KnownEngine) -> None:
        if (task := self._followed.pop(engine, None)) is not None:
            task.cancel()
