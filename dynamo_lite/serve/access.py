"""Asks external servers whether they let this graph in: `python -m dynamo_lite.serve.access`.

Reads `Servers` as JSON from standard input, since arguments are visible to every
user of the machine, and writes a JSON list of what is wrong. It is a process of
its own because etcd is spoken to over gRPC, whose threads do not belong into a
supervisor that forks.
"""

import asyncio
import sys

import msgspec

from dynamo_lite.protocol.errors import ConfigError, StartupError

_CONNECT_TIMEOUT_S = 5.0


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """URLs; None where there is nothing to ask."""

    nats: str | None = None
    etcd: str | None = None


async def problems(servers: Servers) -> list[str]:
    """One sentence for each server that cannot be used."""
    answers = await asyncio.gather(_ask_nats(servers.nats), _ask_etcd(servers.etcd))
    return [answer for answer in answers if answer]


async def _ask_nats(url: str | None) -> str:
    from dynamo_lite.runtime.nats.messaging import NatsMessaging

    if url is None:
        return ""
    try:
        async with NatsMessaging(url, connect_timeout_s=_CONNECT_TIMEOUT_S):
            return ""
    except (ConfigError, StartupError) as exc:
        return str(exc)


async def _ask_etcd(url: str | None) -> str:
    from dynamo_lite.runtime.etcd.store import EtcdStore

    if url is None:
        return ""
    try:
        async with EtcdStore(url, connect_timeout_s=_CONNECT_TIMEOUT_S):
            return ""
    except (ConfigError, StartupError) as exc:
        return str(exc)


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Servers)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(problems(asked))))
