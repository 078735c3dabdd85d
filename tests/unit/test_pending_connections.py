"""The limit on connections that say nothing: who has most of them loses the oldest. A listener."""

import asyncio
import itertools
import ssl
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.runtime.listening import PendingConnections, TcpServer
from dynamo_lite.runtime.tls import server_context
from tests.external import Certificates


class Closed(list[object]):
    def of(self, name: object) -> Callable[[], None]:
        return partial(self.append, name)


def test_the_oldest_of_the_address_with_the_most_is_closed_and_counted() -> None:
    closed, counted = Closed(), []
    pending = PendingConnections(4, lambda: counted.append(1))
    for name, address in (("peer", "a"), ("b1", "b"), ("b2", "b"), ("c", "c"), ("b3", "b")):
        pending.add(name, address, closed.of(name))
    assert closed == ["b1"]
    pending.add("a2", "a", closed.of("a2"))  # two addresses have two: the one that came first
    assert closed == ["b1", "peer"] and len(counted) == 2
    assert len(pending) == 4


def test_a_connection_keeps_its_place_when_it_is_closed_in_another_way_from_now_on() -> None:
    closed = Closed()
    pending = PendingConnections(2)
    pending.add("one", "a", closed.of("its handshake"))
    pending.add("two", "a", closed.of("two"))
    pending.add("one", "a", closed.of("its connection"))
    pending.add("three", "a", closed.of("three"))
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


@pytest.mark.parametrize("most", [1, 3])
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from("abc"))))
def test_never_more_than_the_limit_and_each_is_closed_at_most_once(
    most: int, steps: list[tuple[bool, int, str]]
) -> None:
    closed, open_ = Closed(), set[tuple[int, str]]()
    pending = PendingConnections(most)
    for adds, number, address in steps:
        name = number, address
        if adds:
            pending.add(name, address, closed.of(name))
            open_.add(name)
        else:
            pending.discard(name)
            open_.discard(name)
        assert len(set(closed)) == len(closed) <= 1
        open_.difference_update(closed)
        closed.clear()
        assert len(pending) == len(open_) <= most
