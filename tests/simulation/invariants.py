"""The invariants of a run, and when each is checked. `client.py` has those of requests.

A write lands only in blocks of its attempt. A read reads only blocks that are kept for its
attempt. Neither comes before the attempt was claimed. Every block is freed. Every job is delivered
once and ends, and its decode engine gets a report. No prefill worker holds more jobs than it may.
No process relies on a lease that etcd has ended. No task outlives its owner.
"""

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

from dynamo_lite.disagg.attempts.ledger import CLAIM_S, Outcome
from dynamo_lite.disagg.engine_config import DecodeEngineConfig
from dynamo_lite.disagg.metrics import MISMATCH
from dynamo_lite.disagg.queue.base import Job
from dynamo_lite.protocol.prefill import (
    ClaimRefused,
    decode_claim,
    decode_claim_reply,
    decode_done,
    decode_job,
)
from dynamo_lite.serve.services.config import PrefillWorkerConfig
from tests.simulation.client import CancelWatch, RequestJudge
from tests.simulation.engine.assembly import SimEngineProcess
from tests.simulation.engine.halves import DecodeHalves, PrefillHalves
from tests.simulation.engine.model import SimRequest
from tests.simulation.engine.mover import Landing, SimMover
from tests.simulation.loop.loop import START_S, VirtualLoop
from tests.simulation.scenario import FaultKind, Scenario

#: How long a cancel may take to a prefill worker in a run without faults: until the next renewal of
#: its claim. The step under way in the decode engine is not counted.
_CANCEL_S = CLAIM_S / 3 + 0.2
#: Jobs that a prefill worker may hold at a time.
_MOST_JOBS = PrefillWorkerConfig().most_jobs
#: Violations beyond these are only counted.
_MOST_TOLD = 20


