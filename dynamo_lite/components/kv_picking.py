"""The KV-aware picker with all that it needs to know: in a Frontend, or in a router."""

import random
from contextlib import AsyncExitStack

from dynamo_lite.components.config import KvRouterOptions
from dynamo_lite.components.frontend_metrics import RouterMetrics
from dynamo_lite.policy.kv_routing import KvPicker, KvRoutingOptions
from dynamo_lite.runtime.host import Host
from dynamo_lite.runtime.kv import KvFollower
from dynamo_lite.runtime.roster import Roster


async def open_kv_picker(
    stack: AsyncExitStack,
    host: Host,
    workers: Roster,
    options: KvRouterOptions,
    rng: random.Random,
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
    picker = KvPicker(
        follower,
        KvRoutingOptions(
            kv_weight=options.kv_weight,
            load_weight=options.load_weight,
            request_load_tokens=options.request_load_tokens,
            temperature=options.temperature,
            max_kv_usage=options.max_kv_usage,
        ),
        now=host.clock.monotonic,
        uniform=rng.random,
    )
    follower.on_load(picker.reported)
    host.registry.register(RouterMetrics(picker))
    return picker
