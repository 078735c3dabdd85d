"""Connects to external servers to check their credentials: `python -m dynamo_lite.serve.access`.

Reads `Servers` as JSON from standard input, because arguments are visible to every user of
the machine, and writes a JSON list of problems. It is a process of its own because the etcd
client uses gRPC: a supervisor that forks must not have gRPC's threads.
"""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from dynamo_lite.protocol.errors import ConfigError, StartupError

_CONNECT_TIMEOUT_S = 5.0


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """URLs of the servers to check; None: do not check this one."""

    nats: str | None = None
    etcd: str | None = None


async def problems(servers: Servers) -> list[str]:
    """One sentence for each server that cannot be used."""
    from dynamo_lite.runtime.etcd.store import EtcdStore
    from dynamo_lite.runtime.nats.messaging import NatsMessaging

    clients = ((servers.nats, NatsMessaging), (servers.etcd, EtcdStore))
    checks = (_problem(connect, url) for url, connect in clients if url is not None)
    return [problem for problem in await asyncio.gather(*checks) if problem]


async def _problem(connect: Callable[..., AbstractAsyncContextManager[object]], url: str) -> str:
    try:
        async with connect(url, connect_timeout_s=_CONNECT_TIMEOUT_S):
            return ""
    except (ConfigError, StartupError) as exc:
        return str(exc)


if __name__ == "__main__":
    servers = msgspec.json.decode(sys.stdin.buffer.read(), type=Servers)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(problems(servers))))
