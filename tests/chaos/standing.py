"""How things stand: blocks, jobs, members."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import httpx

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.chaos.cluster import DECODE, PREFILL, Cluster
from tests.vllm.graph import NAMESPACE, decode_engines, samples

_POLL_S = 0.25
_ASK_S = 3.0


@dataclass(frozen=True)
class Standing:
    """engines: the decode engines that answer. silent: engines that are known to
    the store and do not. writers: free and all blocks of prefill workers' engines.
    jobs: left on the queue, None where there is no telling."""

    engines: dict[str, EngineStatus] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    writers: dict[str, tuple[int, int]] = field(default_factory=dict)
    jobs: int | None = None

    @property
    def quarantined(self) -> int:
        return sum(engine.quarantined for engine in self.engines.values())

    @property
    def waiting(self) -> int:
        return sum(engine.waiting for engine in self.engines.values())

    @property
    def free(self) -> dict[str, tuple[int, int]]:
        """Free and all blocks by engine."""
        readers = {key: (e.free_blocks, e.total_blocks) for key, e in self.engines.items()}
        return readers | self.writers

    def trouble(self, engines: int, free_blocks: int | None) -> str:
        """What is not at rest, or "". free_blocks: of each engine at rest."""
        if len(self.engines) != engines or self.silent:
            return f"{len(self.engines)} of {engines} engines answer, {len(self.silent)} do not"
        if self.quarantined or self.waiting or self.jobs:
            return f"{self.quarantined} quarantined, {self.waiting} waiting, {self.jobs} jobs"
        missing = {k: free for k, (free, _) in self.free.items() if free_blocks not in (None, free)}
        if missing:
            return f"blocks free: {missing}, at rest: {free_blocks}"
        return "" if self.jobs == 0 else "the queue cannot be seen"


async def look(cluster: Cluster) -> Standing:
    """Raises DynamoLiteError when broker or store do not answer."""
    async with (
        EtcdStore(cluster.etcd.url, connect_timeout_s=_ASK_S) as store,
        NatsMessaging(cluster.nats.url) as messaging,
    ):
        found = await decode_engines(store, messaging)
        jobs = await _jobs(messaging)
    engines = {key: status for key, status in found.items() if status is not None}
    return Standing(engines, tuple(found.keys() - engines), await _writers(cluster), jobs)


async def _writers(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Free and total blocks of each prefill worker, as its engine has reported them within the
    last second."""
    found: dict[str, tuple[int, int]] = {}
    for member in cluster.ready(PREFILL):
        with contextlib.suppress(httpx.HTTPError):
            said = await asyncio.to_thread(samples, member.state.status_url)
            values = {name: int(value) for name, _, value in said if "kv_blocks_" in name}
            found[member.name] = (
                values.get("dynamo_lite_kv_blocks_free", 0),
                values.get("dynamo_lite_kv_blocks_total", 0),
            )
    return found


async def _jobs(messaging: NatsMessaging) -> int | None:
    try:
        stream = messaging.client.jetstream(timeout=_ASK_S)
        return (await stream.stream_info(names.prefill_stream(NAMESPACE))).state.messages
    except Exception:
        # nats-py's errors have no common ancestor; any of them means: cannot be seen.
        return None


_REST_S = 120.0


async def at_rest(cluster: Cluster, free_blocks: int | None = None) -> tuple[Standing, str]:
    """Waits until all members are ready and nothing is in flight. Returns what is not at rest
    after that, or ""."""
    deadline = time.monotonic() + _REST_S
    standing, trouble = Standing(), "not looked at yet"
    while True:
        late = [m.name for m in cluster.members() if not m.ready]
        if late:
            trouble = f"not ready: {', '.join(late)}"
        else:
            try:
                standing = await look(cluster)
                trouble = standing.trouble(len(cluster.members(DECODE)), free_blocks)
            except DynamoLiteError as exc:
                trouble = f"{type(exc).__name__}: {exc}"
        if not trouble or time.monotonic() > deadline:
            return standing, trouble
        await asyncio.sleep(_POLL_S)
