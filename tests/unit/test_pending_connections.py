"""Connections that say nothing, and a listener."""

import asyncio
import itertools
import ssl
from functools import partial

import pytest

from dynamo_lite.runtime.listening import TcpServer
from dynamo_lite.runtime.pending import PendingConnections
from dynamo_lite.runtime.tls import server_context
from tests.external import Certificates


def test_a_connection_keeps_its_place_when_it_is_closed_in_another_way_from_now_on() -> None:
    closed = list[str]()
    pending = PendingConnections(2)
    for name, how in (
        ("one", "its handshake"),
        ("two", "two"),
        ("one", "its connection"),
        ("three", "three"),
    ):
        pending.add(name, "a", partial(closed.append, how))
    assert closed == ["its connection"]


async def test_a_tls_context_that_cannot_be_made_costs_one_connection(
    certificates: Certificates,
) -> None:
    tls, calls = server_context(*certificates.files()), itertools.count()

    def context() -> ssl.SSLContext:
        if next(calls) == 0:
            raise ValueError("a damaged file")
        return tls

    server = TcpServer("127.0.0.1", asyncio.Protocol, PendingConnections(4), context)
    port = await server.start()
    trusting = ssl.create_default_context(cafile=certificates.folder / "ca.pem")
    try:
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        async with asyncio.timeout(5):
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.close()
    finally:
        await server.close()
