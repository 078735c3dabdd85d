"""The decisions that a decode engine has made lately, and their outcomes.

An entry is the record of a prompt; it becomes a message when `explain` asks for it.
"""

import math
import threading
from collections import deque
from collections.abc import Callable

from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.stages import stages_s
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.engine.request_ids import is_of
from dynamo_lite.policy.decision.cost_policy import side_of
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import (
    Asked,
    CostsSeen,
    Decision,
    Explained,
    Followed,
    QueueSeen,
    decode_explain,
)

#: How many decisions an engine remembers, and for how many seconds.
MOST, LONGEST_S = 4096, 900.0


class DecisionLog:
    """now: monotonic."""

    def __init__(self, config: EngineConfig, now: Callable[[], float]):
        self._config, self._now = config, now
        self._lock = threading.Lock()
        self._kept: deque[RemotePrefill] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, prefill: RemotePrefill) -> None:
        """Adds the final decision about a prompt, and forgets those that are too old."""
        oldest = prefill.decided.at - LONGEST_S
        with self._lock:
            self._kept.append(prefill)
            while self._kept[0].decided.at < oldest:
                self._kept.popleft()

    def answer(self, payload: bytes) -> bytes:
        """The reply to an `Explain`, on any thread. Raises ProtocolError."""
        wanted, now = decode_explain(payload), self._now()
        oldest = now - min(wanted.within_s, LONGEST_S)
        with self._lock:
            kept = list(self._kept)
        found = [
            prefill
            for prefill in kept
            if prefill.decided.at >= oldest
            and (not wanted.request_id or is_of(prefill.request_id, wanted.request_id))
        ]
        found = found[-wanted.last :] if wanted.last else []
        return encode(
            Explained(
                engine_id=self._config.engine_id,
                lease_id=self._config.lease_id,
                decisions=[_as_message(prefill, now) for prefill in found],
            )
        )


def _as_message(prefill: RemotePrefill, now: float) -> Decision:
    verdict, at, cached, queue, effective, rates = prefill.decided[:6]
    uncached, outcome = prefill.prompt_tokens - cached, prefill.outcome
    return Decision(
        request_id=prefill.request_id,
        age_s=now - at,
        prompt_tokens=prefill.prompt_tokens,
        cached_tokens=cached,
        verdict="remote" if prefill.is_remote else "local",
        reason=verdict.reason.value,
        queue=queue
        and QueueSeen(
            jobs=queue.jobs,
            prefill_workers=queue.prefill_workers,
            age_s=at - queue.read_at,
            tokens=queue.tokens,
            wait_s=queue.wait_s,
            takes_s=queue.takes_s,
            prefill_workers_alive=queue.prefill_workers_alive,
        ),
        thresholds=Followed.of(effective.version, effective.options),
        local_s=rates.local_s(uncached),
        remote_s=rates.remote_s(uncached),
        local_tokens_per_s=rates.local_tokens_per_s,
        remote_tokens_per_s=rates.remote_tokens_per_s,
        computed_s=prefill.computed_s,
        asked=Asked(
            attempt=prefill.attempt,
            outcome="" if outcome is None else outcome.value,
            stages_s={} if outcome is None else stages_s(prefill),
            detail=prefill.detail,
        )
        if prefill.attempt
        else None,
        costs=_costs(prefill),
    )


def _costs(prefill: RemotePrefill) -> CostsSeen | None:
    decided = prefill.decided
    if decided.opinion is None or (costs := decided.opinion.costs) is None:
        return None
    return CostsSeen(
        thresholds=side_of(decided.usual or decided.verdict),
        says=decided.opinion.word,
        local_s=costs.local_s,
        pause_s=costs.pause_s,
        remote_s=costs.remote_s,
        queue_s=costs.queue_s,
        memory_s=costs.memory_s,
        band_s=None if math.isinf(costs.band_s) else costs.band_s,
        propensity=decided.propensity,
        cost_s=prefill.cost_s,
        regret_s=prefill.regret_s,
        behind_s=costs.behind_s,
    )