class Judge:
    """Checks the invariants of one run, and collects the violations."""

    def __init__(self, loop: VirtualLoop, scenario: Scenario):
        self._loop, self._faultless = loop, not scenario.faults
        #: Whether the network may repeat messages.
        self._repeats = any(fault.kind is FaultKind.WEATHER for fault in scenario.faults)
        self.violations: list[str] = []
        #: Events by name; they show whether a run reached the states to be tested.
        self.counts: Counter[str] = Counter()
        self._engines: dict[SimMover, SimEngineProcess] = {}
        self._pulled: set[str] = set()
        self._told: set[SimRequest] = set()
        self._ends_told: set[str] = set()
        self.requests = RequestJudge(
            self.now, self.violate, self.counts, scenario.only_broker_fails
        )
        self.cancels = CancelWatch(self.now, self.requests.cancelled_at, self.counts)

    def now(self) -> float:
        """Virtual time."""
        return self._loop.time()

    def violate(self, text: str) -> None:
        self.counts["violations"] += 1
        if len(self.violations) < _MOST_TOLD:
            self.violations.append(f"{self.now() - START_S:.3f} s: {text}")
        self._loop.trace.add(f"VIOLATION {text}")

    def engine_started(self, engine: SimEngineProcess) -> None:
        self._engines[engine.mover] = engine
        engine.on_step = lambda scheduled_at: self.stepped(engine, scheduled_at)
        engine.on_abort = lambda ids: self.cancels.aborting(engine, ids)
        engine.on_late_write = lambda: self.counts.update(["engines ended by a late write"])

    def engine_died(self, engine: SimEngineProcess) -> None:
        """Its memory is gone: writes to it and its blocks are not checked any more."""
        self._engines.pop(engine.mover, None)
        self.cancels.died(engine)

    def engines(self) -> list[SimEngineProcess]:
        """Those that live."""
        return list(self._engines.values())

    def landing(self, landing: Landing) -> None:
        """Before a copy lands: each of its blocks must be its attempt's."""
        engine = self._engines.get(landing.target)
        if engine is None:
            return
        self.counts["writes landed"] += 1
        for block in _blocks(engine, landing):
            owned = _ownership(engine, landing.attempt, block)
            if owned is None:
                self.violate(
                    f"a write of {landing.sender} for attempt {landing.attempt} landed in block"
                    f" {block} of {landing.target.address}, which is not the attempt's"
                )
                return
            self.counts[f"writes landed {owned}"] += 1

    def reading(self, reader: SimMover, landing: Landing) -> None:
        """While a copy is read: a reader whose claim holds reads only blocks that are kept for
        its attempt."""
        engine, own = self._engines.get(landing.target), self._engines.get(reader)
        if engine is None or own is None or not own.holds(landing.attempt):
            return
        self.counts["reads landed"] += 1
        for block in _blocks(engine, landing):
            if _ownership(engine, landing.attempt, block, read=True) is None:
                self.violate(
                    f"{landing.sender} read block {block} of {landing.target.address}, which is not"
                    f" kept for attempt {landing.attempt}"
                )
                return

    def stepped(self, engine: SimEngineProcess, scheduled_at: float) -> None:
        """After a step: no request waits for remote KV beyond its timeout."""
        role = engine.setup.engine_config.role
        if not isinstance(role, DecodeEngineConfig):
            return
        for request in engine.scheduler.waiting_for_kv():
            over_s = scheduled_at - request.parked_at - role.options.remote_prefill_timeout_s
            if over_s > 0 and request not in self._told:
                self._told.add(request)
                self.violate(
                    f"{engine.setup.address}: {request.request_id} still waits for remote KV,"
                    f" {over_s:.3f} s after its deadline"
                )

    # Leases

    def lease_expired(self, owner: str, lease_id: int, deadline: float) -> None:
        """etcd ends an expired lease. deadline: until when its owner relies on it."""
        self.counts["leases expired"] += 1
        if deadline > self.now():
            self.violate(
                f"etcd has given up lease {lease_id:x}, on which {owner} counts for another"
                f" {deadline - self.now():.3f} s"
            )

    def lease_revoked(self, owner: str, lease_id: int, revoked: Container[int]) -> None:
        """A process has left with the reason that its lease was revoked."""
        if lease_id not in revoked:
            self.violate(f"{owner} takes its lease {lease_id:x} for revoked, but it was not")

    # Jobs

    def pulled(self, job: Job) -> None:
        attempt = decode_job(job.payload).attempt
        if attempt in self._pulled and not self._repeats:
            self.violate(f"the job of attempt {attempt} was delivered twice")
        self._pulled.add(attempt)

    def jobs_held(self, number: int, lease_id: int) -> None:
        """A worker has pulled one job more."""
        if number > _MOST_JOBS:
            self.violate(f"{lease_id:x} holds {number} jobs at a time: more than {_MOST_JOBS}")

    def said(self, subject: str, payload: bytes) -> None:
        """A component has published something."""
        if subject.endswith(".done"):
            done = decode_done(payload)
            self._ends_told.add(done.attempt)
            self._cancel_ended(done.attempt)

    def answered(self, subject: str, payload: bytes, reply: bytes) -> None:
        """A component's request got this reply."""
        if subject.endswith(".claim") and isinstance(decode_claim_reply(reply), ClaimRefused):
            self._cancel_ended(decode_claim(payload).attempt)

    def job_ended(self, job: Job, lease_id: int) -> None:
        """A worker removes a job from the queue. No other worker gets it, so its engine must not
        continue to wait for a claim."""
        request = decode_job(job.payload)
        engine = self._engine(request.engine_id)
        if engine is None or request.attempt in self._ends_told:
            return
        assert isinstance(engine.halves, DecodeHalves)
        if engine.halves.awaits_claim(request.attempt, self.now()):
            self.violate(
                f"{lease_id:x} took the job of attempt {request.attempt} off the queue, and"
                f" {engine.setup.address} still waits for a claim"
            )

    def unsettled(self) -> str | None:
        """The first engine with unfinished work, and which; None if there is none."""
        for engine in self._engines.values():
            what = _engine_unsettled(engine)
            if what is not None:
                return f"{engine.setup.address}: {what}"
        return None

    def check_caches(self) -> None:
        """Each block of a prefix cache must contain the KV of its key."""
        for engine in self._engines.values():
            for block, key in engine.pool.cached():
                if not engine.memory.ends_with(block, key):
                    self.violate(
                        f"{engine.setup.address}: block {block} does not hold what it is cached for"
                    )

    # Cancels

    def _cancel_ended(self, attempt: str) -> None:
        took_s = self.cancels.ended(attempt)
        if took_s is not None and took_s > _CANCEL_S and self._faultless:
            self.violate(f"a cancel reached its writer after {took_s:.3f} s")

    def judge_cancels(self) -> None:
        if self._faultless and (left := self.cancels.under_way):
            self.violate(f"cancels that have not reached their writers: {left}")

    def _engine(self, engine_id: str) -> SimEngineProcess | None:
        found = (e for e in self._engines.values() if e.setup.engine_config.engine_id == engine_id)
        return next(found, None)

    # Counts

    def count_engine(self, counts: Mapping[str, Any]) -> None:
        for name, value in counts.items():
            if name == MISMATCH:
                self.violate(f"{value} commits did not fit")
            if isinstance(value, int):  # seconds are no counts
                self.counts[name] += value
            elif name == "ended":
                for _, outcome, _ in value:
                    self.counts[f"attempt {outcome}"] += 1


def _ownership(
    engine: SimEngineProcess, attempt: str, block: int, *, read: bool = False
) -> str | None:
    """The state of the attempt that allows a write into this block, or a read; None if it is not
    allowed."""
    halves = engine.halves
    if not isinstance(halves, DecodeHalves) or attempt not in halves.asked:
        return None
    _, blocks, prefix = halves.asked[attempt]
    held = {kept.block_id for kept in halves.held(attempt)}
    if halves.queued(attempt) or block not in held & (prefix if read else blocks):
        return None
    outcome = halves.outcome(attempt)
    if outcome in (Outcome.COMMITTED, Outcome.CORRUPT):
        return None
    return "in time" if outcome is None else "in quarantine"


def _blocks(engine: SimEngineProcess, landing: Landing) -> list[int]:
    """The ids of the engine's blocks that it covers."""
    memory = engine.memory
    at = landing.address - memory.base
    return [memory.block_at(i) for i in range(at, at + landing.length, memory.block_bytes)]


def _engine_unsettled(engine: SimEngineProcess) -> str | None:
    halves = engine.halves
    if requests := engine.scheduler.requests:
        return f"requests {', '.join(requests)}"
    if taken := engine.pool.taken():
        return f"blocks {taken} are taken"
    if isinstance(halves, DecodeHalves) and (what := halves.unsettled()):
        return what
    if isinstance(halves, PrefillHalves) and halves.busy:
        return "the prefill halves are busy"
    return None
