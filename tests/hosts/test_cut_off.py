"""KV writes between hosts that are cut off from each other.

What the kernel has not delivered when a writer dies comes before the blocks are released, or never.
No engine waits for a connection.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from dynamo_lite.serve.child_environment import child_environment
from tests.builders import eventually
from tests.contract.nixl_peer import SIZE
from tests.contract.peers import PeerProcess
from tests.hosts.network import Host, hosts, unavailable
from tests.lacking import lacking

pytestmark = pytest.mark.heavy

LEASE_TTL_S = 6.0
#: Also for NIXL's libraries, on a busy machine.
_PATIENCE_S = 60.0
#: For what would come at once when the link is up.
_AT_ONCE_S = 2.0
#: UCX sends messages of 64 KiB. A part of one never becomes visible, so the kernel must take a
#: whole one; and not two, since UCX ends a target that cannot answer the second. The target's end
#: of the connection must not give it up because nothing comes.
_WHOLE = 1 << 16
_KERNEL = {"UCX_TCP_SNDBUF": "40k", "UCX_TCP_KEEPIDLE": "600s"}
_USER_TIMEOUT = child_environment({}, lease_ttl_s=LEASE_TTL_S)["UCX_TCP_USER_TIMEOUT"]


class Peer(PeerProcess):
    """`nixl_peer.py` on a host."""

    def __init__(self, host: Host, role: str, ucx: Mapping[str, str]):
        between_hosts = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
        super().__init__(
            *("tests.contract.nixl_peer", role),
            before=["nsenter", f"--net=/run/netns/{host.name}"],
            **child_environment({**between_hosts, **ucx}),
        )

    async def says(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.said.get, timeout=_PATIENCE_S)


async def written(target: Peer) -> int:
    """How many bytes have come."""
    target.tell({})
    return (await target.says())["written"]


@pytest.mark.timeout(300)
async def test_what_a_dead_writer_has_posted_comes_soon_or_never() -> None:
    """With UCX's default it comes after the blocks were released."""
    if why := unavailable():
        lacking(why)
    ucx = {**_KERNEL, "UCX_TCP_USER_TIMEOUT": _USER_TIMEOUT}
    with (
        hosts(2) as (here, there),
        Peer(there, "target", ucx) as target,
        Peer(here, "writer", ucx) as writer,
    ):
        writer.tell(await target.says())
        assert (await writer.says())["address"]
        assert await writer.says() == {"failed": ""}
        assert await writer.says() == {"connected": True}
        assert await written(target) == 1
        here.link(up=False)
        writer.tell({"size": SIZE})
        await eventually(lambda: here.undelivered(there) > _WHOLE, _PATIENCE_S)
        writer.kill()
        ended = time.monotonic()
        await eventually(lambda: not here.undelivered(there), LEASE_TTL_S)
        await asyncio.sleep(ended + LEASE_TTL_S - time.monotonic())
        here.link(up=True)
        await asyncio.sleep(_AT_ONCE_S)
        assert await written(target) == 1


@pytest.mark.timeout(120)
async def test_no_engine_waits_for_a_connection() -> None:
    """By UCX's default it does, until the kernel gives the connection up."""
    if why := unavailable():
        lacking(why)
    ucx = {"UCX_TCP_USER_TIMEOUT": _USER_TIMEOUT}
    with (
        hosts(2) as (here, there),
        Peer(there, "target", ucx) as target,
        Peer(here, "writer", ucx) as writer,
    ):
        metadata = await target.says()
        assert (await writer.says())["address"]
        here.cut(there)
        writer.tell(metadata)
        assert await writer.says() == {"failed": ""}
        await asyncio.sleep(_AT_ONCE_S)
        assert writer.said.empty(), "it is not connected"
        here.heal(there)
        assert await writer.says() == {"connected": True}
        assert await written(target) == 1
