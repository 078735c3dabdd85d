"""The KV-aware router as a process of its own: one for all Frontends."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.routing import (
    Chosen,
    NobodyKnown,
    decode_fates,
    decode_pick_request,
)
from dynamo_lite.routing.kv_follower import KvFollower
from dynamo_lite.routing.kv_routing import KvPicker
from dynamo_lite.runtime.drops import counted
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.config import RouterConfig
from dynamo_lite.serve.services.metrics import RouterMetrics

#: Most requests that are remembered because they were released before their `PickRequest` came.
_MAX_EARLY = 1024
#: Different blocks that are remembered, at about 80 bytes each.
_MAX_INDEX_BLOCKS = 2_000_000


async def open_kv_picker(host: Host, workers: Roster, options: KvRoutingOptions) -> KvPicker:
    """The picker with its inputs. It follows the workers until the host's stack is closed."""
    follower = await host.stack.enter_async_context(
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
    follower.on_load(picker.loads.reported)

    def on_workers(joined: frozenset[int], left: frozenset[int]) -> None:
        for lease_id in left:
            picker.loads.left(lease_id)

    host.stack.enter_context(workers.on_change(on_workers))
    host.registry.register(RouterMetrics(picker))
    return picker


class Router:
    def __init__(self, config: Mapping[str, Any] | RouterConfig):
        self._config = msgspec.convert(config, RouterConfig)
        self._early: OrderedDict[str, None] = OrderedDict()

    async def start(self, host: Host) -> dict[str, Any]:
        """Registered last: Frontends may ask as soon as they see it."""
        namespace, enter = host.spec.namespace, host.stack.enter_async_context
        prefix = names.endpoint_prefix(namespace, host.spec.watch_component, "generate")
        self._workers = await enter(Roster(host.store, prefix, host.drops))
        config = self._config
        self._picker = picker = await open_kv_picker(host, self._workers, config.kv_router)

        def apply(values: Values) -> None:
            picker.options = applied(values, config.kv_router, "kv_router")

        await enter(host.live_options(config, apply))
        frontends = await enter(
            Roster(host.store, names.endpoint_prefix(namespace, "Frontend", "http"), host.drops)
        )
        frontends.on_change(self._on_frontends)
        pick = names.endpoint_subject(namespace, host.spec.component, "pick", host.lease.id)
        fates = names.fates_subject(namespace, host.lease.id)
        await enter(host.messaging.serve(pick, counted(self._on_pick, "pick", host.drops)))
        await enter(host.messaging.serve(fates, counted(self._on_fates, "fates", host.drops)))
        await host.register("pick")
        return {}

    async def drain(self, grace_s: float) -> None:
        """No request waits here."""

    def health(self) -> dict[str, Any]:
        return {
            "ok": True,
            "workers": len(self._workers.members),
            "requests": len(self._picker.loads.requests),
        }

    async def _on_pick(self, payload: bytes) -> bytes:
        asked = decode_pick_request(payload)
        members = self._workers.members
        without = self._workers.lease_ids - set(asked.candidates)
        if len(without) == len(members):
            return encode(NobodyKnown())
        request = GenerateRequest(
            request_id=_own_id(asked.client, asked.request_id),
            prompt_token_ids=asked.prompt_token_ids,
            sampling=b"",
            arrival_time=0.0,
            cache_salt=asked.cache_salt,
            adapter=asked.adapter,
            inputs=b"" if asked.media else None,
            session=asked.session,
        )
        picked = self._picker.pick(members, request, without)
        if request.request_id in self._early:
            del self._early[request.request_id]
            self._picker.released(request.request_id)
        return encode(Chosen(lease_id=picked.member.lease_id, reason=picked.reason))

    async def _on_fates(self, payload: bytes) -> None:
        fates = decode_fates(payload)
        for request_id in fates.answered:
            self._picker.answered(_own_id(fates.client, request_id))
        for request_id in fates.released:
            own = _own_id(fates.client, request_id)
            if own in self._picker.loads.requests:
                self._picker.released(own)
            else:
                self._release_early(own)

    def _release_early(self, own_id: str) -> None:
        """The request's own `PickRequest` may still be in flight. Its client is gone by then."""
        self._early[own_id] = None
        if len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)

    def _on_frontends(self, joined: frozenset[int], left: frozenset[int]) -> None:
        """A Frontend that is gone reports no outcomes any more."""
        loads, clients = self._picker.loads, tuple(_own_id(client, "") for client in left)
        for request_id in [name for name in loads.requests if name.startswith(clients)]:
            loads.released(request_id)


def _own_id(client: int, request_id: str) -> str:
    """Two Frontends may use the same id."""
    return f"{client:x}/{request_id}"
