"""How the Frontend chooses a decode worker, as its option `router` says."""

import random
from contextlib import AsyncExitStack

from dynamo_lite.policy.routing.pickers import Picker, Random, RoundRobin
from dynamo_lite.protocol import names
from dynamo_lite.request_plane.placement import WorkerSelector
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.config import FrontendConfig
from dynamo_lite.services.frontend.router_client import RemoteRouter
from dynamo_lite.services.kv_picker import open_kv_picker


async def open_picker(
    stack: AsyncExitStack, host: Host, config: FrontendConfig, namespace: str, roster: Roster
) -> Picker | WorkerSelector:
    """Opens the picker in `stack`. roster: of the decode workers."""
    match config.router:
        case "random":
            return Random(random.Random().randrange)
        case "kv":
            return await open_kv_picker(stack, host, roster, config.kv_router)
        case "component":
            return await _open_remote_router(stack, host, namespace)
        case "round-robin":
            return RoundRobin()


async def _open_remote_router(stack: AsyncExitStack, host: Host, namespace: str) -> RemoteRouter:
    prefix = names.endpoint_prefix(namespace, "Router", "pick")
    routers = await stack.enter_async_context(Roster(host.store, prefix, host.drops))
    return await stack.enter_async_context(
        RemoteRouter(
            host.messaging,
            routers,
            namespace=namespace,
            lease_id=host.lease.id,
            fallback=RoundRobin(),
            registry=host.registry,
            on_drop=host.drops,
        )
    )
