"""Frames of a running graph: one, or one after the other until a signal."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from dynamo_lite.cli.listing import Place
from dynamo_lite.cli.top_view import as_frame
from dynamo_lite.overview import Observer, Overview
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging

#: Of a plain frame: wider than any line but a long reason of a failed link.
_PLAIN_WIDTH = 160

Observing = AbstractAsyncContextManager[Observer]


@contextlib.asynccontextmanager
async def observing(place: Place, nats_url: str) -> AsyncIterator[Observer]:
    """Raises StartupError or Unavailable when a server does not answer."""
    async with (
        EtcdStore(place.etcd_url, connect_timeout_s=3.0) as store,
        NatsMessaging(nats_url) as messaging,
        Observer(store, messaging, place.namespace) as observer,
    ):
        yield observer


async def until_signal(shown: Coroutine[Any, Any, None]) -> None:
    """A signal is how it ends, and no failure: connections are closed and the terminal is
    put right first."""
    task = asyncio.ensure_future(shown)
    loop = asyncio.get_running_loop()
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(kind, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def print_frame(observing: Observing, interval_s: float) -> None:
    """Plain text; nothing is cut off, however narrow the terminal."""
    seen = await _second_look(observing, interval_s)
    console = Console(color_system=None, highlight=False, width=_PLAIN_WIDTH)
    with console.capture() as printed:
        console.print(as_frame(seen))
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


async def print_json(observing: Observing, interval_s: float) -> None:
    seen = await _second_look(observing, interval_s)
    print(msgspec.json.format(msgspec.json.encode(seen), indent=2).decode())


async def watch(observing: Observing, interval_s: float) -> None:
    """On a terminal one frame replaces the other; elsewhere they follow each other."""
    console = Console(highlight=False)
    async with observing as observer:
        if not console.is_terminal:
            async for seen in _looks(observer, interval_s):
                console.print(as_frame(seen), "")
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for seen in _looks(observer, interval_s):
                live.update(as_frame(seen), refresh=True)


async def _looks(observer: Observer, interval_s: float) -> AsyncIterator[Overview]:
    """At a fixed pace, unless looking takes longer."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        yield await observer.look()
        due = max(due + interval_s, loop.time())
        await asyncio.sleep(due - loop.time())


async def _second_look(observing: Observing, interval_s: float) -> Overview:
    """The first one begins what rates are of."""
    async with observing as observer:
        await observer.look()
        await asyncio.sleep(interval_s)
        return await observer.look()
