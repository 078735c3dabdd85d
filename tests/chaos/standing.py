"""Whether a cluster is at rest: its members, jobs and blocks."""

import asyncio
import contextlib
import time

import httpx

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.chaos.cluster import DECODE, PREFILL, Cluster
from tests.vllm.graph import NAMESPACE, decode_engines, sample_sum

_POLL_S = 0.25
_ASK_S = 3.0
_REST_S = 120.0


async def at_rest(cluster: Cluster, free_blocks: int | None = None) -> tuple[dict[str, int], str]:
    """Waits until all members are ready and nothing is in flight. Returns the free blocks of each
    engine, and what is not at rest after that, or "". free_blocks: of each engine at rest."""
    deadline = time.monotonic() + _REST_S
    while True:
        free: dict[str, int] = {}
        late = [m.name for m in cluster.members() if not m.ready]
        trouble = f"not ready: {', '.join(late)}" if late else ""
        if not late:
            try:
                free, trouble = await _look(cluster, free_blocks)
            except DynamoLiteError as exc:
                trouble = f"{type(exc).__name__}: {exc}"
        if not trouble or time.monotonic() > deadline:
            return free, trouble
        await asyncio.sleep(_POLL_S)


async def _look(cluster: Cluster, free_blocks: int | None) -> tuple[dict[str, int], str]:
    """Raises DynamoLiteError when broker or store do not answer."""
    async with (
        EtcdStore(cluster.etcd.url, connect_timeout_s=_ASK_S) as store,
        NatsMessaging(cluster.nats.url) as messaging,
    ):
        found = await decode_engines(store, messaging)
        jobs = await _jobs(messaging)
    engines = {key: status for key, status in found.items() if status is not None}
    free = {key: e.free_blocks for key, e in engines.items()} | await _writers(cluster)
    if found.keys() != engines.keys() or len(engines) != len(cluster.members(DECODE)):
        return free, f"{len(engines)} decode engines answer, of {len(found)} that are known"
    busy = [(e.quarantined, e.waiting) for e in engines.values() if e.quarantined or e.waiting]
    if busy or jobs:
        return free, f"attempts in quarantine and waiting: {busy}; {jobs} jobs"
    if missing := {k: n for k, n in free.items() if free_blocks not in (None, n)}:
        return free, f"blocks free: {missing}, at rest: {free_blocks}"
    return free, "" if jobs == 0 else "the queue cannot be seen"


async def _writers(cluster: Cluster) -> dict[str, int]:
    """Free blocks of each prefill worker, as its engine has reported them within the last
    second."""
    found: dict[str, int] = {}
    for member in cluster.ready(PREFILL):
        with contextlib.suppress(httpx.HTTPError):
            ask = (sample_sum, member.state.status_url, "dynamo_lite_kv_blocks_free")
            found[member.name] = int(await asyncio.to_thread(*ask))
    return found


async def _jobs(messaging: NatsMessaging) -> int | None:
    """Left on the queue; None where there is no telling."""
    try:
        stream = messaging.client.jetstream(timeout=_ASK_S)
        return (await stream.stream_info(names.prefill_stream(NAMESPACE))).state.messages
    except Exception:
        # nats-py's errors have no common ancestor; any of them means: cannot be seen.
        return None
