"""Whether a process may work where it was started: its rights at NATS and etcd, its queue, and the
live members of its namespace.

Each process asks as soon as it is connected. Otherwise it would find out after it has loaded a
model, or only log it.
"""

import contextlib

from dynamo_lite.disagg.queue.base import QueueOptions
from dynamo_lite.disagg.queue.topology import check_queue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_all, decode_json
from dynamo_lite.protocol.errors import DynamoLiteError, StartupError
from dynamo_lite.protocol.permissions import Permissions, all_permissions, inbox_of
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.versions import misfit
from dynamo_lite.runtime.address import parse_nats_url, redact
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.runtime.store import Store


async def check_access(spec: ProcessSpec, store: Store, messaging: Messaging) -> None:
    """Raises StartupError when this process cannot work with these servers or members. What is
    wrong for a moment only shows when it goes on."""
    # A service that we do not know has users of its own.
    needs = all_permissions(spec.namespace).get(spec.component, Permissions(spec.component))
    if spec.nats_url and isinstance(messaging, NatsMessaging):
        await _check_nats(spec, messaging, needs)
    await _check_etcd(spec, store, needs)


async def _check_nats(spec: ProcessSpec, messaging: NatsMessaging, needs: Permissions) -> None:
    where, own = f"NATS at {redact(spec.nats_url)}", spec.component
    if not (messaging.asks_who or parse_nats_url(spec.nats_url).on_loopback):
        users = "give it users, `dynamo-lite access nats` prints them"
        raise StartupError(f"{where} lets in everybody: {users}")
    why = ""
    with contextlib.suppress(DynamoLiteError):
        why = await messaging.refusal(needs.subscribe) if needs.subscribe else ""
    if why:
        login = f"?login=FILE&inbox={inbox_of(f'{spec.namespace}-{own}')}"
        raise StartupError(f"{where}: {why}; give the login of {own}: {login}")
    if (queue := spec.config.get("queue")) is not None:
        await check_queue(messaging, spec.namespace, QueueOptions(**queue))


async def _check_etcd(spec: ProcessSpec, store: Store, needs: Permissions) -> None:
    for prefix in needs.read:
        try:
            await store.get_prefix(prefix)
        except DynamoLiteError as exc:
            if "permission denied" in str(exc):
                login = f"give the login of {spec.component}: ?login=FILE"
                raise StartupError(f"{exc} for {prefix}; {login}") from exc
    entries: dict[str, bytes] = {}
    with contextlib.suppress(DynamoLiteError):
        entries = await store.get_prefix(names.components_prefix(spec.namespace))
    members = decode_all(entries, lambda value: decode_json(value, EndpointRecord))
    if why := next(filter(None, map(misfit, members)), ""):
        raise StartupError(f"cannot join namespace {spec.namespace}: {why}")
