"""Connects to external servers, to check the credentials there and the versions of the members:
`python -m dynamo_lite.serve.access`.

Reads `ServersToCheck` as JSON from standard input, because arguments are visible to every user of
the machine, and writes a JSON list of problems. It is a process of its own because the etcd
client uses gRPC: a supervisor that forks must not have gRPC's threads.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import msgspec

from dynamo_lite.disagg.queue.base import QueueOptions
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_all, decode_json
from dynamo_lite.protocol.errors import ConfigError, DynamoLiteError, StartupError
from dynamo_lite.protocol.permissions import Permissions, all_permissions, inbox_of
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.versions import misfit
from dynamo_lite.runtime.address import parse_nats_url, redact
from dynamo_lite.runtime.store import Store

if TYPE_CHECKING:
    from dynamo_lite.runtime.nats.messaging import NatsMessaging

_CONNECT_TIMEOUT_S = 5.0
_USERS = "`dynamo-lite access nats` prints them"


class ServersToCheck(msgspec.Struct, frozen=True, kw_only=True):
    """URLs of the servers to check; None: do not check this one."""

    nats: str | None = None
    etcd: str | None = None
    #: The namespace of the processes to be started.
    namespace: str = ""
    #: Their components, whose rights the users at the servers need.
    components: tuple[str, ...] = ()
    #: The queue of the processes to be started; None: they have none.
    queue: QueueOptions | None = None


async def problems(servers: ServersToCheck) -> list[str]:
    """One sentence for each server that cannot be used."""
    from dynamo_lite.disagg.queue.jetstream import check_queue
    from dynamo_lite.runtime.etcd.store import EtcdStore
    from dynamo_lite.runtime.nats.messaging import NatsMessaging

    async def nats(url: str) -> str:
        async with NatsMessaging(url, connect_timeout_s=_CONNECT_TIMEOUT_S) as messaging:
            if not (messaging.asks_who or parse_nats_url(url).on_loopback):
                return f"NATS at {redact(url)} lets in everybody: give it users, {_USERS}"
            if why := await _refusal(messaging, servers):
                return f"NATS at {redact(url)}: {why}"
            if servers.queue is not None and servers.namespace:
                await check_queue(messaging, servers.namespace, servers.queue)
            return ""

    async def etcd(url: str) -> str:
        async with EtcdStore(url, connect_timeout_s=_CONNECT_TIMEOUT_S) as store:
            return await _unreadable(store, servers) or await _misfits(store, servers)

    checks = ((servers.nats, nats), (servers.etcd, etcd))
    found = (_problem(check(url)) for url, check in checks if url is not None)
    return [problem for problem in await asyncio.gather(*found) if problem]


async def _problem(check: Awaitable[str]) -> str:
    try:
        return await check
    except (ConfigError, StartupError) as exc:
        return str(exc)


async def _refusal(messaging: "NatsMessaging", servers: ServersToCheck) -> str:
    """Why this NATS user cannot be that of a component to be started; "" if it can.

    A process would find it out after it has loaded a model, or only log it.
    """
    for component, needs in _needs(servers):
        with contextlib.suppress(DynamoLiteError):  # it shows when the processes start
            if why := await messaging.refusal(needs.subscribe):
                inbox = inbox_of(f"{servers.namespace}-{component}")
                return f"{why}; give the login of {component}: ?login=FILE&inbox={inbox}"
    return ""


async def _unreadable(store: Store, servers: ServersToCheck) -> str:
    """As `_refusal`, of the etcd user."""
    for component, needs in _needs(servers):
        for prefix in needs.read:
            try:
                await store.get_prefix(prefix)
            except DynamoLiteError as exc:
                if "permission denied" in str(exc):
                    return f"{exc} for {prefix}; give the login of {component}: ?login=FILE"
    return ""


def _needs(servers: ServersToCheck) -> list[tuple[str, Permissions]]:
    """Of the components to be started that have users."""
    found = all_permissions(servers.namespace) if servers.namespace else {}
    return [(name, found[name]) for name in servers.components if name in found]


async def _misfits(store: Store, servers: ServersToCheck) -> str:
    """Why these processes could not work together with a live member of the namespace."""
    if not servers.namespace:
        return ""
    try:
        entries = await store.get_prefix(names.components_prefix(servers.namespace))
    except DynamoLiteError:
        return ""  # it shows when the processes start
    members = decode_all(entries, lambda value: decode_json(value, EndpointRecord))
    why = next((why for member in members if (why := misfit(member))), "")
    return f"cannot join namespace {servers.namespace}: {why}" if why else ""


if __name__ == "__main__":
    servers = msgspec.json.decode(sys.stdin.buffer.read(), type=ServersToCheck)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(problems(servers))))
