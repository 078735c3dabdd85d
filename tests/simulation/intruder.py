"""A host of the KV network that replays notifications of writes.

It sends commits of writers that are done again, and for attempts that are still written. It knows
no claim of an attempt before its writer's first notification.
"""

import random
from collections import Counter
from typing import Any

import msgspec

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import (
    Held,
    RemotePrefillRequest,
    Written,
    decode_claim,
    decode_claim_reply,
    decode_job,
    decode_written,
)
from tests.simulation.engine.mover import Fabric, SimMover

#: Share of all claims and commits that it uses.
_SHARE = 0.15
#: How long after a claim, or after a commit, its own commit arrives.
_FASTEST_S, _SLOWEST_S = 0.002, 0.02
#: How many jobs and commits it remembers.
_KEPT = 32


class Intruder:
    """counts: receives counts of its actions."""

    def __init__(self, rng: random.Random, fabric: Fabric, counts: Counter[str]):
        self._rng, self._fabric, self._counts = rng, fabric, counts
        self._commits: list[Written] = []
        self._jobs: dict[str, RemotePrefillRequest] = {}

    def pulled(self, job: Any) -> None:
        """A worker has pulled the job."""
        request = decode_job(job.payload)
        self._jobs[request.attempt] = request
        if len(self._jobs) > _KEPT:
            del self._jobs[next(iter(self._jobs))]

    def answered(self, subject: str, asked: bytes, reply: bytes) -> None:
        """A request got this reply."""
        if not subject.endswith(".claim") or not isinstance(decode_claim_reply(reply), Held):
            return
        job = self._jobs.pop(decode_claim(asked).attempt, None)
        if job is not None and self._commits and self._acts():
            self._commit_early(job)

    def notified(self, target: SimMover, notice: bytes) -> None:
        """A notification has arrived."""
        said = decode_written(notice)
        if not said.last:
            return
        self._commits = [*self._commits, said][-_KEPT:]
        if self._acts():
            self._counts["replayed commits"] += 1
            self._send(target, notice)

    def _commit_early(self, job: RemotePrefillRequest) -> None:
        agents = self._fabric.agents.values()
        target = next((agent for agent in agents if agent.name == job.engine_id), None)
        if target is None:
            return
        self._counts["commits under other claims"] += 1
        commit = msgspec.structs.replace(
            self._rng.choice(self._commits), attempt=job.attempt, num_blocks=len(job.block_ids)
        )
        self._send(target, encode(commit))

    def _send(self, target: SimMover, notice: bytes) -> None:
        def arrive() -> None:
            if not target.closed:
                target.inbox.append(notice)

        self._fabric.later(self._rng.uniform(_FASTEST_S, _SLOWEST_S), arrive)

    def _acts(self) -> bool:
        return self._rng.random() < _SHARE
