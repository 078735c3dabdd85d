"""The KV-aware picker with its inputs, for a Frontend or a router."""

from contextlib import AsyncExitStack

from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.routing.kv_follower import KvFollower
from dynamo_lite.routing.kv_routing import KvPicker
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.metrics import RouterMetrics

#: Different blocks that are remembered, at about 80 bytes each.
_MAX_INDEX_BLOCKS = 2_000_000


async def open_kv_picker(
    stack: AsyncExitStack,
    host: Host,
    workers: Roster,
    options: KvRoutingOptions,
) -> KvPicker:
    """Follows the workers until `stack` is closed."""
    follower = await stack.enter_async_context(
        KvFollower(
            host.messaging,
            workers,
            namespace=host.spec.namespace,
            component=host.spec.watch_component,
            max_blocks=_MAX_INDEX_BLOCKS,
            registry=host.registry,
            on_drop=host.drops,
        )
    )
    picker = KvPicker(follower, options)
    follower.on_load(picker.reported)
    host.registry.register(RouterMetrics(picker))
    return picker
