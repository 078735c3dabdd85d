"""The status server of a process, when its start is cancelled, and cancelled again."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.runtime.process.status import StatusServer

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_start_that_is_cancelled_leaves_no_socket_open(turns: int) -> None:
    server = StatusServer(dict, CollectorRegistry())
    starting = asyncio.create_task(server.__aenter__())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting], timeout=5)
    if not starting.cancelled():
        await server.__aexit__()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server._port)
