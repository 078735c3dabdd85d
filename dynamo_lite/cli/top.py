"""Shows frames of a running graph: one, or a sequence until a signal."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from dynamo_lite.cli.listing import Broker, Place, open_broker, open_store
from dynamo_lite.cli.top_view import as_frame
from dynamo_lite.overview.model import Overview
from dynamo_lite.overview.observer import Observer

#: Width of a plain frame; only a failed link's long reason is wider.
_PLAIN_WIDTH = 160

Observing = AbstractAsyncContextManager[Observer]


@contextlib.asynccontextmanager
async def observing(place: Place, broker: Broker) -> AsyncIterator[Observer]:
    """Raises StartupError or Unavailable when a server does not respond."""
    async with (
        open_store(place) as store,
        open_broker(broker) as messaging,
        Observer(store, messaging, place.namespace) as observer,
    ):
        yield observer


async def until_signal(shown: Coroutine[Any, Any, None]) -> None:
    """Runs `shown` until a signal, which is no failure.

    Connections are closed and the terminal is restored first.
    """
    task = asyncio.ensure_future(shown)
    loop = asyncio.get_running_loop()
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(kind, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def print_frame(observing: Observing, interval_s: float) -> None:
    """Prints plain text; lines are not cut to the terminal's width."""
    seen = await _second_overview(observing, interval_s)
    console = Console(color_system=None, highlight=False, width=_PLAIN_WIDTH)
    with console.capture() as printed:
        console.print(as_frame(seen))
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


async def print_json(observing: Observing, interval_s: float) -> None:
    seen = await _second_overview(observing, interval_s)
    print(msgspec.json.format(msgspec.json.encode(seen), indent=2).decode())


async def watch(observing: Observing, interval_s: float) -> None:
    """On a terminal each frame replaces the last; elsewhere frames are printed in sequence."""
    console = Console(highlight=False)
    async with observing as observer:
        if not console.is_terminal:
            async for seen in _overviews(observer, interval_s):
                console.print(as_frame(seen), "")
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for seen in _overviews(observer, interval_s):
                live.update(as_frame(seen), refresh=True)


async def _overviews(observer: Observer, interval_s: float) -> AsyncIterator[Overview]:
    """One overview per `interval_s`, or fewer if one takes longer."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        yield await observer.look()
        due = max(due + interval_s, loop.time())
        await asyncio.sleep(due - loop.time())


async def _second_overview(observing: Observing, interval_s: float) -> Overview:
    """The second of two overviews: rates need two."""
    async with observing as observer:
        await observer.look()
        await asyncio.sleep(interval_s)
        return await observer.look()
