"""The KV-aware picker with its inputs, for a Frontend or a router."""

from contextlib import AsyncExitStack

from dynamo_lite.kv_events.follower import KvFollower
from dynamo_lite.policy.routing.kv_routing import KvPicker
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.config import KvRouterOptions
from dynamo_lite.services.metrics import RouterMetrics


async def open_kv_picker(
    stack: AsyncExitStack,
    host: Host,
    workers: Roster,
    options: KvRouterOptions,
) -> KvPicker:
    """Follows the workers until `stack` is closed."""
    follower = await stack.enter_async_context(
        KvFollower(
            host.messaging,
            workers,
            namespace=host.spec.namespace,
            component=host.spec.watch_component,
            max_blocks=options.max_index_blocks,
            registry=host.registry,
            on_drop=host.drops,
        )
    )
    picker = KvPicker(follower, options, now=host.clock.monotonic)
    follower.on_load(picker.reported)
    host.registry.register(RouterMetrics(picker))
    return picker
