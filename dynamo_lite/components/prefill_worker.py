"""The prefill worker: pulls jobs, computes them, writes the KV where it is wanted.

A job is acknowledged when it is over: written, refused at its claim, expired,
or handed back to the decode engine as failed. A worker that dies leaves it
unacknowledged, and the queue delivers it again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter, Gauge

from dynamo_lite.components.config import PrefillWorkerConfig
from dynamo_lite.components.engine_files import engine_file, new_engine_id
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    IncompatiblePeer,
    NoResponders,
    ProtocolError,
    Unavailable,
)
from dynamo_lite.protocol.prefill import (
    Claim,
    ClaimRefused,
    RemotePrefillRequest,
    WriterDone,
    WriterStays,
    decode_cancel_attempt,
    decode_claim_reply,
    decode_job,
)
from dynamo_lite.queue.base import Job, PrefillQueue, QueueConfig
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.fence import FenceHolder
from dynamo_lite.runtime.host import Host, ProcessSpec
from dynamo_lite.runtime.roster import Roster
from dynamo_lite.runtime.store import LeaseLoss
from dynamo_lite.transfer.directory import MetadataDirectory

if TYPE_CHECKING:
    from dynamo_lite.engine.vllm.core import VllmEngine
    from dynamo_lite.protocol.records import EngineMetadata

logger = logging.getLogger(__name__)

_PULL_S = 2.0
_CLAIM_S = 2.0
_RETRY_DELAY_S = 0.5
_BROKER_PAUSE_S = 0.2
_PROMISE_S = 3.0
#: Whose blocks are written.
_DECODE_COMPONENT = "VllmWorker"


class PrefillWorker:
    """Component. config: the fields of `PrefillWorkerConfig`."""

    def __init__(self, config: Mapping[str, Any] | PrefillWorkerConfig, spec: ProcessSpec):
        self._config = msgspec.convert(config, PrefillWorkerConfig)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._engine: VllmEngine | None = None
        self._queue: PrefillQueue | None = None
        self._directory: MetadataDirectory | None = None
        self._host: Host | None = None
        self._jobs: Counter | None = None
        self._working: dict[str, RemotePrefillRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._pulling = True
        self._leaving = asyncio.Event()

    async def start(self, host: Host) -> dict[str, Any]:
        await asyncio.to_thread(__import__, "dynamo_lite.engine.vllm.core")
        self._host = host
        self._jobs = Counter(
            "dynamo_lite_prefill_jobs",
            "Prefill jobs pulled, by how they ended",
            ["outcome"],
            registry=host.registry,
        )
        enter = self._stack.enter_async_context
        fence = FenceHolder(engine_file(self._spec, "fence"))
        self._stack.callback(fence.close)
        host.spawn(self._keep_fence(host, fence), "lease-fence")
        host.progress("loading the model")
        self._engine = engine = await enter(self._open_engine(host, fence))
        host.spawn(engine.run_prefills(), "engine-steps")
        queue = self._config.queue
        self._queue = await enter(
            JetStreamQueue(
                self._spec.nats_url,
                stream=names.prefill_stream(self._spec.namespace),
                subject=names.prefill_jobs_subject(self._spec.namespace),
                config=QueueConfig(
                    max_depth=queue.max_jobs,
                    ack_wait_s=queue.ack_wait_s,
                    max_deliver=queue.max_deliver,
                ),
            )
        )
        self._directory = directory = MetadataDirectory(host.store, self._spec.namespace)
        prefix = names.endpoint_prefix(self._spec.namespace, _DECODE_COMPONENT, "generate")
        decoders = await enter(Roster(host.store, prefix))
        decoders.on_change(partial(_forget_left, directory))
        cancel = names.cancel_subject(self._spec.namespace, host.lease.id)
        await enter(host.messaging.serve(cancel, self._on_cancel))
        await host.register("prefill", model=engine.config.model_config.model)
        for index in range(self._config.concurrency):
            host.spawn(self._work(), f"prefill-jobs-{index}")
        host.spawn(self._watch_queue(host), "queue-depth")
        return {"model": engine.config.model_config.model}

    async def drain(self, grace_s: float) -> None:
        """Stops pulling; what was pulled is finished, its writes too."""
        self._pulling = False
        self._leaving.set()
        if self._queue is not None:
            await self._queue.stop_pulling()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> dict[str, Any]:
        return {"ok": self._engine is not None, "jobs": len(self._working)}

    def _open_engine(self, host: Host, fence: FenceHolder) -> "VllmEngine":
        from dynamo_lite.engine.vllm.core import VllmEngine
        from dynamo_lite.engine.vllm.link import EngineLink, PrefillLink

        return VllmEngine(
            self._spec.engine_args,
            link=EngineLink(
                namespace=self._spec.namespace,
                engine_id=new_engine_id(),
                lease_id=host.lease.id,
                lease_ttl_s=self._spec.lease_ttl_s,
                nats_url=self._spec.nats_url,
                etcd_url=self._spec.etcd_url,
                role=PrefillLink(fence_path=str(fence.path)),
            ),
            link_path=engine_file(self._spec, "engine.json"),
            messaging=host.messaging,
            registry=host.registry,
        )

    async def _keep_fence(self, host: Host, fence: FenceHolder) -> None:
        """The engine writes only while the lease certainly lives, or as long as promised.

        A worker that was asked to leave finishes what it has claimed. Its keys no
        longer vouch for it, so it promises that to each decode engine, a few
        seconds at a time, and never writes past the promise.
        """
        while host.lease.loss is None and self._pulling:
            fence.extend(host.lease.remaining_s())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), host.lease.ttl_s / 10)
        while host.lease.loss is not LeaseLoss.EXPIRED:
            asked_at = time.monotonic()
            if all([await self._promise(host, request) for request in self._requests()]):
                fence.extend(asked_at + _PROMISE_S - time.monotonic())
            await asyncio.sleep(_PROMISE_S / 6)
        fence.extend(0.0)

    def _requests(self) -> list[RemotePrefillRequest]:
        return list(self._working.values())

    async def _promise(self, host: Host, request: RemotePrefillRequest) -> bool:
        """Whether the decode engine has heard it, or is not there to be protected."""
        stays = WriterStays(
            attempt=request.attempt, writer_lease_id=host.lease.id, for_s=_PROMISE_S
        )
        subject = names.writer_stays_subject(self._spec.namespace, request.engine_id)
        try:
            await host.messaging.request(subject, encode(stays), timeout_s=_PROMISE_S / 6)
        except NoResponders:
            return True
        except (Unavailable, DeadlineExceeded) as exc:
            logger.warning("attempt %s: promise to stay not heard: %s", request.attempt, exc)
            return False
        return True

    async def _watch_queue(self, host: Host) -> None:
        gauge = Gauge(
            "dynamo_lite_prefill_queue_depth",
            "Jobs on the prefill queue, waiting and in flight",
            registry=host.registry,
        )
        while True:
            try:
                assert self._queue is not None
                gauge.set((await self._queue.depth()).total)
            except DynamoLiteError:
                gauge.set(float("nan"))
            await asyncio.sleep(_PULL_S)

    async def _work(self) -> None:
        assert self._queue is not None
        while self._pulling:
            try:
                job = await self._queue.pull(timeout_s=_PULL_S)
            except Unavailable as exc:
                logger.debug("no job pulled: %s", exc)
                await asyncio.sleep(_BROKER_PAUSE_S)
                continue
            if job is not None:
                await self._do(job)

    async def _do(self, job: Job) -> None:
        """One delivery, from the pull to its one answer."""
        assert self._jobs is not None
        try:
            request = decode_job(job.payload)
            if request.wire_version > WIRE_VERSION:
                raise ProtocolError(f"job of wire version {request.wire_version}")
        except ProtocolError as exc:
            logger.warning("job %d dropped: %s", job.sequence, exc)
            self._jobs.labels("malformed").inc()
            await _answer(job.term())
            return
        if request.attempt in self._working:
            # Delivered again while it is being worked on: extending it failed for long.
            await _answer(job.nak(delay_s=self._config.queue.ack_wait_s))
            return
        self._working[request.attempt] = request
        self._idle.clear()
        keeper = asyncio.create_task(self._extend(job), name=f"extend-{job.sequence}")
        try:
            outcome = await self._prefill(request)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            del self._working[request.attempt]
            if not self._working:
                self._idle.set()
        self._jobs.labels(outcome).inc()
        await _answer(job.nak(delay_s=_RETRY_DELAY_S) if outcome == "retry" else job.ack())

    async def _extend(self, job: Job) -> None:
        while True:
            await asyncio.sleep(self._config.queue.ack_wait_s / 3)
            await _answer(job.extend())

    async def _prefill(self, request: RemotePrefillRequest) -> str:
        """Claims, computes, writes. Returns the outcome that the counter shows."""
        assert self._engine is not None and self._directory is not None
        if time.time() >= request.deadline:
            return "expired"
        try:
            target = await self._directory.get(request.engine_id)
            if target is None:
                return "engine_gone"
            refusal = await self._claim(request)
        except NoResponders:
            return "engine_gone"
        except (Unavailable, DeadlineExceeded) as exc:
            logger.warning("attempt %s not claimed: %s", request.attempt, exc)
            return "retry"
        except ProtocolError as exc:
            logger.warning("engine %s: %s", request.engine_id, exc)
            return "malformed"
        if refusal is not None:
            logger.info("attempt %s refused: %s", request.attempt, refusal)
            return "refused"
        return await self._compute(request, target)

    async def _claim(self, request: RemotePrefillRequest) -> str | None:
        assert self._host is not None
        reply = await self._host.messaging.request(
            names.claim_subject(self._spec.namespace, request.engine_id),
            encode(Claim(attempt=request.attempt, writer_lease_id=self._host.lease.id)),
            timeout_s=_CLAIM_S,
        )
        answer = decode_claim_reply(reply)
        return answer.reason if isinstance(answer, ClaimRefused) else None

    async def _compute(self, request: RemotePrefillRequest, target: "EngineMetadata") -> str:
        from dynamo_lite.engine.vllm.fingerprint import check_peer

        assert self._engine is not None and self._engine.metadata is not None
        try:
            check_peer(self._engine.metadata, target)
            ended = await self._engine.prefill(request, target)
            outcome, detail = ended.outcome, ended.detail
        except IncompatiblePeer as exc:
            outcome, detail = "failed", str(exc)
        if outcome != "written":
            logger.warning("attempt %s %s: %s", request.attempt, outcome, detail)
        await self._say_done(request, outcome, detail)
        return outcome

    async def _say_done(self, request: RemotePrefillRequest, outcome: str, detail: str) -> None:
        """From here on no write of this attempt comes from this worker."""
        assert self._host is not None
        done = msgspec.convert(
            {"attempt": request.attempt, "outcome": outcome, "detail": detail}, WriterDone
        )
        subject = names.writer_done_subject(self._spec.namespace, request.engine_id)
        try:
            await self._host.messaging.publish(subject, encode(done))
        except Unavailable as exc:
            # The decode engine keeps the blocks back until its deadline or our lease ends.
            logger.warning("end of attempt %s not told: %s", request.attempt, exc)

    async def _on_cancel(self, payload: bytes) -> None:
        attempt = decode_cancel_attempt(payload).attempt
        if attempt in self._working and self._engine is not None:
            await self._engine.abandon(attempt)


def _forget_left(
    directory: MetadataDirectory, _joined: frozenset[int], left: frozenset[int]
) -> None:
    directory.forget_leases(left)


async def _answer(answer: Any) -> None:
    """An answer that cannot be given is the same as a dead worker's: redelivery."""
    try:
        await answer
    except DynamoLiteError as exc:
        logger.warning("job not answered: %s", exc)
