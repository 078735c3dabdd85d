"""Where a graph is, what commands read of it from etcd, and the tables of `dynamo-lite ps`.

The clients of etcd and NATS are imported when they are opened: `dynamo-lite --help` is quick, and a
supervisor, which forks, must not have gRPC's threads.
"""

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    CertificatesDir,
    EtcdUrl,
    Namespace,
    NatsUrl,
    StateDir,
)
from dynamo_lite.planner.drains import GraphSeen, look
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_all, decode_json
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.permissions import OPERATOR
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.certificates import Certificates, with_files
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.overview.compose import state_of
from dynamo_lite.runtime.store import Store
from dynamo_lite.serve.run_state import read_run, running_certificates

T = TypeVar("T")

_MEMBER_COLUMNS = (
    *("component", "endpoint", "lease", "pid", "host", "version", "status_url", "state", "age"),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    etcd_url: str
    namespace: str
    #: Empty: not known.
    nats_url: str = ""
    #: The folder with the certificates; None: without one.
    folder: Path | None = None
    #: Whose certificate is shown.
    component: str = OPERATOR

    def certificates(self) -> Certificates | None:
        """Those of who asks. Raises ConfigError."""
        if self.folder is None:
            return None
        return Certificates(self.folder, self.namespace, self.component)

    async def look(self, store: Store, component: str = "") -> GraphSeen:
        """All live processes, or those of a component, and what they report.

        Raises ConfigError; Unavailable when etcd does not respond.
        """
        found = await members(store, self.namespace)
        asked = [one for one in found if component in ("", one.component)]
        return await look(asked, self.certificates())


@dataclass(frozen=True, kw_only=True)
class OnGraph:
    """The options by which each command finds its graph."""

    etcd_url: EtcdUrl = None
    nats_url: NatsUrl = None
    certificates: CertificatesDir = None
    state_dir: StateDir = DEFAULT_STATE_DIR
    namespace: Namespace = None

    def place(self, component: str = OPERATOR) -> Place:
        """As the options say, or else as the running graph of `state_dir` does. component: whose
        certificate is shown.

        Raises StartupError when neither names an etcd server, ConfigError for an invalid namespace.
        """
        running = read_run(self.state_dir)
        url = self.etcd_url or (running.etcd if running else None)
        if url is None:
            raise StartupError(f"no graph runs on {self.state_dir}; name a server with --etcd-url")
        namespace = self.namespace
        if namespace is None:
            namespace = running.namespace if running else "dynamo"
        folder = self.certificates or running_certificates(running, checked_namespace(namespace))
        nats_url = self.nats_url or (running.nats if running else "")
        return Place(
            etcd_url=with_files(url, folder, component),
            namespace=namespace,
            nats_url=with_files(nats_url, folder, component),
            folder=folder,
            component=component,
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


def on_graph(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command these options, but for --nats-url. It gets an OnGraph as `graph`."""
    options = dict(inspect.signature(OnGraph, eval_str=True).parameters)
    del options["nats_url"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(graph=OnGraph(**{name: given.pop(name) for name in options}), **given)

    every = {**inspect.signature(command, eval_str=True).parameters, **options}
    del every["graph"]
    keyword = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in every.values()]
    run.__annotations__ = {one.name: one.annotation for one in keyword}
    vars(run)["__signature__"] = inspect.Signature(keyword)
    return run


def checked_namespace(namespace: str) -> str:
    """Raises ConfigError."""
    if not names.is_namespace(namespace):
        raise ConfigError([f"--namespace {namespace}: not a namespace"])
    return namespace


def open_broker(place: Place) -> AbstractAsyncContextManager[Messaging]:
    """Raises StartupError."""
    from dynamo_lite.runtime.nats.messaging import NatsMessaging

    if not place.nats_url:
        raise StartupError("the graph's NATS is not known; name it with --nats-url")
    return NatsMessaging(place.nats_url)


def open_store(place: Place) -> AbstractAsyncContextManager[Store]:
    """A context that raises StartupError or Unavailable when etcd does not respond."""
    from dynamo_lite.runtime.etcd.store import EtcdStore

    return EtcdStore(place.etcd_url, connect_timeout_s=3.0)


async def members(store: Store, namespace: str) -> list[EndpointRecord]:
    """Every endpoint of every live process, sorted by key; malformed records are left out.

    Raises Unavailable when etcd does not respond.
    """
    found = await store.get_prefix(names.components_prefix(namespace))
    return decode_all(found, lambda value: decode_json(value, EndpointRecord))


async def member_rows(
    records: list[EndpointRecord], certificates: Certificates | None
) -> list[dict[str, Any]]:
    """One row of plain values per endpoint; `age` in seconds. certificates: of who asks."""
    facts, now = (await look(records, certificates)).facts, time.time()
    return [
        {
            "component": record.component,
            "endpoint": record.endpoint,
            "lease": f"{record.lease_id:x}",
            "pid": record.pid,
            "host": record.host,
            "version": record.version or "-",
            "status_url": record.status_url,
            "state": state_of(facts[record.lease_id]),
            "age": round(max(0.0, now - record.started_at), 1),
        }
        for record in records
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    shown = [{**row, "age": _age(row["age"])} for row in rows]
    return table(_MEMBER_COLUMNS, [[row[name] for name in _MEMBER_COLUMNS] for row in shown])


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = [name.upper().replace("_", " ") for name in columns]
    lines = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    padded = (map(str.ljust, cells, widths) for cells in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _age(age_s: float) -> str:
    seconds = int(age_s)
    if seconds < 120:
        return f"{seconds}s"
    return f"{seconds // 60}m" if seconds < 7200 else f"{seconds // 3600}h"
