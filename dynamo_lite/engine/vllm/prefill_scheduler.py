"""The scheduler half of a prefill engine.

Each remote prefill runs as an ordinary one-token request. After every step it
names the blocks that became complete, so that the worker halves write them
while the next chunk is computed; a request's blocks stay reserved until no
write reads from them any more. All methods run on the engine's thread.
"""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_lite.engine.vllm.bridge import Bridge
from dynamo_lite.engine.vllm.link import EngineLink
from dynamo_lite.engine.vllm.messages import BlockWrite, PrefillStep, WorkerReport
from dynamo_lite.engine.vllm.stats import ENDED, ConnectorStats
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import EngineStatus
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.nats import NatsMessaging

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class _Job:
    """One attempt in this engine.

    first: prompt block that remote_ids[0] stands for. scheduled: monotonic time.
    """

    attempt: str
    request: "Request"
    target_engine: str
    target: bytes
    remote_ids: list[int]
    first: int
    written: int
    scheduled: float
    announced: bool = False
    complete: bool = False


class PrefillScheduler:
    """block_size: in tokens."""

    def __init__(self, link: EngineLink, block_size: int):
        self._link, self._block_size = link, block_size
        self.bridge = Bridge(self._session)
        self.stats = ConnectorStats()
        self.metadata: EngineMetadata | None = None
        self._manager: KVCacheManager | None = None
        self._pool: BlockPool | None = None
        self._jobs: dict[str, _Job] = {}
        self._ending: dict[str, _Job] = {}
        self._failures: dict[str, str] = {}
        self._ended: list[tuple[str, str, bool]] = []
        self._forget: list[str] = []

    def bind_kv_cache_manager(self, manager: "KVCacheManager") -> None:
        self._manager, self._pool = manager, manager.block_pool

    def state_after_alloc(self, request: "Request") -> None:
        params = request.kv_transfer_params
        if not params or request.request_id in self._jobs:
            return
        now = time.monotonic()
        if request.events:  # the first is its arrival; there are none without vLLM's statistics
            self.stats.add_stage("wait", now - request.events[0].timestamp)
        self._forget += params["forget"]
        first = params["num_computed_tokens"] // self._block_size
        self._jobs[request.request_id] = _Job(
            attempt=params["attempt"],
            request=request,
            target_engine=params["engine_id"],
            target=params["target"],
            remote_ids=params["block_ids"],
            first=first,
            written=first,
            scheduled=now,
        )

    def build_step(self, output: "SchedulerOutput") -> PrefillStep:
        step = PrefillStep(ended=self._ended, forget=self._forget)
        self._ended, self._forget = [], []
        for request_id in output.preempted_req_ids or ():
            if (job := self._jobs.get(request_id)) is not None:
                job.written = job.first
                step.preempted.append(job.attempt)
        for request_id, tokens in output.num_scheduled_tokens.items():
            if (job := self._jobs.get(request_id)) is not None and not job.complete:
                self._add_write(step, job, job.request.num_computed_tokens + tokens)
        return step

    def request_finished(self, request: "Request") -> bool:
        """Returns whether the blocks must stay until the writes have ended."""
        request_id, params = request.request_id, request.kv_transfer_params
        job = self._jobs.pop(request_id, None)
        if job is None:
            if params:  # stopped before it was ever scheduled
                self.stats.append(ENDED, [params["attempt"], "abandoned", ""])
            return False
        if not job.announced:
            self._tell(job, "abandoned")
            return False
        self._ending[request_id] = job
        self._ended.append((job.attempt, request_id, job.complete))
        return True

    def worker_output(self, output: "KVConnectorOutput") -> None:
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._failures.update(report.failures)
        for request_id in output.finished_sending or ():
            job = self._ending.pop(request_id)
            failure = self._failures.pop(job.attempt, None)
            if failure is not None:
                self._tell(job, "failed", failure)
            else:
                self._tell(job, "written" if job.complete else "abandoned")

    @property
    def busy(self) -> bool:
        return bool(self._ending)

    def _add_write(self, step: PrefillStep, job: _Job, done_tokens: int) -> None:
        total = job.request.num_prompt_tokens
        last = done_tokens >= total
        end = -(-total // self._block_size) if last else done_tokens // self._block_size
        if end <= job.written and not last:
            return
        assert self._manager is not None
        own = self._manager.get_block_ids(job.request.request_id)[0]
        if not job.announced:
            job.announced = True
            step.targets[job.target_engine] = job.target
        step.writes.append(
            BlockWrite(
                attempt=job.attempt,
                request_id=job.request.request_id,
                target_engine=job.target_engine,
                local_ids=own[job.written : end],
                remote_ids=job.remote_ids[job.written - job.first : end - job.first],
                last=last,
                num_blocks=len(job.remote_ids),
                scheduled=job.scheduled,
            )
        )
        job.written, job.complete = end, last

    def _tell(self, job: _Job, outcome: str, detail: str = "") -> None:
        self.stats.append(ENDED, [job.attempt, outcome, detail])

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        subject = names.describe_subject(self._link.namespace, self._link.engine_id)
        async with NatsMessaging(self._link.nats_url) as messaging:
            async with messaging.serve(subject, self._on_describe):
                yield

    async def _on_describe(self, _payload: bytes) -> bytes | None:
        if self.metadata is None or self._pool is None:
            return None
        return encode(
            EngineStatus(
                metadata=self.metadata,
                free_blocks=self._pool.get_num_free_blocks(),
                total_blocks=self._pool.num_gpu_blocks,
            )
        )
