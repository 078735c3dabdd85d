"""Remote prefills, and the queue of those that no prefill worker has taken."""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.capacity.phase import Sequence
from dynamo_lite.protocol.decisions import QueueSeen

if TYPE_CHECKING:
    from benchmarks.capacity.decode import DecodeWorkerModel
    from benchmarks.capacity.prefill import PrefillWorkerModel


@dataclass(eq=False, slots=True)
class Job:
    """One remote prefill."""

    sequence: Sequence
    decode: "DecodeWorkerModel"
    #: To be computed.
    tokens: int
    claimed_at: float | None = None
    #: Delivered or withdrawn.
    ended: bool = False


class JobQueue:
    """Jobs go in order of arrival; the slot that has waited longest gets the next one. Decode
    workers know its state at once."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        #: One entry for each slot that waits for a job.
        self._free: deque[PrefillWorkerModel] = deque()
        #: Prefill workers that take jobs.
        self.workers = 0
        #: Of the jobs that have not ended.
        self.jobs = self.tokens = 0

    def seen(self) -> QueueSeen:
        return QueueSeen(jobs=self.jobs, prefill_workers=self.workers, age_s=0.0)

    def add(self, job: Job) -> None:
        """A decode worker has decided for a remote prefill; `push` follows."""
        self.jobs += 1
        self.tokens += job.tokens

    def push(self, job: Job) -> None:
        if job.ended:
            return
        self._waiting.append(job)
        while self._free and self._free[0].leaving:
            self._free.popleft()
        if self._free:
            self.pull(self._free.popleft())

    def pull(self, worker: "PrefillWorkerModel") -> None:
        """A slot of the worker gets a job, or waits for one."""
        if worker.leaving:
            return
        while self._waiting:
            if not (job := self._waiting.popleft()).ended:
                worker.take(job)
                return
        self._free.append(worker)

    def end(self, job: Job) -> None:
        job.ended = True
        self.jobs -= 1
        self.tokens -= job.tokens
