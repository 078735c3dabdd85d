"""Runs a command's work on the etcd of a graph."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from dynamo_lite.cli.listing import Place, find_place, open_store
from dynamo_lite.runtime.etcd.store import EtcdStore

T = TypeVar("T")


def on_store(
    state_dir: Path,
    etcd_url: str | None,
    namespace: str | None,
    work: Callable[[EtcdStore, Place], Awaitable[T]],
) -> T:
    """Runs `work(store, place)`. Raises StartupError, Unavailable, ConfigError, and what it
    raises."""
    place = find_place(state_dir, etcd_url, namespace)

    async def run() -> T:
        async with open_store(place) as store:
            return await work(store, place)

    return asyncio.run(run())
