"""Runs a command's work on the etcd of a graph. What it needs is imported when it runs."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def on_store(
    state_dir: Path,
    etcd_url: str | None,
    namespace: str | None,
    work: Callable[[Any, Any], Awaitable[T]],
) -> T:
    """Runs `work(store, place)`: an EtcdStore, and the `listing.Place` that it is of.

    Raises StartupError, Unavailable, ConfigError, and what `work` raises.
    """
    from dynamo_lite.cli.listing import find_place, open_store

    place = find_place(state_dir, etcd_url, namespace)

    async def run() -> T:
        async with open_store(place) as store:
            return await work(store, place)

    return asyncio.run(run())
