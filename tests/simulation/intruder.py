"""An attacker in the network of a graph without a secret, who replays messages.

It receives all messages. It answers claims with the grants of other claims, puts the blocks of one
job into another, and sends commits of writers that are done for attempts that are still written.
It never uses a valid grant: grants do not protect against an attacker who can.
"""

import random
from collections import Counter
from typing import Any

import msgspec

from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.prefill import (
    Committed,
    Granted,
    RemotePrefillRequest,
    decode_claim,
    decode_claim_reply,
    decode_job,
    decode_notice,
)
from tests.simulation.engine.mover import Fabric, SimMover

#: Share of all claims, jobs and grants that it uses.
_SHARE = 0.15
#: How long after a grant, or after a commit, its own commit arrives.
_FASTEST_S, _SLOWEST_S = 0.002, 0.02
#: How many grants, jobs and commits it remembers.
_KEPT = 32


class Intruder:
    """counts: receives counts of its actions."""

    def __init__(self, rng: random.Random, fabric: Fabric, counts: Counter[str]):
        self._rng, self._fabric, self._counts = rng, fabric, counts
        self._grants: list[bytes] = []
        self._commits: list[Committed] = []
        self._jobs: dict[str, RemotePrefillRequest] = {}

    def answer(self, subject: str) -> bytes | None:
        """Its answer to a request; None: the request goes on to its receiver."""
        if not subject.endswith(".claim") or not self._grants or not self._acts():
            return None
        self._counts["replayed grants"] += 1
        return self._rng.choice(self._grants)

    def answered(self, subject: str, asked: bytes, reply: bytes) -> None:
        """A request got this reply."""
        if not subject.endswith(".claim"):
            return
        answer = decode_claim_reply(reply)
        if not isinstance(answer, Granted):
            return
        self._grants = [*self._grants, reply][-_KEPT:]
        job = self._jobs.get(decode_claim(asked).attempt)
        if job is not None and self._commits and self._acts():
            self._commit_early(job)

    def pulled(self, job: Any) -> None:
        """A worker has pulled the job. Changes the blocks in its payload, or leaves it as it is."""
        request = decode_job(job.payload)
        wanted = len(request.block_ids)
        self._jobs.pop(request.attempt, None)
        others = [
            other.block_ids[:wanted]
            for other in self._jobs.values()
            if other.engine_id == request.engine_id and len(other.block_ids) >= wanted
        ]
        self._jobs[request.attempt] = request
        if len(self._jobs) > _KEPT:
            del self._jobs[next(iter(self._jobs))]
        if others and self._acts():
            self._counts["jobs with other blocks"] += 1
            changed = msgspec.structs.replace(request, block_ids=self._rng.choice(others))
            job.payload = encode_sealed(changed)

    def notified(self, target: SimMover, notice: bytes) -> None:
        """A notification has arrived."""
        said = decode_notice(notice)
        if not isinstance(said, Committed):
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
        self._counts["commits under other grants"] += 1
        commit = msgspec.structs.replace(
            self._rng.choice(self._commits), attempt=job.attempt, num_blocks=len(job.block_ids)
        )
        self._send(target, encode_sealed(commit))

    def _send(self, target: SimMover, notice: bytes) -> None:
        def arrive() -> None:
            if not target.closed:
                target.inbox.append(notice)

        self._fabric.later(self._rng.uniform(_FASTEST_S, _SLOWEST_S), arrive)

    def _acts(self) -> bool:
        return self._rng.random() < _SHARE
