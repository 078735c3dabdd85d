"""The options by which each command finds its graph."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    CertificatesDir,
    EtcdUrl,
    Namespace,
    NatsUrl,
    StateDir,
)
from dynamo_lite.cli.listing import Place, find_place, open_store
from dynamo_lite.runtime.store import Store

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OnGraph:
    etcd_url: EtcdUrl = None
    nats_url: NatsUrl = None
    certificates: CertificatesDir = None
    state_dir: StateDir = DEFAULT_STATE_DIR
    namespace: Namespace = None

    def place(self) -> Place:
        return find_place(
            self.state_dir,
            self.etcd_url,
            self.namespace,
            self.certificates,
            nats_url=self.nats_url,
        )

    def on_store(self, work: Callable[[Store, Place], Awaitable[T]]) -> T:
        """Runs `work` on the etcd of the graph.

        Raises StartupError, Unavailable, ConfigError, and what `work` raises.
        """
        place = self.place()

        async def run() -> T:
            async with open_store(place) as store:
                return await work(store, place)

        return asyncio.run(run())


def on_graph(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command these options, but for those `without`. It gets an OnGraph as `graph`."""
    options = inspect.signature(OnGraph, eval_str=True).parameters.values()
    added = [option for option in options if option.name not in without]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            found = {option.name: given.pop(option.name) for option in added}
            command(graph=OnGraph(**found), **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        every = [*(one for one in own if one.name != "graph"), *added]
        keyword = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in every]
        run.__annotations__ = {one.name: one.annotation for one in every}
        vars(run)["__signature__"] = inspect.Signature(keyword)
        return run

    return decorated
